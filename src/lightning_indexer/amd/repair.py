"""Wait states that LLVM leaves out of gfx950 code, put back into the assembly text.

On gfx950 the result of a matrix instruction of 16 passes must be left alone for 20 wait states (CDNA4 ISA document,
table of required NOPs). LLVM looks 19 back (llvm/llvm-project pull request 222040, merged in September 2026): a reader
exactly 19 wait states behind the product gets no ``s_nop``. Nor does LLVM look into inline assembly, however near; of
that only what follows those products is mended here, and what follows shorter ones the simulator refuses.
The compilers that this library runs are older, so what they print for gfx950 passes through here.

The simulator checks machine code against the whole list of such rules, independently of this:
``cdna_sim/exec/wait_states.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_indexer.arch import gpu_arch

VERSION = "wait states 1"  # in keys of caches
# What has 16 passes on gfx950, in the order of LLVM's scheduling model: 32 x 32 results with 8-bit operands of k = 64,
# and the older shapes of two blocks.
_SIXTEEN_PASSES = re.compile(r"v_mfma_(?:scale_)?f32_32x32x64_f8f6f4$|v_mfma_[fi]32_32x32x4_2b_(?:f16|bf16|i8)$")
_FOUR_BIT = re.compile(r"\bcbsz:[234]\b.*\bblgp:[234]\b")  # both operands narrow: 8 passes
_NEEDED = 20
_COMMENT = re.compile(r"/\*.*?\*/|;.*|//.*")
_LABEL = re.compile(r"\s*([.\w$]+|\"[^\"]*\"):")
_INSTRUCTION = re.compile(r"\s*([a-z]\w+)(?:\s+([^=].*))?$")
_REGISTERS = re.compile(r"\b([va])(?:(\d+)\b|\[(\d+)(?::(\d+))?\])")
_READERS = ("v_", "ds_", "buffer_", "global_", "flat_", "scratch_", "tbuffer_")


@dataclass(frozen=True, slots=True)
class _Line:
    """One instruction of the text: its line number, mnemonic and operands, and the wait states that it is."""

    number: int
    name: str
    operands: tuple[str, ...]
    rest: str
    states: int


def repair(isa: str, arch: str) -> str:
    """The assembly text with the missing wait states; the same string where none is missing.

    Args:
        isa: what a compiler printed for one kernel.
        arch: e.g. ``gfx942``; the text for one whose row does not say ``repaired`` is returned as it is.
    """
    if not gpu_arch(arch).repaired:
        return isa
    lines = isa.split("\n")
    code, labels = _parse(lines)
    missing: dict[int, int] = {}
    for index, line in enumerate(code):
        if _SIXTEEN_PASSES.match(line.name) and not _FOUR_BIT.search(line.rest):
            result = _registers(line.operands[0])
            for distance, other in _following(code, labels, index):
                if _touches(code[other], result):
                    missing[other] = max(missing.get(other, 0), _NEEDED - distance)
    for other in sorted(missing, reverse=True):
        left = missing[other]
        while left:
            count = min(left, 16)
            lines.insert(code[other].number, f"\ts_nop {count - 1}")
            left -= count
    return "\n".join(lines) if missing else isa


def _parse(lines: list[str]) -> tuple[list[_Line], dict[str, int]]:
    """The instructions in order, and which of them each label stands before."""
    code: list[_Line] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(lines):
        text = _COMMENT.sub("", line).rstrip()
        while (label := _LABEL.match(text)) is not None:
            labels[label[1]] = len(code)
            text = text[label.end() :]
        if (match := _INSTRUCTION.match(text)) is not None:
            rest = match[2] or ""
            operands = tuple(part.strip() for part in rest.split(","))
            code.append(_Line(number, match[1], operands, rest, _states(match[1], operands[0])))
    return code, labels


def _states(name: str, operand: str) -> int:
    """Wait states of an instruction; a count that is not a plain number passes for the least."""
    count = re.fullmatch(r"0x[\da-f]+|[1-9]?\d", operand) if name == "s_nop" else None
    return int(count[0], 0) + 1 if count is not None else 1


def _following(code: list[_Line], labels: dict[str, int], first: int) -> Iterator[tuple[int, int]]:
    """What runs within the needed wait states of an instruction: the least distance of each, and its index."""
    nearest: dict[int, int] = {}
    todo = [(0, index) for index in _next(code, labels, first)]
    while todo:
        distance, index = todo.pop()
        if distance >= _NEEDED or index >= len(code) or nearest.get(index, _NEEDED) <= distance:
            continue
        nearest[index] = distance
        todo += [(distance + code[index].states, after) for after in _next(code, labels, index)]
    yield from ((distance, index) for index, distance in nearest.items())


def _next(code: list[_Line], labels: dict[str, int], index: int) -> list[int]:
    name = code[index].name
    if name.startswith(("s_endpgm", "s_setpc", "s_swappc")):
        return []
    if "branch" not in name and not name.startswith("s_call"):
        return [index + 1]
    # A target that is not a label of the text, such as 1b, may be any.
    targets = [labels[label] for label in code[index].operands if label in labels] or list(labels.values())
    return targets if name == "s_branch" else [index + 1, *targets]


def _touches(line: _Line, result: set[str]) -> bool:
    """Reads or overwrites the result, otherwise than by accumulating on it."""
    if not line.name.startswith(_READERS):
        return False
    if not line.name.startswith("v_mfma"):
        return bool(_registers(line.rest) & result)
    # A product takes its factors, and their scales; the accumulator goes from one product to the next by itself.
    factors = (*line.operands[1:3], *line.operands[4:])
    return any(_registers(operand) & result for operand in factors)


def _registers(text: str) -> set[str]:
    found: set[str] = set()
    for kind, single, low, high in _REGISTERS.findall(text):
        first = int(single or low)
        last = int(high or first)
        found |= {f"{kind}{number}" for number in range(first, last + 1)}
    return found
