"""One file a mechanism: its formula, paper and cost; its options; its idea; its record."""

from subquad.mechanisms.base import NEEDS, Call, Config, Info, Spec
from subquad.mechanisms.efficient import Efficient
from subquad.mechanisms.induced import Induced
from subquad.mechanisms.linear import Linear
from subquad.mechanisms.linformer import Linformer
from subquad.mechanisms.nystrom import Nystrom
from subquad.mechanisms.performer import Performer
from subquad.mechanisms.plain import Plain
from subquad.mechanisms.rfa import RFA
from subquad.mechanisms.softmax import Softmax
from subquad.mechanisms.svd import SVD
from subquad.mechanisms.taylor import Taylor

# Registering a mechanism is adding it here.
MECHANISMS: tuple[type[Config], ...] = (
    Softmax,
    Linear,
    Taylor,
    Plain,
    Efficient,
    Performer,
    RFA,
    Linformer,
    Nystrom,
    Induced,
    SVD,
)

__all__ = [
    "MECHANISMS",
    "NEEDS",
    "RFA",
    "SVD",
    "Call",
    "Config",
    "Efficient",
    "Induced",
    "Info",
    "Linear",
    "Linformer",
    "Nystrom",
    "Performer",
    "Plain",
    "Softmax",
    "Spec",
    "Taylor",
]
