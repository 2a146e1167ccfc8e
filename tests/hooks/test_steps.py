"""How many batches make a step, so that its samples are as many with fewer ranks."""

from __future__ import annotations

import pytest

from unbroken.errors import UsageError
from unbroken.hooks.steps import keep_global_batch


def test_fewer_ranks_take_more_batches_for_a_step() -> None:
    assert [keep_global_batch(2, (6, 4, 3), n) for n in (6, 4, 3)] == [2, 3, 4]


def test_a_number_of_ranks_that_cannot_have_as_many_is_refused_with_those_that_can() -> None:
    with pytest.raises(UsageError) as refused:
        keep_global_batch(1, (8, 6, 4), 8)
    assert "with 6 ranks" in str(refused.value) and "8, 4" in str(refused.value)
