"""The options that several commands of `unbroken eval` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

SUITE = typer.Argument(help="A TOML file, the name of a shipped suite, or HARNESS:TASK,TASK,...")
WIDTH = typer.Option(1, "--gpus-per-worker", help="GPUs that hold one copy of the model (tensor parallel)")
PRIORS = typer.Option(
    None, "--priors", help="File of learnt run times; default: in your state folder; 'none' for none"
)
TASKS = typer.Option("", "--tasks", help="Only these tasks of the suite, by name, with commas")
LIMIT = typer.Option(
    None, "--limit", help="Only the first so many samples of each task; below 1: that share of them"
)
JSON = typer.Option(False, "--json", help="One JSON object on standard output")


@dataclass(frozen=True)
class Evaluating:
    """What every command that evaluates is asked: workers, how the model is run, which part of the suite.

    The default of a field is its option: `takes` makes a command take them all.
    """

    gpus: int | None = typer.Option(None, "--gpus", "-n", help="GPUs to use; default: all that are visible")
    workers: int | None = typer.Option(
        None, "--workers", help="CPU workers on a machine without GPUs, or connections to an endpoint"
    )
    gpus_per_worker: int = WIDTH
    backend: str = typer.Option(
        "", "--backend", help="transformers, vllm, sglang, openai, or package.module:Class; default: as the folder was begun, else vllm "
        "where it is installed and there are GPUs, else transformers"
    )  # fmt: skip
    exact: bool | None = typer.Option(
        None,
        "--exact/--fast",
        help="--exact: the harness's own batches, bit for bit. --fast: batches as this device likes them, a sample of each task "
        "checked against the other way. Default: as the folder was begun, else fast where the backend can",
    )
    dtype: str = typer.Option("auto", "--dtype")
    batch_size: str = typer.Option(
        "8",
        "--batch-size",
        help="Sequences per forward pass, or 'auto': as many as fit; halved for a shard where memory runs out",
    )
    block: int | None = typer.Option(
        None,
        "--block",
        help="Samples that are always answered together, part of the model's identity; default: 32, or the batch size where that is larger",
    )
    max_length: int | None = typer.Option(None, "--max-length")
    chat_template: bool = typer.Option(False, "--chat-template", help="Ask through the model's chat template")
    tokenizer: str = typer.Option(
        "", "--tokenizer", help="Folder of the tokenizer, where the model's has none"
    )
    option: list[str] = typer.Option([], "--option", help="KEY=VALUE for the backend; VALUE is JSON or text")
    engine: str = typer.Option(
        "local", "--engine", help="local, ray, or none (only workers that `unbroken eval join`)"
    )
    cluster: str = typer.Option(
        "",
        "--cluster",
        help="Start workers on the nodes of a cluster, as `unbroken run --cluster` does: NAME[,option=value...]; "
        "--gpus or --workers are of each node then",
    )
    nodes: int = typer.Option(1, "--nodes", min=1, help="Nodes of the cluster")
    ray_address: str = typer.Option("", "--ray-address", help="An existing Ray cluster")
    cpu_workers: int | None = typer.Option(
        None, "--cpu-workers", help="Processes for metrics; default: the CPUs left beside the GPU workers"
    )
    cache: str = typer.Option(
        "auto",
        "--cache",
        help="auto, always or never: a copy of the model in shared memory, one fetch per node",
    )
    cache_disk: list[Path] = typer.Option(
        [], "--cache-disk", help="Where the copy goes if shared memory is too small"
    )
    priors: str | None = PRIORS
    keep_going: bool = typer.Option(False, "--keep-going", help="Go on without tasks that cannot be prepared")
    tasks: str = TASKS
    limit: float | None = LIMIT
    shots: int | None = typer.Option(
        None, "--shots", min=0, help="Few-shot examples of every task, whatever the suite says"
    )
    gen: list[str] = typer.Option(
        [], "--gen", help="KEY=VALUE of the generation settings of every task, such as temperature=0.7"
    )
    samples: int | None = typer.Option(
        None,
        "--samples",
        min=1,
        help="Answers to each prompt that asks for a text: their mean, pass@k, and what most of them say. They have to be drawn at "
        "random: --gen temperature=0.8",
    )
