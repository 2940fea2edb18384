"""Every mechanism against installed public implementations, and against PyTorch's fused attention, on this machine.

    make peers                                                                  # installs them, then runs everything
    python benchmarks/peers.py --methods linear,local --lengths 1024,4096       # a quick run

`implementations.py` has one entry for each. Both sides get the same tensors and settings; if they compute the same
function, they also get the same weights, and must agree before they are timed. Then all of them take turns, in shuffled
order, round after round, in one process. The two sides of an entry run one after the other, and a ratio is that of one
round, so that disturbances of the machine affect both. A figure is the median over rounds; the interval contains the middle
80 percent of them. Training is a forward and a backward pass. Both sides are in evaluation mode, without dropout, in both
passes.

If a public layer cannot be called without its projections, ours has the same ones, and there are two figures: that of the
whole layers, and one with the time of the projections, measured in the same round, subtracted from both sides. The backward
pass of a layer computes gradients of the tokens and all parameters, otherwise of queries, keys and values.

A package that cannot be imported is left out by name. A call that fails, needs too much memory, or would take more than
`--limit` seconds is recorded with the reason. After Ctrl-C, what was measured is printed and written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import subquad as sq
from subquad.runs.memory import free_memory

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import describe_setup, header, markdown, middle_80_percent, new_table, parse_numbers, write
from benchmarks.implementations import HEAD_DIM, HEADS, PACKAGES, PEERS, WIDTH, Peer, Side

PASSES = ("forward", "training")
FEW_ROUNDS = 3  # beyond 4,096 tokens
SAME = 1e-3  # the largest relative difference of two implementations of one function in float32


@dataclass
class Line:
    """A peer at one length, direction and pass."""

    peer: Peer
    runs: dict[str, Callable[[], object]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""
    found: dict[str, float] = field(default_factory=dict)  # how much they differ


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    peers, left_out = available([p for p in PEERS if p.method in options.methods and p.package in options.peers])
    results: dict[str, Any] = {
        **header(__file__, arguments, HEADS, HEAD_DIM),
        "finished": False,
        "versions": {package: metadata.version(package) for package in dict.fromkeys(p.package for p in peers)},
        "left_out": left_out,
        "without_a_peer": [m for m in sq.methods() if m not in {"softmax", *(p.method for p in PEERS)}],
        "peers": [{"peer": p.name, "method": p.method, "ours": p.ours, "theirs": p.theirs, "note": p.note} for p in peers],
        "time": [],
    }
    try:
        with bounded_memory():
            for length in options.lengths:
                for is_causal, which in ((c, w) for c in (False, True) for w in options.passes):
                    chosen = [p for p in peers if is_causal in p.directions]
                    results["time"] += measure(chosen, length, is_causal, which, options, results["time"])
                if options.out:
                    write(options.out, results)
        results["finished"] = True
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted. These are the results so far.")
    if options.out:
        write(options.out, results)
    show(results)
    if not results["finished"]:
        raise SystemExit(130)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = list(dict.fromkeys(peer.method for peer in PEERS))
    parser.add_argument("--methods", default=",".join(methods), help="names, separated by commas")
    parser.add_argument("--peers", default=",".join(PACKAGES), help="packages, separated by commas")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--passes", default=",".join(PASSES), help="forward, training or both, separated by commas")
    parser.add_argument("--rounds", type=int, default=11, help=f"rounds up to 4,096 tokens; beyond, at most {FEW_ROUNDS}")
    parser.add_argument("--limit", type=float, default=60.0, help="maximum seconds of a call")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    for name, known in (("methods", methods), ("peers", PACKAGES), ("passes", PASSES)):
        chosen = getattr(options, name).split(",")
        if unknown := [one for one in chosen if one not in known]:
            parser.error(f"--{name} must be among {', '.join(known)}; got {', '.join(unknown)}.")
        setattr(options, name, chosen)
    try:
        options.lengths = sorted(set(parse_numbers(options.lengths)))
    except ValueError:
        parser.error(f"--lengths must be whole numbers, separated by commas; got {options.lengths!r}.")
    if min(*options.lengths, options.rounds) < 1:
        parser.error("--lengths and --rounds must be at least 1.")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out must be a file in an existing directory; got {options.out}.")
    return options


def available(peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """The peers whose package is installed, and why the others are left out."""
    left_out = {}
    for package in dict.fromkeys(peer.package for peer in peers):
        if why := missing(package):
            left_out[package] = why
    return [peer for peer in peers if peer.package not in left_out], left_out


def missing(package: str) -> str:
    """Why it cannot be imported; empty if it can."""
    try:
        with quietly():
            import_module(PACKAGES[package])
    except Exception as error:  # a package that is too old for this Python or PyTorch may raise anything
        return reason(error)
    return ""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide warnings and output of old packages."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """On Linux: let a call that does not fit into memory fail, instead of ending the process."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData")) * 1024
    most = int(used + 0.8 * free_memory())
    resource.setrlimit(resource.RLIMIT_DATA, (most if before[1] < 0 else min(most, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def reason(error: BaseException) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


def measure(
    peers: Sequence[Peer], length: int, is_causal: bool, which: str, options: argparse.Namespace, before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of all peers at one length, direction and pass."""
    if not peers:
        return []
    rounds = options.rounds if length <= 4096 else min(options.rounds, FEW_ROUNDS)
    training = which == "training"
    torch.manual_seed(0)
    drawn = torch.randn(3, 1, HEADS, length, HEAD_DIM)
    inputs = {
        "heads first": [x.clone().requires_grad_(training) for x in drawn],
        "length first": [x.transpose(1, 2).contiguous().requires_grad_(training) for x in drawn],
        "tokens": [torch.randn(1, length, WIDTH, requires_grad=training)],
    }
    lines = [Line(peer) for peer in peers]
    for line in lines:
        line.failed = too_slow(
            [r for r in before if identity(r) == (line.peer.method, line.peer.name, is_causal) and r["pass"] == which],
            length,
            options.limit,
        )
    fused = partial(F.scaled_dot_product_attention, is_causal=is_causal)
    sdpa = Line(peers[0], {"sdpa": runner(fused, inputs["heads first"], [], training)})
    label = f"{length:,} tokens, {'causal, ' if is_causal else ''}{which}"
    order = random.Random(0)
    with quietly(), Progress(transient=True, console=Console(stderr=True)) as progress, torch.set_grad_enabled(training):
        task = progress.add_task(label, total=(rounds + 1) * len(lines))
        for line in lines:
            attempt(start, line, length, is_causal, training, inputs, options.limit)
            progress.advance(task)
        run(sdpa, False)
        sdpa.seconds.clear()
        for number in range(rounds):
            run(sdpa, False)
            for line in order.sample(lines, len(lines)):
                attempt(run, line, number % 2 == 1)
                progress.advance(task)
    return [row(line, length, is_causal, which, sdpa.seconds["sdpa"]) for line in lines]


def too_slow(shorter: list[dict[str, Any]], length: int, limit: float) -> str:
    """Why a peer is skipped, from its times at shorter lengths, as if they grew linearly; empty if it is not."""
    if any(TimeoutError.__name__ in r.get("failed", "") for r in shorter):
        return f"{TimeoutError.__name__}: not run, because a shorter length took more than {limit:.0f} s"
    expected = max((r.get("peer_milliseconds", 0.0) / 1e3 * length / r["length"] for r in shorter), default=0.0)
    return f"{TimeoutError.__name__}: not run, because a call would take about {expected:.0f} s" if expected > limit else ""


def attempt(do: Callable[..., None], line: Line, *arguments: object) -> None:
    """Record a failure; what failed is not run again."""
    if line.failed:
        return
    try:
        do(line, *arguments)
    except Exception as error:
        line.failed = reason(error)
        line.runs.clear()


def start(line: Line, length: int, is_causal: bool, training: bool, inputs: dict[str, list[Tensor]], limit: float) -> None:
    """Build both sides, run each once, and compare their outputs."""
    peer = line.peer
    sides = dict(zip(("ours", "peer"), peer.make(length, is_causal), strict=True))
    given = {name: inputs[takes(side)] for name, side in sides.items()}
    for name, side in sides.items():
        weights = [p for p in side.layer.parameters() if p.requires_grad] if side.layer and training else []
        line.runs[name] = runner(side.call, given[name], weights, training)
        if side.projections:
            line.runs[f"{name}_projections"] = runner(applied(side.projections), given[name], weights, training)
    run(line, False)
    slowest = max(seconds[0] for seconds in line.seconds.values())
    line.seconds.clear()
    if slowest > limit:
        raise TimeoutError(f"a call took {slowest:.0f} s")
    with torch.no_grad():
        outs = {name: side.call(*given[name]) for name, side in sides.items()}
    first, second = (outs[name].transpose(1, 2) if side.length_first else outs[name] for name, side in sides.items())
    if first.shape != second.shape or not (first.isfinite().all() and second.isfinite().all()):
        raise ValueError(f"not comparable: shapes {tuple(first.shape)} and {tuple(second.shape)}, or not finite")
    factor = float((first * second).sum() / second.square().sum())
    difference = float((first - factor * second).norm() / first.norm())
    line.found = {"relative_difference": difference, "factor": factor}
    if is_causal in peer.same and not difference <= SAME:
        raise ValueError(f"not the same function: they differ by {difference:.2e}")


def takes(side: Side) -> str:
    return "tokens" if side.layer else "length first" if side.length_first else "heads first"


def applied(projections: Sequence[nn.Module]) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [projection(x) for projection in projections]


def runner(
    call: Callable[..., Tensor | list[Tensor]], inputs: Sequence[Tensor], weights: Sequence[Tensor], training: bool
) -> Callable[[], object]:
    """The forward pass, or forward and backward with a random gradient that is drawn beforehand."""
    if not training:
        return lambda: call(*inputs)
    gradients: list[Tensor] = []

    def both() -> object:
        out = call(*inputs)
        outs = out if isinstance(out, list) else [out]
        if not gradients:  # in the first call, which is not timed
            gradients.extend(torch.randn_like(o) for o in outs)
        return torch.autograd.grad(outs, [*inputs, *weights], gradients, allow_unused=True)

    return both


def run(line: Line, backwards: bool) -> None:
    """All calls of a line once; every second round in reverse order."""
    for name in sorted(line.runs, reverse=backwards):
        begin = time.perf_counter()
        line.runs[name]()
        line.seconds.setdefault(name, []).append(time.perf_counter() - begin)


def row(line: Line, length: int, is_causal: bool, which: str, sdpa: list[float]) -> dict[str, Any]:
    peer = line.peer
    found: dict[str, Any] = {"length": length, "method": peer.method, "peer": peer.name, "is_causal": is_causal, "pass": which}
    if line.failed:
        return {**found, "failed": line.failed}
    s = line.seconds
    found |= {"rounds": len(s["ours"]), "same_function": is_causal in peer.same, **line.found}
    found |= {f"{who}_milliseconds": milliseconds(taken) for who, taken in s.items()}
    found |= {"sdpa_milliseconds": milliseconds(sdpa), **ratio("times_peer", s["peer"], s["ours"])}
    if "ours_projections" in s:
        net = {who: [a - b for a, b in zip(s[who], s[f"{who}_projections"], strict=True)] for who in ("ours", "peer")}
        found |= ratio("times_peer_without_projections", net["peer"], net["ours"])
        return {**found, **ratio("times_sdpa_without_projections", sdpa, net["ours"])}
    return {**found, **ratio("times_sdpa", sdpa, s["ours"])}


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def ratio(name: str, theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Ratios by round. If projections take nearly all the time, a difference may be below 0; then there is no ratio."""
    ratios = [t / o for t, o in zip(theirs, ours, strict=True) if t > 0 and o > 0]
    if len(ratios) <= len(ours) // 2:
        return {name: None, f"{name}_80_percent": None}
    return {
        name: round(statistics.median(ratios), 3),
        f"{name}_80_percent": [round(edge, 3) for edge in middle_80_percent(ratios)],
    }


# Reports.


def goal(row: dict[str, Any]) -> float:
    """How many times faster ours should be."""
    if row["length"] < 4096:
        return 1.0
    return {"linear": 3.0, "performer": 10.0}.get(row["method"], 2.0) if row["is_causal"] else 2.0


def reached(row: dict[str, Any]) -> float | None:
    """The speedup, without projections if there are any."""
    return row.get("times_peer_without_projections", row.get("times_peer"))


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def show(results: dict[str, Any]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(results["machine"])
    for package, why in results["left_out"].items():
        console.print(f"Left out: {package}. {why}", markup=False)
    title = f"B=1, H={HEADS}, D={HEAD_DIM}, float32; times faster than the peer, in brackets without projections"
    headings = "tokens", "pass", "causal", "method", "peer", "ours ms", "peer ms", "times", "80% of rounds", "goal"
    table = new_table(title, *headings)
    for r in results["time"]:
        cells = f"{r['length']:,}", r["pass"], "yes" if r["is_causal"] else "no", r["method"], r["peer"]
        if "failed" in r:
            table.add_row(*cells, "-", "-", "-", r["failed"], "")
            continue
        low, high = r["times_peer_80_percent"]
        value = reached(r)
        mark = "" if value is None or value >= goal(r) else f"below {goal(r):.0f}"
        speed = f"{r['ours_milliseconds']:.2f}", f"{r['peer_milliseconds']:.2f}"
        table.add_row(*cells, *speed, cell(r), f"{low:.2f} - {high:.2f}", mark)
    console.print(table)


def cell(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "-"
    net = f" ({figure(row['times_peer_without_projections'])})" if "times_peer_without_projections" in row else ""
    return figure(row["times_peer"]) + net


def section(results: dict[str, Any]) -> str:
    """For docs/performance.md."""
    by = {(*identity(r), r["pass"], r["length"]): r for r in results["time"]}
    columns = sorted({(r["pass"], r["length"]) for r in results["time"]})
    order = [(p["method"], p["peer"], is_causal) for p in results["peers"] for is_causal in (False, True)]
    rows = [
        [f"`{method}`", name, "yes" if is_causal else "no"]
        + [cell(by.get((method, name, is_causal, *column))) for column in columns]
        for method, name, is_causal in sorted({identity(r) for r in results["time"]}, key=order.index)
    ]
    heads = [f"{which} {n:,}" for which, n in columns]
    lines = [describe_setup(results), "", *markdown(["method", "against", "causal", *heads], rows)]
    lines += ["", "Settings, ours / theirs:", ""]
    for p in results["peers"]:
        note = f" {p['note'][0].upper()}{p['note'][1:]}." if p["note"] else ""
        lines.append(f"- `{p['method']}`, {p['peer']}: {p['ours']} / {p['theirs']}.{note}")
    failed = [f"- {_row_name(r)}: {r['failed']}" for r in results["time"] if "failed" in r]
    lines += ["", "These did not run:", "", *failed] if failed else []
    left = [f"- {package}: {why}" for package, why in results["left_out"].items()]
    lines += ["", "Left out, because they could not be imported:", "", *left] if left else []
    alone = ", ".join(f"`{method}`" for method in results["without_a_peer"])
    lines += ["", f"These packages have no implementation of {alone}."]
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    return "\n".join([*lines, "", f"Versions: {versions}. Command: `{results['command']}`."])


def identity(row: dict[str, Any]) -> tuple[str, str, bool]:
    return row["method"], row["peer"], row["is_causal"]


def _row_name(row: dict[str, Any]) -> str:
    return f"`{row['method']}`, {row['peer']}, {'causal, ' if row['is_causal'] else ''}{row['pass']} at {row['length']:,}"


if __name__ == "__main__":
    main()
