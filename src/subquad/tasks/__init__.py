"""Tasks to train and score models on, one file each: data, model and score."""

try:
    import transformers  # noqa: F401
except ImportError as error:
    from subquad.errors import MissingExtraError

    raise MissingExtraError("subquad.tasks needs the extra subquad[train]. Install it: pip install 'subquad[train]'") from error

from subquad.tasks.base import Settings, Splits, Task, TaskInfo
from subquad.tasks.cifar10 import Cifar10
from subquad.tasks.digits import Digits
from subquad.tasks.enwik8 import Enwik8
from subquad.tasks.imdb import Imdb
from subquad.tasks.listops import ListOps
from subquad.tasks.multi30k import Multi30k
from subquad.tasks.pycode import PyCode
from subquad.tasks.recall import Recall
from subquad.tasks.source import DataError
from subquad.tasks.stsb import STSB
from subquad.tasks.wikitext2 import WikiText2

__all__ = ["TASKS", "DataError", "Settings", "Splits", "Task", "TaskInfo"]

_ALL: tuple[type[Task], ...] = (Digits, ListOps, Recall, PyCode, Cifar10, WikiText2, Enwik8, Imdb, Multi30k, STSB)
TASKS: dict[str, type[Task]] = {task.info.name: task for task in _ALL}
