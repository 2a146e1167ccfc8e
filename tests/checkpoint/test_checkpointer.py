"""The Checkpointer as a training uses it, alone on its node, with a keeper that it starts by itself.

Long because all of it shares one small training and the ways to look at what came back.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.keepers import alive, keeper_pid, until
from unbroken import Checkpointer
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.client.buffers import Device
from unbroken.checkpoint.client.links import KeeperGone
from unbroken.checkpoint.device.staging import CpuStager
from unbroken.checkpoint.format.manifest import MANIFEST, Manifest
from unbroken.checkpoint.storage import open_storage
from unbroken.errors import (
    CheckpointError,
    LayoutMismatch,
    NoCheckpoint,
    NotDurable,
    StorageError,
    UnsaveableState,
    UsageError,
)


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
    }


def one_step(state: dict[str, Any]) -> float:
    state["optimizer"].zero_grad()
    loss = (state["model"](torch.randn(4, 8)) * random.random() * np.random.rand()).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    return float(loss)


def bits(state: dict[str, Any]) -> list[bytes]:
    tensors = [*state["model"].state_dict().values()]
    for entry in state["optimizer"].state_dict()["state"].values():
        tensors += entry.values()
    return [t.detach().numpy().tobytes() for t in tensors]


def checkpointer(tmp_path: Path, **options: Any) -> Checkpointer:
    return Checkpointer(
        tmp_path / "c", **{"memory": "64MiB", "snapshot_every": 1, "persist_every": 2, **options}
    )


@pytest.mark.parametrize("lose_memory", [False, True])
def test_a_resumed_training_goes_on_bit_for_bit(own_keepers: Path, tmp_path: Path, lose_memory: bool) -> None:
    state = training()
    first = checkpointer(tmp_path)
    assert first.restore(state) is None
    for step in range(1, 5):
        one_step(state)
        if first.due(step):
            first.save(step, state, position={"samples": [[0, 4 * step]]})
    first.wait("disk")
    undisturbed = [one_step(state) for _ in range(3)]
    if lose_memory:
        os.kill(keeper_pid(own_keepers), signal.SIGKILL)
        first.memory.closing = True
    first.memory.link.disconnect()  # as if killed: no goodbye
    first._closed = True

    other = training(seed=1)
    second = checkpointer(tmp_path)
    restored = second.restore(other)
    assert restored is not None
    assert (restored.step, restored.source) == (4, "disk" if lose_memory else "memory")
    assert restored.position.samples == ((0, 16),)
    assert [one_step(other) for _ in range(3)] == undisturbed
    assert bits(other) == bits(state)
    assert other["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"]
    saved = second.save(8, other, persist=True)
    saved.wait("disk")
    second.close()
    found = {
        m.step: m.went_on
        for p in (tmp_path / "c").glob(f"step-*/{MANIFEST}")
        for m in [Manifest.decode(p.read_bytes(), where=str(p))]
    }
    assert found == {2: None, 4: None, 8: (restored.attempt, 4)}, "each says what its attempt had restored"


def test_a_save_without_room_in_memory_says_what_its_attempt_had_restored_too(
    own_keepers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The training process writes it then."""
    state = {"w": torch.arange(6.0)}
    with checkpointer(tmp_path) as first:
        first.save(2, state, persist=True).wait("disk")
    os.kill(keeper_pid(own_keepers), signal.SIGKILL)
    with checkpointer(tmp_path, memory="4KiB") as second:
        restored = second.restore(state)
        assert restored is not None
        second.save(4, state, persist=True).wait("disk")
    assert "is written by the training process" in caplog.text
    (path,) = (tmp_path / "c").glob(f"step-*4.a*/{MANIFEST}")
    assert Manifest.decode(path.read_bytes(), where=str(path)).went_on == (restored.attempt, 2)


