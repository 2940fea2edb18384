"""Longformer: a sliding window, and a few global tokens that all see and that see all.

    o_i = sum_j softmax_j(s q_i . k_j) v_j    over |i - j| <= window * d,  (i - j) mod d = 0,  or i global, or j global

and j <= i when causal; d is the head's dilation. Beltagy et al., 2020. O(N (window + g) D) time for g global tokens. With
`global_projections` the rows of global tokens use projections of their own, as the published layer does:

    o_i = sum_j softmax_j(s (W_q x_i) . (W_k x_j)) W_v x_j    for global i, x the tokens

The published layer counts both sides: its `attention_window` is twice our `window`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.engines.block_sparse import Globals, Layout
from subquad.engines.block_sparse.key_sets import Window
from subquad.engines.call import Call
from subquad.errors import InputError, OptionError
from subquad.families.base import Info, Sizes
from subquad.families.sparse import Pattern, real_lengths, refuses

INFO = Info(
    name="longformer",
    family="sparse",
    engine="block_sparse",
    idea="a sliding window, and a few global tokens that all see and that see all",
    paper="Beltagy et al., 2020, Longformer: The Long-Document Transformer, arXiv:2004.05150",
    time="O(N (w + g) D), w keys to each side, g global tokens",
    memory="O(N D)",
    state="O((w + g) D), the window and the global tokens",
    parameters="with global_projections=True the projections of the global rows",
    global_mask=True,
    refuses=refuses(),
)


@dataclass(frozen=True, kw_only=True)
class Longformer(Pattern):
    """A window and global tokens.

    Args:
        window: how many steps to each side a query sees; when causal, to the left only.
        dilation: how many tokens a step is, for all heads, or one number for each.
        num_global: how many of the first real tokens are global; a `global_mask` in a call says so instead. (How many it names
            is read from it, which breaks the graph of torch.compile.)
        global_projections: project the global rows' queries, and the keys and values they meet, from the tokens by weights of
            their own. Reads the tokens, so it is built with `dim`. Rotary positions do not reach these rows.
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
            self._refuse("dilation", "is a whole number of at least 1, or a tuple with one for each head")

    @property
    def refuses(self) -> Mapping[str, str]:
        if not self.global_projections:
            return self.info.refuses
        return {
            **self.info.refuses,
            "decode": "global_projections=True gives global rows keys and values that a state does not hold",
            "functional": "global_projections=True is learned; use subquad.Attention, or config.build(...)",
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
            raise OptionError("longformer with global_projections=True reads the tokens: build it with their width, dim=...")
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
                "a global_mask and a decode state do not go together: a later token may be global and see every earlier key, "
                "so none could be forgotten. Use Longformer(num_global=...)."
            )
        return Layout(
            groups=tuple((heads, (self._window(dilation, call),)) for heads, dilation in self._heads(call)),
            is_causal=call.is_causal,
            globals=self._globals(call),
            chosen=call.global_mask,
            first=self.num_global,
            rows=self._rows(call) if self.global_projections else None,
        )

    def _require_heads(self, heads: int) -> None:
        if isinstance(self.dilation, tuple) and len(self.dilation) != heads:
            raise InputError(f"longformer's dilation has one number for each head; got {len(self.dilation)} for {heads} heads.")

    def _window(self, dilation: int, call: Call) -> Window:
        return Window(self.window, 0 if call.is_causal else self.window, dilation)

    def _heads(self, call: Call) -> list[tuple[tuple[int, ...] | None, int]]:
        """Groups of heads, and the dilation of each."""
        if isinstance(self.dilation, int):
            return [(None, self.dilation)]
        self._require_heads(call.query.shape[1])
        different = sorted(set(self.dilation))
        if len(different) == 1:
            return [(None, different[0])]
        return [(tuple(h for h, d in enumerate(self.dilation) if d == one), one) for one in different]

    def _globals(self, call: Call) -> Globals | None:
        """The first tokens of each row."""
        if call.global_mask is not None or not self.num_global or not call.key.shape[2]:
            return None
        index = torch.arange(min(self.num_global, call.key.shape[2]), device=call.key.device)[None]
        return index, index < real_lengths(call)[:, None]

    def _rows(self, call: Call) -> tuple[Tensor, ...]:
        assert call.hidden is not None
        x = call.hidden
        if call.key_padding_mask is not None:
            x = x.masked_fill(~call.key_padding_mask.unsqueeze(-1), 0)

        def project(name: str, heads: int) -> Tensor:
            weight, bias = (call.weights[f"global_{name}_{part}"].to(x.dtype) for part in ("weight", "bias"))
            return F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)

        heads, kv_heads = call.query.shape[1], call.key.shape[1]
        return project("query", heads), project("key", kv_heads), project("value", kv_heads)
