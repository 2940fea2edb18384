"""Rows that lie in few large tensors, how they become batches, and how a model answers them.

B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel

from subquad.families.base import Mechanism
from subquad.models import SubquadConfig
from subquad.models.inputs import IGNORED
from subquad.models.methods import by_layer
from subquad.tasks.base import Batch, Row, Settings, Splits


class Columns(Dataset[Row]):
    """Row i is entry i of each column."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Row:
        return {name: column[index] for name, column in self.columns.items()}

    def take(self, rows: Tensor) -> Columns:
        """Some of the rows, in this order."""
        return Columns(**{name: column[rows] for name, column in self.columns.items()})


class Ragged:
    """Sequences of different lengths, one behind the other; an entry is a view."""

    def __init__(self, sequences: Sequence[Tensor]) -> None:
        self.values = torch.cat(list(sequences))
        self.ends = [0, *accumulate(map(len, sequences))]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.values[self.ends[index] : self.ends[index + 1]]

    @property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in pairwise(self.ends)]


class Sequences(Dataset[Row]):
    """Row i is token ids of their own length by name, and, where there are labels, label i."""

    def __init__(self, labels: Tensor | None = None, **ids: Sequence[Tensor]) -> None:
        self.ids = {name: Ragged(sequences) for name, sequences in ids.items()}
        self.labels = labels

    def __len__(self) -> int:
        return len(next(iter(self.ids.values())))

    def __getitem__(self, index: int) -> Row:
        row = {name: sequences[index] for name, sequences in self.ids.items()}
        return row if self.labels is None else row | {"labels": self.labels[index]}

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        return list(zip(*(sequences.lengths for sequences in self.ids.values()), strict=True))


class Blocks(Dataset[Row]):
    """A long text (T,) in blocks of `length` tokens, for a model that predicts each from those before it.

    A block begins with the last token of the one before, so that all tokens but the very first are predicted exactly once. The
    last block is as long as the others: of what it shares with the one before nothing is predicted again.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length
        self.count = -(-(len(text) - 1) // (length - 1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(index)
        begin = index * (self.length - 1)
        start = min(begin, len(self.text) - self.length)
        ids = self.text[start : start + self.length].long()
        labels = ids.clone()
        labels[: begin - start + 1] = IGNORED
        return {"input_ids": ids, "labels": labels}


def stacked(rows: Sequence[Row]) -> Batch:
    """Rows of one shape."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def padded(pad: int = 0) -> Callable[[Sequence[Row]], Batch]:
    """Rows of `input_ids` of different lengths, filled up on the right, with an attention_mask; and their labels."""

    def collate(rows: Sequence[Row]) -> Batch:
        ids, mask = fill([row["input_ids"] for row in rows], pad)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([row["labels"] for row in rows])}

    return collate


def fill(sequences: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Ids (B, N) as int64 and the mask (B, N) of real tokens."""
    ids = pad_sequence(list(sequences), batch_first=True, padding_value=pad).long()
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


@torch.no_grad()
def answers(model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> Iterator[tuple[Batch, Any]]:
    """Each batch of `rows`, in their order or, where they have lengths, the shortest first; and the model's output for it."""
    lengths = lengths_of(rows)
    order = None if lengths is None else by_length(range(len(lengths)), lengths)
    for batch in DataLoader(rows, batch_size=settings.batch, sampler=order, collate_fn=splits.collate):
        batch = {name: column.to(model.device) for name, column in batch.items()}
        yield batch, model(**{name: column for name, column in batch.items() if name != "labels"})


def lengths_of(rows: Dataset[Row]) -> Sequence[tuple[int, ...]] | None:
    """Of each row, where they are padded (see `Splits`)."""
    if not isinstance(rows, Subset):
        return getattr(rows, "lengths", None)
    lengths = lengths_of(rows.dataset)
    return None if lengths is None else [lengths[i] for i in rows.indices]


def by_length(rows: Iterable[int], lengths: Sequence[tuple[int, ...]]) -> list[int]:
    """Rows of like lengths beside each other: by the longest side first, which leaves fewer pads than one side or their sum."""
    return sorted(rows, key=lambda row: (max(lengths[row]), sum(lengths[row])))


def spread(rows: Dataset[Row], count: int) -> Dataset[Row]:
    """`count` of the rows at most, evenly spread over all of them."""
    there = length(rows)
    return rows if count >= there else Subset(rows, [i * there // count for i in range(count)])


def length(rows: Dataset[Any]) -> int:
    return len(rows)  # type: ignore[arg-type]


def shuffled(count: int, seed: int) -> Tensor:
    """The numbers below `count` in a random order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def sizes(method: str | Mechanism, settings: Settings) -> dict[str, Any]:
    """What all tasks tell `SubquadConfig`; a method by its name has the options that follow from the length."""
    chosen: Any = method
    if isinstance(method, str):
        layers = [one.for_length(settings.length) for one in by_layer(method, settings.layers, "method")]
        chosen = layers if len(set(layers)) > 1 else layers[0]
    return {
        "method": chosen,
        "hidden_size": settings.dim,
        "intermediate_size": 4 * settings.dim,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "dropout": settings.dropout,
        "initializer_range": (3 * settings.dim) ** -0.5,  # as PyTorch draws a linear layer; 0.02 is for wider ones
    }


def shape(method: str | Mechanism, settings: Settings, **fields: Any) -> SubquadConfig:
    """The config of a task's model."""
    return SubquadConfig(**sizes(method, settings), **fields)
