"""Datasets of rows stored in a few large tensors, how rows become batches, and what a model predicts for them.

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
    """Row i has entry i of each column."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Row:
        return {name: column[index] for name, column in self.columns.items()}

    def take(self, rows: Tensor) -> Columns:
        """These rows, in this order."""
        return Columns(**{name: column[rows] for name, column in self.columns.items()})


class Ragged:
    """Sequences of different lengths in one tensor; an entry is a view."""

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
    """Row i has a sequence of token ids for each name and, if there are labels, label i."""

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
    """A long text (T,) in blocks of `length` tokens, for a model that predicts each token from those before it.

    A block begins with the last token of the one before, so every token but the very first is predicted exactly once. The last
    block is as long as the others; what it shares with the one before is not predicted again.
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


def stack_rows(rows: Sequence[Row]) -> Batch:
    """A batch of rows that have the same shape."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def pad_rows(pad: int = 0) -> Callable[[Sequence[Row]], Batch]:
    """A collate function: `input_ids` padded on the right, their attention_mask, and labels."""

    def collate(rows: Sequence[Row]) -> Batch:
        ids, mask = pad_sequences([row["input_ids"] for row in rows], pad)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([row["labels"] for row in rows])}

    return collate


def pad_sequences(sequences: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Padded ids (B, N) as int64, and the mask (B, N) of real tokens."""
    ids = pad_sequence(list(sequences), batch_first=True, padding_value=pad).long()
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


@torch.no_grad()
def predictions(model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> Iterator[tuple[Batch, Any]]:
    """Each batch of `rows` with the model's output; rows with lengths come shortest first, others in order."""
    lengths = row_lengths(rows)
    order = None if lengths is None else sort_by_length(range(len(lengths)), lengths)
    for batch in DataLoader(rows, batch_size=settings.batch, sampler=order, collate_fn=splits.collate):
        batch = {name: column.to(model.device) for name, column in batch.items()}
        yield batch, model(**{name: column for name, column in batch.items() if name != "labels"})


def row_lengths(rows: Dataset[Row]) -> Sequence[tuple[int, ...]] | None:
    """The lengths of each row if rows are padded, otherwise None (see `Splits`)."""
    if not isinstance(rows, Subset):
        return getattr(rows, "lengths", None)
    lengths = row_lengths(rows.dataset)
    return None if lengths is None else [lengths[i] for i in rows.indices]


def sort_by_length(rows: Iterable[int], lengths: Sequence[tuple[int, ...]]) -> list[int]:
    """Rows sorted by the longest of their lengths, which leaves less padding than the first length or the sum."""
    return sorted(rows, key=lambda row: (max(lengths[row]), sum(lengths[row])))


def evenly_spaced(rows: Dataset[Row], count: int) -> Dataset[Row]:
    """At most `count` of the rows, at even distances."""
    total = row_count(rows)
    return rows if count >= total else Subset(rows, [i * total // count for i in range(count)])


def row_count(rows: Dataset[Any]) -> int:
    return len(rows)  # type: ignore[arg-type]


def random_order(count: int, seed: int) -> Tensor:
    """The numbers below `count` in a random order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def model_options(method: str | Mechanism, settings: Settings) -> dict[str, Any]:
    """Arguments of `SubquadConfig` that all tasks share; a method given by name gets its options for the length."""
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
        "initializer_range": (3 * settings.dim) ** -0.5,  # as PyTorch initializes a linear layer; 0.02 suits wider models
    }


def model_config(method: str | Mechanism, settings: Settings, **fields: Any) -> SubquadConfig:
    """The configuration of a task's model."""
    return SubquadConfig(**model_options(method, settings), **fields)
