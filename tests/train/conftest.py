"""Ranks that start in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fork_server import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that forks ranks."""
    n = Nursery()
    yield n
    n.close()
