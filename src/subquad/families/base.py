"""What a mechanism is: a frozen object with its options (`Mechanism`), and a record of facts about it (`Info`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from subquad.engines.call import Call
from subquad.engines.state_spec import StateSpec
from subquad.engines.step import Step
from subquad.errors import OptionError, closest, shown
from subquad.state import StateTensors

# What a caller may require of a mechanism, and how error messages phrase it.
NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "is_causal": "causal attention",
        "bidirectional": "bidirectional attention",
        "cross": "cross-attention, M keys for N queries",
        "decoder_cross": "cross-attention in a decoder, where no query may depend on another",
        "key_padding_mask": "a key_padding_mask",
        "attn_mask": "an attn_mask",
        "scale": "a scale",
        "dropout_p": "dropout of attention weights",
        "enable_gqa": "fewer key-value heads than query heads",
        "decode": "a decode state",
        "global_mask": "a global_mask",
        "functional": "a plain function call, without a module",
    }
)
_IMPLIED = {"decode": {"is_causal"}, "cross": {"bidirectional"}, "decoder_cross": {"cross", "bidirectional"}}


@dataclass(frozen=True, kw_only=True, eq=False)
class Info:
    """The facts about one mechanism. The command line, the documentation and the tests read them from here.

    Args:
        name: what `method=` takes.
        family: "exact", "kernelized", "sparse", "bucketed", "low_rank" or "hybrid": what kind of idea it is.
        engine: the module of `subquad.engines` that computes it.
        idea: one line.
        paper: authors, year, title, where to find it.
        time, memory: cost of a forward pass, for N queries, M keys, D channels, m features. Memory is beyond inputs and output.
        state: size of the decode state, after T tokens; empty if there is none.
        state_grows: whether that size grows with T.
        exact: it computes softmax attention itself.
        replaces_softmax: it is another function, neither an estimate of softmax attention nor exact over some of the pairs;
            models must be trained with it.
        is_oracle: an upper bound for comparison, too slow for use; commands run it only when it is named.
        parameters: what is learned, if anything.
        random: what is drawn from the seed, if anything.
        refuses: the needs (see `NEEDS`) it does not meet, each with the reason.
        global_mask: it takes global tokens by a mask.
        updates: which buffers change in training, and how; empty if none does.
        graph_breaks: why `torch.compile` cannot trace it as one graph; empty if it can.
    """

    name: str
    family: str
    engine: str
    idea: str
    paper: str
    time: str
    memory: str
    state: str = ""
    state_grows: bool = False
    exact: bool = False
    replaces_softmax: bool = False
    is_oracle: bool = False
    parameters: str = ""
    random: str = ""
    refuses: Mapping[str, str] = field(default_factory=dict)
    global_mask: bool = False
    updates: str = ""
    graph_breaks: str = ""

    def __post_init__(self) -> None:
        refuses = dict(self.refuses)
        if not self.global_mask:
            refuses.setdefault("global_mask", "it has no global tokens")
        object.__setattr__(self, "refuses", MappingProxyType(refuses))

    def __reduce__(self) -> tuple[Any, ...]:
        return _info, ({**vars(self), "refuses": dict(self.refuses)},)

    @property
    def supports(self) -> tuple[str, ...]:
        """The needs it meets, with default options."""
        return tuple(need for need in NEEDS if need not in self.refuses)


def _info(facts: dict[str, Any]) -> Info:
    return Info(**facts)


@dataclass(frozen=True)
class Sizes:
    """The sizes a mechanism's weights are made for; `value_dim` is Dv, `dim` the width of the tokens, if known."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dim: int | None = None


