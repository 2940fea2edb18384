"""BigBird: a window of blocks, random blocks, and global blocks.

The sequence is cut into blocks of C tokens. The queries of block b attend to the keys of

    window    blocks b - w to b + w, where the window is 2w + 1 blocks wide
    random    r blocks, drawn for every head and block from all the others
    global    ITC: the first and the last blocks, which also attend to all; ETC: extra learned tokens

and j <= i when causal. Zaheer et al., 2020. O(N (window + random + global) C D) time. Positions count real tokens only.

Random blocks are drawn from the whole sequence. When causal, they are drawn from the blocks before the window, and the last
blocks are not global, since every new token would move them. The random blocks of a query block are then a reservoir sample
(Vitter, 1985): those of the query block before, where the block that has just left the window replaces a random one with
probability r/n, n being the number of blocks to draw from. So every sample is uniform, and a block that was replaced is never
needed again: the state, which holds the window, the global tokens and the random blocks, has constant size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subquad.engines.block_sparse import GlobalTokens, Layout
from subquad.engines.block_sparse.key_sets import Blocks, KeySet, SelectedBlocks
from subquad.engines.call import Call
from subquad.engines.state_spec import is_readable
from subquad.families.base import Info, Sizes
from subquad.families.random_blocks import draw_blocks, head_keys, reservoir_samples, running_samples
from subquad.families.sparse import SparseMechanism, real_lengths, refuses

Mode = Literal["itc", "etc"]
MODES: tuple[Mode, ...] = ("itc", "etc")

INFO = Info(
    name="bigbird",
    family="sparse",
    engine="block_sparse",
    idea="a window of blocks, a few random blocks and a few global blocks",
    paper="Zaheer et al., 2020, Big Bird: Transformers for Longer Sequences, arXiv:2007.14062",
    time="O(N (w + r + g) C D), w + r + g blocks of C tokens",
    memory="O(N r D), the random blocks",
    state="O((w + r + g) C D), the window, the global and the random blocks",
    parameters="with mode='etc', the extra global tokens",
    random="the random blocks",
    refuses=refuses(global_mask="its global tokens are whole blocks at both ends; use longformer, which accepts any tokens"),
)


@dataclass(frozen=True, kw_only=True)
class BigBird(SparseMechanism):
    """Window, random and global blocks.

    Args:
        block: C, the number of tokens in a block.
        window: the width of the window in blocks; odd.
        random: r, the number of random blocks that each block of queries attends to.
        globals: the number of global blocks; "itc" takes half of them (rounded up) from the start, the others from the end.
        mode: "itc" makes tokens of the sequence global; "etc" adds extra global tokens, whose keys and values are learned.
        seed: the seed of the random blocks.
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
            self._refuse("window", "must be odd, so that it has a middle")
        self._require_whole("random", "globals")
        self._require_choice("mode", MODES)
        if self.mode == "etc" and self.globals:
            self._require_rows("globals", "block")
        self._require_seed()

    @property
    def refuses(self) -> Mapping[str, str]:
        if self.mode == "itc":
            return self.info.refuses
        return {
            **self.info.refuses,
            "functional": "mode='etc' has learned global tokens; use subquad.Attention, or BigBird(...).build(...)",
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

    @property
    def layout_period(self) -> int:
        return self.block

    def layout(self, call: Call) -> Layout:
        first, last = self._global_blocks(call.is_causal)
        side = self.window // 2
        sets: list[KeySet] = [Blocks(self.block, side, 0 if call.is_causal else side, call.is_causal)]
        if self.random and call.seen + call.key.shape[2] > self.block:  # more than one block
            sets.append(self._random_blocks(call, first, last, side))
        return Layout(
            head_groups=((None, tuple(sets)),),
            global_tokens=self._global_tokens(call, first, last) if first + last else None,
            first_global=first * self.block,
            extra=(call.weights["global_key"], call.weights["global_value"]) if self.mode == "etc" else None,
        )

    def _global_blocks(self, is_causal: bool) -> tuple[int, int]:
        """How many blocks are global at the start and at the end."""
        if self.mode == "etc":
            return 0, 0
        return (self.globals + 1) // 2, 0 if is_causal else self.globals // 2

    def _global_tokens(self, call: Call, first: int, last: int) -> GlobalTokens:
        """The tokens of the first and the last blocks of each row, by their position among its real tokens."""
        size, lengths = min(self.block, call.key.shape[2]), real_lengths(call)[:, None]
        blocks = (lengths + size - 1) // max(size, 1)  # (B or 1, 1)
        first, last = (min(n, -(-call.key.shape[2] // max(size, 1))) for n in (first, last))
        within = torch.arange(size, device=lengths.device)
        front = torch.arange(first, device=lengths.device).expand(lengths.shape[0], -1)
        back = blocks - 1 - torch.arange(last, device=lengths.device)
        back = torch.where(back >= first, back, blocks)  # blocks that are global already become one that does not exist
        index = (torch.cat([front, back], dim=1)[:, :, None] * size + within).flatten(1)
        exists = index < lengths
        return GlobalTokens(torch.where(exists, index, 0), exists)

    def _random_blocks(self, call: Call, first: int, last: int, side: int) -> SelectedBlocks:
        keys = call.weights["draw"]
        total = -(-(call.seen + call.key.shape[2]) // self.block)
        block = torch.arange(-(-call.key.shape[2] // self.block), device=keys.device)
        heads = torch.arange(call.query.shape[1], device=keys.device)[:, None]
        if call.is_causal:
            count, is_decoding = min(self.random, total), call.state is not None and is_readable(keys)
            samples = None if is_decoding else reservoir_samples(keys, count, total)  # (H, total + 1, r)

            def select(block: Tensor, heads: Tensor) -> Tensor:
                number = (block - side - first).clamp(0, total)  # of blocks to draw from
                if samples is None:
                    numbers, place = number.unique(return_inverse=True)
                    sample = running_samples(tuple(keys.tolist()), count).at(numbers)[heads, place]
                else:
                    sample = samples[heads, number]
                return torch.where(sample < 0, -1, sample + first)

            return SelectedBlocks(self.block, self.random, side, select(block, heads)[None], select)
        blocks = (real_lengths(call)[:, None, None] + self.block - 1) // self.block  # (B or 1, 1, 1)
        index = draw_blocks(keys[heads], block, blocks, self.random, first=first, last=last, side=side, most=total)
        return SelectedBlocks(self.block, self.random, side, index, lambda block, heads: index)
