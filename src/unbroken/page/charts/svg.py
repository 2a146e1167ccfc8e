"""Charts as SVG: the same drawing on the page, in print and as a file. Nothing but the standard library."""

from __future__ import annotations

from ..elements import Markup
from .bars import bars, horizontal_bars
from .boxes import boxes, heat
from .lines import lines
from .spec import Bars, Boxes, Chart, Heat, LineChart

WIDTH, HEIGHT = 520, 310


def render(chart: Chart, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """The chart as one <svg> element; what hovering says in `data-chart` (lines) or in <title> (marks)."""
    match chart:
        case LineChart():
            return lines(chart, width, height)
        case Bars():
            return horizontal_bars(chart, width) if chart.horizontal else bars(chart, width, height)
        case Boxes():
            return boxes(chart, width)
        case Heat():
            return heat(chart, width)
