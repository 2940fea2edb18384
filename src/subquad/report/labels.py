"""Positions of point labels in charts that no browser lays out: beside their point, without overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LETTER, _LINE, _RADIUS = 6.8, 12.0, 6.0  # pixels, of text at 12


@dataclass(frozen=True)
class LabelPosition:
    """The offset from a point to its label; `align` is the side of the label that is anchored, empty if there is no room."""

    align: str
    dx: float = 0.0
    dy: float = 0.0


_POSITIONS = [
    LabelPosition("left", 9, 0),
    LabelPosition("center", 0, -13),
    LabelPosition("center", 0, 13),
    LabelPosition("right", -9, 0),
    LabelPosition("left", 7, -10),
    LabelPosition("left", 7, 10),
    LabelPosition("right", -7, -10),
    LabelPosition("right", -7, 10),
]

Box = tuple[float, float, float, float]  # left, top, right, bottom


def label_positions(points: Sequence[tuple[float, float, str]], width: float, height: float) -> list[LabelPosition]:
    """A position for the label of each (x, y, label) in pixels, first come, first served."""
    taken: list[Box] = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y, _ in points]
    positions = []
    for x, y, label in points:
        boxes = ((p, _box(x + p.dx, y + p.dy, p.align, label)) for p in _POSITIONS)
        free = ((p, b) for p, b in boxes if _inside(b, width, height) and not any(_overlap(b, other) for other in taken))
        position, box = next(free, (LabelPosition(""), None))
        if box is not None:
            taken.append(box)
        positions.append(position)
    return positions


def on_log_axis(values: Sequence[float], pixels: float, padding: float, *more: float) -> list[float]:
    """The positions of `values` on a logarithmic axis that spans them and `more`, with padding at both ends."""
    logs = [math.log(v) for v in [*values, *more]]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0
    return [padding + (pixels - 2 * padding) * (math.log(v) - low) / span for v in values]


def _box(x: float, y: float, align: str, label: str) -> Box:
    width = _LETTER * len(label)
    left = {"left": x, "center": x - width / 2, "right": x - width}[align]
    return left, y - _LINE / 2, left + width, y + _LINE / 2


def _inside(box: Box, width: float, height: float) -> bool:
    return box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
