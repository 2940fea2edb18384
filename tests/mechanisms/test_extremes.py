"""Extreme options: a clear refusal, or the right answer at a cost that follows from the length."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.testing.contract.decoding import feed
from tests.harness import Case, assert_close, inputs

HUGE = 2**31 - 1


def test_every_option_at_its_extremes():
    done = subprocess.run(
        [sys.executable, "-m", "tests.mechanisms.extremes"], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "", "")


@pytest.mark.parametrize(
    "mechanism",
    [
        sq.Hybrid(window=HUGE),
        sq.Hybrid(window=300),
        sq.Local(window=HUGE),
        sq.Local(window=3, dilation=HUGE),
        sq.Local(window=HUGE, dilation=HUGE),
        sq.Pooled(stride=HUGE, window=3),
        sq.Pooled(stride=3, window=HUGE),
        sq.SparseStrided(stride=HUGE),
        sq.SparseFixed(stride=HUGE, summary=HUGE),
        sq.SparseFixed(stride=HUGE, summary=HUGE, heads="split"),
        sq.SparseFixed(stride=HUGE),
        sq.SparseFixed(stride=19, summary=19),
        sq.Longformer(window=HUGE, dilation=HUGE, num_global=HUGE),
        sq.Longformer(window=3, dilation=(1, HUGE, 2)),
        sq.BigBird(block=HUGE, window=HUGE, random=HUGE, globals=HUGE),
        sq.BigBird(block=8, window=HUGE, random=0, globals=0),
        sq.BigBird(block=8, window=1, random=HUGE, globals=0),
        sq.BigBird(block=8, window=1, random=0, globals=HUGE),
        sq.Reformer(buckets=4, chunk=HUGE, rounds=2),
        sq.Routing(clusters=4, chunk=HUGE),
        sq.Clustered(clusters=HUGE, topk=HUGE),
        sq.Nystrom(landmarks=HUGE),
        sq.SVD(rank=HUGE),
        sq.Performer(kind="favor++", features=8, p=1e-30),
        sq.RFA(floor=1e30, features=8),
    ],
    ids=repr,
)
@torch.no_grad()
def test_the_answer_is_right(mechanism):
    case, x = Case(mechanism), inputs(200)
    for is_causal in case.directions:
        expected = case.reference(x, is_causal=is_causal)
        assert_close(case.run(x, is_causal=is_causal), expected)
        if is_causal and not case.why_not(decode=True):
            assert_close(feed(case, x, [100, 1, 60, 39])[0], expected)


@torch.no_grad()
def test_a_state_of_hybrid_is_as_large_as_its_tokens():
    case, x = Case(sq.Hybrid(window=1000)), inputs(1500)
    found, state = feed(case, x, [3, 1, 700, 1, 795])
    assert_close(found, case.run(x, is_causal=True))
    assert state.tensors["key"].shape[2] == 1000
    _, state = feed(case, x, [300])
    assert state.tensors["key"].shape[2] == 512
