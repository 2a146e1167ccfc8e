"""Where a training stands in its data: one owner of the position, exact at any world size. See docs/data.md.

    import unbroken.data
    loader = unbroken.data.wrap(DataLoader(dataset, batch_size=8, shuffle=True))

Everything is imported when it is first asked for: a keeper reads positions, and needs neither numpy nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .journal import Journal
    from .loading.loader import BatchRecord, Loader
    from .loading.wrapping import wrap
    from .ordering.mixture import Mixture
    from .ordering.orders import LengthGrouped, Packed
    from .position import Position

__all__ = ["BatchRecord", "Journal", "LengthGrouped", "Loader", "Mixture", "Packed", "Position", "wrap"]

_LATER = {
    "BatchRecord": ".loading.loader", "Journal": ".journal", "LengthGrouped": ".ordering.orders",
    "Loader": ".loading.loader", "Mixture": ".ordering.mixture", "Packed": ".ordering.orders", "Position": ".position",
    "wrap": ".loading.wrapping",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'unbroken.data' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATER[name], __name__), name)
    return value
