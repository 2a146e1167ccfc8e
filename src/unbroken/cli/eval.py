"""`unbroken eval`: plan, run, watch, compare, join, status, tasks, cache.

Long because a command states every option that it takes: no command holds more than the call of what does the work.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ContractError, EvaluationIncomplete, InputError, RunInterrupted, UsageError
from . import _eval_show

if TYPE_CHECKING:
    from ..evaluate.contracts import ModelSpec, Report, Suite, Task
    from ..evaluate.engines import Engine, Slot
    from ..evaluate.processes.imports import Imports
    from ..evaluate.result.folder import EvalDir
    from ..evaluate.run.settings import Settings

app = typer.Typer(
    help="Evaluate a checkpoint on many datasets in a fraction of the GPU time.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

SUITE = typer.Argument(help="A TOML file, the name of a shipped suite, or HARNESS:TASK,TASK,...")
MODEL = typer.Option(
    ..., "--model", "-m", help="A Hugging Face folder, s3://bucket/prefix, or an endpoint's URL"
)
OUT = typer.Option(..., "--out", "-o", help="Folder of the evaluation; the same command there goes on")
AGAIN_S = 2.0
"""A signal that comes so much later than the first one ends the command at once; sooner, the two are one."""
GPUS = typer.Option(None, "--gpus", "-n", help="GPUs to use; default: all that are visible")
WORKERS = typer.Option(
    None, "--workers", help="CPU workers on a machine without GPUs, or connections to an endpoint"
)
WIDTH = typer.Option(1, "--gpus-per-worker", help="GPUs that hold one copy of the model (tensor parallel)")
BACKEND = typer.Option("transformers", "--backend", help="transformers, openai, or package.module:Class")
DTYPE = typer.Option("auto", "--dtype")
BATCH = typer.Option(
    "8",
    "--batch-size",
    help="Sequences per forward pass, or 'auto': as many as fit; halved for a shard where memory runs out",
)
BLOCK = typer.Option(
    None,
    "--block",
    help="Samples that are always answered together, part of the model's identity; default: 32, or the batch size where that is larger",
)
AUTO_BATCH = 128
"""The most that --batch-size auto tries on a GPU; without one, 8."""
LENGTH = typer.Option(None, "--max-length")
CHAT = typer.Option(False, "--chat-template", help="Ask through the model's chat template")
TOKENIZER = typer.Option("", "--tokenizer", help="Folder of the tokenizer, where the model's has none")
NAME = typer.Option("", "--name", help="The model's name for people, and at an endpoint")
OPTION = typer.Option([], "--option", help="KEY=VALUE for the backend; VALUE is JSON or text")
ENGINE = typer.Option(
    "local", "--engine", help="local, ray, or none (only workers that `unbroken eval join`)"
)
ADDRESS = typer.Option("", "--ray-address", help="An existing Ray cluster")
CPUS = typer.Option(
    None, "--cpu-workers", help="Processes for metrics; default: the CPUs left beside the GPU workers"
)
CACHE = typer.Option(
    "auto", "--cache", help="auto, always or never: a copy of the model in shared memory, one fetch per node"
)
CACHE_DISK = typer.Option([], "--cache-disk", help="Where the copy goes if shared memory is too small")
PRIORS = typer.Option(
    None, "--priors", help="File of learnt run times; default: in your state folder; 'none' for none"
)
KEEP = typer.Option(False, "--keep-going", help="Go on without tasks that cannot be prepared")
TASKS = typer.Option("", "--tasks", help="Only these tasks of the suite, by name, with commas")
LIMIT = typer.Option(
    None, "--limit", help="Only the first so many samples of each task; below 1: that share of them"
)
SHOTS = typer.Option(None, "--shots", min=0, help="Few-shot examples of every task, whatever the suite says")
GEN = typer.Option(
    [], "--gen", help="KEY=VALUE of the generation settings of every task, such as temperature=0.7"
)
QUIET = typer.Option(False, "--quiet", "-q", help="No progress")
JSON = typer.Option(False, "--json", help="One JSON object on standard output")


@app.command()
def run(
    suite: str = SUITE, model: str = MODEL, out: Path = OUT, gpus: int | None = GPUS, workers: int | None = WORKERS,
    gpus_per_worker: int = WIDTH, backend: str = BACKEND, dtype: str = DTYPE, batch_size: str = BATCH, block: int | None = BLOCK,
    max_length: int | None = LENGTH, chat_template: bool = CHAT, tokenizer: str = TOKENIZER, name: str = NAME,
    option: list[str] = OPTION, engine: str = ENGINE, ray_address: str = ADDRESS, cpu_workers: int | None = CPUS,
    cache: str = CACHE, cache_disk: list[Path] = CACHE_DISK, priors: str | None = PRIORS, keep_going: bool = KEEP,
    tasks: str = TASKS, limit: float | None = LIMIT, shots: int | None = SHOTS, gen: list[str] = GEN, quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Evaluate a model on a suite; run the same command again to go on after anything."""
    from ..evaluate.processes.bytecode import kept_bytecode
    from ..evaluate.result.folder import EvalDir

    kept_bytecode()  # where there is none it is compiled from here on, beside all that follows
    spec = _spec(
        model,
        backend,
        dtype,
        batch_size,
        block,
        max_length,
        chat_template,
        tokenizer,
        name,
        option,
        gpus_per_worker,
    )
    slots = _slots(engine, gpus, workers, gpus_per_worker, spec)
    settings = _settings(slots, cpu_workers, cache, cache_disk, priors, keep_going)
    folder = EvalDir(out)
    with _imports(engine, slots if len(slots) > 1 else (), spec, folder) as imports:
        started = _engine(engine, ray_address, folder, slots, imports)
        report = _evaluate(
            _suite(suite, tasks, limit, shots, gen), spec, folder, started, settings, quiet or as_json
        )
    _say(report, folder, as_json)


