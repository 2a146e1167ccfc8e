"""A model that answers from a hash of the question, so that every engine, shard and machine hears the same.

`FakeBackend` is a backend as `unbroken.evaluate` takes it: `--backend unbroken.testing.fake_models:FakeBackend`.
Its options (`ModelSpec.options`) make it slow, forgetful or broken on purpose.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelDoesNotLoad, OutOfMemory
from ..evaluate.contracts import Conditions, Json, ModelSpec, Request


def unit(*parts: Any) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    text = json.dumps(parts, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big") / 2**48


def respond(request: Request, occurrence: int = 0, *, skill: float = 0.6, salt: str = "") -> Json:
    """What the fake says: `[logprob, is_greedy]`, a log-probability, or a text; for 'plain' the row's text reversed.

    It adds numbers right with probability `skill`, and repeats most words of other prompts. `occurrence` tells
    repeated questions apart.
    """
    kind, arguments = request.kind, list(request.arguments)
    luck = unit(salt, kind, arguments, occurrence)
    if kind in ("loglikelihood", "multiple_choice"):
        return [-0.5 - len(str(arguments[1])) * (0.1 + luck), unit("greedy", salt, arguments) < skill]
    if kind == "loglikelihood_rolling":
        return -len(str(arguments[0])) * (1.0 + luck)
    if kind == "generate_until":
        text = arguments[0] if isinstance(arguments[0], str) else str(arguments[0][-1]["content"])
        sums = re.findall(r"(\d+) \+ (\d+) =\s*$", text)
        if sums:
            a, b = map(int, sums[-1])
            return f" {a + b + (0 if luck < skill else 1 + int(9 * luck))}"
        return " ".join(w for i, w in enumerate(text.split()[1:40]) if unit(salt, w, i, occurrence) < 0.8)
    row = arguments[0]
    return str(row.get("text", row.get("question", "")) if isinstance(row, dict) else row)[::-1]


class FakeBackend:
    """Loads `FakeModel`s. Options, all optional:

    `load_s`, `call_s`, `request_s` (seconds to load, per call, per request), `skill` (0 to 1), `salt` (another model),
    `oom_above` (a batch above it does not fit), `broken` (a reason: the model does not load), `refuse` (a regular
    expression: requests that match it get no answer), `die_after` (kills its own process after so many calls, once
    per file named by `die_marker`), `busy` (true: burns CPU instead of sleeping).
    """

    needs_weights = False

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """The same for the same source and salt; None where the source is a folder, whose files are hashed then."""
        if Path(spec.source).is_dir():
            return None
        return hashlib.sha256(f"{spec.source}|{spec.options.get('salt', '')}".encode()).hexdigest()[:32]

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> FakeModel:
        """A fake model after `load_s`. Raises ModelDoesNotLoad if told to."""
        why = spec.options.get("broken")
        if why:
            raise ModelDoesNotLoad(f"the model does not load: {why}", where=spec.source, hint="Fix the fake")
        time.sleep(float(spec.options.get("load_s", 0.0)))
        return FakeModel(spec)


class FakeModel:
    """Answers from a hash."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = dict(spec.options)
        self._batch = spec.batch_size
        self.calls = 0

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request; raises OutOfMemory while the batch is above `oom_above`."""
        self.calls += 1
        limit = self._options.get("oom_above")
        if limit is not None and min(self._batch, len(requests)) > int(limit):
            raise OutOfMemory(f"a batch of {self._batch} does not fit", where="fake device")
        self._maybe_die()
        self._spend(
            float(self._options.get("call_s", 0)) + len(requests) * float(self._options.get("request_s", 0))
        )
        out: list[Json] = []
        before: Request | None = None
        again = 0
        for r in requests:
            again = again + 1 if r == before else 0
            before = r
            out.append(
                respond(
                    r,
                    again,
                    skill=float(self._options.get("skill", 0.6)),
                    salt=str(self._options.get("salt", "")),
                )
            )
        return out

    def halve(self) -> bool:
        """Halves the batch."""
        if self._batch <= 1:
            return False
        self._batch //= 2
        return True

    def restore(self) -> None:
        """Back to what was asked for."""
        self._batch = self._spec.batch_size

    @property
    def conditions(self) -> Conditions:
        """What is recorded beside the score."""
        return Conditions("fake 1", "cpu", self._spec.dtype, self._batch, "none")

    def close(self) -> None:
        """Nothing to free."""

    def _maybe_die(self) -> None:
        after, marker = self._options.get("die_after"), self._options.get("die_marker")
        if after is None or self.calls <= int(after):
            return
        if marker:
            try:
                os.close(os.open(str(marker), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        os.kill(os.getpid(), 9)

    def _spend(self, seconds: float) -> None:
        if seconds <= 0:
            return
        if not self._options.get("busy"):
            time.sleep(seconds)
            return
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
