"""A pretrained Hugging Face model with another attention: swap it, see what broke, repair it, save it."""

from subquad import models as _models  # noqa: F401 - without transformers, it says what to install
from subquad.conversion.swap import convert, mechanisms, revert

__all__ = ["convert", "mechanisms", "revert"]
