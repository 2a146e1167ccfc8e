"""The quick check of a node: what is explicit is bad, what cannot be read is not checked, and nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unbroken.cli.main import dispatch
from unbroken.detect.node import CheckedNode, CheckResult, State, check_node, quick, whole
from unbroken.detect.node.counters import compare_counters, read_counters
from unbroken.detect.node.files import check_folder
from unbroken.detect.node.gpus import check_gpus
from unbroken.detect.node.kernel import check_kernel_log
from unbroken.detect.node.network import check_network
from unbroken.errors import Exit
from unbroken.testing.nvml import FakeGpu, FakeNvml
from unbroken.units import Bytes


def bad(found: list[CheckResult]) -> dict[tuple[str, str], str]:
    return {(c.name, c.device): c.text for c in found if c.state is State.BAD}


def test_healthy_gpus_are_not_bad_and_each_thing_is_said() -> None:
    found = check_gpus(FakeNvml([FakeGpu(), FakeGpu()]))
    assert not bad(found)
    assert {c.name for c in found} == {"gpu", "ecc", "rows", "clocks", "nvlink"} and len(found) == 10


@pytest.mark.parametrize(
    ("gpu", "name", "says"),
    [
        (FakeGpu(lost=True), "gpu", "does not answer"),
        (FakeGpu(ecc_uncorrected=2), "ecc", "2 uncorrected"),
        (FakeGpu(remap_pending=True), "rows", "reset"),
        (FakeGpu(remap_failed=True), "rows", "replace"),
        (FakeGpu(throttle=0x40), "clocks", "too hot"),
        (FakeGpu(throttle=0x88), "clocks", "power brake"),
        (FakeGpu(links_down=(3,)), "nvlink", "3 are not"),
    ],
)
def test_what_a_gpu_says_of_itself_is_bad_at_that_gpu_alone(gpu: FakeGpu, name: str, says: str) -> None:
    found = bad(check_gpus(FakeNvml([FakeGpu(), gpu])))
    assert list(found) == [(name, "gpu 1")] and says in found[name, "gpu 1"]


def test_errors_of_links_are_said_and_those_that_rise_in_a_test_are_judged(tmp_path: Path) -> None:
    gpu = FakeGpu(nvlink_recoveries=1, nvlink_replays=7)
    nvml = FakeNvml([FakeGpu(), gpu])
    (said,) = (c for c in check_gpus(nvml) if (c.name, c.device) == ("nvlink", "gpu 1"))
    assert said.state is State.GOOD and "7 replays" in said.text and "1 recoveries" in said.text
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "counters/link_downed").write_text("2\n")
    (port / "counters/symbol_error").write_text("40\n")
    (up,) = check_network((), tmp_path)
    assert up.state is State.GOOD and "2 link downed, 40 symbol error" in up.text
    unused = tmp_path / "sys/class/infiniband/mlx5_1/ports/1"
    (unused / "counters").mkdir(parents=True)
    (unused / "state").write_text("1: DOWN\n")
    (unused / "counters/link_downed").write_text("7\n")
    before = read_counters(nvml, tmp_path, up=True)
    (unused / "counters/link_downed").write_text("8\n")
    assert not [
        c for c in compare_counters(before, read_counters(nvml, tmp_path)) if c.state is not State.GOOD
    ]
    assert not [c for c in compare_counters(before, before) if c.state is not State.GOOD]
    gpu.nvlink_replays += 5
    (port / "counters/link_downed").write_text("3\n")
    found = compare_counters(before, read_counters(nvml, tmp_path))
    assert bad(found) == {("network errors", "mlx5_0/1"): "while it was tested: 1 link downed"}
    assert ("nvlink errors", "gpu 1", "while it was tested: 5 replays") in {
        (c.name, c.device, c.text) for c in found
    }
    gpu.nvlink_recoveries += 1
    assert ("nvlink errors", "gpu 1") in bad(compare_counters(before, read_counters(nvml, tmp_path)))


def test_power_capping_and_idle_clocks_are_no_fault() -> None:
    assert not bad(check_gpus(FakeNvml([FakeGpu(throttle=0x01 | 0x04)])))


def test_what_a_driver_does_not_say_is_not_checked_and_never_good() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetRemappedRows = property()  # type: ignore[assignment]

    states = {c.name: c.state for c in check_gpus(Old([FakeGpu(links=0)]))}
    assert states["rows"] is State.NOT_CHECKED and states["nvlink"] is State.NOT_CHECKED
    (none,) = check_gpus(None, "no driver")
    assert none.state is State.NOT_CHECKED and none.text == "no driver"


def test_the_kernels_log_is_read_for_what_needs_a_reset(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    lines = [
        f"4,1,{int((now - 60) * 1e6)},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        f"4,2,{int((now - 30) * 1e6)},-;NVRM: Xid (PCI:0000:5e:00): 13, Graphics Exception",
        f"4,3,{int((now - 90000) * 1e6)},-;NVRM: Xid (PCI:0000:86:00): 48, an old one",
    ]
    log.write_text("\n".join(lines) + "\n")
    found = check_kernel_log(str(log))
    if now > 90000:
        assert [c.device for c in found] == ["0000:3b:00"]
    assert ("xid", "0000:3b:00") in bad(found) and ("xid", "0000:5e:00") not in bad(found)
    log.write_text("")
    assert check_kernel_log(str(log))[0].state is State.GOOD
    assert check_kernel_log(str(tmp_path / "none"))[0].state is State.NOT_CHECKED


def test_a_folder_that_takes_no_bytes_or_has_no_room_is_bad(tmp_path: Path) -> None:
    assert check_folder(tmp_path).state is State.GOOD
    assert check_folder(tmp_path / "none").state is State.BAD
    assert check_folder(tmp_path, Bytes(1 << 60)).state is State.BAD
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_only_what_is_expected_to_be_up_is_bad_when_it_is_not(tmp_path: Path) -> None:
    for name, state in (("eth0", "up"), ("eth1", "down")):
        folder = tmp_path / "sys/class/net" / name
        (folder / "device").mkdir(parents=True)
        (folder / "operstate").write_text(state + "\n")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    states = {c.device: c.state for c in check_network((), tmp_path)}
    assert states == {"eth0": State.GOOD, "eth1": State.NOT_CHECKED, "mlx5_0/1": State.NOT_CHECKED}
    assert bad(check_network(["eth1", "mlx5_0/1", "eth7"], tmp_path)).keys() == {
        ("network", "eth1"), ("network", "mlx5_0/1"), ("network", "eth7"),
    }  # fmt: skip


def test_a_file_system_that_does_not_answer_holds_up_no_other_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang(folder: Path) -> CheckResult:
        time.sleep(3)
        return CheckResult("folder", State.GOOD, "", str(folder))

    monkeypatch.setattr(quick, "check_folder", hang)
    began = time.monotonic()
    found = check_node(CheckedNode(folders=[tmp_path], kernel_log=str(tmp_path / "none")), 0.3)
    assert time.monotonic() - began < 2.5
    assert bad(found) == {("folder", str(tmp_path)): "no answer within 0.3 s"}
    assert {c.name for c in found} >= {"gpus", "kernel log", "shared memory"}


def test_a_check_that_breaks_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[CheckResult]:
        raise RuntimeError("a defect")

    monkeypatch.setattr(quick, "check_gpus", fail)
    states = {c.name: (c.state, c.text) for c in check_node(CheckedNode())}
    assert states["gpus"] == (State.NOT_CHECKED, "RuntimeError: a defect")


def test_the_command_says_all_and_its_exit_code_says_whether_something_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(whole, "open_nvml", lambda: (FakeNvml([FakeGpu()]), ""))
    assert dispatch(["check", "--json", "--folder", str(tmp_path)]) in (Exit.OK, Exit.CHECK_FOUND_FAULT)
    said = json.loads(capsys.readouterr().out)
    assert {"name": "folder", "state": "good", "device": str(tmp_path)}.items() <= next(
        c for c in said["checks"] if c["name"] == "folder"
    ).items()
    monkeypatch.setattr(whole, "open_nvml", lambda: (FakeNvml([FakeGpu(ecc_uncorrected=1)]), ""))
    assert dispatch(["check", "--json"]) == Exit.CHECK_FOUND_FAULT == 26
    assert json.loads(capsys.readouterr().out)["fit"] is False
    assert dispatch(["check"]) == 26 and "uncorrected memory error" in capsys.readouterr().out


def test_root_does_not_check_with_code_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert dispatch(["check"]) == 2 and "PYTHONPATH" in capsys.readouterr().err


def test_a_gpu_that_hangs_in_its_driver_holds_up_no_end_and_nothing_else_is_cut_short() -> None:
    program = (
        "import threading, sys; from unbroken.detect.node.result import GPU_CHECK; from unbroken.detect.node.whole import leave\n"
        "threading.Thread(target=threading.Event().wait, name={name}).start(); print('told'); leave(26); print('on'); sys.stdout.flush()\n"
        "import os; os._exit(0)"
    )
    for name, code, said in (("GPU_CHECK", 26, "told\n"), ("'a folder'", 0, "told\non\n")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(name=name)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (code, said), done.stderr
