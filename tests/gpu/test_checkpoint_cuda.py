"""Snapshots of GPU state, on a GPU: what is saved is the state at the call, whatever runs before, during and after."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from tests.support.keepers import keeper_pid, until  # noqa: E402
from unbroken import Checkpointer  # noqa: E402
from unbroken.checkpoint.client.links import KeeperLink  # noqa: E402
from unbroken.errors import CheckpointError  # noqa: E402

pytestmark = pytest.mark.gpu
N = 64 << 20  # elements: 256 MiB, more than a piece of registered memory; it takes the bus about 5 ms


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ub-"))
    monkeypatch.setenv("UNBROKEN_SCRATCH", str(folder))
    monkeypatch.setenv("UNBROKEN_ORPHAN_GRACE", "5")
    yield folder
    for socket in folder.glob("*/*/keeper.sock"):
        with contextlib.suppress(CheckpointError, OSError):
            link = KeeperLink(socket, {"role": "visitor"}, timeout_s=2.0)
            os.kill(int(link.info["pid"]), signal.SIGKILL)
            link.disconnect()
    shutil.rmtree(folder, ignore_errors=True)


def checkpointer(tmp_path: Path, **options: Any) -> Checkpointer:
    return Checkpointer(
        tmp_path / "c", memory="8GiB", **{"snapshot_every": 1, "persist_every": 1000, **options}
    )


def spin(ms: int) -> None:
    torch.cuda._sleep(int(ms * 1.7e6))


def stager(c: Checkpointer) -> Any:
    """What copies its state."""
    return c._opened().buffers.device.stager


def pinning(c: Checkpointer) -> Any:
    """What registers its buffers; None before the first state on the GPU."""
    return c._opened().buffers.device.pinning


def prepared(tmp_path: Path, state: dict[str, Any], **options: Any) -> Checkpointer:
    """With its buffers registered, so that copies are truly behind the trainer's back."""
    c = checkpointer(tmp_path, **options)
    c.save(1, state).host.result(60)
    c.save(2, state).host.result(60)
    c.save(3, state).host.result(60)
    assert pinning(c) is not None
    for buffer in list(c.memory.buffers.values()):
        pinning(c).ensure(buffer)
    return c


def test_a_long_kernel_is_queued_then_step_then_save(scratch: Path, tmp_path: Path) -> None:
    """Scenario 1: the snapshot is the state at the call, and the call waits for nothing."""
    w = torch.nn.Parameter(torch.zeros(N, device="cuda"))
    optimizer = torch.optim.SGD([w], lr=1.0)
    w.grad = torch.full_like(w, -1.0)
    state = {"w": w, "o": optimizer}
    c = prepared(tmp_path, state)
    torch.cuda.synchronize()
    spin(300)
    optimizer.step()  # w becomes 1, after the kernel
    began = time.monotonic()
    saved = c.save(4, state)
    called = time.monotonic() - began
    optimizer.step()  # w becomes 2, after the copy
    optimizer.step()
    assert called < 0.1, "the call waited for the GPU"
    saved.host.result(60)
    torch.cuda.synchronize()
    assert w[0].item() == 3 and w[-1].item() == 3
    c.restore(state)
    assert bool((w == 1).all())
    c.close()


