"""What a training is made of: one frozen dataclass for each component, checked when built.

The command line, a TOML file and the presets all fill the same dataclasses; an unknown key names the nearest one.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError, UnknownKey, UsageError, unreadable


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a configuration with its help."""
    return field(default=default, metadata={"help": help, **more})


def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(kind)}


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value} and must be above 0")


def _one_of(config: Any, *names: str) -> None:
    for name in names:
        allowed = _fields(type(config))[name].metadata["choices"]
        if getattr(config, name) not in allowed:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(config, name)} is not one of {', '.join(allowed)}")


def _raise(e: Exception) -> NoReturn:
    raise e


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    dim: int = option(64, "width of the residual stream")
    layers: int = option(2, "number of blocks")
    heads: int = option(4, "query heads; dim / heads must be even")
    kv_heads: int = option(2, "key and value heads; divides heads")
    hidden: int = option(176, "width of the feed-forward")
    vocab: int = option(256, "tokens known; 256 for bytes")
    rope_base: float = option(10_000.0, "base of the rotary frequencies")
    norm_eps: float = option(1e-5, "added to the mean square in RMSNorm")
    dropout: float = option(0.0, "probability of dropping an activation; draws from the restored RNG")
    experts: int = option(0, "feed-forwards of each block that tokens choose from; 0 is one for all (dense)")
    active_experts: int = option(2, "experts that each token goes to")

    def __post_init__(self) -> None:
        _positive(self, "dim", "layers", "heads", "kv_heads", "hidden", "vocab", "rope_base", "norm_eps")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise UsageError(f"--dim {self.dim} does not split into {self.heads} heads of an even width")
        if self.heads % self.kv_heads:
            raise UsageError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}")
        if self.vocab < 256:
            raise UsageError(f"--vocab {self.vocab} does not hold the 256 bytes")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout {self.dropout} is not in [0, 1)")
        if self.experts < 0 or (self.experts and not 0 < self.active_experts <= self.experts):
            raise UsageError(
                f"--active-experts {self.active_experts} of --experts {self.experts} cannot be chosen",
                hint=f"1 to {max(self.experts, 1)} can",
            )


