"""The contract that every mechanism keeps, as tests to run on a mechanism of your own. Needs pytest.

A test file of a package that defines a mechanism:

    from my_package import MyMechanism
    from subquad.testing import MechanismContract

    class TestMyMechanism(MechanismContract):
        mechanisms = [MyMechanism(), MyMechanism(window=3)]

pytest then runs every test on every mechanism of the list, under its name and options: `test_roll_back[my_mechanism-window=3]`.
Choose small options: references are slow. Tests about what a mechanism refuses are left out, or skipped with the reason.
The built-in mechanisms are tested by the same classes. `MyMechanism.reference` is the oracle: a readable function with the
signature of those in `subquad.reference`.

| point | what | tests in `subquad.testing.contract` |
|---|---|---|
| | a complete record, registered, with a reference | `Record` |
| 1 | equal to the reference | `Oracle`, `OracleOptions`, `UsualSizes` |
| 2 | gradients | `Gradients`, `UsualSizes` |
| 3 | causality is exact | `Causality` |
| 4 | pad content never matters | `Padding` |
| 5 | batch mates do not matter | `Padding` |
| 6 | any length, also 0 | `Oracle`, `Lengths` |
| 7 | a row with nothing to attend to gives zeros | `Lengths` |
| 8 | parallel = chunked = one step at a time; states | `Decoding`, `States` |
| 9 | fewer key-value heads | `GroupedHeads` |
| 10 | low precision | `Precision` |
| 11 | determinism | `Determinism` |
| 12 | refusal, not silence | `Refusal` |
| 13 | torch.compile | `Compilation`, `FakeTensors` |

The rest is what these tests are made of: `Case`, `inputs`, `assert_close` and others.
"""

from subquad.testing.assertions import ROUNDING, assert_close, relative_error
from subquad.testing.cases import BATCH, DIM, HEADS, SIZES, VALUE_DIM, WIDTH, Case, Inputs, Largest, inputs
from subquad.testing.contract import MechanismContract

__all__ = [
    "BATCH",
    "DIM",
    "HEADS",
    "ROUNDING",
    "SIZES",
    "VALUE_DIM",
    "WIDTH",
    "Case",
    "Inputs",
    "Largest",
    "MechanismContract",
    "assert_close",
    "inputs",
    "relative_error",
]
