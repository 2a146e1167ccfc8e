"""Text of others on a terminal: what could move the cursor, set a title, hide or reverse text is shown or dropped.

Log lines, users, partitions, suites, folders: each may hold whatever its author liked. One filter, put around the
streams of every command by `cli/main`, lets through text, line ends, tabs, and the colours and cursor moves that our
own screens print; nothing else.
"""

from __future__ import annotations

import re

SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC: titles, clipboard, links
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]?|[\x90\x98\x9d\x9e\x9f][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
)
"""Terminal sequences, whole or cut off."""
BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
INVISIBLE = re.compile(
    f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200d\u2028\u2029"
    f"\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb{BIDI}\U000e0000-\U000e0fff]"
)
"""Control characters but tab and line ends, and characters without a width or that turn the text round."""
