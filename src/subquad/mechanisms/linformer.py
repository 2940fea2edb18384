"""Linformer: learned matrices compress keys and values along the sequence.

    o_i = sum_r softmax_r(s q_i . (E k)_r) (F v)_r,    E, F (rank, max_length) learned,  s = 1/sqrt(D)

Wang et al., 2020. O((N + M) rank D) time. Column j of E and F belongs to the j-th real token, so n tokens use the first n
columns, wherever the pads are. There are always `rank` compressed keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.low_rank import attend, real_tokens_first
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
    idea="learned matrices compress the keys and values of a sequence to a fixed number, which queries attend to",
    paper="Wang et al., 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768",
    replaces_softmax=True,
    time="O((N + M) m D)",
    memory="O(M D)",
    parameters="the compression matrices",
    refuses={
        "is_causal": "its compressed keys mix all positions, including future ones",
        "decode": "its compressed keys mix all positions, so a new token changes all of them",
        "attn_mask": "a compressed key mixes all positions, so no single pair can be masked",
        "dropout_p": "its attention weights belong to compressed keys, so no weight of a single key can be dropped",
        "functional": "its matrices are learned; use subquad.Attention(dim, heads, method='linformer') or "
        "Linformer().build(heads=..., head_dim=...)",
    },
)


@dataclass(frozen=True, kw_only=True)
class Linformer(Mechanism):
    """Attention to compressed keys and values.

    Args:
        rank: the number of compressed keys.
        max_length: the largest number of keys in a call, pads included.
        share: which matrices are shared. "none": every key-value head has its own E and F. "head": all heads share E and F.
            "kv": in addition E and F are one matrix. "layer": in addition all layers of a model share that matrix. For layers
            outside a model, call `second.mechanism.borrow_parameters(first.mechanism)`.
    """

    info: ClassVar[Info] = INFO
    rank: int = 256
    max_length: int = 4096
    share: Share = "head"

    def __post_init__(self) -> None:
        self._require_rows("rank")
        self._require_rows("rank", "max_length", most=2**31)
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
                f"linformer's matrices have one column per key, so the keys must be at most max_length={self.max_length}; "
                f"got {length}. Build it with a larger max_length, or pass fewer keys."
            )
        key = self._compress(call, call.key, "key_projection")
        value = self._compress(call, call.value, "value_projection")
        return attend(upcast(call.query), key, value, None, call.scale).to(call.query.dtype), None

    def _compress(self, call: Call, x: Tensor, name: str) -> Tensor:
        """(B, K, M, D) -> (B, K, rank, D)."""
        weight = call.weights[name if name in call.weights else "projection"]
        x = upcast(real_tokens_first(zero_pads(x, call.key_padding_mask), call.key_padding_mask))
        columns = weight[..., : x.shape[2]].to(x.dtype)
        return torch.einsum("krm,bkmd->bkrd" if self.share == "none" else "rm,bkmd->bkrd", columns, x)
