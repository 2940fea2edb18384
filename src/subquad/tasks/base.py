"""The interface of a task: data, a model for it, and a score. `subquad.training` does the rest."""

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
    """The size of the model and the length of the run: the defaults of a task, changed by the command line."""

    length: int  # maximum tokens of a sequence
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
    warmup: float = 0.1  # fraction of the steps; then a cosine to 0
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()  # options of the task, such as ("tokens", "pixels")


@dataclass(frozen=True)
class TaskInfo:
    """What is known about a task before its data is loaded."""

    name: str
    idea: str
    kind: Literal["bidirectional", "causal", "encoder-decoder"]  # what a mechanism must support
    metric: str  # the figure of `Task.score` that decides which model is best
    higher_is_better: bool
    source: str  # public name of the data; "" if it is generated or installed
    folder: str  # of the data inside --data or SUBQUAD_DATA; "" if there is none
    defaults: Settings
    options: dict[str, tuple[str, ...]]  # options of the task: name -> choices, of which the first is the default


@dataclass(frozen=True)
class Splits:
    """Rows for training, for choosing the best model and for the final score, and how rows become a batch for the model.

    Datasets that are padded have an attribute `lengths`, a tuple of numbers per row: rows of similar length are batched.
    """

    train: Dataset[Row]  # has a method `set_epoch(epoch)` if its rows change every epoch
    valid: Dataset[Row]
    test: Dataset[Row]
    collate: Callable[[Sequence[Row]], Batch]


class Task(ABC):
    """Subclass it with an `info`, and write `load`, `model` and `score`."""

    info: ClassVar[TaskInfo]

    def options(self, settings: Settings) -> dict[str, str]:
        """The value of each option of the task; an error if a name or a value is unknown."""
        known = self.info.options
        for name, value in settings.options:
            if name not in known:
                offered = ", ".join(known) or "none"
                raise OptionError(f"the task {self.info.name} has no option {name!r}{closest(name, known)} Options: {offered}.")
            if value not in known[name]:
                choices = ", ".join(map(repr, known[name]))
                raise OptionError(f"the option {name} of {self.info.name} must be one of {choices}; got {value!r}.")
        return {name: choices[0] for name, choices in known.items()} | dict(settings.options)

    def reads_folder(self, settings: Settings) -> bool:
        """Whether it can read a folder with local copies of data."""
        return bool(self.info.folder)

    @abstractmethod
    def load(self, folder: Path | None, settings: Settings) -> Splits:
        """The data, from the local copy in `folder` or from the public source. The same settings must give the same rows."""

    def text_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer to save with the model, if it reads text; called after `load`."""
        return None

    @abstractmethod
    def model(self, method: str | Mechanism, settings: Settings) -> PreTrainedModel:
        """A new model with weights from PyTorch's global generator; called after `load`."""

    @abstractmethod
    def score(self, model: PreTrainedModel, rows: Dataset[Row], splits: Splits, settings: Settings) -> dict[str, float]:
        """Figures by name, with `info.metric` and "loss" among them. The model is in evaluation mode, on its device."""
