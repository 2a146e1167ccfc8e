"""The diagnosis beside the supervisor: the same verdict, within bounds, and never in its loop's way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

from unbroken.diagnose import diagnose
from unbroken.diagnose.judge.facts import Facts, HangFact, RankExit
from unbroken.journal.codec import decode, encode
from unbroken.recover.supervise.incident.diagnosing import IncidentDiagnosis, answer

FACTS = Facts(
    exits=(RankExit(0, "node-000", 1, None, 12.5), RankExit(1, "node-001", None, 9, 13.0, True)),
    lost_nodes=("node-002",), hang=HangFact(7, "training", 60.0, (1,), "/x"), nodes=((0, "node-000"), (1, "node-001")),
    oom_kills=(1,), step=7,
)  # fmt: skip
KEY_ERROR = """step 1 loss 2.0
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    batch["labels"]
KeyError: 'labels'
"""
FAILED = Facts(exits=(RankExit(0, "node-000", 1, None, 12.5),), nodes=((0, "node-000"),), step=1)


def log(folder: Path, text: str = KEY_ERROR) -> list[Path]:
    path = folder / "rank-0.log"
    path.write_text(text)
    return [path]


def test_facts_survive_the_way_to_the_process() -> None:
    assert decode(Facts, json.loads(json.dumps(asdict(FACTS)))) == FACTS
    assert decode(Facts, json.loads(json.dumps(encode(Facts())))) == Facts()


def test_the_verdict_is_that_of_the_library_and_the_loop_goes_on(tmp_path: Path) -> None:
    logs = log(tmp_path, "WARNING: cut, this message repeats for every sample 254\n" * 40_000 + KEY_ERROR)

    async def go() -> None:
        diagnosis, longest, done = IncidentDiagnosis(), 0.0, False

        async def beat() -> None:
            nonlocal longest
            while not done:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - began)

        beating = asyncio.create_task(beat())
        try:
            verdict = await diagnosis(logs, FAILED)
            again = await diagnosis(log(tmp_path), FAILED)
        finally:
            done = True
            await beating
            await diagnosis.close()
        assert verdict.reason == again.reason == "KeyError"
        assert again == diagnose(log(tmp_path), facts=FAILED)
        assert longest < 1.0

    asyncio.run(go())


def test_a_bounded_diagnosis_says_what_it_did_not_read(tmp_path: Path) -> None:
    logs = log(tmp_path, "nothing of interest here\n" * 200_000 + KEY_ERROR)
    got = answer({"logs": [str(p) for p in logs], "facts": asdict(FAILED), "seconds": 20, "bytes": 200_000})
    assert got["verdict"]["unread"] > 1_000_000
    assert any("not everything was read" in n for n in got["verdict"]["notes"])


def test_one_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from unbroken.recover.supervise.incident import diagnosing

    monkeypatch.setattr(diagnosing, "PATIENCE_S", 0.1)

    async def go() -> None:
        diagnosis = IncidentDiagnosis(within_s=0.2)
        await diagnosis.warm_up()
        assert diagnosis._process is not None
        os.kill(diagnosis._process.pid, signal.SIGSTOP)
        verdict = await diagnosis(log(tmp_path), FAILED)
        assert (verdict.reason, verdict.confidence) == ("Unknown", 0.0)
        assert "was given up after" in verdict.notes[0] and "too long" in verdict.notes[0]
        monkeypatch.undo()
        diagnosis.within_s = 20.0
        assert (await diagnosis(log(tmp_path), FAILED)).reason == "KeyError", (
            "the next one has a process of its own"
        )
        await diagnosis.close()

    asyncio.run(go())


def test_a_stop_cuts_it_short(tmp_path: Path) -> None:
    async def go() -> None:
        diagnosis = IncidentDiagnosis()
        await diagnosis.warm_up()
        assert diagnosis._process is not None
        os.kill(diagnosis._process.pid, signal.SIGSTOP)
        asking = asyncio.create_task(diagnosis(log(tmp_path), FAILED))
        await asyncio.sleep(0)
        began = time.monotonic()
        diagnosis.hurry.set()
        verdict = await asking
        assert time.monotonic() - began < 5
        assert "asked to stop" in verdict.notes[0]
        await diagnosis.close()

    asyncio.run(go())


def test_a_process_that_dies_is_told_and_replaced(tmp_path: Path) -> None:
    async def go() -> None:
        diagnosis = IncidentDiagnosis()
        await diagnosis.warm_up()
        assert diagnosis._process is not None
        diagnosis._process.kill()
        verdict = await diagnosis(log(tmp_path), FAILED)
        assert verdict.reason == "KeyError" or "failed" in verdict.notes[0]
        assert (await diagnosis([tmp_path / "none"], FAILED)).notes[0].startswith("the diagnosis failed")
        assert (await diagnosis(log(tmp_path), FAILED)).reason == "KeyError"
        await diagnosis.close()

    asyncio.run(go())
