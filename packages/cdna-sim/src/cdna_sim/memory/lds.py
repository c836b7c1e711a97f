"""The LDS of one workgroup: bytes, who touched them since the last barrier, and bank conflicts.

A state byte for every byte of LDS: bit 7 is set until something is written there; bit ``n`` below means that wave
``n`` (modulo 7) has written it since the last barrier. A second array has the waves that read it. A wave that reads
what another has written, or writes what another has touched, with no barrier between, depends on timing; writing the
value that is there already does not.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.lanes import Lanes
from cdna_sim.memory.buffers import ELEMENTS, byte_windows

# State bytes of one access as integers, by its bytes.
_STATE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 12: np.uint32, 16: np.uint64}
_UNWRITTEN = 0x80


def _every_byte(width: int, value: int) -> Any:
    dtype = _STATE[width]
    return dtype(int.from_bytes(bytes([value]) * np.dtype(dtype).itemsize, "little"))


class Accessor(Protocol):
    """What a workgroup's LDS needs to know of the wave that uses it."""

    index: int

    def fault(
        self, ins: Instruction, message: str, lane: int | None = None, address: int | None = None
    ) -> NoReturn: ...


class Lds:
    """``size`` bytes. ``poison``: reading what nothing wrote is a fault; ``races``: so is a race between waves."""

    def __init__(self, size: int, waves: int, poison: bool, races: bool) -> None:
        self.size = size
        self.data: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.windows = {width: byte_windows(self.data, width) for width in ELEMENTS}
        self.poison, self.races = poison, races and waves > 1
        self.watched = poison or self.races
        if self.watched:
            padded = -(-size // 8) * 8
            self.state: NDArray[np.uint8] = np.zeros(padded, np.uint8)
            self.readers: NDArray[np.uint8] = np.zeros(padded, np.uint8)
            self.state_windows = {width: byte_windows(self.state, width) for width in ELEMENTS}
            self.reader_windows = {width: byte_windows(self.readers, width) for width in ELEMENTS}
        # For each wave (modulo 7) and width: its own bit in every byte, and the bits that a read of its must not see.
        self.own = [{width: _every_byte(width, 1 << n) for width in _STATE} for n in range(7)]
        self.marks = [
            {width: np.full(width, 1 << n, np.uint8).view(element)[0] for width, element in ELEMENTS.items()}
            for n in range(7)
        ]
        foreign = (0x7F if self.races else 0) | (_UNWRITTEN if poison else 0)
        self.foreign = [{width: _every_byte(width, foreign & ~(1 << n)) for width in _STATE} for n in range(7)]
        self.others = [{width: _every_byte(width, 0x7F & ~(1 << n)) for width in _STATE} for n in range(7)]
        # Copies into LDS that no wave has waited for: (instruction, wave, first bytes, width).
        self.copies: list[tuple[Instruction, int, Lanes, int]] = []

    def start(self) -> None:
        """For a new workgroup: contents unknown."""
        self.data.fill(0xA5 if self.poison else 0)
        self.copies.clear()
        if self.watched:
            self.state.fill(_UNWRITTEN if self.poison else 0)
            self.readers.fill(0)

    def barrier(self) -> None:
        """All waves have arrived: what they did before is ordered."""
        if self.races:
            words = self.state.view(np.uint64)
            np.bitwise_and(words, np.uint64(0x8080808080808080), words)
            self.readers.fill(0)

    def read(self, w: Accessor, ins: Instruction, at: Lanes, width: int) -> Lanes:
        """The ``width`` bytes at each index of ``at``."""
        if self.watched:
            wave = w.index % 7
            state = self.state_windows[width][at].view(_STATE[width])
            if np.count_nonzero(state & self.foreign[wave][width]):
                self._read_fault(w, ins, at, width)
            if self.races:
                window = self.reader_windows[width]
                seen = window[at]
                bits = seen.view(_STATE[width])
                np.bitwise_or(bits, self.own[wave][width], bits)
                window[at] = seen
            if self.copies:
                self._check_copies(w, ins, at, width)
        return self.windows[width][at]

    def write(self, w: Accessor, ins: Instruction, at: Lanes, width: int, data: Lanes) -> None:
        """``data``: elements of ``width`` bytes."""
        if self.watched:
            wave = w.index % 7
            if self.races:
                state = self.state_windows[width][at].view(_STATE[width])
                readers = self.reader_windows[width][at].view(_STATE[width])
                if np.count_nonzero((state | readers) & self.others[wave][width]):
                    self._check_write(w, ins, at, width, data)
            if self.copies:
                self._check_copies(w, ins, at, width)
            self.state_windows[width][at] = self.marks[wave][width]
        self.windows[width][at] = data

    def touch(self, w: Accessor, ins: Instruction, at: Lanes, width: int) -> None:
        """Atomics: ordered among themselves, so that they are no race; still a read of what must be written."""
        state = self.state_windows[width][at].view(_STATE[width]) if self.poison else 0
        if np.count_nonzero(state & _every_byte(width, _UNWRITTEN)):
            self._read_fault(w, ins, at, width)

    def _bytes(self, at: Lanes, width: int) -> Lanes:
        return np.asarray(at)[:, None] + np.arange(width)

    def _read_fault(self, w: Accessor, ins: Instruction, at: Lanes, width: int) -> None:
        wave = w.index % 7
        state = self.state[self._bytes(at, width)]
        if self.poison and (state & _UNWRITTEN).any():
            lane, byte = np.argwhere(state & _UNWRITTEN)[0]
            address = int(at[lane] + byte)
            w.fault(ins, f"LDS read of byte {address:#x}, which nothing has written", int(lane), address)
        lane, byte = np.argwhere(state & (0x7F ^ 1 << wave))[0]
        address = int(at[lane] + byte)
        writer = int(state[lane, byte] & (0x7F ^ 1 << wave)).bit_length() - 1
        w.fault(
            ins, f"LDS race: byte {address:#x} was written by wave {writer} and no barrier lies between",
            int(lane), address,
        )  # fmt: skip

    def _check_write(self, w: Accessor, ins: Instruction, at: Lanes, width: int, data: Lanes) -> None:
        """A race unless the bytes in question already hold what is written."""
        places = self._bytes(at, width)
        others = (self.state[places] | self.readers[places]) & (0x7F ^ 1 << w.index % 7)
        new = np.ascontiguousarray(data).view(np.uint8).reshape(len(places), width)
        wrong = np.argwhere((others != 0) & (self.data[places] != new))
        if len(wrong):
            lane, byte = wrong[0]
            address = int(at[lane] + byte)
            other = int(others[lane, byte]).bit_length() - 1
            w.fault(
                ins, f"LDS race: byte {address:#x} is overwritten, wave {other} touched it and no barrier lies between",
                int(lane), address,
            )  # fmt: skip

    def copy_issued(self, w: Accessor, ins: Instruction, at: Lanes, width: int) -> None:
        if self.races or self.poison:
            self.copies.append((ins, w.index, at, width))

    def copy_done(self, w: Accessor, ins: Instruction, at: Lanes) -> None:
        self.copies = [copy for copy in self.copies if copy[2] is not at]

    def _check_copies(self, w: Accessor, ins: Instruction, at: Lanes, width: int) -> None:
        """A fault where ``at`` meets bytes that an outstanding copy will write."""
        low, high = int(at.min()), int(at.max()) + width
        for copy, wave, first, size in self.copies:
            if copy is ins or int(first.max()) + size <= low or int(first.min()) >= high:
                continue
            common = np.isin(self._bytes(at, width), self._bytes(first, size))
            if common.any():
                lane, byte = np.argwhere(common)[0]
                address = int(at[lane] + byte)
                w.fault(
                    ins,
                    f"LDS byte {address:#x} is used before an s_waitcnt vmcnt that waits for `{copy.text}` at pc "
                    f"{copy.pc:#x} of wave {wave}, which writes it",
                    int(lane), address,
                )  # fmt: skip


# Lanes that the LDS serves together, measured by others (arch.py says by whom). Reads of 96 and 128 bits take their
# lanes out of order.
_OCTETS = [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19], [8, 9, 10, 11, 28, 29, 30, 31],
           [12, 13, 14, 15, 24, 25, 26, 27]]  # fmt: skip
