"""A soak test: many random cases, for as long as one likes, each with the right answer or a clear refusal. See docs/reliability.md.

    python -m tests.soak --minutes 480 --seed 0 --part cases

A *part* is a module of this package. It defines

    run_case(seed: int, index: int, folder: pathlib.Path) -> dict

which runs one case and tells how it ended. The case is a pure function of `seed` and `index`. `folder` is empty and belongs to the
case; it is removed afterwards, unless the case is a finding. The dictionary has plain values for JSON:

    verdict       "answered" or "refused"; or one of the findings, "wrong", "foreign error", "crash"
    labels        what to count the case under: {"mechanism": "local", "stride": ["sliced", "lazy"]}
    error         for a finding, what is wrong, in one or a few lines
    reproduction  for a finding, how to see it: plain Python or a command

and may have more, which is kept for findings only. A case that raises is a "foreign error". One that ends its process, or takes more
than `SECONDS`, is a "crash". A part may also define

    COUNT = 1000                    how many cases there are unless --cases or --minutes says otherwise
    SECONDS = 120                   the longest time a case may take
    environment(part, out) -> dict  environment variables for its workers; runs once, before they start
    shrink(seed, index, folder) -> str   the reproduction of a finding, made as small as possible; runs in a process of its own
    explain(seed, index) -> dict    labels and reproduction of a case that ended its process and so could not return them

Workers have one OpenMP thread. To add a part, add it to `PARTS`.
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
