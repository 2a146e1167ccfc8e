"""Runs a script of Megatron's trainer on a CPU: "cuda" is answered by the CPU, and what is written in triton is left out.

    python -m tests.hooks.on_cpu.pretrain SCRIPT [options]

All else is megatron.training's and megatron.core's own, from where `make install-hooks` puts a release that Python 3.11 would not be
given: there it lacks one name of the standard library.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
import types
import typing
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch._higher_order_ops
import torch._inductor.compile_fx
import torch._inductor.runtime.triton_heuristics
import torch.utils.flop_counter  # these ask whether there is a triton: before it is stood in for
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class Anything:
    """What nobody calls here; a decorator gives back what it decorates."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **how: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not how else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Kernels(types.ModuleType):
    """A module of triton's."""

    __path__: ClassVar[list[str]] = []
    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_its = name.partition(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_its else None

    def create_module(self, spec: Any) -> Any:
        return Kernels(spec.name)

    def exec_module(self, module: Any) -> None: ...


class OnProcessor(TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU, and say that they are a GPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1:
            return found.replace("torch.", "torch.cuda.")
        return found


class Timer(Anything):
    """An event of CUDA."""

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True


class Generators:
    """The CPU's generator, whichever GPU it is asked of."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def put_processor_in_place() -> None:
    """torch.cuda answers as a GPU that is the CPU; `is_available` goes on saying that there is none."""
    nothing: Any = lambda *_, **__: None  # noqa: E731
    properties = types.SimpleNamespace(
        major=9, minor=0, total_memory=1 << 34, multi_processor_count=1, name="cpu"
    )
    states = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(), "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed), "manual_seed_all": nothing,
    }  # fmt: skip
    answers = {
        "current_device": lambda: torch.device("cpu"), "device_count": lambda: 1, "set_device": nothing, "synchronize": nothing,
        "Event": Timer, "Stream": Anything, "current_stream": Anything, "default_stream": Anything, "stream": lambda s: Anything(),
        "get_device_properties": lambda *_: properties, "get_device_capability": lambda *_: (9, 0),
        "memory_stats": lambda *_: defaultdict(int), "reset_peak_memory_stats": nothing, "empty_cache": nothing,
        "default_generators": Generators(), "_lazy_call": lambda call: call(), "_lazy_init": nothing, **states,
        **{f"{most}memory_{kind}": lambda *_: 0 for most in ("", "max_") for kind in ("allocated", "reserved")},
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, states[name])
    begin, wait = torch.distributed.init_process_group, torch.distributed.barrier
    torch.distributed.init_process_group = lambda *args, **how: begin(
        *args, **how | {"backend": "gloo", "device_id": None}
    )
    torch.distributed.barrier = lambda *args, device_ids=None, **how: wait(*args, **how)


def main() -> None:
    sys.path.insert(0, str(Path(sys.prefix) / "megatron"))
    typing.override = override  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Triton())
    put_processor_in_place()
    with OnProcessor():
        start = importlib.import_module("megatron.training.initialize")
        trainer: Any = importlib.import_module("megatron.training.training")
        start._compile_dependencies = trainer.set_jit_fusion_options = lambda **_: None  # type: ignore[attr-defined]
        begin = trainer.initialize_megatron
        trainer.initialize_megatron = lambda **how: begin(**how, allow_no_cuda=True)
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
