"""Finds credentials in one line: by their issuer's shape, by the word before them, by their randomness.

Each finder gives `FoundCredential` spans of a text that `decoded.views` has made plain. What a diagnosis needs never counts:
token counts, tokenizers, paths, hashes (hexadecimal of whatever length, unless a word says that it is a key), kernel
and model names, device ids.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .expressions import shapes, shared_shapes, worded
from .values import holds, is_described, is_mixed, is_number, is_plain, looks_random


@dataclass(frozen=True)
class FoundCredential:
    """A credential at [start, end) of a text; `kind` names the stand-in."""

    start: int
    end: int
    kind: str


def find(text: str) -> Iterator[FoundCredential]:
    """Every credential of a line, in no order; spans may overlap."""
    yield from _shaped(text)
    yield from _addresses(text)
    yield from _headers(text)
    yield from _keyed(text)
    yield from _itemised(text)
    yield from _random(text)


def shaped(text: str) -> Iterator[FoundCredential]:
    """Only what has an issuer's shape, or lies in an address: sure enough for text that was put together."""
    yield from _shaped(text)
    yield from _addresses(text)


def _shaped(text: str) -> Iterator[FoundCredential]:
    for shape in shapes():
        if shape.begin.search(text):
            for m in shape.regex.finditer(text):
                yield FoundCredential(m.start(), m.end(), "token")
    for pattern in shared_shapes():
        for m in pattern.finditer(text):
            yield FoundCredential(m.start(m.lastindex or 0), m.end(m.lastindex or 0), "token")


_USERINFO = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.\-]{1,20}://([^\s/:@'\"<>]{0,80}):([^\s'\"<>@]{1,200})@")
_TOKEN_USER = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.\-]{1,20}://([^\s/:@'\"<>]{16,200})@")
_HOOKS = re.compile(
    r"(?i)https?://[^\s'\"<>]*?(?:hooks?\.[\w.\-]+/|/webhooks?/|/webhookb2/|/bot/v2/hook/|/hooks?/|(?<=//)hc-ping\.com/|(?<=//)heartbeat\.[\w.\-]+/|/heartbeats?/|(?<=//)cronitor\.link/(?:p/)?|/services/(?=T)|/incoming/|/integration/)([^\s'\"<>]{8,})"
)
_QUERY = re.compile(
    r"(?i)[?&;#]((?:[\w.\-\[\]]*(?:key|token|secret|passw(?:or)?d|pwd|pass|sig|signature|credential|auth|code|session|sid|ticket|nonce|jwt|otp|hmac|assertion|awsaccesskeyid)[\w.\-\[\]]*|st|k|p))="
    r"([^&\s'\"<>#]{6,})"
)
_URL_PIECE = re.compile(r"(?i)https?://[^\s/'\"<>]+(/[^\s'\"<>?]*)")


def _addresses(text: str) -> Iterator[FoundCredential]:
    if "://" not in text and "?" not in text and "&" not in text:
        return
    for m in _USERINFO.finditer(text):
        yield FoundCredential(m.start(2), m.end(2), "secret")
    for m in _TOKEN_USER.finditer(text):
        if looks_random(m.group(1), 0.3):
            yield FoundCredential(m.start(1), m.end(1), "token")
    for m in _HOOKS.finditer(text):
        yield FoundCredential(m.start(1), m.end(1), "secret")
    for m in _QUERY.finditer(text):
        if not (m.group(1).lower() in ("st", "k", "p") and not looks_random(m.group(2), 0.3)):
            yield FoundCredential(m.start(2), m.end(2), "secret")
    for m in _URL_PIECE.finditer(text):
        for piece in re.finditer(r"[^/]{20,200}", m.group(1)):
            if looks_random(piece.group(0), 0.4):
                yield FoundCredential(m.start(1) + piece.start(), m.start(1) + piece.end(), "token")


