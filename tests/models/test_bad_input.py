"""Wrong input gets one clear error: the rule, what came, what to do."""

import pytest
import torch
from transformers import DynamicCache

import subquad as sq
from subquad.models import (
    SubquadCache,
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForConditionalGeneration,
    SubquadForImageClassification,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
    SubquadModel,
)
from tests.models.small import causal_lm, config, tokens, translator


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_sice": 32}, "no field 'hidden_sice'; did you mean 'hidden_size'"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1; got 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be an integer of at least 1; got 2.0"),
        ({"hidden_size": 25}, "hidden_size must be a multiple of num_attention_heads unless head_dim is given; got 25 and 3"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must divide num_attention_heads; got 2 and 3"),
        ({"dropout": 1.0}, "dropout must be a probability from 0 to below 1; got 1.0"),
        ({"position": "sinus"}, "position must be one of 'rotary', .*; got 'sinus'; did you mean 'sinusoidal'"),
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms'; got 'batch'"),
        ({"norm_position": None}, "norm_position must be one of 'pre', 'post'; got None"),
        ({"hidden_act": "swish"}, "hidden_act must be one of .*; got 'swish'"),
        ({"norm_eps": 0}, "norm_eps must be a finite number above 0; got 0"),
        ({"method": "linaer"}, "no method is called 'linaer'; did you mean 'linear'"),
        ({"method": ["linear"] * 3}, "method as a list must have one entry per layer, so 2; got 3"),
        ({"method": "linear, softmax every 4th layer"}, "a step from 1 to the number of layers, 2; got 4"),
        ({"method": "linear, sofmax every 2nd layer"}, "no method is called 'sofmax'"),
        ({"method": {"block": 3}}, "the record of a mechanism must have a name"),
        ({"method": {"name": "bigbird", "blok": 3}}, "BigBird has no option 'blok'; did you mean 'block'"),
        ({"method": 3}, "method must be a name or a mechanism"),
        ({"attention_dropout": 0.1, "method": "linear"}, "(?s)layer 0 needs .*dropout.*linear does not support"),
        (
            {"position": "alibi", "method": "linear"},
            "position='alibi' adds a bias .* linear cannot take .layer 0.: all queries share one sum",
        ),
        ({"position": "relative_bias", "method": ["softmax", "local"]}, "local cannot take .layer 1."),
        ({"method": "linear", "cross_method": "local", "add_cross_attention": True}, "(?s)cross-attention of layer 0.*local"),
        ({"method": "nystrom", "is_decoder": True}, "(?s)self-attention of layer 0 needs causal.*Set method to one of these"),
        (
            {"method": "nystrom", "is_encoder_decoder": True},
            "(?s)the decoder's self-attention of layer 0 needs.*Set decoder_method",
        ),
        ({"method": "linear, softmax every second layer"}, 'as a phrase must be like "linear, softmax every 4th layer"; got'),
        ({"head_dim": 10**400}, r"head_dim must be an integer below 2\*\*31; got 1000"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 65,536; got 2147483647"),
        ({"method": [["linear"], [["linear"]]]}, r"method must be a name or a mechanism .*; got \['linear'\]"),
        ({"method": "linear, softmax every 99999999999999999999th layer"}, "method as a phrase must be like"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number above 1, such as 10000.0; got 1000"),
        ({"norm_eps": 10**400}, "norm_eps must be a finite number above 0; got 1000"),
        ({"norm_eps": float("inf")}, "norm_eps must be a finite number above 0; got inf"),
        ({"pad_token_id": -1}, "pad_token_id must be a token id from 0 to 52, or None; got -1"),
        ({"pad_token_id": 53}, "pad_token_id must be a token id from 0 to 52, or None; got 53"),
        ({"pad_token_id": 10**400}, "pad_token_id must be a token id from 0 to 52, or None; got 1000"),
        ({"pad_token_id": "0"}, "pad_token_id must be a token id from 0 to 52, or None; got '0'"),
        ({"pad_token_id": 1.0}, "pad_token_id must be a token id from 0 to 52, or None; got 1.0"),
        ({"pad_token_id": True}, "pad_token_id must be a token id from 0 to 52, or None; got True"),
        ({"architectures": [7]}, r"architectures must be a list of names of classes, or None; got \[7\]"),
        ({"eos_token_id": [2, "x"]}, r"eos_token_id must be a token id from 0 to .*, or None; got \[2, 'x'\]"),
        ({"rope_theta": None}, "rope_theta must be a finite number above 1, such as 10000.0; got"),
        ({"rope_theta": 1}, "rope_theta must be a finite number above 1, such as 10000.0; got"),
        ({"_attn_implementation": "some/kernel"}, "is set by method; got _attn_implementation='some/kernel'"),
        ({"attn_implementation": "sdpa"}, "the attention of a subquad model is set by method; got attn_implementation='sdpa'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(fields, said):
    with pytest.raises(sq.SubquadError, match=said):
        config(**fields)


def test_a_config_changed_later_is_refused_by_the_model():
    changed = config("linear")
    changed.position = "alibi"
    with pytest.raises(sq.UnsupportedError, match="position='alibi'"):
        SubquadModel(changed)


@pytest.mark.parametrize("fields", [{"decoder_method": "linear"}, {"cross_method": "linear"}, {"num_decoder_layers": 3}])
def test_fields_of_an_encoder_decoder_are_refused_elsewhere(fields):
    with pytest.raises(sq.OptionError, match=f"{next(iter(fields))} is only for encoder-decoders, and this model is not one"):
        SubquadForCausalLM(config(**fields))


def test_options_that_are_causal_only_wait_for_the_model():
    gated = config(sq.RFA(gated=True, features=4))
    SubquadForCausalLM(gated)
    with pytest.raises(sq.UnsupportedError, match=r"(?s)needs bidirectional attention.*defined for causal attention only"):
        SubquadForMaskedLM(gated)


def test_a_saved_model_keeps_its_direction(tmp_path):
    causal_lm("linear").save_pretrained(tmp_path / "causal")
    with pytest.raises(sq.InputError, match="is bidirectional; got is_decoder=True"):
        SubquadForMaskedLM.from_pretrained(tmp_path / "causal")
    SubquadForMaskedLM(config("linear")).save_pretrained(tmp_path / "masked")
    with pytest.raises(sq.InputError, match=r"saved by the bidirectional SubquadForMaskedLM\. Set is_decoder=True"):
        SubquadForCausalLM.from_pretrained(tmp_path / "masked")
    SubquadForCausalLM.from_pretrained(tmp_path / "masked", is_decoder=True)


def test_a_model_without_a_source_has_no_cross_attention():
    with pytest.raises(
        sq.InputError, match=r"SubquadForCausalLM has no source to attend to; got add_cross_attention=True\. Leave it out"
    ):
        SubquadForCausalLM(config(add_cross_attention=True))


def test_a_decoder_may_not_see_its_later_queries_through_cross_attention():
    for cross, reason in {
        "clustered": "would depend on later ones",
        sq.Performer(kind="favor++"): "would depend on later ones",
    }.items():
        with pytest.raises(sq.UnsupportedError, match=f"(?s)cross-attention of layer 0.*{reason}"):
            SubquadForConditionalGeneration(config(cross_method=cross))


@pytest.mark.parametrize("bad", [-1, 53, 10**6])
def test_ids_outside_the_vocabulary(bad):
    ids, _ = tokens()
    ids[1, 5] = bad
    said = f"must lie in the vocabulary, 0 to 52; got {bad} in row 1, column 5"
    with pytest.raises(sq.InputError, match=f"input_ids {said}"):
        causal_lm("linear")(ids)
    with pytest.raises(sq.InputError, match=f"labels {said}"):
        causal_lm("linear")(tokens()[0], labels=ids)
    with pytest.raises(sq.InputError, match=f"decoder_input_ids {said}"):
        translator("linear")(tokens()[0], decoder_input_ids=ids)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(3, 5), r"token ids of int32 or int64, .batch, length.; got \(3, 5\) torch.float32"),
        (torch.zeros(5, dtype=torch.int64), r"got \(5,\)"),
        ([[1, 2]], "got list"),
        (None, "pass exactly one of input_ids and inputs_embeds; got neither"),
    ],
)
def test_ids_of_the_wrong_kind(ids, said):
    with pytest.raises(sq.InputError, match=said):
        causal_lm("linear")(ids)


def test_both_ids_and_embeddings():
    with pytest.raises(sq.InputError, match="got both"):
        causal_lm("linear")(tokens()[0], inputs_embeds=torch.zeros(3, 13, 24))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(3, 12, dtype=torch.int64), r"\(batch, tokens\) = \(3, 13\); got \(3, 12\)"),
        (torch.ones(2, 13, dtype=torch.int64), r"got \(2, 13\)"),
        (torch.ones(3, 1, 13, 13, dtype=torch.int64), r"got \(3, 1, 13, 13\)"),
        (torch.ones(3, 13), "must be bool or integer, 1 for real tokens and 0 for pads; got torch.float32"),
        (torch.full((3, 13), 2), "must hold 1 for real tokens and 0 for pads; got values from 2 to 2"),
        ([[1] * 13] * 3, "got list"),
    ],
)
def test_attention_masks_that_do_not_fit(mask, said):
    ids, _ = tokens()
    with pytest.raises(sq.InputError, match=f"attention_mask .*{said}"):
        causal_lm("linear")(ids, mask)


