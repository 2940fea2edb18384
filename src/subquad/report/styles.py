"""The colour and marker of each method, the same in every chart: a hue for its family, a shade and a shape within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from subquad.bench.results import BASELINE
from subquad.errors import UnknownMethodError
from subquad.families.base import Info
from subquad.registry import info, methods

Mode = Literal["light", "dark"]

# Hues that colour-blind people can tell apart, too; all have a contrast of at least 3:1 to the page.
_SHADES: dict[str, dict[Mode, tuple[str, str, str]]] = {
    "kernelized": {"light": ("#0072b2", "#0a3d6b", "#3e8fc4"), "dark": ("#56b4e9", "#a9dbf7", "#2e8bc9")},
    "sparse": {"light": ("#c24e00", "#7a2e00", "#d2701a"), "dark": ("#f0954a", "#fbcb9c", "#d66f1e")},
    "bucketed": {"light": ("#00795a", "#00402f", "#2c9776"), "dark": ("#2fc79b", "#97e8cf", "#1c9c78")},
    "low_rank": {"light": ("#9e3c7c", "#5a1a4b", "#c0649f"), "dark": ("#e28dc0", "#f6c9e4", "#c2609c")},
    "hybrid": {"light": ("#6a4fc4", "#3c2a80", "#8a74d6"), "dark": ("#a993f5", "#d5c9fb", "#8570de")},
    "": {"light": ("#6b6b6b", "#8a7400", "#4d4d4d"), "dark": ("#b0b0b0", "#d6c34a", "#dddddd")},
}
_BASELINE: dict[Mode, str] = {"light": "#111111", "dark": "#ffffff"}
_INKS: dict[Mode, tuple[str, str, str]] = {  # page, text, grid
    "light": ("#ffffff", "#1f2328", "#d8dee4"),
    "dark": ("#0d1117", "#e6edf3", "#30363d"),
}
_HEAT: dict[Mode, list[str]] = {  # from 0, close to the colour of the page, to the highest value
    "light": ["#eef2f6", "#f3b885", "#c24e00", "#4f1c00"],
    "dark": ["#1c2330", "#7a3a10", "#f0954a", "#fff0dd"],
}
_FONT = "system-ui, sans-serif"
# Vega's names of the markers, and each marker as an SVG path around the origin.
SHAPES = {
    "circle": "M4,0A4,4,0,1,1,-4,0A4,4,0,1,1,4,0Z",
    "square": "M-3.6,-3.6H3.6V3.6H-3.6Z",
    "triangle-up": "M0,-4.2L4.4,3.6H-4.4Z",
    "diamond": "M0,-5L4.4,0L0,5L-4.4,0Z",
    "cross": "M-4.5,-1.6H-1.6V-4.5H1.6V-1.6H4.5V1.6H1.6V4.5H-1.6V1.6H-4.5Z",
    "triangle-down": "M0,4.2L4.4,-3.6H-4.4Z",
    "triangle-left": "M-4.2,0L3.6,-4.4V4.4Z",
    "triangle-right": "M4.2,0L-3.6,-4.4V4.4Z",
}


@dataclass(frozen=True)
class MethodStyle:
    """How one method is drawn."""

    method: str
    family: str
    light: str
    dark: str
    shape: str

    @property
    def path(self) -> str:
        return SHAPES[self.shape]

    @property
    def label(self) -> str:
        return "SDPA" if self.is_baseline else self.method

    @property
    def is_baseline(self) -> bool:
        return self.method == BASELINE


def record(method: str) -> Info | None:
    """The record of a method; None for the baseline, and for a method that is not registered."""
    try:
        return info(method)
    except UnknownMethodError:
        return None


def family_of(method: str) -> str:
    facts = record(method)
    return "" if facts is None else facts.family


def method_styles(names: Sequence[str]) -> list[MethodStyle]:
    """The baseline, then `names` by family. A method has the same style whatever else is compared."""
    known = [*methods(), *(name for name in names if record(name) is None and name != BASELINE)]
    places: dict[str, int] = {}
    found = {}
    for name in known:
        family = family_of(name)
        place = places[family] = places.get(family, -1) + 1
        shades, shape = _SHADES.get(family, _SHADES[""]), list(SHAPES)[place % len(SHAPES)]
        found[name] = MethodStyle(name, family, shades["light"][place % 3], shades["dark"][place % 3], shape)
    order = {family: i for i, family in enumerate([*_SHADES, "exact"])}
    drawn = sorted(
        (found[name] for name in dict.fromkeys(names) if name in found), key=lambda x: order.get(x.family, len(order))
    )
    return [MethodStyle(BASELINE, "", _BASELINE["light"], _BASELINE["dark"], "circle"), *drawn]


def theme(drawn: Sequence[MethodStyle], mode: Mode) -> dict[str, Any]:
    """The Vega configuration for charts on a light or dark page."""
    page, ink, grid = _INKS[mode]
    fonts = {"labelFont": _FONT, "titleFont": _FONT, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    text = {**fonts, "labelColor": ink, "titleColor": ink}
    return {
        "background": "transparent",
        "range": {
            "category": [getattr(style, mode) for style in drawn],
            "symbol": [style.shape for style in drawn],
            "heatmap": _HEAT[mode],
        },
        "axis": {**text, "gridColor": grid, "domainColor": ink, "tickColor": ink},
        "legend": {**text, "symbolSize": 80},
        "title": {"color": ink},
        "text": {"font": _FONT},
        "style": {
            "halo": {"stroke": page, "strokeWidth": 5, "strokeJoin": "round"},
            "even": {"stroke": ink},
            "cell": {"stroke": grid},
        },
        "view": {"stroke": grid},
    }
