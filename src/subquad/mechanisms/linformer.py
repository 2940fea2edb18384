"""Linformer: keys and values compressed along the sequence by learned matrices.

    o_i = sum_r softmax_r(s q_i . (E k)_r) (F v)_r,    E, F (rank, max_length) learned,  s = 1/sqrt(D)

Wang et al., 2020. O((N + M) rank D) time. Column j of E and F belongs to the j-th real token, so that n tokens use the first n
columns, wherever pads stand, and all `rank` compressed keys at any n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.dense import attend_masked
from subquad.engines.low_rank import bring_real_first
from subquad.errors import InputError
from subquad.families.base import Info, Mechanism, Sizes
from subquad.masks import zero_pads
from subquad.ops.precision import upcast
from subquad.state import StateTensors

Share = Literal["none", "head", "kv", "layer"]

INFO = Info(
    name="linformer",
    family="low_rank",
    engine="low_rank",
    idea="learned matrices compress keys and values along the sequence to a fixed number, to which softmax attends",
    paper="Wang et al., 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768",
    replaces_softmax=True,
    time="O((N + M) m D)",
    memory="O(M D)",
    parameters="the compressing matrices",
    refuses={
        "is_causal": "its compressed keys mix all positions, the future included",
        "decode": "its compressed keys mix all positions, so a new token changes all of them",
        "attn_mask": "a compressed key stands for all positions, so no pair of a query and a key can be masked alone",
        "dropout_p": "its weights are of compressed keys, so no weight of a single key can be dropped",
        "functional": "it learns its matrices; use subquad.Attention(dim, heads, method='linformer') or "
        "Linformer().build(heads=..., head_dim=...)",
    },
)


@dataclass(frozen=True, kw_only=True)
class Linformer(Mechanism):
    """Attention to compressed keys and values.

    Args:
        rank: how many compressed keys there are.
        max_length: the most keys that a call may bring, pads included.
        share: what has matrices of its own. "none": each key-value head an E and an F. "head": all heads share one E and one F.
            "kv": E and F are one matrix too. "layer": the same one matrix, which all layers of a model share besides. Layers on
            their own cannot see each other: `second.mechanism.borrow_parameters(first.mechanism)`.
    """

    info: ClassVar[Info] = INFO
    rank: int = 256
    max_length: int = 4096
    share: Share = "head"

    def __post_init__(self) -> None:
        self._require_count("rank", "max_length")
        self._require_choice("share", get_args(Share))

    def for_length(self, length: int) -> Linformer:
        return replace(self, max_length=length)

    @property
    def shares_parameters(self) -> bool:
        return self.share == "layer"

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        names = ("projection",) if self.share in ("kv", "layer") else ("key_projection", "value_projection")
        heads = (sizes.kv_heads,) if self.share == "none" else ()
        # At full length, a compressed key then starts as large as a key.
        return {name: torch.randn(*heads, self.rank, self.max_length) * self.max_length**-0.5 for name in names}

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        length = call.key.shape[2]
        if length > self.max_length:
            raise InputError(
                f"linformer has one column a key, max_length={self.max_length} of them; got {length} keys. "
                "Build it with a larger max_length, or pass fewer keys."
            )
        key = self._compress(call, call.key, "key_projection")
        value = self._compress(call, call.value, "value_projection")
        return attend_masked(upcast(call.query), key, value, None, call.scale).to(call.query.dtype), None

    def _compress(self, call: Call, x: Tensor, name: str) -> Tensor:
        """(B, K, M, D) -> (B, K, rank, D)."""
        weight = call.weights[name if name in call.weights else "projection"]
        x = upcast(bring_real_first(zero_pads(x, call.key_padding_mask), call.key_padding_mask))
        columns = weight[..., : x.shape[2]].to(x.dtype)
        return torch.einsum("krm,bkmd->bkrd" if self.share == "none" else "rm,bkmd->bkrd", columns, x)
