"""A pretrained Hugging Face model with another attention: swap it, measure the damage, repair it, save it."""

from subquad import models as _models  # noqa: F401 - first, as its error says what to install if transformers is missing
from subquad.conversion.diagnosis import Diagnosis, diagnose
from subquad.conversion.pretrained import load
from subquad.conversion.repair import Kept, Schedule, StageProgress, align, finetune, keep_softmax, transfer
from subquad.conversion.swap import convert, revert
from subquad.models.converted.installation import mechanisms

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
    "load",
    "mechanisms",
    "revert",
    "transfer",
]
