"""What Megatron counts in its arguments, its own generators, and what cannot be kept. Needs megatron-core when it is used."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError

_SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


class MegatronCounters:
    """Iteration, samples and operations, as part of a state: Megatron goes by them when it makes its data."""

    def __init__(self) -> None:
        self._options: Any = None

    def attach(self, options: Any) -> None:
        """Megatron's arguments, once they are parsed."""
        self._options = options
        self.count(options.iteration, options.num_floating_point_operations_so_far)

    def count(self, iteration: int, operations: Any) -> None:
        """The iterations that are complete: Megatron's loop counts them for itself."""
        self._iteration, self._operations = int(iteration), operations

    def state_dict(self) -> dict[str, Any]:
        """What they are now."""
        samples = {
            name: int(getattr(self._options, name)) for name in _SAMPLES if hasattr(self._options, name)
        }
        return {"iteration": self._iteration, "operations": float(self._operations), "samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts them where Megatron looks for them."""
        for name, value in state["samples"].items():
            setattr(self._options, name, value)
        self._options.iteration = state["iteration"]
        self._options.num_floating_point_operations_so_far = state["operations"]
        self.count(state["iteration"], state["operations"])


class Trackers:
    """The generators of tensor-parallel regions, which are Megatron's own."""

    def state_dict(self) -> dict[str, Any]:
        """Their states, by name; a tracker for CUDA graphs has generators in their place."""
        found = _tracker().get_states()
        return {
            "states": {n: s.get_state() if hasattr(s, "get_state") else s.clone() for n, s in found.items()}
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts them back."""
        tracker = _tracker()
        now = tracker.get_states()
        for name, saved in state["states"].items():
            if hasattr(now.get(name), "set_state"):
                now[name].set_state(saved)
            else:
                now[name] = saved
        tracker.set_states(now)


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def unwrap(chunk: Any) -> Any:
    """The model within Megatron's wrappers for data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def refuse_unkept(options: Any) -> None:
    """Raises UsageError for what an exact resume cannot be promised of."""
    for name, why in (
        ("optimizer_cuda_graph", "replays the update without a word: a copy of the state could be torn"),
        ("exit_signal_handler", "saves and stops at a signal, beside the stop that unbroken agrees on"),
        ("perform_rl_step", "keeps rollouts that are in no checkpoint"),
        ("use_megatron_fsdp", "was never tried with this hook"),
        ("use_torch_fsdp2", "was never tried with this hook"),
    ):
        if getattr(options, name, False):
            raise UsageError(
                f"--{name.replace('_', '-')} {why}", hint=f"Leave out --{name.replace('_', '-')}, or attach()"
            )
