"""What the preparation of a task read: files and folders with stamps, so that a change of any of them is noticed.

An audit hook sees every file that Python opens, in this process, in its forks, and in Python processes that it starts
(child_reads/sitecustomize.py). What C code opens without Python is found otherwise: data files that `datasets` resolved,
files that are mapped when the task is prepared, arguments of commands, and paths that the task's own code names.

A stamp is the fast way to know that nothing changed. What changed is prepared again, and then the prompts themselves say
which answers still hold: too many files in here cost a second preparation, never an answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import site
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import source_from_cache
from pathlib import Path
from types import FrameType
from typing import Any

import xxhash

from ..contracts import Json, digest
from .reads_in_code import is_blind, named_in

SPOOL = "UNBROKEN_READS"
"""Names the file to which child processes add what they read."""
CHILDREN = Path(__file__).parent / "child_reads"
HASHED = 256 * 2**20
"""Larger files count by their stamp where content is asked for."""
BLIND = "(what its code learns otherwise than by reading files)"
"""Stands among the stamps of a task that does: never as it was, so that it is prepared again by every command."""
_WRITES = os.O_WRONLY | os.O_RDWR
MEMORY = "/dev/shm/"
"""Files like any other, in memory."""
_RUNS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")

Stamp = list[Json]


def stamp(path: str) -> Stamp:
    """What changes when a file or folder does: of a file size, times and inode, of a folder its names; [] where nothing is."""
    try:
        st = os.stat(path)
        if stat.S_ISDIR(st.st_mode):
            names = sorted(n for n in os.listdir(path) if n != "__pycache__" and not n.startswith("."))
            return ["folder", digest(names)]
        return ["file", st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino]
    except (OSError, ValueError):
        return []


def unchanged(reads: Mapping[str, Stamp], seen: dict[str, Stamp] | None = None) -> bool:
    """Whether every stamp is what it was. `seen` remembers, for tasks that share files."""
    seen = {} if seen is None else seen
    for path, before in reads.items():
        if before == ["folder?"]:  # a folder that was opened as a file: nothing of it was read
            if not os.path.isdir(path):
                return False
            continue
        if path not in seen:
            seen[path] = stamp(path)
        if seen[path] != before:
            return False
    return True


def content(reads: Mapping[str, Stamp]) -> str:
    """A hash of what the files hold, wherever they lie; folders and what was not there do not count."""
    found = []
    for path, before in reads.items():
        if before[:1] == ["file"]:
            name = os.path.basename(path)
            found.append([name, before[1:3] if before[1] > HASHED else _hash(path)])
    return digest(sorted(found, key=str))


def _hash(path: str) -> str:
    made = xxhash.xxh3_128()
    try:
        with open(path, "rb") as f:
            while data := f.read(1 << 20):
                made.update(data)
    except OSError:
        return "unreadable"
    return made.hexdigest()


def texts(value: Json) -> Iterator[str]:
    """Every text in an option that may name a file or folder."""
    if isinstance(value, str) and 0 < len(value) < 1000 and "\n" not in value and "\0" not in value:
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from texts(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from texts(v)


class ReadsRecorder:
    """Notes what is read while it is active. One at a time in a process."""

    def __init__(self, leave_out: Sequence[str] = (), spool: Path | None = None, growing: str = "") -> None:
        """`leave_out`: folders whose files are none of the task's. `growing`: the evaluation's own folder, in which names
        come and go."""
        self._growing = _folder(growing) if growing else ""
        self._out = tuple(_folder(p) for p in (*_machine(), *leave_out))
        self._libraries = tuple(_folder(p) for p in _libraries())
        self._spool = spool
        self._pid = os.getpid()
        self._seen: dict[str, Stamp] = {}
        self._folders: dict[str, None] = {}
        self._written: set[str] = set()
        self.rewritten: set[str] = set()
        """Read, and then written by the task itself: what it left counts."""
        self._lock = threading.RLock()

    def note(self, path: object) -> None:
        """A file that is read, or looked for."""
        found = self._place(path)
        if found is None or found in self._seen or found in self._written:
            return
        if os.getpid() != self._pid:
            self._tell(found)
            return
        with self._lock:
            self._seen.setdefault(found, _of_file(found))

    def note_folder(self, path: object) -> None:
        """A folder whose names are read."""
        if isinstance(path, int):  # a folder that is open
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return
        found = self._place("." if path is None else path)
        if found is None or (self._growing and (found + os.sep).startswith(self._growing)):
            return
        if not self._is_cache(found):
            self._folders[found] = None

    def note_written(self, path: object) -> None:
        """A file that the preparation itself writes is nothing that it was given."""
        found = self._place(path)
        if found is not None:
            (self.rewritten if found in self._seen else self._written).add(found)

    def note_base(self, path: object) -> None:
        """A data base: it is opened to be read or written, and nobody knows which."""
        self.note(path)
        found = self._place(path)
        if found is not None:
            self.rewritten.add(found)

    def reads(self, *, blind: bool = True) -> dict[str, Stamp]:
        """All of it, with what is found only now: see the module. `blind`: with BLIND where that holds."""
        for path in [*self._mapped(), *self._modules(), *self._reported()]:
            self.note(path)
        for path, before in _at_import.items():  # an earlier task of this process may have imported it
            if self._place(path) is not None:
                self._seen.setdefault(path, before)
        code = [p for p in self._seen if p.endswith(".py")]
        for path in named_in(code, [*self._folders]):
            self.note(path)
        found = {p: s for p, s in self._seen.items() if p not in self._written}
        found |= {p: stamp(p) for p in self.rewritten & set(found)}
        found |= {p: s for p in self._folders if (s := stamp(p))[:1] == ["folder"]}
        if blind and any(is_blind(p) for p in code if not p.startswith(self._libraries)):
            found[BLIND] = [BLIND]
        return found

    def _place(self, path: object) -> str | None:
        try:
            text = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
        except (TypeError, ValueError, OSError):
            return None  # a descriptor
        if text.endswith(".pyc"):
            with contextlib.suppress(ValueError, NotImplementedError):
                text = source_from_cache(text)
        if text.startswith(self._out) and not text.startswith(MEMORY):
            return None
        if text.endswith(".lock") and self._is_cache(os.path.dirname(text)):
            return None  # of `datasets`
        if text.startswith(self._libraries) and not _of_tasks(text):
            return None
        return text

    def _is_cache(self, path: str) -> bool:
        """Folders that fill while other tasks are prepared."""
        kept = [os.environ.get(k) or "" for k in ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")]
        config = getattr(sys.modules.get("datasets"), "config", None)
        kept += [str(getattr(config, "HF_DATASETS_CACHE", "")), os.path.expanduser("~/.cache")]
        inside = (path + os.sep).startswith(tuple(_folder(p) for p in kept if p))
        return inside or path in (os.sep, "/tmp", tempfile.gettempdir(), os.path.expanduser("~"))

    def _tell(self, path: str) -> None:
        if self._spool is not None:
            with contextlib.suppress(OSError):
                fd = os.open(self._spool, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.write(fd, os.fsencode(path) + b"\0")
                os.close(fd)

    def _reported(self) -> list[str]:
        try:
            said = self._spool.read_bytes() if self._spool is not None else b""
        except OSError:
            return []
        return [os.fsdecode(p) for p in said.split(b"\0") if p]

    def _mapped(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                at = line.find("/")
                if at > 0 and not line.endswith(" (deleted)") and ".so" not in line:
                    yield line[at:]

    def _modules(self) -> Iterator[str]:
        """Modules of the user's: an earlier task of this process may have imported them."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str):
                yield file


