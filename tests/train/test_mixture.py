"""A mixture of token files: the weights hold, the order does not know of ranks, skips are as if samples had never been there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from unbroken.errors import InputError, UsageError
from unbroken.train.config import parse
from unbroken.train.corpus.mixture import TokenMixture
from unbroken.train.corpus.order import SamplePosition
from unbroken.train.training import open_corpus

SEQ = 16


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Two files whose tokens say which one they are of and which sample."""
    for name, base, count in (("a", 0, 400), ("b", 1000, 100)):
        np.repeat(np.arange(base, base + count, dtype=np.uint16), SEQ).tofile(tmp_path / f"{name}.ds")
        np.array([count * SEQ], np.uint64).tofile(tmp_path / f"{name}.ds.index")
    return f"0.75*{tmp_path}/a.ds, 0.25*{tmp_path}/b.ds"


def opened(data: str, tmp_path: Path, *more: str) -> TokenMixture:
    found = open_corpus(
        parse(["--data", data, "--seq", str(SEQ), "--vocab", "2000", "--cache", str(tmp_path / "c"), *more])
    )
    assert isinstance(found, TokenMixture)
    return found


def seen(
    m: TokenMixture, position: SamplePosition, ranks: int, steps: int, batch: int = 24
) -> tuple[list[list[int]], SamplePosition]:
    """The samples (by their first token) of each global batch, read by so many ranks; and where that ends."""
    order, batches = m.order(0, 7), []
    for _ in range(steps):
        indices, position = position.take(batch)
        chosen = [order[i] for i in indices]
        each = batch // ranks
        parts = [m.samples.rows(chosen[r * each : (r + 1) * each])[0][:, 0].tolist() for r in range(ranks)]
        batches.append([t for p in parts for t in p])
    return batches, position


def test_the_weights_hold_and_the_order_does_not_know_of_ranks(data: str, tmp_path: Path) -> None:
    m = opened(data, tmp_path)
    one, _ = seen(m, SamplePosition(), 1, 40)
    flat = [t for b in one for t in b]
    assert sum(t >= 1000 for t in flat) / len(flat) == pytest.approx(0.25, abs=0.03)
    assert {t for t in flat if t >= 1000} == set(range(1000, 1099))  # used up, it begins again
    # Stopped after 15 steps on eight ranks, gone on with on three.
    first, at = seen(m, SamplePosition(), 8, 15)
    rest, _ = seen(m, at, 3, 25)
    assert first + rest == one


def test_skips_are_as_if_those_samples_had_never_been_there(data: str, tmp_path: Path) -> None:
    m = opened(data, tmp_path)
    whole, _ = seen(m, SamplePosition(), 1, 30)
    flat = [t for b in whole for t in b]
    kept = flat[:50] + flat[130:300] + flat[303:]
    got, _ = seen(m, SamplePosition().skipping([(50, 130), (300, 303)]), 4, 26)
    assert [t for b in got for t in b] == kept[: 26 * 24]
    hashes = [hashlib.sha256(bytes(str(b), "ascii")).hexdigest() for b in got]
    again, at = seen(m, SamplePosition().skipping([(50, 130)]), 2, 3)
    more, _ = seen(m, at.skipping([(300, 303)]), 6, 23)  # a range that is given later
    assert [hashlib.sha256(bytes(str(b), "ascii")).hexdigest() for b in again + more] == hashes


def test_what_differs_is_another_training_and_what_is_wrong_is_refused(data: str, tmp_path: Path) -> None:
    m = opened(data, tmp_path)
    assert m.fingerprint != opened(data.replace("0.75", "0.5"), tmp_path).fingerprint
    held = m.order(20, 7)
    assert held.samples == m.samples.count - 20 and max(held[i] for i in range(2000)) < held.samples
    with pytest.raises(InputError, match="last part has 99"):
        m.order(99, 7)
    for wrong in ("0.5*", "0*x.ds", "0.5*a.ds,b.ds", "1..2*a.ds"):
        with pytest.raises(UsageError, match="no weight above 0"):
            opened(wrong.replace("a.ds", f"{tmp_path}/a.ds"), tmp_path)
    with pytest.raises(InputError, match="not one sample"):
        opened(data, tmp_path, "--seq", "9000")
