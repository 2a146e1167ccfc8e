"""A model of transformers that is fed: requests of many blocks come in, answers come out as they are ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import EvaluationError
from ...contracts import Conditions, Json, Request
from ..requests import generation_settings, rolling_windows
from ..transformers_model import Pair, TransformersModel, is_out_of_memory, texts_of_pair
from . import budget, prefixes
from .continuous import Broken, Continuous, Wanted
from .likelihoods import Likelihoods, can_share
from .prefixes import Row

AT_ONCE = 256
"""Samples that a worker gives at once: enough that lengths can be sorted and no place of a batch stays empty."""
STATIC_ROWS = 128
SHARED_ERROR = 0.05
"""What shared prefixes may change of a log-probability (in 16 bits rounding alone does so much); more: they are not used."""

Place = tuple[Hashable, int]
"""A key, and the number of one of its requests."""


@dataclass
class _Open:
    """What was put under one key."""

    outputs: list[Json]
    missing: int
    windows: dict[int, list[float]] = field(default_factory=dict)
    """Of rolling requests: the sums of their windows, and how many are still to come."""
    error: Exception | None = None


@dataclass(frozen=True)
class _Generation:
    place: Place
    prompt: str
    tokens: tuple[int, ...]
    settings: dict[str, Any]


class FastModel:
    """Wraps a loaded model; `exact` is that one, in the harness's own batches."""

    def __init__(self, exact: TransformersModel) -> None:
        self.exact = exact
        self.at_once = AT_ONCE
        self.tokens_read, self.tokens_made = 0, 0
        """So far: tokens of requests, and tokens generated."""
        self._open: dict[Hashable, _Open] = {}
        self._pairs: dict[str, list[tuple[Place, Pair, bool]]] = {}
        """Likelihoods that wait, by task: what belongs together begins alike."""
        self._work: list[tuple[prefixes.Batch, list[Row], dict[int, list[tuple[int, tuple[int, ...]]]], list[tuple[Place, bool]]]] = []  # fmt: skip
        """Batches of the present wave, the next one last."""
        self._started: tuple[Any, list[tuple[Place, bool]]] | None = None
        self._generations: list[_Generation] = []
        self._done: list[Hashable] = []
        self._likelihoods = Likelihoods(exact.torch, exact.model, exact.device)
        self._continuous: Continuous | None = None
        self._why_static = str(exact.spec.options.get("generation", "")) == "static" and "asked for" or ""
        self._tails: dict[str, int] = {}
        with exact.torch.inference_mode():
            self._shares = self._can_share()
            self._budget = self._best_budget()
        self._asked_budget = self._budget

    # ---- what the worker calls

    @property
    def in_flight(self) -> int:
        """Keys that were put and not taken."""
        return len(self._open)

    @property
    def steps(self) -> int:
        """Grows while it works at a long answer."""
        return self._continuous.steps if self._continuous is not None else 0

    def put(self, key: Hashable, group: str, requests: Sequence[Request]) -> None:
        """Queues the requests of one key; `group`: what shares its beginning, such as a task's few-shot examples."""
        entry = self._open[key] = _Open([None] * len(requests), len(requests))
        if not requests:
            self._done.append(key)
        try:
            self._put_likelihoods(key, group, requests, entry)
            self._put_generations(key, requests)
            for r in requests:
                if r.kind not in _KINDS:
                    raise EvaluationError(f"a transformers model cannot answer a '{r.kind}' request",
                                          hint="Use PlainBackend, or let infer.py define prompt(row)")  # fmt: skip
        except Exception as e:  # the key's own fault; the others go on
            self._drop(key)
            entry.error = e
            self._done.append(key)

    def take(self, within_s: float = 1.0) -> list[tuple[Hashable, list[Json] | Exception]]:
        """Does some work and returns what is ready by then: the outputs of a key, or why it has none."""
        with self.exact.torch.inference_mode():
            if not self._done:
                self._advance(within_s)
        ready, self._done = self._done, []
        return [(k, e.error or e.outputs) for k in ready if (e := self._open.pop(k, None)) is not None]

    # ---- what every model has

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request, in order, with nothing else in the batches. Raises what answering them raises."""
        key = object()
        self.put(key, "", requests)
        while True:
            for k, found in self.take():
                if k is not key:
                    raise EvaluationError("a model was asked in two ways at once")
                if isinstance(found, Exception):
                    raise found
                return found

    def respond_exactly(self, requests: Sequence[Request]) -> list[Json]:
        """In the harness's own batches, with nothing else in flight."""
        with self._paused():
            return self.exact.respond(requests)

    def halve(self) -> bool:
        """Halves the tokens of a batch; False where it holds one sequence."""
        if self._budget <= 1:
            return False
        self._budget //= 2
        self._likelihoods.forget()
        return True

    def restore(self) -> None:
        """Nothing: what did not fit will not fit the next time."""

    @property
    def conditions(self) -> Conditions:
        """What may move the last digits: `batch_size` counts tokens here."""
        own = self.exact.conditions
        return Conditions(own.engine, own.device, own.dtype, 0, "batches by tokens", self._budget)

    @property
    def exact_conditions(self) -> Conditions:
        """Of `respond_exactly`."""
        return self.exact.conditions

    def close(self) -> None:
        """Frees the device."""
        if self._continuous is not None:
            self._continuous.close()
        self._likelihoods.forget()
        self.exact.close()

    # ---- requests come in

    def _put_likelihoods(self, key: Hashable, group: str, requests: Sequence[Request], entry: _Open) -> None:
        exact = self.exact
        found = [(i, r) for i, r in enumerate(requests) if r.kind in ("loglikelihood", "multiple_choice")]
        texts: dict[str, None] = {}
        for _, r in found:
            if r.arguments[0] != "":
                texts.update(dict.fromkeys(texts_of_pair(str(r.arguments[0]), str(r.arguments[1]))))
        known = exact.encode_all(texts)
        waiting = self._pairs.setdefault(group, [])
        for i, r in found:
            pair = exact.pair(i, str(r.arguments[0]), str(r.arguments[1]), known)
            waiting.append(((key, i), pair, False))
            self.tokens_read += len(pair.key)
        for i, r in enumerate(requests):
            if r.kind == "loglikelihood_rolling":
                tokens = exact.encode(str(r.arguments[0]))
                windows = list(rolling_windows(tokens, exact.prefix, exact.max_length))
                entry.windows[i] = [0.0, float(len(windows))]
                waiting += [((key, i), Pair(i, c, t), True) for c, t in windows]
                self.tokens_read += len(tokens)
                if not windows:
                    self._answer((key, i), 0.0)

    def _put_generations(self, key: Hashable, requests: Sequence[Request]) -> None:
        exact = self.exact
        found = [(i, r) for i, r in enumerate(requests) if r.kind == "generate_until"]
        known = exact.encode_all({str(r.arguments[0]) for _, r in found}, prompts=True)
        for i, r in found:
            prompt, settings = str(r.arguments[0]), generation_settings(r.arguments[1])
            limit = int(settings["max_gen_toks"])
            if (problem := exact.too_long(limit)) is not None:
                self._answer((key, i), problem)
                continue
            tokens = tuple(known[prompt][-(exact.max_length - limit) :])
            self._generations.append(_Generation((key, i), prompt, tokens, settings))
            self.tokens_read += len(tokens)

    # ---- work

    def _advance(self, within_s: float) -> None:
        generating = self._continuous is not None and self._continuous.open
        likely = self._started is not None or bool(self._work) or any(self._pairs.values())
        if likely and (not generating or self._continuous.can_pause):
            self._step_likelihoods()
        elif generating or self._generations:
            self._generate(within_s)

    def _step_likelihoods(self) -> None:
        """Starts a batch, then waits for the one before it: meanwhile the next requests are cut into tokens."""
        if not self._work:
            self._next_wave()
        before, self._started = self._started, None
        with self._paused():
            if self._work:
                batch, rows, members, places = self._work.pop()
                try:
                    self._started = self._likelihoods.score(batch, rows, members), places
                except Exception as e:  # the batch before this one is answered all the same
                    self._retry(e, batch, rows, members, places)
            if before is not None:
                started, places = before
                for number, value in self._likelihoods.collect(started).items():
                    place, is_window = places[number]
                    self._answer_window(place, value) if is_window else self._answer(place, value)

    def _next_wave(self) -> None:
        """All that waits, cut into batches: tasks whose requests begin alike apart, the others together by length."""
        waiting, self._pairs = self._pairs, {}
        loose: list[tuple[Place, Pair, bool]] = []
        for some in waiting.values():
            rows = [self._row(p) for _, p, w in some if not w]
            root = prefixes.root_of(rows) if self._shares and len(rows) == len(some) else ()
            if root:
                self._cut(some, root)
            else:
                loose += some
        self._cut(loose, ())

    def _cut(self, some: Sequence[tuple[Place, Pair, bool]], root: tuple[int, ...]) -> None:
        rows: dict[Row, int] = {}
        members: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        places: list[tuple[Place, bool]] = []
        for place, pair, is_window in some:
            if not pair.continuation:
                self._answer(place, [0.0, True])
                continue
            row = self._row(pair)
            same = Row(row.tokens, row.context, 0)
            n = rows.setdefault(same, len(rows))
            members.setdefault(n, []).append((len(places), pair.continuation[-len(row.tokens) :]))
            places.append((place, is_window))
        ordered = [
            Row(r.tokens, r.context, max(len(c) for _, c in members[n])) for r, n in rows.items()
        ]
        stems = prefixes.stems_of(ordered, root) if self._shares else [
            prefixes.Stem(r.tokens, (i,), ((),)) for i, r in enumerate(ordered)
        ]  # fmt: skip
        made = list(prefixes.batches(stems, root, self._budget, self._held()))
        self._work += [(b, ordered, members, places) for b in reversed(made)]

    def _row(self, pair: Pair) -> Row:
        tokens = (pair.context + pair.continuation)[-(self.exact.max_length + 1) :][:-1]
        n = min(len(pair.continuation), len(tokens))
        return Row(tokens, len(tokens) - n + 1, n)

    def _retry(self, e: Exception, batch: prefixes.Batch, rows: Any, members: Any, places: Any) -> None:
        """A batch that raised is cut: what raises alone has no answer, the others do."""
        memory = isinstance(e, RuntimeError | MemoryError) and is_out_of_memory(self.exact.torch, e)
        if memory:
            self._likelihoods.forget()
            self._empty_cache()
            self.halve()
        if len(batch.stems) > 1:
            half = len(batch.stems) // 2
            for stems in (batch.stems[half:], batch.stems[:half]):
                self._work.append((prefixes.Batch(batch.root, stems), rows, members, places))
        elif batch.root or len(batch.stems[0].rows) > 1:
            for i in batch.stems[0].rows:  # without anything shared
                alone = prefixes.Stem(rows[i].tokens, (i,), ((),))
                self._work.append((prefixes.Batch((), (alone,)), rows, members, places))
        else:
            for number, _ in members[batch.stems[0].rows[0]]:
                self._fail(places[number][0][0], self.exact.out_of_memory() if memory else e)

    # ---- generation

    def _generate(self, within_s: float) -> None:
        self._feed_continuous()
        if self._continuous is not None and self._continuous.open:
            self._poll(within_s)
        elif self._generations:
            self._generate_static()

    def _feed_continuous(self) -> None:
        """Gives continuous batching what it can answer; the rest stays."""
        if self._why_static:
            return
        can = [g for g in self._generations if _is_plain(g.settings)]
        if not can:
            return
        try:
            if self._continuous is None:
                self._continuous = Continuous(self.exact.model, self._decode, self._tail_of)
            chosen = set(map(id, can))
            self._continuous.put([
                Wanted(g, g.tokens, int(g.settings["max_gen_toks"]), self._own_stops(g), float(g.settings.get("max_seconds", 0)))
                for g in sorted(can, key=_longest_first)
            ])  # fmt: skip
            self._generations = [g for g in self._generations if id(g) not in chosen]
        except Broken as e:
            self._give_up_continuous(e)

    def _poll(self, within_s: float) -> None:
        assert self._continuous is not None
        try:
            made = self._continuous.take(within_s)
        except Broken as e:
            self._give_up_continuous(e)
            return
        for m in made:
            g: Any = m.key
            self.tokens_made += len(m.tokens)
            self._answer(g.place, self.exact.text(m.tokens, self.exact.stops(g.settings)))

    def _give_up_continuous(self, why: Broken) -> None:
        """From now on static batches: whatever a version or a card lacks."""
        _log(f"no continuous batching: {why}; generation goes on in static batches")
        self._why_static = str(why)
        if self._continuous is not None:
            known = set(map(id, self._generations))
            self._generations += [w.key for w in self._continuous.give_up() if id(w.key) not in known]  # type: ignore[misc]
            self._continuous = None

    def _generate_static(self) -> None:
        """One batch: of equal settings, or greedy ones of other lengths and stop strings together, longest first."""
        first = min(self._generations, key=_longest_first)
        greedy = _is_plain(first.settings)
        if greedy:
            can = [g for g in self._generations if _is_plain(g.settings) and self._fits(g, first)]
        else:
            can = [g for g in self._generations if g.settings == first.settings]
        can.sort(key=_longest_first)
        chunk = can[: self._static_rows(first)]
        chosen = set(map(id, chunk))
        self._generations = [g for g in self._generations if id(g) not in chosen]
        for g, text in self._texts(chunk):
            if isinstance(text, Exception):
                self._fail(g.place[0], text)
            else:
                self.tokens_made += len(self.exact.encode(text, special=False)) if text else 0
                self._answer(g.place, text)

    def _texts(self, chunk: Sequence[_Generation]) -> Iterator[tuple[_Generation, str | Exception]]:
        try:
            with self._paused():
                texts = self.exact.continue_texts([g.prompt for g in chunk], [g.settings for g in chunk])
            yield from zip(chunk, texts, strict=True)
        except Exception as e:  # half of it, until the one is found that has no answer
            memory = isinstance(e, RuntimeError | MemoryError) and is_out_of_memory(self.exact.torch, e)
            if memory:
                self._empty_cache()
            if len(chunk) == 1:
                yield chunk[0], self.exact.out_of_memory() if memory else e
                return
            yield from self._texts(chunk[: len(chunk) // 2])
            yield from self._texts(chunk[len(chunk) // 2 :])

    def _fits(self, g: _Generation, first: _Generation) -> bool:
        """Whether it may stand in one batch with `first`, and neither prompt is cut for the other's answer."""
        limit = int(first.settings["max_gen_toks"])
        whole = max(len(g.tokens), len(first.tokens)) + limit <= self.exact.max_length
        return g is first or whole or g.settings["max_gen_toks"] == limit

    def _static_rows(self, first: _Generation) -> int:
        a_row = len(first.tokens) + int(first.settings["max_gen_toks"])
        return max(1, min(STATIC_ROWS, self._held() // max(1, a_row)))

    def _own_stops(self, g: _Generation) -> tuple[str, ...]:
        """Stop strings that are more than the model's own end of text, at which generation ends by itself."""
        eos = self.exact.tokenizer.eos_token
        return tuple(s for s in g.settings["until"] if s and s != eos)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.exact.tokenizer.decode(tokens))

    def _tail_of(self, stop: str) -> int:
        if stop not in self._tails:
            self._tails[stop] = len(self.exact.encode(stop, special=False)) + 2
        return self._tails[stop]

    # ---- answers go out

    def _answer_window(self, place: Place, value: list[Any]) -> None:
        entry = self._open.get(place[0])
        if entry is None:
            return
        window = entry.windows[place[1]]
        window[0] += value[0]
        window[1] -= 1
        if window[1] == 0:
            self._answer(place, window[0])

    def _answer(self, place: Place, value: Json) -> None:
        entry = self._open.get(place[0])
        if entry is None or entry.error is not None:
            return
        entry.outputs[place[1]] = value
        entry.missing -= 1
        if entry.missing == 0:
            self._done.append(place[0])

    def _fail(self, key: Hashable, e: Exception) -> None:
        entry = self._open.get(key)
        if entry is not None and entry.error is None:
            self._drop(key)
            entry.error = e
            self._done.append(key)

    def _drop(self, key: Hashable) -> None:
        """Nothing of a key that failed is asked any more, as far as it has not begun."""
        self._pairs = {g: [p for p in some if p[0][0] is not key] for g, some in self._pairs.items()}
        self._generations = [g for g in self._generations if g.place[0] is not key]

    # ---- the device

    def _paused(self) -> contextlib.AbstractContextManager[Any]:
        return self._continuous.paused() if self._continuous is not None else contextlib.nullcontext()

    def _held(self) -> int:
        """Tokens whose keys and values fit."""
        torch, device = self.exact.torch, self.exact.device
        if device.type != "cuda":
            return 16 * self._budget
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(self._budget, int(0.5 * free / max(1, self._bytes_of_token)))

    def _empty_cache(self) -> None:
        if self.exact.device.type == "cuda":
            self.exact.torch.cuda.empty_cache()

    def _best_budget(self) -> int:
        asked = self.exact.spec.options.get("batch_tokens")
        if asked is not None:
            return max(1, int(asked))
        began = time.monotonic()
        found = budget.best_budget(budget.measure(self._read, self.exact.max_length))
        self._empty_cache()
        _log(f"batches of {found} tokens, measured in {time.monotonic() - began:.1f} s")
        return found

    def _read(self, rows: int, width: int) -> None:
        torch = self.exact.torch
        ids = torch.full((rows, width), self.exact.prefix or 0, device=self.exact.device)
        more = {"logits_to_keep": 1} if self._likelihoods.keeps else {}
        out = self.exact.model(ids, use_cache=False, **more).logits
        float(out[0, -1, 0])

    def _can_share(self) -> bool:
        """Whether a prefix that is computed once gives the log-probabilities that it gives in every row: tried on this model."""
        exact = self.exact
        self._bytes_of_token = 1
        a, b = exact.prefix or 0, max(1, (exact.tokenizer.vocab_size or 2) // 2)
        root = (a, b, b, a) * 6
        # A context with two continuations, a longer one with two, and one alone: each level, with padding in each.
        contexts, tails = ((b, a), (a, a, b, a, b), (b, b, a)), (((b,), (a, b, a)), ((a, b), (b,)), ((b, a),))
        rows = [Row(root + c + t, len(root + c), 1 + len(t)) for c, own in zip(contexts, tails, strict=True) for t in own]
        members = {i: [(i, (*r.tokens[r.context :], b))] for i, r in enumerate(rows)}
        alone = tuple(prefixes.Stem(r.tokens, (i,), ((),)) for i, r in enumerate(rows))
        shared = tuple(
            prefixes.Stem(c, n, own) for c, n, own in zip(contexts, ((0, 1), (2, 3), (4,)), tails, strict=True)
        )
        try:
            cache = exact.model(exact.torch.tensor([root], device=exact.device), use_cache=True).past_key_values
            if not can_share(cache):
                return False
            self._bytes_of_token = sum(
                2 * layer.keys[0, :, 0].numel() * layer.keys.element_size() for layer in cache.layers
            )
            score, collect = self._likelihoods.score, self._likelihoods.collect
            one = collect(score(prefixes.Batch((), alone), rows, members))
            two = collect(score(prefixes.Batch(root, shared), rows, members))
            self._likelihoods.forget()
        except Exception as e:  # a model with another kind of cache, or positions of its own
            _log(f"prefixes are not shared: {type(e).__name__}: {str(e)[:200]}")
            return False
        worst = max(abs(one[i][0] - two[i][0]) / max(1.0, abs(one[i][0])) for i in one)
        if worst > SHARED_ERROR:
            _log(f"prefixes are not shared: on this model they change log-probabilities by {worst:.2g}")
        return worst <= SHARED_ERROR


_KINDS = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")


def _is_plain(settings: dict[str, Any]) -> bool:
    """Greedy, with no setting but its length and its stop strings."""
    return not settings["do_sample"] and not set(settings) - {"until", "max_gen_toks", "do_sample", "max_seconds"}


def _longest_first(g: _Generation) -> tuple[int, int]:
    return -int(g.settings["max_gen_toks"]), -len(g.tokens)


def _log(text: str) -> None:
    import sys

    sys.stderr.write(f"unbroken eval worker: {text}\n")
