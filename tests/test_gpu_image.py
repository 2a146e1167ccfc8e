"""What runs on a GPU image from a source checkout needs nothing that such an image lacks.

The libraries of `IMAGE`, with what they themselves require, are all that may be imported; whatever else is installed here
is refused, in every process, as if it were not there.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_arrows import modules

IMAGE = ("torch", "safetensors", "psutil", "xxhash", "aiohttp", "typer", "rich")
PARTS = ("errors", "extras", "units", "machine", "atomic", "private", "version", "link", "journal", "progress", "cluster", "checkpoint", "recover")  # fmt: skip
"""What keeps a run alive, and what lies below it."""
WITH_NUMPY = ("data", "train")
"""These compute orders and batches; every image with torch has numpy."""
OPTIONAL = {"jinja2", "msgspec", "httpx", "tenacity"}
"""Refused though a library of the image may bring them: they are ours to use as extras only."""
SRC = Path(__file__).resolve().parents[1] / "src"


def belongs(name: str, parts: Iterable[str]) -> bool:
    return name.split(".")[0] in parts


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought_by(names: Iterable[str]) -> set[str]:
    """The top-level modules of some distributions and of all that they require."""
    found: set[str] = set()
    left = [_normal(n) for n in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for row in metadata.requires(name) or []:
            wanted = Requirement(row)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                left.append(_normal(wanted.name))
    tops = metadata.packages_distributions()
    return {top for top, of in tops.items() if found & {_normal(d) for d in of}} - OPTIONAL


FINDER = """
import sys
from importlib.machinery import PathFinder

ALLOWED = set({allowed!r}) | set(sys.stdlib_module_names) | {{"unbroken", "sitecustomize", "usercustomize", "__main__"}}
INSTALLED = set({installed!r})

class Image(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        return None if top in INSTALLED and top not in ALLOWED else PathFinder.find_spec(name, path, target)

sys.meta_path = [Image if finder is PathFinder else finder for finder in sys.meta_path]
"""


def image(folder: Path, *more: str) -> dict[str, str]:
    """The environment of a process on such an image, and of all its children: source checkout, nothing else installed."""
    folder.mkdir(exist_ok=True)
    allowed, installed = brought_by((*IMAGE, *more)), set(metadata.packages_distributions())
    text = FINDER.format(allowed=sorted(allowed), installed=sorted(installed | OPTIONAL))
    (folder / "sitecustomize.py").write_text(text)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SRC)])}


def third_party(path: Path) -> Iterator[str]:
    """Libraries that a file imports as soon as it is imported itself: not in functions, not for types only."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


@pytest.mark.parametrize(("parts", "more"), [(PARTS, set[str]()), (WITH_NUMPY, {"numpy"})])
def test_what_is_imported_at_once_is_on_the_image(parts: tuple[str, ...], more: set[str]) -> None:
    allowed = set(IMAGE) | more | set(sys.stdlib_module_names) | {"unbroken"}
    wrong = {
        name: sorted(lacking)
        for name, path in modules().items()
        if belongs(name, parts) and (lacking := set(third_party(path)) - allowed)
    }
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "more"), [(PARTS, ()), ((*PARTS, *WITH_NUMPY), ("numpy",))])
def test_every_module_is_imported_on_the_image(
    tmp_path: Path, parts: tuple[str, ...], more: tuple[str, ...]
) -> None:
    names = ["unbroken", *(f"unbroken.{n}" for n in modules() if n and belongs(n, parts))]
    assert len(names) > 100
    code = (
        "import importlib, json, sys\nfor n in json.load(sys.stdin): importlib.import_module(n)\nprint('all')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(names), env=image(tmp_path / "image", *more),
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout == "all\n", done.stderr[-3000:]


@pytest.mark.slow
def test_a_run_survives_on_the_image(tmp_path: Path) -> None:
    """Supervisor, agent, keeper and trainer: all of them, over a failure."""
    env = image(tmp_path / "image")
    for name in ("pytest", "jinja2", "numpy"):
        absent = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(absent, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and f"No module named '{name}'" in done.stderr
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "unbroken", "run", "--run-dir", "run", "--", "train.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = "".join(p.read_text() for p in sorted((tmp_path / "run").rglob("rank-*.log")))
    assert "from 0" in log and "from 8" in log and "ended at 12" in log, log


SCRIPT = """
import os
import torch, unbroken

for name in ("jinja2", "numpy", "pytest"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is there")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
checkpoints = unbroken.Checkpointer(snapshot_every=2, persist_every=4)
found = checkpoints.restore(state := {"model": model, "opt": optimizer})
first = found.step if found is not None else 0
print("from", first, flush=True)
for step in range(first + 1, 13):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints.due(step) and checkpoints.save(step, state)
    print(f"step {step}", flush=True)
    if step == 9 and first == 0:
        checkpoints.wait()
        os.kill(os.getpid(), 9)
print("ended at", step, flush=True)
"""