def test_an_attention_mask_covers_the_past():
    model = causal_lm("linear")
    ids, mask = tokens()
    cache = model(ids, mask).past_key_values
    with pytest.raises(sq.InputError, match=r"= \(3, 14\), 13 of which are in the cache; got \(3, 1\)"):
        model(ids[:, :1], mask[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 13


def test_a_mask_may_not_contradict_the_cache():
    model = causal_lm("linear")
    ids, mask = tokens()
    for fed, said in ((None, "row 0 has 13 real tokens in the cache, and 9 here"), (mask, "row 0 has 9 .* and 13 here")):
        cache = model(ids, fed).past_key_values
        now = torch.cat([mask if fed is None else torch.ones_like(mask), mask.new_ones(3, 1)], 1)
        with pytest.raises(sq.InputError, match=said):
            model(ids[:, :1], now, past_key_values=cache)


def test_a_mask_of_ones_asks_for_nothing():
    ids, mask = tokens()
    model = SubquadForMaskedLM(config(sq.SparseStrided())).eval()  # without a stride it refuses padding
    assert torch.equal(model(ids, torch.ones_like(mask)).logits, model(ids).logits)
    with pytest.raises(sq.UnsupportedError, match=r"a key_padding_mask: .*set stride"):
        model(ids, mask)


def test_caches_that_do_not_fit():
    model, ids = causal_lm("linear"), tokens()[0]
    with pytest.raises(sq.InputError, match=r"must be a SubquadCache, .* got DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(sq.StateError, match="batch size that it has, 3; got 2"):
        model(ids[:2], past_key_values=model(ids).past_key_values)
    with pytest.raises(sq.InputError, match="past_key_values and use_cache=False"):
        model(ids, past_key_values=SubquadCache(model.config), use_cache=False)
    encoder = SubquadModel(config("linear"))
    for options in ({"use_cache": True}, {"past_key_values": SubquadCache(model.config)}):
        with pytest.raises(sq.InputError, match="only a causal model has a cache"):
            encoder(ids, **options)
    assert encoder(ids).past_key_values is None


def test_attention_weights_do_not_exist():
    with pytest.raises(sq.InputError, match="output_attentions needs the weight of every query and key"):
        causal_lm("linear")(tokens()[0], output_attentions=True)


def test_the_source_of_cross_attention():
    ids, mask = tokens()
    with pytest.raises(sq.InputError, match=r"has no cross-attention; got encoder_hidden_states\. Leave them out"):
        SubquadModel(config())(ids, encoder_hidden_states=torch.zeros(3, 5, 24))
    across = SubquadModel(config(add_cross_attention=True))
    with pytest.raises(sq.InputError, match=r"attends to the output of an encoder; got none\. Pass encoder_hidden_states"):
        across(ids)
    with pytest.raises(sq.InputError, match=r"encoder_attention_mask must be .* = \(3, 5\); got \(3, 13\)"):
        across(ids, encoder_hidden_states=torch.zeros(3, 5, 24), encoder_attention_mask=mask)
    model = translator("linear")
    with pytest.raises(sq.InputError, match="the source must be given once"):
        model(ids, mask, ids, encoder_outputs=model.encoder(ids, mask))
    with pytest.raises(sq.InputError, match="pass exactly one of decoder_input_ids and decoder_inputs_embeds; got neither"):
        model(ids, mask)
    with pytest.raises(sq.InputError, match="Set decoder_start_token_id or bos_token_id"):
        translator("linear", bos_token_id=None)(ids, mask, labels=ids)


def test_another_source_needs_another_cache():
    model = translator("linear")
    ids, mask = tokens()
    cache = SubquadCache(model.config)
    model(ids, mask, ids[:, :2], past_key_values=cache)
    with pytest.raises(sq.InputError, match="holds a source of 13 tokens; got another of 5"):
        model(ids[:, -5:], mask[:, -5:], ids[:, :1], past_key_values=cache)
    with pytest.raises(sq.InputError, match=r"with batch 2; got \(3, 13, 24\)"):
        model(ids, mask, ids[:2])
    with pytest.raises(sq.InputError, match="encoder_outputs must be the output of the encoder; got Tensor"):
        model(None, mask, ids, encoder_outputs=torch.zeros(3, 13, 24))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.zeros(3, 12, dtype=torch.int64), r"labels must be \(batch, tokens\) = \(3, 13\); got \(3, 12\)"),
        (torch.full((3, 13), -1), "got -1 in row 0, column 0. Use -100 for tokens that are not predicted"),
        (torch.zeros(3, 13), "labels must be token ids of int32 or int64"),
    ],
)
def test_labels_that_do_not_fit(labels, said):
    with pytest.raises(sq.InputError, match=said):
        causal_lm("linear")(tokens()[0], labels=labels)