@pytest.mark.parametrize("kind", ["foreach", "fused", "for"])
def test_the_optimizer_waits_for_the_copy_on_the_stream(scratch: Path, tmp_path: Path, kind: str) -> None:
    """Scenario 2: the old values are saved, for every kind of optimizer step."""
    torch.manual_seed(0)
    w = [torch.nn.Parameter(torch.randn(N // 4, device="cuda")) for _ in range(4)]
    optimizer = torch.optim.AdamW(w, lr=0.1, foreach=kind == "foreach", fused=kind == "fused")
    for p in w:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = {"w": dict(enumerate(w)) and {str(i): p for i, p in enumerate(w)}, "o": optimizer}
    c = prepared(tmp_path, state)
    before = [p.detach().clone() for p in w]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in w]
    saved = c.save(9, state)
    optimizer.step()
    saved.host.result(60)
    c.restore(state)
    assert all(torch.equal(a, b) for a, b in zip(before, w, strict=True))
    assert all(torch.equal(m, optimizer.state[p]["exp_avg"]) for m, p in zip(moments, w, strict=True))
    c.close()


def test_state_that_no_optimizer_changes_is_cloned_at_the_call(scratch: Path, tmp_path: Path) -> None:
    """EMA, buffers, fp8 scales: changed at once after save(), without a fence."""
    model = torch.nn.BatchNorm1d(1 << 20, device="cuda")
    ema = {"w": torch.ones(N, device="cuda")}
    state = {"model": model, "ema": ema}
    c = prepared(tmp_path, state)
    saved = c.save(5, state)
    ema["w"].mul_(0)
    model.running_mean.fill_(5)
    saved.host.result(60)
    c.restore(state)
    assert bool((ema["w"] == 1).all()) and bool((model.running_mean == 0).all())
    c.close()


def test_a_change_without_a_fence_is_noticed_and_the_snapshot_never_counts(
    scratch: Path, tmp_path: Path
) -> None:
    w = torch.nn.Parameter(torch.zeros(N, device="cuda"))
    state = {"m": torch.nn.ParameterList([w])}
    c = prepared(tmp_path, state)
    saved = c.save(5, state)
    with torch.no_grad():
        w.add_(1)  # behind everyone's back
    with pytest.raises(Exception, match="without wait_for_copies"):
        saved.host.result(60)
    c.wait_for_copies()
    with torch.no_grad():
        w.add_(1)
    c.save(6, state).host.result(60)
    with pytest.raises(CheckpointError, match="step 5"):
        c.close()


def test_capture_without_a_fence_is_an_error_and_with_it_replays_are_safe(
    scratch: Path, tmp_path: Path
) -> None:
    w = torch.nn.Parameter(torch.zeros(N, device="cuda"))
    optimizer = torch.optim.SGD([w], lr=1.0, foreach=True)
    w.grad = torch.full_like(w, -1.0)
    state = {"w": w, "o": optimizer}
    c = prepared(tmp_path, state)
    optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CheckpointError, match="captured in a CUDA graph"), torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()
    c.wait_for_copies()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    start = float(w[0])
    saved = c.save(7, state)
    c.wait_for_copies()
    graph.replay()
    graph.replay()
    saved.host.result(60)
    torch.cuda.synchronize()
    assert float(w[0]) == start + 2
    c.restore(state)
    assert bool((w == start).all())
    c.close()


def test_graphs_can_be_captured_while_buffers_are_registered_and_copies_run(
    scratch: Path, tmp_path: Path
) -> None:
    """In torch's default mode a call of another thread would end the capture."""

    def capture(seconds: float) -> None:
        x = torch.ones(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            time.sleep(seconds)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((y == 2).all())

    w = torch.full((N,), 3.0, device="cuda")
    state = {"w": w}
    c = checkpointer(tmp_path, throttle="100MB")
    assert c.restore(state) is None  # begins to register three buffers
    capture(0.5)
    c.save(1, state).host.result(60)
    saved = c.save(2, state)
    capture(1.5)
    saved.host.result(60)
    w.zero_()
    c.restore(state)
    assert bool((w == 3).all())
    c.close()


def test_an_optimizer_in_backward_fences_itself(scratch: Path, tmp_path: Path) -> None:
    layers = [torch.nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

    def update(p: Any) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    state = {"model": model}
    c = prepared(tmp_path, state)
    before = [p.detach().clone() for p in model.parameters()]
    saved = c.save(5, state)
    model(torch.randn(8, 4096, device="cuda")).square().mean().backward()
    saved.host.result(60)
    assert not torch.equal(before[0], layers[0].weight)
    c.restore(state)
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    c.close()


@pytest.mark.parametrize("options", [{"device_copy": True}, {"throttle": "2GiB"}])
def test_device_copy_and_throttle_give_the_same_bytes(
    scratch: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    w = torch.nn.Parameter(torch.randn(N, device="cuda"))
    h = torch.nn.Parameter(torch.randn(3, 1000, 7, device="cuda").transpose(0, 2))
    optimizer = torch.optim.SGD([w, h], lr=1.0)
    w.grad, h.grad = torch.ones_like(w), torch.ones_like(h)
    state = {"w": w, "h": h, "o": optimizer}
    c = prepared(tmp_path, state, **options)
    before = w.detach().clone(), h.detach().clone()
    saved = c.save(5, state)
    optimizer.step()
    saved.host.result(60)
    if "device_copy" in options:
        assert stager(c).last.device_copy
    c.restore(state)
    assert torch.equal(w, before[0]) and torch.equal(h, before[1])
    c.close()


@pytest.mark.parametrize("device_copy", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8", "int16", "float8_e4m3fn"])
def test_every_pattern_of_bits_comes_back_where_all_tensors_are_of_one_type(
    scratch: Path, tmp_path: Path, device_copy: bool, dtype: str
) -> None:
    """NaNs with a payload too, which stand where packed weights are kept as 16-bit floats."""
    kind = getattr(torch, dtype)
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16)
    state = {"a": bits.view(kind).clone(), "b": bits.flip(0).contiguous().view(kind).clone()}
    due = {n: t.view(torch.uint8).clone() for n, t in state.items()}
    c = prepared(tmp_path, state, device_copy=device_copy, fenced=True)
    saved = c.save(5, state)
    c.wait_for_copies()
    saved.host.result(60)
    for t in state.values():
        t.view(torch.uint8).zero_()
    c.restore(state)
    assert all(torch.equal(t.view(torch.uint8), due[n]) for n, t in state.items())
    c.close()


def test_a_window_that_is_too_short_is_measured_and_the_next_copy_goes_over_the_device(
    scratch: Path, tmp_path: Path
) -> None:
    w = torch.nn.Parameter(torch.randn(8 * N, device="cuda"))
    optimizer = torch.optim.SGD([w], lr=1.0)
    w.grad = torch.ones_like(w)
    state = {"w": w, "o": optimizer}
    c = prepared(tmp_path, state)
    choice = stager(c)._on_device.choice
    for step in (4, 5, 6, 7):  # twice of three times: once may be chance
        saved = c.save(step, state)
        optimizer.step()
        saved.host.result(60)
        until(lambda: not stager(c)._pending)
        if step < 6:
            assert stager(c).last.stall_s > 0.005 and not stager(c).last.device_copy
        if step == 5:
            assert 0 < choice.cost_s < choice.usual_s  # estimated
        if step >= 6:
            assert stager(c).last.device_copy and stager(c).last.stall_s == 0
            assert choice.usual_s > 0.005  # what it would have been
            assert 0 < choice.cost_s < choice.usual_s  # measured
    choice.cost_s = 2 * choice.usual_s
    saved = c.save(8, state)
    optimizer.step()
    saved.host.result(60)
    assert not stager(c).last.device_copy and stager(c)._on_device._scratch is None
    c.close()


def test_tensors_of_many_types_sizes_and_places_are_copied_on_the_device_as_they_are(
    scratch: Path, tmp_path: Path
) -> None:
    state: dict[str, Any] = {
        f"s{n}": torch.arange(200, dtype=torch.uint8, device="cuda")[n : n + size]
        for n, size in ((1, 8), (3, 64), (8, 16), (16, 7), (5, 1))
    }
    state |= {
        f"r{n}": torch.randn(n, 3, device="cuda").to(kind)
        for n, kind in ((2, torch.float64), (5, torch.float16), (7, torch.bfloat16))
    }
    state |= {
        "none": torch.empty(0, 4, device="cuda"),
        "c": torch.randn(5, dtype=torch.complex64, device="cuda").conj(),
    }
    due = {n: t.clone() for n, t in state.items()}
    c = prepared(tmp_path, state, device_copy=True, fenced=True)
    for step in (5, 6):
        saved = c.save(step, state)
        c.wait_for_copies()
        saved.host.result(60)
        assert stager(c).last.device_copy
    for t in state.values():
        t.zero_()
    c.restore(state)
    assert all(torch.equal(t, due[n]) for n, t in state.items())
    c.close()


def test_fp8_and_odd_types_come_back_bit_for_bit(scratch: Path, tmp_path: Path) -> None:
    """Scenario 5."""
    raw = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, device="cuda")
    state: dict[str, Any] = {
        "e4": raw.clone().view(torch.float8_e4m3fn), "e5": raw.clone().view(torch.float8_e5m2),
        "bf": raw.clone().view(torch.bfloat16), "c": torch.randn(99, dtype=torch.complex64, device="cuda"),
        "z": torch.randn(3, dtype=torch.complex128, device="cuda"), "b": raw[:7] > 100, "s": torch.tensor(3.0, device="cuda"),
    }  # fmt: skip
    c = checkpointer(tmp_path)
    saved = c.save(1, state)
    kept = {k: v.clone() for k, v in state.items()}
    for v in state.values():
        v.view(torch.uint8).zero_() if v.dtype.itemsize == 1 else v.zero_()
    saved.host.result(60)
    c.restore(state)
    for k, v in state.items():
        a, b = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (v, kept[k]))
        assert torch.equal(
            a.view(torch.int16) if k == "bf" else a, b.view(torch.int16) if k == "bf" else b
        ), k
    c.close()


def test_a_resumed_training_gives_the_same_loss_bit_for_bit(scratch: Path, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Dropout(), torch.nn.Linear(512, 256)
        ).cuda()
        return {"model": model, "o": torch.optim.AdamW(model.parameters(), fused=True)}

    def step(s: dict[str, Any]) -> float:
        loss = s["model"](torch.randn(32, 256, device="cuda")).square().mean()
        s["o"].zero_grad()
        loss.backward()
        s["o"].step()
        return float(loss)

    state = make(0)
    c = checkpointer(tmp_path)
    assert c.restore(state) is None
    for i in range(1, 6):
        step(state)
        c.save(i, state)
    c.wait("host")
    undisturbed = [step(state) for _ in range(4)]
    c.memory.closing = True
    c.memory.link.disconnect()
    c._closed = True
    other = make(1)
    again = checkpointer(tmp_path)
    assert again.restore(other).source == "memory"
    assert [step(other) for _ in range(4)] == undisturbed
    again.close()


def test_fsdp2_shards_are_saved_and_restored(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    for k, v in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(k, v)
    dist.init_process_group("nccl")
    try:

        def make(seed: int) -> dict[str, Any]:
            torch.manual_seed(seed)
            model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)]).cuda()
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            return {"model": model, "o": torch.optim.AdamW(model.parameters(), lr=0.01)}

        def step(s: dict[str, Any]) -> float:
            loss = s["model"](torch.ones(8, 512, device="cuda")).square().mean()
            loss.backward()
            s["o"].step()
            s["o"].zero_grad()
            return float(loss)

        state = make(0)
        c = checkpointer(tmp_path, persist_every=2)
        c.restore(state)
        step(state), step(state)
        saved = c.save(2, state)
        undisturbed = [step(state) for _ in range(3)]
        saved.wait("disk", 60)
        os.kill(keeper_pid(scratch), signal.SIGKILL)
        c.memory.closing = True
        c._closed = True
        other = make(1)
        again = checkpointer(tmp_path)
        assert again.restore(other).source == "disk"
        assert [step(other) for _ in range(3)] == undisturbed
        again.close()
    finally:
        dist.destroy_process_group()