@dataclass(frozen=True)
class DataConfig:
    """What is read, and in which order."""

    data: str = option(
        "stdlib",
        "folder or file of text, 'stdlib' (the source of Python's own library), a token file (.bin with .idx, .ds), "
        "several by weights (0.7*a.ds,0.3*b.ds), "
        "or JSON lines for the other tasks",
    )
    task: str = option(
        "text",
        "text: every token is learnt; sft: answers of conversations; dpo: preferences between two answers",
        choices=("text", "sft", "dpo"),
    )
    tokenizer: str = option("bytes", "of conversations and preferences: folder of Hugging Face, or bytes")
    beta: float = option(0.1, "how far preferences may move the model from where it began (dpo)")
    cache: str | None = option(None, "folder of the token cache [default: ~/.cache/unbroken/tokens]")
    seed: int = option(0, "seed of the initial weights and of the order of the samples")
    seq: int = option(64, "tokens in a sample")
    global_batch: int = option(24, "samples in a step, over all ranks")
    micro_batch: int = option(0, "samples in one forward pass of a rank; 0 is all of its share")
    skip: tuple[str, ...] = option((), "absolute sample range START:STOP to leave out; may be given again")

    def __post_init__(self) -> None:
        _positive(self, "seq", "global_batch", "beta")
        _one_of(self, "task")
        if self.task == "text" and self.tokenizer != "bytes":
            raise UsageError(
                f"--tokenizer {self.tokenizer} is for --task sft and dpo",
                hint="Make tokens of a text first: unbroken train tokenize TEXT --out FOLDER --tokenizer ..., then --data FOLDER/tokens.ds",
            )
        if self.micro_batch < 0:
            raise UsageError(f"--micro-batch {self.micro_batch} is negative")
        _ = self.skips

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """`skip` as half-open ranges."""
        try:
            pairs = [tuple(int(x) for x in s.split(":")) for s in self.skip]
            return tuple((a, b) for a, b in pairs if 0 <= a <= b or _raise(ValueError()))
        except ValueError:
            raise UsageError(
                f"--skip {' '.join(self.skip)} is not a range", hint="Write it as START:STOP"
            ) from None


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up and cosine decay."""

    lr: float = option(3e-3, "highest learning rate")
    min_lr: float = option(3e-4, "learning rate at the last step")
    warmup: int = option(20, "steps of linear warm-up")
    decay_steps: int = option(0, "step at which min-lr is reached; 0 is the last step")
    beta1: float = option(0.9, "decay of the first moment")
    beta2: float = option(0.95, "decay of the second moment")
    eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(0.1, "on matrices; vectors are not decayed")
    clip: float = option(1.0, "largest norm of the gradient; 0 is no limit")

    def __post_init__(self) -> None:
        _positive(self, "lr", "eps")
        for name in ("min_lr", "warmup", "decay_steps", "weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} is negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)} is not in [0, 1)")


def learning_rate(c: OptimConfig, step: int, steps: int) -> float:
    """The rate of `step`, counted from 1: linear warm-up, then a cosine down to the lowest. Keyed by the step alone, so skipped
    data does not shift it."""
    if step <= c.warmup:
        return c.lr * step / c.warmup
    end = c.decay_steps or steps
    done = min(1.0, (step - c.warmup) / max(1, end - c.warmup))
    return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class RunConfig:
    """How long, on what, and what is kept."""

    steps: int = option(200, "steps of the whole training")
    device: str = option("auto", "cpu, cuda, or auto", choices=("auto", "cpu", "cuda"))
    backend: str = option(
        "auto",
        "gloo, nccl, or auto: nccl where each rank has a GPU of its own",
        choices=("auto", "gloo", "nccl"),
    )
    dtype: str = option(
        "float32", "type of the forward pass; weights stay float32", choices=("float32", "bfloat16")
    )
    mode: str = option(
        "deterministic",
        "deterministic: the same bits after a resume; fast: the libraries' quickest kernels",
        choices=("deterministic", "fast"),
    )
    bucket_mb: float = option(4.0, "size of a gradient bucket, 10^6 bytes")
    overlap: bool = option(
        False, "reduce a bucket as soon as its gradients are there; the result is the same"
    )
    comm_timeout: float = option(600.0, "seconds after which a collective gives up")
    eval_every: int = option(0, "steps between evaluations on held-out samples; 0 is never")
    eval_samples: int = option(64, "held-out samples of an evaluation, over all ranks")
    log_every: int = option(1, "steps between the lines that rank 0 prints")
    weights_from: str | None = option(
        None,
        "checkpoint (or folder of them), or folder of a Hugging Face Llama, whose weights the training begins with, as a new "
        "training",
    )
    checkpoints: str | None = option(None, "folder of checkpoints [default: the run's; outside a run none]")
    snapshot_every: int = option(5, "steps between snapshots in host memory")
    persist_every: int = option(20, "steps between checkpoints on disk")
    keep: int = option(2, "checkpoints to keep on disk")
    recheck: bool = option(
        True, "compute a step twice again where its gradient norm is far out, to find a card that is wrong"
    )
    profile: bool = option(
        True, "in a run, on a plan: measure steps 11 to 20 of each attempt for the run's report"
    )
    trace: str | None = option(
        None, "file (append-only JSON lines) for each step's loss and batch hash; '{rank}' is replaced"
    )

    def __post_init__(self) -> None:
        _positive(
            self,
            "steps",
            "bucket_mb",
            "comm_timeout",
            "log_every",
            "snapshot_every",
            "persist_every",
            "keep",
            "eval_samples",
        )
        _one_of(self, "device", "backend", "dtype", "mode")
        if self.eval_every < 0:
            raise UsageError(f"--eval-every {self.eval_every} is negative")


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class PlanConfig:
    """How a training is spread over ranks. One that is given makes the trainer of `train/parallel` run."""

    engine: str = option(
        "auto",
        "reference (data parallel alone), plan, or auto: plan where anything of [plan] is given",
        choices=("auto", "reference", "plan"),
    )
    pipeline: int = option(1, "ranks that each hold some of the layers")
    context: int = option(1, "ranks that share each sequence")
    tensor: int = option(1, "ranks that share each matrix, and the sequence between matrices")
    parameters: int = option(1, "ranks that share one copy of the parameters; -1 is all that could")
    gradients: int = option(0, "ranks that share one copy of the gradients; 0 is as parameters, -1 all")
    optimizer: int = option(0, "ranks that share one optimizer state; 0 is as gradients, -1 all")
    reshard: bool = option(True, "gather shared parameters again for the backward pass, not keep them")
    schedule: str = option("1f1b", "order of a pipeline's micro-batches", choices=SCHEDULES)
    stages: int = option(1, "pieces of the model on each pipeline rank; interleaved schedules need 2 or more")
    recompute: str = option(
        "none",
        "what the backward pass computes again: selective is all but matrix products",
        choices=RECOMPUTE,
    )
    gradient_dtype: str = option(
        "float32", "type that gradients are kept and reduced in", choices=("float32", "bfloat16")
    )
    attention: str = option(
        "auto",
        "kernel of attention; auto measures in fast mode on a GPU, and else leaves it to torch",
        choices=("auto", "flash", "cudnn", "efficient", "math"),
    )
    compile: bool = option(False, "compile each block")

    def __post_init__(self) -> None:
        _positive(self, "pipeline", "context", "tensor", "stages")
        for name in ("parameters", "gradients", "optimizer"):
            least = 0 if name != "parameters" else 1
            if getattr(self, name) < least and getattr(self, name) != -1:
                raise UsageError(f"--{name} {getattr(self, name)} is no number of ranks", hint="-1 is all")
        _one_of(self, "engine", "schedule", "recompute", "gradient_dtype", "attention")

    @property
    def options(self) -> str:
        """What makes this plan, as options of the command line: all that is not as by default."""
        found = []
        for f in dataclasses.fields(self):
            value, flag = getattr(self, f.name), f.name.replace("_", "-")
            if f.name != "engine" and value != f.default:
                found.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")  # fmt: skip
        return " ".join(found)

    @property
    def wanted(self) -> bool:
        """Whether the trainer of plans runs, not the reference trainer."""
        return self.engine == "plan" or (self.engine == "auto" and self != PlanConfig())


@dataclass(frozen=True)
class TrainConfig:
    """The whole training."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def wants_plan(self) -> bool:
        """Whether the trainer of plans runs; the reference trainer is data parallel, and dense."""
        mixed = "*" in self.data.data
        special = mixed or self.data.task != "text" or self.run.weights_from is not None
        return self.plan.wanted or special or bool(self.model.experts)

    def identity(self, fingerprint: str) -> dict[str, Any]:
        """What a resumed training must have in common with the one that wrote the checkpoint; the plan need not be."""
        model = dataclasses.asdict(self.model)
        return {
            "model": {k: v for k, v in model.items() if k not in NEW_IN_MODEL or v != NEW_IN_MODEL[k]},
            "data": {
                "sha256": fingerprint,
                "seed": self.data.seed,
                "seq": self.data.seq,
                "global_batch": self.data.global_batch,
                **({} if self.data.task == "text" else {"task": self.data.task}),
                **({} if self.data.task != "dpo" else {"beta": self.data.beta}),
            },
            "held_out": self.run.eval_samples if self.run.eval_every else 0,
            "dtype": self.run.dtype,
        }


