"""Starts ranks of the trainer quickly: imports torch once, then forks a process for each rank that is asked for.

Line in: {"argv": [...], "env": {...}, "log": path}; line out: {"pid": n}. {"wait": pid} answers {"code": n}, the
exit code or minus the signal. Ends when its input does, after killing its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys


def serve() -> None:
    from unbroken.train.world import pin_environment

    pin_environment()
    import torch.distributed  # noqa: F401

    import unbroken.checkpoint.checkpointer
    import unbroken.train.loop  # noqa: F401

    children: set[int] = set()
    print(json.dumps({"ready": True}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            children.discard(order["wait"])
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            become(order)
        children.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def become(order: dict[str, object]) -> None:
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    env = order["env"]
    assert isinstance(env, dict)
    os.environ.update(env)
    from unbroken.train.__main__ import main

    argv = order["argv"]
    assert isinstance(argv, list)
    sys.exit(main(argv))


if __name__ == "__main__":
    serve()
