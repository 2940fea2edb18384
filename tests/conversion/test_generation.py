"""Text from converted models: with a state of constant size, and the same as without."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import subquad as sq
from subquad.models import SubquadCache
from tests.conversion import families

METHODS = ["linear", "performer", "local", "softmax"]
OPTIONS = {"local": sq.Local(window=4)}


def converted(name, method, **options):
    return sq.convert(families.model(name), OPTIONS.get(method, method), **options)


def unlike(name, noise):
    """A model that does not repeat itself, off from the one without noise."""
    model = families.model(name)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6).add_(noise * weight.std() * torch.randn_like(weight))
    return model


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


@pytest.mark.parametrize("method", ["linear", "softmax", sq.Hybrid(window=3)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_assisted(name, method):
    """By models whose guesses are often wrong, so that the cache goes back."""
    model, assistant = (sq.convert(unlike(name, noise), method) for noise in (0, 0.3))
    given = {key: value[:1] for key, value in families.inputs(name).items()}
    plain = families.generated(model, given)
    for options in ({"assistant_model": assistant}, {"assistant_model": unlike(name, 0.3)}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(families.generated(model, given, **options), plain)
    original = unlike(name, 0)
    assert torch.equal(families.generated(original, given, assistant_model=assistant), families.generated(original, given))


def test_other_caches_are_refused():
    model, ids = converted("llama", "linear"), torch.arange(3, 9)[None]
    for cache in (StaticCache(config=model.config, max_cache_len=20), DynamicCache(), DynamicCache(config=model.config)):
        kind = type(cache).__name__
        for call in (model, partial(model.generate, max_new_tokens=3)):
            with pytest.raises(sq.InputError, match=f"got a {kind} for past_key_values"):
                call(input_ids=ids, past_key_values=cache)
    with pytest.raises(sq.InputError, match="cache_implementation='offloaded'"):
        model.generate(ids, max_new_tokens=3, cache_implementation="offloaded")
    bart = converted("bart", "linear")
    with pytest.raises(sq.InputError, match="got a DynamicCache for past_key_values"):
        bart.generate(ids, max_new_tokens=3, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
    cache = SubquadCache(model.config)
    model(input_ids=ids[:, :4], past_key_values=cache)
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_generates_with_its_own_cache(again):
    model = again(converted("llama", "linear"))
    found = model.generate(torch.arange(3, 9)[None], max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(found.past_key_values, SubquadCache)
    assert vars(model)["_prepare_cache_for_generation"].args == (model,)
    plain = sq.revert(model).generate(torch.arange(3, 9)[None], max_new_tokens=3, return_dict_in_generate=True)
    assert type(plain.past_key_values) is DynamicCache


def test_its_cache_is_for_converted_models_only():
    cache, ids = SubquadCache(converted("llama", "linear").config), torch.arange(3, 9)[None]
    model = families.model("llama")
    with pytest.raises(sq.UnsupportedError, match="converted model that it was made for"):
        model(input_ids=ids, past_key_values=cache)
    with pytest.raises(sq.InputError, match="converted model"):
        SubquadCache(model.config)


def test_prompts_beyond_the_context_are_refused_unless_asked_for():
    ids = torch.randint(3, families.WORDS, (1, families.CONTEXT + 1))
    model = converted("llama", "linear")
    with pytest.raises(sq.InputError, match=f"trained for {families.CONTEXT} tokens; got {families.CONTEXT + 1}"):
        model.generate(ids, max_new_tokens=2)
    longer = converted("llama", "linear", beyond_context=True)
    assert longer.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == families.CONTEXT + 3


def test_after_reverting_the_cache_is_the_models_own():
    model = sq.revert(converted("llama", "linear"))
    assert type(model(input_ids=torch.arange(3, 9)[None]).past_key_values) is DynamicCache


def test_threads_do_not_share_a_cache():
    """One model, generating for several callers at a time."""
    model = converted("llama", "linear")
    prompts = [torch.randint(3, families.WORDS, (1, length)) for length in (5, 9, 14, 20)]
    expected = [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda ids: model.generate(ids, max_new_tokens=12, do_sample=False), prompts))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_after_a_refused_call_the_cache_expects_nothing():
    model, ids = converted("llama", "linear"), torch.arange(3, 9)[None]
    cache = SubquadCache(model.config)
    with pytest.raises(sq.UnsupportedError, match="lets tokens see later ones"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool), past_key_values=cache)
    assert {layer.expects for layer in cache.layers} == {"nothing"}
    cache.reset()
    found = model(input_ids=ids, past_key_values=cache).logits
    assert torch.equal(found, model(input_ids=ids).logits)
