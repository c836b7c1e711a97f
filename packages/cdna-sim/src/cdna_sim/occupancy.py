"""How many waves of a kernel one SIMD holds at once.

Sources: AMD CDNA3 and CDNA4 ISA documents (registers, LDS), LLVM's AMDGPU backend (allocation granules).
"""

from __future__ import annotations

from cdna_sim.arch import ARCHS, VECTOR_REGISTERS

SIMDS = 4  # of a compute unit
MAX_WAVES = 8  # of a SIMD
VECTOR_GRANULE = 8  # VGPRs and AGPRs of a lane together


def lds_limit(arch: str) -> int | None:
    """LDS bytes that one workgroup may have; None on an arch without a row in ``ARCHS``."""
    return ARCHS[arch].lds if arch in ARCHS else None


def waves_per_simd(arch: str, vgpr: int, sgpr: int, lds: int, waves: int) -> int | None:
    """Waves of the fullest SIMD, for workgroups of ``waves`` waves that have ``lds`` bytes each; LLVM's "Occupancy".

    Returns:
        At least 1 for anything that fits; 0 where one workgroup's LDS or registers do not fit; None on an arch
        without a row in ``ARCHS``.
    """
    if arch not in ARCHS:
        return None
    allocated = max(1, -(-vgpr // VECTOR_GRANULE)) * VECTOR_GRANULE
    resident = min(MAX_WAVES, VECTOR_REGISTERS // allocated)
    # 800 scalar registers of a SIMD, in granules of 16.
    resident = min(resident, 7 if sgpr > 100 else MAX_WAVES)
    row = ARCHS[arch]
    if lds > row.lds:
        return 0
    if lds:
        groups = row.lds // (-(-lds // row.lds_granule) * row.lds_granule)
        resident = min(resident, -(-groups * waves // SIMDS))
    return resident
