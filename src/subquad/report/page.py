"""The page of a comparison: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from subquad.bench import analysis
from subquad.bench.results import BASELINE, Results
from subquad.errors import SubquadError, load_extra
from subquad.registry import resolve
from subquad.report import figures, tables
from subquad.report.attention_map import attention_map
from subquad.report.charts import charts, write_report
from subquad.report.pictures import small_pictures
from subquad.report.styles import MethodStyle, method_styles, record, theme

_CELLS = 128  # pixels on each side of a picture, before it is enlarged
_LENGTH = 1024  # tokens, for options that depend on the length


@dataclass(frozen=True)
class _Picture:
    method: str
    title: str
    panels: list[tuple[str, str]]  # label, data URL
    caption: list[str]


def write_page(results: Results, path: Path) -> None:
    """Write `results` to `path` atomically, as one HTML file that works offline."""
    load_extra("report", "the HTML report", "jinja2", "altair", "vl_convert")
    write_html(path, "page.html.jinja", _contents(results))


def write_html(path: Path, name: str, content: dict[str, Any]) -> None:
    """Fill the template `name` in this folder. All text is escaped, and what UTF-8 cannot hold is replaced."""
    jinja2, _, _ = load_extra("report", "the HTML report", "jinja2", "altair", "vl_convert")
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    write_report(path, pages.get_template(name).render(content).encode(errors="replace"))


def _contents(results: Results) -> dict[str, Any]:
    drawn = method_styles(figures.shown_methods(results))
    found = charts(results)
    return {
        "headline": analysis.headline(results),
        "results": results,
        "charts": {chart.name: chart for chart in found},
        "specs": {chart.name: chart.spec for chart in found},
        "themes": {"light": theme(drawn, "light"), "dark": theme(drawn, "dark")},
        "legend": [("reference", drawn[:1]), *legend(drawn[1:])],
        "pass_names": figures.PASS_NAMES,
        "crossovers": tables.crossovers(results),
        "growth": tables.growth(results),
        "capabilities": tables.capabilities(results),
        "not_run": tables.not_run(results),
        "predictions": tables.predictions(results),
        "all_figures": tables.all_figures(results),
        "machine": tables.machine(results),
        "pictures": list(_pictures(results)),
        "library": library(),
    }


def legend(drawn: list[MethodStyle]) -> list[tuple[str, list[MethodStyle]]]:
    """The methods by family."""
    groups = groupby(drawn, key=lambda style: style.family)
    return [(family.replace("_", "-") or "other", list(group)) for family, group in groups]


def _pictures(results: Results) -> Iterable[_Picture]:
    """A picture of every registered method, causal or not as it was compared; if heads differ, of the first one."""
    for method in results.methods:
        if method == BASELINE or record(method) is None:
            continue
        try:
            shown = attention_map(resolve(method).for_length(_LENGTH), is_causal=results.setting.is_causal)
        except SubquadError:  # its options may have changed since; leave the picture out
            continue
        panels, caption = small_pictures(shown, _CELLS)
        kept = panels[:1] if shown.exact is None else [panels[0], panels[-1]]
        if len(shown.groups) > 1:
            caption.append("Heads differ; the first is shown.")
        urls = [(label, "data:image/png;base64," + base64.b64encode(data).decode()) for label, data in kept]
        yield _Picture(method, shown.title, urls, caption)


def library() -> str:
    """Vega, Vega-Lite and vega-embed as one script, escaped for HTML."""
    (convert,) = load_extra("report", "the HTML report", "vl_convert")
    return str(convert.javascript_bundle()).replace("</script", "<\\/script").replace("<!--", "<\\!--")
