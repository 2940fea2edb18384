"""One file per mechanism: its formula, paper and cost; its options; its idea; its record."""

from subquad.families.base import Mechanism
from subquad.mechanisms.bigbird import BigBird
from subquad.mechanisms.clustered import Clustered
from subquad.mechanisms.efficient import Efficient
from subquad.mechanisms.hedgehog import Hedgehog
from subquad.mechanisms.hybrid import Hybrid
from subquad.mechanisms.induced import Induced
from subquad.mechanisms.linear import Linear
from subquad.mechanisms.linformer import Linformer
from subquad.mechanisms.local import Local
from subquad.mechanisms.longformer import Longformer
from subquad.mechanisms.nystrom import Nystrom
from subquad.mechanisms.performer import Performer
from subquad.mechanisms.plain import Plain
from subquad.mechanisms.pooled import Pooled
from subquad.mechanisms.reformer import Reformer
from subquad.mechanisms.rfa import RFA
from subquad.mechanisms.routing import Routing
from subquad.mechanisms.softmax import Softmax
from subquad.mechanisms.sparse_fixed import SparseFixed
from subquad.mechanisms.sparse_strided import SparseStrided
from subquad.mechanisms.svd import SVD
from subquad.mechanisms.t2r import T2R
from subquad.mechanisms.taylor import Taylor

# To register a built-in mechanism, add it here.
MECHANISMS: tuple[type[Mechanism], ...] = (
    Softmax,
    Linear,
    Taylor,
    Plain,
    Efficient,
    Performer,
    RFA,
    Hedgehog,
    T2R,
    Hybrid,
    Local,
    SparseStrided,
    SparseFixed,
    Longformer,
    BigBird,
    Reformer,
    Routing,
    Clustered,
    Linformer,
    Nystrom,
    Pooled,
    Induced,
    SVD,
)

__all__ = [
    "MECHANISMS",
    "RFA",
    "SVD",
    "T2R",
    "BigBird",
    "Clustered",
    "Efficient",
    "Hedgehog",
    "Hybrid",
    "Induced",
    "Linear",
    "Linformer",
    "Local",
    "Longformer",
    "Nystrom",
    "Performer",
    "Plain",
    "Pooled",
    "Reformer",
    "Routing",
    "Softmax",
    "SparseFixed",
    "SparseStrided",
    "Taylor",
]
