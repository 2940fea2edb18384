"""One token per sequence that attends to the rows of a state, in compiled code (csrc/rows/step.cpp).

B batch, H query heads, K key-value heads, S rows, D channels, Dv value channels, R rounds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from subquad.ops import native_call, native_library

RuleKind = Literal["window", "blocks", "block_ends", "selected"]
_KINDS = get_args(RuleKind)
# struct RowsCall of csrc/rows/step.cpp, and its enum RuleKind, which has the order of the literal here.
_SIZES = ("batch", "heads", "kv_heads", "rows", "segments", "extra", "channels", "value_channels")
_RULE = ("rules", "first_global", "segment_size", "selected", "rounds", "chunk", "is_shared")
_TOKEN = ("query", "new_key", "new_value", "out")
_ROWS = ("key", "value", "number", "bucket", "segment_key", "segment_value", "segment", "extra_key", "extra_value")
_POINTERS = ("rule", "rule_heads", "selected_blocks", "query_bucket", "key_bucket", "count_in", "count_out")
_Call = native_call.structure("RowsCall", (*_SIZES, *_RULE, "threads"), ("scale",), (*_TOKEN, *_ROWS), _POINTERS)
_ONE_THREAD_WORK = 2**19  # as for all kernels


class RowRule(NamedTuple):
    """Which rows a query sees; csrc/rows/step.cpp says what the numbers mean for each kind."""

    kind: RuleKind
    size: int
    before: int = 0
    rest: int = 0
    heads: tuple[int, ...] | None = None  # query heads; None: all


class Pattern(NamedTuple):
    """All rules of a state: those of a block-sparse pattern, or those of buckets."""

    rules: Sequence[RowRule] = ()
    first_global: int = 0  # so many first tokens are seen by all, and see all
    segment_size: int = 0  # tokens
    extra: tuple[Tensor, Tensor] | None = None  # keys (K, m, D) and values (K, m, Dv) that every query sees
    rounds: int = 0  # of buckets
    chunk: int = 0  # tokens of its bucket that a query sees
    is_shared: bool = False  # a query sees its own key only if it sees no other


class RowsStep:
    """The kernel for tokens of one shape, and the same strides."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, pattern: Pattern) -> None:
        """From tensors (B, H or K, 1, ...) like those of every step, in the precision to compute in, with adjacent channels."""
        heads, self._shape = query.shape[1], (*query.shape[:3], value.shape[3])
        table = [[_KINDS.index(r.kind), r.size, r.before, r.rest] for r in pattern.rules]
        members = [[r.heads is None or head in r.heads for head in range(heads)] for r in pattern.rules]
        self._rule = torch.tensor(table, dtype=torch.int64), torch.tensor(members, dtype=torch.bool)
        self._extra = [x.to(key.dtype).contiguous().unsqueeze(0) for x in pattern.extra or ()]
        numbers = dict(
            zip(_SIZES, (*query.shape[:2], key.shape[1], 0, 0, self._extra[0].shape[2] if self._extra else 0), strict=False)
        )
        numbers |= {"channels": key.shape[3], "value_channels": value.shape[3], "rules": len(table)}
        numbers |= {"first_global": pattern.first_global, "segment_size": pattern.segment_size, "rounds": pattern.rounds}
        numbers |= {"chunk": pattern.chunk, "is_shared": pattern.is_shared}
        views = dict(zip(_TOKEN, (query, key, value, query.new_empty(self._shape)), strict=True))
        views |= dict(zip(("extra_key", "extra_value"), self._extra, strict=False))
        pointers: dict[str, Any] = dict(zip(("rule", "rule_heads"), self._rule, strict=True))
        self._call = native_call.arguments(_Call, {**numbers, "scale": scale}, views, pointers, 0)
        self._work_of_row = query.shape[:2].numel() * (key.shape[3] + value.shape[3])
        library = native_library.load()
        self._run = getattr(library, f"subquad_rows_step_{native_call.dtype_name(query)}")

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        length: int,
        buffers: dict[str, Tensor],
        segments: dict[str, Tensor],
        count: Tensor,
        new_count: Tensor,
        *,
        selected: Tensor | None = None,
        buckets: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The output (B, H, 1, Dv); the token becomes row `length` - 1 of the buffers, and `new_count` is `count` + 1.

        Args:
            buffers: "key", "value", "number" and, for buckets, "bucket": (B, K, S, ...) with at least `length` rows.
            segments: "segment", "segment_key" and "segment_value", or nothing.
            selected: (B, H, r), the blocks of rules of that kind.
            buckets: of the queries (B, H, R), and of the keys (B, K, R).
        """
        out = query.new_empty(self._shape)
        call = _Call.from_buffer_copy(self._call)  # not shared by threads
        call.rows = length
        call.query.data, call.new_key.data, call.new_value.data = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.out.data, call.count_in, call.count_out = out.data_ptr(), count.data_ptr(), new_count.data_ptr()
        for name, x in (*buffers.items(), *segments.items()):
            setattr(call, name, native_call.View(x.data_ptr(), *x.stride()[:3]))
        if segments:
            call.segments = segments["segment"].shape[2]
        if selected is not None:
            call.selected, call.selected_blocks = selected.shape[-1], selected.data_ptr()
        if buckets is not None:
            call.query_bucket, call.key_bucket = (x.data_ptr() for x in buckets)
        if self._work_of_row * length > _ONE_THREAD_WORK:
            call.threads = torch.get_num_threads()
        if result := self._run(ctypes.byref(call)):
            raise native_call.error(result, "rows_step", {"query": query, "key": key, "value": value})
        return out
