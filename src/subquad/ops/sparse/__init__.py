"""Sparse attention over tiles."""
