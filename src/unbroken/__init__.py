"""Unbroken keeps the development of large language models running.

In a training script, five lines:

    import unbroken
    run = unbroken.attach()
    checkpoints = unbroken.Checkpointer()
    ...
    run.step(step, loss=loss)          # each step, on every rank

What a training script uses is imported when it is first asked for: `Checkpointer` needs torch, and no command
that reads logs or traces should wait for either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Exit, UnbrokenError
from .version import __version__

if TYPE_CHECKING:
    from .checkpoint import Checkpointer
    from .progress.attach import Run, attach

EXIT_STOPPED = Exit.RANK_STOPPED_ON_REQUEST
"""The exit code of a rank that saved and stopped because the run asked it to."""

__all__ = ["EXIT_STOPPED", "Checkpointer", "Run", "UnbrokenError", "__version__", "attach"]


_LATER = {"Checkpointer": ".checkpoint", "Run": ".progress.attach", "attach": ".progress.attach"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'unbroken' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATER[name], __name__), name)
    return value
