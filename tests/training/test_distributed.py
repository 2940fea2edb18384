"""Several processes: the numbers of one, one writer, and an end when one of them is lost."""

import json
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from subquad.training import checkpoints, load, train
from tests.training.fake import SETTINGS, FakeText
from tests.training.weights import last

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch was built without gloo")
STEADY = replace(SETTINGS, dropout=0.0, label_smoothing=0.1)
METHODS = ["linear", "softmax"]


def work(rank, port, folder):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    out = Path(folder) / ("shared" if rank == 0 else "other")
    train(FakeText(), METHODS, STEADY, out, threads=1, eval_every=5)


def test_two_processes_have_the_losses_of_one_and_only_the_first_writes(run, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["subquad.training", __name__])
    workers = [context.Process(target=work, args=(rank, port, tmp_path)) for rank in range(2)]
    for worker in workers:
        worker.start()
    one = run(*METHODS, task=FakeText(), settings=STEADY, eval_every=5, out=tmp_path / "one")
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert not (tmp_path / "other").exists()
    two = load(tmp_path / "shared" / "results.json")
    for alone, shared in zip(one.records, two.records, strict=True):
        assert (shared.status, shared.processes) == ("done", 2)
        assert [loss for _, loss in shared.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-5)
        assert [e["loss"] for e in shared.evals] == pytest.approx([e["loss"] for e in alone.evals], rel=1e-5)
        assert shared.test["loss"] == pytest.approx(alone.test["loss"], rel=1e-5)
        a, b = (last(tmp_path / name / alone.method) for name in ("one", "shared"))
        assert all((a[name] - b[name]).abs().max() < 1e-4 for name in a)


def launched(out, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "subquad", "train"]
    command += shlex.split("digits --method linear --steps 200 --layers 1 --dim 16 --heads 2 --batch 8 --threads 1")
    command += ["--eval-every", "200", "--save-every", "20", "--out", str(out), *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_lost_worker_ends_the_run_and_it_can_be_gone_on_with(tmp_path):
    launcher = launched(tmp_path / "run")
    while launcher.poll() is None and not list((tmp_path / "run" / "linear").glob("checkpoint-*")):
        time.sleep(0.02)
    workers = psutil.Process(launcher.pid).children()
    victim = next(worker for worker in workers if worker.environ().get("RANK") == "1")
    victim.send_signal(signal.SIGKILL)
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode not in (0, None)
    assert "Start all of them again with --resume" in " ".join(said.split())
    record = load(tmp_path / "run" / "results.json").records[0]
    assert record.status == "failed"
    assert 20 <= record.step < 200
    again = launched(tmp_path / "run", "--resume", "--json")
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0
    found = json.loads(printed)["records"][0]
    assert (found["status"], found["step"]) == ("done", 200)
    assert [step for step, _ in found["losses"]] == list(range(1, 201))


def test_ctrl_c_under_a_launcher_makes_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    launcher = launched(out, "--save-every", "200")
    while launcher.poll() is None and not ((out / "results.json").exists() and load(out / "results.json").records[0].step):
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode not in (0, None)
    assert "the same command with --resume goes on" in " ".join(said.split())
    record = load(out / "results.json").records[0]
    assert record.status == "stopped"
    assert 0 < record.step < 200
    assert checkpoints.step_of(checkpoints.latest(out / "linear")) == record.step
