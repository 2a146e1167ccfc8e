"""Imports point down the list of docs/architecture.md only, nothing goes round in a circle, and light commands stay light."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ROOT = REPO / "src" / "unbroken"
PAGE = REPO / "docs" / "architecture.md"
MOST_FILES = 12
"""A folder with more files than a dozen, its `__init__` not counted, has folders of its own."""
MOST_LINES = 500


def _block(heading: str) -> list[str]:
    """The lines of the first code block below a heading of the page."""
    found = re.search(rf"^## {re.escape(heading)}\n.*?^```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found, f"docs/architecture.md has no list below '{heading}'"
    return found[1].splitlines()


LAYERS = [line.split("  ")[0].split() for line in _block("Parts")]
"""From the ground up: a line imports those above it; of one line only the files on the ground import each other."""
LEVEL = {name: i for i, layer in enumerate(LAYERS) for name in layer}
FOLDERS = {line.split()[0]: line.split()[1:] for line in _block("Folders of a part")}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    """Module without the leading `unbroken.` -> its file; "" is the package itself."""
    return {name_of(p): p for p in sorted(ROOT.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, anywhere in it: in functions and for types too."""
    package = ("unbroken", *path.relative_to(ROOT).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level]) if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            targets = [".".join([*module, a.name]) for a in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] != "unbroken":
                continue
            name = target.removeprefix("unbroken").removeprefix(".")
            while name not in modules():
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {name_of(path)}


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Module -> modules that it imports."""
    return {name: imports_of(path) for name, path in modules().items()}


def part_of(name: str) -> str:
    """The line's word that a module belongs to; a module may have a place of its own (data.position)."""
    return next((n for n in (name, name.split(".")[0]) if n in LEVEL), name.split(".")[0])


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in graph.get(v, ()):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            group = [stack.pop()]
            while group[-1] != v:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for v in list(graph):
        if v not in index:
            visit(v)
    return found


def children(package: str) -> dict[str, set[str]]:
    """The imports inside a package, between its files and folders as they lie beside each other."""
    inside: dict[str, set[str]] = defaultdict(set)
    prefix = package + "." if package else ""
    for name, targets in arrows().items():
        if not name.startswith(prefix):
            continue
        own = name.removeprefix(prefix).split(".")[0]
        for target in targets:
            other = target.removeprefix(prefix).split(".")[0]
            if target.startswith(prefix) and target and other != own:
                inside[own].add(other)
    return inside


def packages() -> list[str]:
    return [name for name, path in modules().items() if path.name == "__init__.py" and name]


def test_every_part_has_its_place_on_the_page() -> None:
    there = {
        p.name.removesuffix(".py")
        for p in ROOT.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert there - {"__init__", "__main__", "testing"} == {n for n in LEVEL if "." not in n}
    assert all(n in modules() for n in LEVEL if "." in n)


def test_imports_point_down() -> None:
    wrong = []
    for name, targets in arrows().items():
        part = part_of(name)
        if part in ("", "testing", "__main__"):
            continue
        for target in targets:
            other = part_of(target)
            if other == "testing":
                if name != "cli.runs.demo":
                    wrong.append(f"{name} imports the shipped fakes ({target})")
            elif other not in ("", part) and not (LEVEL[other] < LEVEL[part] or LEVEL[part] == 0):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_in_a_circle() -> None:
    assert circles(arrows()) == []


@pytest.mark.parametrize("package", packages())
def test_no_folder_is_in_a_circle(package: str) -> None:
    assert circles(children(package)) == []


def test_folders_import_those_before_them_on_the_page() -> None:
    """And every folder stands there."""
    for package in packages():
        folders = [p.rpartition(".")[2] for p in packages() if p.rpartition(".")[0] == package]
        if package == "testing" or not folders:
            continue
        order = FOLDERS.get(package, [])
        assert sorted(order) == sorted(folders), f"folders of {package} in docs/architecture.md"
        for own, targets in children(package).items():
            for other in targets:
                if own in order and other in order:
                    assert order.index(other) < order.index(own), f"{package}.{own} imports {package}.{other}"
    assert set(FOLDERS) <= set(packages())


def test_a_folder_is_readable_at_a_glance() -> None:
    crowded = {}
    for package in packages():
        path = modules()[package].parent
        files = [p for p in path.glob("*.py") if p.name != "__init__.py"]
        if len(files) > MOST_FILES:
            crowded[package] = len(files)
    assert crowded == {}


def test_a_file_is_read_in_one_go() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_where_a_thing_is_added_there_are_such_files() -> None:
    found = re.search(r"^## Where a thing is added\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    assert found
    rows = [line.split("|")[1].split()[0] for line in found[1].splitlines() if line.startswith("| ")]
    assert {"rule", "storage", "cluster", "check", "harness,", "page"} <= {*rows}, "asked for by name"
    places = re.findall(r"`((?:[\w.]+/)+[\w.]+|detect|hooks|cli)`", found[1])
    assert len(places) > 40
    assert [p for p in places if not (ROOT / p).exists() and not (REPO / p).exists()] == []
    for path, names in (
        ("checkpoint/storage/__init__.py", "open_storage"), ("evaluate/suite/registry.py", "HARNESSES BACKENDS"),
        ("evaluate/contracts/protocols.py", "Harness Backend"), ("diagnose/judge/facts.py", "Facts"),
        ("cli/cluster/doctor.py", "examine Finding"), ("detect/node/quick.py", "check_node"),
        ("detect/node/active/full.py", "check_fully"), ("cli/main.py", "COMMANDS FOLDERS"),
        ("checkpoint/storage/base.py", "Storage"), ("page/shell.py", "render"),
        ("cluster/contract.py", "Cluster"),
    ):  # fmt: skip
        assert path in found[1]
        for name in names.split():
            assert re.search(rf"^(?:class |def )?{name}\b", (ROOT / path).read_text(), re.M), (path, name)


def test_a_circle_would_be_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "e": ["d"]}) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "module",
    ["unbroken", "unbroken.cli.main", "unbroken.diagnose", "unbroken.trace", "unbroken.data.position"],
)
def test_light_imports_do_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["unbroken.cli.main", "unbroken.trace.readers", "unbroken.trace.report"])
def test_a_report_does_not_wait_for_what_it_does_not_need(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'numpy', 'psutil', 'asyncio'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
