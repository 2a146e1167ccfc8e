"""Ranks that start in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process that forks ranks."""
    n = ForkServer()
    yield n
    n.close()
