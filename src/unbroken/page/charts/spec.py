"""Charts as data: what is drawn, without how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..palette import distinct

Scale = Literal["linear", "log", "time"]


@dataclass(frozen=True)
class Series:
    """A line: points in data units; `dash` for what is published or compared with; `color` as #rrggbb. Two series of
    one chart never look alike: the second gets another colour."""

    label: str
    points: tuple[tuple[float, float], ...]
    color: str
    dash: str = ""
    step: bool = False
    area: bool = False


@dataclass(frozen=True)
class LineChart:
    """Lines over a common axis. `marks`: vertical lines with a label. Times are seconds since 1970."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    x_scale: Scale = "linear"
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    x_kind: Literal["number", "seconds", "time"] = "number"
    marks: tuple[tuple[float, str], ...] = ()
    legend: bool = True

    def __post_init__(self) -> None:
        looks = distinct([(s.color, s.dash) for s in self.series])
        own = tuple(replace(s, color=c, dash=d) for s, (c, d) in zip(self.series, looks, strict=True))
        object.__setattr__(self, "series", own)


@dataclass(frozen=True)
class Bars:
    """Bars: a value of each group in each category; `stacked` puts them on one bar. `published` draws a tick beside."""

    title: str
    value: str
    categories: tuple[str, ...]
    groups: tuple[tuple[str, str, tuple[float | None, ...]], ...]
    stacked: bool = False
    horizontal: bool = False
    log: bool = False
    unit: str = ""
    published: tuple[tuple[str, tuple[float | None, ...]], ...] = ()
    digits: int = 1
    legend: bool = True

    def __post_init__(self) -> None:
        looks = distinct([(g[1], "") for g in self.groups])
        own = tuple((g[0], c, g[2]) for g, (c, _) in zip(self.groups, looks, strict=True))
        object.__setattr__(self, "groups", own)


@dataclass(frozen=True)
class Box:
    """One box: whiskers, quartiles, median."""

    label: str
    low: float
    q1: float
    median: float
    q3: float
    high: float
    color: str
    dashed: bool = False


@dataclass(frozen=True)
class Boxes:
    """Boxes over a logarithmic axis."""

    title: str
    value: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Heat:
    """A grid of values, darker for more."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    unit: str = ""


Chart = LineChart | Bars | Boxes | Heat


@dataclass(frozen=True)
class Grid:
    """A small table for the page: header, rows of text, which columns are numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...] = ()
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure or table of the report. `number`: as in the study ("Figure 3"), or a name of ours where it has none."""

    key: str
    number: str
    title: str
    sentence: str
    panels: tuple[Chart, ...] = ()
    grids: tuple[Grid, ...] = ()
    results: Sequence[str] = field(default=())
    note: str = ""
    table_first: bool = False
    """Its tables say more than its drawings: they come first, open."""
