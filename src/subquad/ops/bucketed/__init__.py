"""Softmax attention inside buckets: the `rule`, the operators (`operator`), and their bodies (`native`, `pytorch`)."""

from subquad.ops.bucketed.operator import attend
from subquad.ops.bucketed.rule import Rule

__all__ = ["Rule", "attend"]
