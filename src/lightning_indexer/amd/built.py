"""What every AMD compiler here returns: one compiled kernel, with its code, its text and its resources."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning_indexer import artifacts, envs
from lightning_indexer.amd import cdna
from lightning_indexer.artifacts import CompileError

if TYPE_CHECKING:
    from cdna_sim import CodeObject, KernelInfo, Resources

__all__ = ["Built", "CompileError", "Source", "get_or_build"]

Source = Literal["triton", "gluon", "hip", "flydsl"]


@dataclass(frozen=True)
class Built:
    """One kernel, compiled.

    Attributes:
        code_object: the ELF file, read.
        kernel: its name in there.
        isa: assembly text, as the compiler printed it.
        dynamic_lds: bytes of LDS that the launch has to ask for, beside the kernel's static ones.
        source: the language it was written in.
        compiler: the compiler and its version.
        argument_names: what the kernel is given, in order. Pointers that a compiler appends (Triton's two scratch
            buffers) are not among them; they are null.
    """

    code_object: CodeObject
    kernel: str
    isa: str
    dynamic_lds: int
    source: Source
    compiler: str
    argument_names: tuple[str, ...] = ()

    @property
    def info(self) -> KernelInfo:
        """The kernel as its code object describes it."""
        return self.code_object.kernel(self.kernel)

    @property
    def resources(self) -> Resources:
        """As in ``info``, with the dynamic LDS in ``lds`` and in ``waves_per_simd``."""
        from cdna_sim import waves_per_simd

        info = self.info
        lds = info.resources.lds + self.dynamic_lds
        waves = -(-info.max_workgroup // info.wavefront)
        resident = waves_per_simd(self.code_object.arch, info.resources.vgpr, info.resources.sgpr, lds, waves)
        return dataclasses.replace(info.resources, lds=lds, waves_per_simd=resident)

    def to_bytes(self) -> bytes:
        """For the disk cache: a line of JSON, then the ELF file."""
        facts = {name: getattr(self, name) for name in _FACTS}
        return json.dumps(facts).encode() + b"\n" + self.code_object.elf

    @staticmethod
    def from_bytes(data: bytes) -> Built:
        """The inverse of :meth:`to_bytes`."""
        line, elf = data.split(b"\n", 1)
        facts = json.loads(line)
        facts["argument_names"] = tuple(facts["argument_names"])
        return Built(cdna.code_object(elf), **facts)


def get_or_build(key: tuple[str | bytes, ...], build: Callable[[], Built]) -> Built:
    """The kernel of ``key`` that this process has already, else the one on disk, else ``build()``.

    Raises:
        As ``build``; CacheError as :func:`artifacts.get_or_decode`.
    """
    known = (envs.cache_dir(), *key)
    # Where it has to be on disk, having it in this process is not enough.
    if known not in _BUILT or artifacts.is_required():
        _BUILT[known] = artifacts.get_or_decode(key, ".amd", lambda: build().to_bytes(), Built.from_bytes)
    return _BUILT[known]


_BUILT: dict[tuple[Any, ...], Built] = {}
_FACTS = ("kernel", "isa", "dynamic_lds", "source", "compiler", "argument_names")
