"""The accelerator architectures, as facts that selection and tile heuristics read.

An :class:`Arch` is found from a device only when a call needs it, and can be made without any device:
``Arch.parse("gfx950")``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_indexer import envs

Vendor = Literal["cpu", "nvidia", "amd", "other"]
Fp8 = Literal["fn", "fnuz", "none"]


@dataclass(frozen=True, slots=True)
class Arch:
    """What the library needs to know of one architecture.

    Attributes:
        name: ``cpu``, ``sm90``, ``gfx950``…
        vendor: who makes it; ``other`` for devices this library has no kernels for.
        fp8: the e4m3 dialect its matrix unit reads; ``none`` where fp8 has to be widened to fp16 first.
        units: multiprocessors (NVIDIA) or compute units (AMD) of the usual part; of a real device, its own count.
        products: what it is sold as.
        lds: bytes of LDS that one workgroup may have, where kernels here ask (AMD); else 0.
        simulated: ``cdna_sim`` runs its kernels.
        listed: False for a device that is not in the table; only ``torch-blocked`` runs there.
    """

    name: str
    vendor: Vendor
    fp8: Fp8
    units: int
    products: str
    listed: bool = True
    lds: int = 0
    simulated: bool = False

    @staticmethod
    def parse(name: str) -> Arch:
        """The arch of that name.

        Raises:
            ValueError: no such arch; the message lists the known ones.
        """
        try:
            return _TABLE[name]
        except KeyError:
            raise ValueError(f"arch: got {name!r}, expected one of {', '.join(_TABLE)}") from None

    @staticmethod
    def known() -> tuple[Arch, ...]:
        """Every arch of the table, in its order."""
        return tuple(_TABLE.values())


# Sources: NVIDIA CUDA C++ programming guide (compute capabilities), AMD CDNA3/CDNA4/RDNA4 ISA documents, data sheets.
_TABLE: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("cpu", "cpu", "none", 1, "any CPU that PyTorch runs on"),
        Arch("sm80", "nvidia", "none", 108, "A100"),
        Arch("sm86", "nvidia", "none", 84, "A10, A40, RTX 30"),
        Arch("sm89", "nvidia", "fn", 142, "L40S, L4, RTX 40"),
        Arch("sm90", "nvidia", "fn", 132, "H100, H200, GH200"),
        Arch("sm100", "nvidia", "fn", 148, "B200, GB200"),
        Arch("sm103", "nvidia", "fn", 148, "B300, GB300"),
        Arch("sm120", "nvidia", "fn", 188, "RTX PRO 6000 Blackwell, RTX 50"),
        Arch("sm121", "nvidia", "fn", 48, "GB10 (DGX Spark)"),
        Arch("gfx90a", "amd", "none", 104, "MI210, MI250X", lds=64 * 1024),
        Arch("gfx942", "amd", "fnuz", 304, "MI300X, MI325X", lds=64 * 1024, simulated=True),
        Arch("gfx950", "amd", "fn", 256, "MI350X, MI355X", lds=160 * 1024, simulated=True),
        Arch("gfx1200", "amd", "fn", 32, "RX 9060"),
        Arch("gfx1201", "amd", "fn", 64, "RX 9070, Radeon AI PRO R9700"),
        Arch("gfx1250", "amd", "fn", 256, "MI450 series"),
    )
}


def arch_of(device: torch.device | str) -> Arch:
    """The arch of a device; ``LIGHTNING_INDEXER_ARCH``, and before it :func:`assume`, overrides it for every device.

    Raises:
        ValueError: the environment variable names an arch that is not known.
    """
    if (assumed := _ASSUMED.get()) is not None:
        return assumed
    if (forced := forced_arch()) is not None:
        return forced
    if isinstance(device, str):
        device = torch.device(device)
    if device.type == "cpu":
        return _TABLE["cpu"]
    if device.type == "cuda":
        return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)
    return Arch(device.type, "other", "none", 1, "a device this library has no kernels for", listed=False)


def forced_arch() -> Arch | None:
    """What ``LIGHTNING_INDEXER_ARCH`` names, or None.

    Raises:
        ValueError: it names an arch that is not known.
    """
    name = envs.arch()
    try:
        return None if name is None else Arch.parse(name)
    except ValueError as error:
        raise ValueError(f"LIGHTNING_INDEXER_ARCH: {error}") from None


@contextlib.contextmanager
def assume(name: str) -> Iterator[Arch]:
    """Inside, every device counts as the arch of that name.

    Raises:
        ValueError: no such arch; the message lists the known ones.
    """
    token = _ASSUMED.set(Arch.parse(name))
    try:
        yield Arch.parse(name)
    finally:
        _ASSUMED.reset(token)


_ASSUMED: ContextVar[Arch | None] = ContextVar("assumed arch", default=None)


def assumed() -> Arch | None:
    """The arch of the :func:`assume` around this call, or None."""
    return _ASSUMED.get()


@functools.cache
def _cuda_arch(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    amd = str(properties.gcnArchName).split(":")[0] if torch.version.hip else None
    name = amd or f"sm{properties.major}{properties.minor}"
    return replace(gpu_arch(name, properties.name), units=properties.multi_processor_count)


def gpu_arch(name: str, products: str = "a GPU this library has no kernels for") -> Arch:
    """The arch of a GPU by its name, ``sm90`` or ``gfx950``; one that is not in the table is not ``listed``."""
    vendor: Vendor = "amd" if name.startswith("gfx") else "nvidia"
    return _TABLE.get(name) or Arch(name, vendor, "none", 1, products, listed=False)
