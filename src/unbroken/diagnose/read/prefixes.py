"""What stands before the message of a log line: time, rank, node, GPU, level, taken off layer by layer.

Covers torchrun (`[rank3]:`, `[default3]:`), `srun -l` (`3: `), pdsh (`node-3: `), syslog, NCCL, glog, Python's
logging, NeMo, InternEvo, torchtitan, DeepSpeed, Ray (`(Worker pid=1, ip=...)`), Kubernetes and accelerate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import clock

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOST = r"[A-Za-z][A-Za-z0-9.\-]{0,62}"

_LAYERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("rank", re.compile(r"\[?(?:rank|Rank |RANK )(\d{1,6})\]?:?\s?")),
    ("local", re.compile(r"\[default(\d{1,3})\]:?\s?")),
    ("ray", re.compile(r"\(([\w.]+)(?: pid=(\d+)|,)(?:,? ?ip=([\w.\-:]+|<ip-\d+>))?\)\s?")),
    ("kube", re.compile(rf"({clock.ISO}) (?:stdout|stderr) [FP] ")),
    ("pod", re.compile(r"\[pod/([\w.\-]+)(?:/[\w.\-]+)?\]\s")),
    ("syslog", re.compile(rf"({clock.SYSLOG}|{clock.ISO}) (?!DEBUG|INFO|WARN|ERROR|CRITICAL|FATAL)({_HOST}) ([\w./\-]+)(?:\[\d+\])?: ")),
    ("dmesg", re.compile(rf"\[({clock.DMESG})\]\s")),
    ("uptime", re.compile(r"\[\s*\d+\.\d{6}\]\s")),
    ("nccl", re.compile(rf"({_HOST}):(\d+):(\d+) \[(\d+)\] ")),
    ("nemo", re.compile(rf"\[NeMo ([IWEC]) ({clock.ISO})\s[^\]]*\]\s?")),
    ("glog", re.compile(rf"\[?({clock.GLOG})(?:\s+\d+)?\s+[^\s\]]+:\d+\]\s?")),
    ("dmesg-x", re.compile(rf"\w+\s*:(emerg|alert|crit|err|warn|notice|info|debug)\s*: (?:({clock.ISO}) )?")),
    ("time", re.compile(rf"\[?({clock.ISO}|{clock.US})\]?[:,]?[ \t]?(?:- )?")),
    ("level", re.compile(r"(?:[\w.]+ - )?\[?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b\]?(?: - |:[ \t]?|[ \t])?")),
    ("node", re.compile(r"\[(?!rank|default|Rank|RANK|GPU|gpu|pid)([A-Za-z][A-Za-z\-.]*\d[\w.\-]*)\]:?\s")),
    ("where", re.compile(r"\[?[\w./\-]+\.(?:py|cpp|cc|hpp|cu|h|c):\d+(?::\w+)?\]?(?: in \w+)?(?: --|:)?\s+")),
    ("name", re.compile(r"\[(?:titan|trainer|launcher|agent|worker|main)\]\s")),
)  # fmt: skip
_DIGITS, _LETTERS = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WORD = _DIGITS + _LETTERS + "_"
# What each layer can begin with: a line is tried only against those that can fit it.
_BEGIN = {
    "rank": "[rR", "local": "[", "ray": "(", "kube": _DIGITS, "pod": "[", "syslog": _DIGITS + "JFMASOND", "dmesg": "[", "uptime": "[",
    "nccl": _LETTERS, "nemo": "[", "glog": "[IWEFC", "dmesg-x": _WORD, "time": "[" + _DIGITS, "level": "[." + _WORD, "node": "[",
    "where": "[./-" + _WORD, "name": "[",
}  # fmt: skip
_BY_BEGIN = {chr(c): tuple((k, p) for k, p in _LAYERS if chr(c) in _BEGIN.get(k, chr(c))) for c in range(128)}
_MOST_PREFIXES = 8
_TASK = re.compile(r"\s{0,5}(\d{1,6}): ")
_PDSH = re.compile(r"((?!rank|step|iter|epoch)[a-z][a-z\-]{0,30}\d[\w\-]{0,30}): ")
_EMBEDDED_RANK = re.compile(r"\[(?:PG ID \d+ )?(?:PG GUID \S+ )?Rank (\d+)\]")


@dataclass(frozen=True)
class Line:
    """One line taken apart. `stream` is what ties the lines of one writer together (its constant prefix);
    `local` is a rank within its node, `task` the number that `srun -l` prints."""

    body: str
    time: float | None = None
    rank: int | None = None
    local: int | None = None
    task: int | None = None
    node: str | None = None
    gpu: int | None = None
    pid: int | None = None
    level: str | None = None
    kernel: bool = False
    stream: str = ""


def clean(raw: bytes, longest: int = 8192) -> str:
    """Text of a raw line: damage replaced, NULs and colours dropped, the last state of a progress bar kept.

    At most `longest` bytes of it."""
    if b"\0" in raw:
        raw = raw.replace(b"\0", b"")
    if b"\r" in raw:
        pieces = [p for p in raw.split(b"\r") if p.strip()]
        raw = pieces[-1] if pieces else b""
    text = raw[:longest].decode("utf-8", "replace")
    return _ANSI.sub("", text) if "\x1b" in text else text


def take_apart(text: str, year: int) -> Line:
    """Takes the known prefixes off `text`. Never fails: what is not known stays in the body."""
    found, stream, pos = _known(text, year)
    body = text[pos:]
    if "rank" not in found and "Rank " in body:
        m = _EMBEDDED_RANK.search(body)
        if m:
            found["rank"] = int(m.group(1))
    return Line(body=body, stream="".join(stream), **found)  # type: ignore[arg-type]


def prefix_length(text: str) -> int:
    """How many characters of `text` are known prefixes."""
    m = _TASK.match(text) or _PDSH.match(text)
    pos, used = m.end() if m else 0, set[str]()
    for _ in range(_MOST_PREFIXES):
        got = _next_layer(text, pos, used) if pos < len(text) else None
        if got is None:
            break
        pos = got[1].end()
    return pos


def _known(text: str, year: int) -> tuple[dict[str, object], list[str], int]:
    found: dict[str, object] = {}
    stream: list[str] = []
    pos, used = 0, set[str]()
    for kind, pattern in (("task", _TASK), ("pdsh", _PDSH)):
        m = pattern.match(text)
        if m:
            found["task" if kind == "task" else "node"] = int(m.group(1)) if kind == "task" else m.group(1)
            stream.append(m.group(0).strip())
            pos = m.end()
            break
    for _ in range(_MOST_PREFIXES):
        got = _next_layer(text, pos, used) if pos < len(text) else None
        if got is None:
            break
        kind, m = got
        pos = m.end()
        _take(kind, m, found, stream, year)
    return found, stream, pos


def _next_layer(text: str, pos: int, used: set[str]) -> tuple[str, re.Match[str]] | None:
    """The layer that stands at `pos`, which is put into `used`; None where the message begins."""
    for kind, pattern in _BY_BEGIN.get(text[pos], _LAYERS):
        if kind not in used and (m := pattern.match(text, pos)) and m.end() > pos:
            used.add(kind)
            return kind, m
    return None


def _take(kind: str, m: re.Match[str], found: dict[str, object], stream: list[str], year: int) -> None:
    if kind in ("rank", "local"):
        found[kind] = int(m.group(1))
        stream.append(m.group(0).strip())
    elif kind == "ray":
        if m.group(2):
            found["pid"] = int(m.group(2))
        if m.group(3):
            found["node"] = m.group(3)
        stream.append(m.group(0).strip())
    elif kind in ("kube", "time", "dmesg"):
        found.setdefault("time", clock.parse(m.group(1), year))
        found["kernel"] = found.get("kernel", False) or kind == "dmesg"
    elif kind == "dmesg-x":
        found["kernel"] = True
        if m.group(2):
            found["time"] = clock.parse(m.group(2), year)
    elif kind == "pod":
        found["node"] = m.group(1)
        stream.append(m.group(0).strip())
    elif kind == "syslog":
        found["time"], found["node"] = clock.parse(m.group(1), year), m.group(2)
        found["kernel"] = m.group(3) in ("kernel", "mcelog", "systemd", "dmesg", "nvidia-fabricmanager")
        stream.append(m.group(2))
    elif kind == "uptime":
        found["kernel"] = True
    elif kind == "nccl":
        found["node"], found["pid"], found["gpu"] = m.group(1), int(m.group(2)), int(m.group(4))
        stream.append(f"{m.group(1)}:{m.group(2)}")
    elif kind == "nemo":
        found["level"] = {"I": "INFO", "W": "WARNING", "E": "ERROR"}.get(m.group(1), "ERROR")
        found["time"] = clock.parse(m.group(2), year)
    elif kind == "glog":
        found["level"] = {"I": "INFO", "W": "WARNING"}.get(m.group(1)[0], "ERROR")
        found["time"] = clock.parse(m.group(1), year)
    elif kind == "level":
        found["level"] = {"WARN": "WARNING", "CRITICAL": "ERROR", "FATAL": "ERROR"}.get(
            m.group(1), m.group(1)
        )
    elif kind == "node":
        found["node"] = m.group(1)
        stream.append(m.group(0).strip())