_at_import: dict[str, Stamp] = {}
"""What modules outside of the libraries read while they were imported in this process: no later task reads it again."""
_active: ReadsRecorder | None = None
_hooked = False
_busy = threading.local()


@contextlib.contextmanager
def recording(
    leave_out: Sequence[str] = (), spool: Path | None = None, growing: str = ""
) -> Iterator[ReadsRecorder]:
    """Inside, what is read is noted."""
    global _active, _hooked
    if not _hooked:
        sys.addaudithook(_on_event)  # for as long as the process lives: there is no taking it off
        _hooked = True
    before, recorder = _active, ReadsRecorder(leave_out, spool, growing)
    kept = os.environ.get(SPOOL)
    if spool is not None:
        os.environ[SPOOL] = str(spool)
    _active = recorder
    try:
        yield recorder
    finally:
        _active = before
        if kept is None:
            os.environ.pop(SPOOL, None)
        else:
            os.environ[SPOOL] = kept


@contextlib.contextmanager
def part() -> Iterator[list[str]]:
    """Inside, what is read first is named in the list, once it is over; nothing where nobody records."""
    before = set(_active._seen) if _active is not None else set()
    found: list[str] = []
    yield found
    if _active is not None:
        found += [p for p in _active._seen if p not in before]


def note(path: object) -> None:
    """For code that knows what it reads."""
    if _active is not None:
        _active.note(path)


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    recorder = _active
    if recorder is None or getattr(_busy, "now", False):
        return
    _busy.now = True
    try:
        if event == "open":
            path, mode, flags = args
            how = _use(path, mode, flags)
            {"read": recorder.note, "written": recorder.note_written, "both": recorder.note_base}[how](path)
            found = recorder._place(path) if how == "read" else None
            if found is not None and found in recorder._seen and _importing(recorder):
                _at_import.setdefault(found, recorder._seen[found])
            _follow_datasets()
        elif event in ("os.listdir", "os.scandir"):
            recorder.note_folder(args[0])
        elif event == "sqlite3.connect":
            recorder.note_base(args[0])
        elif event == "ctypes.dlopen":
            recorder.note(args[0])
        elif event in _RUNS:
            for word in _words(args):
                if os.path.isfile(word):
                    recorder.note(word)
    except Exception:  # noqa: BLE001  a hook that raises would break the open itself
        pass
    finally:
        _busy.now = False


