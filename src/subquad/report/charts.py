"""Charts, from one description for pages and for files.

A chart is a Vega-Lite or Vega specification. A page controls it through signals: `hidden` lists the methods that are not drawn,
and `kind` selects the pass or the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subquad.bench.results import BASELINE, Results
from subquad.errors import InputError, load_extra
from subquad.report import figures
from subquad.report.labels import label_positions, on_log_axis
from subquad.report.styles import MethodStyle, method_styles, theme
from subquad.runs.files import write_atomically

Spec = dict[str, Any]
FORMATS = ("png", "svg")
_WIDTH, _HEIGHT = 760, 420
_ROW_HEIGHT = 26  # pixels, of a heat map
_TOKENS = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : format(datum.value, ',')"
_IS_DRAWN = "indexof(hidden, datum.method) < 0"
_DIGIT = "round(datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9)))"
_TIME = "datum.value >= 1000 ? format(datum.value / 1000, '~r') + ' s' : format(datum.value, '~r') + ' ms'"
_PLAIN = "format(datum.value, '~g')"
_MEMORY = "datum.value >= 1024 ? format(datum.value / 1024, '~r') + ' GiB' : format(datum.value, '~r') + ' MiB'"
_PADDING_X, _PADDING_Y = 30, 24  # pixels around points with labels
_ANCHORS = [("right", 7), ("top", 6), ("bottom", 6), ("left", 7), ("top-right", 5), ("bottom-right", 5), ("top-left", 5)]


@dataclass(frozen=True)
class Chart:
    """One chart, and the values of its `kind` signal."""

    name: str
    spec: Spec
    kinds: tuple[str, ...] = ()


def charts(results: Results, *, in_page: bool = True) -> list[Chart]:
    """The charts with data to show. In a page they take its width, and the page has the legend."""
    drawn = method_styles(figures.shown_methods(results))
    found = []
    passes = tuple(figures.measured_passes(results))
    if passes:
        found.append(Chart("time", _lines(figures.time_rows(results), drawn, passes, in_page, "time", _TIME, 10), passes))
    if rows := figures.memory_rows(results):
        found.append(Chart("memory", _lines(rows, drawn, (), in_page, "peak memory", _MEMORY, 2)))
    if rows := figures.fidelity_rows(results):
        kinds = tuple(dict.fromkeys(row["kind"] for row in rows))
        found.append(Chart("fidelity", _fidelity(rows, drawn, kinds, in_page), kinds))
    return found


def save_charts(results: Results, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write every chart as `time_forward.png` and so on, one file per kind and format; return the paths."""
    (convert,) = load_extra("report", "a chart in a file", "vl_convert")
    for ending in formats:
        if ending not in FORMATS:
            raise InputError(f"the format of a chart must be {' or '.join(FORMATS)}; got {ending!r}.")
    config = theme(method_styles(figures.shown_methods(results)), "light")
    paths = []
    for chart in charts(results, in_page=False):
        for kind in chart.kinds or ("",):
            spec = {**chart.spec, **_choosing(chart.spec, kind), "config": config, "background": "white"}
            svg = convert.vega_to_svg(spec) if "marks" in spec else convert.vegalite_to_svg(spec)
            for ending in formats:
                path = folder / f"{chart.name}{f'_{_word(kind)}' if kind else ''}.{ending}"
                write_report(path, svg.encode() if ending == "svg" else convert.svg_to_png(svg, scale=2))
                paths.append(path)
    return paths


