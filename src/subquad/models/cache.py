"""`SubquadCache`: the Hugging Face cache of a decoder. Its layers hold decode states instead of keys and values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.errors import InputError, StateError, UnsupportedError
from subquad.layer import Source
from subquad.models.configuration import SubquadConfig
from subquad.state import State

T = TypeVar("T")


@dataclass(frozen=True)
class Update(Generic[T]):
    """The new value of a `Rewindable` after a chunk of tokens.

    Args:
        value: the new value.
        tokens: the length of the piece.
        recompute: computes the value after the first few tokens of the piece only; called with their number.
    """

    value: T
    tokens: int
    recompute: Callable[[int], T]


class Rewindable(Generic[T]):
    """A value that each piece of tokens replaces. While recording, it can go back to what it was."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.is_recording = False
        self._updates: list[tuple[T | None, Update[T]]] = []  # with the value before each

    def apply(self, update: Update[T]) -> None:
        if self.is_recording:
            self._updates.append((self.value, update))
        self.value = update.value

    def map(self, change: Callable[[T], T]) -> None:
        """Change the value, and everything recorded."""

        def changed(recompute: Callable[[int], T]) -> Callable[[int], T]:
            return lambda keep: change(recompute(keep))

        self._updates = [
            (None if before is None else change(before), Update(change(new.value), new.tokens, changed(new.recompute)))
            for before, new in self._updates
        ]
        if self.value is not None:
            self.value = change(self.value)

    def crop(self, tokens: int) -> None:
        """Go back by `tokens`, and drop everything recorded."""
        recorded = sum(update.tokens for _, update in self._updates)
        if tokens > recorded:
            raise StateError(
                f"a cache can remove only the tokens that it has recorded; got {tokens} to remove, and {recorded} are "
                "recorded. Call activate_past_recording() before the tokens that may have to be removed."
            )
        while tokens:
            before, update = self._updates.pop()
            keep = max(update.tokens - tokens, 0)
            tokens -= update.tokens - keep
            self.value = update.recompute(keep) if keep else before
        self._updates.clear()

    def reset(self) -> None:
        self.value = None
        self._updates.clear()


class RewindableState(Rewindable[State]):
    """A decode state; unless recording, nobody needs the old one after a piece of tokens."""

    def to_replace(self) -> State | None:
        """The state for a call whose result replaces it: the call may overwrite its memory, unless it is recorded."""
        return self.value if self.value is None or self.is_recording else self.value.donate()


class SubquadLayer(CacheLayerMixin):
    """The cache of one layer: the state of its self-attention, and the keys and values of the source it also attends to."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.past = RewindableState()
        self.source: Source | None = None

    @property
    def state(self) -> State | None:
        return self.past.value

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.state, self.source) if part is not None)

    @property
    def batch_size(self) -> int:
        if self.state is None:
            raise AttributeError("an empty cache has no batch size yet")
        return self.state.batch

    @property
    def record_past(self) -> bool:
        return self.past.is_recording

    @record_past.setter
    def record_past(self, is_recording: bool) -> None:
        self.past.is_recording = is_recording
        if not is_recording:
            self.past.crop(0)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, *_: Any) -> None:
        self.update()

    def update(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            "a SubquadCache holds decode states, not another model's keys and values. Pass it to a subquad model."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens."""
        self.past.crop(_removed(tokens_to_remove))

    def reset(self) -> None:
        self.past.reset()
        self.source = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.past.map(lambda state: state.reorder(beam_idx))
        if self.source is not None:
            self.source = self.source.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(_rows(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.reorder_cache(torch.arange(self.state.batch, device=self.state.device).repeat_interleave(repeats))


class ConvertedLayer(SubquadLayer):
    """The cache of one layer of a converted model.

    The model's own attention module updates it with keys, as it would any cache, and then calls the mechanism, which updates it
    with a state. Hooks around the attention module (`converted.caches`) pass it to the mechanism.
    """

    def __init__(self) -> None:
        super().__init__()
        self.expects: Literal["nothing", "keys", "state"] = "nothing"

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.expects != "keys":
            raise UnsupportedError(
                "a SubquadCache holds decode states, and the attention that it was passed to has no mechanism to continue from "
                "them. Pass it to the converted model that it was made for."
            )
        self.expects = "state"
        return key_states, value_states

    def apply(self, update: Update[State]) -> None:
        self.past.apply(update)
        self.expects = "nothing"

    def reset(self) -> None:
        super().reset()
        self.expects = "nothing"


class SubquadCache(Cache):
    """A cache for the decoder of a subquad model or of a converted model; `generate` makes one, or continues from one.

    It is as large as the states of the mechanisms: constant for kernelized ones, bounded for windowed ones, growing for
    softmax."""

    def __init__(self, config: PreTrainedConfig) -> None:
        layers: list[SubquadLayer]
        if isinstance(config, SubquadConfig):
            decoder = config.decoder_part() if config.is_encoder_decoder else config
            layers = [SubquadLayer() for _ in range(decoder.num_hidden_layers)]
        elif (record := getattr(config, "subquad", None)) is not None:
            layers = [ConvertedLayer() for _ in range(record["cache_layers"])]
        else:
            raise InputError(
                f"SubquadCache takes the config of a subquad model or of a converted model; got {type(config).__name__}."
            )
        super().__init__(layers=layers)
        self.position: Rewindable[Tensor] = Rewindable()  # (B,): real tokens so far

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        position = 0 if self.position.value is None else self.position.value.nbytes
        return position + sum(layer.nbytes for layer in self.layers)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.position.is_recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens, as assisted decoding does; needs `activate_past_recording` before them."""
        if self.position.value is not None:
            self.position.crop(_removed(tokens_to_remove))
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.position.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.position.map(lambda position: position.index_select(0, beam_idx.to(position.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(_rows(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise InputError(f"repeats must be an integer of at least 1; got {repeats!r}.")
        super().batch_repeat_interleave(repeats)
        self.position.map(lambda position: position.repeat_interleave(repeats))


def _removed(tokens_to_remove: int) -> int:
    try:
        number = operator.index(tokens_to_remove)
    except TypeError:
        number = 1
    if number > 0:
        raise StateError(f"crop takes minus the number of tokens to remove, an integer such as -3; got {tokens_to_remove!r}.")
    return -number


def _rows(indices: Tensor) -> Tensor:
    if not isinstance(indices, Tensor):
        raise InputError(f"indices must be a tensor of row numbers or a bool tensor; got {type(indices).__name__}.")
    return indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
