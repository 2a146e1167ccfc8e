"""Quick looks over many bytes: supersets of what slower readers find, in one pass of an automaton where re2 is there."""

from __future__ import annotations

import re
from collections.abc import Callable


def _introduction() -> Callable[[bytes], object]:
    """A quick look for what `_meet` could find: a superset of `_MACHINE`, of the prefixes of kernel logs and of
    `topology._HOST`."""
    pattern = (
        rb"(?i)kernel|mcelog|systemd|dmesg|fabric ?manager|nvswitch|sxid|dcgm|nv-hostengine|\\u"
        rb"|\[\s*\d+\.\d{6}\]|:(?:emerg|alert|crit|err|warn|notice|info|debug)\s*: |\[(?:mon|tue|wed|thu|fri|sat|sun) "
        rb"|(?:host(?:name)?|node(?:name)?|machine|running on|launch(?:ing|ed)? on|started on)[:= ]+(?:is )?[a-z][a-z0-9.\-]*\d"
    )
    try:
        import re2
    except ImportError:
        return re.compile(pattern).search
    return re2.compile(pattern).search  # type: ignore[no-any-return]


may_introduce = _introduction()


def _clock() -> Callable[[bytes], bool]:
    """Whether a time of day stands in some bytes."""
    try:
        import re2
    except ImportError:
        return lambda text: _CLOCK.search(text) is not None
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    search = re2.compile(_CLOCK.pattern, options).search
    return lambda text: b":" in text and search(text) is not None


_CLOCK = re.compile(rb"\d\d:\d\d:\d\d")
has_clock = _clock()
