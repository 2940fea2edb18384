"""`SubquadConfig`: the sizes, mechanisms and positions of a transformer, with Hugging Face's names."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.generation import GenerationConfig

from subquad import checks
from subquad.errors import InputError, OptionError, UnsupportedError, closest, shown
from subquad.families.base import NEEDS, Mechanism
from subquad.models import methods
from subquad.registry import require

POSITIONS = ("rotary", "sinusoidal", "learned", "relative_bias", "alibi", "none")
BIASES = ("relative_bias", "alibi")  # positions that add to the scores
_MOST_IDS, _MOST_LAYERS = 2**31 - 1, 2**16
_FLOATS = {"norm_eps": (0, "above 0"), "initializer_range": (0, "above 0"), "rope_theta": (1, "above 1, such as 10000.0")}
_CHOICES = {
    "position": POSITIONS,
    "norm": ("layer", "rms"),
    "norm_position": ("pre", "post"),
    "hidden_act": ("relu", "gelu", "swiglu"),
}
# What Hugging Face's own classes pass besides the fields below.
_KNOWN = {
    "num_labels", "torch_dtype", "name_or_path", "output_attentions", "attn_implementation", "experts_implementation",
    "per_layer_config", "auto_map", "custom_pipelines", "quantization_config", "tokenizer_class", "task_specific_params",
    "finetuning_task", "model_type",
}  # fmt: skip


class SubquadConfig(PreTrainedConfig):
    """A transformer with any mechanism inside.

    Args:
        vocab_size: the number of token ids; None for models that read no tokens.
        hidden_size, intermediate_size: width of the tokens, and of the feed-forward layer.
        num_hidden_layers: number of blocks; in an encoder-decoder the decoder has `num_decoder_layers` (default the same).
        num_attention_heads, num_key_value_heads, head_dim: H, K (default H) and D (default hidden_size / H).
        method: the mechanism of self-attention: a name, a mechanism such as `subquad.BigBird(block=32)`, a list with one entry
            per layer, or a phrase such as "linear, softmax every 4th layer".
        decoder_method: the mechanism of the decoder's self-attention in an encoder-decoder (default `method`).
        cross_method: the mechanism of cross-attention (default `decoder_method`).
        position: "rotary", "sinusoidal", "learned", "relative_bias" (T5's buckets), "alibi" or "none". Positions count the real
            tokens of each row, so padding on any side does not shift them. The two biases need a
            mechanism that takes an attn_mask: softmax.
        max_position_embeddings: the length of the learned table (default 4096); the other positions have no limit.
        rope_theta: the base of rotary positions.
        relative_attention_num_buckets, relative_attention_max_distance: of the relative bias.
        norm, norm_position, norm_eps: "layer" or "rms"; "pre" (with a final one after all blocks) or "post".
        hidden_act: "relu", "gelu" or "swiglu".
        dropout: of embeddings and of the output of each sub-layer; `attention_dropout` of attention weights.
        attention_bias, mlp_bias: whether those projections have a bias.
        is_decoder: causal, with a cache. Set by the classes that need it.
        add_cross_attention: the blocks also attend to `encoder_hidden_states`.
        image_size, patch_size, num_channels: of images: one side or (height, width), and the side of a patch, down to one
    pixel."""

    model_type: ClassVar[str] = "subquad"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int | None = 32000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    num_decoder_layers: int | None = None
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    method: Any = "softmax"
    decoder_method: Any = None
    cross_method: Any = None
    position: str = "rotary"
    max_position_embeddings: int | None = None
    rope_theta: float = 10000.0
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    norm: str = "layer"
    norm_position: str = "pre"
    norm_eps: float = 1e-5
    hidden_act: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    attention_bias: bool = True
    mlp_bias: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    is_decoder: bool = False
    add_cross_attention: bool = False
    image_size: Any = 32
    patch_size: int = 4
    num_channels: int = 3
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: Any = None
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = {*self.__dataclass_fields__, *_KNOWN, *GenerationConfig._get_default_generation_params()}
        for name in kwargs:
            if name not in known and not name.startswith("_"):
                raise OptionError(f"SubquadConfig has no field {name!r}{closest(name, self.__dataclass_fields__)}")
        for name in ("method", "decoder_method", "cross_method"):
            setattr(self, name, methods.from_json(getattr(self, name)))
        if self.position == "learned" and self.max_position_embeddings is None:
            self.max_position_embeddings = 4096
        for name in ("attn_implementation", "_attn_implementation"):  # which may also name a kernel on the hub
            if kwargs.get(name) not in (None, "eager"):
                raise OptionError(
                    f"the attention of a subquad model is set by method; got {name}={kwargs[name]!r}. Leave it out."
                )
        super().__post_init__(**kwargs)
        self.check()

    def to_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = super().to_dict()
        layers = self.decoder_part().num_hidden_layers if self.is_encoder_decoder else self.num_hidden_layers
        saved["method"] = methods.to_json(self.method, self.num_hidden_layers)
        saved["decoder_method"] = methods.to_json(self.decoder_method, layers)
        saved["cross_method"] = methods.to_json(self.cross_method, layers)
        return saved

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def self_methods(self) -> list[Mechanism]:
        """The mechanism of each layer's self-attention."""
        return methods.by_layer(self.method, self.num_hidden_layers, "method")

    @property
    def cross_methods(self) -> list[Mechanism]:
        """The mechanism of each layer's cross-attention."""
        method = self.method if self.cross_method is None else self.cross_method
        return methods.by_layer(method, self.num_hidden_layers, "cross_method")

    @property
    def image_sides(self) -> tuple[int, int]:
        """Height and width of an image."""
        side = self.image_size
        height, width = side if isinstance(side, (list, tuple)) and len(side) == 2 else (side, side)
        return height, width

    def encoder_part(self) -> SubquadConfig:
        """The config of the encoder in an encoder-decoder."""
        return self.changed(
            is_encoder_decoder=False,
            is_decoder=False,
            add_cross_attention=False,
            decoder_method=None,
            cross_method=None,
            num_decoder_layers=None,
        )

    def decoder_part(self) -> SubquadConfig:
        """The config of the decoder in an encoder-decoder."""
        return self.changed(
            is_encoder_decoder=False,
            is_decoder=True,
            add_cross_attention=True,
            method=self.method if self.decoder_method is None else self.decoder_method,
            num_hidden_layers=self.num_hidden_layers if self.num_decoder_layers is None else self.num_decoder_layers,
            decoder_method=None,
            num_decoder_layers=None,
        )

    def changed(self, **fields: Any) -> SubquadConfig:
        """A copy with some fields replaced."""
        config = copy.deepcopy(self)
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    def check(self) -> None:
        """Refuse fields that do not fit together."""
        sizes = [
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size", "num_channels",
            "relative_attention_num_buckets", "relative_attention_max_distance",
        ]  # fmt: skip
        optional = ["vocab_size", "num_decoder_layers", "num_key_value_heads", "head_dim", "max_position_embeddings"]
        given = sizes + [name for name in optional if getattr(self, name) is not None]
        checks.sizes(**{name: getattr(self, name) for name in given})
        for name in given:
            if name.endswith("_layers") and getattr(self, name) > _MOST_LAYERS:
                raise InputError(f"{name} must be at most {_MOST_LAYERS:,}; got {shown(getattr(self, name))}.")
        checks.dropout(self.dropout)
        checks.dropout(self.attention_dropout, "attention_dropout")
        for name, (least, rule) in _FLOATS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value <= sys.float_info.max:
                raise InputError(f"{name} must be a finite number {rule}; got {shown(value)}.")
        self._check_token_ids()
        names = self.architectures
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise InputError(f"architectures must be a list of names of classes, or None; got {shown(names)}.")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                near = closest(value, choices) if isinstance(value, str) else "."
                raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}{near}")
        if self.position == "learned" and self.max_position_embeddings is None:
            raise InputError("position='learned' needs the length of its table; got None. Set max_position_embeddings.")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"hidden_size must be a multiple of num_attention_heads unless head_dim is given; "
                f"got {self.hidden_size} and {self.num_attention_heads}."
            )
        if self.num_attention_heads % self.kv_heads:
            raise InputError(
                f"num_key_value_heads must divide num_attention_heads; got {self.kv_heads} and {self.num_attention_heads}."
            )
        self._check_methods(direction=False)

    def _check_token_ids(self) -> None:
        """The pad must have an embedding; other special tokens need not be in the vocabulary."""
        ends = self.eos_token_id if isinstance(self.eos_token_id, (list, tuple)) else [self.eos_token_id]
        named = {"bos_token_id": [self.bos_token_id], "eos_token_id": ends, "pad_token_id": [self.pad_token_id]}
        named["decoder_start_token_id"] = [self.decoder_start_token_id]
        for name, values in named.items():
            above = self.vocab_size if name == "pad_token_id" and self.vocab_size is not None else _MOST_IDS
            for value in values:
                is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < above
                if value is not None and not is_id:
                    raise InputError(
                        f"{name} must be a token id from 0 to {above - 1:,}, or None; got {shown(getattr(self, name))}."
                    )

    def check_model(self) -> None:
        """Refuse what no model can be built from; at this point `is_decoder` is final."""
        self.check()
        self._check_methods(direction=True)
        if self.is_encoder_decoder:
            return
        alone = {"decoder_method": self.decoder_method, "num_decoder_layers": self.num_decoder_layers}
        alone |= {} if self.add_cross_attention else {"cross_method": self.cross_method}
        for name, value in alone.items():
            if value is not None:
                raise OptionError(
                    f"{name} is only for encoder-decoders, and this model is not one; got {value!r}. Leave it out."
                )

    def _check_methods(self, direction: bool, own: str = "method") -> None:
        if self.is_encoder_decoder:
            self.encoder_part()._check_methods(direction)
            self.decoder_part()._check_methods(direction, "decoder_method")
            return
        needs = ["is_causal", "decode"] if self.is_decoder else ["bidirectional"] if direction else []
        common = {"enable_gqa": self.kv_heads != self.num_attention_heads, "dropout_p": self.attention_dropout > 0}
        needs += [need for need, is_asked in common.items() if is_asked]
        for layer, method in enumerate(self.self_methods):
            side = "the decoder's " if own == "decoder_method" else ""
            self._require(method, needs, f"{side}self-attention of layer {layer}", own)
            reasons = method.reasons(["attn_mask"]) if self.position in BIASES else {}
            if reasons:
                raise UnsupportedError(
                    f"position={self.position!r} adds a bias to the score of every pair, which {method.info.name} cannot take "
                    f"(layer {layer}): {reasons['attn_mask']}. Choose another position, such as 'rotary', or softmax as method."
                )
        if self.add_cross_attention:
            needs = ["decoder_cross" if self.is_decoder else "cross", *(need for need, is_asked in common.items() if is_asked)]
            for layer, method in enumerate(self.cross_methods):
                self._require(method, needs, f"cross-attention of layer {layer}", "cross_method")

    @staticmethod
    def _require(method: Mechanism, needs: Iterable[str], where: str, field: str) -> None:
        try:
            require(method, needs)
        except UnsupportedError as error:
            asked = ", ".join(NEEDS[need] for need in needs)
            raise UnsupportedError(f"{where} needs {asked}.\n{error}\nSet {field} to one of these.") from None
