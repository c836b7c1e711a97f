"""What a simulated kernel can do wrong, and what the simulator cannot do."""

from __future__ import annotations


class SimulationFault(RuntimeError):  # noqa: N818
    """A kernel did something that hardware would fault on, or whose result would depend on timing.

    Attributes:
        message: the fault alone, without the place.
        kernel, pc, text: the kernel's name, the instruction's address and its text.
        workgroup, wave: where it ran; None where no wave runs.
        lane, address: the first lane at fault and the byte address it used, where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        pc: int | None = None,
        text: str = "",
        workgroup: tuple[int, int, int] | None = None,
        wave: int | None = None,
        lane: int | None = None,
        address: int | None = None,
    ) -> None:
        self.message, self.kernel, self.pc, self.text = message, kernel, pc, text
        self.workgroup, self.wave, self.lane, self.address = workgroup, wave, lane, address
        place = [f"kernel {kernel}"] if kernel else []
        if pc is not None:
            place.append(f"pc {pc:#x}")
        if text:
            place.append(f"`{text}`")
        if workgroup is not None:
            place.append(f"workgroup {workgroup}")
        if wave is not None:
            place.append(f"wave {wave}")
        if lane is not None:
            place.append(f"lane {lane}")
        super().__init__(f"{message} [{', '.join(place)}]" if place else message)


class UnknownOpcode(SimulationFault, NotImplementedError):  # noqa: N818
    """An instruction, or one of its modifiers, that the simulator does not model; the message names it."""
