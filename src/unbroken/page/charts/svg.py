"""Charts as SVG: the same drawing on the page, in print and as a file. Nothing but the standard library."""

from __future__ import annotations

import math

from ..terminal import escape, script_json
from .scales import Axis, amount, nice_range, seconds, short, ticks
from .spec import Bars, Boxes, Chart, Heat, LineChart

FONT = "font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif\""
INK, SOFT, RULE = "#20262e", "#5b6470", "#e3e7ec"
WIDTH, HEIGHT = 520, 310


def render(chart: Chart, width: int = WIDTH, height: int = HEIGHT) -> str:
    """The chart as one <svg> element; hover data in `data-chart` (lines) or `data-tip` (marks)."""
    match chart:
        case LineChart():
            return lines(chart, width, height)
        case Bars():
            return horizontal_bars(chart, width) if chart.horizontal else bars(chart, width, height)
        case Boxes():
            return boxes(chart, width)
        case Heat():
            return heat(chart, width)


def wrap(inside: list[str], width: int, height: float, title: str, extra: str = "") -> str:
    """An <svg> with a title for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(title, quote=True)}" {FONT} font-size="12" {extra}>'
        + "".join(inside)
        + "</svg>"
    )


def text(x: float, y: float, s: str, *, anchor: str = "start", fill: str = SOFT, size: float = 12, weight: int = 400,
         extra: str = "") -> str:  # fmt: skip
    """A <text> element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}" font-weight="{weight}" '
        f"{extra}>{escape(s)}</text>"
    )


def width_of(s: str, size: float = 12) -> float:
    """About how wide a text is, in pixels."""
    return sum(0.33 if c in "iIl.,:;'|!()[] " else 0.85 if c in "MWm%" else 0.58 for c in s) * size


def legend(items: list[tuple[str, str, str]], width: float, x0: float, y0: float) -> tuple[list[str], float]:
    """(elements, height): label, colour, dash of each series, in rows; each a group that a click can toggle."""
    out, x, y = [], x0, y0
    for i, (label, color, dash) in enumerate(items):
        w = 26 + width_of(label) + 14
        if x + w > width and x > x0:
            x, y = x0, y + 18
        stroke = f'stroke-dasharray="{dash}"' if dash else ""
        out.append(
            f'<g class="key" data-series="{i}"><rect x="{x:.1f}" y="{y - 12:.1f}" width="{w - 8:.1f}" height="17" fill="#fff" '
            f'fill-opacity="0"/><line x1="{x:.1f}" x2="{x + 20:.1f}" y1="{y - 4:.1f}" y2="{y - 4:.1f}" stroke="{color}" '
            f'stroke-width="3" {stroke}/>' + text(x + 26, y, label, fill=INK) + "</g>"
        )
        x += w
    return out, (y - y0 + 18 if items else 0)


def head(title: str) -> list[str]:
    """The panel's title."""
    return [text(0, 14, title, fill=INK, size=13, weight=600)] if title else []


