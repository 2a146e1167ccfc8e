"""What a launcher, a container or a structured logger wraps around every line of one file, learnt from that file.

A tag (`[TRAIN] `, `trainer-1  | `, `[1,3]<stderr>:`, a stamp of unknown form) is one because nearly every line begins
with one of few, whatever the line says. One JSON object per line is one because nearly every line parses and holds its
text in the same field. Layers are learnt from the outside in, so that a JSON logger below docker's own JSON is read
too. Rules see only what is left; a file without decoration costs nothing.

    layers = learn(lines)                 # of one file: its first lines, as text
    for bare in layers.lines(text):       # one line in; one out, or several where a field holds a traceback
        bare.text, bare.tag, bare.rank, bare.time, bare.level, bare.node
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .prefixes import clean, prefix_length

SAMPLE_LINES = 80
_SAMPLE_BYTES = 32 << 10
_FEWEST = 6
_COVERED = 0.85
_MOST_LAYERS = 4
_MOST_SHAPES = 256
_LONGEST_JSON = 1 << 20

_NAME = r"[\w./@:\-]{1,80}"
_SHAPES = tuple(
    re.compile(p)
    for p in (
        r"\[\d+,\d+\]<\w{3,10}>:? ?",  # mpirun --tag-output
        rf"{_NAME}(?: {_NAME})? {{0,60}}[|\u2502\u00bb] ?",  # compose, foreman, turborepo
        r"\[[^\[\]]{1,80}\](?:<\w{1,10}>)?[:>]? ?",
        r"<[^<>]{1,60}>:? ?",
        r"\([^()]{1,80}\):? ?",
        rf"{_NAME}> ?",
        r"[\w./@\-]{1,80}: ?",
        r"[a-z][\w.]*-[\w.\-]*\d[\w.\-]* [\w.\-]{1,60} (?:\S{1,3} )?",  # stern: pod, container
        r"[\w/.\-]{0,20}[ T]?\d\d:\d\d:\d\d[\w.,+:]{0,12} ",  # a stamp of unknown form
    )
)
_STAMP = re.compile(r"\d{1,2}:\d\d:\d\d")
_NO_TAG = re.compile(
    r"(?i)^\W*(?:(?:global[_ ])?step|iter(?:ation)?|epoch|batch|loss|eval|val|samples?|tokens|lr)\b|(?:Error|Exception|Warning)\W*$"
    r"|^\W*(?:file|traceback|model|prompt|completion|assistant|user|system)\b"
)
_ISO = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[\d.]*Z?")
_DIGITS = re.compile(r"\d+")
_RANK = re.compile(r"(?i)^\[\d+,(\d+)\]<|\brank[-_ =:]?(\d{1,6})\b|^\W{0,2}r(\d{1,4})\W{0,3}$")
_QUOTED = re.compile(r"[\"'`\u201c\u2018{=]|(?i:completion|generat|sample|prompt|response|answer|text)")

_MESSAGE = ("log", "message", "msg", "event", "textPayload", "MESSAGE", "text", "body", "line", "@message", "content", "short_message", "jsonPayload.message", "record.message", "fields.message", "data.message")  # fmt: skip
_TROUBLE = ("exception", "exc_info", "exc_text", "traceback", "stack_trace", "stacktrace", "stack", "error", "err", "error_message", "full_message", "error.message", "error.stack_trace", "exception.stacktrace", "record.exception", "jsonPayload.exception", "jsonPayload.exc_info", "detail", "cause", "errorVerbose")  # fmt: skip
_CLASS = ("exc_type", "type", "class", "class_name", "name", "exception", "kind")
_TEXT = ("exc_value", "value", "message", "msg", "text")
_LEVEL = ("level", "severity", "levelname", "lvl", "log_level", "loglevel", "log.level", "record.level.name")
_TIME = ("timestamp", "time", "ts", "@timestamp", "asctime", "datetime", "eventTime", "lastTimestamp", "date")
_RANK_FIELD = (
    "rank",
    "global_rank",
    "RANK",
    "labels.rank",
    "extra.rank",
    "record.extra.rank",
    "jsonPayload.rank",
)
_NODE_FIELD = ("node", "hostname", "host", "nodeName", "source.host", "kubernetes.host", "kubernetes.node_name", "spec.nodeName")  # fmt: skip
_LEVELS = {
    "warn": "WARNING", "warning": "WARNING", "err": "ERROR", "error": "ERROR", "fatal": "ERROR", "critical": "ERROR",
    "info": "INFO", "debug": "DEBUG", "trace": "DEBUG", "notice": "INFO", "panic": "ERROR", "dpanic": "ERROR",
}  # fmt: skip


@dataclass(frozen=True)
class Bare:
    """One line without its decoration. `tag` ties the lines of one writer together; `time` as it was written;
    `field` names the JSON field that the text is from, `part` its place among the texts of the same line."""

    text: str
    tag: str = ""
    rank: int | None = None
    node: str | None = None
    level: str | None = None
    time: str | None = None
    field: str | None = None
    part: int = 0


@dataclass(frozen=True)
class Tag:
    """A learnt tag: `shape` finds it, `inner` says that known prefixes (a time, a level) stand before it."""

    shape: re.Pattern[str]
    inner: bool = False

    def strip(self, bare: Bare) -> list[Bare]:
        """The line without the tag; the line itself where it has none."""
        at = prefix_length(bare.text) if self.inner else 0
        m = self.shape.match(bare.text, at)
        if m is None or m.end() == at or _NO_TAG.search(m.group(0)):
            return [bare]
        rank = bare.rank if bare.rank is not None else _rank_in(m.group(0))
        text = bare.text[:at] + bare.text[m.end() :]
        return [replace(bare, text=text, tag=bare.tag + m.group(0).strip(), rank=rank)]


@dataclass(frozen=True)
class JsonFields:
    """A learnt JSON object per line: `message` is the field with the text."""

    message: str

    def strip(self, bare: Bare) -> list[Bare]:
        """The texts of the object's fields, the message first; the line itself where it is no such object."""
        value = _object(bare.text)
        if value is None:
            return [bare]
        message = _field(value, self.message)
        texts = [(self.message, message)] if isinstance(message, str) else []
        names = _names_of(tuple(value))
        for name in names.trouble:
            other = _field(value, name) if name != self.message else None
            if isinstance(other, (list, dict)):
                other = _said(other)
            if isinstance(other, str) and other.strip() and other != message:
                texts.append((name, other))
        if not texts:
            stamps = _ISO.findall(bare.text)
            return [replace(bare, time=max(stamps))] if stamps else [bare]
        reason = value.get("reason")
        if (
            isinstance(reason, str)
            and isinstance(message, str)
            and ("involvedObject" in value or "regarding" in value)
        ):
            texts[0] = (self.message, f"{reason}: {message}")  # an event of Kubernetes
        node, level, when = _first(value, names.node), _first(value, names.level), _first(value, names.time)
        rank = bare.rank if bare.rank is not None else _number(_first(value, names.rank))
        node = bare.node or (node if isinstance(node, str) else None)
        level = _LEVELS.get(level.lower()) if isinstance(level, str) else bare.level
        when = when if isinstance(when, str) else bare.time
        lines = [(name, line) for name, text in texts for line in text.rstrip("\r\n").split("\n")]
        return [
            Bare(line.rstrip("\r"), bare.tag, rank, node, level, when, name, part)
            for part, (name, line) in enumerate(lines)
        ]


