"""A warm process: imports what the rank before imported, checks that it still is what a cold start would be, and waits.

Run by `startup.py` in the interpreter of a rank, before its script; like that it imports nothing for itself. What it says, and
what it is ordered, are files in its folder, each whole: `order` (what to import), `said` (what came of it), then a byte comes
through the pipe `go`, `launch` says which rank of which attempt it is, and `answer` whether it can be. Then `site` goes on, and
the interpreter runs the script.
"""

import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would be a module that a cold start has later
    from collections.abc import Iterator
    from typing import Any, ClassVar

_LAUNCH = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
)  # fmt: skip
"""With UNBROKEN_* and TORCHELASTIC_*, all that may differ from one attempt to the next. PyTorch reads where the flight recorder dumps
as it makes the first process group, which a warm process has not."""
_OF_A_STEP = (b"SLURM_", b"SLURMD_")
_WHILE_IMPORTING = {"TORCH_WARM_POOL": "0"}
"""In a warm process: inductor would start its pool of compile workers with the import. The first compilation does."""
_OF_COMPILERS = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "KMP_DUPLICATE_LIB_OK",
        "CUDA_HOME", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    }
)  # fmt: skip
"""What inductor and Triton set for themselves while they compile (torch/_inductor: cache_dir_utils, compile_tasks, codecache,
triton_heuristics, cpp_builder). What they import after that does not depend on it; an import that reads one is left out."""
_OF_FILES_ALONE = (
    ("triton.runtime.cache", "triton_key"), ("triton.compiler.compiler", "triton_key"), ("torch._inductor.codecache", "torch_key"),
)  # fmt: skip
"""Functions that hash a package's own files and keep the result for the process: the first compilation would wait for it."""
_WAITED_OUT = 86
_BROKEN = 87


def _tell(folder: str, name: str, value: "dict[str, Any]") -> None:
    """A file that appears whole."""
    aside = f"{folder}/{name}.aside"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(fd, marshal.dumps(value))
    os.close(fd)
    os.rename(aside, f"{folder}/{name}")


def _read(path: str) -> "dict[str, Any]":
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while piece := os.read(fd, 1 << 20):
            data += piece
    finally:
        os.close(fd)
    found: dict[str, Any] = marshal.loads(data)
    return found


class Spoiled(BaseException):
    """It is not any more what a cold start would be. `name` is the module whose import did it, "" for none."""

    def __init__(self, why: str, name: str = "") -> None:
        super().__init__(why)
        self.why, self.name = why, name


class _WatchedEnviron(os._Environ):
    """Knows which variables were read by name; whoever goes through all of them reads none."""

    read: "ClassVar[dict[str, str]]" = {}  # noqa: RUF012
    """Name -> the module whose import read it first."""
    importing = ""
    _passing = ""

    def __getitem__(self, key: str) -> str:
        if key != self._passing:
            self.read.setdefault(key, self.importing)
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> "Iterator[str]":
        for key in super().__iter__():
            _WatchedEnviron._passing = key
            yield key
        _WatchedEnviron._passing = ""


def become_warm(folder: str, recorder: "Any") -> None:
    """Returns when this process is to be its rank."""
    try:
        WarmInterpreter(folder, recorder).run()
    except BaseException as e:  # noqa: BLE001  it must never go on by itself
        _tell(folder, "said", {"why": f"{type(e).__name__}: {e}"})
        os._exit(_BROKEN)