def lines(c: LineChart, width: int, height: int) -> str:
    """A line chart."""
    out = head(c.title)
    top = 26.0 if c.title else 6.0
    if c.legend and (len(c.series) > 1 or any(s.dash for s in c.series)):
        keys, used = legend([(s.label, s.color, s.dash) for s in c.series], width, 0, top + 10)
        out += keys
        top += used + 4
    xs = [p[0] for s in c.series for p in s.points]
    ys = [p[1] for s in c.series for p in s.points]
    x_low, x_high = c.x_range or nice_range(xs, c.x_scale)
    y_low, y_high = c.y_range or nice_range(ys, "linear", from_zero=True)
    y_axis = Axis("linear", y_low, y_high, height - 44, top + 8)
    y_ticks = ticks(y_axis, "number", 5)
    left = 14 + max((width_of(t[1]) for t in y_ticks), default=20) + 16
    x_axis = Axis(c.x_scale, x_low, x_high, left, width - 12)
    for v, label in y_ticks:
        y = y_axis.at(v)
        out.append(f'<line x1="{left:.1f}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        out.append(text(left - 7, y + 4, label, anchor="end"))
    room = (
        7 if c.x_kind != "time" else max(2, min(6, int((width - left) / 80)))
    )  # a month takes so many pixels
    for v, label in ticks(x_axis, c.x_kind, room):
        x = x_axis.at(v)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{height - 44}" y2="{height - 40}" stroke="{SOFT}"/>')
        anchor = "end" if x > width - 26 else "middle"
        out.append(text(x if anchor == "middle" else x + 10, height - 27, label, anchor=anchor))
    out.append(
        f'<line x1="{left:.1f}" x2="{width - 12}" y1="{height - 44}" y2="{height - 44}" stroke="{SOFT}"/>'
    )
    out.append(text((left + width - 12) / 2, height - 8, c.x, anchor="middle"))
    middle = (top + 8 + height - 44) / 2
    out.append(text(10, middle, c.y, anchor="middle", extra=f'transform="rotate(-90 10 {middle:.1f})"'))
    for v, label in c.marks:
        if x_low <= v <= x_high:
            x = x_axis.at(v)
            out.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 8:.1f}" y2="{height - 44}" stroke="{SOFT}" stroke-dasharray="2 3"/>'
            )
            near = x > width - 40
            out.append(
                text(x - 4 if near else x + 4, height - 50, label, size=11, anchor="end" if near else "start")
            )
    for i, s in enumerate(c.series):
        pts = [(x_axis.at(x), y_axis.at(y)) for x, y in s.points if math.isfinite(x) and math.isfinite(y)]
        if not pts:
            continue
        d = path(pts, s.step)
        if s.area:
            base = y_axis.at(max(y_low, 0))
            out.append(
                f'<path class="s" data-series="{i}" d="{d}L{pts[-1][0]:.1f} {base:.1f}L{pts[0][0]:.1f} {base:.1f}Z" '
                f'fill="{s.color}" fill-opacity="0.13" stroke="none"/>'
            )
        dash = f'stroke-dasharray="{s.dash}"' if s.dash else ""
        out.append(
            f'<path class="s" data-series="{i}" d="{d}" fill="none" stroke="{s.color}" stroke-width="{1.8 if s.dash else 2.4}" '
            f'stroke-linejoin="round" {dash}/>'
        )
        if len(pts) == 1:
            out.append(
                f'<circle class="s" data-series="{i}" cx="{pts[0][0]:.1f}" cy="{pts[0][1]:.1f}" r="3.5" fill="{s.color}"/>'
            )
    data = {
        "x": [c.x_scale, x_low, x_high, round(left, 1), width - 12, c.x_kind],
        "y": [y_low, y_high, height - 44, round(top + 8, 1)],
        "yl": c.y,
        "s": [
            {"l": s.label, "c": s.color, "p": [[sig(a), sig(b)] for a, b in s.points], "st": int(s.step)}
            for s in c.series
        ],
    }
    attribute = escape(script_json(data), quote=True)
    return wrap(out, width, height, c.title or c.y, f'data-chart="{attribute}"')


def sig(v: float) -> float:
    """Five significant digits are enough to show (times keep their seconds)."""
    return round(v) if abs(v) > 1e8 else float(f"{v:.5g}")


def path(pts: list[tuple[float, float]], step: bool) -> str:
    """An SVG path through the points; points closer than half a pixel are left out."""
    out = [f"M{pts[0][0]:.1f} {pts[0][1]:.1f}"]
    last = pts[0]
    for i, (x, y) in enumerate(pts[1:], 1):
        if i < len(pts) - 1 and abs(x - last[0]) < 0.5 and abs(y - last[1]) < 0.5:
            continue
        out.append(f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f} {y:.1f}")
        last = (x, y)
    return "".join(out)