class _Names(NamedTuple):
    """The names of fields that an object may have, of all that are looked for."""

    trouble: tuple[str, ...]
    rank: tuple[str, ...]
    node: tuple[str, ...]
    level: tuple[str, ...]
    time: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def _names_of(keys: tuple[str, ...]) -> _Names:
    """The names that lead somewhere in an object with these keys; the same few in all lines of a log."""
    every = (_TROUBLE, _RANK_FIELD, _NODE_FIELD, _LEVEL, _TIME)
    return _Names(*(tuple(n for n in names if n in keys or n.split(".", 1)[0] in keys) for names in every))


@dataclass(frozen=True)
class Decoration:
    """The layers around the lines of one file, outermost first."""

    layers: tuple[Tag | JsonFields, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layers)

    def lines(self, text: str) -> list[Bare]:
        """The line without its layers: one, or several where a field held several lines."""
        bares = [Bare(text)]
        for layer in self.layers:
            if len(bares) == 1:
                bares = layer.strip(bares[0])
            else:
                bares = [x for b in bares for x in layer.strip(b)]
        return bares

    @property
    def fields(self) -> bool:
        """Whether lines are JSON objects, whose length says nothing of their text's."""
        return any(isinstance(x, JsonFields) for x in self.layers)

    def with_tag_before(self, traceback: str, following: str) -> Decoration:
        """This decoration, with the tag that stands before 'Traceback' where the next line begins with one like it.

        A file may carry a tag on its error stream alone; nothing is learnt from quoted text."""
        at = traceback.find("Traceback (most recent call last)")
        prefix = traceback[:at]
        if at <= 0 or not prefix.strip() or len(prefix) > 200 or _QUOTED.search(prefix):
            return self
        start = prefix_length(traceback)
        if start >= at:
            return self
        tag = prefix[start:]
        shape = re.compile(
            _DIGITS.sub(lambda _: r"\d+", re.escape(tag.rstrip())) + (" ?" if tag[-1:] == " " else "")
        )
        inner = prefix_length(following)
        if not shape.match(following, inner if start else 0):
            return self
        return Decoration((*self.layers, Tag(shape, inner=bool(start))))