class WarmInterpreter:
    """A warm process: imports, checks, waits."""

    def __init__(self, folder: str, recorder: "Any") -> None:
        self._folder, self._recorder = folder, recorder
        self._order = _read(f"{folder}/order")
        os.environ.update(self._order["env"])
        self._generators: dict[str, Any] = {}
        self._torch_seed: int | None = None
        self._importing = ""
        self._installed: dict[str, bool] = {}
        self._roots = tuple(
            p + "/" for p in sys.path if p.endswith(("site-packages", "dist-packages")) or p in _stdlib()
        )
        self._own, self._own_namespaces = self._find_own()
        self._spoiled: Spoiled | None = None

    def run(self) -> None:
        """Returns when it is to be its rank."""
        self._go = os.open(f"{self._folder}/go", os.O_RDONLY | os.O_CLOEXEC)
        began, plain = time.monotonic(), type(os.environ)
        fds, path, cwd = _open_files(), list(sys.path), os.getcwd()
        added = {k: v for k, v in _WHILE_IMPORTING.items() if k not in os.environ}
        os.environ.update(added)
        self._recorder.begin()
        os.environ.__class__ = _WatchedEnviron
        self._recorder.watch = self._watch
        try:
            stopped = self._import(fds, path, cwd)
            self._hash_files(fds)
        except Spoiled as e:
            _tell(self._folder, "said", {"why": e.why, "name": e.name})
            os._exit(_BROKEN)
        self._recorder.watch = None
        os.environ.__class__ = plain
        for key in added:
            del os.environ[key], self._recorder.base[os.fsencode(key)]
        self._recorder.seen = dict(vars(os.environ)["_data"])
        files = _stat_modules()
        _freeze_objects()
        took = time.monotonic() - began
        _tell(self._folder, "said", {"seconds": took, "count": len(sys.modules), "stopped": stopped})
        self._wait()
        self._take_over(files)

    # --- imports

    def _import(self, fds: set[tuple[str, str]], path: list[str], cwd: str) -> str:
        """Imports what the rank before imported; returns why not all of it, "" where all."""
        stopped = ""
        then: dict[str, str] | None = {}
        for line in self._order["imports"]:
            if line[:1] == "=":
                words = line[1:].split(" ")
                then = dict(zip(words[::2], words[1::2], strict=False))
                continue
            if line[:1] == "/":
                then = None
                continue
            if line in sys.modules or line in self._order["without"] or line == "__main__":
                continue
            top = line.partition(".")[0]
            if top in self._own or not self._is_installed(top):
                continue
            if stopped := self._compare(then):
                break
            self._importing = _WatchedEnviron.importing = line
            try:
                __import__(line)
            except ModuleNotFoundError as e:
                if not e.name or not (line + ".").startswith(e.name + "."):
                    raise Spoiled(f"importing {line} fails: {e}", line) from None
            except Exception as e:  # noqa: BLE001  of whatever package
                raise Spoiled(f"importing {line} fails: {type(e).__name__}: {e}", line) from None
            if self._spoiled is not None:
                raise self._spoiled
            self._check_variables(then, line)
            self._check(fds, line)
            if sys.path[: len(path)] != path:
                raise Spoiled(f"importing {line} changes sys.path", line)
            if os.getcwd() != cwd:
                raise Spoiled(f"importing {line} changes the working directory", line)
            self._check_generators(line)
        self._check_torch()
        return stopped

    def _hash_files(self, fds: set[tuple[str, str]]) -> None:
        for module, name in _OF_FILES_ALONE:
            function: Any = getattr(sys.modules.get(module), name, None)
            if hasattr(function, "cache_info") or hasattr(
                function, "set"
            ):  # torch_key's cache is of its own kind
                self._importing = _WatchedEnviron.importing = module
                try:
                    function()
                except Exception:  # noqa: BLE001  the script meets it, if it asks at all
                    continue
                self._check(fds, module)
        self._check_torch()

    def _compare(self, then: dict[str, str] | None) -> str:
        """Why nothing more may be imported: what the script had changed by here. "" where it had changed nothing."""
        if then is None:
            return "the script changes sys.path before it imports the rest"
        now: dict[str, str] = self._recorder.changed()
        differ = [k for k in {**then, **now} if then.get(k) != now.get(k) and k not in _OF_COMPILERS]
        return f"the script sets {differ[0]} before it imports the rest" if differ else ""

    def _check_variables(self, then: dict[str, str] | None, name: str) -> None:
        """Raises Spoiled where the import has read a variable of the compilers that was another one when it was recorded."""
        now: dict[str, str] = self._recorder.changed()
        for key in _OF_COMPILERS.intersection(then or ()):
            if _WatchedEnviron.read.get(key) == name and (then or {}).get(key) != now.get(key):
                raise Spoiled(f"importing {name} reads {key}, which the script has set by then", name)

    def _check(self, fds: set[tuple[str, str]], name: str) -> None:
        import _thread

        if _thread._count() > 0:
            raise Spoiled(f"importing {name} starts a thread", name)
        more = [place for number, place in _open_files() if (number, place) not in fds]
        if any(place.startswith("/dev/nvidia") for place in more):
            # An import that asks how many GPUs there are loads the driver, which has pipes of its own, and makes no context.
            fds |= _open_files()
        elif more:
            raise Spoiled(f"importing {name} leaves {more[0]} open", name)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pass
        else:
            raise Spoiled(f"importing {name} starts a process", name)
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            raise Spoiled(f"importing {name} makes a CUDA context", name)

    def _watch(self, name: str) -> None:
        self._note_generators()
        if "." in name or self._spoiled is not None:
            return
        if name in self._own or (name in self._own_namespaces and self._find(name) is None):
            self._spoiled = Spoiled(
                f"importing {self._importing} looks for {name}, which the script's folder has",
                self._importing,
            )
        elif not self._is_installed(name) and self._find(name) is not None:
            self._spoiled = Spoiled(
                f"importing {self._importing} looks for {name}, which is no installed package",
                self._importing,
            )

    def _note_generators(self) -> None:
        """Notes the states as soon as there are any: what follows may not change them."""
        if "random" not in self._generators and hasattr(sys.modules.get("random"), "getstate"):
            read = sys.modules["random"].getstate
            self._generators["random"] = read(), read
        numpy = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
        if "numpy" not in self._generators and numpy is not None:

            def read_numpy() -> object:
                kind, keys, *rest = numpy.get_state()
                return kind, keys.tobytes(), rest

            self._generators["numpy"] = read_numpy(), read_numpy
        if self._torch_seed is None:
            torch = getattr(sys.modules.get("torch._C"), "default_generator", None)
            self._torch_seed = None if torch is None else torch.initial_seed()

    def _check_generators(self, importing: str) -> None:
        self._note_generators()
        for name, (before, read) in self._generators.items():
            if before != read():
                raise Spoiled(f"importing {importing} uses the random generator of {name}", importing)

    def _check_torch(self) -> None:
        torch: Any = sys.modules.get("torch")
        if self._torch_seed is not None and hasattr(torch, "Generator"):
            # As one that nobody has used, of the seed that this one was made with.
            fresh = torch.Generator().manual_seed(self._torch_seed).get_state()
            if torch.get_rng_state().numpy().tobytes() != fresh.numpy().tobytes():
                raise Spoiled("an import uses the random generator of torch")

    def _is_installed(self, top: str) -> bool:
        if top not in self._installed:
            spec = self._find(top)
            origins = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
            self._installed[top] = any(
                o in ("built-in", "frozen") or (o + "/").startswith(self._roots) for o in origins
            ) or (top == "unbroken" and spec is not None)
        return self._installed[top]

    def _find(self, top: str) -> "Any":
        for finder in sys.meta_path:
            find = None if finder is self._recorder else getattr(finder, "find_spec", None)
            if find is not None and (spec := find(top, None)) is not None:
                return spec
        return None

    def _find_own(self) -> tuple[set[str], set[str]]:
        """What could be imported from the script's folder: modules and packages; plain folders."""
        own: set[str] = set()
        namespaces: set[str] = set()
        folder = self._order["own"]
        try:
            names = os.listdir(folder)
        except OSError:
            names = []
        for name in names:
            stem, dot, kind = name.partition(".")
            if dot and kind.endswith(("py", "pyc", "so")):
                own.add(stem)
            elif not dot and os.path.isdir(f"{folder}/{name}"):
                (own if os.path.exists(f"{folder}/{name}/__init__.py") else namespaces).add(name)
        return own, namespaces

    # --- the order to go on

    def _wait(self) -> None:
        if os.read(self._go, 1) != b"g":
            os._exit(_WAITED_OUT)  # whoever would give the order is gone

    def _take_over(self, files: "dict[str, Any]") -> None:
        """Becomes the rank that is ordered; ends, and says why, where it cannot."""
        order = _read(f"{self._folder}/launch")
        base, then = self._recorder.base, {os.fsencode(k): os.fsencode(v) for k, v in order["env"].items()}
        # What Slurm has set for the step in which this process waits is that of its rank too: the agent does not know it.
        then = {k: v for k, v in base.items() if k.startswith(_OF_A_STEP)} | then
        if why := self._find_refusal(order, base, then, files):
            _tell(self._folder, "answer", {"why": why})
            os._exit(_WAITED_OUT)
        for key in {**base, **then}:
            if base.get(key) == then.get(key):
                continue
            if key in then:
                os.environ[os.fsdecode(key)] = os.fsdecode(then[key])
            else:
                os.environ.pop(os.fsdecode(key), None)
        # What imports have set stays a change, as it was when it was recorded.
        self._recorder.base, self._recorder.seen = then, dict(vars(os.environ)["_data"])
        _rewrite_environment(order["marks"])
        before = len(sys.orig_argv) - len(sys.argv) + 1
        sys.argv[1:] = order["arguments"]
        sys.orig_argv[before:] = order["arguments"]
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.close(self._go)
        _tell(self._folder, "answer", {})

    def _find_refusal(
        self,
        order: "dict[str, Any]",
        base: dict[bytes, bytes],
        then: dict[bytes, bytes],
        files: "dict[str, Any]",
    ) -> str:
        for key in {**base, **then}:
            if base.get(key) == then.get(key):
                continue
            name = os.fsdecode(key)
            if name not in _LAUNCH and not name.startswith(("UNBROKEN_", "TORCHELASTIC_")):
                return f"{name} is another one now"
            if name in _WatchedEnviron.read:
                return (
                    f"{name} is another one now, and was read when {_WatchedEnviron.read[name]} was imported"
                )
        if os.getcwd() != order["cwd"]:
            return "the working directory is another one now"
        if changed := next((p for p, s in files.items() if s != _stat(p)), ""):
            return f"{changed} was changed since it was imported"
        return ""


