"""What a DeepSpeed engine counts, what of it cannot be kept, and what ZeRO 3 has to do after its shards were written."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class EngineCounters:
    """An engine's counters, as part of a state."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """What they are now, and the stage that they belong to."""
        counted = {name: int(getattr(self._engine, name)) for name in _COUNTERS}
        return {"counters": counted, "stage": self._engine.zero_optimization_stage()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts them back."""
        for name, value in state["counters"].items():
            setattr(self._engine, name, value)


def refuse_unkept(engine: Any) -> None:
    """Raises UsageError for what lies in no object that can be saved."""
    if type(engine).__name__ == "PipelineEngine":
        raise UsageError(
            "PipelineEngine reads its data by itself, in train_batch: where it stands is not known",
            hint="Use the engine's own loop: engine(batch), engine.backward(loss), engine.step()",
        )
    zero = engine.optimizer
    for name, words in (
        ("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_param"), ("swap_optimizer", "NVMe offload"),
        ("zenflow", "zenflow"),
    ):  # fmt: skip
        if getattr(zero, name, False) and not isinstance(getattr(zero, name), type(lambda: None)):
            raise UsageError(
                f"{words} moves the state between memories by itself: it was never tried with a hook",
                hint=f"Leave out {words}, or save by DeepSpeed's own checkpoints and --resume-arg (docs/trainers.md)",
            )


def gather_again(engine: Any) -> None:
    """ZeRO 3: shards were written in place; parameters that stay whole on every rank are made from them again."""
    kept = getattr(engine.optimizer, "persistent_parameters", None)
    if engine.zero_optimization_stage() < 3 or not kept:
        return
    kept[0].partition(kept, has_been_updated=False)
    kept[0].all_gather(kept)
