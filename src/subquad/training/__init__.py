"""The training run: one task, the same model and data, any number of mechanisms, one table.

A run is a folder. It can be stopped at any moment and resumed:

    OUT/results.json          the table and the curves, see `results`
    OUT/METHOD/best           the best model by the task's metric on validation rows; `from_pretrained` loads it
    OUT/METHOD/checkpoint-N   the newest checkpoint, to resume from
    OUT/METHOD/log.txt        what the worker process and its libraries print
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    from subquad.errors import MissingExtraError

    raise MissingExtraError(
        f"training is built on Hugging Face's Trainer and accelerate; {error.name} is not installed. "
        "Install the extra: pip install 'subquad[train]'"
    ) from error

from subquad.training.results import Record, Results, load
from subquad.training.session import TrainingProgress, train

__all__ = ["Record", "Results", "TrainingProgress", "load", "train"]
