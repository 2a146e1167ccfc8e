"""What requests mean, the same for every backend: windows of long texts, settings of a generation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..contracts import Json
from ..suite.asking import LIMITS, limit_of


def rolling_windows(
    tokens: Sequence[int], prefix: int, longest: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context, continuation) pairs that predict every token once, each from as much before it as the model holds.

    The first window starts with `prefix`. Contexts and continuations do not overlap; together a pair is at most
    `longest` + 1 tokens.
    """
    done = 0
    while done < len(tokens):
        size = min(longest, len(tokens) - done)
        end = done + size
        if done == 0:
            read = (prefix, *tokens[: end - 1])
        else:
            read = tuple(tokens[end - longest - 1 : end - 1])
        yield tuple(read[: len(read) - (size - 1)]), tuple(tokens[done:end])
        done = end


def generation_settings(given: Mapping[str, Json]) -> dict[str, Any]:
    """Settings of a generate_until request with their defaults: `until` (list), `max_gen_toks`, `do_sample`, ...

    A temperature without do_sample means sampling; do_sample = false means greedy, whatever the temperature says.
    """
    out = dict(given)
    until = out.pop("until", None) or []
    limit = limit_of(out)
    out = {k: v for k, v in out.items() if k not in LIMITS}
    out["max_gen_toks"] = limit
    out["until"] = [until] if isinstance(until, str) else list(until)
    temperature = float(out.pop("temperature", None) or 0.0)
    sample = out.pop("do_sample", None)
    out["do_sample"] = temperature > 0 if sample is None else bool(sample)
    if out["do_sample"] and not math.isclose(temperature, 0.0):
        out["temperature"] = temperature
    return out
