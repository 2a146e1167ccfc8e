"""Backends whose imports do what they should not."""

from __future__ import annotations

import os
import sys
import time

from unbroken.testing.evaluation import TimedBackend


class NoInput(TimedBackend):
    """Closes the standard input."""

    def warm(self) -> None:
        super().warm()
        os.close(0)


class Exits(TimedBackend):
    """Ends the process."""

    def warm(self) -> None:
        super().warm()
        sys.exit(3)


class Raises(TimedBackend):
    """Lacks something."""

    def warm(self) -> None:
        super().warm()
        raise ImportError("libnothing.so.1: cannot open shared object file")


class Hangs(TimedBackend):
    """Never ends."""

    def warm(self) -> None:
        super().warm()
        time.sleep(1000)
