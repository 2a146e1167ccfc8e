"""Text without secrets: tokens, passwords, user names, e-mail and network addresses replaced by stable stand-ins.

Stand-ins keep their number within one `Redactor` (`<ip-1>` is the same machine everywhere), so that what is sent
away can still be reasoned about. Node names without a domain stay: a diagnosis is of no use without them.
"""

from __future__ import annotations

import ipaddress
import re

_SECRETS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("private-key", re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:.{0,8000}?-----END [A-Z ]{0,30}PRIVATE KEY-----|.*)", re.S)),
    ("token", re.compile(
        r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_\-]{12,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w\-]{16,}"
        r"|xox[abpr]-[\w\-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w\-]{20,}|nvapi-[\w\-]{16,}|npm_\w{20,}"
        r"|MII[A-Za-z0-9+/]{20,}={0,2}|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]{4,})"
    )),
    ("secret", re.compile(
        r"(?i)((?:(?:password|passwd|secret|token|api[_\-]?key|access[_\-]?key|private[_\-]?key|credential|auth(?:orization)?)[\w\-]{0,40})"
        r"['\"]?\s{0,4}[:=]\s{0,4}(?:bearer |basic )?['\"]?)([^\s'\",;&]{4,})"
    )),
    ("secret", re.compile(r"(?i)(\b(?:bearer|basic)\s+)([A-Za-z0-9+/_\-.=]{12,})")),
    ("secret", re.compile(r"((?:--|-)(?:password|token|secret|api-key|key)[ =])(\S{4,})")),
    ("secret", re.compile(r"([a-z][a-z0-9+.\-]{1,20}://[^\s/:@]{1,80}:)([^\s/@]{1,200})(?=@)")),
    ("secret", re.compile(r"((?:X-Amz-(?:Signature|Credential|Security-Token)|sig|Signature|AWSAccessKeyId)=)([^&\s'\"]{6,})")),
    ("secret", re.compile(r"(\bWANDB_API_KEY\b\W{1,4})(\w{20,})")),
    ("secret", re.compile(r"(?i)(\b(?:api|access|account|secret)[ _\-]?key\b['\"]?\s{0,4}(?:is|[:=])?\s{0,4}['\"]?)((?=[^\s\d]{0,60}\d)[^\s'\",;&<]{16,})")),
)  # fmt: skip
_EMAIL = re.compile(r"\b[\w.+\-]{1,64}@[\w\-]{1,63}(?:\.[\w\-]{1,63}){1,5}\b")
_URL_USER = re.compile(r"(://)([^\s/:@<]{1,64})(?=(?::[^\s/@]{1,200})?@)")
_URL_HOST = re.compile(
    r"(?:(?<=://)|(?<=>@))([a-z][a-z0-9\-]{1,62})\.((?:[a-z0-9\-]{1,62}\.){1,4}[a-z]{2,18})\b"
)
_KEY_BODY = re.compile(r"(^|\s)[A-Za-z0-9+/]{16,}={0,2}\s*$")
_KEY_LINES = 120  # a key of 8192 bits has 100
_HOME = re.compile(
    r"(/(?:home|Users|users|gpfs/home|lustre/home|scratch/users|data/users|nfs/home)/)([\w.\-]{1,64})"
)
_USER = re.compile(
    r"(?i)(\b(?:user(?:name)?|login|owner|by user|uid)\b['\"]?\s*[:=]\s*['\"]?)([A-Za-z_][\w.\-]{1,63})"
)
_SAID_USER = re.compile(
    r"(?i)(\buser )([a-z_][\w.\-]{1,31})(?= (?:from|on|at|logged|with|in|ran|started)\b|[,;)]|$)"
)
_AT_HOST = re.compile(r"\b([a-z_][\w\-]{1,31})@([A-Za-z][\w\-]{1,62})\b(?!\.)")
_IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?!\w|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]{6,45}(?![\w:])")
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
_FQDN = re.compile(
    r"\b([a-z][a-z0-9\-]{1,62})\.((?:[a-z0-9\-]{1,62}\.){1,4}(?:com|org|net|edu|gov|local|internal|lan|cloud|io|ai|cn|de|fr|uk|jp|ch|eu|svc))\b"
)
_PUBLIC = ("pytorch.org", "github.com", "huggingface.co", "python.org", "nvidia.com", "amazonaws.com", "googleapis.com", "wandb.ai", "slurm.schedmd.com")  # fmt: skip


class Redactor:
    """Replaces what must not leave the machine; the same thing gets the same stand-in."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._key_left = 0

    def __call__(self, text: str) -> str:
        """The text with stand-ins; of a private key that began in the text before, its lines too."""
        if self._key_left:
            self._key_left = 0 if "-----END" in text else self._key_left - 1
            text = _KEY_BODY.sub(r"\1<private-key>", text)
        elif "PRIVATE KEY-----" in text and text.rfind("-----BEGIN") > text.rfind("-----END"):
            self._key_left = _KEY_LINES
        for kind, pattern in _SECRETS:
            if pattern.groups:
                text = pattern.sub(lambda m, kind=kind: f"{m.group(1)}<{kind}>", text)  # type: ignore[misc]
            else:
                text = pattern.sub(f"<{kind}>", text)
        text = _EMAIL.sub(lambda m: self._name("email", m.group(0)), text)
        text = _URL_USER.sub(lambda m: m.group(1) + self._name("user", m.group(2)), text)
        text = _HOME.sub(lambda m: m.group(1) + self._name("user", m.group(2)), text)
        text = _USER.sub(lambda m: m.group(1) + self._name("user", m.group(2)), text)
        text = _SAID_USER.sub(lambda m: m.group(1) + self._name("user", m.group(2)), text)
        text = _AT_HOST.sub(lambda m: f"{self._name('user', m.group(1))}@{m.group(2)}", text)
        for (kind, value), name in list(self._names.items()):
            if kind == "user" and len(value) >= 4 and value in text:
                text = re.sub(rf"(?<![\w/.]){re.escape(value)}(?!\w)", name, text)
        text = _URL_HOST.sub(self._host, text)
        text = _MAC.sub(lambda m: self._name("mac", m.group(0).lower()), text)
        text = _IPV4.sub(lambda m: self._name("ip", m.group(0)), text)
        text = _IPV6.sub(self._address, text)
        return _FQDN.sub(self._host, text)

    def _address(self, m: re.Match[str]) -> str:
        value = m.group(0)
        if value.count(":") < 2:
            return value
        try:
            ipaddress.IPv6Address(value.rstrip(":") if not value.endswith("::") else value)
        except ValueError:
            return value
        return self._name("ip", value)

    def _host(self, m: re.Match[str]) -> str:
        if m.group(0).endswith(_PUBLIC):
            return m.group(0)
        return f"{m.group(1)}.{self._name('domain', m.group(2))}"

    def _name(self, kind: str, value: str) -> str:
        key = (kind, value)
        if key not in self._names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[key] = f"<{kind}-{self._counts[kind]}>"
        return self._names[key]
