"""Text without secrets: tokens, passwords, user names, e-mail and network addresses replaced by stable stand-ins.

Stand-ins keep their number within one `Redactor` (`<ip-1>` is the same machine everywhere), so that what is sent
away can still be reasoned about. Node names without a domain stay: a diagnosis is of no use without them. So do
metrics, paths and hashes. Text is decoded before it is searched (`decoded`), lines are searched together with the
next one, and a detector of others (detect-secrets) looks beside our own finders (`credentials`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..read.prefixes import take_apart
from .credentials import FoundCredential, detect, find, shaped
from .decoded import base64_texts, views, visible
from .expressions import user_names
from .sections import Carried, Columns, ProcessTables, SecretManifests
from .values import is_strange

LONGEST = 20_000
"""Characters of a line that are searched at once; a longer one is searched in pieces that overlap by `OVERLAP`."""
OVERLAP = 600
_KEY_HEAD = re.compile(
    r"-----BEGIN (?!CERTIFICATE|PUBLIC)[A-Z0-9 ]{0,40}-----|^PuTTY-User-Key-File|Private-Lines:"
)
_KEY_BODY = re.compile(
    r"(?:[A-Za-z0-9+/]{16,}={0,2}|[A-Za-z0-9+/]{1,76}={1,2}|=[A-Za-z0-9+/]{4})(?:\\n)?[\"',\\]*"
)
_KEY_START = re.compile(r"[A-Za-z0-9+/]{4,}={0,2}(?:\\n)?[\"',\\]*")
_KEY_HEADER = re.compile(r"\s*$|[A-Z][A-Za-z\-]{2,20}: ")
_BASE64_LINE = re.compile(r"(?:^|[\s|>\"'])([A-Za-z0-9+/]{40,100}={0,2})(?:\\n)?[\"',\\+]*\s*$")
_REMEMBERED = 500
_KEY_LINES = 220  # a PGP key of 4096 bits has about 100
_TOKEN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/_-.=%:~")
_HEAD = re.compile(r"\s*[\"']?([A-Za-z0-9+/_\-.=%:~]{2,})")
_EMAIL = re.compile(r"(?<![\w.+\-])[\w.+\-]{1,64}@[\w\-]{1,63}(?:\.[\w\-]{1,63}){1,5}(?![\w\-])")
_COMMON = frozenset(
    [
        "root",
        "user",
        "users",
        "ubuntu",
        "nobody",
        "admin",
        "shared",
        "slurm",
        "data",
        "train",
        "none",
        "null",
        "default",
        "anonymous",
        "true",
        "false",
        "the",
        "self",
        "me",
        "unknown",
        "name",
        "id",
        "service",
        "worker",
        "python",
        "job",
        "public",
        "local",
        "test",
        "tests",
        "git",
        "hdfs",
        "home",
        "signal",
        "kernel",
        "agent",
        "scheduler",
        "supervisor",
        "watchdog",
        "timeout",
        "systemd",
        "slurmctld",
        "elastic",
        "torchrun",
        "external",
        "parent",
        "process",
        "system",
        "rank",
        "node",
    ]
)
_IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?!\w|\.\d)")
_IP_NAME = re.compile(
    r"\b(?:ip|ec2)-((?:25[0-5]|2[0-4]\d|1?\d?\d)(?:-(?:25[0-5]|2[0-4]\d|1?\d?\d)){3})(?![\w-])"
)
_MAC_DOTS = re.compile(
    r"(?i)(?<=hwaddr )[0-9a-f]{4}(?:\.[0-9a-f]{4}){2}|(?<=mac )[0-9a-f]{4}(?:\.[0-9a-f]{4}){2}"
)
_RESOLVED = re.compile(
    r"(?i)(?:gethostbyname|getaddrinfo|(?:resolve|unknown|lookup)(?: host(?:name)?)?|master_addr|rdzv[_-]endpoint|host_?name|nslookup|ping)['\"\s:=(]{1,4}([a-z0-9][a-z0-9\-]{0,62})\.((?:[a-z0-9\-]{1,62}\.){0,4}[a-z]{2,18})(?![\w.]*\()"
)
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]{3,45}(?:\.\d{1,3}){0,3}(?:%\w{1,15})?(?![\w:])")
_MAC = re.compile(r"(?<![\w:\-])(?:[0-9a-fA-F]{2}[:\-]){5}[0-9a-fA-F]{2}(?![\w:\-])")
_URL_HOST = re.compile(
    r"(?i)(?:(?<=://)|(?<=>@)|(?<=//))([a-z0-9][a-z0-9\-]{0,62})\.((?:[a-z0-9\-]{1,62}\.){0,5}[a-z]{2,18})\b(?![\w.]*\()"
)
_FQDN = re.compile(
    r"(?i)(?<![\w.@/])([a-z0-9][a-z0-9\-]{0,62})\.((?:[a-z0-9\-]{1,62}\.){0,5}(?:com|org|net|edu|gov|mil|local|localdomain|internal|intranet|intra|corp|lan|cloud|private|home\.arpa|hpc|cluster|svc|int))(?![\w\-]|\.\w|\()"
)
_FQDN_COUNTRY = re.compile(
    r"(?i)(?<![\w.@/])([a-z0-9][a-z0-9\-]{0,62})\.((?:[a-z0-9\-]{1,62}\.){1,4}(?:io|ai|cn|de|fr|uk|jp|ch|eu|us|kr|in|ca|au|nl|se|no|fi|dk|it|es|pl|sg|tw|ru|br|tech|dev|app|co|me|xyz))(?![\w\-]|\.\w|\()"
)
_HOST_PORT = re.compile(
    r"(?i)(?<![\w.@/])([a-z][a-z0-9\-]{0,62})\.((?:[a-z0-9\-]{1,62}\.){0,4}[a-z]{2,12})(?=:\d{2,5}\b(?!:))"
)
_FILES = frozenset(["py", "cc", "cpp", "cu", "cuh", "h", "hpp", "c", "rs", "go", "js", "ts", "sh", "log", "txt", "json", "jsonl", "yaml", "yml", "toml", "cfg", "ini", "out", "err", "md", "gz", "pt", "pth", "bin", "so", "java", "scala", "cxx", "hh", "pyx", "ipynb", "csv", "safetensors", "distcp"])  # fmt: skip
_PUBLIC = ("pytorch.org", "github.com", "huggingface.co", "hf.co", "python.org", "nvidia.com", "amazonaws.com", "googleapis.com", "wandb.ai", "slurm.schedmd.com", "kernel.org", "pypi.org", "anthropic.com", "openai.com", "microsoft.com", "readthedocs.io", "cloud.google.com", "example.com")  # fmt: skip


class Redactor:
    """Replaces what must not leave the machine; the same thing gets the same stand-in."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._key_left = 0
        self._manifests, self._tables = SecretManifests(), ProcessTables()
        self._secrets: set[str] = set()
        self._columns, self._carried = Columns(), Carried()

    def __call__(self, text: str) -> str:
        """The text with stand-ins; of a private key that began in the text before, its lines too."""
        return "\n".join(self.lines(text.split("\n")))

    def lines(self, texts: Sequence[str]) -> list[str]:
        """Lines that follow one another, with stand-ins: also for what is broken over two of them."""
        clean = [visible(t) for t in texts]
        found = [self._credentials(t) for t in clean]
        bodies = [self._key_line(t) for t in clean]
        for i, body in enumerate(bodies):
            if body is not None:
                found[i].append(body)
            found[i] += self._of_the_lines_before(clean[i])
        _key_blocks(clean, found)
        for i in range(len(clean) - 1):
            _broken(clean, found, i)
        out = [self._replace(t, spans) for t, spans in zip(clean, found, strict=True)]
        for t, spans in zip(clean, found, strict=True):
            self._remember(t, spans)
        if again := self._secrets_again():
            out = [again.sub("<secret>", t) for t in out]
        named = [self._named(self._in_table(t)) for t in out]
        echoes = self._echoes()
        return [echoes.sub(self._echo, t) if echoes else t for t in named]

    def names(self) -> dict[tuple[str, str], str]:
        """(kind, value) -> stand-in, of every user, address and domain replaced so far."""
        return dict(self._names)

    def values(self, value: Any) -> Any:
        """A JSON value with every text in it redacted; keys and numbers stay."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {k: self.values(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(v) for v in value]
        return value

    def _credentials(self, text: str) -> list[FoundCredential]:
        if len(text) < 6:
            return []
        spans: list[FoundCredential] = []
        for at in range(0, max(1, len(text) - OVERLAP), LONGEST - OVERLAP):
            piece = text[at : at + LONGEST]
            for view in views(piece):
                for f in find(view.text):
                    start, end = view.original(f.start, f.end)
                    spans.append(FoundCredential(at + start, at + end, f.kind))
            spans += [FoundCredential(at + f.start, at + f.end, f.kind) for f in detect(piece)]
            for start, end, said in base64_texts(piece):
                if re.fullmatch(r"[\w.@\-]{1,64}:\S{4,}", said) or any(True for _ in find(said)):
                    spans.append(FoundCredential(at + start, at + end, "secret"))
        return spans

    def _key_line(self, text: str) -> FoundCredential | None:
        """The body of a private key in a line that stands between its head and its foot."""
        if self._key_left:
            body = text if "-----END" in text else take_apart(text[:4000], 2026).body.strip()
            first = self._key_left == _KEY_LINES
            m = (_KEY_START if first else _KEY_BODY).fullmatch(body)
            if "-----END" in text or not (m or _KEY_HEADER.match(body)):
                self._key_left = 0
            else:
                self._key_left -= 1
            at = text.rfind(body)
            return FoundCredential(at, at + len(body), "private-key") if m and at >= 0 else None
        if _KEY_HEAD.search(text) and text.rfind("-----BEGIN") >= text.rfind("-----END"):
            self._key_left = _KEY_LINES
        return None

    def _replace(self, text: str, spans: Sequence[FoundCredential]) -> str:
        """The text with each span, or what overlapping spans cover together, as one stand-in."""
        out: list[str] = []
        at = 0
        for start, end, kind in _merge(spans):
            _, is_user, user = kind.partition("user ")
            out += (text[at:start], self._name("user", user) if is_user else f"<{kind}>")
            at = end
        return "".join([*out, text[at:]]) if out else text

    def _remember(self, text: str, spans: Sequence[FoundCredential]) -> None:
        """Keeps what was found: the same value is secret wherever it stands without its name."""
        for f in spans:
            value = text[f.start : f.end]
            if len(self._secrets) < _REMEMBERED and 8 <= len(value) <= 200 and is_strange(value):
                self._secrets.add(value)

    def _secrets_again(self) -> re.Pattern[str] | None:
        if not self._secrets:
            return None
        words = sorted(self._secrets, key=len, reverse=True)
        return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, words))})(?![A-Za-z0-9])")

    def _of_the_lines_before(self, text: str) -> list[FoundCredential]:
        """What this line holds because of those before it; users in it are named on the way."""
        cells, users = self._columns.find(text)
        value, user = self._carried.find(text)
        for start, end in [*users, *([user] if user else [])]:
            if text[start:end].lower() not in _COMMON and len(text[start:end]) >= 3:
                self._name("user", text[start:end])
                cells.append(FoundCredential(start, end, f"user {text[start:end]}"))
        return [*self._manifests.find(text), *cells, *value]

    def _in_table(self, text: str) -> str:
        place = self._tables.user(text)
        if place is None or text[slice(*place)].lower() in _COMMON:
            return text
        return text[: place[0]] + self._name("user", text[slice(*place)]) + text[place[1] :]

    def _named(self, text: str) -> str:
        text = _EMAIL.sub(lambda m: self._name("email", m.group(0)), text)
        for pattern in user_names():
            text = pattern.sub(self._user, text)
        text = _URL_HOST.sub(self._host, text)
        text = _MAC.sub(lambda m: self._name("mac", m.group(0).lower()), text)
        text = _IPV4.sub(lambda m: self._name("ip", m.group(0)), text)
        text = _IP_NAME.sub(
            lambda m: m.group(0).split("-")[0] + "-" + self._name("ip", m.group(1).replace("-", ".")), text
        )
        if text.count(":") > 1:
            text = _IPV6.sub(self._address, text)
        text = _MAC_DOTS.sub(lambda m: self._name("mac", m.group(0).lower()), text)
        text = _RESOLVED.sub(lambda m: m.group(0)[: m.start(1) - m.start()] + self._host(m), text)
        for pattern in (_FQDN, _FQDN_COUNTRY, _HOST_PORT):
            text = pattern.sub(self._host, text)
        return text

    def _user(self, m: re.Match[str]) -> str:
        value = m.group(1)
        if value.lower() in _COMMON or value.startswith("<"):
            return m.group(0)
        start, end = m.start(1) - m.start(), m.end(1) - m.start()
        return m.group(0)[:start] + self._name("user", value) + m.group(0)[end:]

    def _echoes(self) -> re.Pattern[str] | None:
        """Every user named so far, wherever a text says the name again."""
        users = [v for k, v in self._names if k == "user" and len(v) >= 4]
        if not users:
            return None
        return re.compile(rf"(?<![\w.<\-])(?:{'|'.join(map(re.escape, users))})(?![\w\-])")

    def _echo(self, m: re.Match[str]) -> str:
        return self._names[("user", m.group(0))]

    def _address(self, m: re.Match[str]) -> str:
        value = m.group(0)
        if value.count(":") < 2:
            return value
        bare = value.rstrip(":") if not value.endswith("::") else value
        try:
            address = ipaddress.IPv6Address(bare)
        except ValueError:
            return value
        if address.is_unspecified or address.is_loopback or (len(bare) < 6 and "::" not in bare):
            return value
        return self._name("ip", bare) + value[len(bare) :]

    def _host(self, m: re.Match[str]) -> str:
        whole = f"{m.group(1)}.{m.group(2)}".lower()
        if whole.endswith(_PUBLIC) or whole.rpartition(".")[2] in _FILES:
            return m.group(0)
        return f"{m.group(1)}.{self._name('domain', m.group(2))}"

    def _name(self, kind: str, value: str) -> str:
        key = (kind, value)
        if key not in self._names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[key] = f"<{kind}-{self._counts[kind]}>"
        return self._names[key]


def _merge(spans: Sequence[FoundCredential]) -> Iterator[tuple[int, int, str]]:
    current: tuple[int, int, str] | None = None
    for f in sorted(spans, key=lambda f: (f.start, -f.end)):
        if f.end <= f.start:
            continue
        if current is not None and f.start < current[1]:
            current = (current[0], max(current[1], f.end), current[2])
        else:
            if current is not None:
                yield current
            current = (f.start, f.end, f.kind)
    if current is not None:
        yield current


def _key_blocks(lines: Sequence[str], found: list[list[FoundCredential]]) -> None:
    """Bodies of keys without a head: at least two lines in a row that hold base64 and nothing else."""
    before: tuple[int, FoundCredential] | None = None
    for i, text in enumerate(lines):
        m = _BASE64_LINE.search(text) if len(text) < 400 else None
        if m is None or not (re.search(r"[a-z]", m.group(1)) and re.search(r"[A-Z]", m.group(1))):
            if (
                before is not None and before[0] == i - 1 and before[1].kind == "key"
            ):  # its last, shorter line
                tail = re.search(r"(?:^|[\s|>\"'])([A-Za-z0-9+/]{8,}={0,2})[\"',\\+]*\s*$", text)
                if tail and re.search(r"\d|=$", tail.group(1)) and re.search(r"[A-Z]", tail.group(1)):
                    found[i].append(FoundCredential(tail.start(1), tail.end(1), "private-key"))
            before = None
            continue
        span = FoundCredential(m.start(1), m.end(1), "private-key")
        if before is not None and before[0] == i - 1:
            found[i - 1].append(FoundCredential(before[1].start, before[1].end, "private-key"))
            found[i].append(span)
            before = (i, FoundCredential(span.start, span.end, "key"))
        else:
            before = (i, span)


def _broken(lines: Sequence[str], found: list[list[FoundCredential]], i: int) -> None:
    """A credential that ends on line i + 1: what an issuer's shape takes across the joint, or the rest of a value.

    A word or number that only happens to follow is left: the rest must look like a part of a token itself.
    """
    first, second = lines[i][-2000:], lines[i + 1]
    left = first.rstrip()
    left = left[:-1].rstrip() if left.endswith(("\\", "+")) else left
    left = left.rstrip("\"'")
    cut = len(left)
    if not (second and left and left[-1] in _TOKEN):
        return
    body = take_apart(second[:4000], 2026).body
    offset = len(second[:4000]) - len(body) if second[:4000].endswith(body) else 0
    head = _HEAD.match(second, offset)
    if head is None:
        return
    piece = head.group(1)
    joined = left + piece
    base = len(lines[i]) - len(first)
    for view in views(joined):
        for f in shaped(view.text):
            start, stop = view.original(f.start, f.end)
            if start >= cut or stop <= cut:
                continue
            own = [g for g in found[i] if g.start - base < cut <= g.end - base]
            rest = joined[cut:stop]
            if own and not _part_of_token(rest):
                continue
            found[i].append(FoundCredential(base + start, base + cut, f.kind))
            found[i + 1].append(FoundCredential(head.start(1), head.start(1) + stop - cut, f.kind))
    # A value that was cut where the terminal or the logger wrapped.
    wrapped = len(lines[i]) >= 60 or first.rstrip().endswith("\\")
    if wrapped and any(g.end - base >= cut for g in found[i]) and _part_of_token(piece):
        found[i + 1].append(FoundCredential(head.start(1), head.end(1), "secret"))


def _part_of_token(text: str) -> bool:
    """Whether a piece could be the rest of a token: letters of both cases or with digits, and no date, time or word."""
    if len(text) < 4 or re.match(r"\d{1,4}[-/:.]\d|\d+$|[A-Z]?[a-z]+[:,.]?$|[A-Z]+[:,.]?$|\w+=", text):
        return False
    kinds = sum(re.search(p, text) is not None for p in ("[a-z]", "[A-Z]", r"\d"))
    return kinds >= 2
