"""What a training is made of: one frozen dataclass for each component, checked when built.

The command line, a TOML file and the presets all fill the same dataclasses; an unknown key names the nearest one.
"""

from __future__ import annotations

import argparse
import dataclasses
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


@dataclass(frozen=True)
class DataConfig:
    """What is read, and in which order."""

    data: str = option("stdlib", "folder or file of text; 'stdlib' is the source of Python's own library")
    cache: str | None = option(None, "folder of the token cache [default: ~/.cache/unbroken/tokens]")
    seed: int = option(0, "seed of the initial weights and of the order of the samples")
    seq: int = option(64, "tokens in a sample")
    global_batch: int = option(24, "samples in a step, over all ranks")
    micro_batch: int = option(0, "samples in one forward pass of a rank; 0 is all of its share")
    skip: tuple[str, ...] = option((), "absolute sample range START:STOP to leave out; may be given again")

    def __post_init__(self) -> None:
        _positive(self, "seq", "global_batch")
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
    bucket_mb: float = option(4.0, "size of a gradient bucket, 10^6 bytes")
    overlap: bool = option(
        False, "reduce a bucket as soon as its gradients are there; the result is the same"
    )
    comm_timeout: float = option(600.0, "seconds after which a collective gives up")
    eval_every: int = option(0, "steps between evaluations on held-out samples; 0 is never")
    eval_samples: int = option(64, "held-out samples of an evaluation, over all ranks")
    log_every: int = option(1, "steps between the lines that rank 0 prints")
    checkpoints: str | None = option(None, "folder of checkpoints [default: the run's; outside a run none]")
    snapshot_every: int = option(5, "steps between snapshots in host memory")
    persist_every: int = option(20, "steps between checkpoints on disk")
    keep: int = option(2, "checkpoints to keep on disk")
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
        for name in ("device", "backend", "dtype"):
            allowed = _fields(type(self))[name].metadata["choices"]
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} {getattr(self, name)} is not one of {', '.join(allowed)}")
        if self.eval_every < 0:
            raise UsageError(f"--eval-every {self.eval_every} is negative")


@dataclass(frozen=True)
class TrainConfig:
    """The whole training."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def identity(self, fingerprint: str) -> dict[str, Any]:
        """What a resumed training must have in common with the one that wrote the checkpoint."""
        return {
            "model": dataclasses.asdict(self.model),
            "data": {
                "sha256": fingerprint,
                "seed": self.data.seed,
                "seq": self.data.seq,
                "global_batch": self.data.global_batch,
            },
            "held_out": self.run.eval_samples if self.run.eval_every else 0,
            "dtype": self.run.dtype,
        }


PARTS: Mapping[str, type] = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "run": RunConfig}

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
    p.add_argument("--config", metavar="FILE", help="TOML file with tables [model], [data], [optim], [run]")
    for part, kind in PARTS.items():
        group = p.add_argument_group(part, kind.__doc__)
        for f in dataclasses.fields(kind):
            _add(group, f, typing.get_type_hints(kind)[f.name])
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


def _add(group: argparse._ArgumentGroup, f: dataclasses.Field[Any], hint: Any) -> None:
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


def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(kind)}


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value} and must be above 0")


def _raise(e: Exception) -> NoReturn:
    raise e
