"""Lines that a user adds: each example without its lines marked `# +` is the framework's own script, and there are one or two."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from . import exact

EXAMPLES = sorted(exact.EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_git_diff_shows_at_most_two_added_lines(example: Path, tmp_path: Path) -> None:
    lines = example.read_text().splitlines(keepends=True)
    marked = [line for line in lines if line.rstrip().endswith("+") and "#" in line]
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("".join(line for line in lines if line not in marked))
    after.write_text("".join(lines))
    diff = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", str(before), str(after)], capture_output=True, text=True, check=False
    )  # fmt: skip
    added, removed, _ = diff.stdout.split(maxsplit=2)
    assert 1 <= int(added) <= 2 and removed == "0", diff.stdout

    tree = ast.parse(before.read_text())  # what is left is a whole script, and knows nothing of ours
    docs = ast.get_docstring(tree, clean=False) or ""
    assert "unbroken" not in before.read_text().replace(docs, "")
    ours = {a.asname or a.name for n in ast.walk(ast.parse("".join(lines))) if isinstance(n, ast.ImportFrom)
            for a in n.names if (n.module or "").startswith("unbroken")}  # fmt: skip
    assert ours and ours.isdisjoint({n.id for n in ast.walk(tree) if isinstance(n, ast.Name)})
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    assert not [n.attr for n in used if n.value.id == "loader"], "methods of our loaders"
