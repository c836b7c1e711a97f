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
    """What the library needs to know of one architecture: a row of the table.

    Attributes:
        name: ``cpu``, ``sm90``, ``gfx950``…
        vendor: who makes it; ``other`` for devices this library has no kernels for.
        fp8: the e4m3 dialect its matrix unit reads; ``none`` where fp8 has to be widened to fp16 first.
        units: SMs (NVIDIA) or compute units (AMD) of the usual part; of a real device, its own count.
        products: what it is sold as.
        wave: lanes of a warp or wave.
        shared_bytes: shared memory (LDS) that one workgroup may have.
        matrix: the shapes of its fp8 matrix instructions that kernels here ask for, as MxNxK.
        simulated: True where ``cdna_sim`` runs its code objects, so that its kernels run on any machine.
        repaired: True where LLVM leaves out wait states that have to be put back, see ``amd/repair.py``.
        listed: False for a device that is not in the table; only ``torch-blocked`` runs there.
        cache_bytes: the last cache that all units share; 0 where the table does not say.
    """

    name: str
    vendor: Vendor
    fp8: Fp8
    units: int
    products: str
    wave: int = 32
    shared_bytes: int = 0
    matrix: tuple[str, ...] = ()
    simulated: bool = False
    repaired: bool = False
    listed: bool = True
    cache_bytes: int = 0

    @staticmethod
    def parse(name: str) -> Arch:
        """The arch of that name.

        Raises:
            TypeError, ValueError: no such arch; the message lists the known ones.
        """
        if not isinstance(name, str):
            raise TypeError(f"arch: got {type(name).__name__}, expected one of {', '.join(_TABLE)}")
        try:
            return _TABLE[name]
        except KeyError:
            raise ValueError(f"arch: got {name!r}, expected one of {', '.join(_TABLE)}") from None

    @staticmethod
    def known() -> tuple[Arch, ...]:
        """Every arch of the table, in its order."""
        return tuple(_TABLE.values())


KIB = 1024
MIB = 1024 * KIB
_CDNA3 = ("16x16x32", "32x32x16")
_CDNA4 = (*_CDNA3, "16x16x128", "32x32x64")  # the last two with block scales, `v_mfma_scale_f32_*_f8f6f4`

# Sources: NVIDIA CUDA C++ programming guide (compute capabilities, shared memory per block), AMD CDNA3/CDNA4/RDNA4 ISA
# documents, LLVM's AMDGPU user guide (wave sizes, LDS), data sheets (caches: L2 of NVIDIA, Infinity Cache of AMD).
_TABLE: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("cpu", "cpu", "none", 1, "any CPU that PyTorch runs on", wave=1),
        Arch("sm80", "nvidia", "none", 108, "A100", 32, 163 * KIB, cache_bytes=40 * MIB),
        Arch("sm86", "nvidia", "none", 84, "A10, A40, RTX 30", 32, 99 * KIB),
        Arch("sm89", "nvidia", "fn", 142, "L40S, L4, RTX 40", 32, 99 * KIB, ("16x8x32",)),
        Arch(
            "sm90",
            "nvidia",
            "fn",
            132,
            "H100, H200, GH200",
            32,
            227 * KIB,
            ("16x8x32", "64x256x32"),
            cache_bytes=50 * MIB,
        ),
        Arch("sm100", "nvidia", "fn", 148, "B200, GB200", 32, 227 * KIB, ("16x8x32",)),
        Arch("sm103", "nvidia", "fn", 148, "B300, GB300", 32, 227 * KIB, ("16x8x32",)),
        Arch("sm120", "nvidia", "fn", 188, "RTX PRO 6000 Blackwell, RTX 50", 32, 99 * KIB, ("16x8x32",)),
        Arch("sm121", "nvidia", "fn", 48, "GB10 (DGX Spark)", 32, 99 * KIB, ("16x8x32",)),
        Arch("gfx90a", "amd", "none", 104, "MI210, MI250X", 64, 64 * KIB),
        Arch(
            "gfx942", "amd", "fnuz", 304, "MI300X, MI325X", 64, 64 * KIB, _CDNA3, simulated=True, cache_bytes=256 * MIB
        ),
        Arch(
            "gfx950",
            "amd",
            "fn",
            256,
            "MI350X, MI355X",
            64,
            160 * KIB,
            _CDNA4,
            simulated=True,
            repaired=True,
            cache_bytes=256 * MIB,
        ),
        Arch("gfx1200", "amd", "fn", 32, "RX 9060", 32, 64 * KIB, ("16x16x16",)),
        Arch("gfx1201", "amd", "fn", 64, "RX 9070, Radeon AI PRO R9700", 32, 64 * KIB, ("16x16x16",)),
        Arch("gfx1250", "amd", "fn", 256, "MI450 series", 32, 320 * KIB, ("16x16x64", "16x16x128")),
    )
}


def register(arch: Arch) -> None:
    """Adds a row to the table, for an arch that this version does not list; replaces the row of that name.

    A new arch runs what ``selection.policy`` gives every GPU, until it has a line there.
    """
    _TABLE[arch.name] = arch


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
