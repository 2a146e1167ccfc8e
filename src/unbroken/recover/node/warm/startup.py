"""What happens in a rank's interpreter before its script: it begins to record its imports, or it is a warm process.

Run by `hook/sitecustomize.py`, whose folder the agent puts in front of PYTHONPATH: `site` imports it before the interpreter turns
to the script, so that the script, its arguments, `__main__`, `sys.path[0]`, exit code and traceback are the interpreter's own
business in every case. It takes itself out of PYTHONPATH and `sys.path` first, and imports nothing but built-in modules:
what a cold start would not show, it does not do.

A process that is started cold records the order of its imports (`ImportRecorder`). A warm process (UNBROKEN_ROLE=warm) makes those
imports and waits (`warming.py`); it never goes on to the script without the order to.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would be a module that a cold start has later
    from typing import Any

_RECORD = 1 << 20
_BROKEN = 87


def main(hook: str) -> None:
    """Called once, by the hook in `hook`."""
    folder = os.environ.pop("UNBROKEN_START", "")
    warm = os.environ.get("UNBROKEN_ROLE") == "warm"
    mine = sys.modules.get("sitecustomize")
    try:
        _leave_no_trace(hook)
        _load_others()
        if folder:
            recorder = ImportRecorder(folder)
            sys.meta_path.insert(0, recorder)
            if warm:
                load(hook.rpartition("/")[0] + "/warming.py")["become_warm"](folder, recorder)
    except BaseException as e:  # noqa: BLE001  whatever it is: a rank starts all the same, a warm process never does
        if warm:
            os.write(2, f"{type(e).__name__}: {e}\n".encode("utf-8", "replace"))
            os._exit(_BROKEN)
        # Else it starts as it would without us.
    if sys.modules.get("sitecustomize") is mine:
        raise ImportError("the user has none", name="sitecustomize")  # which `site` passes over


def _leave_no_trace(hook: str) -> None:
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == hook:
        os.environ["PYTHONPATH"] = rest
        if not rest:
            del os.environ["PYTHONPATH"]
    sys.path[:] = [p for p in sys.path if p != hook]
    sys.path_importer_cache.pop(hook, None)


def load(path: str) -> "dict[str, Any]":
    """Runs a file of ours without an entry in `sys.modules`; returns its names."""
    importer: Any = sys.modules["_frozen_importlib_external"]
    loader = importer.SourceFileLoader("unbroken_warm", path)
    names: dict[str, Any] = {"__name__": "unbroken_warm", "__file__": path, "__builtins__": __builtins__}
    exec(loader.get_code("unbroken_warm"), names)
    return names


def _load_others() -> None:
    """The user's own `sitecustomize`, which this one hides; and `usercustomize`, which `site` would import after it."""
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as e:
        if e.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine  # `importlib` looks for it
    site = sys.modules.get("site")
    if site is not None and getattr(site, "ENABLE_USER_SITE", False):
        try:
            import usercustomize  # type: ignore[import-not-found]  # noqa: F401
        except ImportError as e:
            if e.name != "usercustomize":
                raise


def _check_sum(text: bytes) -> str:
    """FNV-1a of 64 bits: values of variables are compared, and not kept."""
    h = 0xCBF29CE484222325
    for b in text:
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


class ImportRecorder:
    """A finder that finds nothing: it writes down which modules are imported, in order, and where the script has changed
    environment or `sys.path` before. Lines in a file: `name`, `=NAME sum ...` (all that differs), `/`."""

    def __init__(self, folder: str) -> None:
        self._file, self._room = f"{folder}/imports", _RECORD
        self._write("#")
        self.base: dict[bytes, bytes] = {}
        self.seen: dict[bytes, bytes] = {}
        self._pid, self._last = os.getpid(), ""
        self.path, self._path = list(sys.path), list(sys.path)
        self.begin()
        self.watch: Any = None
        """Called with each name that is looked up, while a warm process imports."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if self._pid == os.getpid():  # not in what the script forks
            try:
                self._note(name)
            except OSError:
                self._room = 0  # a full disk: what is recorded has to do
            if self.watch is not None:
                self.watch(name)
        return

    def _note(self, name: str) -> None:
        last, self._last = self._last, name
        if last in sys.modules:
            self._write(last)
        if self._environ != self.seen:
            self.seen = dict(self._environ)
            self._write("=" + " ".join(f"{k} {v}" for k, v in self.changed().items()))
        if sys.path != self._path:
            self._path = list(sys.path)
            if self.path not in (sys.path[: len(self.path)], sys.path[1 : len(self.path) + 1]):
                self._write("/")

    def changed(self) -> dict[str, str]:
        """What differs from the environment at the start, each with the check sum of its value; of a missing one "-"."""
        now, base = self._environ, self.base
        found = {k: _check_sum(v) for k, v in now.items() if base.get(k) != v}
        found.update({k: "-" for k in base if k not in now})
        return {k.decode("utf-8", "replace"): found[k] for k in sorted(found)}

    def begin(self) -> None:
        """Counts changes of the environment from here on."""
        self._environ: dict[bytes, bytes] = vars(os.environ)["_data"]
        self.base = dict(self._environ)
        self.seen = dict(self._environ)

    def _write(self, line: str) -> None:
        data = line.encode("utf-8", "replace") + b"\n"
        self._room -= len(data)
        if self._room >= 0:
            # Opened for each line: an open file would be seen, and shift the numbers of the script's own.
            fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
