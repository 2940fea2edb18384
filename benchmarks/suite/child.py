"""`subquad`, for as long as somebody waits for it: when standard input ends, that is a wish to stop.

So cells do not run on alone when the suite is killed: they write a checkpoint and end.
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
