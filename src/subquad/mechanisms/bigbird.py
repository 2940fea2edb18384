"""BigBird: blocks of neighbours, of random tokens, and of global tokens.

In blocks of C tokens, the queries of block b see the keys of

    window    blocks b - w to b + w, where the window is 2w + 1 blocks wide
    random    r blocks, drawn for every head and block from all the others
    global    ITC: the first and the last blocks, which moreover see all; ETC: extra tokens, learned, that all see

and j <= i when causal. Zaheer et al., 2020. O(N (window + random + global) C D) time. Blocks count real tokens only.

Random blocks are drawn over the whole sequence. When causal they are drawn among the blocks before the window, and the last
blocks are not global, since later tokens would move them. A query block's draw is then a reservoir sample (Vitter, 1985): the
draw of the block before, in which the block that has just left the window takes the place of a random one with probability
r/n, n blocks being there to draw from. So each draw is uniform, and a block that was let go is never seen again: the state of
the window, the global tokens and the drawn blocks has constant size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subquad.engines.block_sparse import Globals, Layout
from subquad.engines.block_sparse.key_sets import Blocks, KeySet, Scattered
from subquad.engines.call import Call
from subquad.families.base import Info, Sizes
from subquad.families.random_blocks import drawn, head_keys, reservoir
from subquad.families.sparse import Pattern, real_lengths, refuses

Mode = Literal["itc", "etc"]
MODES: tuple[Mode, ...] = ("itc", "etc")

INFO = Info(
    name="bigbird",
    family="sparse",
    engine="block_sparse",
    idea="blocks of neighbours, a few random blocks and a few global blocks",
    paper="Zaheer et al., 2020, Big Bird: Transformers for Longer Sequences, arXiv:2007.14062",
    time="O(N (w + r + g) C D), w + r + g blocks of C tokens",
    memory="O(N r D), the random blocks",
    state="O((w + r + g) C D), the window, the global and the drawn blocks",
    parameters="with mode='etc' the extra global tokens",
    random="the random blocks",
    refuses=refuses(global_mask="its global tokens are whole blocks at the ends; longformer takes any tokens"),
)


@dataclass(frozen=True, kw_only=True)
class BigBird(Pattern):
    """Window, random and global blocks.

    Args:
        block: C, tokens in a block.
        window: how many blocks wide the window is; odd.
        random: r, how many random blocks each block of queries sees.
        globals: how many blocks are global: "itc" takes half of them (rounded up) at the beginning, the others at the end.
        mode: "itc", global tokens are tokens of the sequence; "etc", extra ones are put before it, whose keys and values are
            learned, and dropped after.
        seed: what the random blocks are drawn from.
    """

    info: ClassVar[Info] = INFO
    block: int = 64
    window: int = 3
    random: int = 3
    globals: int = 2
    mode: Mode = "itc"
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_count("block", "window")
        if self.window % 2 == 0:
            self._refuse("window", "is odd, so that it has a middle")
        self._require_whole("random", "globals")
        self._require_choice("mode", MODES)
        self._require_seed()

    @property
    def refuses(self) -> Mapping[str, str]:
        if self.mode == "itc":
            return self.info.refuses
        return {
            **self.info.refuses,
            "functional": "mode='etc' learns its global tokens; use subquad.Attention, or BigBird(...).build(...)",
        }

    @property
    def fixes_value_dim(self) -> bool:
        return self.mode == "etc"

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"draw": head_keys(sizes.heads, self.seed)}

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        if self.mode == "itc":
            return {}
        tokens = self.globals * self.block
        return {
            "global_key": torch.randn(sizes.kv_heads, tokens, sizes.head_dim),
            "global_value": torch.randn(sizes.kv_heads, tokens, sizes.value_dim) * sizes.value_dim**-0.5,
        }

    def without_values(self) -> BigBird:
        return replace(self, mode="itc", globals=0) if self.mode == "etc" else self

    def layout(self, call: Call) -> Layout:
        first, last = self._ends(call.is_causal)
        side = self.window // 2
        sets: list[KeySet] = [Blocks(self.block, side, 0 if call.is_causal else side, call.is_causal)]
        if self.random and call.seen + call.key.shape[2] > self.block:  # more than one block
            sets.append(self._scattered(call, first, last, side))
        return Layout(
            groups=((None, tuple(sets)),),
            is_causal=call.is_causal,
            globals=self._globals(call, first, last) if first + last else None,
            first=first * self.block,
            extra=(call.weights["global_key"], call.weights["global_value"]) if self.mode == "etc" else None,
        )

    def _ends(self, is_causal: bool) -> tuple[int, int]:
        """How many blocks are global at the beginning and at the end."""
        if self.mode == "etc":
            return 0, 0
        return (self.globals + 1) // 2, 0 if is_causal else self.globals // 2

    def _globals(self, call: Call, first: int, last: int) -> Globals | None:
        """The tokens of the first and the last blocks of each row, by their number among its real tokens."""
        size, lengths = min(self.block, call.key.shape[2]), real_lengths(call)[:, None]
        blocks = (lengths + size - 1) // max(size, 1)  # (B or 1, 1)
        first, last = (min(n, -(-call.key.shape[2] // max(size, 1))) for n in (first, last))
        within = torch.arange(size, device=lengths.device)
        front = torch.arange(first, device=lengths.device).expand(lengths.shape[0], -1)
        back = blocks - 1 - torch.arange(last, device=lengths.device)
        back = torch.where(back >= first, back, blocks)  # already global: a block that is not there
        index = (torch.cat([front, back], dim=1)[:, :, None] * size + within).flatten(1)
        there = index < lengths
        return torch.where(there, index, 0), there

    def _scattered(self, call: Call, first: int, last: int, side: int) -> Scattered:
        keys = call.weights["draw"]
        total = -(-(call.seen + call.key.shape[2]) // self.block)
        block = torch.arange(-(-call.key.shape[2] // self.block), device=keys.device)
        heads = torch.arange(call.query.shape[1], device=keys.device)[:, None]
        if call.is_causal:
            samples = reservoir(keys, min(self.random, total), total)  # (H, total + 1, r)

            def choose(block: Tensor, heads: Tensor) -> Tensor:
                sample = samples[heads, (block - side - first).clamp(min=0)]
                return torch.where(sample < 0, -1, sample + first)

            return Scattered(self.block, self.random, side, choose(block, heads)[None], choose)
        blocks = (real_lengths(call)[:, None, None] + self.block - 1) // self.block  # (B or 1, 1, 1)
        index = drawn(keys[heads], block, blocks, self.random, first=first, last=last, side=side, most=total)
        return Scattered(self.block, self.random, side, index, lambda block, heads: index)
