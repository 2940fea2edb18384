"""The tokens of a batch, as key sets see them.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, n tokens, D channels, E value channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from subquad.masks import take_tokens
from subquad.ops.precision import upcast
from subquad.ops.tiles.group import Tile, TileGroup, additive_mask


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries (B, K, G, n, D), keys (B, K, n, D) and values (B, K, n, E), in float32 or a higher precision.

    Args:
        bias: (B or 1, n), 0, or `MASKED` for keys that no query may see; None: all may be seen.
        lengths: (B,), the numbers of real tokens, which come first among the positions of a sequence; None: all are real.
        span: (B, 2), the first real token and how many there are, for the compiled kernel, which reads no others. None: keys
            that are pads are masked by `bias`, and real tokens come first.
        draw: (H,), the hash keys of random blocks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    lengths: Tensor | None = None
    span: Tensor | None = None
    draw: Tensor | None = None

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor | None = None,
        lengths: Tensor | None = None,
        span: Tensor | None = None,
        draw: Tensor | None = None,
    ) -> Tokens:
        """From query (B, H, n, D), key (B, K, n, D), value (B, K, n, E); `allowed` (B or 1, n) marks keys that may be seen."""
        query, key, value = (upcast(x) for x in (query, key, value))
        bias = None if allowed is None else additive_mask(allowed, key.dtype)
        return Tokens(query.unflatten(1, (key.shape[1], -1)), key, value, bias, lengths, span, draw)

    @property
    def length(self) -> int:
        return self.query.shape[3]

    # The same tensors in all tile groups, so that their gradients can be added in place.
    @cached_property
    def queries(self) -> Tensor:
        """(B K, 1, G, n, D)."""
        return self.query.flatten(0, 1).unsqueeze(1)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (B K, 1, n, ...)."""
        return self.key.flatten(0, 1).unsqueeze(1), self.value.flatten(0, 1).unsqueeze(1)

    def tile_group(self, tiles: tuple[Tile, ...]) -> TileGroup:
        """Tiles over these queries and keys."""
        (key, value), span = self.keys, self._spans
        return TileGroup(self.queries, key, value, tiles, None, self._biases(self.bias), span, span)

    def tile_group_with(
        self, key: Tensor, value: Tensor, tiles: tuple[Tile, ...] | None = None, bias: Tensor | None = None
    ) -> TileGroup:
        """Tiles over these queries and other keys and values (B, K, m, ...), by default all pairs; `bias` is (B or 1, m)."""
        all_pairs = Tile(0, self.length, 1, 0, 0, key.shape[2])
        key, value = (x.flatten(0, 1).unsqueeze(1) for x in (key, value))
        return TileGroup(self.queries, key, value, tiles or (all_pairs,), None, self._biases(bias), self._spans)

    def _biases(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.repeat_per_head(bias).unsqueeze(1)

    @property
    def _spans(self) -> Tensor | None:
        """(B K, 1, 2)."""
        return None if self.span is None else self.span.repeat_interleave(self.key.shape[1], dim=0).unsqueeze(1)

    def keys_at(self, position: Tensor, exists: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B, K, m, ...) at `position` (B or 1, m), and their bias (B or 1, m).

        Keys that do not exist, or are pads, are 0 and masked.
        """
        bias = None if self.bias is None else self.bias.gather(1, position.expand(len(self.bias), -1))
        if self.span is not None:
            is_real = position < self.span[:, 1:]
            exists = is_real if exists is None else exists & is_real
            position = torch.where(exists, position + self.span[:, :1], 0)
        if len(position) == 1:
            key, value = (x.index_select(2, position[0]) for x in (self.key, self.value))
        else:
            key, value = (take_tokens(x, position) for x in (self.key, self.value))
        if exists is None:
            return key, value, bias
        key, value = (x.masked_fill(~exists[:, None, :, None], 0) for x in (key, value))
        mask = additive_mask(exists, key.dtype)
        return key, value, mask if bias is None else mask + bias

    def real_first(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """All keys and values (B, K, n, ...), 0 for pads, and which are real, (B, n); None: all are."""
        if self.span is None:
            return self.key, self.value, None if self.bias is None else self.bias == 0
        key, value, bias = self.keys_at(torch.arange(self.length, device=self.key.device)[None])
        assert bias is not None
        return key, value, bias == 0

    def repeat_per_head(self, x: Tensor) -> Tensor:
        """x (B, ...) as (B K, ...); (1, ...) stays as it is."""
        return x if x.shape[0] == 1 else x.repeat_interleave(self.key.shape[1], dim=0)
