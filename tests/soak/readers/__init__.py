"""A reader for every kind of file that subquad reads, by name."""

from tests.soak.readers.base import Reader
from tests.soak.readers.runs import Comparison, Conversion, RepairCheckpoint, Training
from tests.soak.readers.tensors import Inputs, Model, States
from tests.soak.readers.text import CalibrationText, Data

READERS: dict[str, type[Reader]] = {
    "results of compare": Comparison,
    "results and checkpoints of train": Training,
    "results of convert": Conversion,
    "models": Model,
    "--qkv": Inputs,
    "decode states": States,
    "checkpoints of repair": RepairCheckpoint,
    "data of tasks": Data,
    "calibration text": CalibrationText,
}