_HEADER = re.compile(
    r"(?i)(?<![\w-])((?:proxy-)?authorization|(?:set-)?cookie2?|x-[\w\-]{0,30}(?:api-?key|token|auth|secret)[\w\-]{0,20}|api-key|private-token|job-token|deploy-token|x-goog-iam-authorization-token|www-authenticate)"
    r"[\"']?\s{0,3}[:=]\s{0,4}"
)
_SCHEME = re.compile(r"(?i)(?:bearer|basic|digest|token|negotiate|ntlm|aws4-hmac-sha256|apikey|key|ssws)\s+")
_ITEM = re.compile(
    r"""\\{0,3}["'](?:name|key|Name|Key|id|header)\\{0,3}["']\s*:\s*\\{0,3}["']([\w.\-]{2,60})\\{0,3}["']\s*,\s*\\{0,3}["'](?:value|Value|default)\\{0,3}["']\s*:\s*\\{0,3}["']([^"'\\]{3,2000})"""
)
_INSERT = re.compile(r"(?i)\(([\w\s,`\"\[\].]{3,1000})\)\s*VALUES\s*\(")
_LITERAL = re.compile(
    r"""\s*(?:[NEBX]?'((?:[^'\\]|\\.|''){0,2000})'|"([^"]{0,2000})"|([^,()]{0,200}))\s*(?:,|\))"""
)
_BARE_KEY = re.compile(
    r"(?i)\b((?:api|access|account|secret|private|license|licence|auth|signing|wandb|encryption|bot|deploy|refresh|recovery|service|one[- ]time|personal|install|webhook|admin|root)"
    r"[ _\-]?(?:key|token|secret|code|password|passcode)s?|token|secret|password|passwd|passcode|passphrase|otp|pin)"
    r"(?: provided| given| used| sent| value)?['\"]?\s{0,3}(?:is|was|=|:|->|\(|\[|for [\w.\-@]{1,40}:?|(?:from|for|of|at|on) [\w .\-@]{1,40}:)?\s{0,3}['\"]?((?=[^\s\d]{0,60}\d)[^\s'\",;&<()\[\]]{8,200})"
)  # fmt: skip


def _headers(text: str) -> Iterator[FoundCredential]:
    for m in _HEADER.finditer(text):
        start = m.end()
        scheme = _SCHEME.match(text, start)
        start = scheme.end() if scheme else start
        if m.group(1).lower().startswith(("cookie", "set-cookie")) or (
            scheme and scheme.group(0).lower().startswith(("digest", "aws4"))
        ):
            quote = text[m.end() - 1] if text[m.end() - 1] in "'\"" else ""
            end = _closing(text, start, quote)
        else:
            start, end = _value(text, start)
        if end - start >= 3:
            yield FoundCredential(start, end, "secret")
    low = text.lower()
    for one in worded():
        if not any(n in low for n in one.needs):
            continue
        for m in one.regex.finditer(text):
            if not is_plain(m.group(one.group)) and not re.fullmatch(r"[\s0-9a-fA-F:*]+", m.group(0)):
                yield FoundCredential(m.start(one.group), m.end(one.group), "secret")
    if not any(n in low for n in ("key", "token", "secret", "pass", "code", "otp", "pin")):
        return
    for m in _BARE_KEY.finditer(text):
        word, value = m.group(1).lower(), m.group(2)
        alone = len(word.split()) == 1 and not re.search(r"[_\-]", word) and not looks_random(value, 0.3)
        if alone and (word in ("token", "secret", "otp", "pin") or not is_mixed(value)):
            continue
        if (
            not is_number(value)
            and not value.startswith(("/", "0x", "./", "$", "-"))
            and not is_described(value)
        ):
            yield FoundCredential(m.start(2), m.end(2), "secret")


