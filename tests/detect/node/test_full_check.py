"""The full check finds a flipped bit wherever it makes a device work, and says what it did not check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from unbroken.detect.node import CheckResult, State, compare_versions
from unbroken.detect.node.active import settings
from unbroken.detect.node.active.bandwidth import find_expected, judge_rate
from unbroken.detect.node.active.disk import check_disk
from unbroken.detect.node.active.full import FullCheck, check_fully
from unbroken.detect.node.active.memory import check_memory
from unbroken.detect.node.active.products import check_products
from unbroken.detect.node.trusted import find_writable
from unbroken.testing.nvml import FakeGpu, FakeNvml

CPU = torch.device("cpu")


def bad(found: list[CheckResult]) -> list[str]:
    return [c.name for c in found if c.state is State.BAD]


def test_healthy_hardware_is_good() -> None:
    found = check_products(CPU, seconds=0.05)
    assert [c.state for c in found] == [State.GOOD] * 4 and "exact" in found[0].text
    assert check_memory(CPU, 32 << 20, seconds=0.5).state is State.GOOD
    assert check_memory(CPU, 0).state is State.NOT_CHECKED


@pytest.mark.parametrize("bit", [0, 7, 12])
def test_one_flipped_bit_of_one_product_is_found_in_every_kind_of_number(bit: int) -> None:
    seen = []

    def flip(product: torch.Tensor) -> None:
        seen.append(product.dtype)
        data = product.view(torch.uint8)
        data[17, 8 * 9 + bit // 8] ^= 1 << bit % 8

    found = check_products(CPU, seconds=0.02, after=flip)
    assert bad(found) == [f"products {k}" for k in ("float32", "bfloat16", "float16", "float64")]
    assert "row 17" in found[0].text and set(seen) == {
        torch.float32, torch.bfloat16, torch.float16, torch.float64,
    }  # fmt: skip


def test_a_product_that_is_no_number_is_wrong() -> None:
    assert bad(check_products(CPU, seconds=0.02, after=lambda p: p[3].fill_(float("nan"))))


def test_a_cell_that_does_not_keep_what_is_written_is_found() -> None:
    def flip(block: torch.Tensor) -> None:
        block[12345] ^= 1 << 40

    found = check_memory(CPU, 128 << 20, seconds=0.5, after=flip)
    assert found.state is State.BAD and "98,760" in found.text


def test_addresses_that_are_one_cell_are_found() -> None:
    blocks: list[torch.Tensor] = []

    def alias(block: torch.Tensor) -> None:
        if blocks and blocks[0] is not block:
            block[:64] = blocks[0][:64]  # what was written to the one is read from the other
        blocks.append(block)

    assert check_memory(CPU, 128 << 20, seconds=0.5, after=alias).state is State.BAD


def test_a_disk_that_gives_other_bytes_back_is_found(tmp_path: Path) -> None:
    assert check_disk(tmp_path, size=8 << 20).state is State.GOOD
    found = check_disk(tmp_path, size=8 << 20, after=lambda fd: os.pwrite(fd, b"\xee", 5_000_000))
    assert found.state is State.BAD and "5,000,000" in found.text
    assert check_disk(tmp_path / "none").state is State.BAD
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_all_together_end_in_time_and_meddling_shows(tmp_path: Path) -> None:
    def meddle(check: str, written: Any) -> None:
        if check == "products":
            written[0, 0] += 1

    how = {"folders": [tmp_path], "seconds": 5.0, "host_bytes": 64 << 20, "devices": ()}
    good = check_fully(FullCheck(**how))
    assert not bad(good) and {c.name for c in good} >= {"gpus", "memory", "disk", "settings"}
    assert set(bad(check_fully(FullCheck(**how, meddle=meddle)))) == {
        f"products {k}" for k in ("float32", "bfloat16", "float16", "float64")
    }


def test_settings_that_a_test_changed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = FakeNvml([FakeGpu(), FakeGpu()])
    limits = {0: 700_000, 1: 700_000}
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerManagementLimit", limits.__getitem__, raising=False)
    before = settings.read_settings(nvml)
    assert not bad(settings.compare_settings(before, settings.read_settings(nvml)))
    limits[1] = 500_000
    (found,) = [
        c for c in settings.compare_settings(before, settings.read_settings(nvml)) if c.state is State.BAD
    ]
    assert found.device == "gpu 1" and "was 700000 and is 500000" in found.text
    assert settings.compare_settings({}, {})[0].state is State.NOT_CHECKED


def test_a_rate_is_bad_against_a_known_figure_and_never_good_without_one() -> None:
    h200 = find_expected("NVIDIA H200")
    assert judge_rate("b", 4.2e12, h200, "gpu 0").state is State.GOOD
    assert judge_rate("b", 2.0e12, h200, "gpu 0").state is State.BAD
    assert judge_rate("b", 2.0e12, find_expected("Some Card"), "gpu 0").state is State.NOT_CHECKED


def test_a_node_with_other_versions_than_most_is_bad_and_a_tie_is_only_told() -> None:
    same = {"driver": "580.1", "torch": "2.11"}
    found = compare_versions({"a": same, "b": same, "c": {**same, "driver": "570.9"}})
    assert not found["a"] and bad(found["c"]) == ["versions"] and "570.9; 2 of 3" in found["c"][0].text
    two = compare_versions({"a": same, "b": {"torch": "2.11"}})
    assert not bad(two["a"]) and not bad(two["b"]) and two["b"][0].state is State.NOT_CHECKED


def test_what_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make files of root's")
    safe = Path("/usr/lib")
    assert find_writable([str(safe)]) is None
    (tmp_path / "x.py").write_text("")
    os.chmod(tmp_path / "x.py", 0o666)
    assert find_writable([str(tmp_path / "x.py")]) == str(tmp_path / "x.py")
    os.chmod(tmp_path / "x.py", 0o644)
    os.chown(tmp_path, 1000, 1000)
    assert find_writable([str(tmp_path / "x.py")]) == str(tmp_path)
