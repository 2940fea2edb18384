"""What a task is: data, a model for it, and a score. One file a task; `subquad.train` does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from subquad.errors import OptionError, closest
from subquad.families.base import Mechanism

Row = dict[str, Any]
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model's size and the run's length: a task's defaults, or what the command line says."""

    length: int  # tokens of a sequence, at most
    layers: int
    dim: int
    heads: int
    batch: int
    lr: float
    steps: int | None = None  # one of steps and epochs
    epochs: float | None = None
    dropout: float = 0.0
    label_smoothing: float = 0.0
    weight_decay: float = 0.01
    warmup: float = 0.1  # share of the steps; then a cosine down to 0
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()  # a task's own, such as ("tokens", "pixels")


@dataclass(frozen=True)
class TaskInfo:
    """What there is to know of a task before its data is read."""

    name: str
    idea: str
    kind: Literal["bidirectional", "causal", "encoder-decoder"]  # what a mechanism must be able to do
    metric: str  # of `Task.score`, by which the best model is kept
    higher_is_better: bool
    source: str  # public name of the data, "" where it is generated or installed
    folder: str  # of the data below --data or SUBQUAD_DATA, "" where there is none
    defaults: Settings
    options: dict[str, tuple[str, ...]]  # a task's own options: name -> choices, the first by default


@dataclass(frozen=True)
class Splits:
    """Rows to learn from, to choose the best model by, and to report, and how rows become a batch for the model.

    Rows that are padded have an attribute `lengths`, a tuple of numbers a row: those of like lengths are then put into a batch.
    """

    train: Dataset[Row]  # with a method `set_epoch(epoch)` where it draws anew each epoch: to be called before each
    valid: Dataset[Row]
    test: Dataset[Row]
    collate: Callable[[Sequence[Row]], Batch]


class Task(ABC):
    info: ClassVar[TaskInfo]

    def options(self, settings: Settings) -> dict[str, str]:
        """The value of each of the task's own options; refused where a name or a value is unknown."""
        known = self.info.options
        for name, value in settings.options:
            if name not in known:
                offered = ", ".join(known) or "none"
                raise OptionError(f"the task {self.info.name} has no option {name!r}{closest(name, known)} Options: {offered}.")
            if value not in known[name]:
                choices = ", ".join(map(repr, known[name]))
                raise OptionError(f"the option {name} of {self.info.name} is one of {choices}; got {value!r}.")
        return {name: choices[0] for name, choices in known.items()} | dict(settings.options)

    def reads_folder(self, settings: Settings) -> bool:
        """Whether a folder with local copies of data is of any use to it."""
        return bool(self.info.folder)

    @abstractmethod
    def load(self, folder: Path | None, settings: Settings) -> Splits:
        """The data: from `folder`, a local copy, or from the public source. The same settings give the same rows."""

    def text_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What writes text as the model's tokens, to be kept beside it, if there is such a thing; called after `load`."""
        return None

    @abstractmethod
    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        """A new model, its weights drawn from PyTorch's generator; called after `load`."""

    @abstractmethod
    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        """Figures by name, `info.metric` and "loss" among them, of a model in evaluation mode, where it stands."""
