"""`unbroken eval plan`."""

from __future__ import annotations

import json
import math

import typer

from ...errors import UsageError
from . import options
from .asked import suite_of
from .workers import device_name, estimates_file


def plan(
    suite: str = options.SUITE, gpus: int = typer.Option(1, "--gpus", "-n", help="GPUs"), gpus_per_worker: int = options.WIDTH,
    model_b: float = typer.Option(7.0, "--model-b", help="Billions of parameters"),
    device: str = typer.Option("", "--device", help="Hardware, as in the learnt run times; default: this machine's"),
    load_s: float | None = typer.Option(None, "--load-seconds", help="From a worker's start to its first block; default: as learnt from earlier runs"),
    cpu_workers: int = typer.Option(16, "--cpu-workers"), block: int = typer.Option(32, "--block"), priors: str | None = options.PRIORS,
    tasks: str = options.TASKS, limit: float | None = options.LIMIT, as_json: bool = options.JSON,
) -> None:  # fmt: skip
    """Show how a suite would be split, how long it should take, and how long at the very least. Takes no GPU."""
    from ...evaluate.plan.priors import PriorBook, load_book
    from ...evaluate.run.forecast import forecast, forecast_text

    if gpus < 1 or gpus_per_worker < 1:
        raise UsageError("--gpus and --gpus-per-worker must be at least 1")
    for what, value, least in (
        ("--block", block, 1),
        ("--cpu-workers", cpu_workers, 1),
        ("--load-seconds", 0 if load_s is None else load_s, 0),
    ):
        if not least <= value < math.inf:
            raise UsageError(f"{what} {value}: a number from {least} on is meant")
    if not 0 < model_b < math.inf:
        raise UsageError(f"--model-b {model_b}: billions of parameters are meant, such as 7")
    store = estimates_file(priors)
    found = forecast(suite_of(suite, tasks, limit), load_book(store) if store else PriorBook(), gpus=gpus, width=gpus_per_worker,
                     model_b=model_b, device=device or device_name(), load_s=load_s, cpu_workers=cpu_workers, block=block)  # fmt: skip
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print(forecast_text(found))