_CORE = re.compile(
    r"(?i)passw(?:or)?ds?|passphrase|passwd|passcode|pwd|secret|token|api[_\-.]?keys?|(?:access|account|private|encryption|signing|master|shared|auth|license|storage|service|write|ingest|instrumentation|subscription)[_\-.]?keys?"
    r"|credentials?|auth|cookies?|session[_\-.]?(?:id|key)|jsessionid|phpsessid|connection[_\-.]?string|dsn|webhook|pass|_key\b|otp|salt|pin\b|jwt|bearer|license|pw\b|passwort|mot[_ ]de[_ ]passe|contrase|kennwort|密码"
)
_WORD_BEFORE = re.compile(r"[\w.\-]{0,40}$")
_WORD_AFTER = re.compile(r"[\w.\-]{0,40}")
_DESCRIBES = re.compile(
    r"_(?:file|path|dir|env|name|ttl|type|length|len|size|count|timeout|version|algorithm|format|policy|required|enabled|expiry|expires\w*|min\w*|max\w*|method|mode|provider|url|uri|host|port|header|field|prefix|arn|ref)$"
)
"""Ends of a key that speaks of a secret and does not hold one."""
_SURELY = re.compile(
    r"passw(?:or)?d|passphrase|passwd|passcode|passwort|kennwort|contrase|mot_de_passe|密码|(?:^|_)secrets?(?:_key)?$|client_secret|_secret_|pwd$"
)
"""Names that mean one thing whatever stands before them: `admin_password`, `tokenizer_secret`."""
_HEALTHY_KEY = re.compile(
    r"tokeni[sz]|tokens(?!_?secret)|"
    r"(?:^|_)(?:pad|eos|bos|eot|eod|unk|cls|sep|mask|image|audio|video|num|n|max|min|total|special|stop|start|end|per|next|last|first|begin|new|input|output|prompt|draft|think\w*|boi|eoi|fim\w*|bad|ignore|valid|trained|loss|us|ms|s|flops|by|of|each|unexpected|invalid|add|cached)_token|"
    r"token_(?:ids?|counts?|type|ind\w*|idx|num\w*|len\w*|embed\w*|disp\w*|drop\w*|per|rate|level|acc\w*|loss|through\w*|budget|limit|shift|mix\w*|perm\w*|class\w*|size|parallel\w*|pos\w*|choice|rout\w*|dict\w*|file|path|dir|url|uri|env|name|ttl|expir\w*|life\w*|timeout|header|endpoint|bucket|merg\w*|mask|freq\w*|weight\w*)|"
    r"(?:^|_)(?:forward|backward|first|second|third|num|per|single|multi|one|two|all|by|tres|sur|under|over|last|this|each|n|max)_?pass(?:$|_)|(?:^|_)(?:com|by|tres|sur|under|over)pass|passe[ds]|passes|passing|pass_(?:rate|at|count|k|id|time|thr\w*)|pass@|"
    r"secretar|author(?!iz)|authent|authori[st]|authority|"
    r"(?:sort|primary|foreign|partition|cache|dict|state|state_dict|missing|unexpected|param|batch|index|sample|row|column|group|object|bucket|kv|memo|reg|public|host|lookup|registry|config|tensor|layer|map|store|dataset|data|label|text|image|module|hash|unique|shuffle|dispatch|rng|random)_?key|"
    r"license$|(?:^|_)pin_mem|(?:^|_)pinned|spin|(?:^|_)ping(?:_|$)|pin_$"
)
_ISSUED_HEX = re.compile(
    r"(?:^|_)(?:routing|integration|ingest\w*|write|app|application|license|licence|project|team|admin)_key$"
)
"""Keys that issuers give out as hexadecimal, which elsewhere is a hash."""
_PASS_KEY = re.compile(
    r"(?:^|_|\b)(?:db|user|usr|smtp|mail|ftp|root|admin|my|pg|redis|mysql|http|https|proxy|ldap|svc|service|login|api|auth|mongo|rabbit\w*|amqp|ssh|sudo|wifi|key|store|keystore|ts|ipmi|bmc|idrac|web|bot|email|account|es|elastic|kafka|vpn|rsync|zip|enc|crypt)_?pass$"
)
_STRONG = re.compile(r"passw|passphrase|passwd|passcode|pwd|secret|pass$|otp|pin$|salt")
_SEPARATOR = re.compile(r"""[\\"'`\])]{0,6}\s{0,4}(?:=>|:=|==|[:=：]>?|\.{3,120}(?=\s))\s{0,4}""")
_CELL = re.compile(r"\s{0,60}[|│┃║]\s{0,60}")
"""Between a name and its value in a table."""
_LISTED = re.compile(r"""\\{0,3}["'`]\s{0,2},\s{0,3}(?=\\{0,3}["'`])""")
_ACCOUNT = re.compile(r"(?i)(?:user|login|account|uid|smtp|imap|ldap)\w{0,10}['\"]?\s?[:=]")
_PROSE = re.compile(r"[a-z]{2,15}(?=\s+[a-z]|$|[.,;])")