@app.command()
def plan(
    suite: str = SUITE, gpus: int = typer.Option(1, "--gpus", "-n", help="GPUs"), gpus_per_worker: int = WIDTH,
    model_b: float = typer.Option(7.0, "--model-b", help="Billions of parameters"),
    device: str = typer.Option("", "--device", help="Hardware, as in the learnt run times; default: this machine's"),
    load_s: float | None = typer.Option(None, "--load-seconds", help="From a worker's start to its first block; default: as learnt from earlier runs"),
    cpu_workers: int = typer.Option(16, "--cpu-workers"), block: int = typer.Option(32, "--block"), priors: str | None = PRIORS,
    tasks: str = TASKS, limit: float | None = LIMIT, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Show how a suite would be split, how long it should take, and how long at the very least. Takes no GPU."""
    from ..evaluate.plan.priors import PriorBook, load_book
    from ..evaluate.run.forecast import forecast, forecast_text

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
    store = _priors(priors)
    found = forecast(_suite(suite, tasks, limit), load_book(store) if store else PriorBook(), gpus=gpus, width=gpus_per_worker,
                     model_b=model_b, device=device or _device(), load_s=load_s, cpu_workers=cpu_workers, block=block)  # fmt: skip
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print(forecast_text(found))


@app.command()
def watch(
    run_dir: str = typer.Argument(metavar="RUN", help="A run directory, or a folder or bucket of checkpoints"),
    suite: str = typer.Option(..., "--suite", "-s", help="As for `run`"),
    out: Path | None = typer.Option(None, "--out", "-o", help="Default: RUN/evaluations/SUITE"),
    like: Path | None = typer.Option(None, "--like", help="Hugging Face folder with configuration and tokenizer; checkpoints are exported to it"),
    prefix: str | None = typer.Option(None, "--prefix", help="Part of the state that is the model"),
    once: bool = typer.Option(False, "--once", help="Evaluate what is there, then end"),
    last_step: int | None = typer.Option(None, "--last-step", help="End after the checkpoint of this step"),
    newest_only: bool = typer.Option(False, "--newest-only", help="Pass over checkpoints that were superseded meanwhile"),
    hold: int = typer.Option(0, "--hold", min=0, help="Keep only so many checkpoints from removal until their turn comes, the newest; 0: all, while there is room"),
    poll: float = typer.Option(10.0, "--poll", help="Seconds between looks"),
    gpus: int | None = GPUS, workers: int | None = WORKERS, gpus_per_worker: int = WIDTH, backend: str = BACKEND,
    dtype: str = DTYPE, batch_size: str = BATCH, block: int | None = BLOCK, max_length: int | None = LENGTH,
    chat_template: bool = CHAT, tokenizer: str = TOKENIZER, option: list[str] = OPTION, engine: str = ENGINE,
    ray_address: str = ADDRESS, cpu_workers: int | None = CPUS, cache: str = CACHE, cache_disk: list[Path] = CACHE_DISK,
    priors: str | None = PRIORS, keep_going: bool = KEEP, tasks: str = TASKS, limit: float | None = LIMIT,
    shots: int | None = SHOTS, gen: list[str] = GEN, as_json: bool = JSON,
) -> None:  # fmt: skip
    """Evaluate every committed checkpoint of a run as it appears: curves over steps, regressions flagged."""
    from ..evaluate.processes.bytecode import kept_bytecode
    from ..evaluate.result.folder import EvalDir
    from ..evaluate.run.watch import (
        Watch,
        checkpoints_of,
        curves_text,
        refuse_unlike,
        refuse_unloadable,
        shortfall,
        wait_for_checkpoints,
    )
    from ..evaluate.run.watch import watch as watch_run
    from ..evaluate.suite.codec import encode

    kept_bytecode()
    asked = _suite(suite, tasks, limit, shots, gen)
    if out is None:
        if "://" in run_dir:
            raise UsageError("a bucket of checkpoints needs --out", where=run_dir)
        out = Path(run_dir) / "evaluations" / asked.name
    spec = _spec(
        "checkpoint",
        backend,
        dtype,
        batch_size,
        block,
        max_length,
        chat_template,
        tokenizer,
        "",
        option,
        gpus_per_worker,
    )
    slots = _slots(engine, gpus, workers, gpus_per_worker, spec)
    settings = _settings(slots, cpu_workers, cache, cache_disk, priors, keep_going)

    def evaluate(s: Suite, m: ModelSpec, folder: EvalDir) -> Report:
        started = _engine(engine, ray_address, folder, slots, imports)
        report = _evaluate(s, m, folder, started, settings, True, harnesses)
        _write(report, folder)
        return report

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    watched = Watch(asked, spec, out, like, prefix, poll, once, last_step, newest_only, hold)
    refuse_unlike(watched)
    EvalDir(out).refuse_file()
    storage = checkpoints_of(run_dir) if once else wait_for_checkpoints(run_dir, say)
    refuse_unloadable(watched, storage)
    EvalDir(out).open()
    if not once and not storage.folders():
        say(f"no checkpoint is in {storage.url.removeprefix('file://')} yet; waiting for the first")
    began = time.time()
    with (  # made once, for all checkpoints
        _imports(engine, slots, spec, EvalDir(out)) as imports,
        _harness_imports(asked, EvalDir(out)) as harnesses,
    ):
        points = watch_run(watched, storage, evaluate, say)
    if not points:
        say("no committed checkpoint is here")
    if as_json:
        print(json.dumps({"out": str(out), "points": encode(points)}))
    else:
        print(curves_text(points), end="")
    lacking, code = shortfall([p for p in points if p.at >= began])
    if code:  # with --json its object is printed already, and says the same
        say(f"unbroken eval: {lacking}")
        raise typer.Exit(code)


@app.command()
def compare(
    before: Path = typer.Argument(help="Folder of an evaluation, or its report.json"),
    after: Path = typer.Argument(help="Another one"),
    alpha: float = typer.Option(0.01, "--alpha", help="Chance of flagging anything where nothing differs"),
    metric: list[str] = typer.Option(
        [], "--metric", help="Only this metric (again for more): fewer comparisons, less correction"
    ),
    as_json: bool = JSON,
) -> None:
    """Say which metrics of which tasks differ between two evaluations by more than chance."""
    from ..evaluate.result.results import compare as compare_scores
    from ..evaluate.result.results import comparison, finite, left_out, side
    from ..evaluate.suite.codec import encode

    if not 0 < alpha < 1:
        raise UsageError("--alpha lies between 0 and 1")
    old, new = _report(before), _report(after)
    scores = (*old.scores, *old.groups), (*new.scores, *new.groups)
    found, alone = compare_scores(*scores, alpha=alpha, every_metric=True, metrics=metric), left_out(*scores)
    if not found:
        raise InputError("the two evaluations have no metric of a task in common", where=f"{before}, {after}")
    if as_json:
        body = {"before": side(old), "after": side(new), "differences": encode(found), "left_out": alone}
        print(json.dumps(finite(body)))
    else:
        print(comparison(old, new, found, alone), end="")


@app.command()
def join(
    out: Path = typer.Argument(help="The evaluation's folder, or its cluster.json"),
    gpus: str = typer.Option(
        "", "--gpus", help="Indices of the GPUs that this worker may see, with commas; empty: CPU"
    ),
    name: str = typer.Option("", "--name", help="Default: host and process id"),
    wait: float = typer.Option(60.0, "--wait", help="Seconds to wait for the coordinator"),
) -> None:
    """Add a worker to a running evaluation, for as long as it likes; it may be killed at any time."""
    from ..evaluate.engines.worker import join as join_run

    cluster = out / "cluster.json" if out.is_dir() or out.suffix != ".json" else out
    try:
        indices = [int(g) for g in gpus.split(",") if g.strip()]
    except ValueError as e:
        raise UsageError(f"--gpus {gpus}: not a list of numbers") from e
    code = join_run(cluster, name or f"{os.uname().nodename}-{os.getpid()}", indices, within_s=wait)
    sys.stdout.flush()
    os._exit(code)  # threads of libraries must not hold the GPU


@app.command()
def status(out: Path = typer.Argument(help="The evaluation's folder"), as_json: bool = JSON) -> None:
    """Show where an evaluation stands, and whether it runs now."""
    from ..evaluate.result.folder import EvalDir
    from ..evaluate.run.screen import as_json as in_json
    from ..evaluate.run.screen import read_title, seen, status_text

    folder = EvalDir(out)
    try:
        p, live = seen(folder)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise InputError(
            "no evaluation was seen running here",
            where=str(out),
            todo="Give the --out of `unbroken eval run`",
        ) from e
    title = read_title(folder)
    print(json.dumps(in_json(p, live, title)) if as_json else status_text(p, live, title))


@app.command()
def tasks(
    harness: str = typer.Argument("lm_eval", help="lm_eval, plain, or package.module:Class"),
    find: str = typer.Option("", "--find", help="Only names that contain this"),
    folder: Path = typer.Option(Path(), "--folder", help="Where local tasks lie"),
    as_json: bool = JSON,
) -> None:
    """List the tasks that a harness knows."""
    from ..errors import UnknownTask
    from ..evaluate.contracts import Suite
    from ..evaluate.suite.registry import get_harness

    if not folder.is_dir():
        raise InputError("there is no such folder", where=str(folder), todo="Give --folder where tasks lie")
    known = get_harness(harness).list_tasks(Suite("all", (), folder=str(folder.resolve())))
    names = [n for n in known if find in n]
    if not known:
        raise InputError(f"the harness '{harness}' finds no task here", where=str(folder.resolve()),
                         todo="Give --folder where tasks lie")  # fmt: skip
    if not names:
        raise UnknownTask(find, known, where=f"--find: none of the {len(known)} names contains it")
    print(json.dumps({"tasks": names}) if as_json else "\n".join(names))


@app.command()
def stage(
    suite: str = typer.Argument(help="A TOML file, or HARNESS:TASK,TASK,..."),
    into: Path = typer.Option(
        ..., "--into", help="Folder for the data, on a file system that the nodes share"
    ),
    check: bool = typer.Option(False, "--check", help="Only say what is there; fetch nothing"),
    as_json: bool = JSON,
) -> None:
    """Fetch a suite's data for machines without a network, and prove that they are found offline."""
    from ..errors import DatasetMissing
    from ..evaluate.harness.lm_eval.staging import offline_environment, stage_suite
    from ..evaluate.suite.codec import encode

    found = stage_suite(_suite(suite, "", None), into, only_check=check)
    if as_json:
        print(json.dumps({"tasks": [encode(t) for t in found]}))
    else:
        for t in found:
            print(f"{t.task}: " + (t.problem or f"{t.documents:,} documents, {t.source}"))
    bad = [t.task for t in found if t.problem]
    if bad:
        raise DatasetMissing(
            f"{len(bad)} of {len(found)} tasks have no data: {', '.join(bad[:8])}",
            where=str(into),
            todo="Run it without --check where there is a network"
            if check
            else "See each task's reason above",
        )
    if not as_json:
        print("\nOn machines without a network, before `unbroken eval run`:")
        print("export " + " ".join(f"{k}={v}" for k, v in offline_environment(into.resolve()).items()))


@app.command()
def cache(
    clear: bool = typer.Option(False, "--clear", help="Remove copies that nobody uses"), as_json: bool = JSON
) -> None:
    """Show the copies of models in this node's shared memory."""
    from ..evaluate.model.cache import copies, default_places, sweep

    found = []
    for root, _ in default_places().roots():
        if clear and root.exists():
            sweep(root, force=True)
        found += copies(root)
    if as_json:
        print(
            json.dumps(
                {
                    "copies": [
                        {"hash": c.hash, "path": c.path, "bytes": c.bytes, "users": c.users} for c in found
                    ]
                }
            )
        )
    else:
        print(
            "\n".join(f"{c.hash[:12]}  {c.bytes / 2**30:.2f} GiB  {c.users} users  {c.path}" for c in found)
            or "no copy of a model is on this node"
        )


app.command()(_eval_show.samples)
app.command()(_eval_show.table)


def _evaluate(
    suite: Suite, spec: ModelSpec, folder: EvalDir, engine: Engine, settings: Settings, quiet: bool, harnesses: Imports | None = None,
) -> Report:  # fmt: skip
    """`harnesses`: where the processes that prepare and score are forked from."""
    import functools
    import signal

    from ..evaluate.run.coordinator import Coordinator
    from ..evaluate.run.job import Job, Launchers
    from ..evaluate.run.screen import Screen
    from ..evaluate.suite.registry import open_scoring

    folder.open()
    with (
        _stdout_for_the_answer(),
        Screen(folder.root / "progress.json", title=f"{suite.name} of {spec.title}", quiet=quiet) as screen,
    ):
        launchers = Launchers(engine, functools.partial(open_scoring, imports=harnesses), harnesses)
        coordinator = Coordinator(Job(suite, spec, folder), launchers, settings, watcher=screen)
        first: list[float] = []

        def stop(number: int, _: object) -> None:
            now = time.monotonic()
            if first and now - first[0] > AGAIN_S:
                sys.stderr.write(f"unbroken eval: ended at once by another {signal.Signals(number).name}\n")
                os._exit(RunInterrupted.exit_code)  # a store may not answer, and threads wait for it
            first.append(now)
            coordinator.stop(signal.Signals(number).name)

        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return coordinator.run()
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)
            shutdown = getattr(engine, "shutdown", None)
            if shutdown is not None:
                shutdown()


