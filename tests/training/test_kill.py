"""kill -9 at any moment: what was lost is made again, to the bit."""

import multiprocessing
import random
import time
from dataclasses import replace

import pytest

from subquad.runs import checkpoints
from subquad.tasks import TASKS
from subquad.training import load, train
from tests.training.weights import equal, last, weights

pytestmark = pytest.mark.slow

SETTINGS = replace(
    TASKS["digits"].info.defaults, layers=1, dim=16, heads=2, batch=16, steps=60, epochs=None, dropout=0.1, label_smoothing=0.1
)
EVERY = 7
KILLS = 10


def work(out, reached):
    def on_progress(progress):
        reached.value = progress.record.step

    train(
        TASKS["digits"](),
        ["linear"],
        SETTINGS,
        out,
        threads=1,
        eval_every=5,
        save_every=EVERY,
        resume=True,
        in_worker=False,
        on_progress=on_progress,
    )


@pytest.fixture(scope="module")
def fork():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["subquad.training", __name__])
    return context


def test_a_run_that_was_killed_again_and_again_ends_with_the_same_bits(fork, tmp_path):
    work(tmp_path / "whole", fork.Value("i"))
    out, chance = tmp_path / "killed", random.Random(0)
    folder, kills, during_save = out / "linear", 0, 0
    while True:
        reached = fork.Value("i", 0)
        process = fork.Process(target=work, args=(out, reached))
        process.start()
        before = checkpoints.latest(folder)
        while process.is_alive() and not reached.value:
            time.sleep(0.005)
        if kills < KILLS:
            wait = chance.uniform(0, 0.25)
            until = time.monotonic() + wait
            while process.is_alive() and time.monotonic() < until:
                time.sleep(0.002)
            while process.is_alive() and kills % 2 and not any((folder / checkpoints.STAGING).glob("*/*")):
                time.sleep(0.0005)  # every other time, while a folder is being written
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        kills += 1
        during_save += any((folder / checkpoints.STAGING).glob("*/*"))
        newest = checkpoints.latest(folder)
        made = 0 if newest is None else checkpoints.step_of(newest)
        assert reached.value - made <= EVERY
        assert before is None or made >= checkpoints.step_of(before)
        if newest is not None:
            assert all(x.isfinite().all() for x in weights(newest).values())
    assert kills >= 3
    assert during_save
    whole = tmp_path / "whole"
    assert equal(last(folder), last(whole / "linear"))
    assert equal(weights(folder / "best"), weights(whole / "linear" / "best"))
    a, b = (load(path / "results.json").records[0] for path in (out, whole))
    for name in ("losses", "evals", "best_step", "test", "status"):
        assert getattr(a, name) == getattr(b, name), name
