"""`SubquadCache`: what a decoder remembers between tokens, as a Hugging Face `Cache` whose layers hold subquad states."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
class Step(Generic[T]):
    """What a piece of tokens makes of a value: the new one, and a way to compute it for the first few of them only."""

    new: T
    tokens: int
    again: Callable[[int], T]


class Rolling(Generic[T]):
    """A value that each piece of tokens replaces; while recording, with the way back."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.recording = False
        self._steps: list[tuple[T | None, Step[T]]] = []

    def take(self, step: Step[T]) -> None:
        if self.recording:
            self._steps.append((self.value, step))
        self.value = step.new

    def map(self, change: Callable[[T], T]) -> None:
        """Change the value, and all that was recorded on the way to it."""

        def changed(again: Callable[[int], T]) -> Callable[[int], T]:
            return lambda keep: change(again(keep))

        self._steps = [
            (None if before is None else change(before), Step(change(step.new), step.tokens, changed(step.again)))
            for before, step in self._steps
        ]
        if self.value is not None:
            self.value = change(self.value)

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens`, and what was recorded."""
        known = sum(step.tokens for _, step in self._steps)
        if tokens > known:
            raise StateError(
                f"a cache goes back over the tokens it has recorded; got {tokens} to remove, and {known} are recorded. "
                "Call activate_past_recording() before the tokens that may have to go."
            )
        while tokens:
            before, step = self._steps.pop()
            keep = max(step.tokens - tokens, 0)
            tokens -= step.tokens - keep
            self.value = step.again(keep) if keep else before
        self._steps.clear()

    def reset(self) -> None:
        self.value = None
        self._steps.clear()


class SubquadLayer(CacheLayerMixin):
    """One layer's part: the state of its self-attention, and the keys and values of the source it also attends to."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.past: Rolling[State] = Rolling()
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
        return self.past.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.past.recording = recording
        if not recording:
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
            "a SubquadCache holds states of mechanisms, not another model's keys and values. Pass it to a subquad model."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens."""
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
    """The part of a converted model's layer. That model's attention hands its keys to the cache, and then to the mechanism,
    which finds this layer behind them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = False  # for the mechanism that the keys were handed to

    @staticmethod
    def behind(key: Tensor) -> ConvertedLayer | None:
        return getattr(key, "_subquad_layer", None)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.is_waiting:
            raise UnsupportedError(
                "a SubquadCache holds states of mechanisms, and the attention that it was passed to has none. Pass it to the "
                "converted model that it was made for; after a call that was refused, begin with a new one."
            )
        key_states._subquad_layer, self.is_waiting = self, True  # type: ignore[attr-defined]
        return key_states, value_states

    def take(self, step: Step[State]) -> None:
        self.past.take(step)
        self.is_waiting = False

    def reset(self) -> None:
        super().reset()
        self.is_waiting = False


class SubquadCache(Cache):
    """A cache for the decoder of a subquad model, or of a converted one; `generate` makes one, or takes one to go on from.

    Its size is that of the mechanisms' states: constant for kernelized ones, bounded for windowed ones, growing for softmax.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        layers: list[SubquadLayer]
        if isinstance(config, SubquadConfig):
            decoder = config.decoder_part() if config.is_encoder_decoder else config
            layers = [SubquadLayer() for _ in range(decoder.num_hidden_layers)]
        elif (converted := getattr(config, "subquad", None)) is not None:
            layers = [ConvertedLayer() for _ in range(converted["cache_layers"])]
        else:
            raise InputError(f"SubquadCache takes the config of a subquad or a converted model; got {type(config).__name__}.")
        super().__init__(layers=layers)
        self.position: Rolling[Tensor] = Rolling()  # (B,): real tokens so far

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        position = 0 if self.position.value is None else self.position.value.nbytes
        return position + sum(layer.nbytes for layer in self.layers)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.position.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens, as assisted decoding does; needs `activate_past_recording` before them."""
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
            raise InputError(f"repeats must be a whole number of at least 1; got {repeats!r}.")
        super().batch_repeat_interleave(repeats)
        self.position.map(lambda position: position.repeat_interleave(repeats))


def _removed(tokens_to_remove: int) -> int:
    try:
        number = operator.index(tokens_to_remove)
    except TypeError:
        number = 1
    if number > 0:
        raise StateError(
            f"crop takes how many tokens to remove as a whole number below 0, as in crop(-3); got {tokens_to_remove!r}."
        )
    return -number


def _rows(indices: Tensor) -> Tensor:
    if not isinstance(indices, Tensor):
        raise InputError(f"rows are named by a tensor of indices, or of True and False; got {type(indices).__name__}.")
    return indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
