"""Debugging an AMD kernel on any machine: a fault names the instruction, registers say why. See docs/simulator.md."""

from __future__ import annotations

from typing import Any

import numpy as np

import cdna_sim

# Each work-item stores its number. A number is four bytes, and the shift makes eight of it.
WRONG = (
    "83000224"  # v_lshlrev_b32 v1, 3, v0
    "008070dc01000200"  # global_store_dword v1, v0, s[2:3]
    "000081bf"  # s_endpgm
)
RIGHT = "82" + WRONG[2:]  # v_lshlrev_b32 v1, 2, v0


def kernel(code: str) -> cdna_sim.CodeObject:
    return cdna_sim.from_machine_code(bytes.fromhex(code), "gfx950", [("out", "pointer")])


def main() -> None:
    out = np.zeros(64, np.uint32)
    try:
        cdna_sim.run(kernel(WRONG), 1, 64, [out])
    except cdna_sim.SimulationFault as fault:
        print(f"1. {fault}")  # lane 32 is the first whose eight bytes lie behind the 256

    # The addresses that faults name.
    print("2.", *(f"{pc:#x} {text}" for pc, _, text in [*cdna_sim.listing(kernel(WRONG), "kernel")][-3:]), sep="\n   ")

    # What was in the registers before the store.
    seen: list[list[int]] = []

    def look(wave: Any, instruction: cdna_sim.Instruction) -> None:
        if "store" in instruction.text:
            seen.append([int(offset) for offset in wave.v[1][:4]])

    try:
        cdna_sim.run(kernel(WRONG), 1, 64, [out], options=cdna_sim.Options(trace=look))
    except cdna_sim.SimulationFault:
        print(f"3. offsets of the first lanes: {seen[0]}, expected [0, 4, 8, 12]")
    assert seen[0] == [0, 8, 16, 24]

    report = cdna_sim.run(kernel(RIGHT), 1, 64, [out])
    print(f"4. mended: {out[:4].tolist()}, {report.stored}")
    assert out.tolist() == list(range(64))


if __name__ == "__main__":
    main()
