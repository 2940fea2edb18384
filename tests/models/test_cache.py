"""`SubquadCache`: how large it is, and going back, re-ordering, selecting, repeating, starting over."""

import pytest
import torch

import subquad as sq
from subquad.models import SubquadCache
from tests.harness import assert_close
from tests.models.small import DECODABLE, causal_lm, every, tokens, translator


def fed(model, ids, mask=None, *, record=False):
    cache = SubquadCache(model.config)
    if record:
        cache.activate_past_recording()
    for piece in range(0, ids.shape[1], 5):
        end = min(piece + 5, ids.shape[1])
        model(ids[:, piece:end], None if mask is None else mask[:, :end], past_key_values=cache)
    return cache


def next_logits(model, cache, batch=3):
    return model(torch.full((batch, 1), 7), past_key_values=cache).logits


@every(DECODABLE)
@pytest.mark.parametrize("removed", [0, 1, 3, 5, 9, 13])
def test_going_back_over_recorded_tokens(method, removed):
    model = causal_lm(method, position="sinusoidal")
    ids, mask = tokens()
    cache = fed(model, ids, mask, record=True)
    cache.crop(-removed)
    kept = 13 - removed
    assert cache.get_seq_length() == kept
    if kept:
        expected = fed(model, ids[:, :kept], mask[:, :kept])
        assert_close(next_logits(model, cache), next_logits(model, expected))


def test_only_what_was_recorded_can_be_removed():
    model = causal_lm("linear")
    ids, _ = tokens()
    cache = fed(model, ids)
    with pytest.raises(sq.StateError, match="got 2 to remove, and 0 are recorded"):
        cache.crop(-2)
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(sq.StateError, match="got 1 to remove"):
        cache.crop(-1)
    for wrong in (3, None, 1.5):
        with pytest.raises(sq.StateError, match="minus the number of tokens to remove, an integer such as -3"):
            cache.crop(wrong)
    assert cache.get_seq_length() == 26


def test_nothing_is_recorded_unless_asked_for():
    model = causal_lm("linear")
    cache = fed(model, tokens()[0])
    assert not cache.layers[0].past._updates
    assert not cache.position._updates


@every(DECODABLE)
def test_rows_are_reordered_selected_and_repeated(method):
    model = causal_lm(method, position="sinusoidal")
    ids, mask = tokens()
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = fed(model, ids, mask)
        change(cache)
        assert cache.batch_size == len(rows)
        expected = fed(model, ids[rows], mask[rows])
        assert_close(next_logits(model, cache, len(rows)), next_logits(model, expected, len(rows)))


@every(DECODABLE)
def test_going_back_after_reordering(method):
    model = causal_lm(method, position="sinusoidal")
    ids, mask = tokens()
    cache = fed(model, ids, mask, record=True)
    rows = [2, 0, 0, 1]
    cache.reorder_cache(torch.tensor(rows))
    cache.crop(-6)
    expected = fed(model, ids[rows, :7], mask[rows, :7])
    assert_close(next_logits(model, cache, 4), next_logits(model, expected, 4))


def test_the_source_is_reordered_with_its_rows():
    model = translator("linear")
    ids, mask = tokens()
    target = torch.full((3, 4), 7)
    rows = torch.tensor([2, 0])
    cache = SubquadCache(model.config)
    model(ids, mask, target, past_key_values=cache)
    cache.reorder_cache(rows)
    encoded = model.encoder(ids[rows], mask[rows])
    expected = model(None, mask[rows], torch.full((2, 5), 7), encoder_outputs=encoded).logits[:, -1:]
    found = model(None, mask[rows], torch.full((2, 1), 7), encoder_outputs=encoded, past_key_values=cache).logits
    assert_close(found, expected)


def test_reset_starts_over():
    model = causal_lm("linear")
    ids, _ = tokens()
    cache = fed(model, ids)
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


@every([method for method in DECODABLE if method.info.engine in ("kernelized", "hybrid")])
def test_a_cache_of_sums_keeps_its_size(method):
    model = causal_lm(method)
    sizes = {fed(model, tokens(2, length)[0]).nbytes for length in (1, 7, 64, 300)}
    assert len(sizes) == 1


@every([method for method in DECODABLE if method.info.name in ("local", "longformer", "bigbird", "reformer", "routing")])
def test_a_windowed_cache_is_bounded(method):
    model = causal_lm(method)
    cache = SubquadCache(model.config)
    sizes = []
    for seed in range(16):
        model(tokens(1, 100, seed=seed)[0], past_key_values=cache)
        sizes.append(cache.nbytes)
    assert max(sizes[8:]) <= max(sizes[:8])


def test_bytes_are_those_of_the_tensors():
    model = causal_lm("linear", dtype=torch.float32)
    cache = model(tokens(2, 9)[0]).past_key_values
    parts = [part for layer in cache.layers for part in layer.state.tensors.values()] + [cache.position.value]
    assert cache.nbytes == sum(part.nbytes for part in parts)
    assert cache.nbytes > 2 * 2 * 3 * 8 * 8 * 4  # layers, batch, heads, and the sums over 8 channels of keys and of values


def test_rows_of_the_wrong_kind():
    cache = fed(causal_lm("linear"), tokens()[0])
    with pytest.raises(sq.InputError, match="indices must be a tensor of row numbers or a bool tensor"):
        cache.batch_select_indices([1])
    for wrong in (-1, 0, 1.5):
        with pytest.raises(sq.InputError, match="repeats must be an integer of at least 1"):
            cache.batch_repeat_interleave(wrong)


def test_other_models_cannot_use_it():
    cache = SubquadCache(causal_lm("linear").config)
    with pytest.raises(sq.UnsupportedError, match="not another model's keys and values"):
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    with pytest.raises(sq.InputError, match="takes the config of a subquad model or of a converted model; got int"):
        SubquadCache(3)
