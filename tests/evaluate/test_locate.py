"""How large a model is: as its files say, whatever the type of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from unbroken.evaluate.contracts import ModelSpec
from unbroken.evaluate.model import locate as module
from unbroken.evaluate.model.cache import Places
from unbroken.evaluate.model.locate import Located, locate
from unbroken.evaluate.model.sources import FolderSource

from .test_eval_command import whole_checkpoint

BYTES = {"F32": 4, "BF16": 2, "I64": 8}


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    table: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype]
        for n in shape:
            size *= n
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(table).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(at))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "m"


def found(folder: Path) -> Located:
    return locate(ModelSpec(str(folder)), cache="never", places=Places(None, ()), remote=False)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_model_is_as_large_in_any_type(folder: Path, dtype: str) -> None:
    for name in ("a", "b"):
        write_safetensors(
            folder / f"{name}.safetensors", {"w": (dtype, [1000, 50]), "scale": (dtype, [])}, {}
        )
    assert found(folder).model_b == 2 * 50_001 / 1e9


def test_only_the_head_of_a_file_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(folder / "a.safetensors", {"w": ("F32", [1000, 1000])}, {"note": "x" * 100_000})
    assert found(folder).model_b == 1e-3  # with the hash, which reads all of it; both are remembered
    asked: list[int] = []
    real = FolderSource.read

    def read(self: FolderSource, name: str, offset: int, size: int) -> bytes:
        asked.append(size)
        return real(self, name, offset, size)

    monkeypatch.setattr(FolderSource, "read", read)
    assert found(folder).model_b == 1e-3 and not asked, "no reading of what is known"
    (counted,) = (folder.parent / "cache").rglob("parameters/*.json")
    counted.unlink()
    assert found(folder).model_b == 1e-3
    assert len(asked) == 2 and asked[0] == module.HEAD_BYTES and sum(asked) < 101_000


def test_weights_that_are_there_twice_count_once(folder: Path) -> None:
    write_safetensors(folder / "model-1-of-1.safetensors", {"w": ("F32", [100])}, {})
    write_safetensors(folder / "consolidated.safetensors", {"other.w": ("F32", [100])}, {})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-1-of-1.safetensors"}})
    )
    assert found(folder).parameters == 100


def test_a_checkpoint_of_ours_counts_its_model(folder: Path) -> None:
    whole_checkpoint(folder)
    assert found(folder / "step-00000010.a0001").parameters == 6


@pytest.mark.parametrize("name", ["pytorch_model.bin", "torn.safetensors", "model.safetensors"])
def test_bytes_where_no_header_says_it(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / name).write_bytes(b"" if name.startswith("torn") else b"\xff" * 4000)
    (folder / "config.json").write_text("{}")
    assert found(folder).parameters is None
    assert found(folder).model_b == (0.0 if name.startswith("torn") else 2e-6)
