"""A part whose cases end in every way that there is, to test the harness with. The labels say how case `index` ends."""

import os
import signal
import time

SECONDS = 5

WAYS = ("answered", "refused", "wrong", "raises", "dies", "hangs")


def run_case(seed, index, folder):
    way = WAYS[index] if index < len(WAYS) else "answered"
    if way == "raises":
        raise RuntimeError("an error of another library")
    if way == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == "hangs":
        time.sleep(1000)
    (folder / "file").write_text("kept for findings")
    return {"verdict": way, "labels": {"mechanism": "local", "stride": ["sliced", "lazy"]}, "error": "x", "reproduction": "y"}


def explain(seed, index):
    return {"labels": {"mechanism": "linear"}, "reproduction": f"case {index}"}


def shrink(seed, index, folder):
    return f"small {index}"
