"""Parallel and step by step, with and without a cache, greedy, beams, assisted, padded: the same tokens."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast, pipeline

import subquad as sq
from subquad.models import SubquadCache, SubquadConfig, SubquadForCausalLM
from tests.harness import assert_close
from tests.models.small import CROSS, DECODABLE, METHODS, causal_lm, config, every, tokens, translator


def generate(model, ids, mask=None, **options):
    return model.generate(ids, attention_mask=mask, max_new_tokens=9, **options)


@every(DECODABLE)
def test_parallel_logits_equal_those_step_by_step(method):
    model = causal_lm(method)
    ids, mask = tokens()
    whole = model(ids, mask).logits
    for pieces in ([1] * 13, [6, 1, 4, 2]):
        cache, steps, end = None, [], 0
        for piece in pieces:
            end += piece
            out = model(ids[:, end - piece : end], mask[:, :end], past_key_values=cache)
            cache = out.past_key_values
            steps.append(out.logits)
        real = mask.bool()
        assert_close(torch.cat(steps, 1)[real], whole[real])


@every(DECODABLE)
def test_a_cache_changes_no_token(method):
    model = causal_lm(method)
    ids, mask = tokens()
    for options in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}):
        torch.manual_seed(3)
        cached = generate(model, ids, mask, **options)
        torch.manual_seed(3)
        assert torch.equal(cached, generate(model, ids, mask, **options, use_cache=False))


@every(DECODABLE)
def test_left_padded_rows_go_on_as_they_would_alone(method):
    model = causal_lm(method)
    ids, mask = tokens()
    together = generate(model, ids, mask, do_sample=False)
    for row in range(3):
        alone = generate(model, ids[row : row + 1, mask[row] == 1], do_sample=False)
        assert together[row, 13:].tolist() == alone[0, -9:].tolist()


@every(DECODABLE)
def test_assisted_decoding_gives_the_tokens_of_greedy_search(method):
    model, other = causal_lm(method), causal_lm(method, seed=5)
    ids, _ = tokens(1)
    expected = generate(model, ids, do_sample=False)
    assert torch.equal(generate(model, ids, do_sample=False, prompt_lookup_num_tokens=3), expected)
    other.generation_config.num_assistant_tokens = 4
    for assistant in (model, other):  # one that is always right, and one that is mostly wrong
        assert torch.equal(generate(model, ids, do_sample=False, assistant_model=assistant), expected)


@every(DECODABLE)
def test_a_prompt_may_come_in_pieces(method):
    model = causal_lm(method)
    ids, mask = tokens()
    expected = generate(model, ids, mask, do_sample=False)
    assert torch.equal(generate(model, ids, mask, do_sample=False, prefill_chunk_size=4), expected)


@every(DECODABLE)
def test_generation_goes_on_from_a_cache(method):
    model = causal_lm(method)
    ids, mask = tokens()
    cache = SubquadCache(model.config)
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.get_seq_length() == 16  # the last token was not fed yet
    longer = torch.cat([mask, mask.new_ones(3, 4)], 1)
    second = model.generate(first, attention_mask=longer, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(second, generate(model, ids, mask, do_sample=False))


@every([method for method in METHODS if method not in DECODABLE])
def test_mechanisms_without_a_decode_state_are_refused_before_the_first_token(method):
    with pytest.raises(sq.UnsupportedError, match=f"(?s)layer 0 needs causal.*{method.info.name}.*Supported by: softmax"):
        SubquadForCausalLM(config(method))


@every(DECODABLE)
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "none"])
def test_positions_go_on_in_beams(method, position):
    model = causal_lm(method, position=position)
    ids, mask = tokens()
    assert torch.equal(generate(model, ids, mask, num_beams=2), generate(model, ids, mask, num_beams=2, use_cache=False))


@pytest.mark.parametrize("position", ["relative_bias", "alibi"])
def test_biases_go_on_in_beams(position):
    model = causal_lm("softmax", position=position)
    ids, mask = tokens()
    for options in ({"num_beams": 2}, {"do_sample": False}):
        assert torch.equal(generate(model, ids, mask, **options), generate(model, ids, mask, **options, use_cache=False))
    ids = ids[2:]
    expected = generate(model, ids, do_sample=False)
    assert torch.equal(generate(model, ids, do_sample=False, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize(
    ("method", "cross"),
    [*((method, sq.Softmax()) for method in DECODABLE), *((sq.Linear(), cross) for cross in CROSS)],
    ids=lambda method: method.info.name,
)
def test_an_encoder_decoder_gives_the_same_with_and_without_cache(method, cross):
    model = translator(method, cross_method=cross)
    ids, mask = tokens()
    target = tokens(length=5, seed=2)[0]
    whole = model(ids, mask, target).logits
    cache, steps = SubquadCache(model.config), []
    encoded = model.encoder(ids, mask)
    for token in target.split(1, dim=1):
        out = model(None, mask, token, encoder_outputs=encoded, past_key_values=cache)
        steps.append(out.logits)
    assert_close(torch.cat(steps, 1), whole)
    for options in ({"do_sample": False}, {"num_beams": 3}):
        assert torch.equal(generate(model, ids, mask, **options), generate(model, ids, mask, **options, use_cache=False))


def test_an_encoder_decoder_is_assisted_too():
    model, other = translator("linear"), translator("linear", seed=5)
    ids, _ = tokens(1)
    expected = generate(model, ids, do_sample=False)
    assert torch.equal(generate(model, ids, do_sample=False, assistant_model=other), expected)


def test_an_encoder_decoder_goes_on_from_a_cache():
    model = translator("linear")
    ids, mask = tokens()
    cache = SubquadCache(model.config)
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
    second = model.generate(
        ids, attention_mask=mask, decoder_input_ids=first, past_key_values=cache, max_new_tokens=5, do_sample=False
    )
    assert torch.equal(second, generate(model, ids, mask, do_sample=False))
    assert cache.get_seq_length() == 9


def test_going_on_needs_new_tokens():
    model, ids = causal_lm("linear"), tokens()[0]
    for given in (ids, ids[:, :3]):
        cache = model(ids).past_key_values
        with pytest.raises(sq.InputError, match="the cache has 13 tokens, and the text has"):
            generate(model, given, past_key_values=cache)
    with pytest.raises(sq.InputError, match="assisted decoding starts with an empty cache"):
        generate(
            model, ids[:1], past_key_values=model(ids[:1, :5]).past_key_values, prompt_lookup_num_tokens=2, do_sample=False
        )
    with pytest.raises(sq.InputError, match="does not support early-exit assisted decoding"):
        generate(model, ids[:1], assistant_early_exit=1, do_sample=False)
    assert model.config.num_hidden_layers == 2


def test_only_the_new_tokens_may_come_with_a_mask_of_all():
    model, ids = causal_lm("linear"), tokens()[0][2:]
    expected = generate(model, ids, do_sample=False)
    cache = model(ids[:, :8]).past_key_values
    found = generate(model, ids[:, 8:], torch.ones_like(ids), past_key_values=cache, do_sample=False)
    assert torch.equal(found[:, -9:], expected[:, -9:])


def test_it_assists_another_architecture():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 3}
    llama = (
        LlamaForCausalLM(LlamaConfig(vocab_size=53, **sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0)).double().eval()
    )
    ids = tokens(1)[0]
    model = causal_lm("linear")
    assert torch.equal(generate(llama, ids, do_sample=False, assistant_model=model), generate(llama, ids, do_sample=False))
    assert torch.equal(generate(model, ids, do_sample=False, assistant_model=llama), generate(model, ids, do_sample=False))


def test_pads_of_the_source_do_not_matter():
    model = translator("linear")
    ids, mask = tokens()
    together = generate(model, ids, mask, do_sample=False)
    for row in range(3):
        alone = generate(model, ids[row : row + 1, mask[row] == 1], do_sample=False)
        assert together[row].tolist() == alone[0].tolist()


def test_text_generation_pipeline(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = Tokenizer(
        models.WordLevel({"[PAD]": 0, "[BOS]": 1, **{chr(97 + i): 2 + i for i in range(26)}}, unk_token="[PAD]")
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="[PAD]", bos_token="[BOS]", model_input_names=["input_ids", "attention_mask"]
    )
    model = causal_lm("linear", vocab_size=28, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write = pipeline("text-generation", str(tmp_path), device="cpu")
    texts = write(["abc", "hello"], max_new_tokens=6, do_sample=False, batch_size=2)
    for prompt, [text] in zip(("abc", "hello"), texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0])
        assert text["generated_text"] == expected


def test_another_cache_is_refused():
    from transformers import DynamicCache

    model = causal_lm("linear")
    ids, _ = tokens()
    with pytest.raises(sq.InputError, match="must be a SubquadCache"):
        generate(model, ids, past_key_values=DynamicCache())
    with pytest.raises(sq.InputError, match="cache_implementation='static'"):
        generate(model, ids, cache_implementation="static")
    with pytest.raises(sq.InputError, match="one layer for each of the model's 2; got 3"):
        generate(model, ids, past_key_values=SubquadCache(SubquadConfig(num_hidden_layers=3)))


def test_a_cache_of_another_method_is_refused_and_unchanged():
    linear, taylor = causal_lm("linear"), causal_lm("taylor")
    ids, _ = tokens()
    cache = linear(ids).past_key_values
    state = cache.layers[0].state
    with pytest.raises(sq.StateError, match="the method that made it, Linear"):
        taylor(ids, past_key_values=cache)
    assert cache.layers[0].state is state
    assert cache.get_seq_length() == 13
