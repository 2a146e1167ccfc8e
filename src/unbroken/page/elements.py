"""Elements of SVG and HTML from Python, escaped: what a template cannot draw."""

from __future__ import annotations

from .palette import NAMES
from .terminal import escape


class Markup(str):
    """Text that is markup already; Jinja2 and `element` put it in as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def element(name: str, *inside: str, **attributes: object) -> Markup:
    """An element. Children that are no Markup are escaped, and so are all attributes.

    `cls` is the class. `_` in an attribute's name becomes `-`, a trailing one is dropped; None leaves it out; a float
    keeps one digit. A `fill` or `stroke` of the palette also gets a class, through which the page can show it in the dark.
    """
    parts = []
    cls = str(attributes.pop("cls", ""))
    for key, value in attributes.items():
        if value is None:
            continue
        if key in ("fill", "stroke") and (known := NAMES.get(str(value))):
            cls = f"{cls} {key[0]}-{known}" if cls else f"{key[0]}-{known}"
        shown = number(value) if isinstance(value, float) else escape(str(value))
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{shown}"')
    if cls:
        parts.append(f' class="{escape(cls)}"')
    body = "".join(c if isinstance(c, Markup) else escape(c) for c in inside)
    return Markup(f"<{name}{''.join(parts)}>{body}</{name}>" if body else f"<{name}{''.join(parts)}/>")


def number(value: float) -> str:
    """Pixels: one digit after the point, none where it is 0."""
    text = f"{value:.1f}"
    return text.removesuffix(".0")


def width_of(text: str, size: float = 12) -> float:
    """About how wide a text is, in pixels."""
    return sum(0.33 if c in "iIl.,:;'|!()[] " else 0.85 if c in "MWm%" else 0.58 for c in text) * size


def short(text: str, room: float, size: float = 12) -> str:
    """The text, cut with an ellipsis where it is wider than `room` pixels; '' where not even four letters fit."""
    if width_of(text, size) <= room:
        return text
    kept, used = 0, width_of("…", size)
    for c in text:
        used += width_of(c, size)
        if used > room:
            break
        kept += 1
    return text[:kept] + "…" if kept >= 3 else ""
