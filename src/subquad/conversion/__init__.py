"""A pretrained Hugging Face model with another attention: swap it, see what broke, repair it, save it."""

from subquad import models as _models  # noqa: F401 - without transformers, it says what to install
from subquad.conversion.diagnosis import Diagnosis, diagnose
from subquad.conversion.repair import Kept, Schedule, StageProgress, align, finetune, keep_softmax, transfer
from subquad.conversion.swap import convert, mechanisms, revert

__all__ = [
    "Diagnosis",
    "Kept",
    "Schedule",
    "StageProgress",
    "align",
    "convert",
    "diagnose",
    "finetune",
    "keep_softmax",
    "mechanisms",
    "revert",
    "transfer",
]
