"""A language model as judge, behind an OpenAI-compatible endpoint.

A judge fails in its own ways: it is overloaded, it times out, it answers with a poem. None of that makes an answer
wrong. Each item is tried again, with growing pauses that obey `Retry-After`; calls are held to a rate; and what has
no verdict in the end is `Unscored`, with the reason, and counted apart.

    from unbroken.evaluate.scoring.judge import Judge
    JUDGE = Judge("http://127.0.0.1:8000/v1", model="judge-70b")
    def score(row, output):
        return JUDGE.verdict(f"Question: {row['q']}\\nAnswer: {output}\\nRight? yes or no", {"yes": 1.0, "no": 0.0})
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...link.openai import Endpoint, EndpointRefused, Retry


class Unscored(Exception):
    """There is no verdict on this sample, for this reason; it is not wrong."""


@dataclass
class Rate:
    """At most so many calls a minute, spread evenly; shared by all threads."""

    per_minute: float
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def wait(self) -> None:
        """Returns when the next call may go."""
        with self._lock:
            now = self.now()
            at = max(self._next, now)
            self._next = at + 60.0 / self.per_minute
        if at > now:
            self.sleep(at - now)


class Judge:
    """Asks a model for verdicts."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        attempts: int = 6,
        per_minute: float = 600.0,
        timeout_s: float = 120.0,
        max_tokens: int = 512,
        system: str = "",
        key_env: str = "OPENAI_API_KEY",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._endpoint = Endpoint(url, model, timeout_s=timeout_s, key_env=key_env)
        self._max_tokens, self._system = max_tokens, system
        self._rate = Rate(per_minute, sleep=sleep)
        self._retry = Retry(attempts, sleep)

    def ask(self, prompt: str, *, read: Callable[[str], Any]) -> Any:
        """`read` applied to the judge's reply, tried again while the call fails or `read` raises ValueError.

        Raises Unscored after the last attempt, or at once where trying again cannot help.
        """
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": prompt})

        def once(attempt: int) -> Any:
            self._rate.wait()
            # Later attempts are sampled: a greedy judge would give the same unreadable reply again.
            temperature = 0.0 if attempt == 0 else 0.7
            reply = self._endpoint.chat(
                messages, max_tokens=self._max_tokens, temperature=temperature, seed=attempt
            )
            try:
                return read(reply)
            except ValueError as e:
                why = f"the judge's reply could not be read: {e}"
                raise EndpointRefused(why, again=True, retry_after=0.0) from e

        try:
            return self._retry(once)
        except EndpointRefused as e:
            raise Unscored(str(e)) from e

    def verdict(self, prompt: str, choices: Mapping[str, float]) -> float:
        """The value of the choice that the reply names, by `read_choice`. Raises Unscored."""
        return float(self.ask(prompt, read=lambda reply: choices[read_choice(reply, list(choices))]))

    def grade(self, prompt: str, low: float, high: float) -> float:
        """The last number in the reply, between `low` and `high`. Raises Unscored."""
        return float(self.ask(prompt, read=lambda reply: read_grade(reply, low, high)))


def read_choice(reply: str, choices: Sequence[str]) -> str:
    """The one choice that a judge's reply ends with: in [[...]] or after 'verdict:' first, else the only one it names.

    Raises ValueError where none or several are named: a guess would be a verdict that nobody gave.
    """
    names = {c.casefold(): c for c in choices}
    marked = re.findall(r"\[\[\s*(.+?)\s*\]\]", reply) or re.findall(
        r"(?im)\bverdict\s*[:=]\s*\**([^\n.*]+)", reply
    )
    if marked:
        said = marked[-1].strip().casefold()
        if said in names:
            return names[said]
    found = {
        c for folded, c in names.items() if re.search(rf"(?<!\w){re.escape(folded)}(?!\w)", reply.casefold())
    }
    if len(found) != 1:
        said = ", ".join(sorted(found)) or "none"
        raise ValueError(f"it names {said} of {', '.join(choices)}: {reply.strip()[:80]!r}")
    return found.pop()


def read_grade(reply: str, low: float, high: float) -> float:
    """The number that a judge's reply ends with: in [[...]] first, else the last one. Raises ValueError."""
    marked = re.findall(r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]", reply) or re.findall(
        r"(?<![\w.])-?\d+(?:\.\d+)?(?=\s*/\s*\d+|\b)", re.sub(r"/\s*\d+(?:\.\d+)?", "", reply)
    )
    if not marked:
        raise ValueError(f"it names no number: {reply.strip()[:80]!r}")
    value = float(marked[-1])
    if not low <= value <= high:
        raise ValueError(f"{value:g} is not between {low:g} and {high:g}: {reply.strip()[:80]!r}")
    return value
