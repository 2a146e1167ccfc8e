"""Every command that README shows works with what `make install` brings, on a machine that has nothing else."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

_ONLY = """
import importlib.machinery, os

refused = set(os.environ["TEST_REFUSED"].split(","))
find = importlib.machinery.PathFinder.find_spec

def find_only_what_is_pinned(name, path=None, target=None):
    return None if name.split(".")[0] in refused else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_only_what_is_pinned
"""


def commands() -> list[list[str]]:
    """The shell lines of README that call `unbroken` itself, in order, without their comments."""
    blocks = README.split("```")[1::2]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words for words in lines if words and words[0] == ".venv/bin/unbroken"]


def pinned(file: str = "run.txt") -> set[str]:
    """The distributions that a requirements file names, with those that it includes."""
    found = set()
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        if line.startswith("-r "):
            found |= pinned(line[3:].strip())
        elif line and not line.startswith("#"):
            found.add(re.sub(r"[-_.]+", "-", line.split("==")[0]).lower())
    return found


def refused_modules() -> set[str]:
    """Modules of this environment that `make install` would not have brought."""
    allowed = pinned() | {"unbroken", "pip"}
    return {
        module
        for module, dists in metadata.packages_distributions().items()
        if module.isidentifier() and not any(re.sub(r"[-_.]+", "-", d).lower() in allowed for d in dists)
    }


def test_what_is_pinned_for_the_commands_is_what_the_extras_name() -> None:
    """Nothing of README's extras is left to be installed by hand, but the two that it calls too heavy."""
    text = (ROOT / "pyproject.toml").read_text()
    for extra in ("train", "diagnose", "trace", "telemetry", "s3", "stacks"):
        named = re.findall(r'"([A-Za-z0-9_-]+)[\[>=<]', re.search(rf"^{extra} = \[(.*?)\]$", text, re.M)[1])  # type: ignore[index]
        assert {re.sub(r"[-_.]+", "-", n).lower() for n in named} <= pinned(), extra


def test_what_make_install_brings_is_pinned_to_the_last_library() -> None:
    """Nothing comes along unpinned: two machines that install on two days have the same libraries."""
    for distribution in sorted(pinned()):
        for text in metadata.requires(distribution) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert re.sub(r"[-_.]+", "-", needed.name).lower() in pinned(), f"{distribution}: {needed}"


@pytest.mark.slow
@pytest.mark.integration
def test_every_command_runs_with_what_make_install_brings(tmp_path: Path) -> None:
    assert len(commands()) >= 10
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_ONLY)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {
        **os.environ, "HOME": str(tmp_path / "home"), "TEST_REFUSED": ",".join(sorted(refused_modules())),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "src")]),
    }  # fmt: skip
    (tmp_path / "home").mkdir()
    for key in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        env.pop(key, None)
    assert "transformers" not in pinned(), "the blocker must have something to refuse"
    for words in commands():
        done = subprocess.run(
            [sys.executable, "-m", "unbroken", *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def test_what_is_too_heavy_is_named_with_a_command_of_this_checkout() -> None:
    """Blocked lm_eval: the message names a target that the Makefile has."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    from unbroken.extras import MAKE_TARGETS, REQUIRED, install_command, requirements

    assert set(MAKE_TARGETS.values()) | {"install"} <= targets
    told = install_command("eval", root=ROOT, prefix=str(ROOT / ".venv"))
    assert told == f"make -C {shlex.quote(str(ROOT))} install-eval"
    assert "make install-eval" in README
    elsewhere = install_command("trace", prefix="/usr")
    assert "duckdb" in elsewhere and "unbroken[" not in elsewhere
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements("trace") == project["optional-dependencies"]["trace"]
    assert requirements("") == project["dependencies"]
    assert [Requirement(r).name for r in project["dependencies"]] == list(REQUIRED)
