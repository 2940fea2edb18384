"""A worker process for each method: its peak memory is its own, and a crash affects only one method.

The worker receives one request and sends records back. On SIGTERM it writes a checkpoint and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from subquad import errors
from subquad.families.base import Mechanism
from subquad.registry import load_module, module_of, options_of, with_options
from subquad.runs.checkpoints import LOG, open_log
from subquad.runs.stop import StopRequest
from subquad.runs.worker import KILLED, Connection, Worker, why_ended
from subquad.training.plan import Plan, load_task
from subquad.training.results import Record, record_from


def train_in_worker(
    plan: Plan,
    mechanism: Mechanism,
    folder: Path,
    on_record: Callable[[Record], None],
    stop: StopRequest,
    lock: int | None,
    data: str,
) -> Record:
    """As `run.train_method`, in a process that inherits `lock`; `data` is the fingerprint of the rows, if they are known."""
    folder.mkdir(parents=True, exist_ok=True)
    name, options = mechanism.info.name, options_of(mechanism)
    method = {"module": module_of(mechanism), "method": name, "options": options}
    record = Record(name, options, "running")
    fatal: dict[str, Any] = {}
    with open_log(folder) as log:
        worker = Worker("subquad.training.worker:main", log, environment={"OMP_NUM_THREADS": str(plan.threads)}, lock=lock)
    stop.on_request = worker.request_stop
    if stop.requested:  # before the worker was there
        stop.on_request()
    try:
        worker.send({"plan": plan.to_json(), **method, "folder": str(folder), "data": data})
        for message in worker.messages():
            fatal = message.get("fatal", fatal)
            if "record" in message:
                record = record_from(message["record"])
                on_record(record)
        code = worker.wait()
    finally:
        stop.on_request = lambda: None
        worker.kill()
    if fatal:
        kind = getattr(errors, fatal["kind"], errors.SubquadError)
        raise kind(fatal["why"])
    if record.status == "running":
        record.status, record.why = ("stopped", "") if stop.requested else ("failed", _why_ended(code, folder / LOG))
        on_record(record)
    return record


def _why_ended(code: int, log: Path) -> str:
    why = why_ended(code, log.read_text(errors="replace"))
    return f"{why}; --resume continues from its last checkpoint" if why == KILLED else f"{why} (more in {log})"


def main() -> None:
    """In the worker: train the requested method."""
    connection = Connection()
    order = connection.receive()

    from subquad.training.run import read_data, train_method
    from subquad.training.trainer import Job

    with StopRequest() as stop:
        try:
            plan = Plan.from_json(order["plan"])
            task = load_task(plan.task)
            load_module(order["module"])
            mechanism = with_options(order["method"], order["options"])
            train_method(
                Job(
                    plan=plan,
                    task=task,
                    splits=read_data(plan, task, order["data"]),
                    mechanism=mechanism,
                    folder=Path(order["folder"]),
                    on_record=lambda record: connection.send({"record": asdict(record)}),
                    is_stopping=lambda: stop.requested,
                )
            )
        except errors.SubquadError as error:
            connection.send({"fatal": {"kind": type(error).__name__, "why": str(error)}})
