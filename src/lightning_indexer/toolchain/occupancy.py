"""How many waves of a kernel one SIMD holds at once.

Sources: AMD CDNA3 and CDNA4 ISA documents (registers, LDS), LLVM's AMDGPU backend (allocation granules).
"""

from __future__ import annotations

from dataclasses import dataclass

SIMDS = 4  # of a compute unit
MAX_WAVES = 8  # of a SIMD
VECTOR_REGISTERS, VECTOR_GRANULE = 512, 8  # VGPRs and AGPRs of a lane together


@dataclass(frozen=True, slots=True)
class _Lds:
    """Bytes of one compute unit, and the unit in which workgroups get them."""

    size: int
    granule: int


_LDS = {"gfx90a": _Lds(64 * 1024, 512), "gfx942": _Lds(64 * 1024, 512), "gfx950": _Lds(160 * 1024, 1280)}


def lds_limit(arch: str) -> int | None:
    """LDS bytes that one workgroup may have; None on an arch without a table here."""
    return _LDS[arch].size if arch in _LDS else None


def waves_per_simd(arch: str, vgpr: int, sgpr: int, lds: int, waves: int) -> int | None:
    """Waves of the fullest SIMD, for workgroups of ``waves`` waves that have ``lds`` bytes each; LLVM's "Occupancy".

    Returns:
        At least 1 for anything that fits; 0 where one workgroup's LDS or registers do not fit; None on an arch
        without a table here.
    """
    if arch not in _LDS:
        return None
    allocated = max(1, -(-vgpr // VECTOR_GRANULE)) * VECTOR_GRANULE
    resident = min(MAX_WAVES, VECTOR_REGISTERS // allocated)
    # 800 scalar registers of a SIMD, in granules of 16.
    resident = min(resident, 7 if sgpr > 100 else MAX_WAVES)
    limit = _LDS[arch]
    if lds > limit.size:
        return 0
    if lds:
        groups = limit.size // (-(-lds // limit.granule) * limit.granule)
        resident = min(resident, -(-groups * waves // SIMDS))
    return resident
