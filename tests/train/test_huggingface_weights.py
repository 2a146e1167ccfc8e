"""A Llama of Hugging Face's is what a training begins with: its weights, and refused where it is another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unbroken.errors import InputError, UsageError
from unbroken.train.config import ModelConfig
from unbroken.train.huggingface.names import description
from unbroken.train.huggingface.weights import LlamaFolder
from unbroken.train.parallel.state import load_weights
from unbroken.train.planning.sizes import parameter_shapes

MODEL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, hidden=24)


def folder(path: Path, **changes: object) -> Path:
    """A model as transformers saves it, in two files."""
    said = description(MODEL, 8) or {}
    shapes = parameter_shapes(MODEL)
    theirs = {said["names"][n]: torch.full(s, float(i)) for i, (n, s) in enumerate(shapes.items())}
    path.mkdir()
    names = sorted(theirs)
    save_file({n: theirs[n] for n in names[::2]}, path / "model-1.safetensors")
    save_file({n: theirs[n] for n in names[1::2]}, path / "model-2.safetensors")
    (path / "config.json").write_text(json.dumps(said["files"]["config.json"] | changes))
    return path


def test_every_parameter_is_found_by_its_name(tmp_path: Path) -> None:
    weights = {n: torch.full(s, -1.0) for n, s in parameter_shapes(MODEL).items()}
    load_weights(weights, str(folder(tmp_path / "m")), MODEL)
    for i, w in enumerate(weights.values()):
        assert torch.equal(w, torch.full_like(w, float(i)))


def test_another_model_is_refused_with_the_options_that_fit(tmp_path: Path) -> None:
    weights = {n: torch.zeros(s) for n, s in parameter_shapes(MODEL).items()}
    changed = folder(tmp_path / "a", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(UsageError, match="another one") as e:
        load_weights(weights, str(changed), MODEL)
    assert "--rope-base 500000.0" in (e.value.hint or "")
    with pytest.raises(UsageError, match="type mistral"):
        LlamaFolder(folder(tmp_path / "b", model_type="mistral"), MODEL)
    with pytest.raises(UsageError, match="scaled"):
        LlamaFolder(folder(tmp_path / "c", rope_scaling={"rope_type": "llama3"}), MODEL)
    wider = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, hidden=48)
    shapes = {n: torch.zeros(s) for n, s in parameter_shapes(wider).items()}
    with pytest.raises(UsageError, match=r"feed_forward.gate.weight \(48, 16\) it has one of \(24, 16\)"):
        load_weights(shapes, str(folder(tmp_path / "d")), wider)
    empty = folder(tmp_path / "e")
    for f in empty.glob("*.safetensors"):
        f.unlink()
    with pytest.raises(InputError, match="no safetensors"):
        LlamaFolder(empty, MODEL)
