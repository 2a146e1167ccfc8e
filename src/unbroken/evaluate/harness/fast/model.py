"""A model of transformers that is fed: requests of many blocks come in, answers come out as they are ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import EvaluationError
from ...contracts import Conditions, Json, Request
from ..requests import generation_settings, rolling_windows
from ..tokens import Pair, texts_of_pair
from ..transformers_model import TransformersModel
from .fitting import Fit
from .generations import Generation, Generations
from .likelihoods import Likelihoods
from .waves import AskedProbability, Waves

AT_ONCE = 256
"""Samples that a worker gives at once: enough that lengths can be sorted and no place of a batch stays empty."""

SLICE = 1024
"""Requests of one call that are cut into tokens together."""

Place = tuple[Hashable, int]
"""A key, and the number of one of its requests."""


@dataclass(frozen=True)
class _Slice:
    """Some of the requests of one call."""

    number: int


@dataclass
class _Open:
    """What was put under one key."""

    outputs: list[Json]
    missing: int
    windows: dict[int, list[float]] = field(default_factory=dict)
    """Of rolling requests: the sum over their windows, and how many are still to come."""
    error: Exception | None = None


class FastModel:
    """Wraps a loaded model; `exact` is that one, in the harness's own batches."""

    def __init__(self, exact: TransformersModel) -> None:
        self.exact = exact
        self.at_once = max(2, int(exact.spec.options.get("at_once", AT_ONCE)))
        self.tokens_read, self.tokens_made = 0, 0
        self._open: dict[Hashable, _Open] = {}
        self._done: list[Hashable] = []
        self._likelihoods = Likelihoods(exact.torch, exact.model, exact.device)
        with exact.torch.inference_mode():
            self._fit = Fit(exact, self._likelihoods)
        self._waves = Waves(exact, self._likelihoods, self._fit, self._answer_pair, self._fail)
        self._texts = Generations(exact, self._fit, self._answer_text, self._fail, at_once=self.at_once)

    # ---- what the worker calls

    @property
    def steps(self) -> int:
        """Grows while it works at a long answer."""
        return self._texts.steps

    def put(self, key: Hashable, group: str, requests: Sequence[Request]) -> None:
        """Queues the requests of one key; `group`: what shares its beginning, such as a task's few-shot examples."""
        entry = self._open[key] = _Open([None] * len(requests), len(requests))
        if not requests:
            self._done.append(key)
        try:
            self._put_likelihoods(key, group, requests)
            self._put_rolling(key, group, requests, entry)
            self._put_generations(key, group, requests)
            for r in requests:
                if r.kind not in _KINDS:
                    raise EvaluationError(f"a transformers model cannot answer a '{r.kind}' request",
                                          hint="Use PlainBackend, or let infer.py define prompt(row)")  # fmt: skip
        except Exception as e:  # noqa: BLE001  the key's own fault; the others go on
            self._fail((key, 0), e)

    def take(self, within_s: float = 1.0) -> list[tuple[Hashable, list[Json] | Exception]]:
        """Does some work and returns what is ready by then: the outputs of a key, or why it has none."""
        with self.exact.torch.inference_mode():
            if self._done:
                pass
            elif self._waves and self._texts.can_pause:
                # They take less time than texts, and want the whole device.
                with self._texts.paused():
                    self._waves.step()
            elif self._texts:
                self._texts.step(within_s)
        ready, self._done = self._done, []
        return [(k, e.error or e.outputs) for k in ready if (e := self._open.pop(k, None)) is not None]

    def respond_exactly(self, requests: Sequence[Request]) -> list[Json]:
        """In the harness's own batches, with nothing else in flight."""
        with self._texts.paused():
            return self.exact.respond(requests)

    # ---- what every model has

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request, in order, with nothing else in flight. Raises what answering them raises."""
        found: dict[int, list[Json]] = {}
        starts = range(0, max(1, len(requests)), SLICE)
        for n, at in enumerate(starts):
            self.put(_Slice(n), "", requests[at : at + SLICE])
            if n + 1 < len(starts):  # the device works while the next ones are cut into tokens
                self._collect(found, within_s=0.0)
        while len(found) < len(starts):
            self._collect(found, within_s=1.0)
        return [output for n in range(len(starts)) for output in found[n]]

    def _collect(self, found: dict[int, list[Json]], within_s: float) -> None:
        for key, outputs in self.take(within_s):
            if not isinstance(key, _Slice):
                raise EvaluationError("a model was asked in two ways at once")
            if isinstance(outputs, Exception):
                raise outputs
            found[key.number] = outputs

    def halve(self) -> bool:
        """Halves the tokens of a batch; False where it holds one."""
        self._likelihoods.forget()
        return self._fit.halve()

    def restore(self) -> None:
        """Nothing: what did not fit will not fit the next time."""

    @property
    def conditions(self) -> Conditions:
        """What may move the last digits."""
        own = self.exact.conditions
        return Conditions(own.engine, own.device, own.dtype, 0, "batches by tokens", self._fit.tokens)

    @property
    def exact_conditions(self) -> Conditions:
        """Of `respond_exactly`."""
        return self.exact.conditions

    def close_texts(self) -> None:
        """Ends continuous batching and its thread; it begins again with the next text."""
        self._texts.close()

    def close(self) -> None:
        """Frees the device."""
        self._texts.close()
        self._likelihoods.forget()
        self.exact.close()

    # ---- requests come in

    def _put_likelihoods(self, key: Hashable, group: str, requests: Sequence[Request]) -> None:
        exact = self.exact
        found = [(i, r) for i, r in enumerate(requests) if r.kind in ("loglikelihood", "multiple_choice")]
        texts: dict[str, None] = {}
        for _, r in found:
            if r.arguments[0] != "":
                texts.update(dict.fromkeys(texts_of_pair(str(r.arguments[0]), str(r.arguments[1]))))
        known = exact.encode_all(texts)
        pairs = [exact.pair(i, str(r.arguments[0]), str(r.arguments[1]), known) for i, r in found]
        self.tokens_read += sum(len(p.key) for p in pairs)
        self._waves.put(group, [AskedProbability((key, p.index), p) for p in pairs])

    def _put_rolling(self, key: Hashable, group: str, requests: Sequence[Request], entry: _Open) -> None:
        exact = self.exact
        for i, r in enumerate(requests):
            if r.kind != "loglikelihood_rolling":
                continue
            tokens = exact.encode(str(r.arguments[0]))
            windows = list(rolling_windows(tokens, exact.prefix, exact.max_length))
            entry.windows[i] = [0.0, float(len(windows))]
            self.tokens_read += len(tokens)
            self._waves.put(group, [AskedProbability((key, i), Pair(i, c, t)) for c, t in windows])
            if not windows:
                self._answer((key, i), 0.0)

    def _put_generations(self, key: Hashable, group: str, requests: Sequence[Request]) -> None:
        exact = self.exact
        found = [(i, r) for i, r in enumerate(requests) if r.kind == "generate_until"]
        known = exact.encode_all({str(r.arguments[0]) for _, r in found}, prompts=True)
        before: Counter[str] = Counter()
        for i, r in found:
            prompt, settings = str(r.arguments[0]), generation_settings(r.arguments[1])
            limit = int(settings["max_gen_toks"])
            if (problem := exact.too_long(limit)) is not None:
                self._answer((key, i), problem)
                continue
            tokens = tuple(known[prompt][-(exact.max_length - limit) :])
            same = prompt if settings["do_sample"] else ""  # greedy texts are the same each time
            self._texts.put(Generation((key, i), group, prompt, tokens, settings, before[same]))
            before[same] += settings["do_sample"]
            self.tokens_read += len(tokens)

    # ---- answers go out

    def _answer_pair(self, place: Place, value: list[Any]) -> None:
        entry = self._open.get(place[0])
        window = entry.windows.get(place[1]) if entry is not None else None
        if window is None:
            self._answer(place, value)
            return
        window[0] += value[0]
        window[1] -= 1
        if window[1] == 0:
            self._answer(place, window[0])

    def _answer_text(self, place: Place, text: Json, tokens: int) -> None:
        self.tokens_made += tokens
        self._answer(place, text)

    def _answer(self, place: Place, value: Json) -> None:
        entry = self._open.get(place[0])
        if entry is None or entry.error is not None:
            return
        entry.outputs[place[1]] = value
        entry.missing -= 1
        if entry.missing == 0:
            self._done.append(place[0])

    def _fail(self, place: Place, e: Exception) -> None:
        """The key has no answer; what has not begun of it is not asked any more."""
        entry = self._open.get(place[0])
        if entry is not None and entry.error is None:
            entry.error = e
            self._done.append(place[0])
            self._waves.drop(_key_of, place[0])
            self._texts.drop(_key_of, place[0])


_KINDS = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")


def _key_of(place: Place) -> Hashable:
    return place[0]
