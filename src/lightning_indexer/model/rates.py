"""Every input of the cost model that the simulator does not count, with its source. None was measured by this project.

Sources:
    [sheet] AMD Instinct MI355X data sheet and product page: 256 compute units, 2400 MHz peak engine clock, 5.0 PFLOP/s
        fp8 dense (OCP-FP8 matrix), 8 TB/s HBM3E.
    [cdna] AMD "CDNA 3 white paper", "CDNA 4 architecture white paper": four SIMDs a compute unit, 16 lanes wide; L1
        64 bytes a cycle and compute unit; LDS of CDNA 4 128 bytes a cycle and compute unit.
    [isa] AMD CDNA3 and CDNA4 ISA documents and LLVM's scheduling tables (SISchedule.td): passes of matrix instructions,
        four cycles each.
    [llvm] llvm/llvm-project pull request 157968, issue 161453: packed float32 instructions do not execute beside
        matrix instructions on gfx950; the compiler unpacks those that it finds in a matrix instruction's shadow.
    [aiter] ROCm/aiter, the pull request "fp8_mqa_logits: hand-written gfx950 prefill indexer kernel": its table, H=32,
        D=128, clean logits, MI355X, microseconds of the Triton and of the HIP kernel.
    [gluon] ROCm/aiter pull request 5048, "add an optimized prefill fp8_mqa_logits for H64D128": microseconds before and
        after it, on an MI350.
    [main] ROCm/aiter pull request 5216, its column "main", H=32 and H=64, D=128, causal, MI355X; pull request 5434, a
        sweep of "triton us" on gfx950, H=32, causal, clean. Both time AITER's main of August and September 2026.
    [flydsl] vLLM, the pull request that takes FlyDSL for the prefill indexer on gfx942 and gfx950: GLM-5.2-MXFP4, TP4,
        MI355X, kernel trace of a profile of 60000 tokens in and 600 out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_indexer.problems.mqa_logits import Form


@dataclass(frozen=True, slots=True)
class Rates:
    """One device.

    Attributes:
        units, simds: compute units, and SIMDs of each.
        clock: cycles a second.
        vector_cycles: SIMD cycles of a vector instruction of 64 lanes; a scalar one takes an issue slot as long.
        l1_bytes, lds_bytes: a cycle and compute unit.
        memory_bytes: a second.
    """

    name: str
    units: int
    simds: int
    clock: float
    vector_cycles: int
    l1_bytes: int
    lds_bytes: int
    memory_bytes: float


MI355X = Rates("MI355X", 256, 4, 2.4e9, 4, 64, 128, 8e12)  # [sheet], [cdna]
MI350X = Rates("MI350X", 256, 4, 2.2e9, 4, 64, 128, 8e12)  # [sheet] of the MI350X: the same at 2200 MHz
DEVICES = {"gfx950": MI355X}

# FLOP a cycle and SIMD by the types in a matrix instruction's name, [isa]. f8f6f4 with 8-bit operands: 2048 x 4 SIMDs x
# 256 units x 2.4 GHz = 5.0 PFLOP/s, as in [sheet]. The older shapes of CDNA 3 run at its rates.
_F8F6F4, _FP8, _HALF, _OLD_HALF = 2048, 1024, 1024, 512
_NEW_HALF_SHAPES = ("16X16X32", "32X32X16")
_MATRIX = re.compile(r"V_MFMA_(?:SCALE_)?F32_(\d+)X(\d+)X(\d+)_([A-Z]\w+)")  # shapes of one block


def matrix_flop_and_cycles(opcode: str) -> tuple[int, float]:
    """FLOP of a matrix instruction, and the cycles that it keeps a SIMD's matrix unit.

    Raises:
        ValueError: a name without a rate here.
    """
    found = _MATRIX.fullmatch(opcode.upper())
    if found is None:
        raise ValueError(f"opcode: got {opcode}, which has no rate in model/rates.py")
    m, n, k = (int(found[index]) for index in (1, 2, 3))
    kind, shape = found[4], f"{m}X{n}X{k}"
    if "F8F6F4" in kind:
        rate = _F8F6F4
    elif "FP8" in kind or "BF8" in kind:
        rate = _FP8
    elif "F16" in kind:
        rate = _HALF if shape in _NEW_HALF_SHAPES else _OLD_HALF
    else:
        raise ValueError(f"opcode: got {opcode}, which has no rate in model/rates.py")
    flop = 2 * m * n * k
    return flop, flop / rate


def is_fp8(opcode: str) -> bool:
    """A matrix instruction with 8-bit operands."""
    return re.search(r"f8f6f4|fp8|bf8", opcode) is not None


def is_packed_f32(opcode: str) -> bool:
    """A vector instruction that does not execute beside matrix instructions, [llvm]."""
    return opcode.startswith("v_pk_") and opcode.endswith("_f32")


@dataclass(frozen=True, slots=True)
class Published:
    """Times that others measured, beside which a prediction is set.

    Attributes:
        title: what was measured, and where it was published.
        rates: the device.
        heads, form: of every launch; the head dim is 128.
        kernels: what was measured, one column each.
        kinds: the column that a backend is set beside, the same kind of kernel, by name.
        times: by (rows, keys, window), in the order of ``kernels``.
        unit: of the times. "us" of one launch; another where only the sum over launches was published, so that only the
            proportion of two kernels can be compared.
    """

    title: str
    rates: Rates
    heads: int
    form: Form
    kernels: tuple[str, ...]
    kinds: dict[str, int]
    times: dict[tuple[int, int, str], tuple[float, ...]]
    unit: str = "us"


# [aiter]
AITER_HIP = Published(
    title="ROCm/aiter, hand-written gfx950 prefill indexer",
    rates=MI355X,
    heads=32,
    form="clean",
    kernels=("Triton", "HIP"),
    kinds={"triton-portable": 0, "hip-gfx950": 1},
    times={
        (1024, 1024, "causal"): (15.7, 11.8),
        (4096, 4096, "causal"): (88.1, 68.5),
        (8192, 8192, "causal"): (216.6, 223.5),
        (4096, 32768, "causal"): (1063.6, 613.4),
        (2048, 65536, "causal"): (1039.5, 632.6),
        (1024, 131072, "causal"): (1608.2, 820.6),
        (128, 32768, "causal"): (225.1, 35.2),
        (671, 131072, "causal"): (1791.9, 491.5),
        (4096, 32768, "multi_req"): (349.2, 266.6),
        (2048, 65536, "multi_req"): (332.1, 278.7),
        (1024, 131072, "multi_req"): (510.1, 294.3),
        (128, 32768, "multi_req"): (63.5, 21.6),
        (671, 131072, "multi_req"): (410.7, 191.4),
        (8192, 8192, "multi_req"): (95.2, 114.6),
    },
)
# [gluon]. Four requests of 8192 tokens whose keys were compressed four to one. Whether -inf was written is not said;
# the figures say not: a fill of 1 GiB takes 170 us and more of the 349.7, which would leave 3 PFLOP/s to the scores,
# above the most that was published of any such kernel, 2.3 [main]. "before" is AITER's main of August 2026.
AITER_GLUON = Published(
    title="ROCm/aiter 5048, Gluon prefill for H=64, D=128",
    rates=MI350X,
    heads=64,
    form="noclean",
    kernels=("Gluon before", "Gluon"),
    kinds={"gluon-gfx950": 1},
    times={(4096, 4096, "causal"): (105.7, 92.8), (32768, 8192, "multi_req/4"): (396.0, 349.7)},
)
# [flydsl]. The third chunk of 16384 tokens of a prompt of 60000, all launches of all layers; here the last launch of
# one layer as vLLM cuts it, by 512 MiB of logits.
VLLM_FLYDSL = Published(
    title="vLLM, FlyDSL prefill scoring, GLM-5.2: all launches of one chunk",
    rates=MI355X,
    heads=32,
    form="noclean",
    kernels=("Gluon", "FlyDSL"),
    kinds={"gluon-gfx950": 0, "flydsl": 1},
    times={(2730, 49152, "causal"): (153.4, 98.7)},
    unit="ms",
)
PUBLISHED = (AITER_HIP, AITER_GLUON, VLLM_FLYDSL)

# [main]: of code that is public, so that a model can be held against the very kernel; scripts/time_aiter.py.
_CAUSAL = "causal"
AITER_MAIN = (
    Published(
        "ROCm/aiter 5216, main", MI355X, 32, "noclean", ("Gluon",), {},
        {(4096, 4096, _CAUSAL): (50.7,), (8192, 8192, _CAUSAL): (187.9,)},
    ),
    Published(
        "ROCm/aiter 5216, main", MI355X, 64, "noclean", ("Gluon",), {},
        {(4096, 4096, _CAUSAL): (123.2,), (8192, 8192, _CAUSAL): (396.3,)},
    ),
    Published(
        "ROCm/aiter 5434", MI355X, 32, "clean", ("Gluon, and torch.full",), {},
        {
            (1024, 4096, _CAUSAL): (32.4,), (1024, 16384, _CAUSAL): (117.6,), (2048, 4096, _CAUSAL): (53.2,),
            (2048, 16384, _CAUSAL): (223.6,),
        },
    ),
)  # fmt: skip
