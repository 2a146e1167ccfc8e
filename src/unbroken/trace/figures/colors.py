"""The colours that types of jobs and final states have in every figure."""

from __future__ import annotations

from ...page.palette import LIGHT, series

TYPE_COLORS = {
    "Pretrain": LIGHT["blue"],
    "Eval": LIGHT["orange"],
    "SFT": LIGHT["green"],
    "MLLM": LIGHT["purple"],
    "Debug": LIGHT["red"],
    "Other": LIGHT["grey"],
    "CPU": LIGHT["teal"],
    "GPU jobs": LIGHT["ink"],
}
STATE_COLORS = {
    "COMPLETED": LIGHT["green"],
    "CANCELLED": LIGHT["amber"],
    "FAILED": LIGHT["red"],
    "UNKNOWN": LIGHT["grey"],
}
GREY = LIGHT["grey"]
REFERENCE = (LIGHT["grey"], LIGHT["sand"], LIGHT["steel"])


def color_of(label: str, index: int = 0) -> str:
    """A type's or state's own colour, else that of the series with this number."""
    return TYPE_COLORS.get(label) or STATE_COLORS.get(label) or series(index)
