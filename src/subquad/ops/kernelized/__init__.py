"""Kernelized attention: what mechanisms state (`rule`), the operators (`operator`), and their bodies (`native`, `pytorch`)."""

from subquad.ops.kernelized.rule import Inputs, KernelizedRule, Normalizer, Sums

__all__ = ["Inputs", "KernelizedRule", "Normalizer", "Sums"]