def _keyed(text: str) -> Iterator[FoundCredential]:
    """Values of keys, options, fields and arguments whose name says that they are secret."""
    for m in _CORE.finditer(text):
        before = _WORD_BEFORE.search(text, max(0, m.start() - 40), m.start())
        after = _WORD_AFTER.match(text, m.end())
        left = before.start() if before else m.start()
        right = after.end() if after else m.end()
        name = text[left:right].rstrip(".-")
        right = left + len(name)
        if right < m.end():
            continue
        kind = key_kind(name)
        if kind is None:
            continue
        strong = kind == "strong"
        quoted_before = left > 0 and text[left - 1] in "\"'`"
        option = name.startswith("-")
        sep = _SEPARATOR.match(text, right)
        listed = None
        if sep is None and quoted_before:
            listed = _LISTED.match(text, right)
        if sep is not None:
            at = sep.end()
        elif listed is not None and not re.match(
            r"""\\{0,3}["'`][\w.\-]{1,40}\\{0,3}["'`]\s{0,3}:""", text[listed.end() : listed.end() + 60]
        ):
            at = listed.end()
        elif option and text[right : right + 1] == " ":
            at = right + 1
        elif (cell := _CELL.match(text, right)) is not None:
            at = cell.end()
            stop = re.compile(r"[^|│┃║]{0,200}").match(text, at)
            piece = stop.group(0).strip() if stop else ""
            if (
                re.fullmatch("[0-9a-f]{32,}", piece)
                or looks_random(piece, 0.25)
                or (strong and is_mixed(piece))
            ):
                yield FoundCredential(at, at + len(piece), "secret")
            continue
        else:
            continue
        scheme = _SCHEME.match(text, at)
        if scheme:
            at = scheme.end()
        start, end = _value(text, at)
        if "phrase" in name.lower():
            end = max(end, _closing(text, start, ""))
        value = text[start:end]
        if len(value) < (3 if strong else 6) or is_plain(value):
            continue
        if option and listed is None and sep is None and value.startswith("-"):
            continue
        quoted = text[start - 1] in "\"'`" if start else False
        if not strong:
            if is_number(value) or (
                kind in ("weak", "issued", "short") and not looks_random(value, 0.25) and not is_mixed(value)
            ):
                continue
            named = is_described(value) or re.fullmatch(r"[A-Za-z]+\d{0,3}", value)
            if kind == "short" and named and not (quoted or _ACCOUNT.search(text)):
                continue
            if kind == "issued" and not (re.fullmatch("[0-9a-f]{32,64}", value) or looks_random(value, 0.25)):
                continue
            if not quoted and sep is not None and ":" in sep.group(0) and value.isalpha() and len(value) < 16:
                continue
            if value.startswith(("/", "./", "~/")) and not looks_random(value, 0.4):
                continue
        elif re.fullmatch(r"(?i)(?:old)?pwd", name) and re.match(r"[/~.]", value):
            continue  # the working folder
        elif (
            not quoted
            and sep is not None
            and ":" in sep.group(0)
            and _PROSE.match(text, start, len(text))
            and value.isalpha()
        ) and text[end : end + 1] in (" ", ".", ","):
            continue
        if strong and is_number(value) and len(value) < 4:
            continue
        yield FoundCredential(start, end, "secret")


def _itemised(text: str) -> Iterator[FoundCredential]:
    """Values that stand apart from their names: {"name": "DB_PASSWORD", "value": "x"}, INSERT ... VALUES."""
    for m in _ITEM.finditer(text):
        if key_kind(m.group(1)) in ("strong", "usual") and holds(m.group(2)):
            yield FoundCredential(m.start(2), m.end(2), "secret")
    for m in _INSERT.finditer(text):
        at = m.end()
        for name in m.group(1).split(","):
            value = _LITERAL.match(text, at)
            if value is None:
                break
            group = value.lastindex
            if group and key_kind(name.strip(' `"[]')) in ("strong", "usual") and holds(value.group(group)):
                yield FoundCredential(value.start(group), value.end(group), "secret")
            at = value.end()


def key_kind(name: str) -> str | None:
    """What a key's name says of its value: strong (always secret), usual, weak (secret if it looks random), issued (weak, or hexadecimal), short (`pw`: as weak, no name), or None."""
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    upper, key = key.isupper(), re.sub(r"[\-. ]", "_", key).lower().strip("_")
    if re.search(r"webhook|connection_string|(?:^|_)dsn$", key):
        return "usual"
    if _DESCRIBES.search(key):
        return None
    if _SURELY.search(key):
        return "strong"
    if _HEALTHY_KEY.search(key) or re.search(r"(?:^|_)pin_", key):
        return None
    if re.search(r"(?:^|_|[a-z])pw$", key) or key == "pass":
        return "short"
    if _ISSUED_HEX.search(key):
        return "issued"
    if key.endswith("pass") and not _PASS_KEY.search(key):
        return (
            "strong"
            if (upper and "_" in key) or name.startswith("-")
            else "short"
            if key.endswith("_pass")
            else None
        )
    if re.search(r"(?:^|_)auth$|authorization|auth_(?:key|token)|basic_auth", key) or _STRONG.search(key):
        return "strong" if _STRONG.search(key) else "usual"
    if "auth" in key and not re.search(r"token|key|secret|cred", key):
        return None
    if re.search(
        r"token|api_?key|access_?key|account_?key|private_?key|credential|cookie|session|bearer|jwt", key
    ):
        return "usual"
    return "weak" if key.endswith(("key", "keys", "license")) else None


