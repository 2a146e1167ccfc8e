"""Checkpoints: snapshots in the memory of a keeper, made durable behind the trainer's back, restored by all ranks alike.

`Checkpointer` and what it gives are imported when they are first asked for, because they need torch; the keeper
and its client do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpointer import Checkpointer
    from .levels import Saved
    from .restore.selection import Restored

__all__ = ["Checkpointer", "Restored", "Saved"]

_PLACES = {"Checkpointer": "checkpointer", "Saved": "levels", "Restored": "restore.selection"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
