"""Launching the kernels whose programs take rows that need nothing of each other: insert, gather, prepare_q."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.amd import launcher_for, simulates, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.gate import unsupported_grid
from lightning_indexer.backends.triton_launch import device_guard, within_2gib
from lightning_indexer.problems.transform import Transform


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How one program works.

    Attributes:
        rows: of the program, a power of two.
        num_warps: Triton's.
    """

    rows: int
    num_warps: int


def few_or_many(rows: int, arch: Arch, many: RowConfig) -> RowConfig:
    """``many`` where that gives every unit some programs; else programs of a warp or two, so that more units work."""
    config = many
    while config.rows > 8 and -(-rows // config.rows) < 4 * arch.units:
        config = RowConfig(config.rows // 2, max(1, config.num_warps // 2))
    return config


def around(chosen: RowConfig) -> list[RowConfig]:
    """What a tuning run measures: the heuristic's choice first, then those around it."""
    others = [RowConfig(rows, warps) for rows in (8, 16, 32, 64, 128) for warps in (1, 2, 4, 8)]
    fits = [one for one in others if one.rows * 128 // (32 * one.num_warps) in (16, 32, 64)]
    return [chosen, *(one for one in fits if one != chosen)]


def unsupported(arch: Arch, head_dim: int, rows: int, config: RowConfig) -> str | None:
    """None, or why Triton does not run rows of that kind there."""
    if arch.vendor == "cpu" and not envs.triton_interprets():
        return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
    if not arch.listed:
        return f"{arch.name} is not a known arch; Triton needs NVIDIA sm80 or newer, or AMD gfx90a or newer"
    if head_dim not in (32, 64, 128):
        return f"D={head_dim} is not one of 32, 64, 128"
    if rows > 2**31 - 2**16:
        return f"{rows} rows are more than {2**31 - 2**16}: a row's number is an int32"
    return unsupported_grid(-(-rows // config.rows), arch.wave * config.num_warps, arch.vendor)


def pairs(transform: Transform, head_dim: int) -> dict[str, Any]:
    """The constants of a transform: how channels are paired, and which pairs are turned."""
    half = transform.rope_dim // 2 or head_dim // 2
    last = head_dim // (2 * half) - 1
    return {
        "HALF": half,
        "INTERLEAVED": transform.interleaved,
        "GROUP": -1 if transform.rope is None else 0 if transform.rope == "first" else last,
        "HADAMARD": head_dim.bit_length() - 1 if transform.hadamard else 0,
    }


def encoding(dtype: torch.dtype, arch: Arch) -> str:
    """How codes of a dialect are made on an arch: by its own conversion where it has that dialect's."""
    name = "fnuz" if dtype is torch.float8_e4m3fnuz else "fn"
    return name if arch.fp8 == name else f"{name} bits"


class RowLaunch:
    """A kernel for one problem and one config; called with the tensors, it runs on the current stream."""

    outputs: tuple[str, ...]

    def __init__(self, rows: int, arch: Arch, config: RowConfig, constants: dict[str, Any]) -> None:
        self.arch, self.config, self.constants = arch, config, constants
        self.grid = (-(-rows // config.rows), 1, 1)
        # FMA fusion is asked for by name: from 3.10 on, Triton's default is not to fuse.
        self.options = {"num_warps": config.num_warps, "num_stages": 1, "enable_fp_fusion": True}
        self.compiled: dict[object, Any] = {}

    def kernel(self) -> Any:
        """The ``triton.jit`` function; imports Triton."""
        raise NotImplementedError

    def arguments(self, call: Any) -> tuple[Any, ...]:
        """What the kernel is given at run time, in the order of its signature."""
        raise NotImplementedError

    def __call__(self, call: Any) -> None:
        arguments = self.arguments(call)
        device = arguments[0].device
        kernel = self.kernel()
        key = self._key(arguments, device)
        compiled = self.compiled.get(key)
        if device.type == "cpu" and simulates(self.arch):
            if compiled is None:
                compiled = self.compiled[key] = self.build(arguments)
            given = [arguments[kernel.arg_names.index(name)] for name in compiled.argument_names]
            block = self.arch.wave * self.config.num_warps
            launcher_for(device).launch(compiled, self.grid, block, given, outputs=self.outputs)
            return
        with device_guard(device):
            if compiled is not None:
                compiled[self.grid](*arguments, *self.constants.values())
                return
            with triton_amd.repaired(self.arch.name):
                compiled = kernel[self.grid](*arguments, **self.constants, **self.options)
            if compiled is not None:  # the interpreter has nothing to keep
                self.compiled[key] = compiled

    def build(self, arguments: tuple[Any, ...]) -> Built:
        """The kernel for an AMD arch, as Triton's launcher would specialise it on these arguments."""
        kernel = self.kernel()
        values = dict(zip(kernel.arg_names, (*arguments, *self.constants.values()), strict=True))
        facts = triton_amd.specialise(kernel, values, self.arch.name, self.options)
        return triton_amd.compile_triton(
            kernel, facts.signature, facts.constexprs, facts.attrs, self.arch.name, self.options
        )

    def _key(self, arguments: tuple[Any, ...], device: torch.device) -> object:
        """What Triton specialises on: types, addresses and sizes on 16, a 1, 64 bits, AMD's 2 GiB."""
        amd = self.arch.vendor == "amd"
        return device, tuple(
            (value.dtype, value.data_ptr() % 16 == 0, amd and within_2gib(value))
            if isinstance(value, torch.Tensor)
            else (value % 16 == 0, value == 1, value < 2**31)
            if isinstance(value, int)
            else value is None
            for value in arguments
        )


def shrunk(config: RowConfig) -> list[RowConfig]:
    """Configs that a simulator runs beside the heuristic's."""
    return [replace(config, rows=16, num_warps=1), replace(config, rows=32, num_warps=2)]
