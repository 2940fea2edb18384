"""What the bucketed mechanisms share: they say which bucket a token is in, the engine does the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from subquad.engines import bucketed
from subquad.engines.bucketed import Rule
from subquad.engines.call import Call
from subquad.families.base import Mechanism
from subquad.state import StateTensors

_CHOSEN_PAIRS: Mapping[str, str] = {
    "cross": "a query is sorted among the keys of its own sequence, by its position in it",
    "attn_mask": "a mask of all pairs costs the square of the length that the buckets save; use key_padding_mask for pads",
    "dropout_p": "the fused kernel keeps no attention weights that could be dropped; put dropout on the output instead",
}


def refuses(**more: str) -> Mapping[str, str]:
    """What no bucketed mechanism can do, and `more`."""
    return {**_CHOSEN_PAIRS, **more}


class Bucketed(Mechanism):
    """A mechanism on the bucketed engine."""

    @abstractmethod
    def rule(self, call: Call) -> Rule:
        """How many buckets and rounds there are, and how far a query sees in its bucket."""

    @abstractmethod
    def bucket_of(self, x: Tensor, call: Call) -> Tensor:
        """The buckets (B, h, R, n) of x (B, h, n, D), which are queries or keys."""

    def scores(self, call: Call) -> tuple[Tensor, float]:
        """The keys that queries are compared with, and the scale of their products."""
        return call.key, call.key.shape[-1] ** -0.5 if call.scale is None else call.scale

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        rule = self.rule(call)
        query_bucket = self.bucket_of(call.query, call)
        key, scale = self.scores(call)
        return bucketed.attend(
            call.query,
            key,
            call.value,
            query_bucket,
            query_bucket if rule.shared else self.bucket_of(call.key, call),
            rule,
            key_padding_mask=call.key_padding_mask,
            scale=scale,
            seen=call.seen,
            past=call.past,
            return_state=call.return_state,
        )
