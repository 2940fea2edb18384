"""The page and the tables of a conversion: what the swap broke, head by head, and what the repair recovered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.conversion.diagnosis import Diagnosis
from subquad.conversion.results import KEEP, Results
from subquad.errors import InputError
from subquad.report import figures
from subquad.report.charts import Chart, curves, heat_map
from subquad.report.page import library, write_html
from subquad.report.styles import method_styles, theme
from subquad.report.tables import Cell, Table

_NONE = Cell("-", None, "none")
_MAX_HEADS = 100  # in the table of the page
_MEASURES = {"error": "relative error", "kl": "KL divergence"}  # fields of a Head


def headline(results: Results) -> str:
    """The conversion in a sentence or two."""
    sites = list(results.conversion["sites"].values())
    count = sum(site["name"] == results.method for site in sites)
    what = f"{results.architecture} with {results.method} in {count} of its {len(sites)} attention modules."
    naive, last = results.diagnoses.get(KEEP, results.naive), results.last
    if naive is None or last is None:
        return f"{what} Nothing was measured, because there was no text."
    if naive.perplexity_before is not None and naive.perplexity_after is not None:
        figure, before = "perplexity", figures.digits(naive.perplexity_before)
        swapped, repaired = (figures.digits(d.perplexity_after or math.nan) for d in (naive, last))
        change = f"The swap takes its perplexity from {before} to {swapped}"
    else:
        figure, swapped, repaired = "cosine", f"{naive.cosine:.3f}", f"{last.cosine:.3f}"
        change = f"The swap leaves its last hidden states at a cosine of {swapped} to the original's"
    if last is naive:
        return f"{what} {change}."
    learnt = ", lower than the original's, because it has also learned the text" if _has_learnt_text(results) else ""
    return f"{what} {change}; after {_words(list(results.diagnoses)[-1])} the {figure} is {repaired}{learnt}."


def summary(results: Results) -> Table:
    """The original, the swap, and each step of the repair."""
    caption = "Loss, perplexity and cosine to the original: before the swap, after it, and after each step of the repair."
    table = Table("summary", caption, ["model", "loss", "perplexity", "cosine", "mean error", "steps", "time"])
    for part, loss, cosine in results.losses():
        found, stage = results.diagnoses.get(part), results.stages.get(part)
        errors = [] if found is None else [head.error for head in found.heads]
        error = sum(errors) / len(errors) if errors else None
        table.rows.append(
            [
                Cell(_row_name(results, part), part),
                _NONE if loss is None else Cell(f"{loss:.4f}", loss),
                _NONE if loss is None else Cell(figures.digits(math.exp(min(loss, 700))), loss),
                Cell(f"{cosine:.4f}", cosine),
                _NONE if error is None else Cell(f"{error:.4f}", error),
                _NONE if stage is None else Cell(f"{stage.step:,}", float(stage.step)),
                _NONE if stage is None else Cell(f"{stage.seconds / 60:.1f} min", stage.seconds),
            ]
        )
    return table


def heads(results: Results, count: int = _MAX_HEADS) -> Table:
    """The `count` heads that are damaged most after the last step."""
    first, last = results.naive, results.last
    assert first is not None
    assert last is not None
    is_repaired = last is not first
    headings = ["head", *(f"{name}, swap" for name in _MEASURES.values())]
    headings += [f"{name}, now" for name in _MEASURES.values()] if is_repaired else []
    table = Table(
        "heads", "The heads with the most damage: relative error of the output, KL divergence of the weights.", headings
    )
    before = {(head.site, head.head): head for head in first.heads}
    names = _site_names(first)
    for now in last.ranked()[:count]:
        shown = [before[now.site, now.head], *([now] if is_repaired else [])]
        values = [getattr(head, field) for head in shown for field in _MEASURES]
        name = f"layer {names[now.site]}, head {now.head}"
        cells = [_NONE if value is None else Cell(f"{value:.4f}", float(value)) for value in values]
        table.rows.append([Cell(name, name), *cells])
    return table


def trail(results: Results) -> Table:
    """The layers that the keep search chose, in order, with the second best choice."""
    headings = ["kept", "layer", "loss", "loss before", "second best", "its loss"]
    table = Table("trail", "Layers that stay softmax, in the order of the search.", headings)
    kept = results.kept
    for i, layer in enumerate(() if kept is None else kept.layers):
        assert kept is not None
        others = sorted((loss, other) for at, other, loss in kept.tried if at == i and other != layer)
        second = (
            [Cell(str(others[0][1]), float(others[0][1])), Cell(f"{others[0][0]:.4f}", others[0][0])] if others else [_NONE] * 2
        )
        losses = [Cell(f"{loss:.4f}", loss) for loss in (kept.losses[i + 1], kept.losses[i])]
        table.rows.append([Cell(str(i + 1), str(i + 1)), Cell(str(layer), float(layer)), *losses, *second])
    return table


def conversion_charts(results: Results, *, in_page: bool = True) -> list[Chart]:
    """Heat maps of each measure after the swap and now, on the same scale, and the curves of the repair."""
    naive, last = results.naive, results.last
    if naive is None or last is None:
        return []
    found = []
    shown = {"swap": naive} | ({} if last is naive else {"now": last})
    for field, title in _MEASURES.items():
        rows = {when: _squares(diagnosis, naive, field) for when, diagnosis in shown.items()}
        highest = max((row["value"] for squares in rows.values() for row in squares), default=None)
        layers = list(_site_names(naive).values())
        if highest is not None:
            found += [
                Chart(f"{field}-{when}", heat_map(squares, layers, title, highest, in_page)) for when, squares in rows.items()
            ]
    lines = [row for name, stage in results.stages.items() for row in _curve(results.method, name, stage.losses)]
    if lines:
        kinds = tuple(dict.fromkeys(row["kind"] for row in lines))
        found.append(Chart("repair", curves(lines, method_styles([results.method])[1:], kinds, in_page), kinds))
    return found


def write_conversion_page(results: Results, path: Path) -> None:
    """Write `results` to `path` atomically, as one HTML file that works offline."""
    if results.last is None:
        raise InputError("the page of a conversion shows measurements; got results without any. Convert with calibration text.")
    drawn = method_styles([results.method])[1:]
    found = conversion_charts(results)
    content = {
        "results": results,
        "headline": headline(results),
        "summary": summary(results),
        "heads": heads(results),
        "trail": trail(results),
        "last": _words(list(results.diagnoses)[-1]),
        "count": len(results.last.heads),
        "tokens": results.calibration.get("judged_by", 0),
        "measures": _MEASURES,
        "charts": {chart.name: chart for chart in found},
        "specs": {chart.name: chart.spec for chart in found},
        "themes": {"light": theme(drawn, "light"), "dark": theme(drawn, "dark")},
        "facts": _facts(results),
        "library": library(),
    }
    write_html(path, "conversion.html.jinja", content)


def _facts(results: Results) -> list[tuple[str, str]]:
    text = results.calibration
    about = {
        "model": results.model,
        "class": results.architecture,
        "method": results.method,
        **results.options,
        "kept softmax": ", ".join(map(str, results.kept.layers)) if results.kept is not None else None,
        "text": ", ".join(text.get("files", ())),
        "evaluation tokens": f"{text.get('judged_by', 0):,}",
        "training tokens": f"{text.get('learnt_from', 0):,}",
    }
    settings = {name: value for name, value in results.settings.items() if name not in ("model", "text")}
    stages = {f"{name} learning rate": f"{stage.lr:g}" for name, stage in results.stages.items()}
    stages |= {f"{name} ended": stage.ended for name, stage in results.stages.items()}
    facts = {**about, **settings, **stages, **results.machine, "command": results.command}
    return [(name.replace("_", " "), _text(value)) for name, value in facts.items() if value not in (None, "", [])]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _has_learnt_text(results: Results) -> bool:
    """Whether the loss is below the original's, which says nothing about fidelity to it."""
    after = results.diagnoses.get("lora")
    if results.settings.get("loss") != "language" or after is None or after.loss_after is None or after.loss_before is None:
        return False
    return after.loss_after < after.loss_before


