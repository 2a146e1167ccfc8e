"""Texts to generate: by continuous batching where model and card can, in static batches else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...contracts import Json
from ...suite.asking import cut_short
from ..transformers_model import TransformersModel, is_out_of_memory
from . import flash
from .continuous import Broken, Continuous, WantedAnswer
from .fitting import Fit, log

DRAWN_FROM = 1024
"""Texts that may have so many tokens flow through continuous batching also where they are drawn at random: in a static batch of
128 all would wait for the longest."""
STATIC_ROWS = 128
"""Sequences of a static batch at most; memory may allow fewer."""


@dataclass(frozen=True)
class Generation:
    """One text to generate."""

    place: Any
    group: str
    prompt: str
    tokens: tuple[int, ...]
    settings: dict[str, Any]
    again: int = 0
    """How often its key has asked the same before: drawn at random, each is another text."""

    @property
    def limit(self) -> int:
        """New tokens at most."""
        return int(self.settings["max_gen_toks"])

    @property
    def drawing(self) -> tuple[tuple[str, float], ...] | None:
        """How a long text is drawn, where continuous batching can draw it; () of a greedy one, None of all others.

        Short ones are drawn in static batches, whose draws are the same whatever else is asked.
        """
        if self.plain:
            return ()
        if not self.settings["do_sample"] or self.limit < DRAWN_FROM:
            return None
        own = {k: v for k, v in self.settings.items() if k not in ("until", "max_gen_toks", "do_sample")}
        return tuple(sorted(own.items())) if set(own) <= {"temperature", "top_p", "top_k"} else None

    @property
    def plain(self) -> bool:
        """Greedy, with no setting but its length and its stop strings: it may share a batch with any other such one."""
        return not self.settings["do_sample"] and set(self.settings) <= {"until", "max_gen_toks", "do_sample"}


class Generations:
    """What waits and what is being generated."""

    def __init__(
        self,
        exact: TransformersModel,
        fit: Fit,
        answer: Callable[[Any, Json, int], None],
        fail: Callable[[Any, Exception], None],
        *,
        at_once: int = STATIC_ROWS,
    ) -> None:
        """`answer`: place, text, its tokens; `at_once`: answers together."""
        self._exact, self._fit, self._answer, self._fail = exact, fit, answer, fail
        self._waiting: list[Generation] = []
        self._continuous: Continuous | None = None
        self._static_only = exact.spec.options.get("generation") == "static"
        self._at_once = at_once
        self._drawing: tuple[tuple[str, float], ...] = ()
        self._seconds = float(exact.spec.options.get("sample_seconds") or 0.0)
        self._flash: bool | None = False if exact.spec.options.get("generation") == "as-is" else None
        """Whether torch's own flash attention is used; None: not tried yet."""
        self._tails: dict[str, int] = {}
        self._lengths: dict[str, tuple[int, int]] = {}
        """By group: texts that were made, and their tokens."""

    def __bool__(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def running(self) -> bool:
        """Whether continuous batching has some that have not ended."""
        return self._continuous is not None and self._continuous.open > 0

    @property
    def can_pause(self) -> bool:
        """Whether the model may be used for something else now."""
        return self._continuous is None or self._continuous.can_pause

    @property
    def steps(self) -> int:
        """Grows as long as tokens are made."""
        return self._continuous.steps if self._continuous is not None else 0

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the model may be used for something else."""
        return self._continuous.paused() if self._continuous is not None else contextlib.nullcontext()

    def put(self, g: Generation) -> None:
        """Queues a text."""
        self._waiting.append(g)

    def drop(self, of: Callable[[Any], Hashable], key: Hashable) -> None:
        """Takes out what has not begun of a key."""
        self._waiting = [g for g in self._waiting if of(g.place) != key]

    def step(self, within_s: float) -> None:
        """Generates for a while, or one static batch."""
        self._feed()
        if self._continuous is not None and self.running:
            try:
                made = self._continuous.take(within_s)
            except Broken as e:
                self._give_up(e)
                return
            for m in made:
                g: Any = m.key
                text = self._exact.text(m.tokens, self._exact.stops(g.settings))
                self._end(g, text, len(m.tokens), late=m.late)
        elif self._waiting:
            self._static_batch()

    def close(self) -> None:
        """Ends what runs."""
        if self._continuous is not None:
            self._continuous.close()

    # ---- continuous batching

    def _feed(self) -> None:
        """Gives continuous batching what it can answer, the longest first: a long text that is begun last ends last."""
        can = [] if self._static_only else [g for g in self._waiting if g.drawing is not None]
        if can and not self.running:
            self._draw_as(min(can, key=self._longest_first).drawing or ())
        can = [g for g in can if g.drawing == self._drawing]
        if not can:
            return
        try:
            if self._continuous is None:
                self._continuous = self._begin()
            self._continuous.put([
                WantedAnswer(g, g.tokens, g.limit, self._own_stops(g), self._seconds) for g in sorted(can, key=self._longest_first)
            ])  # fmt: skip
        except Broken as e:
            self._give_up(e)
            return
        given = {id(g) for g in can}
        self._waiting = [g for g in self._waiting if id(g) not in given]

    def _begin(self) -> Continuous:
        exact = self._exact
        if self._flash is None:
            reason = flash.reason_against(exact.torch, exact.model)
            flash.say(reason)
            self._flash = reason is None
        return Continuous(exact.model, self._decode, self._tail_of, longest=exact.max_length, at_once=self._at_once,
                          own_flash=self._flash, drawing=dict(self._drawing))  # fmt: skip

    def _draw_as(self, drawing: tuple[tuple[str, float], ...]) -> None:
        """One way of drawing at a time: all texts of a batch are drawn alike."""
        if drawing != self._drawing and self._continuous is not None:
            self._continuous.close()
            self._continuous = None
        self._drawing = drawing

    def _give_up(self, why: Broken) -> None:
        """Without torch's flash attention from now on, then in static batches: whatever a version, a model or a card lacks."""
        if self._continuous is not None and self._continuous.own_flash:
            log(f"no torch's flash attention: {why}; attention as transformers chooses")
            self._flash = False
        else:
            log(f"no continuous batching: {why}; texts are generated in static batches")
            self._static_only = True
        if self._continuous is not None:
            begun = {id(g) for g in self._waiting}
            left: list[Any] = [w.key for w in self._continuous.give_up()]
            self._waiting += [g for g in left if id(g) not in begun]
            self._continuous = None

    def _own_stops(self, g: Generation) -> tuple[str, ...]:
        """Stop strings that are more than the model's own end of text, at which generation ends by itself."""
        eos = self._exact.tokenizer.eos_token
        return tuple(s for s in g.settings["until"] if s and s != eos)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._exact.tokenizer.decode(tokens))

    def _tail_of(self, stop: str) -> int:
        if stop not in self._tails:
            self._tails[stop] = len(self._exact.encode(stop, special=False)) + 2
        return self._tails[stop]

    # ---- static batches

    def _static_batch(self) -> None:
        """Greedy texts of any length and stop string together, longest first; others with their like."""
        first = min(self._waiting, key=self._longest_first)
        if first.plain:
            can = [g for g in self._waiting if g.plain and self._fits(g, first)]
        else:
            can = [g for g in self._waiting if g.settings == first.settings]
        rows = max(1, min(STATIC_ROWS, self._fit.held // (len(first.tokens) + first.limit)))
        chunk = sorted(can, key=self._longest_first)[:rows]
        chosen = {id(g) for g in chunk}
        self._waiting = [g for g in self._waiting if id(g) not in chosen]
        for g, text, late in self._texts(chunk):
            if isinstance(text, Exception):
                self._fail(g.place, text)
            else:
                self._end(g, text, len(self._exact.encode(text, special=False)) if text else 0, late=late)

    def _fits(self, g: Generation, first: Generation) -> bool:
        """Whether it may stand in one batch with `first`, and neither prompt is cut for the other's answer."""
        whole = max(len(g.tokens), len(first.tokens)) + first.limit <= self._exact.max_length
        return g is first or whole or (g.limit == first.limit and g.settings == first.settings)

    def _texts(self, chunk: Sequence[Generation]) -> Iterator[tuple[Generation, str | Exception, bool]]:
        try:
            with self.paused():
                texts = self._exact.continue_within(
                    [g.prompt for g in chunk], [g.settings for g in chunk], self._seconds, chunk[0].again
                )
            for g, (text, late) in zip(chunk, texts, strict=True):
                yield g, text, late
        except Exception as e:  # noqa: BLE001  cut in half, until what has no answer is alone
            memory = isinstance(e, RuntimeError | MemoryError) and is_out_of_memory(self._exact.torch, e)
            if memory:
                self._fit.free()
            if len(chunk) == 1:
                yield chunk[0], self._exact.out_of_memory() if memory else e, False
                return
            half = len(chunk) // 2
            yield from self._texts(chunk[:half])
            yield from self._texts(chunk[half:])

    # ---- both

    def _end(self, g: Generation, text: str, tokens: int, *, late: bool = False) -> None:
        count, total = self._lengths.get(g.group, (0, 0))
        self._lengths[g.group] = count + 1, total + tokens
        self._answer(g.place, cut_short(text, tokens, self._seconds) if late else text, tokens)

    def _longest_first(self, g: Generation) -> tuple[float, int, int]:
        """By how long texts of its group have been, as far as that is known, then by what it may take at most."""
        count, total = self._lengths.get(g.group, (0, 0))
        expected = min(g.limit, total / count) if count else g.limit
        return -expected, -g.limit, -len(g.tokens)
