"""What two runs have made, to the bit; and a run that is stopped in the middle."""

import os
import signal

import torch
from safetensors.torch import load_file

from subquad.runs import checkpoints


def weights(folder):
    return load_file(folder / "model.safetensors")


def last(folder):
    return weights(checkpoints.latest(folder))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stop_after(step, number=signal.SIGINT):
    """To watch a run with: after that step the signal is sent, so that the one after it is the last."""

    sent = []

    def on_progress(progress):
        if progress.record.step == step and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    return on_progress
