"""What a script goes on from by itself, in words, where unbroken has nothing to restore: a checkpoint of its own."""

from __future__ import annotations


def describe_own(path: str, asked: bool) -> str:
    """'from ...': `path` is its newest whole checkpoint ("": none is known), `asked` whether the run has --resume-arg or --resume-from."""
    if path and asked:
        return f"from the script's own newest checkpoint, {path}"
    if path:
        return f"from the script's own newest checkpoint, {path}, if it reads UNBROKEN_RESUME_FROM"
    return "from what the script finds of its own, or from the beginning: unbroken has saved nothing"
