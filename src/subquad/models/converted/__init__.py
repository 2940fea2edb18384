"""Converted models: Hugging Face models whose attention is computed by mechanisms. How they run, save and load.

How they are made is in `subquad.conversion`.
"""

from subquad.models.converted import interface, quantizer


def register() -> None:
    """Make the attention of converted models, and the way to load them, known to transformers."""
    interface.register()
    quantizer.register()
