"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data (`$UNBROKEN_DATA`, or shared/data beside the checkout); skips where absent."""
    for place in (os.environ.get("UNBROKEN_DATA"), REPO.parent / "shared" / "data", REPO / "shared" / "data"):
        if place and Path(place).is_dir():
            return Path(place)
    pytest.skip("the real data is not on this machine (set UNBROKEN_DATA to its folder)")


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition with a deadline: eventually(lambda: ..., within=10)."""

    def wait(condition: Callable[[], object], within: float = 10.0, every: float = 0.02) -> None:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(every)
        raise AssertionError(f"did not come true within {within} s")

    return wait


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts background jobs with SIGINT ignored, and what the tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
