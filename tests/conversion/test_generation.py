"""Text from converted models: with a state of constant size, and the same as without."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import subquad as sq
from subquad.models import SubquadCache
from tests.conversion import families

METHODS = ["linear", "performer", "local", "softmax"]
OPTIONS = {"local": sq.Local(window=4)}


def converted(name, method, **options):
    return sq.convert(families.model(name), OPTIONS.get(method, method), **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*families.CAUSAL, *families.SEQ2SEQ])
def test_with_a_cache_as_without(name, method):
    model, given = converted(name, method), families.inputs(name)
    assert torch.equal(families.generated(model, given), families.generated(model, given, use_cache=False))


@pytest.mark.parametrize("name", ["t5", "mistral with a window"])
def test_softmax_where_nothing_else_can(name):
    model, given = families.model(name), families.inputs(name)
    before = families.generated(model, given)
    assert torch.equal(families.generated(sq.convert(model, "softmax"), given), before)


@pytest.mark.parametrize("method", METHODS)
def test_beams(method):
    model, given = converted("llama", method), families.inputs("llama")
    found = families.generated(model, given, num_beams=3)
    assert torch.equal(found, families.generated(model, given, num_beams=3, use_cache=False))


@pytest.mark.parametrize("method", ["linear", "local"])
def test_the_state_does_not_grow(method):
    model = converted("llama", method, beyond_context=True)
    ids = torch.randint(3, families.WORDS, (1, 400))
    sizes = []
    for tokens in (200, 400):
        out = model(input_ids=ids[:, :tokens])
        assert isinstance(out.past_key_values, SubquadCache)
        sizes.append(out.past_key_values.nbytes)
    assert sizes[0] == sizes[1]


def test_piece_by_piece_as_at_once():
    model, ids = converted("llama", "performer"), torch.randint(3, families.WORDS, (2, 20))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        first = model(input_ids=ids[:, :7])
        second = model(input_ids=ids[:, 7:], past_key_values=first.past_key_values)
    assert torch.allclose(torch.cat([first.logits, second.logits], 1), whole, atol=1e-5)


def test_assisted_by_a_smaller_model():
    model, assistant = converted("llama", "linear"), families.model("llama")
    given = {name: value[:1] for name, value in families.inputs("llama").items()}
    found = families.generated(model, given, assistant_model=assistant)
    assert torch.equal(found, families.generated(model, given))


def test_a_converted_model_as_assistant():
    model, assistant = families.model("llama"), converted("llama", "linear")
    given = {name: value[:1] for name, value in families.inputs("llama").items()}
    found = families.generated(model, given, assistant_model=assistant)
    assert torch.equal(found, families.generated(model, given))


def test_other_caches_are_refused():
    model, ids = converted("llama", "linear"), torch.arange(3, 9)[None]
    with pytest.raises(sq.InputError, match="StaticCache"):
        model(input_ids=ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
    filled = DynamicCache(config=model.config)
    families.model("llama")(input_ids=ids, past_key_values=filled)
    with pytest.raises(sq.UnsupportedError, match="SubquadCache"):
        model(input_ids=ids, past_key_values=filled)


def test_its_cache_is_for_converted_models_only():
    cache, ids = SubquadCache(converted("llama", "linear").config), torch.arange(3, 9)[None]
    model = families.model("llama")
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(sq.UnsupportedError, match="converted model that it was made for"):
        model(input_ids=ids, past_key_values=cache)
    with pytest.raises(sq.InputError, match="converted model"):
        SubquadCache(model.config)


def test_prompts_beyond_the_context_are_refused_unless_asked_for():
    ids = torch.randint(3, families.WORDS, (1, families.CONTEXT + 1))
    model = converted("llama", "linear")
    with pytest.raises(sq.InputError, match=f"made for {families.CONTEXT} tokens; got {families.CONTEXT + 1}"):
        model.generate(ids, max_new_tokens=2)
    longer = converted("llama", "linear", beyond_context=True)
    assert longer.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == families.CONTEXT + 3


def test_after_reverting_the_cache_is_the_models_own():
    model = sq.revert(converted("llama", "linear"))
    assert type(model(input_ids=torch.arange(3, 9)[None]).past_key_values) is DynamicCache
