"""The reference trainer as a module (`python -m unbroken.train`) and as a file (`torchrun FILE`)."""

from __future__ import annotations

import os
import sys

if not __package__:
    # Started as a file: this folder is first on the path, where its modules would hide others of the same name.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    sys.path.insert(0, os.path.dirname(os.path.dirname(here)))

from unbroken.train.command import main

if __name__ == "__main__":
    sys.exit(main())
