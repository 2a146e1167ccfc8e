"""The colours of all pages: each series has one of its own, in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

SERIES = {
    "blue": ("#2457b8", "#7aa7ff"),
    "orange": ("#d9622b", "#f2915c"),
    "green": ("#2b8a4a", "#4cc38a"),
    "purple": ("#8e44ad", "#c48be6"),
    "teal": ("#12889a", "#45c1d3"),
    "gold": ("#b8860b", "#e3c341"),
    "red": ("#d63a3a", "#ff6b6b"),
    "brown": ("#7a4a21", "#b98a5e"),
    "magenta": ("#d0408f", "#ff8ac8"),
    "olive": ("#6b7a12", "#a9b53a"),
    "indigo": ("#4b2fb5", "#7d66f2"),
    "lime": ("#5fb321", "#a6e85f"),
}
"""Series by name, as (on a light ground, on a dark one), in the order in which they are given out."""
OTHERS = {
    "ink": ("#20262e", "#e6eaee"),
    "soft": ("#5b6470", "#9aa5b1"),
    "rule": ("#dfe4e9", "#2c343d"),
    "paper": ("#ffffff", "#12161b"),
    "panel": ("#f5f7fa", "#1a2027"),
    "grey": ("#7a828c", "#98a2ae"),
    "sand": ("#b08968", "#c9a585"),
    "steel": ("#8fa3bf", "#7f95b5"),
    "sky": ("#9db7e0", "#56719f"),
    "amber": ("#e8a10c", "#f0b84d"),
    "bronze": ("#8a5a00", "#b98a3a"),
}
"""What is no series of its own: text, rules, grounds, what is compared with, shades."""
LIGHT = {name: light for name, (light, _) in (SERIES | OTHERS).items()}
NAMES = {light: name for name, light in LIGHT.items()}
"""The name of each colour by what drawings say (the light one, so that a drawing saved as a file can be printed)."""
DASHES = ("", "6 4", "2 3", "9 3 2 3")


def variables() -> str:
    """The colours as CSS: variables for both grounds, and classes that drawings use."""
    both = SERIES | OTHERS
    light = "".join(f"--{n}:{a};" for n, (a, _) in both.items())
    dark = "".join(f"--{n}:{b};" for n, (_, b) in both.items())
    classes = "".join(f".f-{n}{{fill:var(--{n})}}.s-{n}{{stroke:var(--{n})}}" for n in both)
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{classes}\n"


def series(index: int) -> str:
    """The colour of the series with this number; after the last one they begin again (see `distinct`)."""
    return list(SERIES.values())[index % len(SERIES)][0]


def distinct(looks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(colour, dash) of each series, so that no two in one drawing look alike: the second of a kind gets the next
    colour that nobody here has, after the last colour the next dash."""
    taken: set[tuple[str, str]] = set()
    wanted = set(looks)
    free = [(c, d) for d, (c, _) in product(DASHES, SERIES.values()) if (c, d) not in wanted]
    out = []
    for look in looks:
        if look in taken:
            same_dash = next((f for f in free if f[1] == look[1]), None)
            look = same_dash or (free[0] if free else look)
            free = [f for f in free if f != look]
        taken.add(look)
        out.append(look)
    return out
