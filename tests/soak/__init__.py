"""The soak test: random cases for as long as you like, each of which must end with the right result or a clear refusal.

See docs/reliability.md for what it tests. To run it:

    python -m tests.soak --minutes 480 --seed 0 --part cases

A *part* is a module of this package. It defines

    run_case(seed: int, index: int, folder: pathlib.Path) -> dict

which runs one case and returns how it ended. The case must depend only on `seed` and `index`. `folder` is an empty folder for
the case's own use. It is removed afterwards, unless the case is a finding. The dictionary holds plain values for JSON:

    verdict       "answered" or "refused"; for a finding, "wrong", "foreign error" or "crash"
    labels        the properties to count the case by: {"mechanism": "local", "stride": ["sliced", "lazy"]}
    error         for a finding, what is wrong, in a few lines at most
    reproduction  for a finding, how to reproduce it: a Python program or a command

It may hold other entries, which are kept only for findings. A case that raises an exception is a "foreign error". A case whose
process dies, or that takes longer than `SECONDS`, is a "crash". A part may also define

    COUNT = 1000                    how many cases to run, unless --cases or --minutes is given
    SECONDS = 120                   how long a case may take
    environment(part, out) -> dict  environment variables for its workers; called once, before they start
    shrink(seed, index, folder) -> str   the smallest reproduction of a finding that was found; called in a process of its own
    explain(seed, index) -> dict    labels and reproduction of a case whose process died before it could return them

Workers have one OpenMP thread. To add a part, list its module in `PARTS`.
"""

PARTS = {
    "cases": "tests.soak.cases",
    "kills": "tests.soak.kills",
    "files": "tests.soak.files",
    "address": "tests.soak.native",
    "undefined": "tests.soak.native",
    "thread": "tests.soak.native",
}
NATIVE = ("address", "undefined", "thread")  # what --part native stands for
FINDINGS = ("wrong", "foreign error", "crash")
VERDICTS = ("answered", "refused", *FINDINGS)
