"""Text from any model with Hugging Face's `generate`: converted models, subquad models and all others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.streamers import BaseStreamer

from subquad import checks
from subquad.conversion.pretrained import architectures, class_of, context_of, load_config, load_model, load_tokenizer
from subquad.errors import InputError, SubquadError, first_line
from subquad.models import SubquadCache, SubquadConfig, SubquadModel
from subquad.models.converted import record
from subquad.tasks.language import BYTES, byte_ids

BYTE_VALUES = 256
_INCOMPLETE = "\ufffd"  # how an incomplete character is decoded


@dataclass(frozen=True)
class Generated:
    """Generated text.

    Args:
        tokens: the number of new tokens.
        seconds: the time that they took, including the prompt.
        state_bytes: the size of the cache at the end; None for a model without a cache.
        is_cut: whether it ended because the context was full.
    """

    text: str
    tokens: int
    seconds: float
    state_bytes: int | None
    is_cut: bool


class ByteTokens:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, Tensor]:
        return {"input_ids": byte_ids(text.encode()).long()[None]}

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(int(number) for number in ids).decode(errors="replace")


@dataclass(frozen=True)
class TextGenerator:
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any

    @classmethod
    def load(cls, place: str, *, is_bytes: bool = False, dtype: str = "float32") -> TextGenerator:
        """From a folder or a hub name. Pass `is_bytes` if the tokens are bytes and the config does not say so."""
        config = load_config(place)
        model_class = class_of(config)
        is_unknown = model_class is AutoModel and isinstance(config, SubquadConfig)
        _require_head(SubquadModel if is_unknown else model_class, config)
        is_bytes = is_bytes or getattr(config, "tokenizer_class", None) == BYTES
        if is_bytes and config.vocab_size > BYTE_VALUES:
            raise InputError(
                f"a model of bytes has at most {BYTE_VALUES} tokens; got a model of {config.vocab_size:,}. Leave --bytes out."
            )
        try:
            tokenizer = ByteTokens() if is_bytes else load_tokenizer(place)
        except InputError as error:
            raise InputError(f"{error} If the model's tokens are bytes, pass --bytes.") from error
        model = load_model(place, config, dtype=dtype)
        _require_head(type(model), config)
        return cls(model, tokenizer)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 100,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        beyond_context: bool = False,
        on_text: Callable[[str], object] | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Generated:
        """The continuation of the prompt; for an encoder-decoder, the answer to it.

        Args:
            temperature: of sampling; None to take the most likely token.
            top_p: sample from the most likely tokens that together have this probability.
            beyond_context: allow more tokens than the model was trained for.
            on_text: called with each piece of text as it is generated.
            is_stopping: called after each token; True ends the text.
        """
        sampling = _sampling(temperature, top_p)
        checks.seed(seed)
        given = self._tokens(prompt)
        length = given["input_ids"].shape[1]
        if not length:
            raise InputError("a prompt must have at least one token; got an empty one.")
        is_answer = self.model.config.is_encoder_decoder
        room = self._room(length, beyond_context)
        allowed = max_new_tokens if room is None or is_answer else min(max_new_tokens, room)
        if allowed < 1:
            raise InputError(f"max_new_tokens must be at least 1, and fit into the context; got {max_new_tokens}.")
        streamer = None if on_text is None else Streamer(self.tokenizer, on_text, has_prompt=not is_answer)
        torch.manual_seed(seed)
        started = time.monotonic()
        try:
            found = self.model.generate(
                input_ids=given["input_ids"], attention_mask=given.get("attention_mask"), max_new_tokens=allowed,
                streamer=streamer, stopping_criteria=StoppingCriteriaList([_StopRequested(is_stopping)]),
                return_dict_in_generate=True, **sampling,
            )  # fmt: skip
        except SubquadError:
            raise
        except IndexError as error:
            raise InputError(
                f"this model has no positions beyond its context of {context_of(self.model.config)} tokens. Leave "
                "--beyond-context out."
            ) from error
        except Exception as error:  # its configs may say anything, and models have their own errors for that
            raise InputError(
                f"{type(self.model).__name__} cannot generate text: {type(error).__name__}: {first_line(error)} Check "
                "config.json and generation_config.json."
            ) from error
        ids = found.sequences[0, 1 if is_answer else length :]  # an answer comes after the start token of the decoder
        is_cut = allowed < max_new_tokens and len(ids) == allowed
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Generated(text, len(ids), time.monotonic() - started, state_bytes(found.past_key_values), is_cut)

    def _tokens(self, prompt: str) -> Any:
        try:
            return self.tokenizer(prompt, return_tensors="pt")
        except Exception as error:
            raise InputError(f"the tokenizer of this model cannot read the prompt: {first_line(error)}") from error

    def _room(self, length: int, beyond_context: bool) -> int | None:
        """The number of tokens that fit into the context after the prompt; None for no limit."""
        config = self.model.config
        conversion = record.read(config)
        if beyond_context:
            if conversion is not None:
                replace(conversion, beyond_context=True).write(config)
            return None
        context = context_of(config)
        if context is None or (conversion is not None and conversion.beyond_context):
            return None
        if length >= context:
            raise InputError(
                f"prompt and text must fit into the context of this model, {context} tokens; got a prompt of {length}. Shorten "
                "it; or, if the positions of the model reach further, pass --beyond-context."
            )
        return context - length


def state_bytes(cache: Any) -> int | None:
    """The size of a cache; None if it is not a cache."""
    if isinstance(cache, SubquadCache):
        return cache.nbytes
    if isinstance(cache, EncoderDecoderCache):
        return sum(state_bytes(part) or 0 for part in (cache.self_attention_cache, cache.cross_attention_cache))
    if not isinstance(cache, Cache):
        return None
    parts = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def _require_head(model_class: Any, config: PreTrainedConfig) -> None:
    """Refuse a class that does not generate text; for an Auto class that is known only when the model is loaded."""
    if issubclass(model_class, PreTrainedModel) and not model_class.can_generate():
        name = ", ".join(architectures(config)) or model_class.__name__
        raise InputError(f"{name} has no head that generates text. Pass a language model.")


def _sampling(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """How the next token is chosen, whatever the generation config of the model says."""
    if temperature is None and top_p is None:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    warmth = 1.0 if temperature is None else temperature
    if not warmth > 0 or not 0 < (1.0 if top_p is None else top_p) <= 1:
        raise InputError(f"temperature must be above 0, and top_p above 0 and at most 1; got {temperature} and {top_p}.")
    return {"do_sample": True, "temperature": warmth, "top_p": top_p, "top_k": 0}


class _StopRequested(StoppingCriteria):
    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self.is_stopping = is_stopping

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.is_stopping(), device=input_ids.device)


class Streamer(BaseStreamer):
    """Passes on the text of tokens as they come, each character when all of its bytes are there.

    Tokens are decoded with the one before, as a token may read differently at the beginning of a text.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object], has_prompt: bool) -> None:
        self.tokenizer, self.on_text, self.is_prompt = tokenizer, on_text, has_prompt
        self.passed: list[int] = []  # the tokens that were passed on last
        self.waiting: list[int] = []

    def put(self, value: Tensor) -> None:
        if self.is_prompt:
            self.is_prompt = False
            return
        self.waiting += value.flatten().tolist()
        if not (text := self._new_text()).endswith(_INCOMPLETE) and text:
            self._pass_on(text)

    def end(self) -> None:
        self._pass_on(self._new_text())

    def _new_text(self) -> str:
        tokens = (self.passed, [*self.passed, *self.waiting])
        before, now = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens)
        return now[len(before) :]

    def _pass_on(self, text: str) -> None:
        self.passed, self.waiting = self.waiting or self.passed, []
        if text:
            self.on_text(text)
