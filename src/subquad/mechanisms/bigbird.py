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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subquad.engines.block_sparse import Layout
from subquad.engines.call import Call
from subquad.engines.state_spec import is_readable
from subquad.families.base import Info, Sizes
from subquad.families.sparse import SparseMechanism, refuses
from subquad.ops.sparse.global_tokens import EndBlocks
from subquad.ops.sparse.key_sets import Blocks, KeySet
from subquad.ops.sparse.random_blocks import RandomBlocks
from subquad.ops.sparse.random_draw import head_keys, reservoir_samples, running_samples

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
        if self.random:
            select = self._select(call, first, side) if call.is_causal else None
            sets.append(RandomBlocks(self.block, self.random, side, first, last, call.is_causal, select))
        return Layout(
            head_groups=((None, tuple(sets)),),
            global_rule=EndBlocks(self.block, first, last),
            first_global=first * self.block,
            extra=(call.weights["global_key"], call.weights["global_value"]) if self.mode == "etc" else None,
            draw=call.weights["draw"],
        )

    def _global_blocks(self, is_causal: bool) -> tuple[int, int]:
        """How many blocks are global at the start and at the end."""
        if self.mode == "etc":
            return 0, 0
        return (self.globals + 1) // 2, 0 if is_causal else self.globals // 2

    def _select(self, call: Call, first: int, side: int) -> Callable[[Tensor, Tensor], Tensor]:
        """For decoding: the random blocks of blocks of queries and heads, which broadcast."""
        keys, total = call.weights["draw"], -(-(call.seen + call.key.shape[2]) // self.block)
        count = min(self.random, total)

        def select(block: Tensor, heads: Tensor) -> Tensor:
            number = (block - side - first).clamp(0, total)  # of blocks to draw from
            if is_readable(keys):
                numbers, place = number.unique(return_inverse=True)
                sample = running_samples(tuple(keys.tolist()), count).at(numbers)[heads, place]
            else:
                sample = reservoir_samples(keys, count, total)[heads, number]
            return torch.where(sample < 0, -1, sample + first)

        return select
