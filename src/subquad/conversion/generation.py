"""Text from any model that Hugging Face's `generate` knows: converted, built on subquad, or as it came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.streamers import BaseStreamer

from subquad import checks
from subquad.conversion import record
from subquad.conversion.pretrained import class_of, context_of, open_config, open_model, open_tokenizer
from subquad.errors import InputError
from subquad.models import SubquadCache, SubquadConfig, SubquadModel
from subquad.tasks.language import BYTES, byte_ids

VALUES = 256  # of a byte
_UNFINISHED = "\ufffd"  # what decoding gives for a character that is not whole yet


@dataclass(frozen=True)
class Written:
    """What a model wrote.

    Args:
        tokens: how many it wrote.
        seconds: that they took, the reading of the prompt included.
        state_bytes: what it remembers of prompt and text in the end; None for a model without a cache.
        is_cut: it stopped because its context was full.
    """

    text: str
    tokens: int
    seconds: float
    state_bytes: int | None
    is_cut: bool


class ByteTokens:
    """The tokenizer of models whose tokens are bytes."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, Tensor]:
        return {"input_ids": byte_ids(text.encode()).long()[None]}

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(int(number) for number in ids).decode(errors="replace")


@dataclass(frozen=True)
class Writer:
    """A model with the tokenizer that it reads and writes by."""

    model: PreTrainedModel
    tokenizer: Any

    @classmethod
    def open(cls, place: str, *, is_bytes: bool = False, dtype: str = "float32") -> Writer:
        """From a folder or a hub name; `is_bytes` says that tokens are bytes, where its config does not."""
        config = open_config(place)
        kind = class_of(config)
        _require_head(SubquadModel if kind is AutoModel and isinstance(config, SubquadConfig) else kind, config)
        is_bytes = is_bytes or getattr(config, "tokenizer_class", None) == BYTES
        if is_bytes and config.vocab_size > VALUES:
            raise InputError(f"a byte has {VALUES} values; got a model of {config.vocab_size:,} tokens. Leave --bytes out.")
        try:
            tokenizer = ByteTokens() if is_bytes else open_tokenizer(place)
        except InputError as error:
            raise InputError(f"{error} If the model's tokens are bytes, say --bytes.") from error
        model = open_model(place, config, dtype=dtype)
        _require_head(type(model), config)
        return cls(model, tokenizer)

    def write(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 100,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        beyond_context: bool = False,
        tell: Callable[[str], object] | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Written:
        """The prompt continued; for an encoder-decoder, its answer.

        Args:
            temperature: of sampling; None for the most likely token each time.
            top_p: sample from the likeliest tokens that have this probability together.
            beyond_context: read and write more tokens than the model was made for.
            tell: called with each piece of text as it is written.
            is_stopping: asked after each token.
        """
        choice = _choice(temperature, top_p)
        checks.seed(seed)
        given = self.tokenizer(prompt, return_tensors="pt")
        read = given["input_ids"].shape[1]
        if not read:
            raise InputError("a prompt has at least one token; got an empty one.")
        is_answer = self.model.config.is_encoder_decoder
        room = self._room(read, beyond_context)
        allowed = max_new_tokens if room is None or is_answer else min(max_new_tokens, room)
        if allowed < 1:
            raise InputError(f"max_new_tokens is at least 1, with room for it in the context; got {max_new_tokens}.")
        streamer = None if tell is None else Streamer(self.tokenizer, tell, has_prompt=not is_answer)
        torch.manual_seed(seed)
        begun = time.monotonic()
        try:
            found = self.model.generate(
                input_ids=given["input_ids"], attention_mask=given.get("attention_mask"), max_new_tokens=allowed,
                streamer=streamer, stopping_criteria=StoppingCriteriaList([_Asked(is_stopping)]),
                return_dict_in_generate=True, **choice,
            )  # fmt: skip
        except IndexError as error:
            raise InputError(
                f"this model has no positions beyond its context of {context_of(self.model.config)} tokens. Leave "
                "--beyond-context out."
            ) from error
        ids = found.sequences[0, 1 if is_answer else read :]  # an answer begins behind the decoder's start
        is_cut = allowed < max_new_tokens and len(ids) == allowed
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Written(text, len(ids), time.monotonic() - begun, state_bytes(found.past_key_values), is_cut)

    def _room(self, read: int, beyond_context: bool) -> int | None:
        """Tokens that may come after the prompt; None for any number."""
        config = self.model.config
        if beyond_context:
            if (conversion := record.written(config)) is not None:
                config.subquad = {**vars(conversion), "is_beyond_allowed": True}
            return None
        conversion = record.written(config)
        context = context_of(config)
        if context is None or (conversion is not None and conversion.is_beyond_allowed):
            return None
        if read >= context:
            raise InputError(
                f"the prompt has {read} tokens, and this model was made for {context} with what it writes. Shorten it; or, "
                "where its positions reach further, allow it with --beyond-context."
            )
        return context - read


def state_bytes(cache: Any) -> int | None:
    """Bytes that a cache holds; None for what is no cache."""
    if isinstance(cache, SubquadCache):
        return cache.nbytes
    if isinstance(cache, EncoderDecoderCache):
        return sum(state_bytes(part) or 0 for part in (cache.self_attention_cache, cache.cross_attention_cache))
    if not isinstance(cache, Cache):
        return None
    parts = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def _require_head(kind: Any, config: PreTrainedConfig) -> None:
    """That models of this class write text; an Auto class cannot tell before there is a model."""
    if issubclass(kind, PreTrainedModel) and not kind.can_generate():
        name = (config.architectures or [kind.__name__])[0]
        raise InputError(f"{name} has no head that writes text. Pass a language model.")


def _choice(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """How the next token is chosen; what a model's own generation config says of it does not count."""
    if temperature is None and top_p is None:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    warmth = 1.0 if temperature is None else temperature
    if not warmth > 0 or not 0 < (1.0 if top_p is None else top_p) <= 1:
        raise InputError(f"a temperature is above 0, and top_p above 0 and at most 1; got {temperature} and {top_p}.")
    return {"do_sample": True, "temperature": warmth, "top_p": top_p, "top_k": 0}


class _Asked(StoppingCriteria):
    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self.is_stopping = is_stopping

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.is_stopping(), device=input_ids.device)


class Streamer(BaseStreamer):
    """Tells the text of tokens as they come, a character when all of its bytes are there.

    What a token adds is told by decoding it with the one before, as tokens may read differently at the beginning of a text.
    """

    def __init__(self, tokenizer: Any, tell: Callable[[str], object], has_prompt: bool) -> None:
        self.tokenizer, self.tell, self.is_prompt = tokenizer, tell, has_prompt
        self.told: list[int] = []  # the tokens that were told last
        self.waiting: list[int] = []

    def put(self, value: Tensor) -> None:
        if self.is_prompt:
            self.is_prompt = False
            return
        self.waiting += value.flatten().tolist()
        if not (text := self._new_text()).endswith(_UNFINISHED) and text:
            self._tell(text)

    def end(self) -> None:
        self._tell(self._new_text())

    def _new_text(self) -> str:
        before, now = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (self.told, [*self.told, *self.waiting]))
        return now[len(before) :]

    def _tell(self, text: str) -> None:
        self.told, self.waiting = self.waiting or self.told, []
        if text:
            self.tell(text)
