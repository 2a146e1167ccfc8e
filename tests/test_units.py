"""Durations and sizes: what people write, what they see, and that both meet."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import UsageError
from unbroken.units import Bytes, Duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25), ("90s", 90), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400), ("10", 10), (" 7 ", 7),
        ("3min", 180), ("5us", 5e-6), ("1H 30M", 5400), ("0", 0), ("1d1h1m1s", 90061), ("1e3", 1000),
    ],
)  # fmt: skip
def test_durations_read(text: str, seconds: float) -> None:
    assert Duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "s", "soon", "5 parsecs", "1h30", "h1", "--5s", "5s!", "1,5s", "nan", "inf", "-inf", "5s5", "１s5"],
)
def test_durations_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration"):
        Duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (5e-6, "5us"), (0.25, "250ms"), (1, "1s"), (1.25, "1.2s"), (59.4, "59.4s"), (59.97, "1m"),
        (60, "1m"), (90, "1m30s"), (5400, "1h30m"), (172800, "2d"), (90061, "1d1h"), (-90, "-1m30s"),
        (3599.6, "1h"), (0.9999, "1s"), (0.00099999, "1ms"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_durations_shown(seconds: float, text: str) -> None:
    assert str(Duration(seconds)) == text


@given(st.floats(1e-6, 1e9))
def test_what_is_shown_can_be_read_and_is_near(seconds: float) -> None:
    # Shown are the two largest units that are not zero, so at most a unit of the smaller one is lost.
    again = Duration(str(Duration(seconds)))
    assert again == pytest.approx(seconds, rel=0.06)
    assert str(Duration(again)) == str(Duration(seconds))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512 * 10**6), ("1.5GiB", 3 * 2**29), ("0", 0), ("7", 7), ("1 kib", 1024), ("2t", 2 * 10**12),
        ("3B", 3), ("1K", 1000),
    ],
)  # fmt: skip
def test_sizes_read(text: str, size: int) -> None:
    assert Bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1.5 bytes", "-1GB", "1e9", "1PiB?", "nan", "1_000"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        Bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (5 * 2**40, "5 TiB"),
        (-2048, "-2 KiB"), (2**60, "1048576 TiB"), (2**20 - 1, "1 MiB"), (2**30 - 1, "1 GiB"),
    ],
)  # fmt: skip
def test_sizes_shown(size: int, text: str) -> None:
    assert str(Bytes(size)) == text


@given(st.integers(0, 2**62))
def test_shown_sizes_can_be_read_and_are_near(size: int) -> None:
    assert Bytes(str(Bytes(size))) == pytest.approx(size, rel=0.06)


def test_they_are_numbers() -> None:
    assert Duration("1m") + 1 == 61 and Bytes("1KiB") * 2 == 2048
    assert f"{Duration(90)}" == "1m30s" and repr(Bytes(1024)) == "1 KiB"
