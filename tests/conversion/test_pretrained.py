"""Real weights and real text; skipped, by name, where they are not."""

import os
from pathlib import Path

import pytest
import torch
from benchmarks import pretrained

import subquad as sq
from subquad.conversion import Schedule, transfer

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]
STORIES = 20  # of the 60 that the documents' figures are of


def found(load, *where):
    try:
        return load(*where)
    except pretrained.MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def data():
    if "SUBQUAD_DATA" not in os.environ:
        pytest.skip("needs real text: set SUBQUAD_DATA to a folder with tinystories, stsb, wikitext2")
    return Path(os.environ["SUBQUAD_DATA"])


@pytest.fixture(scope="module")
def stories(data):
    read = found(pretrained.stories15m, data)
    tests = [pretrained.begun(read.tokenizer, text, 256) for text in found(pretrained.stories, data, "test")[:STORIES]]
    return read.model, read.tokenizer, tests


def same(model, **given):
    with torch.no_grad():
        before = model(**given)[0]
        after = sq.convert(model, "softmax", copy=True)(**given)[0]
    return (after - before).abs().max() <= 1e-4 * before.abs().max()


def test_softmax_in_minilm(data):
    read = found(pretrained.minilm)
    given = read.tokenizer(["A man is playing a guitar.", "Nobody is here"], padding=True, return_tensors="pt")
    assert same(read.model, **given)
    before = pretrained.sts(read, data)
    assert before == pytest.approx(0.8203, abs=5e-5)
    sq.convert(read.model, "softmax")
    assert pretrained.sts(read, data) == pytest.approx(before, abs=1e-6)


def test_softmax_in_smollm2():
    read = found(pretrained.smollm2)
    assert same(read.model, **read.tokenizer("It was a dark and stormy night", return_tensors="pt"))


def test_softmax_in_stories15m(stories):
    model, _, tests = stories
    assert same(model, input_ids=tests[0])


def test_a_naive_swap_breaks_it_and_transfer_mends_some(stories, data):
    model, tokenizer, tests = stories
    before = pretrained.nats(model, tests)
    assert 1 < before < 1.1
    swapped = {name: sq.convert(model, method, copy=True) for name, method in METHODS.items()}
    nats = {name: pretrained.nats(converted, tests) for name, converted in swapped.items()}
    assert before < nats["window 64"] < nats["window 32"] < 1.5
    assert nats["linear"] > 3
    assert nats["performer"] > 3
    batches = pretrained.packed(tokenizer, pretrained.stories(data, "val")[:60], 128, 4)
    transfer(model, swapped["hybrid"], batches, Schedule(steps=20, lr=3e-2, every=10))
    assert pretrained.nats(swapped["hybrid"], tests) < nats["hybrid"]
    assert nats["hybrid"] < nats["window 32"]


METHODS = {
    "window 64": sq.Local(window=63),  # and the token itself
    "window 32": sq.Local(window=31),
    "hybrid": sq.Hybrid(window=31),
    "linear": sq.Linear(),
    "performer": sq.Performer(features=256),
}


def test_stories_go_on_in_constant_memory(stories):
    model, tokenizer, _ = stories
    converted = sq.convert(model, sq.Hybrid(window=31), copy=True)
    prompt = pretrained.begun(tokenizer, "Once upon a time, there was a little girl", 64)
    short, long = (
        converted.generate(prompt, max_new_tokens=n, do_sample=False, return_dict_in_generate=True) for n in (40, 90)
    )
    assert torch.equal(long.sequences[:, : short.sequences.shape[1]], short.sequences)
    assert long.past_key_values.nbytes == short.past_key_values.nbytes
    assert torch.equal(long.sequences, converted.generate(prompt, max_new_tokens=90, do_sample=False, use_cache=False))
