"""What to type to get an optional library: a command that works where this very interpreter runs."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

MAKE_TARGETS = {
    "eval": "install-eval", "ray": "install-all", "s3": "install-all", "hosts": "install-all", "kubernetes": "install-all",
    "hooks-transformers": "install-all",
    "hooks-accelerate": "install-all", "hooks-lightning": "install-all", "hooks-torchft": "install-all",
    "hooks-torchtitan": "install-hooks", "hooks-deepspeed": "install-hooks", "hooks-megatron": "install-hooks",
}  # fmt: skip
"""Extras that `make install` leaves out, and the target of a checkout's Makefile that brings them."""
REQUIRED = ("typer", "rich", "psutil", "numpy", "xxhash")
"""What every installation brings, and a source checkout on an image may lack. As an extra they are ""."""
_ROOT = Path(__file__).resolve().parents[2]


def requirements(extra: str) -> list[str]:
    """The requirements of an extra ("": of the package itself) as pip takes them, such as `duckdb>=1.3`; [] where they are not known.

    The package's own name never stands in them: an index may know that name as somebody else's.
    """
    try:
        named = metadata.requires("unbroken") or []
    except metadata.PackageNotFoundError:
        return _of_checkout(extra)
    if not extra:
        return [r for r in named if ";" not in r]
    mark = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    return [r.split(";")[0].strip() for r in named if ";" in r and mark.search(r.split(";", 1)[1])]


def install_command(extra: str, *, root: Path = _ROOT, prefix: str = sys.prefix) -> str:
    """The command that installs an extra for this interpreter.

    In the environment that a checkout's `make install` made it is a target of its Makefile (pinned versions), elsewhere
    pip with the libraries' own names.
    """
    target = MAKE_TARGETS.get(extra, "install")
    if Path(prefix) == root / ".venv" and (root / "Makefile").is_file():
        return f"make -C {shlex.quote(str(root))} {target}"
    wanted = requirements(extra)
    return shlex.join([sys.executable, "-m", "pip", "install", *(wanted or ([extra] if extra else REQUIRED))])


def _of_checkout(extra: str) -> list[str]:
    """The same from pyproject.toml, where the package runs from its sources without being installed."""
    import tomllib

    try:
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
        return list(project["optional-dependencies"][extra] if extra else project["dependencies"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return []
