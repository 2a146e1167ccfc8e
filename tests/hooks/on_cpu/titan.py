"""Runs a script of torchtitan's on a CPU: its Trainer takes "cuda" where there is no GPU, and imports kernels written in triton.

    python -m tests.hooks.on_cpu.titan SCRIPT [options]

Both are stood in for here; all else is torchtitan's own.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from typing import Any

import torch


class Kernels(types.ModuleType):
    """GPU kernels that nothing calls here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Processor:
    """torch.cpu, and what torch.cuda can be asked beside."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_: None)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_device_properties(self, *_: Any) -> Any:
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}


def main() -> None:
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = Kernels("kernels")
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Processor()
    utils.get_local_device = lambda: torch.device("cpu")
    from torchtitan.distributed import utils as groups

    groups.set_pg_timeouts = lambda **_: None  # its barrier names a GPU
    collectives: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    factors = collectives._get_gradient_divide_factors

    def sums(*args: Any, **_: Any) -> Any:
        return factors(*args[:5], force_sum_reduction_for_comms=True)

    collectives._get_gradient_divide_factors = sums  # gloo can do no more than add
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
