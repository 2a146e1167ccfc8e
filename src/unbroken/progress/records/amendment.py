"""What was changed of a run while it stood or went on, in words: the journal's `amended` and `resized` records."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any


def describe_amendment(record: Mapping[str, Any]) -> str:
    """`from attempt 3 on, after step 1,200: --lr 0.1 -> --lr 0.05`."""
    step = int(record.get("step", -1))
    changes = [describe_difference(record.get("was") or (), record["command"])]
    if had := record.get("had"):
        changes.append(f"{had[0]} nodes x {had[1]} ranks -> {record['nodes']} x {record['nproc']}")
    after = f", after step {step:,}" if step >= 0 else ""
    return f"from attempt {record.get('before', '?')} on{after}: {'; '.join(c for c in changes if c)}"


def describe_resize(record: Mapping[str, Any]) -> str:
    """`from attempt 2 on, after step 120: 4 nodes -> 3, without node-001`."""
    step = int(record.get("step", -1))
    after = f", after step {step:,}" if step >= 0 else ""
    without = f", without {', '.join(record['without'])}" if record.get("without") else ""
    return f"from attempt {record.get('before', '?')} on{after}: {record['had']} nodes -> {record['nodes']}{without}"


def describe_difference(old: Sequence[str], new: Sequence[str]) -> str:
    """What is other in a command, as words to read: `--lr 0.1 -> --lr 0.05`."""
    parts = []
    for op, a, b, c, d in difflib.SequenceMatcher(None, list(old), list(new), autojunk=False).get_opcodes():
        if op == "equal":
            continue
        # The option before a value that changed says what the value is.
        named = [old[a - 1]] if op == "replace" and a and old[a - 1].startswith("-") else []
        gone, come = shlex.join([*named, *old[a:b]]), shlex.join([*named, *new[c:d]])
        parts.append({"insert": f"+ {come}", "delete": f"- {gone}"}.get(op, f"{gone} -> {come}"))
    return ", ".join(parts)
