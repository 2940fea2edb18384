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
from accelerate import DistributedType, PartialState

from subquad.errors import SubquadError
from subquad.runs import checkpoints
from subquad.runs.lock import exclusive
from subquad.training import load, train
from tests.training.fake import SETTINGS, FakeText
from tests.training.weights import last

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch was built without gloo"),
]
STEADY = replace(SETTINGS, dropout=0.0, label_smoothing=0.1)
METHODS = ["linear", "softmax"]


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def work(rank, port, folder, given, is_disguised):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **given,
    }
    if is_disguised:
        disguise()
    out = Path(folder) / ("other" if rank and not given else "shared")  # with FSDP all write their part of a checkpoint
    train(FakeText(), METHODS, STEADY, out, threads=1, eval_every=5)


def disguise():
    """accelerate takes these processes for those of accelerators, the only ones that it does FSDP with."""

    def begin(self, *given, begin=PartialState.__init__, **more):
        begin(self, *given, **more)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = begin


def refused(rank, port, folder, *more):
    with pytest.raises(SubquadError) as caught:
        work(rank, port, folder, *more)
    (folder / str(rank)).write_text(str(caught.value))


def two(folder, given, is_disguised=False, target=work):
    """The processes, started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["subquad.training", __name__])
    workers = [context.Process(target=target, args=(rank, port, folder, given, is_disguised)) for rank in range(2)]
    for worker in workers:
        worker.start()
    return workers


@pytest.mark.parametrize("given", [{}, FSDP], ids=["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one_and_only_the_first_writes(run, tmp_path, given):
    workers = two(tmp_path, given, is_disguised=bool(given))
    one = run(*METHODS, task=FakeText(), settings=STEADY, eval_every=5, out=tmp_path / "one")
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert not (tmp_path / "other").exists()
    both = load(tmp_path / "shared" / "results.json")
    for single, shared in zip(one.records, both.records, strict=True):
        newest = checkpoints.latest(tmp_path / "shared" / single.method)
        assert (newest / "pytorch_model_fsdp.bin").exists() == bool(given)
        assert (shared.status, shared.processes) == ("done", 2)
        assert [loss for _, loss in shared.losses] == pytest.approx([loss for _, loss in single.losses], rel=1e-5)
        assert [e["loss"] for e in shared.evals] == pytest.approx([e["loss"] for e in single.evals], rel=1e-5)
        assert shared.test["loss"] == pytest.approx(single.test["loss"], rel=1e-5)
        a, b = (last(tmp_path / name / single.method) for name in ("one", "shared"))
        assert all((a[name] - b[name]).abs().max() < 1e-4 for name in a)


def test_fsdp_on_cpus_is_refused_rather_than_ignored(tmp_path):
    workers = two(tmp_path, FSDP, target=refused)
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert {path.name: path.read_text()[:15] for path in tmp_path.iterdir()} == {"0": "FSDP needs GPUs", "1": "FSDP needs GPUs"}


def test_a_folder_that_another_run_writes_to_is_refused_by_all_processes(tmp_path):
    with exclusive(tmp_path / "shared", "training"):
        workers = two(tmp_path, {}, target=refused)
        for worker in workers:
            worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert all("another training is writing to" in (tmp_path / rank).read_text() for rank in "01")


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
    assert "Start all of them again with --resume" in " ".join(said.split()), said
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
    assert "the same command with --resume continues it" in " ".join(said.split())
    record = load(out / "results.json").records[0]
    assert record.status == "stopped"
    assert 0 < record.step < 200
    assert checkpoints.step_of(checkpoints.latest(out / "linear")) == record.step