PLAIN = Decoration()


def learn_from(block: bytes, lines: int = SAMPLE_LINES) -> Decoration:
    """The decoration of a file, from its first block of bytes: `lines` lines from its start and from its end."""
    return learn(clean(r, _SAMPLE_BYTES) for r in rows_of(block, lines))


def rows_of(block: bytes, lines: int) -> list[bytes]:
    """The rows that show a file's decoration."""
    half = lines // 2
    first = block[:_SAMPLE_BYTES].split(b"\n", 4 * half)
    if len(block) > _SAMPLE_BYTES:
        last = block[-_SAMPLE_BYTES:].rsplit(b"\n", 4 * half)[1:]
        first = first[:-1] or first  # the last one is cut, or all the rest
    else:
        first = block.split(b"\n")
        first, last = first[: len(first) // 2], first[len(first) // 2 :]
    return _filled(first, half) + _filled(last[::-1], half)[::-1]


class Learner:
    """Learns the decoration of many files, each shape but twice: files whose sample rows differ from those of two
    others in digits alone have theirs, where those two had the same."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._known: dict[bytes, list[Decoration]] = {}

    def __call__(self, block: bytes) -> Decoration:
        rows = rows_of(block, self._lines)
        key = b"\n".join(rows).translate(None, b"0123456789")
        known = self._known.setdefault(key, []) if len(self._known) < _MOST_SHAPES else []
        if len(known) == 2 and known[0] == known[1]:
            return known[0]
        found = learn(clean(r, _SAMPLE_BYTES) for r in rows)
        if len(known) < 2:
            known.append(found)
        return found


def _filled(rows: Iterable[bytes], most: int) -> list[bytes]:
    """The first `most` rows that are not blank."""
    return list(itertools.islice((r for r in rows if r.strip()), most))


def learn(lines: Iterable[str]) -> Decoration:
    """The decoration of a file, from some of its lines. Blank lines say nothing; too few lines teach only JSON."""
    sample = [Bare(x) for x in lines if x.strip()][:SAMPLE_LINES]
    layers: list[Tag | JsonFields] = []
    while sample and len(layers) < _MOST_LAYERS:
        layer = _fields(sample) or _tag(sample)
        if layer is None:
            break
        layers.append(layer)
        sample = [y for x in sample for y in layer.strip(x) if y.text.strip()]
    return Decoration(tuple(layers))


def _fields(sample: Sequence[Bare]) -> JsonFields | None:
    """The JSON layer, where most lines are objects that hold a text under one name."""
    named: Counter[str] = Counter()
    objects = 0
    for bare in sample:
        value = _object(bare.text)
        if value is None:
            continue
        objects += 1
        name = next((n for n in _MESSAGE if isinstance(_field(value, n), str)), None) or _longest(value)
        if name is not None:
            named[name] += 1
    if objects < 0.6 * len(sample) or not named:
        return None
    name, count = named.most_common(1)[0]
    return JsonFields(name) if count >= 0.5 * objects and count >= 2 else None


def _longest(value: dict[str, Any]) -> str | None:
    """The field that reads like a message where none has a usual name: the longest text with a blank in it."""
    texts = [(len(v), k) for k, v in value.items() if isinstance(v, str) and " " in v]
    return max(texts)[1] if texts else None


def _tag(sample: Sequence[Bare]) -> Tag | None:
    """The tag that nearly all lines begin with, outermost, or behind a known time and level."""
    if len(sample) < _FEWEST:
        return None
    few = sample[:: len(sample) // 12 or 1]  # most files have no tag: a few lines show it
    likely = _likely(few)
    if not likely:
        return None
    known = [prefix_length(b.text) for b in sample]
    outer = sum(k == 0 for k in known) >= _COVERED * len(sample)
    starts = [0] * len(sample) if outer else known
    for shape in likely:
        if _is_tag(shape, [(b.text, at) for b, at in zip(sample, starts, strict=True)]):
            return Tag(shape, inner=not outer)
    return None


def _likely(few: Sequence[Bare]) -> list[re.Pattern[str]]:
    """The shapes that more than 70 % of these lines begin with; most files show in four lines that there is none."""
    shapes = dict.fromkeys(_SHAPES, 0)  # how many lines lack it
    for bare in few:
        at = prefix_length(bare.text)
        for shape in list(shapes):
            m = shape.match(bare.text, at)
            if m is None or m.end() == at or _NO_TAG.search(m.group(0)):
                shapes[shape] += 1
                if len(few) - shapes[shape] <= 0.7 * len(few):
                    del shapes[shape]
        if not shapes:
            break
    return list(shapes)


def _is_tag(shape: re.Pattern[str], rows: Sequence[tuple[str, int]]) -> bool:
    """Whether few different ones stand before nearly all lines, whatever the lines then say."""
    tags: Counter[str] = Counter()
    kinds: set[str] = set()
    for text, at in rows:
        m = shape.match(text, at)
        if m is None or m.end() == at or _NO_TAG.search(m.group(0)):
            continue
        tags[m.group(0)] += 1
        kinds.add(" ".join(_DIGITS.sub("0", text[m.end() : m.end() + 80]).split()[:3]))
    covered = tags.total()
    if covered < _COVERED * len(rows) or len(kinds) < 3:
        return False
    templates = {_DIGITS.sub("0", t) for t in tags}
    if len(templates) > max(8, covered // 20):
        return False
    stamps = sum(n for t, n in tags.items() if _STAMP.search(t))
    return stamps > covered // 2 or len(tags) <= max(4, covered // 5)


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a line is, or None."""
    if text[:1] != "{" or len(text) > _LONGEST_JSON or not text.rstrip().endswith("}"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _field(value: dict[str, Any], name: str) -> Any:
    """A field by its name; a dot leads into an object."""
    if name in value:
        return value[name]
    here: Any = value
    for part in name.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here


def _said(value: list[Any] | dict[str, Any]) -> str | None:
    """What a field that is no text says: lines, or exceptions as objects (structlog's, Sentry's, ECS's), the first cause first."""
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return "\n".join(x.rstrip("\n") for x in value)
    inner = value.get("values") if isinstance(value, dict) else None
    objects = inner if isinstance(inner, list) else value if isinstance(value, list) else [value]
    said = []
    for x in objects[::-1]:
        kind = _first(x, _CLASS) if isinstance(x, dict) else None
        if isinstance(kind, str) and kind:
            text = next((t for n in _TEXT if isinstance(t := _field(x, n), str)), "")
            said.append(f"{kind}: {text}" if text else kind)
    return "\n".join(said) or None


def _first(value: dict[str, Any], names: Sequence[str]) -> Any:
    return next((found for n in names if (found := _field(value, n)) is not None), None)


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdigit() and len(value) < 7 else None


def _rank_in(tag: str) -> int | None:
    m = _RANK.search(tag)
    return int(next(g for g in m.groups() if g is not None)) if m else None