NEW_IN_MODEL: Mapping[str, Any] = {"experts": 0, "active_experts": 2}
"""Fields that checkpoints of earlier versions do not have, with what they mean there."""

PARTS: Mapping[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "run": RunConfig,
    "plan": PlanConfig,
}

RECIPES: Mapping[str, ModelConfig] = {
    # Shapes of Llama's kind: width / heads is 64 or 128, the feed-forward about 8/3 of the width.
    "20m": ModelConfig(dim=384, layers=8, heads=6, kv_heads=6, hidden=1024, vocab=8192),
    "125m": ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, hidden=2048, vocab=32000),
    "350m": ModelConfig(dim=1024, layers=24, heads=16, kv_heads=16, hidden=2816, vocab=32000),
    "1b": ModelConfig(dim=2048, layers=24, heads=16, kv_heads=16, hidden=5504, vocab=32000),
    "3b": ModelConfig(dim=2560, layers=32, heads=20, kv_heads=20, hidden=6912, vocab=32000),
    # The 7 B and the 123 B of the published study.
    "7b": ModelConfig(dim=4096, layers=32, heads=32, kv_heads=32, hidden=11008, vocab=32000),
    "13b": ModelConfig(dim=5120, layers=40, heads=40, kv_heads=40, hidden=13824, vocab=32000),
    "34b": ModelConfig(dim=8192, layers=48, heads=64, kv_heads=8, hidden=22016, vocab=32000),
    "70b": ModelConfig(dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672, vocab=32000),
    "123b": ModelConfig(dim=12288, layers=88, heads=96, kv_heads=8, hidden=28672, vocab=32768),
    # Mixtures of experts: all parameters / those that a token meets.
    "8x160m": ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, hidden=2048, vocab=32000, experts=8),
    "8x7b": ModelConfig(
        dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=32000, experts=8, active_experts=2
    ),
}

PRESETS: Mapping[str, dict[str, dict[str, Any]]] = {
    # About 0.1 M parameters: a step of four ranks takes 50-100 ms on two cores.
    "tiny": {},
    "small": {
        "model": {"dim": 256, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 688},
        "data": {"seq": 256, "global_batch": 48},
        "optim": {"lr": 1e-3, "min_lr": 1e-4, "warmup": 100},
        "run": {"bucket_mb": 16.0},
    },
    "100m": {
        "model": {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "hidden": 2048},
        "data": {"seq": 1024, "global_batch": 48},
        "optim": {"lr": 6e-4, "min_lr": 6e-5, "warmup": 200},
        "run": {"dtype": "bfloat16", "bucket_mb": 64.0, "overlap": True},
    },
    "1b": {
        "model": {"dim": 2048, "layers": 18, "heads": 16, "kv_heads": 16, "hidden": 5632},
        "data": {"seq": 2048, "global_batch": 16, "micro_batch": 4},
        "optim": {"lr": 3e-4, "min_lr": 3e-5, "warmup": 500},
        "run": {"dtype": "bfloat16", "bucket_mb": 256.0, "overlap": True},
    },
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="`unbroken train --help` lists the options")