def _value(text: str, at: int) -> tuple[int, int]:
    """The value that begins at `at`: in its quotes, or up to what ends a bare one."""
    quote = re.compile(r"\\{0,7}[\"'`]|[bBrRuU]{0,2}(?=[\"'])[\"']").match(text, at)
    if quote:
        mark = quote.group(0).lstrip("bBrRuU")
        end = text.find(mark, quote.end())
        while end > 0 and len(mark) == 1 and text[end - 1] == "\\":
            end = text.find(mark, end + 1)
        if end < 0 or end - quote.end() > 2000:
            end = _closing(text, quote.end(), "")
        return quote.end(), end
    end = at
    while end < len(text) and end - at < 2000:
        c = text[end]
        if c.isspace() or c in "'\"<>`":
            break
        if c in ",;&)}]" and (
            end + 1 >= len(text)
            or text[end + 1] in " )}],;'\""
            or re.match(r"[\w.\-]{1,40}\s?[=:]", text[end + 1 : end + 44])
        ):
            break
        end += 1
    while end > at and text[end - 1] in ".,;:":
        end -= 1
    return at, end


def _closing(text: str, start: int, quote: str) -> int:
    end = text.find(quote, start) if quote else -1
    line = text.find("\n", start)
    ends = [x for x in (end, line) if x >= 0]
    return min(ends) if ends else len(text)


_RUN = re.compile(r"(?<![\w/.+\-=%$@\\])[A-Za-z0-9_+/\-]{20,400}={0,2}(?![\w/+\-\\]|\.\w)")
_AFTER_SIGN = re.compile(r"(?<==)[A-Za-z0-9_+/\-]{20,400}={0,2}(?![\w/+\-\\]|\.\w)")


def _random(text: str) -> Iterator[FoundCredential]:
    """Long pieces that no person and no program named: random letters and digits of both cases."""
    for pattern in (_RUN, _AFTER_SIGN):
        for m in pattern.finditer(text):
            if looks_random(m.group(0), 0.45):
                yield FoundCredential(m.start(), m.end(), "secret")


@functools.cache
def detectors() -> tuple[Callable[[str], Any], ...]:
    """`analyze_string` of the issuer-shaped plugins of detect-secrets, or nothing where it is not installed.

    Its keyword and entropy plugins are left out: they take metrics, hashes and paths. Imported here, at first use:
    it brings `requests` for checks over the network that are never called.
    """
    import importlib

    found: list[Callable[[str], Any]] = []
    for name in PLUGINS:
        module_name, _, class_name = name.partition(":")
        try:
            module = importlib.import_module(f"detect_secrets.plugins.{module_name}")
            found.append(getattr(module, class_name)().analyze_string)
        except (ImportError, AttributeError):
            continue
    return tuple(found)


PLUGINS = (
    "aws:AWSKeyDetector", "azure_storage_key:AzureStorageKeyDetector", "basic_auth:BasicAuthDetector", "cloudant:CloudantDetector", "discord:DiscordBotTokenDetector",
    "github_token:GitHubTokenDetector", "gitlab_token:GitLabTokenDetector", "ibm_cloud_iam:IbmCloudIamDetector", "ibm_cos_hmac:IbmCosHmacDetector", "jwt:JwtTokenDetector",
    "mailchimp:MailchimpDetector", "npm:NpmDetector", "openai:OpenAIDetector", "pypi_token:PypiTokenDetector", "sendgrid:SendGridDetector", "slack:SlackDetector",
    "softlayer:SoftlayerDetector", "square_oauth:SquareOAuthDetector", "stripe:StripeDetector", "telegram_token:TelegramBotTokenDetector", "twilio:TwilioKeyDetector",
)  # fmt: skip


def detect(text: str) -> Iterator[FoundCredential]:
    """What detect-secrets finds in a line."""
    for analyze in detectors():
        for value in analyze(text):
            if isinstance(value, str) and len(value) >= 6:
                at = text.find(value)
                while at >= 0:
                    yield FoundCredential(at, at + len(value), "token")
                    at = text.find(value, at + len(value))
