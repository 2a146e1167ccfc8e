"""What lm_eval says of a task and its results, as ours: version, metrics, values per sample, errors."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ....errors import DatasetMissing, EvaluationError, InputError, UnbrokenError
from ...contracts import Json, Metric, Task, digest
from ...result.folder import FULL
from .replay import CapturedTask

TARGETS = "targets.json"
"""Beside a task's prompts, for `unbroken eval samples`."""
_MEANS = ("mean", "nanmean")
_LIKELIHOODS = ("perplexity", "weighted_perplexity", "bits_per_byte", "weighted_mean")


def task_version(task: Any) -> str:
    """Changes with the harness, the task's version and its configuration, not with where its files lie."""
    config = dict(task.dump_config())
    metadata = dict(config.get("metadata") or {})
    metadata.pop("config_source", None)
    config["metadata"] = metadata
    if isinstance(config.get("dataset_kwargs"), Mapping):
        config["dataset_kwargs"] = {
            k: v
            for k, v in config["dataset_kwargs"].items()
            if k not in ("data_files", "data_dir", "cache_dir")
        }
    from importlib.metadata import version

    return f"lm_eval {version('lm_eval')}, task {task.VERSION}, {digest(config)[:12]}"


def documents_of(samples: Sequence[Sequence[Any]]) -> str:
    """A hash of the documents behind the prompts: of two with the same prompts, one may have had its answers fixed."""
    return digest([_json_of(instances[0].doc) for instances in samples if instances])


def targets_of(task: Any, samples: Sequence[Sequence[Any]]) -> list[Json]:
    """What the harness holds right for each sample, for reading; null where it does not say."""
    found: list[Json] = []
    for instances in samples:
        try:
            found.append(_json_of(task.doc_to_target(instances[0].doc)))
        except Exception:  # noqa: BLE001  the task's own code; nothing but the showing of samples needs it
            found.append(None)
    return found


