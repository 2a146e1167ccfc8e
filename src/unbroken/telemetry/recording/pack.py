"""Packs one spool in a process of its own, at the lowest priority, so that the recorder stays small."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ...errors import UnbrokenError
from .spool import pack


def main() -> int:
    """`python -m unbroken.telemetry.recording.pack SPOOL`."""
    os.nice(19)
    try:
        pack(Path(sys.argv[1]))
    except UnbrokenError as e:
        print(f"unbroken telemetry: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
