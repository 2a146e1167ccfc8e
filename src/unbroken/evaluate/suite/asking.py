"""From a block's samples to their answers, where some requests may have got none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..contracts import Answer, Json, Model, Request, Sample

PROBLEM = "problem"
"""The key of an output that stands for "no answer": {"problem": why}."""


PARTIAL = "partial"
"""The key of an output that was cut short: {"text": what there was, "partial": why}."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the setting that bounds an answer's new tokens; the first one that is given counts."""
USUAL_LIMIT = 256


def limit_of(settings: Mapping[str, Json]) -> int:
    """New tokens at most of a generation with these settings."""
    return int(next((t for k in LIMITS if (t := settings.get(k)) is not None), USUAL_LIMIT))


def most_tokens(r: Request) -> int:
    """New tokens that the answer to a request may have; 0 where none are made."""
    given = r.arguments[1] if r.kind == "generate_until" and len(r.arguments) > 1 else None
    return limit_of(given) if isinstance(given, dict) else 0


def problem_of(output: Json) -> str:
    """Why there is no answer; empty where there is one."""
    if isinstance(output, dict) and set(output) == {PROBLEM}:
        return str(output[PROBLEM])
    return ""


def partial_of(output: Json) -> str:
    """Why a text was cut short; empty where it ended by itself or by its limit."""
    if isinstance(output, dict) and set(output) == {"text", PARTIAL}:
        return str(output[PARTIAL])
    return ""


def cut_short(text: str, tokens: int, seconds: float) -> Json:
    """The output of a text whose time was over."""
    return {"text": text, PARTIAL: f"its {seconds:g} s were over after {tokens} tokens"}


def run_requests(model: Model, samples: Sequence[Sample]) -> list[Answer]:
    """Sends all requests of the samples in one call; a sample with a request that got no answer has a problem."""
    return answers_of(samples, model.respond([r for s in samples for r in s.requests]))


def answers_of(samples: Sequence[Sample], outputs: Sequence[Json]) -> list[Answer]:
    """One answer per sample, in order; a sample with a request that got none has a problem."""
    answers, at = [], 0
    for s in samples:
        own = outputs[at : at + len(s.requests)]
        at += len(s.requests)
        why = next((p for o in own if (p := problem_of(o))), "")
        partial = next((p for o in own if (p := partial_of(o))), "")
        told = () if why else tuple(o["text"] if partial_of(o) else o for o in own)
        answers.append(Answer(s.id, s.prompt_hash, told, why, "" if why else partial))
    return answers
