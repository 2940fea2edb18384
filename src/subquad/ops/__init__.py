"""The operators: calls into the compiled kernels, and what chooses between those and PyTorch."""

from subquad.ops.dispatch import disabled

__all__ = ["disabled"]
