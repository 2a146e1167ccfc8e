"""A worker's blocks in a model that answers many of them at once: begun in order, ended as they are ready."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ...contracts import Answer, Conditions, FedModel, Json, Model, Sample
from ...suite.asking import answers_of
from .answering import Answering
from .block_queue import Item, Queue


@dataclass(frozen=True)
class BlockEnded:
    """A block that is answered, or why it is not.

    Blocks overlap in such a model. Each gets the time since the ones before it had ended, shared out among those that ended
    together: so the times of all blocks add up to the time that passed, as runtime estimates and the chart need it.
    """

    item: Item
    answers: list[Answer] | Exception
    started: float
    ended: float
    tokens: tuple[int, int]
    """Read and generated since the blocks before it, shared out likewise."""


@dataclass(frozen=True)
class FeedingStep:
    """What came of one step."""

    ended: tuple[BlockEnded, ...] = ()
    alone: Item | None = None
    """To be answered by itself now: its harness makes calls of its own, or it is a check in the harness's own batches."""


class Feeding:
    """The blocks in flight of one worker."""

    def __init__(self, model: FedModel, answering: Answering) -> None:
        self.model = model
        self.answering = answering
        self.finished = 0
        self._held: dict[Hashable, tuple[Item, list[Sample]]] = {}
        self._samples = 0
        self._clock = time.time()
        self._tokens = (0, 0)
        self._alone: Item | None = None
        self._unbegun: list[BlockEnded] = []
        """Blocks whose requests could not be read."""

    @property
    def oldest(self) -> tuple[str, int, float] | None:
        """(task, block, since when) of the block that has been in flight longest; None: nothing is."""
        first = next(iter(self._held.values()), None)
        return None if first is None else (first[0].task, first[0].block, self._clock)

    def restart_clock(self) -> None:
        """What was done since is not these blocks' time."""
        self._clock = time.time()
        self._tokens = self.model.tokens_read, self.model.tokens_made

    def step(self, queue: Queue) -> FeedingStep | None:
        """Begins what the model has room for, lets it work, returns what has ended; waits where there is nothing to do. None
        when the queue is stopped."""
        while self._alone is None and not self._unbegun and self._has_room():
            item = queue.take_if(self._may_begin, wait=not self._held)
            if item is None:
                break
            self._begin(item)
        if self._unbegun:
            failed, self._unbegun = self._unbegun, []
            return FeedingStep(tuple(failed))
        if self._alone is not None and not self._held:
            alone, self._alone = self._alone, None
            return FeedingStep(alone=alone)
        if queue.why or not self._held:
            return None if queue.why else FeedingStep()
        return FeedingStep(self._end(self.model.take()))

    def _has_room(self) -> bool:
        return self._samples < self.model.at_once

    def _may_begin(self, item: Item) -> bool:
        """Suspects of a death are in flight with few others, or with none."""
        limits = [i.crowd for i, _ in self._held.values() if i.crowd]
        if item.crowd:
            limits.append(item.crowd)
        return not limits or len(self._held) < min(limits)

    def _begin(self, item: Item) -> None:
        if not self._held:
            self.restart_clock()
        try:
            samples = self.answering.requests(item)
        except Exception as e:  # noqa: BLE001  a harness may raise anything: the block is reported, the others go on
            now = time.time()
            self._unbegun.append(BlockEnded(item, e, now, now, (0, 0)))
            return
        if samples is None:
            self._alone = item
            return
        self._held[item] = item, samples
        self._samples += _places(samples)
        self.model.put(item, item.task, [r for s in samples for r in s.requests])

    def _end(self, found: Sequence[tuple[Hashable, list[Json] | Exception]]) -> tuple[BlockEnded, ...]:
        if not found:
            return ()
        now = time.time()
        read, made = self.model.tokens_read - self._tokens[0], self.model.tokens_made - self._tokens[1]
        share = (now - self._clock) / len(found)
        ended = []
        for n, (key, outputs) in enumerate(found):
            item, samples = self._held.pop(key)
            self._samples -= _places(samples)
            answers = outputs if isinstance(outputs, Exception) else answers_of(samples, outputs)
            began = self._clock + n * share
            tokens = (
                read // len(found) + (n < read % len(found)),
                made // len(found) + (n < made % len(found)),
            )
            ended.append(BlockEnded(item, answers, began, began + share, tokens))
        self.finished += len(found)
        self._clock = now
        self._tokens = self.model.tokens_read, self.model.tokens_made
        return tuple(ended)


LIKELIHOODS_A_PLACE = 4
"""They are read in one pass and gone, and fill a batch only by the hundred."""


def _places(samples: Sequence[Sample]) -> int:
    """What samples take of the places in a model: each text one, several likelihoods one."""
    if all(r.kind in _LIKELIHOODS for s in samples for r in s.requests):
        return -(-len(samples) // LIKELIHOODS_A_PLACE)
    return len(samples)


_LIKELIHOODS = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")


def conditions_of(model: Model, *, exact: bool) -> Conditions:
    """What may move the last digits of an answer."""
    own = getattr(model, "exact_conditions", None)
    return own if exact and own is not None else model.conditions