@contextlib.contextmanager
def _stdout_for_the_answer() -> Iterator[None]:
    """Sends what libraries print meanwhile (Ray, about nodes that died) to standard error: --json is one object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _say(report: Report, folder: EvalDir, as_json: bool) -> None:
    from ..evaluate.result.results import table
    from ..evaluate.suite.codec import encode

    _write(report, folder)
    if as_json:
        kept = folder.last_report() or report  # as the page has it: with the times of the run that took any
        body = encode(kept)
        for heavy in ("trials", "scorings"):
            del body[heavy]
        print(
            json.dumps(
                {
                    **body,
                    "makespan_s": kept.makespan_s,
                    "asked_now": bool(report.trials),
                    "out": str(folder.root),
                }
            )
        )
    else:
        print(table(report), end="")
        print(f"Page: {folder.page}")
    lost = [s for s in report.scores if s.scored < s.samples]
    if report.errors or lost:
        parts = (("without a score", [*report.errors]), ("scored in part", [s.task for s in lost]))
        e = EvaluationIncomplete("; ".join(_named(what, names) for what, names in parts if names),
                                 where=str(folder.root), todo="The same command tries again what is missing")  # fmt: skip
        if as_json:  # its object is printed already, and says the same
            print(f"unbroken eval: {e}", file=sys.stderr)
            raise typer.Exit(e.exit_code)
        raise e


def _named(what: str, names: list[str]) -> str:
    return f"{what}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _write(report: Report, folder: EvalDir) -> None:
    from .. import atomic
    from ..evaluate.result.folder import read_json, unwritable
    from ..evaluate.result.page import render
    from ..evaluate.result.results import finite, table
    from ..evaluate.show import as_lm_eval, recipes_of

    report = folder.last_report() or report  # it keeps the times of the run that took any
    try:
        atomic.write_text(folder.table, table(report))
        atomic.write_json(
            folder.lm_eval, finite(as_lm_eval(report, read_json(folder.asked), recipes_of(folder, report)))
        )
        atomic.write_text(folder.page, render(report))
    except OSError as e:
        raise unwritable(e, folder.root) from e


def _suite(
    place: str, only: str, limit: float | None, shots: int | None = None, gen: Sequence[str] = ()
) -> Suite:

    from ..errors import UnknownTask
    from ..evaluate.contracts import Suite, Task
    from ..evaluate.suite.reader import read_suite

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
    return suite


def _generating(task: Task, settings: dict[str, Any]) -> Task:
    """The task with these generation settings, as its harness takes them."""
    if task.harness == "lm_eval":
        settings = {"max_gen_toks" if k == "max_tokens" else k: v for k, v in settings.items()}
        given = {**dict(task.options.get("gen_kwargs") or {}), **settings}
        return replace(task, options={**task.options, "gen_kwargs": given})
    settings = {"max_tokens" if k == "max_gen_toks" else k: v for k, v in settings.items()}
    others = sorted(set(settings) - {"max_tokens"})
    if task.harness != "plain" or others:
        raise UsageError(
            f"--gen {', '.join(others or settings)}: task '{task.name}' of the {task.harness} harness says that itself",
            todo="A plain task takes max_tokens; what else it wants stands in its infer.py (--tasks leaves it out)",
        )
    return replace(task, options={**task.options, **settings})


def _pairs(texts: Sequence[str], what: str) -> dict[str, Any]:
    """{key: value} of KEY=VALUE, where a value is JSON or text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign:
            raise UsageError(f"{what} {text}", todo="Write it as KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _spec(model: str, backend: str, dtype: str, batch: str, block: int | None, length: int | None, chat: bool, tokenizer: str, name: str,
          options: list[str], width: int) -> ModelSpec:  # fmt: skip
    from ..evaluate.contracts import ModelSpec
    from ..evaluate.engines.local import count_gpus

    auto = batch == "auto"
    try:
        size = (AUTO_BATCH if count_gpus() else 8) if auto else int(batch)
    except ValueError:
        raise UsageError(f"--batch-size {batch}", todo="Give a number, or auto") from None
    block = max(32, size) if block is None else block
    for value, what in ((size, "--batch-size"), (block, "--block"), (width, "--gpus-per-worker")):
        if value < 1:
            raise UsageError(f"{what} must be at least 1")
    if auto:
        size = min(size, block)
    found = _pairs(options, "--option")
    return ModelSpec(
        model, backend, name, dtype, size, auto, block, length, chat, tokenizer, width, found
    )  # fmt: skip


