"""Log-probabilities of continuations, each shared prefix computed once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .prefixes import PrefixBatch, PrefixRow, Stem, Tokens

Member = tuple[int, Tokens]
"""A request's number and the tokens of its continuation: a row may stand for several that differ in their last token."""
Started = tuple[list[int], Any, Any]
"""Numbers of requests; their log-probabilities and whether they are greedy, on the device."""


class Likelihoods:
    """Scores batches on one model. It keeps the last root's keys and values for the batch that follows."""

    def __init__(self, torch: Any, model: Any, device: Any) -> None:
        self._torch, self._model, self._device = torch, model, device
        takes = inspect.signature(model.forward).parameters
        self.keeps = "logits_to_keep" in takes
        """Whether logits are computed only where they are asked for."""
        self._cache = "cache" if "cache" in takes else "past_key_values"
        self._root: tuple[Tokens, Any] | None = None
        """The last one, with its cache."""

    def forget(self) -> None:
        """Frees the root."""
        self._root = None

    def score(
        self, batch: PrefixBatch, rows: Sequence[PrefixRow], members: Mapping[int, Sequence[Member]]
    ) -> Started:
        """Starts the computation of a batch; `collect` waits for it. `members`: by row, the requests that it stands for.

        The sum is taken in the type of the logits, as the harness takes it.
        """
        past = self._root_of(batch.root)
        start = len(batch.root)
        stems = batch.stems
        deep = {i: None for i, s in enumerate(stems) if s.longest_tail}
        # What is asked of each stem: a lone row's own predictions, or the one behind a context that has tails.
        asked = [
            range(len(s.tokens) - (1 if i in deep else _most(s, rows)), len(s.tokens))
            for i, s in enumerate(stems)
        ]
        logits, cache = self._read([s.tokens for s in stems], asked, past, start, None, bool(deep))
        pieces: dict[int, list[Any]] = {}
        for i, s in enumerate(stems):
            for r in s.rows:
                pieces[r] = [logits(i, 1 if i in deep else rows[r].wanted)]
        if deep:
            self._read_tails(batch, list(deep), cache, start, pieces)
        return self._gather(pieces, rows, members)

    def collect(self, started: Started) -> dict[int, list[Any]]:
        """{request: [log-probability, whether it is the greedy continuation]} of a batch."""
        numbers, values, greedy = started
        return {
            n: [float(v), bool(g)] for n, v, g in zip(numbers, values.tolist(), greedy.tolist(), strict=True)
        }

    # ---- passes of the model

    def _root_of(self, root: Tokens) -> Any:
        if not root:
            return None
        if self._root is None or self._root[0] != root:
            self._root = None  # two at once may not fit
            _, cache = self._read([root], [range(len(root) - 1, len(root))], None, 0, None, True)
            self._root = root, cache
            return cache
        return self._root[1]

    def _read_tails(
        self, batch: PrefixBatch, deep: Sequence[int], cache: Any, start: int, pieces: dict[int, list[Any]]
    ) -> None:
        """The second pass: what rows read behind a context that they share."""
        torch, stems = self._torch, batch.stems
        width = max(len(s.tokens) for s in stems)
        owners = [(i, r, t) for i in deep for r, t in zip(stems[i].rows, stems[i].tails, strict=True) if t]
        parents = torch.tensor([i for i, _, _ in owners], device=self._device)
        longest = max(len(t) for _, _, t in owners)
        lengths = torch.tensor([start + len(stems[i].tokens) for i, _, _ in owners], device=self._device)
        # Behind a shorter context the cache holds padding, which nobody may look at.
        ahead = torch.arange(start + width, device=self._device) < lengths[:, None]
        mask = torch.cat([ahead, ahead.new_ones((len(owners), longest))], dim=1).long()
        asked = [range(len(t)) for _, _, t in owners]
        logits, _ = self._read([t for _, _, t in owners], asked, select(cache, parents), lengths, mask, False)
        for at, (_, r, t) in enumerate(owners):
            pieces[r].append(logits(at, len(t)))

    def _read(
        self, rows: Sequence[Tokens], asked: Sequence[range], past: Any, start: Any, mask: Any, cached: bool
    ) -> tuple[Any, Any]:
        """Reads rows behind `past` (one copy for all, or one each). Gives (row, n) -> its last n predictions as [n, vocabulary],
        and the cache. `start`: the position of the first token, of all or of each."""
        torch = self._torch
        longest = max(map(len, rows))
        ids = torch.tensor([[*r, *([0] * (longest - len(r)))] for r in rows], device=self._device)
        more: dict[str, Any] = {}
        if past is not None or mask is not None:
            steps = torch.arange(longest, device=self._device)
            first = start[:, None] if mask is not None else start
            more["position_ids"] = (first + steps).expand(len(rows), longest)
            more[self._cache] = past if mask is not None else select(past, len(rows))
        if mask is not None:
            more["attention_mask"] = mask
        kept = sorted({p for a in asked for p in a})
        if self.keeps and len(kept) < longest:
            more["logits_to_keep"] = torch.tensor(kept, device=self._device)
            place = {p: i for i, p in enumerate(kept)}
        else:
            place = {p: p for p in range(longest)}
        out = self._model(ids, use_cache=cached or past is not None, **more)
        logits = out.logits

        def last(row: int, n: int) -> Any:
            end = len(rows[row])
            at = [place[p] for p in range(end - n, end)]
            return logits[row, at[0] : at[-1] + 1] if at[-1] - at[0] == n - 1 else logits[row, at]

        return last, out.past_key_values if cached else None

    def _gather(
        self,
        pieces: Mapping[int, Sequence[Any]],
        rows: Sequence[PrefixRow],
        members: Mapping[int, Sequence[Member]],
    ) -> Started:
        """One call for all requests of the batch: a kernel for each would take longer than the model."""
        torch = self._torch
        order = list(pieces)
        logits = torch.cat([p for r in order for p in pieces[r]])
        starts, at = {}, 0
        for r in order:
            starts[r] = at
            at += rows[r].wanted
        numbers: list[int] = []
        where: list[int] = []
        tokens: list[int] = []
        owner: list[int] = []
        for r in order:
            for number, continuation in members[r]:
                first = starts[r] + rows[r].wanted - len(continuation)
                where += range(first, first + len(continuation))
                tokens += continuation
                owner += [len(numbers)] * len(continuation)
                numbers.append(number)
        probabilities = torch.log_softmax(logits, dim=-1)
        place = torch.tensor(where, device=self._device)
        token = torch.tensor(tokens, device=self._device)
        of = torch.tensor(owner, device=self._device)
        picked = probabilities[place, token]
        right = probabilities.argmax(dim=-1)[place] == token
        sums = torch.zeros(len(numbers), dtype=torch.float32, device=self._device)
        sums.index_add_(0, of, picked.float())
        wrong = torch.zeros(len(numbers), dtype=torch.int32, device=self._device)
        wrong.index_add_(0, of, (~right).to(torch.int32))
        return numbers, sums.to(picked.dtype).float(), wrong == 0


def select(cache: Any, rows: Any) -> Any:
    """A copy of a cache with these rows (a tensor of their numbers), or with its one row so many times (a number)."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    if isinstance(rows, int):
        made.batch_repeat_interleave(rows)
    else:
        made.batch_select_indices(rows)
    return made


def can_share(cache: Any) -> bool:
    """Whether a cache is a plain one, whose rows can be copied and continued: no sliding window, no recurrent state."""
    layers = getattr(cache, "layers", None)
    return bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers or ())


def _most(stem: Stem, rows: Sequence[PrefixRow]) -> int:
    return max(rows[r].wanted for r in stem.rows)