def bars(c: Bars, width: int, height: int) -> str:
    """Vertical bars, grouped or stacked."""
    out = head(c.title)
    top = 26.0 if c.title else 6.0
    keys = [(g[0], g[1], "") for g in c.groups] + [(p[0], SOFT, "3 2") for p in c.published]
    if c.legend and len(keys) > 1:
        drawn, used = legend(keys, width, 0, top + 10)
        out += drawn
        top += used + 4
    totals = [sum(g[2][i] or 0 for g in c.groups) for i in range(len(c.categories))]
    values = totals if c.stacked else [v for g in c.groups for v in g[2] if v is not None]
    values = [*values, *(v for p in c.published for v in p[1] if v is not None)]
    if c.log:
        pos = [v for v in values if v > 0] or [1.0]
        low, high = 10 ** math.floor(math.log10(min(pos))), 10 ** math.ceil(math.log10(max(pos)) + 1e-9)
        axis = Axis("log", low, max(high, low * 10), height - 44, top + 12)
    else:
        low, high = nice_range(values, "linear", from_zero=True)
        axis = Axis("linear", low, 100.0 if c.unit == "%" and c.stacked else high, height - 44, top + 12)
    y_ticks = ticks(axis, "number", 5) if not c.log else log_ticks(axis)
    left = 14 + max((width_of(t[1]) for t in y_ticks), default=20) + 16
    for tick, label in y_ticks:
        y = axis.at(tick)
        out.append(f'<line x1="{left:.1f}" x2="{width - 6}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        out.append(text(left - 7, y + 4, label, anchor="end"))
    middle = (top + height - 36) / 2
    out.append(text(10, middle, c.value, anchor="middle", extra=f'transform="rotate(-90 10 {middle:.1f})"'))
    n = max(len(c.categories), 1)
    slot = (width - 6 - left) / n
    inner = min(slot * 0.78, 90)
    each = inner / (1 if c.stacked else max(len(c.groups), 1))
    stride = max(1, math.ceil(max((width_of(x) for x in c.categories), default=10) / max(slot - 4, 1)))
    base = height - 44
    for i, category in enumerate(c.categories):
        x0 = left + slot * i + (slot - inner) / 2
        floor = 0.0
        for k, (label, color, vs) in enumerate(c.groups):
            v = vs[i]
            if v is None:
                continue
            y0 = axis.at(floor) if c.stacked else base
            y1 = axis.at(floor + v) if c.stacked else axis.at(v)
            x = x0 if c.stacked else x0 + k * each
            tip = f"{category} · {label}: {amount(v, c.digits)}{' ' + c.unit if c.unit else ''}"
            out.append(
                f'<rect class="s mark" data-series="{k}" data-tip="{escape(tip, quote=True)}" x="{x + 0.5:.1f}" '
                f'y="{min(y0, y1):.1f}" width="{max(each - 1, 1):.1f}" height="{max(abs(y0 - y1), 0.6):.1f}" rx="1.5" '
                f'fill="{color}"/>'
            )
            if not c.stacked and each >= 30:
                out.append(
                    text(x + each / 2, y1 - 4, amount(v, c.digits), anchor="middle", fill=INK, size=11)
                )
            if c.stacked and abs(y0 - y1) > 15 and each > 30:
                out.append(
                    text(
                        x + each / 2,
                        (y0 + y1) / 2 + 4,
                        amount(v, c.digits),
                        anchor="middle",
                        fill="#fff",
                        size=11,
                        weight=600,
                    )
                )
            floor += v
        for label, pv in c.published:
            if pv[i] is not None:
                y = axis.at(float(pv[i] or 0))
                tip = f"{category} · {label}: {amount(pv[i], c.digits)}{' ' + c.unit if c.unit else ''}"
                out.append(
                    f'<line class="mark" data-tip="{escape(tip, quote=True)}" x1="{x0 - 3:.1f}" x2="{x0 + inner + 3:.1f}" y1="{y:.1f}" '
                    f'y2="{y:.1f}" stroke="{SOFT}" stroke-width="2" stroke-dasharray="3 2"/>'
                )
        if i % stride == 0:
            out.append(text(left + slot * (i + 0.5), base + 17, category, anchor="middle"))
    out.append(f'<line x1="{left:.1f}" x2="{width - 6}" y1="{base}" y2="{base}" stroke="{SOFT}"/>')
    return wrap(out, width, height, c.title or c.value)


def log_ticks(axis: Axis) -> list[tuple[float, str]]:
    """Powers of ten."""
    a, b = round(math.log10(axis.low)), round(math.log10(axis.high))
    stride = max(1, math.ceil((b - a) / 6))
    return [(10.0**k, short(10.0**k)) for k in range(a, b + 1, stride)]


def horizontal_bars(c: Bars, width: int) -> str:
    """Horizontal bars, one row a category: for names."""
    out = head(c.title)
    top = 26.0 if c.title else 6.0
    keys = [(g[0], g[1], "") for g in c.groups] + [(p[0], SOFT, "3 2") for p in c.published]
    if c.legend and len(keys) > 1:
        drawn, used = legend(keys, width, 0, top + 10)
        out += drawn
        top += used + 4
    stacks = c.stacked
    row = 22.0 if stacks or len(c.groups) == 1 else 8.0 + 13.0 * len(c.groups)
    left = min(max((width_of(x) for x in c.categories), default=40) + 12, width * 0.42)
    totals = [sum(g[2][i] or 0 for g in c.groups) for i in range(len(c.categories))]
    values = totals if stacks else [v for g in c.groups for v in g[2] if v is not None]
    values = [*values, *(v for p in c.published for v in p[1] if v is not None)]
    high = 100.0 if stacks and c.unit == "%" else (max(values, default=1) or 1)
    widest = max((width_of(amount(v, c.digits), 11) for v in values), default=20)
    right = width - (8 if stacks else widest + 12)
    axis = Axis("linear", 0.0, high, left, right)
    y = top + 6
    for i, category in enumerate(c.categories):
        shown = category if width_of(category) < left - 8 else category[: int((left - 14) / 6.6)] + "…"
        out.append(text(left - 8, y + row / 2 + 2, shown, anchor="end", fill=INK))
        floor = 0.0
        for k, (label, color, vs) in enumerate(c.groups):
            v = vs[i]
            if v is None:
                continue
            x0, x1 = axis.at(floor), axis.at(floor + v if stacks else v)
            if not stacks:
                x0 = left
            h = row - 7 if stacks or len(c.groups) == 1 else 12.0
            yy = y + 1 if stacks or len(c.groups) == 1 else y + 1 + 13 * k
            tip = f"{category} · {label}: {amount(v, c.digits)}{' ' + c.unit if c.unit else ''}"
            out.append(
                f'<rect class="s mark" data-series="{k}" data-tip="{escape(tip, quote=True)}" x="{x0:.1f}" y="{yy:.1f}" '
                f'width="{max(x1 - x0, 0.6):.1f}" height="{h:.1f}" rx="1.5" fill="{color}"/>'
            )
            if not stacks:
                out.append(text(x1 + 5, yy + h - 2.5, amount(v, c.digits), fill=SOFT, size=11))
            elif x1 - x0 > width_of(amount(v, c.digits), 11) + 8:
                out.append(
                    text(
                        (x0 + x1) / 2,
                        yy + h - 3.5,
                        amount(v, c.digits),
                        anchor="middle",
                        fill="#fff",
                        size=11,
                        weight=600,
                    )
                )
            floor += v
        for label, pv in c.published:
            if pv[i] is not None:
                x = axis.at(float(pv[i] or 0))
                tip = f"{category} · {label}: {amount(pv[i], c.digits)}{' ' + c.unit if c.unit else ''}"
                out.append(
                    f'<line class="mark" data-tip="{escape(tip, quote=True)}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1:.1f}" '
                    f'y2="{y + row - 4:.1f}" stroke="{INK}" stroke-width="2" stroke-dasharray="3 2"/>'
                )
        y += row
    out.append(text(left, y + 14, c.value))
    return wrap(out, width, y + 20, c.title or c.value)


def boxes(c: Boxes, width: int) -> str:
    """Boxes and whiskers on a logarithmic axis, one row each."""
    out = head(c.title)
    top = 30.0 if c.title else 8.0
    values = [v for b in c.boxes for v in (b.low, b.high)]
    low = min((v for v in values if v > 0), default=1.0)
    high = max(max(values, default=2.0), low * 2)
    left = max((width_of(b.label) for b in c.boxes), default=40) + 14
    axis = Axis("log", low, high, left, width - 16)
    row = 30.0
    bottom = top + row * len(c.boxes)
    for v, label in ticks(axis, "number", 8):
        x = axis.at(v)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="{RULE}"/>')
        out.append(text(x, bottom + 16, label, anchor="middle"))
    for i, b in enumerate(c.boxes):
        y = top + row * (i + 0.5)
        out.append(text(left - 9, y + 4, b.label, anchor="end", fill=INK))
        px = [axis.at(v) for v in (b.low, b.q1, b.median, b.q3, b.high)]
        dash = 'stroke-dasharray="3 2"' if b.dashed else ""
        tip = escape(
            f"{b.label}: median {amount(b.median)}, quartiles {amount(b.q1)} to {amount(b.q3)}, whiskers {amount(b.low)} to {amount(b.high)}",
            quote=True,
        )
        out.append(
            f'<g class="mark" data-tip="{tip}"><line x1="{px[0]:.1f}" x2="{px[4]:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{b.color}" '
            f'stroke-width="1.6" {dash}/>'
            + "".join(
                f'<line x1="{v:.1f}" x2="{v:.1f}" y1="{y - 5:.1f}" y2="{y + 5:.1f}" stroke="{b.color}" stroke-width="1.6"/>'
                for v in (px[0], px[4])
            )
            + f'<rect x="{px[1]:.1f}" y="{y - 9:.1f}" width="{max(px[3] - px[1], 2):.1f}" height="18" rx="2" fill="{b.color}" '
            f'fill-opacity="{0.08 if b.dashed else 0.25}" stroke="{b.color}" stroke-width="1.6" {dash}/>'
            f'<line x1="{px[2]:.1f}" x2="{px[2]:.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}" stroke="{b.color}" stroke-width="3.4"/></g>'
        )
    out.append(text((left + width - 16) / 2, bottom + 36, c.value, anchor="middle"))
    return wrap(out, width, bottom + 44, c.title or c.value)


def heat(c: Heat, width: int) -> str:
    """A grid of shades."""
    out = head(c.title)
    top = 26.0 if c.title else 6.0
    left = max((width_of(r) for r in c.rows), default=30) + 10
    cell = (width - left - 4) / max(len(c.columns), 1)
    row = max(min(cell, 24.0), 15.0)
    peak = max((v for r in c.values for v in r), default=1.0) or 1.0
    for i, (label, vs) in enumerate(zip(c.rows, c.values, strict=True)):
        y = top + 4 + row * i
        out.append(text(left - 7, y + row / 2 + 4, label, anchor="end"))
        for k, v in enumerate(vs):
            tip = escape(f"{label} {c.columns[k]}: {amount(v, 0)} {c.unit}", quote=True)
            out.append(
                f'<rect class="mark" data-tip="{tip}" x="{left + cell * k + 0.5:.1f}" y="{y + 0.5:.1f}" width="{cell - 1:.1f}" '
                f'height="{row - 1:.1f}" rx="1.5" fill="{shade(v / peak)}"/>'
            )
    y = top + 4 + row * len(c.rows)
    stride = max(1, math.ceil(34 / max(cell, 1)))
    for k in range(0, len(c.columns), stride):
        out.append(text(left + cell * (k + 0.5), y + 15, c.columns[k], anchor="middle"))
    return wrap(out, width, y + 22, c.title)


def shade(t: float) -> str:
    """From near white to deep blue."""
    t = min(max(t, 0.0), 1.0) ** 0.8
    a, b = (238, 243, 250), (24, 62, 130)
    return "#" + "".join(f"{round(p + (q - p) * t):02x}" for p, q in zip(a, b, strict=True))


__all__ = ["render", "seconds"]