def _words(part: str) -> str:
    parts = {KEEP: "the keep search", "transfer": "attention transfer", "align": "alignment", "lora": "low-rank finetuning"}
    return parts.get(part, f"the {part}")


def _row_name(results: Results, part: str) -> str:
    if part == KEEP and results.kept is not None:
        kept = results.kept.layers
        return f"layer{'s' if len(kept) > 1 else ''} {', '.join(map(str, kept))} kept"
    return f"after {part}" if part in results.stages else part


def _squares(diagnosis: Diagnosis, naive: Diagnosis, field: str) -> figures.Rows:
    names = _site_names(naive)
    return [
        {"method": "", "layer": names[head.site], "head": head.head, "value": value, "amount": f"{value:.4f}"}
        for head in diagnosis.heads
        if (value := getattr(head, field)) is not None
    ]


def _site_names(diagnosis: Diagnosis) -> dict[str, str]:
    """The layer number of each site, or its full name if several sites share a number."""
    layers = {head.site: head.layer for head in diagnosis.heads}
    is_unique = len(set(layers.values())) == len(layers)
    return {site: str(layer) if is_unique else site for site, layer in layers.items()}


def _curve(method: str, stage: str, points: Sequence[tuple[int, float]]) -> figures.Rows:
    return [
        {"method": method, "kind": stage, "step": step, "value": loss, "amount": f"{loss:.4g}", "is_marked": True}
        for step, loss in points
    ]