def _json_of(value: Any) -> Json:
    if isinstance(value, Mapping):
        return {str(k): _json_of(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_of(v) for v in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "tolist"):
        return _json_of(value.tolist())
    return type(value).__name__  # an image: its address would differ each time


def metrics_of(results: Mapping[str, Any], leaf: str, task: Any) -> tuple[Metric, ...]:
    row = results["results"][leaf]
    higher = task.higher_is_better() or {}
    out = []
    for key, value in row.items():
        metric, comma, name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        stderr = row.get(f"{metric}_stderr,{name}", "N/A")
        out.append(
            Metric(
                name=key,
                value=number,
                stderr=None if isinstance(stderr, str) else float(stderr),
                higher_is_better=bool(higher.get(metric, True)),
            )
        )
    return tuple(out)


def values_of(
    results: Mapping[str, Any], leaf: str, task: Any, metrics: Sequence[Metric], samples: int
) -> dict[str, tuple[float | None, ...]]:
    """By metric, the number of each sample that it follows: see `Score.values`.

    Perplexities and bits per byte are functions of a sum of log-likelihoods over a sum of weights, and the weights
    (words, bytes) are the document's own, so that the log-likelihood alone tells two models apart.
    """
    aggregations = task.aggregation() or {}
    found = {}
    for m in metrics:
        metric, _, name = m.name.partition(",")
        kind = getattr(aggregations.get(metric), "__name__", "mean")
        if kind not in (*_MEANS, *_LIKELIHOODS):
            continue
        out: list[float | None] = [None] * samples
        for row in results["samples"][leaf]:
            if row["filter"] != name or metric not in row:
                continue
            value = row[metric]
            if isinstance(value, (list, tuple)):
                if kind not in _LIKELIHOODS or not value:
                    break
                value = value[0]
            try:
                number = float(value)
            except (TypeError, ValueError):
                break
            out[row["doc_id"]] = number if math.isfinite(number) else None
        else:
            if any(v is not None for v in out):
                found[m.name] = tuple(out)
    return found


def votes_of(
    results: Mapping[str, Any], leaf: str, metrics: Sequence[Metric], samples: int
) -> dict[str, list[Json]]:
    """By metric, what each sample answered behind the metric's filter."""
    by_filter: dict[str, list[Json]] = {}
    for row in results["samples"][leaf]:
        said = by_filter.setdefault(row["filter"], [None] * samples)
        said[row["doc_id"]] = row["filtered_resps"]
    return {
        m.name: by_filter.get(name, [None] * samples) for m in metrics for name in [m.name.partition(",")[2]]
    }


def per_sample(
    values: Mapping[str, tuple[float | None, ...]], task: Any, metrics: Sequence[Metric]
) -> tuple[float | None, ...]:
    """The headline metric of each sample, where it is a mean of them."""
    if not metrics:
        return ()
    kind = getattr((task.aggregation() or {}).get(metrics[0].name.partition(",")[0]), "__name__", "mean")
    return values.get(metrics[0].name, ()) if kind in _MEANS else ()


def no_documents(task: Task) -> InputError:
    """What a task is told as whose data set, or what its limit and filters leave of it, is empty."""
    return InputError(
        f"task '{task.name}' has no documents",
        where=task.harness_name,
        hint="Look at its data files, its split and its process_docs; leave it out of the suite otherwise",
    )


def _is_empty(chain: Sequence[BaseException], seen: CapturedTask) -> bool:
    """Whether the harness fell over the first document of none: it looks at that one without asking."""
    try:
        if seen.task is not None:
            return len(seen.task.eval_docs) == 0
    except Exception:  # noqa: BLE001  then something else is wrong, which `chain` tells
        pass
    for e in chain:
        # Of `datasets`, for a file without a row.
        if isinstance(e, StopIteration) or (isinstance(e, IndexError) and "of bounds for size 0" in str(e)):
            return True
        at = e.__traceback__
        while at is not None:
            documents = getattr(at.tb_frame.f_locals.get("self"), "task_docs", None)
            if isinstance(e, IndexError) and documents is not None and len(documents) == 0:
                return True
            at = at.tb_next
    return False


def why_not_prepared(error: Exception, task: Task, seen: CapturedTask) -> UnbrokenError:
    """A user's error out of whatever the harness raised while it loaded a task."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    names = {type(e).__name__ for e in chain}
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:400]
    absent = {"DatasetNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "FileNotFoundError"}
    absent |= {
        "LocalEntryNotFoundError",
        "MaxRetryError",
        "ConnectTimeout",
        "DataFilesNotFoundError",
        "ConnectError",
    }
    if "EmptyDatasetError" in names or _is_empty(chain, seen):
        return no_documents(task)
    if any(isinstance(e, OSError) and e.errno in FULL for e in chain):
        return EvaluationError(f"the data of task '{task.name}' cannot be kept: {text}",
                               where=os.environ.get("HF_DATASETS_CACHE") or os.environ.get("HF_HOME") or "the Hugging Face cache",
                               hint="Make room there, then run the same command")  # fmt: skip
    if seen.task is None and names & absent:
        cache = os.environ.get("HF_DATASETS_CACHE") or os.environ.get("HF_HOME") or "the Hugging Face cache"
        return DatasetMissing(
            f"the data of task '{task.name}' are not on this machine: {text}",
            where=f"looked for by lm_eval in {cache}",
            hint="Stage them where there is a network with `unbroken eval stage`, or fix the paths in the task",
        )
    if isinstance(error, (KeyError, ValueError, TypeError, AssertionError)) or seen.task is None:
        return InputError(
            f"lm_eval cannot build the prompts of task '{task.name}': {text}",
            where=task.harness_name,
            hint="Run `lm_eval` on this task alone to see it in full",
        )
    return cast(UnbrokenError, EvaluationError(f"lm_eval failed on task '{task.name}': {text}"))
