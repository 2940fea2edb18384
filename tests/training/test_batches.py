"""Which rows a step reads."""

import random
from itertools import groupby

import pytest

from subquad.tasks.rows import evenly_spaced, row_lengths
from subquad.training.data import Batches
from subquad.training.plan import Intervals, Plan
from tests.training.fake import SETTINGS, Fake, FakeRagged
from tests.training.weights import equal, last, stop_after

LENGTHS = [(random.Random(i).randint(1, 40), random.Random(-i).randint(1, 40)) for i in range(1000)]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(("rows", "batch"), [(30, 8), (32, 8), (5, 8), (1000, 3)])
def test_every_epoch_has_every_row_once_and_an_order_of_its_own(rows, batch, lengths):
    batches = list(Batches(rows, batch, steps=-(-4 * rows // batch), seed=0, lengths=lengths))
    assert {len(places) for places in batches} == {batch}
    places = [place for places in batches for place in places]
    assert [epoch for epoch, _ in places] == sorted(epoch for epoch, _ in places)
    epochs = [[row for epoch, row in places if epoch == e] for e in range(4)]
    assert all(sorted(rows_of) == list(range(rows)) for rows_of in epochs)
    assert len({tuple(rows_of) for rows_of in epochs}) == 4


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_processes_share_a_batch(lengths):
    whole = list(Batches(30, 8, 9, seed=0, lengths=lengths))
    parts = [list(Batches(30, 8, 9, seed=0, process=i, processes=2, lengths=lengths)) for i in range(2)]
    assert whole == [a + b for a, b in zip(*parts, strict=True)]


def cells(batches):
    """How many tokens and pads the rows of `batches` take."""
    read = [[LENGTHS[row] for _, row in places] for places in batches]
    return sum(len(rows) * max(row[side] for row in rows) for rows in read for side in range(2))


def test_rows_of_like_lengths_share_a_batch_in_no_order():
    mixed, grouped = (list(Batches(1000, 8, 125, seed=0, lengths=lengths)) for lengths in (None, LENGTHS))
    tokens = sum(map(sum, LENGTHS))
    assert cells(grouped) - tokens < 0.4 * (cells(mixed) - tokens)
    firsts = [LENGTHS[places[0][1]] for places in grouped]
    assert firsts != sorted(firsts)
    assert grouped[:125] != list(Batches(1000, 8, 125, seed=1, lengths=LENGTHS))


def test_a_run_over_rows_of_different_lengths_can_be_stopped(run, tmp_path):
    whole = run(task=FakeRagged(), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(task=FakeRagged(), on_progress=stop_after(8))  # in the second epoch
    again = run(task=FakeRagged(), resume=True)
    assert again.records[0].losses == whole.records[0].losses
    assert again.records[0].test == whole.records[0].test
    assert equal(last(tmp_path / "run" / "linear"), last(tmp_path / "whole" / "linear"))


def test_a_part_of_rows_is_spread_over_them_and_keeps_their_lengths():
    rows = FakeRagged().load(None, SETTINGS).valid
    part = evenly_spaced(rows, 4)
    assert row_lengths(part) == [rows.lengths[i] for i in (0, 12, 25, 37)]
    assert [len(part[i]["input_ids"]) for i in range(4)] == [n for (n,) in row_lengths(part)]
    assert evenly_spaced(rows, 50) is rows
    assert row_lengths(Fake().load(None, SETTINGS).train) is None


@pytest.mark.parametrize(
    ("steps", "given", "expected"),
    [
        (1_200, {}, (240, 120, 288)),  # 5 times 288 rows at a third are a twentieth of 1,200 times 8
        (1_200, {"eval_every": 100, "save_every": 7}, (100, 7, 256)),
        (12, {}, (3, 2, 256)),
        (1_200, {"eval_rows": 5}, (240, 120, 5)),
    ],
)
def test_evaluations_take_a_small_part_of_a_run(steps, given, expected):
    intervals = Intervals(Plan(task="", settings=SETTINGS, **given), steps)
    assert (intervals.evaluation, intervals.checkpoint, intervals.eval_rows) == expected


def test_an_evaluation_reads_so_many_rows_and_the_test_all(run):
    read = []

    class Counted(Fake):
        def score(self, model, rows, splits, settings):
            read.append((len(rows), rows is splits.test))
            return super().score(model, rows, splits, settings)

    record = run(task=Counted(), eval_every=6, eval_rows=4).records[0]
    assert read == [(4, False), (4, False), (15, True)]
    assert record.eval_rows == 4


def test_rows_that_are_drawn_anew_know_their_epoch(run):
    seen = []

    class Anew(Fake):
        def load(self, folder, settings):
            splits = super().load(folder, settings)
            splits.train.set_epoch = seen.append
            return splits

    run(task=Anew())
    assert [epoch for epoch, _ in groupby(seen)] == [0, 1, 2, 3]
