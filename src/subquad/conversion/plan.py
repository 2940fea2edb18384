"""What a conversion is to do, and what of that must be the same for one to go on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subquad import checks
from subquad.conversion.repair import Schedule
from subquad.conversion.repair.low_rank import RANK, require_targets
from subquad.conversion.swap import Layers
from subquad.conversion.text import Calibration
from subquad.errors import InputError
from subquad.families.base import Mechanism
from subquad.registry import resolve
from subquad.runs.precision import Precision

STAGES = ("transfer", "align", "lora")
_LOW_RANK = ("align", "lora")
_READ_BY = {  # options, and the stages of which one must be there for them to mean anything
    **{f"{stage}_{name}": (stage,) for stage in STAGES for name in ("steps", "lr")},
    "loss": ("lora",),
    "rank": _LOW_RANK,
    "targets": _LOW_RANK,
    "minutes": STAGES,
    "precision": STAGES,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do; None is the usual.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        gguf: a GGUF file inside it.
        layers, keep_softmax, cross, beyond_context: as in `convert`; `cross` converts cross-attention, too.
        text: files of calibration text; without any, nothing is diagnosed.
        length, batch, tokens: of the text, see `calibration`.
        repair: stages, in the order of `STAGES`.
        keep: how many layers a search puts back to softmax before the repair.
        transfer_lr, align_lr, lora_lr: learning rates at their highest; by default the usual ones.
        minutes: of each stage, at most.
        loss: of the low-rank finetuning.
        rank, targets: of it, and of the alignment.
        precision: of the stages' own computing, see `Schedule`; `dtype` is that of the weights.
    """

    model: str
    method: str | Mechanism
    gguf: str | None = None
    layers: Layers = "all"
    keep_softmax: tuple[int, ...] = ()
    cross: bool = False
    beyond_context: bool = False
    text: tuple[Path, ...] = ()
    length: int | None = None
    batch: int | None = None
    tokens: int | None = None
    repair: tuple[str, ...] = ()
    keep: int = 0
    transfer_steps: int | None = None
    align_steps: int | None = None
    lora_steps: int | None = None
    transfer_lr: float | None = None
    align_lr: float | None = None
    lora_lr: float | None = None
    minutes: float | None = None
    loss: str | None = None
    rank: int | None = None
    targets: str | None = None
    precision: Precision | None = None
    dtype: str = "float32"
    seed: int = 0
    threads: int | None = None

    def check(self) -> None:
        """Refuse what no conversion can be."""
        resolve(self.method)
        checks.sizes(**self.calibration())
        if self.keep < 0:
            raise InputError(f"keep is how many layers stay softmax, at least 0; got {self.keep}.")
        if self.repair != tuple(stage for stage in STAGES if stage in self.repair):
            raise InputError(
                f"a repair has the stages {', '.join(STAGES)}, any of them, once, in that order; got {', '.join(self.repair)}."
            )
        for name, stages in _READ_BY.items():
            if getattr(self, name) is not None and not {*stages} & {*self.repair}:
                raise InputError(
                    f"{_option(name)} is read by {' and '.join(stages)}, and there is no such stage in this repair "
                    f"({', '.join(self.repair) or 'none'}). Leave it out, or add the stage to --repair."
                )
        checks.seed(self.seed)
        checks.sizes(rank=self.changes()["rank"])
        for stage in self.repair:
            self.schedule(stage)
        if self.repair and self.dtype == "float16":
            raise InputError(
                "a repair learns weights in float32, bfloat16 or float64; got float16, whose gradients leave its range. Repair "
                "with --dtype float32, and save the result in float16 afterwards."
            )
        if (self.repair or self.keep) and not self.text:
            raise InputError("a repair and a keep search learn from calibration text; got none. Pass --text FILE.")
        if not self.text and (named := self.calibration()):
            raise InputError(f"{', '.join(map(_option, named))}: of calibration text, and there is none. Pass --text FILE.")

    def calibration(self) -> dict[str, int]:
        """What is asked of the text."""
        asked = {"length": self.length, "batch": self.batch, "tokens": self.tokens}
        return {name: value for name, value in asked.items() if value is not None}

    def changes(self) -> dict[str, Any]:
        """Of alignment and of low-rank finetuning."""
        rank = RANK if self.rank is None else self.rank
        return {"rank": rank, "targets": require_targets("attention" if self.targets is None else self.targets)}

    def schedule(self, stage: str) -> Schedule:
        """Of a stage of repair."""
        given = {"steps": getattr(self, f"{stage}_steps"), "lr": getattr(self, f"{stage}_lr"), "precision": self.precision}
        asked = {name: value for name, value in given.items() if value is not None}
        try:
            return Schedule(minutes=self.minutes, seed=self.seed, **asked)
        except InputError as error:
            raise InputError(f"{stage}: {error}") from None

    def identity(self, text: Calibration | None) -> dict[str, Any]:
        """What must be the same for a run to go on: all that changes the weights or the figures."""
        free = ("method", "text", "minutes", "threads")
        settings = {name: value for name, value in asdict(self).items() if name not in free}
        if {*_LOW_RANK} & {*self.repair}:
            settings |= self.changes()
        for stage in self.repair:
            schedule = self.schedule(stage)
            settings |= {f"{stage}_steps": schedule.steps, "precision": schedule.precision}
        lists = {name: list(value) for name, value in settings.items() if isinstance(value, tuple)}
        return {**settings, **lists, "text": None if text is None else text.fingerprint()}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
