"""What of this machine a sandbox may read: the interpreter and its packages, never somebody's home folder."""

from __future__ import annotations

import os
import pwd
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin")


def python_paths() -> list[str]:
    """What a Python program needs to read: this interpreter, its library and its packages.

    A prefix that is a home folder, or lies above one, or is the `.local` of one, is not given whole: then only the
    interpreter, the library and the packages in it.
    """
    executable = Path(sys.executable)
    real = executable.resolve()
    places: set[str] = set()
    for prefix in (
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        sys.base_exec_prefix,
        str(real.parent.parent),
    ):
        places |= set(_parts(Path(prefix)) if is_home(prefix) else [prefix])
    # Each link on the way to the interpreter, since it is started by its first name.
    link = executable
    for _ in range(16):
        places.add(str(link))
        if not link.is_symlink():
            break
        link = Path(os.path.normpath(link.parent / os.readlink(link)))
    places |= {p for k in ("stdlib", "platstdlib", "purelib", "platlib") if (p := sysconfig.get_path(k))}
    return sorted(p for p in places if os.path.exists(p) and not is_home(p))


def _parts(prefix: Path) -> list[str]:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    found = [prefix / "pyvenv.cfg", *(prefix / lib / version for lib in ("lib", "lib64"))]
    found += [*prefix.glob("lib*/libpython*"), *prefix.glob("bin/python*")]
    return [str(p) for p in found]


def is_home(path: str) -> bool:
    """Whether this is somebody's home folder, its `.local`, or a folder above one."""
    given = {Path(os.path.normpath(path)), Path(path).resolve()}
    for home in _homes():
        if any(p == home or p == home / ".local" or p in home.parents for p in given):
            return True
    return False


def _homes() -> set[Path]:
    """The home folders of this machine's people; those of its services are system folders."""
    named = {os.environ.get("HOME", ""), str(_own_home())}
    try:
        named |= {
            e.pw_dir for e in pwd.getpwall() if e.pw_uid in (0, os.getuid()) or 1000 <= e.pw_uid < 65_534
        }
    except OSError:
        pass
    homes = {Path(os.path.normpath(h)) for h in named if h.startswith("/")}
    homes |= {h.resolve() for h in homes}
    return {
        h for h in homes if h != Path("/") and not any(h == Path(s) or Path(s) in h.parents for s in _SYSTEM)
    }


def _own_home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def outermost(paths: Iterable[str]) -> list[str]:
    """The paths without those inside another one, system folders left out."""
    kept: list[str] = []
    for p in sorted(set(paths)):
        inside = [*kept, *_SYSTEM]
        if p != "/" and not any(p == k or p.startswith(k.rstrip("/") + "/") for k in inside):
            kept.append(p)
    return kept
