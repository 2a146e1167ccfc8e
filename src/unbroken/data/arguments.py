"""What people hand to loaders and orders, looked at where it comes in. No torch, no numpy."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import UsageError


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """The value as Python's int. Raises UsageError for what is none (2.5, "4", True), or is below `least`."""
    found: int | None = None
    if not isinstance(value, bool):
        try:
            found = operator.index(value)  # numpy's whole numbers are some
        except TypeError:
            found = None
    if found is None or (least is not None and found < least):
        bound = "" if least is None else f" from {least} up"
        raise UsageError(f"{name} must be a whole number{bound}, not {value!r}"[:300])
    return found
