"""From a command line to the suite and the model that it asks for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from ...evaluate.contracts import ModelSpec, Suite, Task
    from ...evaluate.result.folder import EvalDir
    from .options import Evaluating

AUTO_BATCH = 128
"""The most that --batch-size auto tries on a GPU; without one, 8."""


def suite_of(
    place: str,
    only: str,
    limit: float | None,
    shots: int | None = None,
    gen: Sequence[str] = (),
    samples: int | None = None,
) -> Suite:
    """The suite of a command line, with its options applied to every task. Raises UsageError, UnknownTask, InputError."""
    from ...errors import UnknownTask
    from ...evaluate.contracts import Suite, Task
    from ...evaluate.suite.reader import read_suite

    harness, colon, names = place.partition(":")
    if colon and not Path(place).exists():
        tasks = tuple(
            Task(n.strip().replace("/", "_"), harness, n.strip()) for n in names.split(",") if n.strip()
        )
        suite = Suite(harness, tasks, folder=str(Path().resolve()))
    else:
        suite = read_suite(place)
    if only:
        wanted = [n.strip() for n in only.split(",") if n.strip()]
        have = {t.name: t for t in suite.tasks}
        for n in wanted:
            if n not in have:
                raise UnknownTask(n, have, where=f"suite {suite.name}")
        suite = replace(suite, tasks=tuple(have[n] for n in wanted))
    if not suite.tasks:
        raise UsageError("the suite has no task", where=place)
    if limit is not None:
        if not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
            raise UsageError(
                f"--limit {limit:g}: at least 1 is meant, or a share of the samples between 0 and 1"
            )
        most: float = limit if limit < 1 else int(limit)
        suite = replace(suite, tasks=tuple(replace(t, limit=most) for t in suite.tasks))
    if shots is not None:
        if own := [t.name for t in suite.tasks if t.harness == "plain"]:
            print(
                f"--shots does not change {', '.join(own)}: a plain task's prompts are its own",
                file=sys.stderr,
            )
        suite = replace(suite, tasks=tuple(replace(t, shots=shots) for t in suite.tasks))
    if gen:
        settings = _pairs(gen, "--gen")
        suite = replace(suite, tasks=tuple(_generating(t, settings) for t in suite.tasks))
    if samples is not None:
        suite = replace(suite, tasks=tuple(_asked_often(t, samples) for t in suite.tasks))
    return suite


def _asked_often(task: Task, samples: int) -> Task:
    """The task with so many answers to each prompt. Raises UsageError where its harness knows nothing of that."""
    if task.harness not in ("lm_eval", "plain"):
        raise UsageError(
            f"--samples {samples}: the {task.harness} harness of task '{task.name}' does not take it",
            hint="--tasks leaves it out",
        )
    options = {**task.options, "samples": samples}
    given = dict(options.get("gen_kwargs") or {})
    if samples > 1 and float(given.get("temperature") or 0) > 0:
        # A task that says it is greedy would stay so, whatever the temperature is.
        options["gen_kwargs"] = {"do_sample": True, **given}
    return replace(task, options=options)


def _generating(task: Task, settings: dict[str, Any]) -> Task:
    """The task with these generation settings, as its harness takes them."""
    if task.harness == "lm_eval":
        settings = {"max_gen_toks" if k == "max_tokens" else k: v for k, v in settings.items()}
        given = {**dict(task.options.get("gen_kwargs") or {}), **settings}
        return replace(task, options={**task.options, "gen_kwargs": given})
    settings = {"max_tokens" if k == "max_gen_toks" else k: v for k, v in settings.items()}
    others = sorted(set(settings) - {"max_tokens", "temperature"})
    if task.harness != "plain" or others:
        raise UsageError(
            f"--gen {', '.join(others or settings)}: task '{task.name}' of the {task.harness} harness says that itself",
            hint="A plain task takes max_tokens and temperature, where its infer.py says none; what else it wants stands there",
        )
    return replace(task, options={**task.options, **settings})


def _pairs(texts: Sequence[str], what: str) -> dict[str, Any]:
    """{key: value} of KEY=VALUE, where a value is JSON or text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign:
            raise UsageError(f"{what} {text}", hint="Write it as KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def suite_asked(place: str, asked: Evaluating) -> Suite:
    """`suite_of` a command that evaluates."""
    return suite_of(place, asked.tasks, asked.limit, asked.shots, asked.gen, asked.samples)


def spec_of(model: str, name: str, asked: Evaluating, begun: EvalDir | None = None) -> ModelSpec:
    """The model of a command line, and how it is run; `begun`: the folder, which may hold a part of it. Raises UsageError."""
    from ...evaluate.contracts import ModelSpec
    from ...evaluate.engines.local import count_gpus

    asked = replace(asked, backend=asked.backend or _backend(asked, begun))
    auto, width = asked.batch_size == "auto", asked.gpus_per_worker
    try:
        size = (AUTO_BATCH if count_gpus() else 8) if auto else int(asked.batch_size)
    except ValueError:
        raise UsageError(f"--batch-size {asked.batch_size}", hint="Give a number, or auto") from None
    block = max(32, size) if asked.block is None else asked.block
    for value, what in ((size, "--batch-size"), (block, "--block"), (width, "--gpus-per-worker")):
        if value < 1:
            raise UsageError(f"{what} must be at least 1")
    if auto:
        size = min(size, block)
    spec = ModelSpec(
        model, asked.backend, name, asked.dtype, size, auto, block, asked.max_length, asked.chat_template, asked.tokenizer,
        width, _pairs(asked.option, "--option"),
    )  # fmt: skip
    return replace(spec, exact=_is_exact(asked, begun))


def _backend(asked: Evaluating, begun: EvalDir | None) -> str:
    """The backend where none is named; said where it is not the one that needs nothing else."""
    from ...evaluate.engines.local import count_gpus
    from ...evaluate.harness.vllm import is_installed

    if begun is not None and (before := begun.began_with()):
        return before
    if asked.exact or asked.engine != "local" or not is_installed() or not count_gpus():
        return "transformers"
    print(
        "unbroken eval: vLLM is installed, so it answers; --backend transformers overrides that",
        file=sys.stderr,
    )
    return "vllm"


def _is_exact(asked: Evaluating, begun: EvalDir | None) -> bool:
    """Whether the harness's own batches are wanted. Raises UsageError where the backend has no such way."""
    from ...evaluate.suite.registry import get_backend

    ways = getattr(get_backend(asked.backend), "ways", ("exact",))
    way = {None: "", True: "exact", False: "fast"}[asked.exact]
    if way and way not in ways:
        hint = (
            "Say --backend transformers --exact"
            if way == "exact"
            else f"The backend {asked.backend} has one way only: leave it out"
        )
        raise UsageError(f"--{way}: not with --backend {asked.backend}", hint=hint)
    if begun is not None and (before := begun.began_exact()) is not None and len(ways) > 1:
        there = "exact" if before else "fast"
        if way and way != there:
            raise UsageError(f"the folder was begun with --{there}: answers of both ways are never mixed", where=str(begun.root),
                             hint=f"Leave --{way} out, or give another --out")  # fmt: skip
        way = there
    return (way or ways[0]) != "fast"
