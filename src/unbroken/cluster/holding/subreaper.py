"""The small parent of a node: starts the agent, takes in every orphan of the node, and does nothing else.

Run by its path, so that it imports nothing of the package: `python -I -S subreaper.py RECORD -- COMMAND...`, or with the role of
what it starts in place of `--`. It ends
when its last descendant has ended, and only then removes its record; a record without its process says that it was
killed, and that what it held can no longer be listed. It ignores every signal that can be ignored.
"""

import ctypes
import os
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36


def main(record: str, role: str, argv: list[str]) -> int:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        return 70
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_IGN)
    with open(f"/proc/{os.getpid()}/stat") as f:
        started = f.read().rpartition(")")[2].split()[19]
    # Before there is anything to hold: no agent without a record.
    os.makedirs(os.path.dirname(record), exist_ok=True)
    aside = f"{record}.{os.getpid()}.aside"
    with open(aside, "w") as f:
        f.write(f"{os.getpid()} {started}\n")
    os.rename(aside, f"{record}-{os.getpid()}-{started}")
    if os.fork() == 0:
        try:
            for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(sig, signal.SIG_DFL)
            os.environ["UNBROKEN_ROLE"] = "agent" if role == "--" else role
            os.execv(argv[0], argv)
        finally:
            os._exit(127)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
        except InterruptedError:
            continue
    tidy(record, f"{record}-{os.getpid()}-{started}")
    return 0


def tidy(record: str, mine: str) -> None:
    """Removes its own record, and the folders where nobody else's is left."""
    folder = os.path.dirname(record)
    try:
        os.unlink(mine)
        if not any(n.startswith("parent-") for n in os.listdir(folder)):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            above = os.path.dirname(folder)
            root = os.path.dirname(above)
            os.rmdir(folder)
            os.rmdir(above)
            for name in os.listdir(root):
                if name.endswith(".sock") and not is_listening(os.path.join(root, name)):
                    os.unlink(os.path.join(root, name))
            if os.listdir(root) == [
                "cluster.json"
            ]:  # what is known of the run's nodes goes with the last of them
                os.unlink(os.path.join(root, "cluster.json"))
            os.rmdir(root)
    except OSError:
        pass  # cleared already, or still used


def is_listening(path: str) -> bool:
    """Whether somebody accepts connections on this Unix socket."""
    import socket  # not before: it would be memory of every node for as long as it lives

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.setblocking(False)
        try:
            s.connect(path)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
