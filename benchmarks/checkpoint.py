"""What a checkpoint costs a training: ours and the peers, interleaved in one run, on a CPU or on 1 to N GPUs.

    python benchmarks/checkpoint.py                                   # a GPU if there is one, else small on the CPU
    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --model 7b   # FSDP2
    python benchmarks/checkpoint.py --arms dcp_process --out r.json         # blocks that --out has already are left out

*Excess* of a checkpoint: wall time from the call of save to the end of the step in which it is durable, minus the time
of as many undisturbed steps, of the windows right before and right after it. It is one stretch of the clock, so it counts
the call, every wait and the slow-down. Each step is waited for on the training's own stream, as reading a loss does.
Peers that torch does not bring are left out, with the reason, where they are not installed: torch_checkpointing,
nvidia-resiliency-ext, dlrover (with grpcio, deprecated).
Long because every peer is a contender of its own here, so that all meet the same training in the same run.
Every block (a contender) begins and ends with an undisturbed window of its own; the first save of a contender is told apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import multiprocessing
import os
import platform
import shutil
import signal
import statistics as st
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import describe_machine
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

SETTLE = 3
"""Steps before each save that are not looked at: after a pause a GPU is faster than otherwise for a moment."""
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# name: (width, layers, heads, vocabulary, sequence, batch, accumulation)
MODELS = {
    "tiny": (256, 4, 4, 4096, 128, 4, 1),
    "small": (512, 8, 8, 8192, 256, 4, 1),
    "1b": (2560, 10, 20, 32000, 2048, 4, 4),
    "2b": (2560, 24, 20, 32000, 2048, 4, 1),
    "7b": (4096, 33, 32, 32000, 4096, 2, 1),
}


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, d: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = (
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                if self.training and len(self.blocks) > 30
                else block(x)
            )
        return self.head(x)


@dataclass
class Training:
    """A training whose steps are waited for one by one."""

    device: torch.device
    size: tuple[int, ...]
    before_update: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        d, layers, heads, vocabulary, *_ = self.size
        torch.manual_seed(0)
        if WORLD > 1:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            with torch.device("meta"):
                self.model = Model(d, layers, heads, vocabulary)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in self.model.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(self.model, mp_policy=policy)
            self.model.to_empty(device=self.device)
            for p in self.model.parameters():
                nn.init.normal_(p, std=0.02)
        else:
            with self.device:
                self.model = Model(d, layers, heads, vocabulary)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device.type == "cuda")

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dicts(self) -> dict[str, Any]:
        """As a script that calls torch.save has it."""
        return {k: v.state_dict() for k, v in self.state.items()}

    def bytes(self) -> int:
        """Of this rank's share of parameters and optimizer state."""
        local = [getattr(p, "_local_tensor", p) for p in self.model.parameters()]
        return sum(p.numel() * p.element_size() for p in local) * 3

    def wait(self) -> None:
        """For all that the device has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def wait_for_step(self) -> None:
        """For what was asked of the training's own stream, as reading the loss does. A wait for the whole device would
        wait for every copy that is meant to run beside the steps, ours and the peers'."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def step(self) -> None:
        *_, vocabulary, length, batch, accumulation = self.size
        for _ in range(accumulation):
            x = torch.randint(0, vocabulary, (batch, length + 1), device=self.device)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.device.type == "cuda" and WORLD == 1
            ):
                loss = F.cross_entropy(self.model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
            (loss / accumulation).backward()
        if self.before_update is not None:
            self.before_update()
            self.before_update = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.wait_for_step()


@dataclass
class Save:
    """One save of a contender: `staged()` is called before the next update, `done()` tells whether it is durable."""

    done: Callable[[], bool]
    staged: Callable[[], object] | None = None
    on_host: Callable[[], bool] | None = None


class Contender:
    """A way to save. `begin` returns after the call as a user would have it."""

    name = ""
    saves = 3

    def open(self, t: Training, folder: Path) -> None:
        self.t, self.folder = t, folder

    def begin(self, i: int) -> Save:
        raise NotImplementedError

    def after_save(self) -> None:
        pass

    def close(self) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {}


class TorchSave(Contender):
    name, saves = "torch.save", 2

    def begin(self, i: int) -> Save:
        state = self.t.state_dicts()
        path = self.folder / f"{i}-{RANK}.pt"
        with open(path, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        return Save(lambda: True)


def dcp_state(t: Training) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(t.model, t.optimizer)
    return {"model": model, "optim": optimizer}


class DcpSave(Contender):
    name, saves = "dcp.save", 2

    def begin(self, i: int) -> Save:
        import torch.distributed.checkpoint as dcp

        dcp.save(dcp_state(self.t), checkpoint_id=str(self.folder / str(i)))
        return Save(lambda: True)


def of_response(r: Any) -> Save:
    upload = getattr(r, "upload_completion", r)
    staging = getattr(r, "staging_completion", None)

    def done() -> bool:
        if upload.done():
            upload.result()
            return True
        return False

    return Save(done, staging.result if staging is not None else None)


class DcpAsync(Contender):
    name, saves = "dcp.async_save, default", 2

    def begin(self, i: int) -> Save:
        import torch.distributed.checkpoint as dcp

        return of_response(dcp.async_save(dcp_state(self.t), checkpoint_id=str(self.folder / str(i))))


class DcpOverlapped(Contender):
    """Pinned, shared memory, staged beside the training. torch 2.11's stager closes itself after its first save
    (pytorch#183413), so it is kept from that, or the contender would not work at all."""

    process = False

    def open(self, t: Training, folder: Path) -> None:
        super().open(t, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        class Patched(DefaultStager):
            def _stage(self, state_dict: Any, **kw: Any) -> Any:
                inner = self._state_dict_stager
                close, inner.close = inner.close, lambda: None
                try:
                    return super()._stage(state_dict, **kw)
                finally:
                    inner.close = close

        pinned = t.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=True,
            use_async_staging=pinned,
            use_non_blocking_copy=pinned,
        )
        self.stager = Patched(options)
        self.state = dcp_state(t)

    def begin(self, i: int) -> Save:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        return of_response(
            dcp.async_save(
                self.state,
                checkpoint_id=str(self.folder / str(i)),
                async_stager=self.stager,
                async_checkpointer_type=kind,
            )
        )

    def close(self) -> None:
        with suppress(Exception):
            self.stager.close()
        self.state = None


class DcpThread(DcpOverlapped):
    name, saves = "dcp overlapped, thread", 3


class DcpProcess(DcpOverlapped):
    name, saves, process = "dcp overlapped, process", 5, True


class TorchCheckpointing(Contender):
    name, saves = "torch_checkpointing", 5

    def open(self, t: Training, folder: Path) -> None:
        super().open(t, folder)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its default asks for direct I/O and writes 64 bytes first, which a disk that takes it at its word refuses.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self.state = dcp_state(t)

    def begin(self, i: int) -> Save:
        future = self.manager.save(str(self.folder / str(i)), self.state)

        def done() -> bool:
            if future.done():
                future.result()
                return True
            return False

        def locked() -> None:  # its contract: the update takes the manager's lock
            with self.manager.lock():
                pass

        return Save(done, locked)


class Nvrx(Contender):
    """NVIDIA's resiliency extension (nvidia-resiliency-ext): `torch.save` in a process, as its documentation has it."""

    name, saves = "NVRx TorchAsyncCheckpoint", 5

    def open(self, t: Training, folder: Path) -> None:
        super().open(t, folder)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self.c = TorchAsyncCheckpoint()

    def begin(self, i: int) -> Save:
        state = self.t.state_dicts()
        self.c.async_save(state, str(self.folder / f"{i}-{RANK}.pt"))

        def done() -> bool:
            self.c.finalize_async_save()
            return int(self.c._async_calls_queue.get_num_unfinalized_calls()) == 0

        return Save(done)

    def close(self) -> None:
        self.c.finalize_async_save(blocking=True, terminate=True)


class Dlrover(Contender):
    """DLRover's flash checkpoint without its agent: shared memory, and a saver process that ends with this one."""

    name, saves = "DLRover flash checkpoint", 5

    def open(self, t: Training, folder: Path) -> None:
        super().open(t, folder)
        if WORLD > 1:
            raise ValueError("this contender is for one process: each rank would save all of it")
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self.others = set(multiprocessing.active_children())
        self.place, self.disk = folder / "dlrover", StorageType.DISK
        self.c = DdpCheckpointer(str(self.place))

    def begin(self, i: int) -> Save:
        state = self.t.state_dicts()
        self.c.save_checkpoint(i + 1, state, storage_type=self.disk)
        told = self.place / "dlrover_latest.txt"
        return Save(lambda: told.exists() and told.read_text() == str(i + 1))

    def after_save(self) -> None:
        steps = sorted((p for p in self.place.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        for old in steps[:-1]:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        for saver in set(multiprocessing.active_children()) - self.others:  # nothing of its own ends it
            saver.terminate()
            saver.join(10)


class Ours(Contender):
    name, saves = "unbroken", 11

    def __init__(self, persist_every: int = 1, **options: Any) -> None:
        self.persist_every, self.options = persist_every, {"keep": 2, **options}

    def open(self, t: Training, folder: Path) -> None:
        super().open(t, folder)
        from unbroken import Checkpointer

        self.c = Checkpointer(folder, snapshot_every=1, persist_every=self.persist_every, **self.options)
        began = time.perf_counter()
        self.c.restore(t.state)
        # The buffers are made and registered beside the first steps, which are shown apart.
        self.registering: list[float] = []
        clock = Clock(t)
        clock.start()
        while self.c._opened().buffers.device.pinning is not None:
            took, ready = clock.step(lambda: all(s.pinned for s in self.c.memory.buffers.values()))
            self.registering.append(took)
            if ready:
                break
        self.start_s = time.perf_counter() - began
        self.stalls: list[float] = []
        self.durable: list[float] = []
        self.held: list[list[int]] = []
        self.here: list[dict[str, Any]] = []

    def begin(self, i: int) -> Save:
        began = time.perf_counter()
        saved = self.c.save(i + 1, self.t.state)
        self.here.append({"call_s": time.perf_counter() - began})

        level = saved.disk or saved.remote
        heard: list[float] = []

        def done() -> bool:
            if level is None:
                return saved.host.done()
            if level.done() and not heard:  # it is asked again until every rank has it
                heard.append(level.result())
                self.durable.append(heard[0])
                self.stalls.append(
                    getattr(getattr(self.c._opened().buffers.device.stager, "last", None), "stall_s", 0.0)
                )
            return bool(heard)

        return Save(done, on_host=lambda: saved.host.done())

    def after_save(self) -> None:
        last = getattr(self.c._opened().buffers.device.stager, "last", None)
        if last is not None:
            self.here[-1] |= {
                "copy_s": last.seconds,
                "stall_s": last.stall_s,
                "device_copy": last.device_copy,
            }
        pids = [os.getpid(), int(self.c.memory.link.info["pid"])]
        self.held.append([*(pss(p) for p in pids), *(len(os.listdir(f"/proc/{p}/fd")) for p in pids)])

    def figures(self) -> dict[str, Any]:
        return {
            "start_s": self.start_s,
            "steps_while_registering_s": self.registering,
            "registering_s": getattr(self.c._opened().buffers.device.pinning, "registered_s", 0.0),
            "pinned_bytes": getattr(self.c._opened().buffers.device.pinning, "bytes", 0),
            "pss_and_descriptors": self.held,
            "stalls_s": self.stalls,
            "durable_exactly_s": self.durable,
            "ranks": of_all_ranks(self.here),
        }

    def close(self) -> None:
        self.c.close()
        gc.collect()


CONTENDERS: dict[str, type[Contender]] = {
    "torch_save": TorchSave, "dcp": DcpSave, "dcp_async": DcpAsync, "dcp_thread": DcpThread, "dcp_process": DcpProcess,
    "torch_checkpointing": TorchCheckpointing, "nvrx": Nvrx, "dlrover": Dlrover,
}  # fmt: skip


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def say(*words: object) -> None:
    if RANK == 0:
        print(*words, flush=True)


def together(yes: bool) -> bool:
    """Whether it is so on every rank: all leave the loop at the same step."""
    if WORLD == 1:
        return yes
    flag = torch.tensor([1 if yes else 0], device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
    return bool(flag.item())


class Clock:
    """Steps by the wall clock, without a gap: whatever happens between two of them counts too."""

    def __init__(self, t: Training) -> None:
        self.t = t
        self.last = time.perf_counter()

    def start(self) -> float:
        """From now on; after whatever is not to be counted."""
        self.t.wait_for_step()
        together(True)
        self.last = time.perf_counter()
        return self.last

    def step(self, done: Callable[[], bool] = lambda: True) -> tuple[float, bool]:
        """Seconds since the last look, with one step and a word with the other ranks in it; whether all are `done`."""
        self.t.step()
        everywhere = together(done())
        now = time.perf_counter()
        took, self.last = now - self.last, now
        return took, everywhere


class Collector:
    """What Python's own collector of cycles takes: a step in which a rank is held up by it is nobody's fault."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._heard)

    def _heard(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began

    def close(self) -> None:
        gc.callbacks.remove(self._heard)


def measure(
    contender: Contender,
    t: Training,
    folder: Path,
    saves: int,
    window: int,
    limit: int,
    *,
    told: Callable[[dict[str, Any]], None],
    close: bool = True,
) -> dict[str, Any]:
    """All saves of one contender, each between two undisturbed windows. What there is so far is `told` after each."""
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    together(True)
    raw = [raw_write_now(folder.parent, t.bytes())]
    contender.open(t, folder)
    clock, collector = Clock(t), Collector()
    for _ in range(3):
        clock.step()
    before = [clock.step()[0] for _ in range(window)]
    rows = []
    for i in range(saves):
        for _ in range(SETTLE):
            clock.step()
        began = clock.start()
        collected = collector.seconds
        save = contender.begin(i)
        call = time.perf_counter() - began
        t.before_update = (lambda s=save: s.staged()) if save.staged else None  # type: ignore[misc]
        at_once = save.done()
        steps, host = [], 0.0
        everywhere = False
        while not everywhere and len(steps) < limit:
            took, everywhere = clock.step(save.done)
            steps.append(took)
            if not host and (save.on_host is None or save.on_host()):
                host, host_steps = clock.last - began, len(steps)
        whole = clock.last - began
        collected = collector.seconds - collected
        after = [clock.step()[0] for _ in range(window)]
        quiet = st.median(before + after)
        mean = (sum(before) + sum(after)) / (2 * window)
        if not host:
            host, host_steps = whole, len(steps)
        rows.append(
            {
                "call_s": call, "steps": len(steps), "persisted": persists(contender, i), "durable_s": call if at_once else whole,
                "quiet_step_s": quiet, "excess_s": whole - len(steps) * quiet, "excess_of_means_s": whole - len(steps) * mean,
                "excess_to_host_s": host - host_steps * quiet, "in_flight_ratio": st.median(steps[1:] or [steps[0] - call]) / quiet,
                "first_step_s": steps[0] - call, "within_limit": everywhere,
                "collector_s": max(of_all_ranks(collected)), "steps_s": [round(x, 5) for x in steps],
                "quiet_steps_s": [round(x, 5) for x in before + after],
            }
        )  # fmt: skip
        say(
            f"  {contender.name} {i}: "
            + ", ".join(f"{k} {v:.4g}" for k, v in rows[-1].items() if not isinstance(v, list))
        )
        before = after
        contender.after_save()
        told(
            {
                "arm": contender.name,
                "unfinished": True,
                "saves": rows,
                "raw_write": raw,
                **contender.figures(),
            }
        )
        for old in sorted(folder.glob("*"), key=lambda p: p.stat().st_mtime)[:-2]:
            if not isinstance(contender, Ours) and RANK == 0:
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()
    collector.close()
    raw.append(raw_write_now(folder.parent, t.bytes()))
    result = {"arm": contender.name, "saves": rows, "raw_write": raw, **contender.figures()}
    if close:
        contender.close()
        together(True)
        if RANK == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def of_all_ranks(mine: Any) -> list[Any]:
    """What every rank has, by rank."""
    if WORLD == 1:
        return [mine]
    every: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(every, mine)
    return every


def persists(contender: Contender, i: int) -> bool:
    """Whether a contender's i-th save goes to disk."""
    return (i + 1) % getattr(contender, "persist_every", 1) == 0


def probes(device: torch.device, folder: Path, size: int) -> dict[str, float]:
    """Raw speeds of this machine, in bytes per second: what nothing can be faster than."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, float] = {}
    path = folder / f"probe-{RANK}"
    length = raw_length(size)
    found["disk_write"] = raw_write(path, length)
    drop_cache(path)
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as f:
        buffer = bytearray(16 << 20)
        while f.readinto(buffer):
            pass
    found["disk_read"] = length / (time.perf_counter() - began)
    path.unlink()
    if device.type == "cuda":
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        gpu = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        for name, a, b in (("d2h", host, gpu), ("h2d", gpu, host)):
            a.copy_(b, non_blocking=True)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(6):
                a.copy_(b, non_blocking=True)
            torch.cuda.synchronize()
            found[name] = 6 * (1 << 30) / (time.perf_counter() - began)
        if WORLD == 1:
            found["registering_s"] = registering(size)
    return found


def registering(size: int) -> float:
    """Seconds to register memory whose pages are there, in a mapping of its own: what a restore from memory begins with."""
    fd = os.memfd_create("probe")
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        raw = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        cudart = torch.cuda.cudart()
        pieces = [(raw.data_ptr() + at, min(128 << 20, size - at)) for at in range(0, size, 128 << 20)]
        began = time.perf_counter()
        for address, length in pieces:
            if (code := cudart.cudaHostRegister(address, length, 0)) != 0:
                raise RuntimeError(f"cudaHostRegister: {code}")
        took = time.perf_counter() - began
        for address, _ in pieces:
            cudart.cudaHostUnregister(address)
        return took
    finally:
        os.close(fd)


def raw_length(size: int) -> int:
    return max(64 << 20, min(size, (8 << 30) // WORLD) >> 26 << 26)


def raw_write(path: Path, length: int) -> float:
    """Bytes per second of large writes past the page cache, four at a time, synced at the end; through it where there is no
    such way."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        fd = os.open(path, flags, 0o644)
    aligned = mmap.mmap(-1, 16 << 20)
    aligned.write(torch.randint(0, 255, (16 << 20,), dtype=torch.uint8).numpy().tobytes())
    began = time.perf_counter()
    with ThreadPoolExecutor(4) as writers:  # as many as our keeper has
        list(writers.map(lambda i: os.pwrite(fd, aligned, i << 24), range(length >> 24)))
    os.fsync(fd)
    took = time.perf_counter() - began
    os.close(fd)
    return length / took


def raw_write_now(folder: Path, size: int) -> float:
    """The same beside a block of saves: a virtual disk slows down after a burst, so a limit is only good for its time."""
    path = folder / f"probe-{RANK}"
    rate = raw_write(path, raw_length(size // 3))
    path.unlink()
    return rate


def drop_cache(*paths: Path) -> None:
    subprocess.run(["sync"], check=False)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
    for p in paths:
        fd = os.open(p, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def restores(t: Training, contender: Ours, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds to bring the state back from memory and from disk, the process being up, against the sum of the floors.

    `contender` has saved; its trainer is gone without a word, and its successor has a context, a model and an optimizer.
    """
    from unbroken import Checkpointer

    folder = contender.folder
    pid = int(contender.c.memory.link.info["pid"])
    contender.c.save(10**6, t.state, persist=True).disk.result(600)
    t.wait()
    due = [x.detach().clone() for x in tensors_of(t)]
    time.sleep(3)  # the keeper takes the checksums
    vanish(contender.c)
    found: dict[str, Any] = {}
    for source in ("memory", "disk"):
        if source == "disk":
            os.kill(pid, signal.SIGKILL)
            time.sleep(1)
            drop_cache(*folder.glob("*/rank-*"))
        with torch.no_grad():
            for x in tensors_of(t):
                x.zero_()
        t.wait()
        began = time.perf_counter()
        c = Checkpointer(folder, snapshot_every=1, persist_every=1, **options)
        restored = c.restore(t.state)
        t.wait()
        took = time.perf_counter() - began
        assert restored is not None and restored.source == source and restored.step == 10**6, restored
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(t), due, strict=True)), (
            "other values came back"
        )
        while c._opened().buffers.device.pinning is not None and not any(
            s.pinned for s in c.memory.buffers.values()
        ):
            time.sleep(0.05)
        registering = 0.0
        if c._opened().buffers.device.pinning is not None:
            registering = c._opened().buffers.device.pinning.registered_s / max(
                1, sum(s.pinned for s in c.memory.buffers.values())
            )
        found[source] = {
            "seconds": took,
            "inside_s": restored.seconds,
            "registering_one_buffer_s": registering,
        }
        say(f"  restore from {source}: {took:.2f} s (registering one buffer {registering:.2f} s)")
        pid = int(c.memory.link.info["pid"])
        vanish(c)
    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def tensors_of(t: Training) -> list[torch.Tensor]:
    """All tensors of its state."""
    kept = [x for entry in t.optimizer.state.values() for x in entry.values() if isinstance(x, torch.Tensor)]
    return [*t.model.parameters(), *kept]


def vanish(c: Any) -> None:
    """Leaves a Checkpointer as a killed process does, but for giving its mappings back."""
    c.memory.closing = True
    c.memory.link.disconnect()
    c._closed = True
    c._opened().buffers.device.stager.close()
    for buffer in c.memory.buffers.values():
        buffer.unmap()
    c.memory.buffers.clear()
    gc.collect()


def machine(device: torch.device) -> dict[str, Any]:
    here = describe_machine() | {"torch": torch.__version__}
    if device.type != "cuda":
        return here | {"device": here["processor"] or platform.machine(), "gpus": 0}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return here | {"device": torch.cuda.get_device_name(device), "gpus": WORLD, "driver": driver}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    p.add_argument("--model", choices=list(MODELS))
    p.add_argument(
        "--arms", dest="contenders", default=",".join(CONTENDERS), help="peers; every block has ours too"
    )
    p.add_argument("--saves", type=int, help="saves of each contender (default: each contender's own)")
    p.add_argument("--ours", type=int, default=11, help="saves of ours, the first apart")
    p.add_argument("--ours-per-block", type=int, default=2, help="saves of ours beside each peer")
    p.add_argument("--window", type=int, default=8, help="undisturbed steps before and after each save")
    p.add_argument("--limit", type=int, default=150, help="steps to wait for durability at most")
    p.add_argument("--no-restore", action="store_true", help="always so with several ranks")
    p.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "unbroken-benchmark")
    p.add_argument("--memory", default=None, help="the keeper's budget")
    p.add_argument("--buffers", type=int, help="of our contender, for each rank")
    p.add_argument("--keep", type=int, default=2, help="checkpoints of our contender that stay on disk")
    p.add_argument(
        "--persist-every", type=int, default=1,
        help="only each such save of our contender goes to disk, the others to the host's memory: for states that a disk would"
        " only be measured with",
    )  # fmt: skip
    p.add_argument("--out", type=Path, help="JSON; finished blocks in it are not run again")
    a = p.parse_args()
    if unknown := [n for n in a.contenders.split(",") if n and n not in CONTENDERS]:
        p.error(f"there is no contender {', '.join(unknown)}: {', '.join(CONTENDERS)}")
    a.no_restore = a.no_restore or WORLD > 1  # a rank cannot end the keeper that the others still use
    device = torch.device(a.device, int(os.environ.get("LOCAL_RANK", 0)) if a.device == "cuda" else None)
    for k, v in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }.items():
        os.environ.setdefault(k, v)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        torch.distributed.init_process_group("gloo")
    size = MODELS[a.model or ("1b" if device.type == "cuda" else "tiny")]
    result: dict[str, Any] = json.loads(a.out.read_text()) if a.out and a.out.exists() else {"blocks": {}}
    t = Training(device, size)
    clock = Clock(t)
    for _ in range(5):
        clock.step()
    quiet = st.median([clock.step()[0] for _ in range(15)])
    result.update(
        machine=machine(device), model=a.model, parameters=sum(p.numel() for p in t.model.parameters()),
        state_bytes=t.bytes(), step_s=quiet, probes=probes(device, a.folder, t.bytes()),
    )  # fmt: skip
    result["probes_of_ranks"] = of_all_ranks(result["probes"])  # all probed at the same time
    say(json.dumps({k: v for k, v in result.items() if k != "blocks"}))
    given = {"memory": a.memory, "buffers": a.buffers}
    options: dict[str, Any] = {"keep": a.keep, **{k: v for k, v in given.items() if v is not None}}

    def finished(name: str) -> bool:
        return name in result["blocks"] and not result["blocks"][name].get("unfinished")

    def keep(name: str = "", so_far: dict[str, Any] | None = None) -> None:
        if so_far is not None:
            result["blocks"][name] = so_far
        if a.out and RANK == 0:
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(result, indent=1))

    def block(name: str, contender: Contender, saves: int) -> None:
        if finished(name):
            return
        say(f"block {name}")
        try:
            result["blocks"][name] = measure(
                contender, t, a.folder / "c", saves, a.window, a.limit, told=lambda so_far: keep(name, so_far)
            )
        except Exception as e:  # noqa: BLE001 - a peer that fails is a result
            traceback.print_exc()
            result["blocks"][name] = {"arm": contender.name, "failed": repr(e)[:500]}
            with suppress(Exception):
                contender.close()
        keep()

    if not finished("unbroken"):
        say("block unbroken")
        ours = Ours(a.persist_every, **options)
        result["blocks"]["unbroken"] = measure(
            ours,
            t,
            a.folder / "c",
            a.ours,
            a.window,
            a.limit,
            told=lambda so_far: keep("unbroken", so_far),
            close=a.no_restore,
        )
        result["probes_after"] = probes(device, a.folder, t.bytes())  # virtual disks slow down after a burst
        keep()
        if not a.no_restore:
            result["restore"] = restores(t, ours, options)
            keep()
    for name in [n for n in a.contenders.split(",") if n]:
        block(name, CONTENDERS[name](), a.saves or CONTENDERS[name].saves)
        if a.ours_per_block:
            block(f"unbroken beside {name}", Ours(**options), a.ours_per_block + 1)
    say(table(result))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    for left in multiprocessing.active_children():  # of peers
        left.terminate()
    os._exit(0)


def student(n: int) -> float:
    """Student's t of a mean of n values, 95 % on both sides."""
    known = (
        12.71,
        4.30,
        3.18,
        2.78,
        2.57,
        2.45,
        2.36,
        2.31,
        2.26,
        2.23,
        2.20,
        2.18,
        2.16,
        2.14,
        2.13,
        2.12,
        2.11,
        2.10,
        2.09,
    )
    return known[min(n - 2, len(known) - 1)]


def table(result: dict[str, Any]) -> str:
    """The blocks as Markdown: medians of the saves after each contender's first."""
    lines = [
        "| contender | call returns after | excess per checkpoint: median (mean, 95 %) | until on the host | first save's excess | in-flight step | durable after | of the raw disk's time beside it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, b in result["blocks"].items():
        if "failed" in b:
            lines.append(f"| {name} | failed: {b['failed'][:80]} | | | | | |")
            continue
        rows = b["saves"][1:] or b["saves"]

        def of(key: str, rows: list[dict[str, Any]] = rows) -> float:
            return st.median(r[key] for r in rows)

        excess = [r["excess_s"] for r in rows]
        late = sum(not r["within_limit"] for r in rows)
        written = [r for r in rows if r["persisted"]]
        durable = st.median([r["durable_s"] for r in written] or [float("nan")])
        in_flight = st.median([r["in_flight_ratio"] for r in written] or [float("nan")])
        # every rank probes and writes at the same time
        raw = result["state_bytes"] / st.mean(b["raw_write"]) if b.get("raw_write") else float("nan")
        half = (
            student(len(excess)) * st.stdev(excess) / len(excess) ** 0.5 if len(excess) > 1 else float("nan")
        )
        lines.append(
            f"| {name} | {of('call_s'):.4f} s | {of('excess_s'):.3f} s ({st.mean(excess):.3f} +- {half:.3f}) | {of('excess_to_host_s'):.3f} s"
            f" | {b['saves'][0]['excess_s']:.3f} s | {in_flight:.4f} x | {durable:.2f} s"
            f"{f' ({late} not within the limit)' if late else ''} | {durable / raw:.2f} x |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
