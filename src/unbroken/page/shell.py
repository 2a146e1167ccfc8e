"""Pages from templates: one self-contained HTML file, everything escaped unless it is markup of our own.

    render("status/page.html", title=..., data=...)      templates lie beside the code that fills them

Every template extends `page/shell.html`, which brings the one style sheet and the one script, and may import the macros
of `page/parts.html`. A name that a template misspells is an error, None is shown as a dash, and text of others loses
its control and direction characters before it is escaped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..errors import MissingExtra
from ..units import plural
from .elements import Markup
from .palette import variables
from .terminal import script_json, visible

if TYPE_CHECKING:
    from jinja2 import Environment

_log = logging.getLogger("unbroken.page")
MISSING = "–"
"""What is shown of a value that is not known."""


def render(template: str, *, data: Any = None, **values: Any) -> str:
    """The whole page. `template` is a path inside the package, `data` what the page's script reads from `#data`.

    Raises MissingExtra without Jinja2, jinja2.UndefinedError where a template asks for what it was not given.
    """
    held = None if data is None else Markup(script_json(data, allow_nan=False))
    return _environment().get_template(template).render(data=held, **values)


def require() -> None:
    """Raises MissingExtra where no page can be made: called before the work that a page is all there is of."""
    _environment()


def write_beside(path: Path, make: Callable[[], str]) -> bool:
    """Writes a page that stands beside results; without Jinja2 there is none, which is logged and returned as False.

    Raises OSError. What has been trained or scored does not end because its page cannot be drawn.
    """
    try:
        text = make()
    except MissingExtra as e:
        _log.warning("%s is not written: %s. %s", path.name, e.message, e.hint)
        return False
    # A path may hold bytes that are no text, and a page shows it.
    atomic.write_bytes(path, text.encode(errors="replace"))
    return True


@cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError as e:
        raise MissingExtra("Jinja2", "page", what="a page") from e
    made = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals |= {
        "style": Markup(variables() + _read("page/style.css")),
        "script": Markup(_read("page/script.js")),
    }
    made.filters["thousands"] = "{:,}".format
    made.filters["capfirst"] = lambda text: text[:1].upper() + text[1:]
    made.filters["plural"] = plural
    return made


def _read(name: str) -> str:
    return files("unbroken").joinpath(name).read_text("utf-8")


def _shown(value: object) -> object:
    """A value as a template may show it: text of others without what could act, None as a dash."""
    if value is None:
        return MISSING
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