def test_labels_of_int32_are_taken():
    model, ids = causal_lm("linear"), tokens()[0]
    assert model(ids.int(), labels=ids.int()).loss == model(ids, labels=ids).loss


def test_logits_to_keep():
    model, ids = causal_lm("linear"), tokens()[0]
    assert model(ids, logits_to_keep=2).logits.shape == (3, 2, 53)
    with pytest.raises(sq.InputError, match="logits_to_keep must be an integer, 0 for all; got -1"):
        model(ids, logits_to_keep=-1)
    with pytest.raises(sq.InputError, match="got labels and logits_to_keep"):
        model(ids, labels=ids, logits_to_keep=1)


def classifier(kind=SubquadForSequenceClassification, **fields):
    torch.manual_seed(0)
    return kind(config("linear", **fields)).eval()


@pytest.mark.parametrize(
    ("fields", "labels", "said"),
    [
        (
            {"num_labels": 3},
            torch.tensor([0, 3, 1]),
            "classes from 0 to 2, or -100 to be ignored; got values from 0 to 3. Set num_labels",
        ),
        ({"num_labels": 3}, torch.tensor([0, 1]), r"integer classes, \(3,\); got \(2,\)"),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, torch.zeros(3), "integer classes"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.zeros(3, 2), r"shape of the logits, \(3, 3\)"),
        ({"num_labels": 1}, torch.zeros(2), r"shape of the logits, \(3, 1\)"),
    ],
)
def test_classes_that_do_not_fit(fields, labels, said):
    with pytest.raises(sq.InputError, match=said):
        classifier(**fields)(tokens()[0], labels=labels)


