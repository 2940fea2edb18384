import contextlib
import io

import pytest

from subquad.training import train
from tests.training.fake import SETTINGS, Fake


@pytest.fixture
def run(tmp_path):
    """Train the fake task in this process, in a folder of the test's own."""

    def run(*methods, settings=SETTINGS, out=tmp_path / "run", task=None, **given):
        given = {"threads": 1, "in_worker": False, **given}
        with contextlib.redirect_stdout(io.StringIO()):
            return train(task or Fake(), list(methods) or ["linear"], settings, out, **given)

    return run
