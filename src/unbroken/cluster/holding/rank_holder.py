"""Starts ranks where it runs itself, on order of the node's agent, which runs elsewhere: in another step of a scheduler.

Run by its path, so that it imports nothing of the package: `python -I -S rank_holder.py SOCKET`. It connects to the agent's
socket; each message is a line of JSON, and one that starts a rank brings the descriptor of its log. It ends with all its
ranks when the agent closes the connection, or is gone.
"""

import array
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_OOM_FIRST = "1000"
_MOST = 1 << 22
STEP_NAMES = "UNBROKEN_STEP_NAMES"
"""Names of variables, with commas, that ranks have of this process and not of their agent."""


def main(path: str) -> int:
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, _pass_over)
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.connect(path)
    tell(agent, hello=os.getpid())
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, _pass_over)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(agent, selectors.EVENT_READ)
    selector.register(wakes, selectors.EVENT_READ)
    data, fds = b"", []
    while True:
        for key, _ in selector.select():
            if key.fileobj == wakes:
                os.read(wakes, 4096)
                continue
            piece, given = receive(agent)
            fds += given
            if not piece:
                end(ranks)
                return 0
            data += piece
        *lines, data = data.split(b"\n")
        for line in lines:
            start(agent, json.loads(line), fds.pop(0), ranks)
        for pid, process in list(ranks.items()):
            if (code := process.poll()) is not None:
                del ranks[pid]
                tell(agent, ended=pid, code=code)


def receive(agent: socket.socket) -> tuple[bytes, list[int]]:
    """What came, with the descriptors in it; nothing once the agent has gone."""
    try:
        piece, ancillary, _, _ = agent.recvmsg(_MOST, socket.CMSG_SPACE(16 * 4))
    except OSError:
        return b"", []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return piece, list(fds)


def start(agent: socket.socket, order: dict, out: int, ranks: dict) -> None:
    """Starts a rank and says its process, or why there is none."""
    try:
        process = subprocess.Popen(
            order["argv"], cwd=order["cwd"], env={**step_environment(), **order["env"]}, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=as_a_rank,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as e:
        tell(agent, refused=str(e), errno=getattr(e, "errno", None) or 0)
        return
    finally:
        os.close(out)
    ranks[process.pid] = process
    tell(agent, started=process.pid)


def step_environment() -> dict[str, str]:
    """What the scheduler has set for this step, or container: the agent's own are another one's."""
    named = os.environ.get(STEP_NAMES, "").split(",")
    return {k: v for k, v in os.environ.items() if k in named or k.startswith(("SLURM_", "SLURMD_"))}


def as_a_rank() -> None:
    """A rank never outlives this process, hears the signals that it does not, and goes first where memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write(_OOM_FIRST)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(sig, signal.SIG_DFL)


def end(ranks: dict) -> None:
    """Kills what is left; whoever has left its rank is taken in and ended by the small parent of this step."""
    for process in ranks.values():
        process.kill()
    for process in ranks.values():
        process.wait()


def tell(agent: socket.socket, **fields: object) -> None:
    with contextlib.suppress(OSError):
        agent.sendall(json.dumps(fields).encode() + b"\n")


def _pass_over(*_: object) -> None:
    """What is sent to a whole job before it ends is the supervisor's to answer."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