def write_report(path: Path, content: bytes) -> None:
    """Write a file atomically; its folder is made if need be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise InputError(
            f"a report must be written to a writable directory; got {str(path)!r}: {error.strerror or error}. Choose another."
        ) from error


def _word(kind: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in kind)


def _choosing(spec: Spec, kind: str) -> Spec:
    """The part of `spec` that sets its signal `kind`."""
    where = "signals" if "marks" in spec else "params"
    return {where: [{**p, "value": kind} if p["name"] == "kind" else p for p in spec.get(where, [])]}


def _lines(
    rows: figures.Rows, drawn: list[MethodStyle], kinds: Sequence[str], in_page: bool, title: str, label: str, base: int
) -> Spec:
    """Value against length on logarithmic axes; predictions have dashed lines and hollow points."""
    (alt,) = load_extra("report", "a chart", "altair")
    colour, shape = _scales(alt, drawn, in_page)
    lengths = sorted({row["length"] for row in rows})
    width = alt.condition(f"datum.method === '{BASELINE}'", alt.value(4), alt.value(1.6))
    tips = [
        ("method", "method"),
        ("tokens", "tokens"),
        ("amount", title),
        ("against", "against SDPA (95%)"),
        ("status", "status"),
    ]
    ends = [lengths[0], lengths[-1]] if len(lengths) > 1 else [lengths[0] / 2, lengths[0] * 2]
    along = alt.Scale(type="log", base=2, nice=False, padding=12, domain=ends)
    axis = alt.Axis(labelExpr=_TOKENS, values=lengths, labelOverlap=True, grid=False)
    shared = (
        alt.Chart(alt.NamedData(name="rows"))
        .transform_filter(_drawn(kinds))
        .encode(
            x=alt.X("length:Q", scale=along, axis=axis, title="tokens"),
            y=alt.Y(
                "value:Q",
                scale=alt.Scale(type="log", base=base, nice=False, padding=22),
                axis=_axis(alt, label, (1, 3)) if base == 10 else alt.Axis(labelExpr=label, tickCount=6),
                title=title,
            ),
            color=colour,
            detail="method:N",
        )
    )
    measured, predicted, joining = "!datum.is_predicted", "datum.is_predicted", "datum.joins"
    at_end = {"align": "right", "dx": -9, "dy": -9, "fontWeight": "bold", "fontSize": 13}
    last = f"datum.method === '{BASELINE}' && datum.length === {lengths[-1]}"
    words = [shared.transform_filter(last).mark_text(style=style, **at_end) for style in ("halo", "text")]
    tooltip = [alt.Tooltip(field, type="nominal", title=heading) for field, heading in tips]
    layers = [
        shared.transform_filter(measured).mark_line(aria=False).encode(strokeWidth=width),
        shared.transform_filter(measured).mark_point(filled=True, size=55, opacity=1, aria=False).encode(shape=shape),
        *(word.encode(text=alt.value("SDPA")) for word in words),
        shared.mark_point(filled=True, shape="circle", size=260, opacity=0).encode(tooltip=tooltip),  # easy to point at
    ]
    if any(row["is_predicted"] for row in rows):
        layers.insert(1, shared.transform_filter(joining).mark_line(strokeDash=[5, 4], aria=False).encode(strokeWidth=width))
        layers.insert(3, shared.transform_filter(predicted).mark_point(size=55, opacity=1, aria=False).encode(shape=shape))
    chart = _with_signals(alt, alt.layer(*layers), kinds)
    return _sized(chart, in_page, rows)


def curves(rows: figures.Rows, drawn: list[MethodStyle], kinds: Sequence[str], in_page: bool) -> Spec:
    """Value by step on linear axes, one line per method."""
    (alt,) = load_extra("report", "a chart", "altair")
    colour, shape = _scales(alt, drawn, in_page)
    tooltip = [
        alt.Tooltip(field, type="nominal", title=title)
        for field, title in (("method",) * 2, ("step",) * 2, ("amount", "value"))
    ]
    shared = (
        alt.Chart(alt.NamedData(name="rows"))
        .transform_filter(_drawn(kinds))
        .encode(
            x=alt.X("step:Q", title="step", scale=alt.Scale(zero=True, nice=False), axis=alt.Axis(grid=False, tickMinStep=1)),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            color=colour,
            detail="method:N",
        )
    )
    layers = [
        shared.mark_line(aria=False, strokeWidth=1.6),
        shared.transform_filter("datum.is_marked").mark_point(filled=True, size=45, opacity=1, aria=False).encode(shape=shape),
        shared.mark_point(filled=True, shape="circle", size=260, opacity=0).encode(tooltip=tooltip),  # easy to point at
    ]
    return _sized(_with_signals(alt, alt.layer(*layers), kinds), in_page, rows)


def heat_map(rows: figures.Rows, layers: Sequence[str], title: str, highest: float, in_page: bool) -> Spec:
    """One square per layer and head, coloured from 0 to `highest`; `layers` are the rows."""
    (alt,) = load_extra("report", "a chart", "altair")
    tips = {"layer": "layer", "head": "head", "amount": title}
    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_rect()
        .encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, labelOverlap=True, domain=False, ticks=False)),
            y=alt.Y(
                "layer:N",
                title="layer",
                sort=None,
                scale=alt.Scale(domain=list(layers)),
                axis=alt.Axis(labelLimit=110, domain=False, ticks=False),
            ),
            color=alt.Color(
                "value:Q",
                scale=alt.Scale(domain=[0, highest or 1], interpolate="rgb"),
                legend=alt.Legend(title=None, orient="bottom", gradientLength=200, tickCount=4),
            ),
            tooltip=[alt.Tooltip(field, type="nominal", title=words) for field, words in tips.items()],
        )
    )
    return _sized(_with_signals(alt, chart, ()), in_page, rows, max(90, _ROW_HEIGHT * len(layers)))


def _fidelity(rows: figures.Rows, drawn: list[MethodStyle], kinds: Sequence[str], in_page: bool) -> Spec:
    """Labelled points. Vega-Lite cannot avoid overlapping labels, so this is compiled to Vega, and the labels are added."""
    alt, convert = load_extra("report", "a chart", "altair", "vl_convert")
    colour, shape = _scales(alt, drawn, True)
    rows = rows if in_page else _with_label_positions(rows, kinds)
    tips = {"method": "method", "tokens": "tokens", "relative": "relative error", "against": "times faster than SDPA (95%)"}
    across, up = (alt.Scale(type="log", nice=False, padding=padding) for padding in (_PADDING_X, _PADDING_Y))
    errors, gains = ([row[name] for row in rows] for name in ("error", "gain"))
    points = (
        alt.Chart(alt.NamedData(name="rows"), name="points")
        .transform_filter(_drawn(kinds))
        .mark_point(filled=True, size=110, opacity=1)
        .encode(
            x=alt.X("error:Q", scale=across, title="relative error", axis=_axis(alt, _PLAIN, _digits(errors))),
            y=alt.Y("gain:Q", scale=up, title="times faster than SDPA", axis=_axis(alt, _PLAIN, _digits([1, *gains]))),
            color=colour,
            shape=shape,
            tooltip=[alt.Tooltip(field, type="nominal", title=title) for field, title in tips.items()],
        )
    )
    even = alt.Chart(alt.NamedData(name="even")).mark_rule(style="even", strokeDash=[2, 3], strokeWidth=1.5).encode(y="gain:Q")
    chart = _with_signals(alt, alt.layer(even, points), kinds)
    spec: Spec = convert.vegalite_to_vega({**_sized(chart, in_page, rows), "datasets": {"rows": rows, "even": [{"gain": 1}]}})
    for part, baked in ((spec, "config"), (spec, "background"), (_mark(spec, "rule")["encode"]["update"], "stroke")):
        part.pop(baked, None)  # set by the theme
    spec["marks"].append(_labels_by_vega() if in_page else _labels_by_rows())
    return spec


def _mark(spec: Spec, kind: str) -> Spec:
    return next(mark for mark in spec["marks"] if mark["type"] == kind)


def _labels_by_vega() -> Spec:
    """Labels that a browser places without overlap at any size."""
    options = {
        "size": {"signal": "[width, height]"},
        "anchor": [anchor for anchor, _ in _ANCHORS],
        "offset": [offset for _, offset in _ANCHORS],
        "avoidMarks": ["points_marks"],
    }
    return {**_labels({}), "transform": [{"type": "label", **options}]}


def _labels_by_rows() -> Spec:
    place = {
        "x": {"field": "x", "offset": {"field": "datum.dx"}},
        "y": {"field": "y", "offset": {"field": "datum.dy"}},
        "align": {"field": "datum.align"},
        "baseline": {"value": "middle"},
        "opacity": {"signal": "datum.datum.align ? 1 : 0"},
    }
    return _labels(place)


def _labels(place: Spec) -> Spec:
    encode = {"text": {"field": "datum.label"}, "fill": {"field": "fill"}, "fontSize": {"value": 12}, **place}
    return {"type": "text", "name": "labels", "from": {"data": "points_marks"}, "encode": {"enter": encode}}


def _with_label_positions(rows: figures.Rows, kinds: Sequence[str]) -> figures.Rows:
    """The rows, each with the position of its label in a chart that is written to a file."""
    found = []
    for kind in kinds:
        mine = [row for row in rows if row["kind"] == kind]
        x = on_log_axis([row["error"] for row in mine], _WIDTH, _PADDING_X)
        y = [_HEIGHT - up for up in on_log_axis([row["gain"] for row in mine], _HEIGHT, _PADDING_Y, 1.0)]
        places = label_positions([(*point, row["label"]) for *point, row in zip(x, y, mine, strict=True)], _WIDTH, _HEIGHT)
        found += [{**row, **asdict(place)} for row, place in zip(mine, places, strict=True)]
    return found


def _scales(alt: Any, drawn: list[MethodStyle], in_page: bool) -> tuple[Any, Any]:
    """Colour and shape by method, from the ranges of the theme, in the order of `drawn`."""
    domain = [style.method for style in drawn]
    legend = None if in_page else alt.Legend(title=None, symbolOpacity=1, symbolStrokeWidth=2)
    colour = alt.Color("method:N", scale=alt.Scale(domain=domain, range="category"), legend=legend)
    return colour, alt.Shape("method:N", scale=alt.Scale(domain=domain, range="symbol"), legend=legend)


def _axis(alt: Any, label: str, digits: Sequence[int]) -> Any:
    """A logarithmic axis with ticks at numbers that begin with `digits`."""
    is_round = f"indexof([{', '.join(map(str, digits))}], {_DIGIT}) >= 0"
    seen = alt.condition(is_round, alt.value(1), alt.value(0))
    return alt.Axis(labelExpr=f"{is_round} ? {label} : ''", gridOpacity=seen, tickOpacity=seen, labelOverlap=True)


def _digits(values: Sequence[float]) -> Sequence[int]:
    """First digits of the ticks: 1, 2 and 5, or all if the values are so close that none of those may lie between them."""
    return (1, 2, 5) if max(values) >= 5 * min(values) else range(1, 10)


def _drawn(kinds: Sequence[str]) -> str:
    return _IS_DRAWN + (" && datum.kind === kind" if kinds else "")


def _with_signals(alt: Any, chart: Any, kinds: Sequence[str]) -> Any:
    params = [alt.param(name="hidden", value=[]), *([alt.param(name="kind", value=kinds[0])] if kinds else [])]
    return chart.add_params(*params)


def _sized(chart: Any, in_page: bool, rows: figures.Rows, height: int = _HEIGHT) -> Spec:
    """With all rows that can be drawn: JSON, by which a browser gets them, has no NaN and no infinity."""
    chart = chart.properties(width="container" if in_page else _WIDTH, height=height)
    drawn = [row for row in rows if all(math.isfinite(value) for value in row.values() if isinstance(value, float))]
    return {**chart.to_dict(), "datasets": {"rows": drawn}}
