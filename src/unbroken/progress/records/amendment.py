"""What was changed of a run while it stood or went on, in words: the journal's `amended` and `resized` records."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ...units import plural

_OPTION = re.compile(r"--?[A-Za-z_]")


def describe_amendment(record: Mapping[str, Any]) -> str:
    """`from attempt 3 on, after step 1,200: --lr 0.1 -> --lr 0.05`."""
    step = int(record.get("step", -1))
    changes = [describe_difference(record.get("was") or (), record["command"])]
    if had := record.get("had"):
        changes.append(
            f"{plural(had[0], 'node')} x {plural(had[1], 'rank')} -> {record['nodes']} x {record['nproc']}"
        )
    after = f", after step {step:,}" if step >= 0 else ""
    back = " (back: that command failed before its first step)" if record.get("back") else ""
    return f"from attempt {record.get('before', '?')} on{after}: {'; '.join(c for c in changes if c)}{back}"


def describe_resize(record: Mapping[str, Any]) -> str:
    """`from attempt 2 on, after step 120: 4 nodes -> 3, without node-001`."""
    step = int(record.get("step", -1))
    after = f", after step {step:,}" if step >= 0 else ""
    without = f", without {', '.join(record['without'])}" if record.get("without") else ""
    return f"from attempt {record.get('before', '?')} on{after}: {plural(int(record['had']), 'node')} -> {record['nodes']}{without}"


def describe_difference(old: Sequence[str], new: Sequence[str]) -> str:
    """What is other in a command, as words to read, each option with its values: `--lr 0.1 -> --lr 0.05`."""
    before, after = _options(old), _options(new)
    parts = []
    matcher = difflib.SequenceMatcher(
        None, [_name(o) for o in before], [_name(o) for o in after], autojunk=False
    )
    for op, a, b, c, d in matcher.get_opcodes():
        if op == "equal":
            pairs = zip(before[a:b], after[c:d], strict=True)
            parts += [f"{shlex.join(was)} -> {shlex.join(now)}" for was, now in pairs if was != now]
            continue
        gone, come = shlex.join(sum(before[a:b], ())), shlex.join(sum(after[c:d], ()))
        parts.append({"insert": f"+ {come}", "delete": f"- {gone}"}.get(op, f"{gone} -> {come}"))
    return ", ".join(parts)


def _options(words: Sequence[str]) -> list[tuple[str, ...]]:
    """A command in pieces: each option with what follows it up to the next one, each word before the first by itself."""
    found: list[tuple[str, ...]] = []
    for word in words:
        if found and not _is_option(word) and _is_option(found[-1][0]):
            found[-1] += (word,)
        else:
            found.append((word,))
    return found


def _name(piece: tuple[str, ...]) -> str:
    return piece[0].partition("=")[0] if _is_option(piece[0]) else piece[0]


def _is_option(word: str) -> bool:
    """Whether it begins an option: `-1` and `-.5` are values."""
    return _OPTION.match(word) is not None
