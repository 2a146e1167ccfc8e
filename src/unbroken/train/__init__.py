"""The reference trainer: a small Llama-style model whose resumed run equals the undisturbed one bit for bit.

Run it as `unbroken train`, as `python -m unbroken.train`, or by `script_path()`, alone, under torchrun or under
`unbroken run`. Importing this package does not import torch.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["script_path"]


def script_path() -> Path:
    """The trainer as a file that any launcher can start: `torchrun FILE`, `unbroken run -- FILE`."""
    return Path(__file__).with_name("__main__.py")
