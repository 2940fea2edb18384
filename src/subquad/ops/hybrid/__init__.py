"""Hybrid attention: what a call consists of (`rule`), the operators (`operator`), and their bodies (`native`, `pytorch`)."""

from subquad.ops.hybrid.rule import HybridRule, Inputs

__all__ = ["HybridRule", "Inputs"]