def test_fifty_saves_leave_memory_and_descriptors_flat(scratch: Path, tmp_path: Path) -> None:
    """Scenario 11, with registered buffers: of the trainer and of its keeper, and nothing more on the GPU."""
    w = torch.nn.Parameter(torch.randn(N, device="cuda"))
    optimizer = torch.optim.AdamW([w], lr=1e-3)
    state = {"w": w, "o": optimizer}
    c = checkpointer(tmp_path, persist_every=2)

    def step(number: int) -> None:
        w.grad = torch.full_like(w, 1e-3)
        optimizer.step()
        c.save(number, state).host.result(60)

    def held() -> tuple[int, int, int]:
        pids = (os.getpid(), keeper_pid(scratch))
        rollup = [Path(f"/proc/{p}/smaps_rollup").read_text() for p in pids]
        # Not what is mapped from files: the share of torch's libraries changes with every other process of the machine.
        own = ("Pss_Anon:", "Pss_Shmem:")
        pss = sum(
            int(line.split()[1]) for text in rollup for line in text.splitlines() if line.startswith(own)
        )
        return pss, sum(len(os.listdir(f"/proc/{p}/fd")) for p in pids), torch.cuda.memory_reserved()

    for number in range(1, 13):  # each of the three buffers has been filled and written
        step(number)
    c.wait()
    rows = []
    for number in range(13, 63):
        step(number)
        if number % 10 == 0:
            c.wait()
            rows.append(held())
    c.close()
    kib, descriptors, reserved = zip(*rows, strict=True)
    assert max(kib) - min(kib) < 32 * 1024, kib  # of 2.3 GB
    assert max(descriptors) == min(descriptors), descriptors
    assert max(reserved) == min(reserved), reserved
