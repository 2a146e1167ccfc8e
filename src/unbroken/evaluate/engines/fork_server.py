"""One process per node that imports what others need, once, and forks them: workers, or those that prepare and score.

python -m unbroken.evaluate.engines.fork_server FD BACKEND HARNESS...

FD is one end of a pair of sockets that keep messages apart: each request is one message of JSON with the child's standard input, output and error
beside it; each event is a line of JSON: {"ready": seconds}, {"unfit": why}, {"id", "pid"}, {"id", "code"}. It ends with the
other end of the socket; what it forked lives on, and ends as a worker does.

The fork comes before any device is touched: a CUDA context does not survive one. Where an import has made one all the same
it says so, and forks nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

MESSAGE = 1 << 16
"""Bytes of a request at most."""
WORKERS = ("unbroken.evaluate.engines.worker.process",)
SCORERS = ("unbroken.evaluate.preparation.prepare", "unbroken.evaluate.scoring.worker")


def serve(fd: int, backend: str, harnesses: Sequence[str] = ()) -> int:
    """Imports, then forks what it is asked for until the other end is gone."""
    link = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    began = time.monotonic()
    with _ends_with(link):
        _import(backend, harnesses)
    if why := _device_taken():
        _tell(link, {"unfit": why})
        return 0
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # an import may have closed one of the first three, and the next file would take its place
    os.close(spare)
    gc.collect()
    gc.freeze()  # the children share these pages as long as nobody writes to them
    _tell(link, {"ready": time.monotonic() - began})
    wake, signalled = os.pipe()
    for end in (wake, signalled):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([link.fileno(), wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _reap(link, children)
        if link.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(link, MESSAGE, 3)
            if not data:
                return 0
            request = json.loads(data)
            pid = os.fork()
            if not pid:
                _become(request, fds, (link.fileno(), wake, signalled))
            for f in fds:
                os.close(f)
            children[pid] = request["id"]
            _tell(link, {"id": request["id"], "pid": pid})


def _import(backend: str, harnesses: Sequence[str]) -> None:
    """`backend`: its workers; else the processes that prepare and score tasks of these harnesses."""
    from ..processes.garbage import without_collecting
    from ..suite.registry import get_backend, get_harness
    from .worker.warming import log

    began = time.monotonic()
    try:
        with without_collecting():
            for module in (*(WORKERS if backend else SCORERS), "unbroken.evaluate.harness.lm_eval", "unbroken.evaluate.harness.plain"):  # fmt: skip
                importlib.import_module(module)
            for user in (*([get_backend(backend)] if backend else []), *map(get_harness, harnesses)):
                warm = getattr(user, "warm", None)
                if warm is not None:
                    warm()
    except (Exception, SystemExit) as e:  # noqa: BLE001  whatever is missing is said when the model is loaded
        traceback.print_exc()
        log(f"imports: {type(e).__name__}: {e}")
    what = "every worker" if backend else f"preparing and scoring ({', '.join(harnesses) or 'no harness'})"
    log(f"imports for {what} took {time.monotonic() - began:.1f} s")


@contextlib.contextmanager
def _ends_with(link: socket.socket) -> Any:
    """Inside, this process ends if the other end does: an import may hang. No thread is left after it."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if select.select([link], [], [], 0.1)[0] and not link.recv(1, socket.MSG_PEEK):
                os._exit(0)
            if over.wait(0.05):  # a request waits there: do not spin
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _device_taken() -> str:
    """Why nothing may be forked; empty if all is well. NVML opens other files than a context does."""
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                    return "an import made a CUDA context"
    torch = sys.modules.get("torch")
    made = torch is not None and torch.cuda.is_initialized()
    return "an import made a CUDA context" if made else ""


def _reap(link: socket.socket, children: dict[int, int]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in children:
            _tell(link, {"id": children.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _tell(link: socket.socket, event: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the next request says that nobody is there
        link.sendall((json.dumps(event) + "\n").encode())


def _become(request: dict[str, Any], fds: Sequence[int], close: Sequence[int]) -> None:
    """In the child: what `python -m MODULE ARGUMENTS` would be in this environment. Does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for i, fd in enumerate(fds):
            os.dup2(fd, i)
        for fd in {*fds, *close} - {0, 1, 2}:
            os.close(fd)
        sys.stdin = os.fdopen(0, "r", closefd=False)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.clear()
        os.environ.update(request["env"])
        _reseed()
        module, *arguments = request["argv"]
        code = int(importlib.import_module(module).main(arguments))
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001  this is the end of the process, and nobody above it may go on in the child
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reseed() -> None:
    """What a new process has and a fork has not: random numbers of its own. Python's own generator sees to itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
