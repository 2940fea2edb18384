"""What a conversion is to do, and what must be the same for it to be resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad import checks
from subquad.conversion.repair import Schedule
from subquad.conversion.repair.low_rank import RANK, require_targets
from subquad.conversion.swap import Layers
from subquad.conversion.text import Calibration
from subquad.errors import InputError, SubquadError
from subquad.families.base import Mechanism
from subquad.registry import resolve
from subquad.runs.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the model comes from.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        gguf: a GGUF file inside it.
        dtype: of the weights.
    """

    model: str
    gguf: str | None = None
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Which attention becomes what.

    Args:
        method, layers, keep_softmax, beyond_context: as in `convert`.
        cross: convert cross-attention, too.
        keep: a search puts this many layers back to softmax, before the repair.
    """

    method: str | Mechanism
    layers: Layers = "all"
    keep_softmax: tuple[int, ...] = ()
    cross: bool = False
    beyond_context: bool = False
    keep: int = 0


@dataclass(frozen=True, kw_only=True)
class Text:
    """The calibration text.

    Args:
        files: without any, nothing is measured.
        length, batch, tokens: see `calibration`; None for the default.
    """

    files: tuple[Path, ...] = ()
    length: int | None = None
    batch: int | None = None
    tokens: int | None = None

    def sizes(self) -> dict[str, int]:
        """Those that were given."""
        given = {"length": self.length, "batch": self.batch, "tokens": self.tokens}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How one stage of repair trains; see `Schedule`."""

    steps: int = Schedule.steps
    lr: float | None = None
    minutes: float | None = None
    precision: Precision = Schedule.precision

    def schedule(self, seed: int) -> Schedule:
        return Schedule(steps=self.steps, lr=self.lr, minutes=self.minutes, precision=self.precision, seed=seed)

    def arguments(self) -> dict[str, Any]:
        """What the stage's function takes besides the schedule."""
        return {}


@dataclass(frozen=True, kw_only=True)
class LowRankOptions(StageOptions):
    """And the rank and targets of its low-rank changes; see `align`."""

    rank: int = RANK
    targets: str = "attention"

    def arguments(self) -> dict[str, Any]:
        checks.sizes(rank=self.rank)
        return {"rank": self.rank, "targets": require_targets(self.targets)}


@dataclass(frozen=True, kw_only=True)
class LoraOptions(LowRankOptions):
    """And the loss; see `finetune`. None for the default of the model."""

    loss: str | None = None


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The stages of repair, in the order in which they run; None for a stage that is left out."""

    transfer: StageOptions | None = None
    align: LowRankOptions | None = None
    lora: LoraOptions | None = None

    def stages(self) -> dict[str, StageOptions]:
        """The stages that run."""
        return {name: options for name, options in vars(self).items() if options is not None}


STAGES = {"transfer": StageOptions, "align": LowRankOptions, "lora": LoraOptions}  # with the options of each


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole conversion.

    Args:
        seed: of new weights and of the order of batches.
        threads: None for the default of PyTorch.
    """

    source: Source
    swap: Swap
    text: Text = field(default_factory=Text)
    repair: Repair = field(default_factory=Repair)
    seed: int = 0
    threads: int | None = None

    def check(self) -> None:
        """Refuse what no conversion can do, before anything is loaded."""
        resolve(self.swap.method)
        checks.sizes(**self.text.sizes())
        if self.swap.keep < 0:
            raise InputError(f"keep must be the number of layers that stay softmax, at least 0; got {self.swap.keep}.")
        checks.seed(self.seed)
        stages = self.repair.stages()
        for name, options in stages.items():
            _check_stage(name, options, self.seed)
        if stages and self.source.dtype == "float16":
            raise InputError(
                "a repair trains weights in float32, bfloat16 or float64; got float16, in which gradients overflow. Repair "
                "with --dtype float32, and save the result in float16 afterwards."
            )
        if (stages or self.swap.keep) and not self.text.files:
            raise InputError("a repair and a keep search need calibration text; got none. Pass --text FILE.")
        if not self.text.files and (named := self.text.sizes()):
            flags = ", ".join(f"--{name}" for name in named)
            raise InputError(f"{flags}: these are options of calibration text; got no text. Pass --text FILE.")

    def identity(self, text: Calibration | None) -> dict[str, Any]:
        """What must be the same for a run to be resumed: everything that changes the weights or the figures.

        Stages share their values of rank, targets and precision; if they differ, the value is a dictionary by stage.
        """
        stages = self.repair.stages()
        layers = self.swap.layers
        return {
            "model": self.source.model,
            "gguf": self.source.gguf,
            "dtype": self.source.dtype,
            "layers": layers if isinstance(layers, str) else list(layers),
            "keep_softmax": list(self.swap.keep_softmax),
            "cross": self.swap.cross,
            "beyond_context": self.swap.beyond_context,
            "keep": self.swap.keep,
            "length": self.text.length,
            "batch": self.text.batch,
            "tokens": self.text.tokens,
            "text": None if text is None else text.fingerprint(),
            "repair": list(stages),
            **{f"{name}_steps": stages[name].steps if name in stages else None for name in STAGES},
            **{f"{name}_lr": stages[name].lr if name in stages else None for name in STAGES},
            **{name: _shared(name, stages) for name in ("loss", "rank", "targets", "precision")},
            "seed": self.seed,
        }


def _check_stage(name: str, options: StageOptions, seed: int) -> None:
    try:
        options.schedule(seed)
        options.arguments()
    except SubquadError as error:
        raise type(error)(f"{name}: {error}") from None


def _shared(name: str, stages: dict[str, StageOptions]) -> Any:
    values = {stage: getattr(options, name) for stage, options in stages.items() if hasattr(options, name)}
    return next(iter(values.values()), None) if len({*values.values()}) < 2 else values
