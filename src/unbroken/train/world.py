"""The ranks of a training and the device of each, set up so that the same layout gives the same bits."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..units import plural
from .config import RunConfig

if TYPE_CHECKING:
    import torch

PINS = {
    # Threads split sums differently: one.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # cuBLAS is deterministic only with a fixed workspace (cuBLAS documentation, "Results reproducibility").
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL chooses by message size, topology and tuner; a spare node may make it choose differently.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


def pin_environment() -> None:
    """Sets the variables that libraries read when they load; those already set by the user stay."""
    for name, value in PINS.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    """gloo, nccl, or none for a single process."""

    def share(self, samples: int) -> range:
        """The places in a batch of `samples` that this rank takes; raises UsageError if it does not divide."""
        check_share(samples, self.size)
        each = samples // self.size
        return range(self.rank * each, (self.rank + 1) * each)


def check_share(samples: int, ranks: int) -> None:
    """Raises UsageError where a batch of so many samples does not divide among so many ranks."""
    if samples % ranks:
        raise UsageError(
            f"a batch of {plural(samples, 'sample')} does not divide among {plural(ranks, 'rank')}",
            hint=f"Choose --global-batch as a multiple of {ranks}",
        )


def environment_rank() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun and `unbroken run` give them; (0, 1, 0) for a single process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = [os.environ.get(n) for n in names]
    if values[0] is None and values[1] is None:
        return 0, 1, 0
    try:
        rank, size, local = (int(v or 0) for v in values)
    except ValueError:
        raise UsageError(f"{', '.join(names)} are {values}, not numbers") from None
    if not 0 <= rank < size:
        raise UsageError(f"RANK={rank} is not below WORLD_SIZE={size}")
    return rank, size, local


def start_world(c: RunConfig) -> World:
    """Joins the other ranks; raises UsageError for a device that is not there."""
    import torch

    rank, size, local = environment_rank()
    if c.mode == "deterministic":
        _deterministic()
    cuda = torch.cuda.is_available() if c.device == "auto" else c.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no GPU here", hint="Leave --device out, or say cpu")
    if c.backend == "nccl" and not cuda:
        raise UsageError("--backend nccl needs GPUs", hint="Leave --backend out, or say gloo")
    device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size == 1:
        return World(0, 1, local, device, "none")
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    absent = [n for n in ("MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if absent:
        raise UsageError(
            f"WORLD_SIZE is {size}, but {' and '.join(absent)} is not set",
            hint="Start ranks with `unbroken run` or torchrun, or unset RANK and WORLD_SIZE for a single process",
        )
    timeout = timedelta(seconds=c.comm_timeout)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # torchrun restarts ranks against the same store: keys of another incarnation must not be found.
    incarnation = os.environ.get("UNBROKEN_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"unbroken/{incarnation}", store)
    backend = c.backend
    if backend == "auto":
        backend = "nccl" if cuda and _own_gpu(store, device, rank, size) else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    return World(rank, size, local, device, backend)


def stop_world(world: World) -> None:
    """Leaves the group."""
    if world.size > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


def _own_gpu(store: object, device: torch.device, rank: int, size: int) -> bool:
    """Whether no two ranks share a GPU, which NCCL refuses; the same answer on every rank."""
    import torch

    mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"gpu/{rank}", mine)  # type: ignore[attr-defined]
    everyone = store.multi_get([f"gpu/{r}" for r in range(size)])  # type: ignore[attr-defined]
    return len(set(everyone)) == size


def _deterministic() -> None:
    import torch

    torch.set_num_threads(1)
    # The same switch as torch.use_deterministic_algorithms(True), which also imports the compiler: 1.5 s of start.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # Flash attention has a deterministic backward pass, the memory-efficient and cuDNN ones have none in all versions.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def hold_streams() -> None:
    """Makes the compiler's table of streams hold them, not weak references to them. To be called before a compilation on a GPU.

    Until https://github.com/pytorch/pytorch/pull/183403 a freed stream of CUDA leaves its weak references dangling, and the
    next compilation that clears the table ends the process with signal 11: seen with torch 2.11 where a compiled update ran in
    a stream of its own and another model was compiled after it. The table has a few entries and is emptied at each compilation.
    """
    try:
        from torch._dynamo import graph_bytecode_inputs as table
    except ImportError:
        return  # torch 2.9 has no such table
    if hasattr(table, "weakref"):
        table.weakref = SimpleNamespace(ref=_hold)


def _hold(stream: Any) -> Any:
    """As weakref.ref(stream), only that it holds what it refers to."""
    return lambda: stream
