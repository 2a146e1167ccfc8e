"""Text as tokens, the way that lm-evaluation-harness' `hf` model cuts it: the same for every backend that is given tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..contracts import Json
from ..suite.asking import PROBLEM


@dataclass(frozen=True, slots=True)
class Pair:
    """A context and its continuation as tokens; their place in the call."""

    index: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """What the model reads: pairs of one key share a forward pass."""
        return self.context + self.continuation[:-1]


class HarnessTokens:
    """A tokenizer, with what the harness puts before an empty context, and how many tokens the model holds."""

    def __init__(self, tokenizer: Any, max_length: int, add_bos: Json = None) -> None:
        self.tokenizer, self.max_length, self._add_bos = tokenizer, max_length, add_bos
        _set_pad_token(tokenizer)
        self.prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        self._prefix_text = tokenizer.decode(self.prefix) if self.prefix is not None else "\0"

    def pair(
        self, index: int, context: str, continuation: str, known: Mapping[str, Sequence[int]] | None = None
    ) -> Pair:
        """A request's tokens; `known`: texts that are encoded already (see `texts_of_pair`)."""
        if context == "":
            rest = self.encode(continuation, special=False)
            if rest[0] == self.prefix:
                return Pair(index, (rest[0],), tuple(rest[1:]))
            return Pair(index, (self.prefix,), tuple(rest))
        start_text, whole_text = texts_of_pair(context, continuation)
        if known is None:
            whole, start = self.encode(whole_text), self.encode(start_text)
        else:
            whole, start = list(known[whole_text]), list(known[start_text])
        return Pair(index, tuple(start), tuple(whole[len(start) :]))

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """The tokens of a text; `special`: with what the tokenizer puts before it, where that is not as usual."""
        more = self._special(text) if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(text, **more))

    def encode_all(self, texts: Collection[str], *, prompts: bool = False) -> dict[str, list[int]]:
        """The tokens of each text; one call of the tokenizer, which uses all cores. `prompts`: of generations, which the
        harness cuts into tokens by a rule of their own."""
        rule = self._special_of_prompt if prompts else self._special
        kinds: dict[tuple[tuple[str, bool], ...], list[str]] = {}
        for text in texts:
            kinds.setdefault(tuple(rule(text).items()), []).append(text)
        found: dict[str, list[int]] = {}
        for more, some in kinds.items():
            made = self.tokenizer(some, **dict(more))["input_ids"]
            found.update(zip(some, made, strict=True))
        return found

    def stops(self, settings: Mapping[str, Any]) -> list[str]:
        """The stop strings of a generation, with the model's own end of text."""
        eos = self.tokenizer.decode(self.tokenizer.eos_token_id, skip_special_tokens=False)
        return [*settings["until"], *([eos] if eos not in settings["until"] else [])]

    def text(self, tokens: Sequence[int], stops: Sequence[str]) -> str:
        """What was generated, up to the first stop string."""
        text = cast(str, self.tokenizer.decode(tokens, skip_special_tokens=True))
        for stop in stops:
            if stop:
                text = text.split(stop)[0]
        return text

    def too_long(self, limit: int) -> Json:
        """The output that stands for "no answer" where a generation alone is longer than the model holds; None where it fits."""
        if limit < self.max_length:
            return None
        return {PROBLEM: f"{limit} tokens are to be generated, but the model holds {self.max_length} in all. "
                         "Lower max_gen_toks (max_tokens), or raise --max-length"}  # fmt: skip

    def _special(self, text: str) -> dict[str, bool]:
        if text.startswith(self._prefix_text):
            return {"add_special_tokens": False}
        return {} if self._add_bos is None else {"add_special_tokens": bool(self._add_bos)}

    def _special_of_prompt(self, text: str) -> dict[str, bool]:
        if self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token):
            return {"add_special_tokens": False}
        return {} if self._add_bos is None else {"add_special_tokens": bool(self._add_bos)}


def texts_of_pair(context: str, continuation: str) -> tuple[str, str]:
    """(the context, context and continuation) as they are cut into tokens: a space before a word is part of its token."""
    start = context.rstrip()
    return start, context + continuation


def _set_pad_token(tokenizer: Any) -> None:
    if tokenizer.pad_token_id is not None or tokenizer.pad_token:
        return
    if tokenizer.unk_token:
        tokenizer.pad_token_id = tokenizer.unk_token_id
    elif tokenizer.eos_token:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    else:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})


def longest_of(config: Any, tokenizer: Any) -> int:
    inner = getattr(config, "text_config", None) or config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        value = getattr(inner, name, None)
        if value is not None:
            return int(value)
    length = getattr(tokenizer, "model_max_length", None)
    return int(length) if length is not None and length < _UNSET_LENGTH else 2048


_UNSET_LENGTH = 1000000000000000019884624838656
"""What a tokenizer says where nobody set its maximum length."""
