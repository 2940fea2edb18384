"""The process of one cell: the `subquad` command, which stops when its standard input is closed.

So when the suite is killed, its cells write a checkpoint and end, instead of running on.
"""

from __future__ import annotations

import os
import signal
import threading

from subquad.cli import main


def _stop_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    main()
