"""The contract in classes of tests, one or more for each of its points."""

from subquad.testing.contract.causality import Causality
from subquad.testing.contract.compilation import Compilation, FakeTensors
from subquad.testing.contract.decoding import Decoding, States
from subquad.testing.contract.determinism import Determinism
from subquad.testing.contract.gradients import Gradients, UsualSizes
from subquad.testing.contract.grouped_heads import GroupedHeads
from subquad.testing.contract.oracle import Lengths, Oracle, OracleOptions
from subquad.testing.contract.padding import Padding
from subquad.testing.contract.precision import Precision
from subquad.testing.contract.record import Record
from subquad.testing.contract.refusal import Refusal
from subquad.testing.contract.selection import Contract


class MechanismContract(
    Record,
    Oracle,
    OracleOptions,
    Lengths,
    Gradients,
    UsualSizes,
    Causality,
    Padding,
    Decoding,
    States,
    GroupedHeads,
    Precision,
    Determinism,
    Refusal,
    Compilation,
    FakeTensors,
):
    """The whole contract. Subclass it under a name that pytest collects, and list the mechanisms."""


__all__ = [
    "Causality",
    "Compilation",
    "Contract",
    "Decoding",
    "Determinism",
    "FakeTensors",
    "Gradients",
    "GroupedHeads",
    "Lengths",
    "MechanismContract",
    "Oracle",
    "OracleOptions",
    "Padding",
    "Precision",
    "Record",
    "Refusal",
    "States",
    "UsualSizes",
]
