"""A judge behind an OpenAI-compatible endpoint grades from 1 to 10.

When the judge is overloaded or answers with a poem the call is tried again; what stays without a grade is "unscored"
and counted apart: never as a bad message.
"""

import os

from unbroken.evaluate.scoring.judge import Judge, Unscored

THREADS = 8  # calls that wait for the judge at the same time

_url = os.environ.get("JUDGE_URL", "")
_judge = Judge(_url, os.environ.get("JUDGE_MODEL", "judge"), per_minute=300) if _url else None


def score(row, output):
    if _judge is None:
        raise Unscored("no judge: set JUDGE_URL to the address of an OpenAI-compatible endpoint")
    question = (
        f"Request: {row['request']}\nMessage: {output}\nHow polite is it, from 1 to 10? End with [[grade]]."
    )
    return {"grade": _judge.grade(question, 1, 10)}
