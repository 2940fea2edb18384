"""The content of docs/results.md: tables, rows of a table, and cells of a row, each of which is one training run.

A cell is declared by what differs from its task's own settings. After a change here, the next `make results` trains the cells
whose settings have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from benchmarks.suite.options import changed_options, fit_to_length
from subquad.families.base import Mechanism
from subquad.registry import options_of
from subquad.tasks import Settings
from subquad.training.plan import Plan, choose_methods, class_path, find_task

THREADS = 1
_SETTINGS = {f.name for f in fields(Settings)}


@dataclass(frozen=True)
class Cell:
    """One training run.

    Args:
        name: TABLE/ROW; its folder in --out, and its key in results.json.
        given: what differs from the task's own settings and from a plain run, by the names of `subquad train`.
        minutes: expected.
    """

    name: str
    table: str
    task: str
    mechanism: Mechanism
    given: Mapping[str, Any]
    minutes: float

    @property
    def method(self) -> str:
        return self.mechanism.info.name

    @property
    def settings(self) -> Settings:
        return task_settings(self.task, self.given)

    @property
    def plan(self) -> Plan:
        rest = {name: value for name, value in self.given.items() if name not in _SETTINGS}
        return Plan(task=class_path(find_task(self.task)), settings=self.settings, threads=THREADS, **rest)

    def identity(self) -> dict[str, Any]:
        """The settings and options that the record of this cell must have."""
        return {"settings": self.plan.identity(), "options": options_of(self.mechanism)}

    def command(self) -> list[str]:
        """The arguments of `subquad`, without input and output folders."""
        options = [f"{self.method}.{name}={value}" for name, value in changed_options(self.mechanism).items()]
        words = [word for option in options for word in ("--method-option", option)]
        return [*command(self.task, self.method, self.given), *words, "--threads", str(THREADS)]


@dataclass(frozen=True)
class Row:
    """One training run for each seed."""

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows with the same task and settings.

    Args:
        about: what the reader must know about it.
        minutes: expected for a cell.
        given: as in `Cell`.
        methods: their names; none for all that can do the task.
        tokens: of a typical sequence, for the options; by default as many as in the longest.
        variants: rows for these changes, instead of one for each method.
        seeds: one cell of a row for each; figures are their means or medians, with their range.
        is_trained: if not, only the time of a step is measured, and the table projects the time of a training run.
    """

    name: str
    title: str
    task: str
    about: str
    minutes: float = 0.0
    given: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    tokens: int | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    is_trained: bool = True

    @property
    def settings(self) -> Settings:
        return task_settings(self.task, self.given)

    def rows(self) -> list[Row]:
        able, _ = choose_methods(find_task(self.task), self.methods or ["all"], self.settings)
        sized = {name: fit_to_length(mechanism, self.tokens or self.settings.length) for name, mechanism in able.items()}
        return [
            Row(label, tuple(self._cell(label, mechanism, {**self.given, **change}, seed) for seed in self.seeds))
            for name, mechanism in sized.items()
            for label, change in (self.variants or {name: {}}).items()
        ]

    def refused(self) -> dict[str, str]:
        """Methods that cannot do the task, and why; none for a table that does not compare methods."""
        return {} if self.variants or not self.is_trained else choose_methods(find_task(self.task), ["all"], self.settings)[1]

    def _cell(self, label: str, mechanism: Mechanism, given: Mapping[str, Any], seed: int) -> Cell:
        name = f"{self.name}/{label}" + (f"-seed{seed}" if seed else "")
        return Cell(name, self.name, self.task, mechanism, {**given, **({"seed": seed} if seed else {})}, self.minutes)


def identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that `Cell.identity` must equal."""
    return {name: record[name] for name in ("settings", "options")}


def task_settings(task: str, given: Mapping[str, Any]) -> Settings:
    """The settings of the task, changed as given."""
    changes = {name: value for name, value in given.items() if name in _SETTINGS}
    if "options" in changes:
        changes["options"] = tuple(changes["options"].items())
    if "steps" in changes or "epochs" in changes:
        changes = {"steps": None, "epochs": None, **changes}
    return replace(find_task(task).info.defaults, **changes)


def command(task: str, method: str, given: Mapping[str, Any]) -> list[str]:
    """The arguments of `subquad` for this training run."""
    words = ["train", task, "--method", method]
    for name, value in given.items():
        if name == "options":
            words += [word for pair in value.items() for word in ("--option", "=".join(pair))]
        else:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


TABLES: tuple[Table, ...] = (
    Table(
        name="cifar10",
        title="CIFAR-10, 64 patches",
        task="cifar10",
        about="Accuracy on the 10,000 test images, after training on 49,000. The best model is chosen on the other 1,000.",
        given={"precision": "bf16", "epochs": 7},
        minutes=16,
    ),
    Table(
        name="listops-128",
        title="ListOps, up to 128 tokens",
        task="listops",
        about="Accuracy on 1,000 expressions of 32 to 128 tokens with ten possible answers; the most frequent answer is right "
        "for 15.0% of them.",
        given={"length": 128},
        minutes=5,
    ),
    Table(
        name="listops-256",
        title="ListOps, up to 256 tokens",
        task="listops",
        about="Accuracy on 1,000 expressions of 64 to 256 tokens; the most frequent answer is right for 17.2% of them. A step "
        "reads as many tokens as at 128.",
        given={"length": 256, "batch": 16},
        minutes=5,
    ),
    Table(
        name="recall-64",
        title="Associative recall, 64 tokens",
        task="recall",
        about="The fraction of the 8 keys of a sequence whose value is recalled.",
        given={"length": 64},
        minutes=5,
    ),
    Table(
        name="recall-256",
        title="Associative recall, 256 tokens",
        task="recall",
        about="The fraction of the 32 keys of a sequence whose value is recalled. A step reads twice as many tokens as at 64.",
        given={"length": 256, "batch": 16},
        minutes=5,
    ),
    Table(
        name="wikitext2",
        title="WikiText-2",
        task="wikitext2",
        about="Perplexity per word of the test text, computed over word pieces; lower is better.",
        minutes=10,
    ),
    Table(
        name="multi30k",
        title="Multi30k, English to German",
        task="multi30k",
        about="BLEU on the 1,000 sentences of the 2016 test set, which have 16 tokens on average. The method is the "
        "self-attention of encoder and decoder; cross-attention is softmax.",
        methods=("softmax", "linear", "performer", "local"),
        tokens=24,
        minutes=30,
    ),
    Table(
        name="pixels",
        title="CIFAR-10 as 1,024 single pixels: the time of 3,000 steps",
        task="cifar10",
        about="The model for patches, with every pixel as a token. Nothing is trained; only a step is timed.",
        given={"options": {"tokens": "pixels"}, "length": 1024, "batch": 16, "steps": 3000},
        methods=("softmax", "linear"),
        is_trained=False,
    ),
    Table(
        name="memory",
        title="Digits: bf16 and checkpointing",
        task="digits",
        about="`linear` in plain float32, with `--precision bf16`, with `--checkpointing`, and with both. Scores are means "
        "over three seeds (`--seed`), with their range: smaller differences between rows mean nothing.",
        given={"batch": 256, "epochs": 40},
        methods=("linear",),
        variants={
            "fp32": {},
            "bf16": {"precision": "bf16"},
            "checkpointing": {"checkpointing": True},
            "bf16-checkpointing": {"precision": "bf16", "checkpointing": True},
        },
        seeds=(0, 1, 2),
        minutes=2,
    ),
)


def selected(tables: Sequence[Table], methods: Sequence[str]) -> list[Cell]:
    """The cells of `tables` to train; if methods are given, only theirs."""
    cells = [cell for table in tables if table.is_trained for row in table.rows() for cell in row.cells]
    return [cell for cell in cells if not methods or cell.method in methods]
