"""Runs every mechanism with extreme options on 200 tokens, in little memory; prints what is neither an answer nor a refusal.

`test_extremes.py` starts it, because the limit on memory holds for a whole process.
"""

import resource
import signal
import sys
from dataclasses import fields
from pathlib import Path

import torch

import subquad as sq
from subquad.mechanisms import MECHANISMS
from subquad.ops import dispatch
from tests.options import small, variants

EXTREMES = (
    0, 1, -1, 2**31 - 2, 2**31 - 1, 2**31, 2**62, 2**62 - 1, 10**400, 10**5000, -(10**400),
    1e-300, 1e300, 1e30, 1e38, 5e-324, -1.0, 0.0, 0.5, float("nan"), float("inf"), -float("inf"),
    None, True, False, "", "abc", "1", b"1", [], [1], (), (1,), (1, 1), (2**62, 1), (10**400, 1), (1.0, 2.0), {}, {1}, 1j, object(),
    torch.tensor(3), torch.ones(2), torch.ones(2).numpy(), sq.Linear(), int,
)  # fmt: skip
MORE_MEMORY = 2**31  # bytes, beyond what the process has when it starts
SECONDS = 20  # for one set of options
HEADS, DIM, WIDTH, LENGTH = 2, 8, 16, 200


def option_sets(cls):
    """One option at a time at an extreme, then all that count something at the largest number."""
    names = [f.name for f in fields(cls)]
    for base in ({}, *variants(cls.info.name)):
        usual = {**small(cls.info.name), **base}
        for name in names:
            yield from ({**usual, name: value} for value in EXTREMES)
        counts = [f.name for f in fields(cls) if f.type in ("int", "int | None", "int | tuple[int, ...]") and f.name != "seed"]
        for odd in (2**31 - 1, 2**31 - 2):
            yield {**usual, **dict.fromkeys(counts, odd)}
            yield from ({**usual, one: odd, other: odd} for one in counts for other in counts if one < other)


def run(cls, options):
    mechanism = cls(**options)
    module = mechanism.build(heads=HEADS, head_dim=DIM, dim=WIDTH).eval()
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM).unbind(0)
    q = k if mechanism.shares_query_and_key else q
    more = {"hidden": torch.randn(1, LENGTH, WIDTH)} if mechanism.reads_tokens else {}
    for is_causal in (False, True):
        if sq.why_not(mechanism, **{"is_causal" if is_causal else "bidirectional": True}):
            continue
        for compiled in (True, False):
            with torch.no_grad() if compiled else dispatch.disabled():
                require_finite(module(q, k, v, is_causal=is_causal, **more))
    if not sq.why_not(mechanism, is_causal=True, decode=True):
        state = None
        for start, end in ((0, 190), (190, 191), (191, 200)):
            piece = [t[:, :, start:end] for t in (q, k, v)]
            piece[0] = piece[1] if mechanism.shares_query_and_key else piece[0]
            hidden = {name: t[:, start:end] for name, t in more.items()}
            out, state = module(*piece, is_causal=True, state=state, return_state=True, **hidden)
            require_finite(out)


def require_finite(out):
    if (out.shape != (1, HEADS, LENGTH, DIM) and out.shape[2] == LENGTH) or not out.isfinite().all():
        raise AssertionError(
            f"the output is {tuple(out.shape)}, with {int((~out.isfinite()).sum())} numbers that are not finite"
        )


def time_out(*_):
    raise TimeoutError(f"no answer after {SECONDS} seconds")


def main():
    chosen = sys.argv[1:]
    run(sq.Linear, {})
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, time_out)
    for cls in MECHANISMS:
        if chosen and cls.info.name not in chosen:
            continue
        for options in option_sets(cls):
            torch.manual_seed(0)
            signal.alarm(SECONDS)
            try:
                run(cls, options)
            except sq.SubquadError:
                pass
            except BaseException as error:
                print(f"{cls.__name__}({shown(options)}): {type(error).__name__}: {str(error)[:150]!r}", flush=True)
            finally:
                signal.alarm(0)


def shown(options):
    try:
        return ", ".join(f"{name}={value!r}"[:60] for name, value in options.items())
    except ValueError:
        return ", ".join(options)


if __name__ == "__main__":
    main()
