"""The attention function and the mask function of converted models, registered with Hugging Face as "subquad".

Masks stay (B, M) as long as the pattern is plain: a site knows whether it is causal, and all that is left to say is where the
pads are. Any other mask arrives as (B, 1, N, M), which only some mechanisms take.

B batch, H query heads, N queries, M keys, D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from subquad.attention import MechanismModule
from subquad.errors import InputError, UnsupportedError
from subquad.models.cache import ConvertedLayer, Update
from subquad.models.converted.record import NAME, SAVED_ATTENTION
from subquad.state import State

USED = "subquad_is_used"  # attribute of an attention module: whether it has called `attend`
_PLAIN = (causal_mask_function, bidirectional_mask_function)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    subquad_cache_layer: ConvertedLayer | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by attention modules: query (B, H, N, D); returns the output (B, N, H, D), and no weights.

    `subquad_cache_layer` holds the state of all earlier tokens. A hook adds it to the module's arguments, see `caches`.
    """
    mechanism = _mechanism_of(module)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False)) and getattr(module.config, "is_causal", True)
    layer = subquad_cache_layer if is_causal else None
    query, key, value = _cast(_rescaled(query, scaling), key, value)
    pads = attention_mask[:, -key.shape[2] :] if attention_mask is not None and attention_mask.dim() == 2 else None
    pairs = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
    if layer is not None:
        _require_causal(pairs)
    elif is_causal and query.shape[2] != key.shape[2]:  # an ordinary cache has put earlier keys before these
        _require_pairs(mechanism)
        pairs, is_causal = _both(pairs, _causal_pairs(query, key)), False
    elif pairs is not None:
        is_causal = False  # the mask has it already
    pairs = _both(pairs, position_bias)
    if pairs is not None and pairs.is_floating_point():
        pairs = pairs.to(query.dtype)
    dropped = dropout if "dropout_p" in mechanism.method.refuses else 0.0

    def run(state: State | None, keep: int | None = None) -> Any:
        return mechanism(
            query[:, :, :keep],
            key[:, :, :keep],
            value[:, :, :keep],
            is_causal=is_causal,
            key_padding_mask=None if pads is None else pads[:, :keep],
            attn_mask=pairs if keep is None else None,
            dropout_p=dropout - dropped,
            state=state,
            return_state=layer is not None,
        )

    if layer is None:
        out = run(None)
    else:
        before = layer.state
        out, state = run(layer.past.to_replace())
        layer.apply(Update(state, key.shape[2], lambda keep: run(before, keep)[1]))
    if dropped:  # the mechanism has no weights to drop, so the output is dropped instead
        out = F.dropout(out, dropped)
    return out.transpose(1, 2), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **more: Any,
) -> Tensor | None:
    """(B, M), True for real tokens, or None if all are real; (B, 1, N, M) if the pattern is not plain."""
    within = local_size is not None and kv_length <= local_size and allow_is_causal_skip
    if mask_function not in _PLAIN and not within:
        more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "local_size": local_size}
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask=attention_mask, **more
        )
    if attention_mask is None:
        return None
    pads = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return pads if torch.compiler.is_compiling() or not bool(pads.all()) else None


def register() -> None:
    for name in (NAME, SAVED_ATTENTION):  # a model that is being loaded has the second one until its mechanisms are installed
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)


def _mechanism_of(module: nn.Module) -> MechanismModule:
    found: MechanismModule | None = getattr(module, NAME, None)
    if found is None:
        raise InputError(
            f"every attention of a converted model must have a mechanism; {type(module).__name__} has none. A config alone has "
            "no mechanisms: load the model with subquad.load(folder) or from_pretrained. If subquad.convert has just made this "
            "model, it has attention that cannot be converted."
        )
    if not torch.compiler.is_compiling() and not getattr(module, USED, True):
        setattr(module, USED, True)
    return found


def _rescaled(query: Tensor, scaling: float | None) -> Tensor:
    """A mechanism scales scores itself, like 1/sqrt(D); a factor of the model beyond that is applied to the queries."""
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    return query if math.isclose(factor, 1.0, rel_tol=1e-6) else query * factor


def _cast(*tensors: Tensor) -> Iterable[Tensor]:
    """Cast as PyTorch's own attention does under autocast: rotary positions have turned queries and keys into float32."""
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    return (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _causal_pairs(query: Tensor, key: Tensor) -> Tensor:
    """(N, M): the last query sees all keys."""
    queries, keys = query.shape[2], key.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Both masks together; each is bool, or added to the scores."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        first, second = second, first
    return first.masked_fill(~second, -math.inf) if second.dtype == torch.bool else first + second


def _require_pairs(mechanism: MechanismModule) -> None:
    if "attn_mask" in mechanism.method.refuses:
        raise UnsupportedError(
            f"{mechanism.method.info.name} continues from a decode state, and got earlier keys from an ordinary cache. Pass a "
            "SubquadCache, or leave past_key_values out; if the method cannot decode, call with use_cache=False."
        )


def _require_causal(pairs: Tensor | None) -> None:
    if pairs is None:
        return
    may = pairs if pairs.dtype == torch.bool else pairs > torch.finfo(pairs.dtype).min / 2
    if bool(may.triu(may.shape[-1] - may.shape[-2] + 1).any()):
        raise UnsupportedError(
            "a cache needs causal attention; got an attention_mask that lets tokens see later ones. Call with use_cache=False."
        )
