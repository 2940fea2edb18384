"""Batches by step: the rows of a step depend on the seed and the step alone, however often a run was stopped.

The epochs, each shuffled differently, form one stream of rows that is cut into batches of equal size, so an epoch may end
inside a batch. Rows of different lengths are batched with others of similar length, so that there is little padding. Each
process takes its share of every batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from subquad.tasks.base import Batch, Row, Splits
from subquad.tasks.rows import evenly_spaced, row_count, sort_by_length

Place = tuple[int, int]  # epoch, row
ORDER = 2  # of rows in batches: 1 as shuffled, 2 by similar length. A run resumes only with the order that it began with
_FINGERPRINT_ROWS = 64  # of each split
_POOL = 100  # batches that are cut from one pool of rows sorted by length


class Batches:
    """A batch sampler: for each of `steps` batches, the (epoch, row) pairs that this process reads."""

    def __init__(
        self,
        rows: int,
        batch: int,
        steps: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
        lengths: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.rows, self.batch, self.steps, self.seed, self.lengths = rows, batch, steps, seed, lengths
        part = batch // processes
        self.part = slice(process * part, (process + 1) * part)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[Place]]:
        stream = self._stream()
        for _ in range(self.steps):
            yield [next(stream) for _ in range(self.batch)][self.part]

    def _stream(self) -> Iterator[Place]:
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            order = torch.randperm(self.rows, generator=generator).tolist()
            if self.lengths is not None:
                order = self._grouped(order, self.lengths, -epoch * self.rows % self.batch, generator)
            yield from ((epoch, row) for row in order)
            epoch += 1

    def _grouped(
        self, order: list[int], lengths: Sequence[tuple[int, ...]], missing: int, generator: torch.Generator
    ) -> list[int]:
        """The rows of an epoch in batches of similar length.

        The first `missing` rows, of any length, complete the last batch of the epoch before. Batches are cut from pools of the
        shuffled epoch, each sorted by length, and then shuffled. Rows that are left over begin the next batch.
        """
        first, size = min(missing, self.rows), self.batch
        end = self.rows - (self.rows - first) % size
        pools = (order[i : min(i + _POOL * size, end)] for i in range(first, end, _POOL * size))
        ranked = [row for pool in pools for row in sort_by_length(pool, lengths)]
        starts = size * torch.randperm((end - first) // size, generator=generator)
        return [*order[:first], *(row for i in starts.tolist() for row in ranked[i : i + size]), *order[end:]]


class _Rows(Dataset[Row]):
    """The training rows by (epoch, row); datasets that change every epoch have a `set_epoch` method, which is called."""

    def __init__(self, rows: Dataset[Row]) -> None:
        self.rows, self.epoch = rows, -1

    def __len__(self) -> int:
        return row_count(self.rows)

    def __getitem__(self, place: Place) -> Row:
        epoch, row = place
        set_epoch: Callable[[int], object] | None = getattr(self.rows, "set_epoch", None)
        if set_epoch is not None and epoch != self.epoch:
            set_epoch(epoch)
            self.epoch = epoch
        return self.rows[row]


def loader(splits: Splits, batches: Batches) -> DataLoader[Row]:
    collate: Callable[[Sequence[Row]], Batch] = splits.collate
    return DataLoader(_Rows(splits.train), batch_sampler=batches, collate_fn=collate)


def fingerprint(splits: Splits) -> str:
    """A checksum of the number of rows, and of the content of some rows spread over each split."""
    total = 0
    for rows in (splits.train, splits.valid, splits.test):
        total = zlib.crc32(str(row_count(rows)).encode(), total)
        for row in _sample(rows):
            for name, value in sorted(row.items()):
                content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode()
                total = zlib.crc32(content, zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def _sample(rows: Dataset[Row]) -> Iterator[Row]:
    set_epoch: Callable[[int], object] = getattr(rows, "set_epoch", lambda epoch: None)
    set_epoch(0)
    some = evenly_spaced(rows, _FINGERPRINT_ROWS)
    return (some[i] for i in range(row_count(some)))


def mixed(*numbers: int) -> int:
    """One seed from several numbers; numbers that differ little give unrelated seeds."""
    seed = 0x9E3779B97F4A7C15
    for number in numbers:
        seed = (seed ^ (number + 0x632BE59BD9B4E019)) * 0xD6E8FEB86659FD93 % 2**64
        seed ^= seed >> 32
    return seed % 2**63
