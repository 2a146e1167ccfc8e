"""The diagnosis of an attempt, in a process of its own, within bounds of time and bytes.

Whatever a log holds, the supervisor's loop goes on beside it: it answers signals, renews leases and hears of nodes. A
process is kept ready, because importing the diagnosis takes longer than most diagnoses. It ends with its supervisor.

Run as `python -m unbroken.recover.supervise.incident.diagnosing`: one JSON request a line on its input, one JSON answer a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....diagnose import Facts, judge_unread
from ....diagnose.observed.interruptions import judge_interruption
from ....errors import UnbrokenError
from ....journal.codec import decode, encode
from ....progress.records.verdict import Verdict

_log = logging.getLogger("unbroken.supervisor")
WITHIN_S = 10.0
"""Time for one diagnosis; what it has not read by then is left out, and its verdict says how much."""
BYTES = 256 << 20
"""Bytes of logs that one diagnosis reads, over all ranks."""
PATIENCE_S = 10.0
"""Beyond `WITHIN_S`, for a machine that hardly runs; then it is ended, and the verdict is that of the facts alone."""
AFTER_STOP_S = 1.0
"""What a diagnosis still gets once the run was asked to stop."""
_LINE_MAX = 64 << 20


class IncidentDiagnosis:
    """Diagnoses one attempt at a time. `hurry` is set when the run was asked to stop."""

    def __init__(
        self, *, within_s: float = WITHIN_S, limit_bytes: int = BYTES, hurry: asyncio.Event | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Quoted files are named from `folder` on."""
        self.within_s, self.limit_bytes = within_s, limit_bytes
        self.hurry = hurry or asyncio.Event()
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def warm_up(self) -> None:
        """Starts the process, so that the first incident does not wait for it."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "unbroken.recover.supervise.incident.diagnosing", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=_LINE_MAX,
            )  # fmt: skip

    async def __call__(self, logs: Sequence[Path], facts: Facts) -> Verdict:
        """The verdict; that of the facts alone, with the reason in its notes, where the bounds were reached or the process
        failed."""
        if (interruption := judge_interruption(facts)) is not None:
            return interruption  # no log has to be read for it
        began = time.monotonic()
        asking = asyncio.ensure_future(self._ask(logs, facts))
        hurrying = asyncio.ensure_future(self.hurry.wait())
        left = self.within_s + PATIENCE_S
        try:
            await asyncio.wait({asking, hurrying}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await asyncio.wait({asking}, timeout=AFTER_STOP_S if self.hurry.is_set() else 0.0)
            if asking.done():
                return asking.result()
            took = time.monotonic() - began
            why = "the run was asked to stop meanwhile" if self.hurry.is_set() else "it took too long"
            return judge_unread(facts, f"the diagnosis was given up after {took:.0f} s: {why}")
        except (OSError, ValueError, UnbrokenError, asyncio.LimitOverrunError) as e:
            _log.warning("the diagnosis failed: %s", e)
            return judge_unread(facts, f"the diagnosis failed: {e}")
        finally:
            hurrying.cancel()
            if not asking.done() or asking.cancelled() or asking.exception() is not None:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await asking
                await self.close()

    async def _ask(self, logs: Sequence[Path], facts: Facts) -> Verdict:
        await self.warm_up()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(await asyncio.to_thread(self._phrase, logs, facts))  # facts grow with the ranks
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise ValueError(f"its process ended with {await process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return Verdict.from_json(answer["verdict"])

    def _phrase(self, logs: Sequence[Path], facts: Facts) -> bytes:
        request = {
            "logs": [str(p) for p in logs], "facts": encode(facts), "seconds": self.within_s, "bytes": self.limit_bytes,
            "folder": str(self._folder) if self._folder else None,
        }  # fmt: skip
        return json.dumps(request).encode(errors="surrogateescape") + b"\n"

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request's answer: the verdict, or in words why there is none."""
    from ....diagnose import Limits, diagnose

    try:
        limits = Limits(seconds=request["seconds"], bytes=request["bytes"])
        folder = Path(request["folder"]) if request.get("folder") else None
        verdict = diagnose(
            request["logs"], facts=decode(Facts, request["facts"]), limits=limits, folder=folder
        )
        return {"verdict": verdict.as_json()}
    except UnbrokenError as e:
        return {"error": str(e)}
    except Exception as e:  # noqa: BLE001  whatever a log does to the diagnosis, the run has to go on
        return {"error": f"{type(e).__name__}: {e}"}


def main() -> None:
    """Entry point of the process: answers until its input ends."""
    from .... import diagnose  # imported before it is asked

    assert diagnose
    for line in sys.stdin.buffer:
        text = json.dumps(answer(json.loads(line)))
        sys.stdout.buffer.write(text.encode(errors="replace") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