def _freeze_objects() -> None:
    """Leaves what imports have made out of garbage collection for good, of which nothing would ever be garbage: the first
    compilation would look through all of it, for a fifth of its time."""
    gc: Any = sys.modules.get("gc")
    if gc is not None:
        gc.collect()
        gc.freeze()


def _stdlib() -> tuple[str, str]:
    folder = os.__file__.rpartition("/")[0]
    return (folder, folder + "/lib-dynload")


def _open_files() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            pass  # that of the listing itself
    return found


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        s = os.stat(path)
    except OSError:
        return None
    return s.st_mtime_ns, s.st_size, s.st_ino


def _stat_modules() -> dict[str, tuple[int, int, int] | None]:
    """Of the file of every module that is loaded."""
    paths = (getattr(m, "__file__", None) for m in list(sys.modules.values()))
    return {p: _stat(p) for p in paths if isinstance(p, str)}


def _rewrite_environment(marks: dict[str, str]) -> None:
    """Writes values of the same length over those that /proc/PID/environ shows: by them processes are found. Raises OSError,
    ValueError."""
    fd = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
    words = os.read(fd, 4096).rpartition(b")")[2].split()
    os.close(fd)
    start, end = int(words[47]), int(words[48])
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        block = b"\0" + os.pread(memory, end - start, start)
        for key, value in marks.items():
            at = block.index(b"\0" + key.encode() + b"=") + len(key) + 2
            if block.index(b"\0", at) - at != len(value):
                raise ValueError(f"there is no room for {key}={value}")
            os.pwrite(memory, value.encode(), start + at - 1)
    finally:
        os.close(memory)
