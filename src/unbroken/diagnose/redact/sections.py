"""What a line holds because of the lines before it: values of a Kubernetes secret, a table's column, a name's value.

Nothing in such a line says that it is secret; what stands above it does. The readers go line by line and forget
a section at the first line that cannot belong to it.
"""

from __future__ import annotations

import re

from .credentials import FoundCredential, key_kind
from .values import holds, is_strange

_SECRET = re.compile(r"""^\W{0,4}kind["']?\s*:\s*["']?(Secret|SealedSecret)["']?\s*,?\s*$""")
_DATA = re.compile(r"""^(\s*)["']?(data|stringData|literals|secretData)["']?\s*:\s*\{?\s*$""")
_PAIR = re.compile(
    r"""^(\s*)["']?[\w.\-/]{1,80}["']?\s*:\s*(?:[|>][+-]?\s*$|["']?([^\s"'].{0,4000}?)["']?,?\s*$)"""
)
_ONE_LINE = re.compile(r"""\\{0,3}["']?(?:stringData|data)\\{0,3}["']?\s*:\s*\{([^{}]{1,8000})\}""")
_VALUE = re.compile(r""":\s*\\{0,3}["']?([^\s"'\\,{}]{2,4000})""")
_WITHIN = 30
"""Lines between `kind: Secret` and its data, on either side."""


class SecretManifests:
    """Values of Kubernetes secrets, as YAML or as JSON, in whatever names they stand."""

    def __init__(self) -> None:
        self._since: int | None = None  # lines since `kind: Secret`
        self._indent: int | None = None  # of the section's head

    def find(self, text: str) -> list[FoundCredential]:
        """The values in this line that its section makes secret."""
        if re.search(r"""["']?kind\\*["']?\s*:\s*\\*["']?Secret\b""", text):
            inline = [m for part in _ONE_LINE.finditer(text) for m in _values(part)]
            if inline:
                return inline
        if _SECRET.match(text):
            self._since = 0
        elif self._since is not None:
            self._since += 1
            if self._since > _WITHIN and self._indent is None:
                self._since = None
        if self._indent is not None:
            if not text.strip():
                return []
            indent = len(text) - len(text.lstrip())
            if indent > self._indent:
                pair = _PAIR.match(text)
                if pair is None:  # a block's line, or base64 that goes on
                    return [FoundCredential(indent, len(text.rstrip()), "secret")]
                return [FoundCredential(pair.start(2), pair.end(2), "secret")] if pair.group(2) else []
            self._indent = None
        head = _DATA.match(text)
        if head and (head.group(2) == "stringData" or self._since is not None):
            self._indent = len(head.group(1))
        return []


def _values(part: re.Match[str]) -> list[FoundCredential]:
    return [
        FoundCredential(part.start(1) + m.start(1), part.start(1) + m.end(1), "secret")
        for m in _VALUE.finditer(part.group(1))
    ]


_HEAD_USER = re.compile(r"(?<![\w%])(?:USER|User|UID|OWNER)(?![\w%])")
_HEAD_ANCHOR = re.compile(r"(?<![\w%])(?:JOBID|JobID|PID|JOB_ID)(?![\w%])")
_ID = re.compile(r"\d{1,10}(?:[_.+]\S{0,30})?")
_PS = re.compile(
    r"^([a-z_][\w.\-+]{1,31})\s+\d{1,8}\s+\d{1,4}(?:\.\d)?\s+\d{1,3}\.\d\s+(?:\d+\s+\d+\s+(?:\?|pts/\d+|tty\w*)\s|\S*(?:python|bash|sh|torchrun|srun)\b)"
)


class ProcessTables:
    """The user column of `squeue`, `sacct`, `ps` and `top`: its head names it, a job's or process's number marks a row."""

    def __init__(self) -> None:
        self._user: tuple[int, int, int] | None = None  # the word's place in the head: number, start, end
        self._anchor = 0

    def user(self, text: str) -> tuple[int, int] | None:
        """Where the user's name stands in this line."""
        words = list(re.finditer(r"\S+", text[:600]))
        head = _HEAD_USER.search(text)
        if head and _HEAD_ANCHOR.search(text) and len(words) >= 3:
            at = [i for i, w in enumerate(words) if w.start() <= head.start() < w.end()]
            anchor = [i for i, w in enumerate(words) if _HEAD_ANCHOR.fullmatch(w.group(0))]
            if at and anchor:
                self._user, self._anchor = (at[0], head.start(), head.end()), anchor[0]
                return None
        if self._user is not None:
            number, start, end = self._user
            if re.fullmatch(r"[\s\-+|=]*", text):
                return None  # a rule below the head
            if len(words) > max(number, self._anchor) and _ID.fullmatch(words[self._anchor].group(0)):
                below = [w for w in words if w.start() < end and w.end() > start]
                name = below[0] if len(below) == 1 and len(below[0].group(0)) > 2 else words[number]
                return name.span() if re.fullmatch(r"[A-Za-z_][\w.\-+]{1,31}", name.group(0)) else None
            self._user = None
        alone = _PS.match(text)
        return alone.span(1) if alone else None


