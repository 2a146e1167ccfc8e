"""How many examples the property tests try: a few seconds in `make test`, ten times as many in `make soak`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

TIMES = int(os.environ.get("UNBROKEN_FUZZ_TIMES", "1"))


def fuzz(examples: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a hypothesis test as a fuzzer of a reader or protocol: `examples` inputs, times `$UNBROKEN_FUZZ_TIMES`.

    Stands above `@given`. The timeout of one test grows with it.
    """

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        test = settings(max_examples=examples * TIMES, deadline=None)(test)
        return pytest.mark.timeout(300 * TIMES)(pytest.mark.fuzz(test))

    return mark