def _slots(
    engine: str, gpus: int | None, workers: int | None, width: int, spec: ModelSpec
) -> tuple[Slot, ...]:
    from ..evaluate.engines import Slot
    from ..evaluate.engines.local import count_gpus
    from ..evaluate.suite.registry import get_backend

    if engine not in ("local", "ray", "none"):
        raise UsageError(f"there is no engine '{engine}'", todo="Choose local, ray or none")
    if engine == "none":
        return ()
    if gpus is not None and gpus < 0:
        raise UsageError(f"--gpus {gpus}", todo="Give how many to use; 0 for none")
    if workers is not None and workers < 1:
        raise UsageError("--workers must be at least 1", todo="`--engine none` starts no worker")
    if not get_backend(spec.backend).needs_weights:
        return tuple(Slot(f"w{i}") for i in range(workers or 4))
    have = count_gpus() if engine == "local" else 0
    count = have if gpus is None and workers is None else (gpus or 0)
    if engine == "local" and count > have:
        raise UsageError(
            f"--gpus {count}: this machine has {have}", todo="Give fewer, or --workers for CPU workers"
        )
    if count % width:
        raise UsageError(f"{count} GPUs cannot be shared out to workers of {width}")
    if count:
        return tuple(
            Slot(f"w{i}", tuple(range(i * width, (i + 1) * width)) if engine == "local" else (), width)
            for i in range(count // width)
        )
    return tuple(Slot(f"w{i}") for i in range(max(1, workers or 1)))


def _settings(
    slots: tuple[Slot, ...], cpus: int | None, cache: str, disks: list[Path], priors: str | None, keep: bool
) -> Settings:
    from ..evaluate.model.cache import Places, default_places
    from ..evaluate.run.settings import Settings

    if cache not in ("auto", "always", "never"):
        raise UsageError(f"--cache {cache}", todo="Choose auto, always or never")
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = max(1, here - len(slots)) if cpus is None else max(1, cpus)
    places = default_places()
    if disks:
        places = Places(places.memory, tuple(disks))
    return Settings(slots=slots, cpu_workers=free, prepare_workers=min(free, 8), cache=cache, places=places,
                    priors=_priors(priors), device=_device(), keep_going=keep)  # fmt: skip


def _engine(
    name: str, address: str, folder: EvalDir, slots: tuple[Slot, ...], imports: Imports | None = None
) -> Engine:
    if name == "ray":
        from ..evaluate.engines.ray import RayEngine

        return RayEngine(address)
    from ..evaluate.engines.local import LocalEngine

    return LocalEngine(folder.root / "logs", threads=_threads(slots), imports=imports)


@contextlib.contextmanager
def _imports(
    engine: str, slots: tuple[Slot, ...], spec: ModelSpec, folder: EvalDir
) -> Iterator[Imports | None]:
    """A process that imports once for all workers of this node; none where a lone worker imports for itself."""
    from ..evaluate.engines.local import imports_for

    if engine != "local" or not slots or not hasattr(os, "fork"):
        yield None
        return
    made = imports_for(spec.backend, slots, folder.root / "logs", _threads(slots))
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def _harness_imports(suite: Suite, folder: EvalDir) -> Iterator[Imports | None]:
    """A process that imports the suite's harnesses once for all that prepare and score; a user's own are left to those,
    since their code may change."""
    from ..evaluate.engines.local import imports_for_harnesses
    from ..evaluate.suite.registry import HARNESSES

    if not hasattr(os, "fork"):
        yield None
        return
    known = sorted({t.harness for t in suite.tasks} & set(HARNESSES))
    made = imports_for_harnesses(known, folder.root / "logs")
    try:
        yield made
    finally:
        made.close()


def _threads(slots: tuple[Slot, ...]) -> int | None:
    cpu_only = not any(s.gpus for s in slots)
    return max(1, (os.cpu_count() or 1) // max(1, len(slots))) if cpu_only else None


def _priors(given: str | None) -> Path | None:
    from ..evaluate.plan.priors import default_store

    if given == "none":
        return None
    return Path(given) if given else default_store()


def _device() -> str:
    """The GPU's name, or 'cpu'."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        return name.decode() if isinstance(name, bytes) else str(name)
    except Exception:  # noqa: BLE001  no library, no driver, no device: all the same here
        return "cpu"


def _report(place: Path) -> Report:
    from ..evaluate.contracts import Report
    from ..evaluate.result.folder import EvalDir, read_json
    from ..evaluate.suite.codec import decode

    path = EvalDir(place).report if place.is_dir() else place
    if not path.is_file():
        raise InputError(
            "there is no finished evaluation", where=str(place), todo="Give the --out of `unbroken eval run`"
        )
    try:
        return decode(Report, read_json(path), where=str(path))
    except ContractError as e:
        raise InputError(
            f"this is no report of an evaluation: {e.what}",
            where=str(path),
            todo="Give the --out of `unbroken eval run`, or the report.json in it",
        ) from e
