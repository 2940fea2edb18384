"""What a conversion is to do, and what of that must be the same for one to go on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from subquad import checks
from subquad.conversion.repair import ALIGN, FINETUNE, TRANSFER, Schedule
from subquad.conversion.repair.low_rank import require_targets
from subquad.conversion.swap import Layers
from subquad.conversion.text import Calibration
from subquad.errors import InputError
from subquad.mechanisms import Config
from subquad.registry import resolve
from subquad.training.precision import Precision, require_precision

STAGES = ("transfer", "align", "lora")
_RANK = 8  # up to which the usual learning rate is that of low-rank finetuning
_LOOKS = 6  # at held-out batches in a stage, at least


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do.

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
    method: str | Config
    gguf: str | None = None
    layers: Layers = "all"
    keep_softmax: tuple[int, ...] = ()
    cross: bool = False
    beyond_context: bool = False
    text: tuple[Path, ...] = ()
    length: int | None = None
    batch: int = 8
    tokens: int = 200_000
    repair: tuple[str, ...] = ()
    keep: int = 0
    transfer_steps: int = TRANSFER.steps
    align_steps: int = ALIGN.steps
    lora_steps: int = FINETUNE.steps
    transfer_lr: float | None = None
    align_lr: float | None = None
    lora_lr: float | None = None
    minutes: float | None = None
    loss: str | None = None
    rank: int = _RANK
    targets: str = "attention"
    precision: Precision = "fp32"
    dtype: str = "float32"
    seed: int = 0
    threads: int | None = None

    def check(self) -> None:
        """Refuse what no conversion can be."""
        resolve(self.method)
        checks.sizes(batch=self.batch, tokens=self.tokens, rank=self.rank)
        require_targets(self.targets)
        require_precision(self.precision)
        if self.keep < 0:
            raise InputError(f"keep is how many layers stay softmax, at least 0; got {self.keep}.")
        if self.repair != tuple(stage for stage in STAGES if stage in self.repair):
            raise InputError(
                f"a repair has the stages {', '.join(STAGES)}, any of them, once, in that order; got {', '.join(self.repair)}."
            )
        if self.minutes is not None and not self.minutes > 0:
            raise InputError(f"minutes are above 0; got {self.minutes:g}.")
        checks.seed(self.seed)
        for stage in self.repair:
            self.schedule(stage)
        if self.repair and self.dtype == "float16":
            raise InputError(
                "a repair learns weights in float32, bfloat16 or float64; got float16, whose gradients leave its range. Repair "
                "with --dtype float32, and save the result in float16 afterwards."
            )
        if (self.repair or self.keep) and not self.text:
            raise InputError("a repair and a keep search learn from calibration text; got none. Pass --text FILE.")

    def schedule(self, stage: str) -> Schedule:
        """Of a stage of repair."""
        usual, steps, asked = {
            "transfer": (TRANSFER, self.transfer_steps, self.transfer_lr),
            "align": (ALIGN, self.align_steps, self.align_lr),
            "lora": (FINETUNE, self.lora_steps, self.lora_lr),
        }[stage]
        # A change is a sum over ranks, so a step of it grows with their number; through all layers that does harm.
        rate = usual.lr * (min(1.0, _RANK / self.rank) if stage == "lora" else 1.0)
        every = max(1, min(usual.every, steps // _LOOKS))
        return replace(
            usual,
            steps=steps,
            lr=rate if asked is None else asked,
            every=every,
            minutes=self.minutes,
            seed=self.seed,
            precision=self.precision,
        )

    def identity(self, text: Calibration | None) -> dict[str, Any]:
        """What must be the same for a run to go on: all that changes the weights or the figures."""
        free = ("method", "text", "minutes", "threads")
        settings = {name: value for name, value in asdict(self).items() if name not in free}
        lists = {name: list(value) for name, value in settings.items() if isinstance(value, tuple)}
        return {**settings, **lists, "text": None if text is None else text.fingerprint()}