_CELLS = re.compile(r"[\w.\-% ]{0,40}")
_USER_NAMES = frozenset(
    ["user", "username", "user_name", "owner", "login", "userid", "account_name", "submitter", "author"]
)


class Columns:
    """Tables with a sign between their cells: what the head says of a column, its cells are."""

    def __init__(self) -> None:
        self._sign = ""
        self._kinds: tuple[str, ...] = ()

    def find(self, text: str) -> tuple[list[FoundCredential], list[tuple[int, int]]]:
        """(secret cells, cells that name a user) of this line."""
        if self._sign:
            cells = text.split(self._sign)
            if len(cells) == len(self._kinds):
                return self._row(cells)
            self._sign = ""
        for sign in ("|", ",", "\t", ";"):
            cells = text.split(sign) if 1 < len(text) < 2000 and sign in text else []
            if 2 <= len(cells) <= 200 and all(_CELLS.fullmatch(c) for c in cells):
                kinds = tuple(_kind(c.strip()) for c in cells)
                if any(kinds):
                    self._sign, self._kinds = sign, kinds
                    break
        return [], []

    def _row(self, cells: list[str]) -> tuple[list[FoundCredential], list[tuple[int, int]]]:
        secret: list[FoundCredential] = []
        users: list[tuple[int, int]] = []
        at = 0
        for cell, kind in zip(cells, self._kinds, strict=True):
            bare = cell.strip().strip("\"'")
            start = at + cell.find(bare) if bare else at
            if kind == "user" and re.fullmatch(r"[A-Za-z_][\w.\-]{1,40}", bare):
                users.append((start, start + len(bare)))
            elif kind == "secret" and holds(bare):
                secret.append(FoundCredential(start, start + len(bare), "secret"))
            at += len(cell) + 1
        return secret, users


def _kind(name: str) -> str:
    if name.lower() in _USER_NAMES:
        return "user"
    return "secret" if " " not in name and key_kind(name) in ("strong", "usual") else ""


_KEY_AT_END = re.compile(
    r"""(?P<option>--?[A-Za-z][\w\-]{1,50})["']?,?\s*\\?$|(?P<key>[A-Za-z][\w.\-]{1,60})\\{0,3}["']?\s*(?:=>|:=|[:=：])\s*[|>\\]?$"""
)
_NAMED = re.compile(
    r"""(?:^|[\s{,\-])["']?(?:name|key|Name|Key)["']?\s*[:=]\s*["']?([A-Za-z][\w.\-]{1,60})["']?,?\s*$"""
)
_ITS_VALUE = re.compile(
    r"""^\W{0,20}(?:value|Value|default)["']?\s*[:=]\s*["']?([^\s"'][^"']{2,400}?)["']?,?\s*$"""
)
_BARE_VALUE = re.compile(r"""^(?:\[[\w :]{1,20}\]:?)?\s*["']?([^\s"'{}\[\]()][^\s"']{3,400})["']?[,)]?\s*$""")


class Carried:
    """A value whose name stands at the end of the line before, or in an item of its own."""

    def __init__(self) -> None:
        self._kind, self._named, self._whoami = "", False, False

    def find(self, text: str) -> tuple[list[FoundCredential], tuple[int, int] | None]:
        """(the value, the name of a user) that this line holds because of the last one."""
        found: list[FoundCredential] = []
        user: tuple[int, int] | None = None
        bare = _BARE_VALUE.match(text) if self._kind or self._whoami else None
        if bare and self._kind and holds(bare.group(1)) and not bare.group(1).startswith(("-", "/")):
            value = bare.group(1)
            word = re.fullmatch(r"[A-Za-z]+[.:!]?|[\w.\-]+[:=]|\d{4}-\d\d-\d\d\S*", value)
            if (self._kind == "strong" and not word) or self._kind == "option" or is_strange(value):
                found.append(FoundCredential(bare.start(1), bare.end(1), "secret"))
        elif bare and self._whoami and re.fullmatch(r"[a-z_][\w.\-]{1,31}", bare.group(1)):
            user = bare.span(1)
        its = _ITS_VALUE.match(text) if self._named else None
        if its and holds(its.group(1)):
            found.append(FoundCredential(its.start(1), its.end(1), "secret"))
        self._kind, self._named = "", False
        self._whoami = re.search(r"(?:[$#+>] |^)whoami\s*$", text) is not None
        tail = text[-200:].rstrip()
        if m := _KEY_AT_END.search(tail):
            name = m.group("option") or m.group("key")
            if key_kind(name) in ("strong", "usual"):
                self._kind = "option" if m.group("option") else key_kind(name) or ""
        if n := _NAMED.search(tail):
            self._named = key_kind(n.group(1)) in ("strong", "usual")
        return found, user
