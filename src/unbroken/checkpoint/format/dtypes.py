"""Element types: their safetensors names, their sizes, and the torch types that they stand for. No torch here.

A torch type that safetensors readers do not know travels in a *carrier*: another type of the same bytes, with
one more dimension where it has to be split. The manifest (and the file's own metadata) name the true type.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UnsaveableState

# Bytes of one element. What is smaller than a byte (F4, F6_*) has no place in an arena of whole elements.
ITEM_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip

# The name of a torch type without its "torch." -> safetensors' name.
FROM_TORCH: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
TO_TORCH: dict[str, str] = {s: t for t, s in FROM_TORCH.items()} | {"F8_E8M0": "float8_e8m0fnu"}


@dataclass(frozen=True)
class Carrier:
    """How a torch type is stored: safetensors' `dtype`, and `split` elements of it for each element (0: one)."""

    dtype: str
    split: int = 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file of a tensor of this `shape`."""
        return (*shape, self.split) if self.split else shape


# float8_e8m0fnu has a safetensors name, but readers up to 0.8 give no torch tensor for it.
_CARRIED = {
    "complex128": Carrier("F64", 2),
    "complex32": Carrier("F16", 2),
    "float8_e8m0fnu": Carrier("U8"),
    "float4_e2m1fn_x2": Carrier("U8"),
}


def carrier(torch_dtype: str, *, key: str = "?") -> Carrier:
    """How the torch type of this name ("float32" or "torch.float32") is stored.

    Raises UnsaveableState, naming `key`, for types that have no exact representation (quantised, sub-byte).
    """
    name = torch_dtype.removeprefix("torch.")
    if name in FROM_TORCH:
        return Carrier(FROM_TORCH[name])
    if name in _CARRIED:
        return _CARRIED[name]
    raise UnsaveableState(
        key,
        f"tensors of type {torch_dtype} cannot be stored exactly",
        hint="Save its parts (for a quantised tensor: int_repr, scale, zero point) as tensors of their own",
    )


def is_carried(torch_dtype: str) -> bool:
    """Whether the file shows this torch type under another type's name."""
    return torch_dtype.removeprefix("torch.") in _CARRIED


def known_torch(torch_dtype: str) -> bool:
    """Whether a manifest may name this torch type."""
    return torch_dtype in FROM_TORCH or torch_dtype in _CARRIED