class Mechanism(ABC):
    """An attention mechanism with its options: subclass it as a frozen, keyword-only dataclass with an `info`; write `run`.

    It holds no tensors; `subquad.MechanismModule` holds its buffers and parameters.
    """

    info: ClassVar[Info]
    reference: ClassVar[Callable[..., Tensor] | None] = None  # as in `subquad.reference`, where built-in ones are
    module_class: ClassVar[Callable[..., Any]]  # MechanismModule; `subquad.attention`, which may import this file, sets it

    def __new__(cls, *args: object, **options: object) -> Mechanism:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if args:
            raise OptionError(f"{cls.__name__} takes its options by name; got {shown(args)}. Options: {_list(known)}.")
        for name in options:
            if name not in known:
                raise OptionError(f"{cls.__name__} has no option {name!r}{closest(name, known)} Options: {_list(known)}.")
        return super().__new__(cls)

    @abstractmethod
    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        """The output (B, H, N, Dv) and, if `call.return_state`, the tensors of the new state."""

    def state_spec(self, call: Call) -> StateSpec | None:
        """The tensors of a state that `call` may continue: one of `call.seen` tokens. None if that is not known.

        States that come from outside are checked against it before they are continued.
        """
        return None

    def step(self, call: Call) -> Step | None:
        """A prepared step for calls like this one: one token per sequence, a state, no masks, no gradients; None: use `run`.

        The weights of these calls do not change.
        """
        return None

    @cached_property
    def description(self) -> str:
        """The mechanism with all options, as text."""
        return repr(self)

    @property
    def refuses(self) -> Mapping[str, str]:
        """The needs that these options do not meet, each with the reason; some options add to `info.refuses`."""
        return self.info.refuses

    def reasons(self, needs: Iterable[str]) -> dict[str, str]:
        """Why these options cannot meet `needs`: need -> reason. Empty if they can."""
        needs = set(needs)
        needs = needs.union(*(_IMPLIED.get(need, ()) for need in needs))
        return {need: reason for need, reason in self.refuses.items() if need in needs}

    def for_length(self, length: int) -> Mechanism:
        """This mechanism with the options that follow from the sequence length set for `length`; itself if there are none."""
        return self

    @property
    def reads_tokens(self) -> bool:
        """Whether `run` needs `call.hidden`."""
        return False

    @property
    def shares_query_and_key(self) -> bool:
        """Whether one tensor is both query and key."""
        return False

    @property
    def fixes_value_dim(self) -> bool:
        """Whether its parameters have the width of the values, Dv."""
        return False

    @property
    def shares_parameters(self) -> bool:
        """Whether all layers of a model use one set of parameters."""
        return False

    def without_values(self) -> Mechanism:
        """This mechanism without its learned values (extra tokens, projections), for pictures of who attends to whom."""
        return self

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        """What is drawn from the seed, on the CPU, in float64 or integers."""
        return {}

    def update(self, call: Call) -> dict[str, Tensor]:
        """The buffers that a call in training changes, at their new values."""
        return {}

    def parameters(self, sizes: Sizes) -> dict[str, Tensor]:
        """What is learned, at its initial values."""
        return {}

    def build(
        self,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        dim: int | None = None,
    ) -> Any:
        """A `subquad.MechanismModule` that holds the buffers and parameters of this mechanism."""
        return type(self).module_class(self, heads=heads, head_dim=head_dim, kv_heads=kv_heads, value_dim=value_dim, dim=dim)

    def _require_count(self, *names: str, most: int = 2**31 - 1) -> None:
        for name in names:
            self._require_integer(name, 1, most)

    def _require_whole(self, *names: str) -> None:
        for name in names:
            self._require_integer(name, 0, 2**31 - 1)

    def _require_integer(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(name, f"must be an integer of at least {least}")
        if value > most:
            self._refuse(name, f"must be an integer of at most {most}")

    def _require_rows(self, *names: str, most: int = 2**16) -> None:
        """Counts whose product is the number of rows in the weights of a head, and so their size whatever the length is."""
        self._require_count(*names)
        total = math.prod(getattr(self, name) for name in names)
        if total > most:
            product = " times ".join(f"{type(self).__name__}.{name}" for name in names)
            raise OptionError(f"{product} must be at most {most}, since the weights have as many rows; got {total}.")

    def _require_seed(self, name: str = "seed") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            self._refuse(name, "must be an integer from 0 to 2**63 - 1")

    def _require_choice(self, name: str, choices: Iterable[str]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in tuple(choices):
            self._refuse(name, f"must be one of {_list(map(repr, choices))}")

    def _require_flag(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "must be True or False")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not is_finite(value) or value <= 0:
                self._refuse(name, "must be a finite number above 0")
            if not SMALLEST <= value <= LARGEST:
                self._refuse(name, f"must be from {SMALLEST:g} to {LARGEST:g}, which float32 can hold")

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise OptionError(f"{type(self).__name__}.{name} {rule}; got {shown(getattr(self, name))}.")


SMALLEST, LARGEST = 1e-30, 1e30  # numbers that float32 holds, and their products with ordinary ones, too


def is_finite(value: object) -> bool:
    """Whether `value` is an ordinary number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _list(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"
