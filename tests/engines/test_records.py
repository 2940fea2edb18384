"""The record of a mechanism names the engine that runs."""

import sys

import torch

from tests.harness import every_default, inputs


def module_of(frame):
    return frame.f_globals.get("__name__", "")


def engines_called(run):
    """The engines whose functions a mechanism, or what its family shares, calls."""
    found = set()

    def profile(frame, event, _):
        if event == "call" and module_of(frame).startswith("subquad.engines.") and frame.f_back is not None:
            engine = module_of(frame).split(".")[2]
            if module_of(frame.f_back).startswith(("subquad.mechanisms.", "subquad.families.")) and engine != "call":
                found.add(engine)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@every_default()
@torch.no_grad()
def test_the_engine_is_the_one_that_runs(case):
    x = inputs(100)
    assert engines_called(lambda: case.run(x, is_causal=case.directions[0])) == {case.info.engine}
