"""Read-modify-write operations, for LDS and global memory: one lane after another, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdna_sim.isa.lanes import Lanes

# (old value, operand, second operand) -> new value, on numpy scalars of the operation's type.
Function = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Operation:
    """``function`` on elements of ``dtype``; ``operands``: how many data registers (or pairs) it takes."""

    dtype: Any
    function: Function
    operands: int = 1

    @property
    def width(self) -> int:
        return int(np.dtype(self.dtype).itemsize)

    def run(self, window: Lanes, at: Lanes, data: list[Lanes]) -> Lanes:
        """Updates the elements at ``at`` of a byte window; returns what each lane found there."""
        old = np.empty(len(at), window.dtype)
        view = old.view(self.dtype)
        operands = [np.ascontiguousarray(d).view(self.dtype) for d in data]
        second = operands[1] if len(operands) > 1 else operands[0]
        for lane, place in enumerate(at.tolist()):
            old[lane] = window[place]
            new = np.asarray(self.function(view[lane], operands[0][lane], second[lane])).astype(self.dtype)
            window[place] = new.view(window.dtype)[()]
        return old


def _increment(old: Any, limit: Any, _: Any) -> Any:
    return 0 if old >= limit else old + 1


def _decrement(old: Any, limit: Any, _: Any) -> Any:
    return limit if old == 0 or old > limit else old - 1


_FUNCTIONS: dict[str, Function] = {
    "ADD": lambda old, a, _: old + a,
    "SUB": lambda old, a, _: old - a,
    "RSUB": lambda old, a, _: a - old,
    "MIN": lambda old, a, _: np.fmin(old, a),
    "MAX": lambda old, a, _: np.fmax(old, a),
    "AND": lambda old, a, _: old & a,
    "OR": lambda old, a, _: old | a,
    "XOR": lambda old, a, _: old ^ a,
    "INC": _increment,
    "DEC": _decrement,
    "WRXCHG": lambda old, a, _: a,
    "SWAP": lambda old, a, _: a,
    # LDS: compare with the first operand, store the second.
    "CMPST": lambda old, a, b: b if old == a else old,
}
_DTYPES: dict[str, Any] = {
    "U32": np.uint32, "I32": np.int32, "B32": np.uint32, "F32": np.float32, "U64": np.uint64, "I64": np.int64,
    "B64": np.uint64, "F64": np.float64,
}  # fmt: skip


def find(name: str) -> Operation | None:
    """By a DS name without prefix and RTN, e.g. ``ADD_U32``, ``MAX_F32``."""
    verb, _, kind = name.partition("_")
    if verb not in _FUNCTIONS or kind not in _DTYPES:
        return None
    return Operation(_DTYPES[kind], _FUNCTIONS[verb], 2 if verb == "CMPST" else 1)


def find_global(name: str) -> Operation | None:
    """By a vector memory name after ``ATOMIC_``, e.g. ``ADD``, ``SMAX_X2``, ``ADD_F32``."""
    wide = name.endswith("_X2")
    verb = name.removesuffix("_X2")
    if verb == "CMPSWAP":
        # One operand twice as wide: the new value, then the value to compare with.
        return Operation(np.uint64 if wide else np.uint32, lambda old, a, b: a if old == b else old, 2)
    for float_name, dtype in (("_F32", np.float32), ("_F64", np.float64)):
        if verb.endswith(float_name) and verb.removesuffix(float_name) in ("ADD", "MIN", "MAX"):
            return Operation(dtype, _FUNCTIONS[verb.removesuffix(float_name)])
    signed = verb in ("SMIN", "SMAX")
    plain = {"SMIN": "MIN", "SMAX": "MAX", "UMIN": "MIN", "UMAX": "MAX"}.get(verb, verb)
    if plain not in _FUNCTIONS or (plain in ("MIN", "MAX", "RSUB", "WRXCHG", "CMPST") and plain == verb):
        return None
    unsigned_dtype, signed_dtype = (np.uint64, np.int64) if wide else (np.uint32, np.int32)
    return Operation(signed_dtype if signed else unsigned_dtype, _FUNCTIONS[plain])
