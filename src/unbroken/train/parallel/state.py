"""What a checkpoint has of a plan: each rank's rows as parts of the whole model's tensors, and an optimizer's moments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...checkpoint.catalogue.contents import newest
from ...checkpoint.convert.export import Whole
from ...checkpoint.format.sharding import describe
from ...checkpoint.storage import open_storage
from ...errors import InputError, UsageError
from ...progress.records.candidate import parse_folder_name
from ..config import ModelConfig
from ..huggingface.weights import LlamaFolder
from ..planning.sizes import cut_dimension
from .mesh import Mesh
from .stage import MakeStage, parameter_shapes


class Spread:
    """Describes what lies on ranks as the optimizer's rows do, so that any other plan finds its own in it.

    Every rank names all tensors of the model: of another pipeline rank's it has no part.
    """

    def __init__(self, mesh: Mesh, model: ModelConfig, make_stage: MakeStage) -> None:
        self._mesh, self.shapes = mesh, parameter_shapes(make_stage, model, range(model.layers))
        """Of the whole model, in its order."""
        cuts = mesh.layout.layers(model.layers)
        self._holder = {
            name: i % mesh.layout.pipeline
            for i, c in enumerate(cuts)
            for name in parameter_shapes(make_stage, model, c)
        }
        self._experts = (
            {f"blocks.{i}.feed_forward.bias": (model.experts,) for i in range(model.layers)}
            if model.experts
            else {}
        )

    def rows(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All parameters of the model, or moments of theirs: `held` are the rows that this rank updates."""
        return {n: self._describe(n, held.get(n), shape, self._placements(n, shape)) for n, shape in self.shapes.items()}  # fmt: skip

    def own_rows(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of `rows` that this rank has a part of."""
        return {n: t for n, t in self.rows(held).items() if n in held}

    def biases(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The biases of all experts, whole on each rank that has the block."""
        return {n: self._describe(n, held.get(n), shape, [Replicate()] * 5) for n, shape in self._experts.items()}  # fmt: skip

    def _placements(self, name: str, shape: tuple[int, ...]) -> list[Any]:
        dim = cut_dimension(name, shape)
        _, _, o, g, s, t = self._mesh.layout.storage
        tensor: Any = Shard(dim) if t > 1 and dim is not None else Replicate()
        return [Replicate(), tensor, *(Shard(0) if n > 1 else Replicate() for n in (s, g, o))]

    def _describe(self, name: str, local: Tensor | None, shape: tuple[int, ...], placements: list[Any]) -> Tensor:  # fmt: skip
        holder = self._holder[name.replace(".bias", ".gate")]
        mesh = self._mesh.state[holder]
        part = torch.empty(0) if local is None else local.detach()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


@torch.no_grad()
def load_weights(weights: Mapping[str, Tensor], source: str, model: ModelConfig) -> None:
    """Fills weights (as `Spread.own_rows` describes them) from a checkpoint of any plan, or a Llama of Hugging Face; one
    tensor at a time is whole.

    Raises UsageError where that has another model; what its reading raises.
    """
    reader = LlamaFolder(Path(source), model) if LlamaFolder.is_one(source) else _Checkpoint(source)
    for key, weight in weights.items():
        shape = reader.shape(key)
        if shape != tuple(weight.shape):
            found = "no such tensor" if shape is None else f"one of {shape}"
            raise UsageError(
                f"--weights-from has another model: of {key} {tuple(weight.shape)} it has {found}",
                where=source,
                hint="Give the options of the model that wrote it",
            )
        sharding, pieces = describe(weight, key=key)
        full = reader.read(key)
        for (start, size), piece in zip(sharding.boxes, pieces, strict=True):
            piece.copy_(full[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))])


class _Checkpoint:
    """A checkpoint's model, by the names of its parameters."""

    def __init__(self, source: str) -> None:
        folder, name = newest_of(source)
        self._whole = Whole(open_storage(folder), name)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """The shape of a parameter; None where there is none."""
        record = self._whole.manifest.tensors.get(f"model.{key}")
        return None if record is None else tuple(record.shape)

    def read(self, key: str) -> Tensor:
        """A parameter, whole."""
        return self._whole.read(f"model.{key}")


def newest_of(source: str) -> tuple[str, str]:
    """(folder, name) of a checkpoint, or of the newest one in a folder. Raises InputError where there is none."""
    place, _, name = source.rstrip("/").rpartition("/")
    if parse_folder_name(name):
        return place or ".", name
    if "://" not in source and not Path(source).is_dir():
        raise InputError("there is no checkpoint to take weights from", where=f"--weights-from {source}")
    return source, newest(open_storage(source)).name


class OptimizerState:
    """Moments and the like, there from the start, so that a checkpoint finds its place for each."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._weights = optimizer, weights
        self._make()

    def _make(self) -> None:
        """Makes torch create its state by an update that changes nothing, as its distributed checkpoints do."""
        rates = [g["lr"] for g in self._optimizer.param_groups]
        for g in self._optimizer.param_groups:
            g["lr"] = torch.zeros_like(g["lr"]) if isinstance(g["lr"], Tensor) else 0.0
        for w in self._weights.values():  # one after the other: gradients of all may not fit
            w.grad = torch.zeros_like(w)
            self._optimizer.step()
            w.grad = None
        for g, rate in zip(self._optimizer.param_groups, rates, strict=True):
            g["lr"] = rate
        self.set_step(0)
        for n, w in self._weights.items():
            for key, value in self._optimizer.state[w].items():
                if key != "step" and not (isinstance(value, Tensor) and value.shape == w.shape):
                    raise UsageError(
                        f"the optimizer keeps '{key}' of {n}, which is no tensor of the weight's shape: it cannot be spread",
                        hint="Use an optimizer that treats each element by itself, as AdamW, SGD and Lion do",
                    )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What is remembered (exp_avg, ...), and of each weight its tensor."""
        found: dict[str, dict[str, Tensor]] = {}
        for n, w in self._weights.items():
            for key, value in self._optimizer.state[w].items():
                if key != "step":
                    found.setdefault(key, {})[n] = value
        return found

    def set_step(self, step: int) -> None:
        """Tells the optimizer how many updates were made."""
        for w in self._weights.values():
            s = self._optimizer.state[w]
            if isinstance(s.get("step"), Tensor):
                s["step"].fill_(float(step))
            elif "step" in s:
                s["step"] = step
