"""A process a method: its peak memory is its own, and what breaks it costs one method.

The child reads one order and writes records, one JSON object a line. It ends when the process that gave the order ends, and on
SIGTERM after a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from subquad import errors
from subquad.families.base import Mechanism
from subquad.registry import options_of, with_options
from subquad.runs.checkpoints import LOG
from subquad.runs.stop import Stop
from subquad.training.plan import Plan, placed
from subquad.training.results import Record, record_from


def run_apart(
    plan: Plan, config: Mechanism, folder: Path, tell: Callable[[Record], None], stop: Stop, lock: int | None, data: str
) -> Record:
    """As `run.run`, in a process of its own that inherits `lock`, on rows of the fingerprint `data`, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    method = {"method": config.info.name, "options": options_of(config)}
    order = {"plan": plan.to_json(), **method, "folder": str(folder), "data": data}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(plan.threads),
    }
    record = Record(config.info.name, options_of(config), "running")
    fatal: dict[str, Any] = {}
    with (folder / LOG).open("a") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", "from subquad.training.worker import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,  # Ctrl-C is for the process that gives the order
        )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    stop.ask = lambda: child.send_signal(signal.SIGTERM)
    if stop.is_asked:  # before there was a child
        stop.ask()
    try:
        child.stdin.write(json.dumps(order) + "\n")
        child.stdin.flush()
        for line in child.stdout:
            said = json.loads(line)
            fatal = said.get("fatal", fatal)
            if "record" in said:
                record = record_from(said["record"])
                tell(record)
        code = child.wait()
    finally:
        stop.ask = lambda: None
        if child.poll() is None:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
    if fatal:
        kind = getattr(errors, fatal["kind"], errors.SubquadError)
        raise kind(fatal["why"])
    if record.status == "running":
        record.status, record.why = ("stopped", "") if stop.is_asked else ("failed", _last_words(code, folder / LOG))
        tell(record)
    return record


def _last_words(code: int, log: Path) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed, by somebody or for want of memory; --resume goes on from its last checkpoint"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "") + f" (more in {log})"


def main() -> None:
    """Do what the order on standard input says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    from subquad.training.run import read_data, run
    from subquad.training.trainer import Job

    plan = Plan.from_json(order["plan"])
    task = placed(plan.task)
    with Stop() as stop:
        try:
            splits = read_data(plan, task, order["data"])
            config = with_options(order["method"], order["options"])
            folder = Path(order["folder"])
            run(Job(plan, task, splits, config, folder, lambda r: say(record=asdict(r)), lambda: stop.is_asked))
        except errors.SubquadError as error:
            say(fatal={"kind": type(error).__name__, "why": str(error)})


def _end_with_parent() -> None:
    """When nobody is left who listens, end, whatever is going on."""
    sys.stdin.read()
    os._exit(0)
