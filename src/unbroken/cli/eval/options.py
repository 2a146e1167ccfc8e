"""The options that several commands of `unbroken eval` share."""

from __future__ import annotations

import typer

SUITE = typer.Argument(help="A TOML file, the name of a shipped suite, or HARNESS:TASK,TASK,...")
MODEL = typer.Option(
    ..., "--model", "-m", help="A Hugging Face folder, s3://bucket/prefix, or an endpoint's URL"
)
OUT = typer.Option(..., "--out", "-o", help="Folder of the evaluation; the same command there goes on")
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
