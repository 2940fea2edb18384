"""Transformers with any mechanism inside, as Hugging Face models.

Importing this registers them with the Auto classes, and makes `from_pretrained` load converted models.
"""

try:
    import transformers
except ImportError as error:
    from subquad.errors import MissingExtraError

    raise MissingExtraError(
        "subquad.models needs Hugging Face transformers 5 or newer, which is not installed. "
        "Install it: pip install 'subquad[hf]'"
    ) from error

from subquad.models.block import Block
from subquad.models.cache import SubquadCache
from subquad.models.classification import (
    SubquadForImageClassification,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)
from subquad.models.configuration import SubquadConfig
from subquad.models.converted import register as _register_converted
from subquad.models.language import SubquadForCausalLM, SubquadForMaskedLM
from subquad.models.seq2seq import SubquadForConditionalGeneration
from subquad.models.transformer import SubquadModel, SubquadPreTrainedModel

__all__ = [
    "Block",
    "SubquadCache",
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForConditionalGeneration",
    "SubquadForImageClassification",
    "SubquadForMaskedLM",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
    "SubquadModel",
    "SubquadPreTrainedModel",
]

_AUTO = {
    transformers.AutoModel: SubquadModel,
    transformers.AutoModelForCausalLM: SubquadForCausalLM,
    transformers.AutoModelForMaskedLM: SubquadForMaskedLM,
    transformers.AutoModelForSeq2SeqLM: SubquadForConditionalGeneration,
    transformers.AutoModelForSequenceClassification: SubquadForSequenceClassification,
    transformers.AutoModelForTokenClassification: SubquadForTokenClassification,
    transformers.AutoModelForImageClassification: SubquadForImageClassification,
}
transformers.AutoConfig.register(SubquadConfig.model_type, SubquadConfig)
for _auto, _model in _AUTO.items():
    _auto.register(SubquadConfig, _model)
_register_converted()
