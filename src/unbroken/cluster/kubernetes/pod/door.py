"""From the container of the agent into that of the ranks: has the program there start something, or asks it.

Run by its path, so that it imports nothing of the package: `python -I -S door.py start SOCKET COMMAND...` stays as long as the
command and hands on its exit code; `gone SOCKET` succeeds where nothing is left there of what has ended.
"""

import array
import json
import os
import socket
import sys
import time

_WITHIN_S = 20.0
_AGAIN_S = 0.1
_MOST = 1 << 20


def connect(path: str, within_s: float = _WITHIN_S) -> socket.socket:
    """A connection; the program is started again where its container was. Raises OSError where nobody comes."""
    deadline = time.monotonic() + within_s
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(path)
            return link
        except OSError:
            link.close()
            if time.monotonic() > deadline:
                raise
        time.sleep(_AGAIN_S)


def ask(path: str, what: str, within_s: float = _WITHIN_S) -> dict:
    """The answer to a question. Raises OSError."""
    with connect(path, within_s) as link:
        link.settimeout(within_s)
        link.sendall(json.dumps({"op": what}).encode() + b"\n")
        return read_answer(link)


def read_answer(link: socket.socket) -> dict:
    data = b""
    while not data.endswith(b"\n"):
        piece = link.recv(1 << 16)
        if not piece or len(data) > _MOST:
            raise ConnectionResetError(104, "the container of the ranks has ended")
        data += piece
    answer: dict = json.loads(data)
    return answer


def start(path: str, argv: list) -> int:
    """Starts a command there with our environment's marks, and this process's output."""
    with connect(path) as link:
        order = json.dumps({"op": "start", "argv": argv, "env": dict(os.environ)}).encode() + b"\n"
        fds = array.array("i", [1, 2])
        sent = link.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        link.sendall(order[sent:])
        return int(read_answer(link)["code"])


def main(what: str, path: str, argv: list) -> int:
    try:
        if what == "start":
            return start(path, argv)
        return 1 if ask(path, "left", 5.0)["left"] else 0
    except (OSError, ValueError, KeyError) as e:
        print(f"the container of the ranks: {e}", file=sys.stderr)
        return 75


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
