"""What the bucketed mechanisms share: each assigns tokens to buckets, and the bucketed engine attends inside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from subquad.engines import bucketed
from subquad.engines.bucketed import Rule
from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import Step
from subquad.families.base import Mechanism
from subquad.state import StateTensors

_CHOSEN_PAIRS: Mapping[str, str] = {
    "cross": "a query is sorted among the keys of its own sequence, by its position in it",
    "attn_mask": "a mask of all pairs has the quadratic cost that the buckets avoid; use key_padding_mask for pads",
    "dropout_p": "its fused kernel stores no attention weights to drop; apply dropout to the output instead",
}


def refuses(**more: str) -> Mapping[str, str]:
    """The reasons of every bucketed mechanism, and `more`."""
    return {**_CHOSEN_PAIRS, **more}


class Bucketed(Mechanism):
    """A mechanism on the bucketed engine."""

    @abstractmethod
    def rule(self, call: Call) -> Rule:
        """The number of buckets and rounds, and how many keys of its bucket a query sees."""

    @abstractmethod
    def bucket_of(self, x: Tensor, call: Call) -> Tensor:
        """The buckets (B, h, R, n) of queries or keys x (B, h, n, D)."""

    def scored(self, call: Call) -> Call:
        """The call with the keys and the scale that scores are computed with."""
        return call

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        rule = self.rule(call)
        query_bucket = self.bucket_of(call.query, call)
        key_bucket = query_bucket if rule.shared else self.bucket_of(call.key, call)
        return bucketed.attend(self.scored(call), query_bucket, key_bucket, rule)

    def step(self, call: Call) -> Step | None:
        rule = self.rule(call)

        def sort(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            query_bucket = self.bucket_of(query, call)
            key_bucket = query_bucket if rule.shared else self.bucket_of(key, call)
            return self.scored(replace(call, query=query, key=key)).key, query_bucket, key_bucket

        return bucketed.prepare_step(self.scored(call), sort, rule)

    def state_spec(self, call: Call) -> StateSpec:
        return bucketed.state_spec(self.scored(call), self.rule(call))