def test_kinds_of_labels():
    ids, mask = tokens()
    for fields, labels in (
        ({"num_labels": 3}, torch.tensor([0, 2, -100])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.ones(3, 3, dtype=torch.int64)),
        ({"num_labels": 1}, torch.tensor([1, 2, 3])),
        ({"num_labels": 1}, torch.rand(3, 1)),
        ({"num_labels": 2, "problem_type": "regression"}, torch.rand(3, 2)),
    ):
        assert classifier(**fields)(ids, mask, labels=labels).loss.isfinite()
    assert classifier(SubquadForTokenClassification, num_labels=3)(ids, mask, labels=ids % 3).loss.isfinite()


def test_a_label_needs_a_token():
    for is_decoder in (False, True):
        with pytest.raises(sq.InputError, match="at least one token; got none"):
            classifier(is_decoder=is_decoder)(tokens()[0][:, :0])
    with pytest.raises(sq.InputError, match="num_labels must be at least 1 for SubquadForSequenceClassification; got 0"):
        classifier(num_labels=0)


def test_embeddings_that_do_not_fit():
    with pytest.raises(sq.InputError, match=r"inputs_embeds must be \(batch, length, 24\); got shape \(2, 3, 5\)"):
        causal_lm("linear")(inputs_embeds=torch.zeros(2, 3, 5, dtype=torch.float64))
    with pytest.raises(sq.InputError, match=r"inputs_embeds must have the precision of the layer"):
        causal_lm("linear")(inputs_embeds=torch.zeros(2, 3, 24))


