"""Imports between the folders point down only, and the light commands do not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "unbroken"
LAYERS = [
    {"errors", "extras", "units", "machine", "atomic", "private", "version"},
    {"link", "journal", "page"},
    {"progress", "samples"},
    {"trace", "telemetry", "cluster", "checkpoint", "data"},
    {"detect"},
    {"diagnose"},
    {"status"},
    {"recover", "evaluate"},
    {"train", "hooks", "simulate", "dashboard", "rehearse"},
    {"cli", "__main__", "testing"},
]
LEVEL = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def imports_of(path: Path) -> set[str]:
    """Top-level parts of unbroken that a file imports, anywhere in it."""
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
        found |= {t.split(".")[1] for t in targets if t.startswith("unbroken.") and t.count(".") >= 1}
    return found


def test_imports_point_down() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part in ("__init__", "testing"):
            continue
        for target in imports_of(path):
            if target in LEVEL and target != part and LEVEL[target] > LEVEL[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {target}")
            if target == "testing" and part != "cli":
                wrong.append(f"{path.relative_to(ROOT)} imports the shipped fakes")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["unbroken", "unbroken.cli.main", "unbroken.diagnose", "unbroken.trace"])
def test_light_imports_do_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["unbroken.cli.main", "unbroken.trace.readers", "unbroken.trace.report"])
def test_a_report_does_not_wait_for_what_it_does_not_need(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'numpy', 'psutil', 'asyncio'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
