"""The tokens of a batch, as key sets see them.

B batch, H query heads, K key-value heads, G = H / K query heads per key-value head, n tokens, D channels, E value channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subquad.ops.precision import upcast
from subquad.ops.tiles.group import Tile, TileGroup, additive_mask


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries (B, K, G, n, D), keys (B, K, n, D) and values (B, K, n, E), in float32 or a higher precision.

    Args:
        bias: (B or 1, n), 0, or `MASKED` for keys that no query may see; None: all may be seen.
        lengths: (B or 1,), the numbers of real tokens, which come first.
        draw: (H,), the hash keys of random blocks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    lengths: Tensor | None = None
    draw: Tensor | None = None

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor | None = None,
        lengths: Tensor | None = None,
        draw: Tensor | None = None,
    ) -> Tokens:
        """From query (B, H, n, D), key (B, K, n, D), value (B, K, n, E); `allowed` (B, n) marks the keys that may be seen."""
        query, key, value = (upcast(x) for x in (query, key, value))
        bias = None if allowed is None else additive_mask(allowed, key.dtype)
        return Tokens(query.unflatten(1, (key.shape[1], -1)), key, value, bias, lengths, draw)

    @property
    def length(self) -> int:
        return self.query.shape[3]

    def tile_group(self, tiles: tuple[Tile, ...]) -> TileGroup:
        """Tiles over these queries and keys."""
        return self.tile_group_with(self.key, self.value, tiles, self.bias)

    def tile_group_with(
        self, key: Tensor, value: Tensor, tiles: tuple[Tile, ...] | None = None, bias: Tensor | None = None
    ) -> TileGroup:
        """Tiles over these queries and other keys and values (B, K, m, ...), by default all pairs; `bias` is (B or 1, m)."""
        all_pairs = Tile(0, self.length, 1, 0, 0, key.shape[2])
        query, key, value = (x.flatten(0, 1).unsqueeze(1) for x in (self.query, key, value))
        bias = None if bias is None else self.repeat_per_head(bias).unsqueeze(1)
        return TileGroup(query, key, value, tiles or (all_pairs,), bias=bias)

    def repeat_per_head(self, x: Tensor) -> Tensor:
        """x (B, ...) as (B K, ...); (1, ...) stays as it is."""
        return x if x.shape[0] == 1 else x.repeat_interleave(self.key.shape[1], dim=0)