def test_images_that_do_not_fit():
    model = SubquadForImageClassification(config("linear", image_size=(8, 4), patch_size=2))
    assert model(torch.zeros(5, 3, 8, 4)).logits.shape == (5, 2)
    for images in (torch.zeros(5, 3, 4, 8), torch.zeros(5, 1, 8, 4), torch.zeros(3, 8, 4)):
        with pytest.raises(sq.InputError, match=r"pixel_values must be .* = \(batch, 3, 8, 4\)"):
            model(images)
    with pytest.raises(sq.InputError, match=r"that patch_size=3 divides; got 8"):
        SubquadForImageClassification(config("linear", image_size=8, patch_size=3))


def test_models_that_a_config_cannot_give():
    with pytest.raises(
        sq.InputError, match="SubquadModel is an encoder or a decoder; got a config with is_encoder_decoder=True"
    ):
        SubquadModel(config(is_encoder_decoder=True))
    with pytest.raises(sq.InputError, match="SubquadForCausalLM predicts tokens, so vocab_size must be a number; got None"):
        SubquadForCausalLM(config(vocab_size=None, pad_token_id=None, bos_token_id=None))
    for model in (SubquadModel, SubquadForCausalLM, SubquadForConditionalGeneration, SubquadForImageClassification):
        with pytest.raises(sq.InputError, match=f"{model.__name__} takes a SubquadConfig; got dict"):
            model({})
    with pytest.raises(sq.InputError, match="vocab_size=None and reads no tokens; got input_ids"):
        SubquadModel(SubquadConfig(vocab_size=None, num_hidden_layers=1))(tokens()[0])


def test_without_transformers(monkeypatch):
    import subprocess
    import sys

    code = "import sys; sys.modules['transformers'] = None\nimport subquad\ntry:\n import subquad.models\nexcept subquad.MissingExtraError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'subquad[hf]'" in done.stdout
