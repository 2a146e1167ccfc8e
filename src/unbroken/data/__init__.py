"""Where a training stands in its data: one owner of the position, exact at any world size. See docs/data.md.

    import unbroken.data
    loader = unbroken.data.wrap(DataLoader(dataset, batch_size=8, shuffle=True))

Importing this needs no torch; `wrap` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .journal import Journal
from .ordering.mixture import Mixture
from .ordering.orders import LengthGrouped, Packed
from .position import Position

if TYPE_CHECKING:
    from .loading.loader import BatchRecord, Loader
    from .loading.wrapping import wrap

__all__ = ["BatchRecord", "Journal", "LengthGrouped", "Loader", "Mixture", "Packed", "Position", "wrap"]

_LATER = {"BatchRecord": ".loading.loader", "Loader": ".loading.loader", "wrap": ".loading.wrapping"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'unbroken.data' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATER[name], __name__), name)
    return value
