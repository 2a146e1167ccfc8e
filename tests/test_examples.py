"""What an example imports of ours exists: a name that was changed everywhere else would be found by nobody but its reader."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def names(path: Path) -> list[tuple[str, str]]:
    """(module, name) of each import from unbroken."""
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    return [
        (n.module, a.name)
        for n in found
        if n.module and n.module.split(".")[0] == "unbroken"
        for a in n.names
    ]


@pytest.mark.parametrize("path", [p for p in EXAMPLES if names(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_what_an_example_imports_is_there(path: Path) -> None:
    for module, name in names(path):
        file = ROOT / "src" / Path(*module.split("."))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        said = {
            getattr(t, "name", getattr(t, "id", None))
            for n in ast.parse(file.read_text()).body
            for t in [n, *getattr(n, "targets", []), getattr(n, "target", None), *getattr(n, "names", [])]
        } | {a.asname for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom) for a in n.names}  # fmt: skip
        inside = file.parent / f"{name}.py"
        lazily = f'"{name}"' in file.read_text()  # a package that imports a name when it is asked for
        assert name in said or inside.exists() or (file.parent / name).is_dir() or lazily, (
            f"{path}: {module} has no {name}"
        )