def test_state_is_frozen_at_the_call(own_keepers: Path, tmp_path: Path) -> None:
    """Scenarios 2 and 4: whatever is changed after save() is not in it."""
    loader = {"position": [1, 2, 3]}
    state = {"w": torch.arange(6.0), "loader": loader, "array": np.arange(20_000)}
    c = checkpointer(tmp_path)
    c.save(2, state)
    state["w"].zero_()
    loader["position"].append(4)
    state["array"][:] = 0
    expected_rng = random.getstate()
    random.random()
    c.wait()
    c.restore(state)
    assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert loader == {"position": [1, 2, 3]}
    assert state["array"][-1] == 19_999
    assert random.getstate() == expected_rng
    c.close()


def test_many_kinds_of_values_come_back_as_they_were(own_keepers: Path, tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.ema = torch.ones(3)
            self.n = 0

        def state_dict(self) -> dict[str, Any]:
            return {"ema": self.ema, "n": self.n, "history": (1, 2.5)}

        def load_state_dict(self, d: dict[str, Any]) -> None:
            self.ema, self.n, self.history = d["ema"], d["n"], d["history"]

    counter = Counter()
    state: dict[str, Any] = {
        "t": {str(d): torch.ones(3, 2).to(d) for d in (
            torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64, torch.complex128,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)},
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "strided": torch.arange(12.0).reshape(3, 4).t(),
        "values": {"a": None, "b": True, "nan": float("nan"), "bytes": b"\0\1", "tuple": (1, "x"), "deep": [{"y": []}]},
        "counter": counter, "step": 17,
    }  # fmt: skip
    tied = torch.rand(5)
    state["tied"] = {"x": tied, "y": tied}
    c = checkpointer(tmp_path)
    saved = c.save(2, state)
    saved.wait("disk", 20)
    before = {k: v.clone() for k, v in state["t"].items()}
    strided = state["strided"].clone()
    for t in [*state["t"].values(), state["scalar"], state["strided"], tied]:
        t.zero_()
    counter.ema, counter.n = torch.zeros(1), 9
    state["values"], state["step"] = dict.fromkeys(state["values"]), 0
    c.restore(state)
    for k, v in state["t"].items():
        assert torch.equal(
            v.view(torch.uint8) if v.dtype.itemsize == 1 else v,
            before[k].view(torch.uint8) if v.dtype.itemsize == 1 else before[k],
        ), k
    assert torch.equal(state["strided"], strided) and state["scalar"].item() == 3.5
    assert state["values"]["tuple"] == (1, "x") and state["values"]["bytes"] == b"\0\1"
    assert state["values"]["nan"] != state["values"]["nan"] and state["values"]["deep"] == [{"y": []}]
    assert counter.ema.tolist() == [1, 1, 1] and counter.history == (1, 2.5) and state["step"] == 17
    assert tied.sum() > 0
    c.close()


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"a": {"b": object()}}, "a.b"),
        ({"x": [torch.zeros(2), lambda: 0]}, "x.1"),
        ({"s": torch.eye(3).to_sparse()}, "s"),
        ({"m": torch.empty(3, device="meta")}, "m"),
        ({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, "q"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_refused_by_name(
    own_keepers: Path, tmp_path: Path, bad: dict[str, Any], key: str
) -> None:
    """Scenario 5."""
    c = checkpointer(tmp_path)
    with pytest.raises(UnsaveableState, match=key) as e:
        c.save(1, bad)
    assert e.value.key == key
    c.save(1, {"fine": torch.zeros(2)})  # and training goes on
    c.close()


def test_another_model_is_refused_before_anything_is_changed(own_keepers: Path, tmp_path: Path) -> None:
    c = checkpointer(tmp_path)
    c.save(2, {"a": torch.ones(3), "b": torch.ones(4)})
    c.wait()
    a = torch.zeros(3)
    for other in ({"a": a, "b": torch.zeros(5)}, {"a": a, "c": torch.zeros(4)}, {"a": a}):
        with pytest.raises(LayoutMismatch, match=r"'b'|'c'"):
            c.restore(other)
    with pytest.raises(LayoutMismatch, match="float64"):
        c.restore({"a": a, "b": torch.zeros(4, dtype=torch.float64)})
    assert a.tolist() == [0, 0, 0]
    c.close()


def damage(folder: Path, how: str) -> None:
    data = folder / "rank-00000.safetensors"
    if how == "flip":
        with open(data, "r+b") as f:
            f.seek(-3, 2)
            byte = f.read(1)
            f.seek(-3, 2)
            f.write(bytes([byte[0] ^ 4]))
    elif how == "truncate":
        os.truncate(data, data.stat().st_size - 1)
    elif how == "no marker":
        (folder / "COMMITTED").unlink()
    elif how == "torn part":
        part = folder / "rank-00000.json"
        part.write_bytes(part.read_bytes()[:-20])


@pytest.mark.parametrize("how", ["flip", "truncate", "no marker", "torn part"])
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(
    own_keepers: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenarios 6 and 15."""
    state = {"w": torch.zeros(4)}
    c = checkpointer(tmp_path)
    for step in (2, 4):
        state["w"].fill_(step)
        c.save(step, state)
        c.wait()
    os.kill(keeper_pid(own_keepers), signal.SIGKILL)  # memory is gone
    c.memory.closing = True
    c._closed = True
    damage(tmp_path / "c" / "step-00000004.a0001", how)
    again = checkpointer(tmp_path)
    restored = again.restore(state)
    assert restored is not None and restored.step == 2 and state["w"].tolist() == [2] * 4
    if how != "no marker":
        assert restored.skipped[0][0] == "step-00000004.a0001"
        assert caplog.text.count("passing over step-00000004.a0001") == 1
    damage(tmp_path / "c" / "step-00000002.a0001", how)
    if (
        how != "no marker"
    ):  # checkpoints are there and none is good: starting afresh in silence would lose the run
        with pytest.raises(NoCheckpoint, match="none of them verifies"):
            again.restore(state)
    again.close()


def test_with_keep_1_a_kill_before_the_commit_leaves_the_one_before(
    own_keepers: Path, tmp_path: Path
) -> None:
    """Scenario 6: retention never removes the last one that verifies."""
    state = {"w": torch.zeros(4)}
    c = checkpointer(tmp_path, keep=1)
    for step in (2, 4):
        state["w"].fill_(step)
        c.save(step, state).wait("disk", 30)
    until(lambda: not (tmp_path / "c" / "step-00000002.a0001").exists())
    os.kill(keeper_pid(own_keepers), signal.SIGKILL)
    c.memory.closing = True
    c._closed = True
    folder = tmp_path / "c" / "step-00000006.a0001"  # as a writer leaves it that is killed before the marker
    shutil.copytree(
        tmp_path / "c" / "step-00000004.a0001", folder, ignore=shutil.ignore_patterns("COMMITTED")
    )
    again = checkpointer(tmp_path, keep=1)
    restored = again.restore(state)
    assert restored is not None and restored.step == 4
    again.close()


@pytest.mark.slow
def test_a_compiled_optimizer_step_calls_the_hook() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    called = []
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    optimizer = torch.optim.SGD([p], lr=1.0)
    hook = register_optimizer_step_pre_hook(
        torch._disable_dynamo(lambda *_: called.append(float(p.detach()[0])))
    )
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        step()
    hook.remove()
    assert called == [1.0, 0.0, -1.0]  # each time before the change


TORCHRUN = """
import os, signal, sys, torch, unbroken
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
c = unbroken.Checkpointer(sys.argv[1], snapshot_every=1, persist_every=2, memory="64MiB")
state = {"w": torch.zeros(1000), "n": 0}
restored = c.restore(state)
first = restored.step if restored else 0
assert not restored or bool((state["w"] == 100 * rank + first).all())
# In one piece: without a buffer, print writes the end of the line apart, and the ranks share the pipe.
sys.stdout.write(f"RESTORED {rank} {first} {restored and restored.source} {c.attempt}\\n")
sys.stdout.flush()
for step in range(first + 1, first + 6):
    state["w"].fill_(100 * rank + step)
    c.save(step, state)
if sys.argv[2] == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
c.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plain_torchrun(own_keepers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ranks, no supervisor: killed, started again, and again."""
    monkeypatch.setenv("UNBROKEN_ORPHAN_GRACE", "200")
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    heard = []
    for how in ("kill", "end", "end"):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
             str(tmp_path / "c"), how],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == (how == "end"), done.stderr
        heard.append(
            sorted(line.split()[2:] for line in done.stdout.splitlines() if line.startswith("RESTORED"))
        )
    assert heard[0] == [["0", "None", "1"]] * 2
    assert heard[1][0] == heard[1][1] and heard[1][0][1:] == ["memory", "2"] and int(heard[1][0][0]) >= 4
    assert heard[2][0] == heard[2][1] and heard[2][0][2] == "3"


def test_one_right_after_another(own_keepers: Path, tmp_path: Path) -> None:
    """The keeper of the one is just ending when the next one looks for it."""
    state = {"w": torch.zeros(200_000)}
    for step in range(1, 9):
        c = checkpointer(tmp_path, persist_every=1)
        restored = c.restore(state)
        assert (restored.step if restored else 0) == step - 1
        state["w"].fill_(step)
        c.save(step, state)
        c.close()


class _Numpy(torch.nn.Linear):
    """Its hook looks at the values as a state dict has them: detached."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self._register_state_dict_hook(
            lambda m, sd, prefix, _: sd.update({f"{prefix}sum": sd[f"{prefix}bias"].numpy() * 2})
        )

    def _load_from_state_dict(self, sd: Any, prefix: str, *rest: Any) -> None:
        sd.pop(f"{prefix}sum", None)
        super()._load_from_state_dict(sd, prefix, *rest)


def _own_way() -> torch.nn.Module:
    m = torch.nn.Linear(3, 3)
    m.state_dict = lambda: {"weight": m.weight.detach(), "bias": m.bias.detach()}  # type: ignore[method-assign,assignment,misc]
    return m


@pytest.mark.parametrize("make", [_Numpy, _own_way])
def test_state_dicts_that_want_detached_tensors(own_keepers: Path, tmp_path: Path, make: Any) -> None:
    model = torch.nn.Sequential(make()) if make is _Numpy else make()
    c = checkpointer(tmp_path)
    expected = [p.detach().clone() for p in model.parameters()]
    c.save(1, {"m": model})
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert c.restore({"m": model}) is not None
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))
    c.close()


def test_averages_are_not_taken_for_what_an_optimizer_changes() -> None:
    from unbroken.checkpoint.capture.state import capture

    model = torch.nn.Linear(3, 3)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert capture({"m": model, "a": average, "o": optimizer}).protected == {"m.weight", "m.bias"}


def test_the_keeper_is_killed_and_its_successor_gets_the_snapshots(own_keepers: Path, tmp_path: Path) -> None:
    """Scenario 10: respawned by the rank, re-issued from memory."""
    state = {"w": torch.full((1000,), 7.0)}
    c = checkpointer(tmp_path, persist_every=4)
    c.save(3, state)
    pid = keeper_pid(own_keepers)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    state["w"].fill_(8.0)
    c.save(4, state).wait("disk", 30)
    assert keeper_pid(own_keepers) != pid
    held = {h["step"] for h in c.memory.alive().request({"op": "inventory"})[0]["inventory"]}
    assert held >= {3, 4}
    c.close()


def test_a_keeper_that_is_stopped_is_replaced_and_what_it_had_not_written_is_issued_again(
    own_keepers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 10: SIGSTOP, as a disk in D state would have it. Training is not held up meanwhile."""
    monkeypatch.setattr("unbroken.checkpoint.client.rank_memory.MUTE_AFTER", 2)
    c = checkpointer(tmp_path)
    c.save(1, {"w": torch.zeros(10)})
    until(lambda: c.memory._ahead is not None and c.memory._ahead.buffer is not None)
    os.kill(keeper_pid(own_keepers), signal.SIGSTOP)
    began = time.monotonic()
    saved = c.save(2, {"w": torch.ones(10)})
    assert time.monotonic() - began < 1.0
    assert saved.wait("disk", 30) > 0
    c.close()


def test_a_read_only_folder_is_found_at_the_start(own_keepers: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    with pytest.raises(StorageError, match="c"):
        checkpointer(tmp_path).restore({"w": torch.zeros(1)})


@pytest.mark.parametrize("made_up_for", [False, True])
def test_a_failed_save_never_stops_training_and_close_says_so(
    own_keepers: Path, tmp_path: Path, made_up_for: bool
) -> None:
    """Scenarios 8 and 9."""
    c = checkpointer(tmp_path)
    c.save(2, {"w": torch.zeros(3)}).wait("disk", 20)
    (tmp_path / "c" / "step-00000004.a0001").write_text("in the way")
    saved = c.save(4, {"w": torch.zeros(3)})
    with pytest.raises(StorageError, match="step 4 did not reach disk"):
        saved.wait("disk", 20)
    c.save(5, {"w": torch.zeros(3)})
    if made_up_for:
        c.save(6, {"w": torch.zeros(3)}).wait("disk", 20)
    c.close()  # step 5 was not to be written; now that this is the end, it makes up for step 4
    newest = catalogue.newest(c.storage)
    assert newest is not None and newest.step == (6 if made_up_for else 5)


def test_a_torn_save_is_told_at_the_end_although_a_later_one_is_in_memory(
    own_keepers: Path, tmp_path: Path
) -> None:
    """Trying again is for a storage that refuses: what a rank gave up is a mistake of the script, and is said."""
    c = checkpointer(tmp_path)
    saved = c.save(3, {"w": torch.zeros(3)})
    saved.host.result(20)
    c._open().outcomes.fail(
        saved, "'w' was changed while it was being copied, without wait_for_copies() before"
    )
    c.save(5, {"w": torch.zeros(3)}).host.result(20)
    with pytest.raises(NotDurable, match="step 3"):
        c.close()


def test_a_step_that_is_saved_again_resolves_both_calls(own_keepers: Path, tmp_path: Path) -> None:
    """As a script does that saves when it is due and once more because it was asked to stop."""
    c = checkpointer(tmp_path)
    c.save(1, {"w": torch.zeros(3)})
    early: list[dict[str, Any]] = []
    c.memory._listener = early.append
    first, second = c.save(2, {"w": torch.zeros(3)}), c.save(2, {"w": torch.zeros(3)}, persist=True)
    c.memory._listener = c._open().outcomes.event
    for event in early:
        c._open().outcomes.event(event)
    assert first.wait("disk", 20) > 0
    assert second.wait("disk", 20) > 0
    c.close()


def test_events_that_come_before_anybody_listens_are_not_lost(own_keepers: Path, tmp_path: Path) -> None:
    c = checkpointer(tmp_path)
    memory = c.memory
    memory._listener = None
    for step in (1, 2):
        memory._event({"event": "peer", "attempt": 1, "step": step, "rank": 0})
    heard: list[int] = []
    memory.subscribe(lambda event: heard.append(event["step"]))
    memory._event({"event": "peer", "attempt": 1, "step": 3, "rank": 0})
    assert heard == [1, 2, 3]
    c.close()


def test_a_step_that_is_saved_again_when_it_is_durable_is_durable(own_keepers: Path, tmp_path: Path) -> None:
    c = checkpointer(tmp_path)
    c.save(2, {"w": torch.zeros(3)}).wait("disk", 20)
    assert c.save(2, {"w": torch.zeros(3)}).wait("disk", 20) < 20
    c.close()


def test_a_step_that_failed_on_another_rank_before_it_is_saved_here_has_failed(
    own_keepers: Path, tmp_path: Path
) -> None:
    """On a full disk the first of the ranks fails at once; the keeper does not say so again to those behind."""
    c = checkpointer(tmp_path)
    c.save(1, {"w": torch.zeros(3)})
    c.memory.link.request({"op": "give_up", "step": 2, "why": "No space left", "world_size": 1})
    until(lambda: bool(c._open().outcomes._recent_events))
    with pytest.raises(StorageError, match="No space left"):
        c.save(2, {"w": torch.zeros(3)}).wait("disk", 20)
    with pytest.raises(NotDurable, match="step 2: rank 0: No space left"):
        c.close(20)


def test_saves_of_two_threads_come_one_after_the_other(
    own_keepers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = checkpointer(tmp_path)
    c.save(1, {"w": torch.zeros(3)})
    claim, gate, met = c.memory.claim, threading.Barrier(2), []

    def claim_together(size: int, timeout_s: float) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(gate.wait(1.0))
        return claim(size, timeout_s)

    monkeypatch.setattr(c.memory, "claim", claim_together)
    with ThreadPoolExecutor(2) as pool:
        for saved in pool.map(lambda step: c.save(step, {"w": torch.zeros(3)}), (3, 5)):
            assert saved.wait("host", 20) > 0
    c.close()
    assert not met


class NoGpu:
    """Stands for the registration of memory with a GPU."""

    bytes, registered_s = 0, 0.0

    def __init__(self) -> None:
        self.seen: list[int] = []

    def begin(self, buffers: Any) -> None:
        self.seen += [s.id for s in buffers]

    def ensure(self, buffer: Any) -> None:
        self.seen.append(buffer.id)
        buffer.ready.wait(10)

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("lose_memory", [False, True])
def test_a_gpus_state_comes_through_a_registered_buffer(
    own_keepers: Path, tmp_path: Path, lose_memory: bool
) -> None:
    state = {"w": torch.full((3000,), 5.0)}
    c = checkpointer(tmp_path)
    c.save(2, state)
    c.wait()
    c.memory.closing = True
    if lose_memory:
        os.kill(keeper_pid(own_keepers), signal.SIGKILL)
    c.memory.link.disconnect()
    c._closed = True
    again = checkpointer(tmp_path)
    again._open().buffers.device = Device(CpuStager(), NoGpu())  # type: ignore[arg-type]
    state["w"].zero_()
    restored = again.restore(state)
    assert restored is not None and restored.source == ("disk" if lose_memory else "memory")
    assert bool((state["w"] == 5).all())
    for step in range(3, 9):  # no buffer was lost to the reading
        assert again.save(step, state).skipped is None
    assert len(again.memory.buffers) == 3
    again.close()


def test_memory_that_cannot_be_registered_makes_saves_slow_and_ends_no_training(
    own_keepers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(NoGpu):
        def ensure(self, buffer: Any) -> None:
            raise CheckpointError("CUDA cannot register 64 MiB of host memory (error 2): copies will be slow")

    c = checkpointer(tmp_path)
    c._open().buffers.device = Device(CpuStager(), Refusing())  # type: ignore[arg-type]
    for step in range(2, 12, 2):  # more than there are buffers
        assert c.save(step, {"w": torch.full((3000,), float(step))}).wait("disk", 20) < 20
    assert caplog.text.count("copies will be slow") == 1
    c.close()


def test_settings_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (
        {"snapshot_every": 0},
        {"persist_every": True},
        {"keep": -1},
        {"when_busy": "hope"},
        {"memory": "much"},
    ):
        with pytest.raises(UsageError):
            Checkpointer(tmp_path, **bad)  # type: ignore[arg-type]
    monkeypatch.delenv("UNBROKEN_RUN_DIR", raising=False)
    with pytest.raises(UsageError, match="no folder"):
        Checkpointer()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="no process group"):
        Checkpointer(tmp_path).restore({})


def test_fifty_saves_leave_memory_and_descriptors_flat(own_keepers: Path, tmp_path: Path) -> None:
    """Scenario 11."""
    state = {f"t{i}": torch.zeros(64) for i in range(300)}
    c = checkpointer(tmp_path, persist_every=10)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for step in range(1, 11):
        c.save(step, state)
    c.wait()
    before = descriptors()
    for step in range(11, 61):
        c.save(step, state)
    c.wait()
    assert descriptors() <= before
    assert len(c._open().outcomes._saves) < 15
    c.close()


SCRIPT = """
import sys, torch, unbroken
c = unbroken.Checkpointer(sys.argv[1], snapshot_every=1, persist_every=2, memory="32MiB", wait_for_room="2s")
state = {"w": torch.ones(5)}
c.restore(state)
c.save(2, state)
if sys.argv[2] == "block":
    import pathlib; pathlib.Path(sys.argv[1], "step-00000004.a0001").write_text("in the way")
    c.save(4, state)
if sys.argv[2] == "crash":
    import os, signal, time
    while c.memory._ahead is None or c.memory._ahead.buffer is None:
        time.sleep(0.01)
    os.kill(int(c.memory.link.info["pid"]), signal.SIGSTOP)  # nothing becomes durable now
    c.save(4, state)
    raise RuntimeError("a bug of the user's")
if sys.argv[2] == "kill":
    c.save(3, state)
    import os, signal; os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("end", 0, marks=pytest.mark.slow),
        pytest.param("block", 35, marks=pytest.mark.slow),
        pytest.param("kill", -9, marks=pytest.mark.slow),
        ("crash", 1),
    ],
)
def test_the_exit_code_says_whether_all_is_durable(
    own_keepers: Path, tmp_path: Path, how: str, code: int
) -> None:
    """Scenarios 8 and 14: no close() at all, or killed; what was taken becomes durable."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "c"), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    if how == "crash":
        assert "a bug of the user's" in done.stderr
        return
    storage = open_storage(tmp_path / "c")
    until(lambda: "step-00000002.a0001" in [f.name for f in catalogue.listing(storage) if f.committed])
    if how == "kill":  # nobody asked for step 3 on disk, but it is the last thing there is of this run
        until(
            lambda: "step-00000003.a0001" in [f.name for f in catalogue.listing(storage) if f.committed], 20
        )
    if how == "block":
        assert "step 4" in done.stderr


def test_a_checkpointer_whose_attempt_is_over_is_told_once_and_looks_for_no_other_keeper(
    own_keepers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpointer(tmp_path)
    first.save(1, training()).host.result(30)
    second = checkpointer(tmp_path)
    second.save(2, training()).host.result(30)

    def refusals() -> int:
        return sum("refuses this process" in r.getMessage() for r in caplog.records)

    until(refusals)
    until(lambda: not any(t.name == "unbroken-reconnect" for t in threading.enumerate()) or refusals() > 3)
    assert refusals() == 1
    with pytest.raises(CheckpointError, match="attempt 1 is over"):
        first.save(3, training()).host.result(30)
    second.close(), first.close()


def test_a_save_whose_keeper_is_given_up_between_its_buffer_and_its_beginning_is_not_waited_for(
    own_keepers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = checkpointer(tmp_path)
    c.save(1, training()).host.result(30)
    buffers = c._open().buffers
    claim = buffers.claim

    def claim_then_lose(*of: Any) -> Any:
        buffer = claim(*of)
        c.memory._give_up(KeeperGone("no keeper came"))
        return buffer

    monkeypatch.setattr(buffers, "claim", claim_then_lose)
    saved = c.save(2, training(), persist=True)
    with pytest.raises(StorageError, match="no keeper came"):
        saved.wait("disk", 5)
    with pytest.raises(NotDurable, match="step 2"):
        c.close()
