"""This node's side of a test of two nodes: a process of its own, with a deadline, that ends with its agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace

from ....detect.pairwise.probe import READY, ProbeOptions, ProbeResult, make_arguments, read_probe
from ....waiting import wait_within
from ...wire import Message
from .process import as_a_rank

_END_S = 2.0


async def probe_pair(message: Message) -> Message:
    """What this side saw: a `ProbeResult` as a message."""
    interface = str(message.get("interface") or "")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    found = await run_side(
        ProbeOptions(**message["options"]), {**os.environ, **dict.fromkeys(names, interface)}
    )
    return asdict(found)


async def run_side(options: ProbeOptions, env: Mapping[str, str]) -> ProbeResult:
    """Runs one side of a test in a process with this environment; it is gone when this returns, or is cancelled."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "unbroken.detect.pairwise.probe", *make_arguments(options), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=env,
        start_new_session=True, preexec_fn=as_a_rank,
    )  # fmt: skip
    assert process.stdout is not None
    began, ready_s = time.monotonic(), None
    try:
        line = await wait_within(process.stdout.readline(), options.within_s)
        ready_s = time.monotonic() - began if line.decode(errors="replace").startswith(READY) else None
        out, _ = await wait_within(process.communicate(), options.within_s + _END_S)
        return replace(read_probe(out.decode(errors="replace")), ready_s=ready_s)
    except TimeoutError:
        why = f"this side did not end within {options.within_s:g} s"
        return ProbeResult(False, why=why, ready_s=ready_s, answered=False)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