def _use(path: object, mode: object, flags: object) -> str:
    """Whether a file is opened to be "read", "written", or "both": then what it held before counts, where it was there."""
    if isinstance(mode, str):
        if not set(mode) & set("wxa"):
            return "read"
        keeps = "a" in mode and "+" in mode
    else:
        if not isinstance(flags, int) or not flags & _WRITES:
            return "read"
        keeps = bool(flags & os.O_RDWR) and not flags & (os.O_TRUNC | os.O_EXCL)
    return "both" if keeps and os.path.isfile(os.fsdecode(path)) else "written"  # type: ignore[arg-type]


def _importing(recorder: ReadsRecorder) -> bool:
    """Whether this is the code of a module itself that runs, one of the task's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and not code.co_filename.startswith((*recorder._libraries, "<")):
            above = frame.f_back
            return above is not None and above.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return False


def _words(value: object) -> Iterator[str]:
    if isinstance(value, str | bytes | os.PathLike):
        text = os.fsdecode(value)
        yield text
        yield from re.split(r"[\s'\"=;|<>()]+", text)
    elif isinstance(value, Iterable) and not isinstance(value, Mapping):
        for v in value:
            yield from _words(v)


def _follow_datasets() -> None:
    """Has `datasets` tell the data files that it resolved: it reads none of them where its cache has them."""
    kind = getattr(sys.modules.get("datasets.builder"), "DatasetBuilder", None)
    if kind is None or hasattr(kind, "_unbroken_follows"):
        return
    theirs = kind.__init__

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        theirs(self, *args, **more)
        files = getattr(self.config, "data_files", None)
        for group in files.values() if isinstance(files, Mapping) else ():
            for file in group if isinstance(group, Sequence) and not isinstance(group, str) else [group]:
                if "://" not in str(file):
                    note(str(file))

    kind.__init__, kind._unbroken_follows = __init__, True
    tables: Any = sys.modules.get("datasets.table")
    for name in ("_memory_mapped_arrow_table_from_file", "_in_memory_arrow_table_from_file"):
        if hasattr(tables, name):  # Arrow's own files: a table that is gone is mapped no longer
            setattr(tables, name, _noting(getattr(tables, name)))


def _noting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def read(file: Any, *args: Any, **more: Any) -> Any:
        note(file)
        return theirs(file, *args, **more)

    return read


def _of_file(path: str) -> Stamp:
    """As `stamp`; of a folder that was opened as a file, nothing."""
    try:
        st = os.stat(path)
    except (OSError, ValueError):
        return []
    return ["folder?"] if stat.S_ISDIR(st.st_mode) else stamp(path)


def _of_tasks(path: str) -> bool:
    """Whether a file of a library is one of a harness's tasks: an installed task that is edited keeps its version."""
    home = getattr(sys.modules.get("lm_eval"), "__file__", None)
    return home is not None and path.startswith(os.path.join(os.path.dirname(home), "tasks") + os.sep)


def _folder(path: str) -> str:
    return os.path.abspath(path).rstrip(os.sep) + os.sep


def _machine() -> list[str]:
    return ["/proc", "/sys", "/dev"]


def _libraries() -> list[str]:
    """Folders whose files change with a version: libraries, Python's own, and this package."""
    found = [sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += site.getsitepackages() + [site.getusersitepackages(), str(Path(__file__).parents[3])]
    found += [os.path.join(p, "lib") for p in (sys.prefix, sys.base_prefix)]
    return [p for p in found if p]