def parse(argv: Sequence[str], prog: str = "unbroken train") -> TrainConfig:
    """The training that a command line asks for. Raises UsageError; `--help` prints and exits."""
    p = _Parser(prog=prog, usage="%(prog)s [OPTIONS]", allow_abbrev=False, add_help=False)
    p.description = "Trains a small Llama-style model. Run it alone, under torchrun, or under `unbroken run`, where it survives failures."
    p.add_argument("-h", "--help", action="help", help="show this and exit")
    p.add_argument("--preset", choices=sorted(PRESETS), help="sizes that fit together [default: tiny]")
    p.add_argument(
        "--model",
        metavar="NAME",
        help=f"sizes of a model, as `unbroken train plan` has them: {', '.join(RECIPES)}",
    )
    p.add_argument(
        "--config", metavar="FILE", help="TOML file with tables [model], [data], [optim], [run], [plan]"
    )
    for part, kind in PARTS.items():
        group = p.add_argument_group(part, kind.__doc__)
        for f in dataclasses.fields(kind):
            add_option(group, f, typing.get_type_hints(kind)[f.name])
    known, unknown = p.parse_known_args(list(argv))
    if unknown:
        flags = [s for a in p._actions for s in a.option_strings if s.startswith("--")]
        raise UnknownKey(unknown[0].split("=")[0], flags, what="option")
    given = vars(known)
    values: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    table = _read_toml(Path(given["config"])) if given["config"] else {}
    preset = given["preset"] or table.pop("preset", None) or "tiny"
    if preset not in PRESETS:
        raise UnknownKey(str(preset), PRESETS, where=given["config"], what="preset")
    for source in (PRESETS[preset], table):
        for part, entries in source.items():
            if part not in PARTS:
                raise UnknownKey(part, PARTS, where=given["config"])
            if not isinstance(entries, dict):
                raise UsageError(f"'{part}' is not a table", where=given["config"])
            values[part].update(entries)
    if given["model"] is not None:
        if given["model"] not in RECIPES:
            raise UnknownKey(given["model"], RECIPES, what="model")
        values["model"] |= dataclasses.asdict(RECIPES[given["model"]])
    for part, kind in PARTS.items():
        values[part].update({n: given[n] for n in _fields(kind) if given[n] is not None})
    return build(values)


def build(values: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    """A configuration from nested mappings; unknown keys and wrong types raise UsageError."""
    parts: dict[str, Any] = {}
    for part, entries in values.items():
        if part not in PARTS:
            raise UnknownKey(part, PARTS)
        kind, hints = PARTS[part], typing.get_type_hints(PARTS[part])
        clean = {}
        for name, value in entries.items():
            if name not in hints:
                raise UnknownKey(name, _fields(kind), where=f"[{part}]")
            clean[name] = _check(f"{part}.{name}", value, hints[name])
        parts[part] = kind(**clean)
    return TrainConfig(**parts)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise InputError(f"the configuration cannot be read: {e.strerror}", where=str(path)) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"the configuration is not TOML: {unreadable(e)}", where=str(path)) from e


def add_option(group: argparse._ArgumentGroup, f: dataclasses.Field[Any], hint: Any) -> None:
    """Adds the option of a configuration's field to a parser; absent, it is None."""
    flag = "--" + f.name.replace("_", "-")
    default = (
        "" if f.default in (None, ()) or "[default" in f.metadata["help"] else f" [default: {f.default}]"
    )
    text = (f.metadata["help"] + default).replace("%", "%%")
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif hint == tuple[str, ...]:
        group.add_argument(flag, action="append", default=None, metavar="START:STOP", help=text)
    else:
        kind = hint if hint in (int, float) else str
        metavar = {int: "N", float: "X"}.get(kind, f.name.upper())
        choices = f.metadata.get("choices")
        group.add_argument(
            flag, type=kind, default=None, choices=choices, metavar=None if choices else metavar, help=text
        )


def _check(where: str, value: Any, hint: Any) -> Any:
    """The value as the type of its field."""
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
    elif hint == str | None:
        if value is None or isinstance(value, str):
            return value
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise UsageError(f"{where} is {value!r}, not {getattr(hint, '__name__', hint)}")