_SIXTEENS = [[*_OCTETS[0], *_OCTETS[3]], [*_OCTETS[1], *_OCTETS[2]]]


def _phases(read_banks: int, width: int, store: bool) -> tuple[NDArray[Any], int]:
    """Lanes by phase, [phases, lanes], and how many banks serve a phase."""
    wide = read_banks == 64 and not store
    if width in (12, 16) and not store:
        groups = _SIXTEENS if wide and width == 16 else _OCTETS
        lanes = [[lane + half for lane in group] for half in (0, 32) for group in groups]
        return np.array(lanes), 64 if wide and width == 16 else 32
    banks = 64 if wide else 32
    per_phase = min(64, banks // max(1, -(-width // 4)) if width != 12 else 8)
    return np.arange(64).reshape(-1, per_phase), banks


def bank_conflicts(read_banks: int, addresses: Lanes, active: Any, width: int, store: bool) -> int:
    """Extra cycles of one access: in each phase, the most different dwords that any bank has to serve, less one.

    Args:
        read_banks: banks that serve reads.
        addresses: 64 byte addresses; ``active`` booleans, or True.
        width: bytes of a lane.
    """
    lanes, banks = _phases(read_banks, width, store)
    dwords = (np.asarray(addresses, np.int64) >> 2)[:, None] + np.arange(max(1, -(-width // 4)))
    extra = 0
    for phase in lanes:
        asked = phase if active is True else phase[active[phase]]
        if len(asked):
            different = np.unique(dwords[asked])
            extra += int(np.bincount(different % banks).max()) - 1
    return extra
