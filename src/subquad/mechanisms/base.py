"""What a mechanism is: a record of facts (`Info`), its options (`Config`), and a checked call to run (`Call`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from subquad.errors import OptionError, closest
from subquad.state import Parts, State

if TYPE_CHECKING:
    from subquad.api import Mechanism

# What a caller may need of a mechanism, and how a sentence says it.
NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "is_causal": "causal attention",
        "bidirectional": "bidirectional attention",
        "cross": "cross-attention, M keys for N queries",
        "decoder_cross": "cross-attention of a decoder, whose queries may not see each other",
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
    """The facts of one mechanism. The command line, the documents and the tests read them from here.

    Args:
        name: what `method=` takes.
        engine: which of the engines runs it.
        idea: one line.
        paper: authors, year, title, where to find it.
        time, memory: cost of a forward pass, N queries, M keys, D channels, m features. Memory beyond inputs and output.
        state: size of the decode state after T tokens.
        exact: it computes softmax attention itself.
        replaces_softmax: it is another function, not an estimate, and not exact over some pairs: a model is trained with it.
        parameters: what is learned, if anything.
        random: what is drawn from the seed, if anything.
        refuses: needs (see `NEEDS`) it cannot meet, each with the reason.
        global_mask: it takes global tokens by a mask.
        updates: which buffers change in training, and how; empty where none does.
        graph_breaks: why `torch.compile` cannot take it as one graph; empty where it can.
        small: options that make it small enough for the contract's tests.
        variants: options besides the defaults that the contract is tested with.
    """

    name: str
    engine: str
    idea: str
    paper: str
    time: str
    memory: str
    state: str = ""
    exact: bool = False
    replaces_softmax: bool = False
    parameters: str = ""
    random: str = ""
    refuses: Mapping[str, str] = field(default_factory=dict)
    global_mask: bool = False
    updates: str = ""
    graph_breaks: str = ""
    small: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Mapping[str, Any], ...] = ()

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
class Spec:
    """The sizes a mechanism is built for; `value_dim` is Dv, `dim` the width of the tokens, where they are known."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dim: int | None = None


@dataclass(frozen=True)
class Call:
    """One checked call. Shapes: query (B, H, N, D), key (B, K, M, D), value (B, K, M, Dv); K divides H."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    key_padding_mask: Tensor | None  # (B, M) bool
    attn_mask: Tensor | None  # broadcasts to (B, H, N, M), with a past to (B, H, N, past + M)
    scale: float | None
    dropout_p: float
    state: State | None
    return_state: bool
    weights: Mapping[str, Tensor]  # the mechanism's buffers and parameters
    hidden: Tensor | None = None  # (B, M, dim): the tokens behind the keys
    global_mask: Tensor | None = None  # (B, M) bool: tokens that see all and that all see

    @property
    def seen(self) -> int:
        """How many tokens the state has seen."""
        return 0 if self.state is None else self.state.length

    @property
    def past(self) -> Parts | None:
        return None if self.state is None else self.state.parts

    @property
    def needs(self) -> tuple[str, ...]:
        """What this call asks of a mechanism, in the words of `NEEDS`."""
        asked = {
            "is_causal": self.is_causal,
            "bidirectional": not self.is_causal,
            "cross": self.query.shape[2] != self.key.shape[2],
            "key_padding_mask": self.key_padding_mask is not None,
            "attn_mask": self.attn_mask is not None,
            "scale": self.scale is not None,
            "dropout_p": self.dropout_p > 0,
            "enable_gqa": self.query.shape[1] != self.key.shape[1],
            "decode": self.state is not None or self.return_state,
            "global_mask": self.global_mask is not None,
        }
        return tuple(need for need, is_asked in asked.items() if is_asked)


class Config(ABC):
    """Options of one mechanism: subclass as a frozen, keyword-only dataclass with an `info`, and write `run`."""

    info: ClassVar[Info]

    def __new__(cls, *args: object, **options: object) -> Config:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if args:
            raise OptionError(f"{cls.__name__} takes its options by name; got {args!r}. Options: {_list(known)}.")
        for name in options:
            if name not in known:
                raise OptionError(f"{cls.__name__} has no option {name!r}{closest(name, known)} Options: {_list(known)}.")
        return super().__new__(cls)

    @abstractmethod
    def run(self, call: Call) -> tuple[Tensor, Parts | None]:
        """The output (B, H, N, Dv) and, if asked for, what the state keeps."""

    @property
    def refuses(self) -> Mapping[str, str]:
        """What these options cannot do, each need with its reason; where options matter, more than `info.refuses`."""
        return self.info.refuses

    def reasons(self, needs: Iterable[str]) -> dict[str, str]:
        """Why these options cannot meet `needs`: need -> reason. Empty if they can."""
        needs = set(needs)
        needs = needs.union(*(_IMPLIED.get(need, ()) for need in needs))
        return {need: reason for need, reason in self.refuses.items() if need in needs}

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
    def lends_parameters(self) -> bool:
        """Whether the layers of a model share one set of parameters."""
        return False

    def without_values(self) -> Config:
        """Options that attend alike, to the tokens, and bring no values of their own: what a picture can show."""
        return self

    def buffers(self, spec: Spec) -> dict[str, Tensor]:
        """What is drawn from the seed, on the CPU, in float64 or integers."""
        return {}

    def update(self, call: Call) -> dict[str, Tensor]:
        """The buffers that a call in training changes, at their new values."""
        return {}

    def parameters(self, spec: Spec) -> dict[str, Tensor]:
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
    ) -> Mechanism:
        """This mechanism as a module that holds its buffers and parameters, called like `subquad.attention`."""
        from subquad.api import Mechanism  # the layer above: build is its shorthand

        return Mechanism(self, heads=heads, head_dim=head_dim, kv_heads=kv_heads, value_dim=value_dim, dim=dim)

    def _require_count(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self._refuse(name, "is a whole number of at least 1")
            self._require_small(name)

    def _require_whole(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                self._refuse(name, "is a whole number of at least 0")
            self._require_small(name)

    def _require_small(self, name: str) -> None:
        if getattr(self, name) >= 2**31:
            self._refuse(name, "is a whole number below 2**31")

    def _require_seed(self, name: str = "seed") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            self._refuse(name, "is a whole number from 0 to 2**63 - 1")

    def _require_choice(self, name: str, choices: Iterable[object]) -> None:
        if getattr(self, name) not in tuple(choices):
            self._refuse(name, f"is one of {_list(map(repr, choices))}")

    def _require_flag(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "is True or False")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                self._refuse(name, "is a finite number above 0")

    def _refuse(self, name: str, rule: str) -> None:
        raise OptionError(f"{type(self).__name__}.{name} {rule}; got {getattr(self, name)!r}.")


def _list(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"
