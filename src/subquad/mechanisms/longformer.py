"""Longformer: a sliding window, and a few global tokens that attend to all tokens and are attended to by all.

    o_i = sum_j softmax_j(s q_i . k_j) v_j    over |i - j| <= window * d,  (i - j) mod d = 0,  or i global, or j global

and j <= i when causal; d is the head's dilation. Beltagy et al., 2020. O(N (window + g) D) time for g global tokens. With
`global_projections` the rows of global tokens use separate projections, as the published layer does:

    o_i = sum_j softmax_j(s (W_q x_i) . (W_k x_j)) W_v x_j    for global i, x the tokens

The published layer counts both sides: its `attention_window` is twice `window`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.block_sparse import Layout
from subquad.engines.call import Call
from subquad.errors import InputError, OptionError
from subquad.families.base import Info, Sizes
from subquad.families.sparse import SparseMechanism, refuses
from subquad.ops.sparse.global_tokens import FirstTokens
from subquad.ops.sparse.key_sets import Window

INFO = Info(
    name="longformer",
    family="sparse",
    engine="block_sparse",
    idea="a sliding window, and a few global tokens that attend to all and that all attend to",
    paper="Beltagy et al., 2020, Longformer: The Long-Document Transformer, arXiv:2004.05150",
    time="O(N (w + g) D), w keys on each side, g global tokens",
    memory="O(N D)",
    state="O((w + g) D), the window and the global tokens",
    parameters="with global_projections=True, the projections for the rows of global tokens",
    global_mask=True,
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Longformer(SparseMechanism):
    """A window and global tokens.

    Args:
        window: how many steps a query looks to each side; when causal, to the left only.
        dilation: the number of tokens in a step, for all heads or as a tuple with one number per head.
        num_global: how many of the first real tokens are global, unless a call passes a `global_mask`.
        global_projections: use separate learned projections for the rows of global tokens: for their queries, and for the keys
            and values that they attend to. They project the tokens themselves, so the module needs their width, `dim`. Rotary
            positions are not applied to these rows.
    """

    info: ClassVar[Info] = INFO
    window: int = 256
    dilation: int | tuple[int, ...] = 1
    num_global: int = 1
    global_projections: bool = False

    def __post_init__(self) -> None:
        self._require_whole("window", "num_global")
        self._require_flag("global_projections")
        if not isinstance(self.dilation, tuple):
            self._require_count("dilation")
        elif not self.dilation or any(isinstance(d, bool) or not isinstance(d, int) or d < 1 for d in self.dilation):
            self._refuse("dilation", "must be an integer of at least 1, or a tuple of them, one per head")
        elif max(self.dilation) >= 2**31:
            self._refuse("dilation", "must be an integer below 2**31 for each head")

    @property
    def refuses(self) -> Mapping[str, str]:
        if not self.global_projections:
            return self.info.refuses
        return {
            **self.info.refuses,
            "decode": "with global_projections=True, global tokens attend to other keys and values than those in a state",
            "functional": "global_projections=True needs learned weights; use subquad.Attention, or Longformer(...).build(...)",
        }

    @property
    def reads_tokens(self) -> bool:
        return self.global_projections

    @property
    def fixes_value_dim(self) -> bool:
        return self.global_projections

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        self._require_heads(sizes.heads)
        if not self.global_projections:
            return {}
        if sizes.dim is None:
            raise OptionError(
                "longformer with global_projections=True projects the hidden states, so it needs their width; got dim=None. "
                "Pass dim=... to build."
            )
        rows = {
            "query": sizes.heads * sizes.head_dim,
            "key": sizes.kv_heads * sizes.head_dim,
            "value": sizes.kv_heads * sizes.value_dim,
        }
        weights = {f"global_{name}_weight": torch.randn(n, sizes.dim) * sizes.dim**-0.5 for name, n in rows.items()}
        return weights | {f"global_{name}_bias": torch.zeros(n) for name, n in rows.items()}

    def without_values(self) -> Longformer:
        return replace(self, global_projections=False)

    def layout(self, call: Call) -> Layout:
        if call.global_mask is not None and (call.state is not None or call.return_state):
            raise InputError(
                "longformer cannot decode with a global_mask: a later token might be global and attend to every earlier key, "
                "so a state could never drop any. Use Longformer(num_global=...)."
            )
        return Layout(
            head_groups=tuple((heads, (self._window(dilation, call),)) for heads, dilation in self._head_groups(call)),
            global_rule=FirstTokens(self.num_global),
            first_global=self.num_global,
            global_rows=self._global_rows(call) if self.global_projections else None,
        )

    def _require_heads(self, heads: int) -> None:
        if isinstance(self.dilation, tuple) and len(self.dilation) != heads:
            raise InputError(
                f"longformer's dilation must have one number per head; got {len(self.dilation)} for {heads} heads."
            )

    def _window(self, dilation: int, call: Call) -> Window:
        return Window(self.window, 0 if call.is_causal else self.window, dilation)

    def _head_groups(self, call: Call) -> list[tuple[tuple[int, ...] | None, int]]:
        """Groups of heads with equal dilation, and that dilation."""
        if isinstance(self.dilation, int):
            return [(None, self.dilation)]
        self._require_heads(call.query.shape[1])
        distinct = sorted(set(self.dilation))
        if len(distinct) == 1:
            return [(None, distinct[0])]
        return [(tuple(head for head, d in enumerate(self.dilation) if d == dilation), dilation) for dilation in distinct]

    def _global_rows(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by the separate projections."""
        assert call.hidden is not None
        x = call.hidden
        if call.key_padding_mask is not None:
            x = x.masked_fill(~call.key_padding_mask.unsqueeze(-1), 0)

        def project(name: str, heads: int) -> Tensor:
            weight, bias = (call.weights[f"global_{name}_{part}"].to(x.dtype) for part in ("weight", "bias"))
            return F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)

        heads, kv_heads = call.query.shape[1], call.key.shape[1]
        return project("query", heads), project("key", kv_heads), project("value", kv_heads)
