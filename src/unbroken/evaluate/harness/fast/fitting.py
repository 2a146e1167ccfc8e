"""What of the fast way this model and this device allow: found out when the model is loaded."""

from __future__ import annotations

import sys
import time

from ..transformers_model import TransformersModel
from . import budget
from .likelihoods import Likelihoods, can_share
from .prefixes import PrefixBatch, PrefixRow, Stem

SHARED_ERROR = 0.05
"""What shared prefixes may change of a log-probability (in 16 bits rounding alone does so much); more: they are not used."""


class Fit:
    """Tokens of a batch, tokens in memory, and whether prefixes can be shared."""

    def __init__(self, exact: TransformersModel, likelihoods: Likelihoods) -> None:
        self._exact = exact
        self._bytes_of_token = 1
        self.shares = self._can_share(likelihoods)
        self.tokens = self._measure(likelihoods)
        """Of a batch."""

    @property
    def held(self) -> int:
        """Tokens whose keys and values fit into memory beside what is there."""
        torch, device = self._exact.torch, self._exact.device
        if device.type != "cuda":
            return 16 * self.tokens
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(self.tokens, int(0.5 * free / max(1, self._bytes_of_token)))

    def halve(self) -> bool:
        """Half the tokens; False where it is one already."""
        if self.tokens <= 1:
            return False
        self.tokens //= 2
        return True

    def free(self) -> None:
        """Gives back what the allocator holds for nobody."""
        if self._exact.device.type == "cuda":
            self._exact.torch.cuda.empty_cache()

    def _measure(self, likelihoods: Likelihoods) -> int:
        exact = self._exact
        if (asked := exact.spec.options.get("batch_tokens")) is not None:
            return max(1, int(asked))
        more = {"logits_to_keep": 1} if likelihoods.keeps else {}

        def read(rows: int, width: int) -> None:
            ids = exact.torch.full((rows, width), exact.prefix or 0, device=exact.device)
            float(exact.model(ids, use_cache=False, **more).logits[0, -1, 0])

        began = time.monotonic()
        found = budget.best_budget(budget.measure(read, exact.max_length))
        self.free()
        log(f"batches of {found} tokens, measured in {time.monotonic() - began:.1f} s")
        return found

    def _can_share(self, likelihoods: Likelihoods) -> bool:
        """Whether a prefix that is computed once gives the log-probabilities that it gives in every row: tried on this model."""
        exact = self._exact
        root, rows, shared = _trial(exact.prefix or 0, max(1, (exact.tokenizer.vocab_size or 2) // 2))
        members = {i: [(i, (*r.tokens[r.context :], root[1]))] for i, r in enumerate(rows)}
        alone = tuple(Stem(r.tokens, (i,), ((),)) for i, r in enumerate(rows))
        try:
            ids = exact.torch.tensor([root], device=exact.device)
            cache = exact.model(ids, use_cache=True).past_key_values
            if not can_share(cache):
                log(
                    "prefixes are not shared: the model remembers in another way than by keys and values of all tokens"
                )
                return False
            self._bytes_of_token = sum(
                2 * layer.keys[0, :, 0].numel() * layer.keys.element_size() for layer in cache.layers
            )
            one = likelihoods.collect(likelihoods.score(PrefixBatch((), alone), rows, members))
            two = likelihoods.collect(likelihoods.score(PrefixBatch(root, shared), rows, members))
            likelihoods.forget()
        except Exception as e:  # noqa: BLE001  a model with another kind of cache, or positions of its own
            log(f"prefixes are not shared: {type(e).__name__}: {str(e)[:200]}")
            return False
        worst = max(abs(one[i][0] - two[i][0]) / max(1.0, abs(one[i][0])) for i in one)
        if worst > SHARED_ERROR:
            log(f"prefixes are not shared: on this model they change log-probabilities by {worst:.2g}")
        return bool(worst <= SHARED_ERROR)


def _trial(a: int, b: int) -> tuple[tuple[int, ...], list[PrefixRow], tuple[Stem, ...]]:
    """A root, rows behind it, and their stems: a context with two continuations, a longer one with two, and one alone; so each
    level, with padding in each."""
    root = (a, b, b, a) * 6
    contexts = ((b, a), (a, a, b, a, b), (b, b, a))
    tails = (((b,), (a, b, a)), ((a, b), (b,)), ((b, a),))
    rows: list[PrefixRow] = []
    stems: list[Stem] = []
    for context, own in zip(contexts, tails, strict=True):
        stems.append(Stem(context, tuple(range(len(rows), len(rows) + len(own))), own))
        rows += [PrefixRow(root + context + t, len(root + context), 1 + len(t)) for t in own]
    return root, rows, tuple(stems)


def log(text: str) -> None:
    """Writes a line to the worker's log."""
    sys.stderr.write(f"unbroken eval worker: {text}\n")
