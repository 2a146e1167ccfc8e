"""Unbroken keeps the development of large language models running.

In a training script, five lines:

    import unbroken
    run = unbroken.attach()
    checkpoints = unbroken.Checkpointer()
    ...
    run.step(step, loss=loss)          # each step, on every rank

`Checkpointer` is imported when it is first asked for, because it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Exit, UnbrokenError
from .progress.attach import Run, attach
from .version import __version__

if TYPE_CHECKING:
    from .checkpoint import Checkpointer

EXIT_STOPPED = Exit.RANK_STOPPED_ON_REQUEST
"""The exit code of a rank that saved and stopped because the run asked it to."""

__all__ = ["EXIT_STOPPED", "Checkpointer", "Run", "UnbrokenError", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from .checkpoint import Checkpointer

        return Checkpointer
    raise AttributeError(f"module 'unbroken' has no attribute '{name}'")
