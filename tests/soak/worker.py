"""The worker's side: runs the cases it is sent, one after the other."""

from __future__ import annotations

import shutil
import traceback
from importlib import import_module
from pathlib import Path

from subquad.runs.worker import Connection
from tests.soak import FINDINGS, PARTS, VERDICTS


def main():
    """The first message names the part, seed and folder; every other one is a case to run, or a finding to shrink."""
    connection = Connection()
    settings = connection.receive()
    module = import_module(settings.get("module") or PARTS[settings["part"]])
    seed, out = settings["seed"], Path(settings["folder"])
    connection.send({"ready": True})
    while True:
        message = connection.receive()
        index = message["index"]
        connection.send(shrink(module, seed, index, out) if message.get("shrink") else run(module, seed, index, out))


def run(module, seed, index, out):
    """The result of a case, whatever happens in it."""
    folder = out / str(index)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = module.run_case(seed, index, folder)
        if result["verdict"] not in VERDICTS:
            raise ValueError(f"the verdict must be one of {', '.join(VERDICTS)}; got {result['verdict']!r}")
    except Exception:
        result = {"verdict": "foreign error", "labels": {}, "error": traceback.format_exc(), "reproduction": ""}
    if result["verdict"] not in FINDINGS or not any(folder.iterdir()):
        shutil.rmtree(folder)
    return result


def shrink(module, seed, index, out):
    folder = out / f"{index}-shrinking"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return {"reproduction": module.shrink(seed, index, folder)}
    except Exception:
        return {"failure": traceback.format_exc()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
