"""Triton and Gluon kernels to AMD code objects, without a GPU.

Triton's own launcher specialises a kernel on its operands: arguments equal to 1 become constants, addresses and sizes
divisible by 16 are marked, and so are tensors below 2 GiB, which buffer instructions can address. :func:`specialise`
asks Triton for the same facts, so that what is compiled here is what the launcher would run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_indexer import packages
from lightning_indexer.amd import cdna
from lightning_indexer.amd.built import Built, get_or_build
from lightning_indexer.amd.repair import VERSION, repair
from lightning_indexer.arch import gpu_arch
from lightning_indexer.artifacts import CompileError


@dataclass(frozen=True, slots=True)
class Specialised:
    """What ``triton.compile`` is told of a kernel's arguments.

    Attributes:
        signature: type of each parameter; ``constexpr`` where the value is compiled in.
        constexprs: those values, by index path.
        attrs: what is known of the others, by index path.
    """

    signature: dict[str, str]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]


def missing() -> str | None:
    """None, or what to install, with the command."""
    if not packages.installed("triton"):
        return "Triton is not installed: pip install 'lightning-indexer[triton]'"
    return None


def specialise(jit_fn: Any, arguments: Mapping[str, Any], arch: str, options: Mapping[str, Any]) -> Specialised:
    """What Triton's launcher would make of a call with these arguments on ``arch``.

    Args:
        jit_fn: the ``@triton.jit`` or ``@gluon.jit`` function.
        arguments: every parameter by name; tensors may be on any device, ``meta`` included.
        arch: e.g. ``gfx942``.
        options: the compiler's, e.g. ``num_warps``.
    """
    _refuse_interpreted(jit_fn)
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(_target(arch))
    bind = create_function_from_signature(jit_fn.signature, jit_fn.params, backend)
    bound, specialisation, _ = bind(**arguments, **options)
    _, signature, constexprs, attrs = jit_fn._pack_args(backend, dict(options), bound, specialisation, None)
    return Specialised(signature, constexprs, {path: facts for path, facts in attrs.items() if facts})


def compile_triton(
    jit_fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[Any, Any],
    attrs: Mapping[Any, Any],
    arch: str,
    options: Mapping[str, Any],
    *,
    gluon: bool = False,
) -> Built:
    """Compiles for ``arch``, from this library's disk cache where it is there.

    Triton's own cache, which nothing validates, is written but not read.

    The key: the kernel's source and that of every function it calls, the arguments below, and Triton's version.

    Args:
        jit_fn: the ``@triton.jit`` (or, with ``gluon``, ``@gluon.jit``) function.
        signature, constexprs, attrs: as in :class:`Specialised`; constexprs may go by name.
        arch: e.g. ``gfx942``.
        options: the compiler's, e.g. ``num_warps``.

    Raises:
        CompileError: Triton is missing, its interpreter replaced the kernel, or it refused the kernel.
    """
    _refuse_interpreted(jit_fn)
    import triton
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source

    source = Source(jit_fn, dict(signature), dict(constexprs), dict(attrs))
    language = "gluon" if gluon else "triton"
    compiler = f"Triton {triton.__version__}"
    variables = sorted(get_cache_invalidating_env_vars().items())
    key = (language, source.hash(), arch, repr(sorted(options.items())), repr(variables), compiler, VERSION)

    def build() -> Built:
        what = f"{jit_fn.__name__} for {arch} with {dict(constexprs)}, {dict(options)}"
        try:
            with repaired(arch), _compiling, knobs.compilation.scope():
                knobs.compilation.always_compile = True
                kernel = triton.compile(source, target=_target(arch), options=dict(options))
        except Exception as error:  # Triton's passes raise types of their own, and RuntimeError
            raise CompileError(f"{what}: {error}") from error
        metadata = kernel.metadata
        for scratch in ("global_scratch_size", "profile_scratch_size"):
            if getattr(metadata, scratch, 0):
                raise CompileError(f"{what}: needs {getattr(metadata, scratch)} bytes of Triton's {scratch[:-5]}")
        names = tuple(name for name, kind in signature.items() if kind != "constexpr")
        # The descriptor says 0 LDS; Triton's launcher asks for the real size.
        return Built(
            cdna.code_object(kernel.asm["hsaco"]), metadata.name, kernel.asm["amdgcn"], metadata.shared,
            "gluon" if gluon else "triton", compiler, names,
        )  # fmt: skip

    return get_or_build(key, build)


@contextlib.contextmanager
def repaired(arch: str) -> Iterator[None]:
    """Inside, what Triton compiles for ``arch`` gets the wait states that LLVM leaves out, see :mod:`repair`.

    Triton's hook for this is one for the process: whatever else is compiled meanwhile is repaired too, and someone
    else's hook is kept. Does nothing for archs that need nothing.
    """
    if not gpu_arch(arch).repaired:
        yield
        return
    from triton import knobs

    global _depth, _others
    with _lock:
        if _depth == 0:
            # Ours can be there without us: someone who saves and restores it may have done so meanwhile.
            found = knobs.runtime.add_stages_inspection_hook
            _others = None if found is _add_repair else found
            knobs.runtime.add_stages_inspection_hook = _add_repair
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and knobs.runtime.add_stages_inspection_hook is _add_repair:
                knobs.runtime.add_stages_inspection_hook = _others


_lock, _depth = threading.Lock(), 0
_compiling = threading.Lock()  # the scope of a knob is the process's: scopes must not overlap
_others: Callable[..., Any] | None = None


def _add_repair(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook: with a pipeline it changes its stages; without, it gives what they add to keys of caches."""
    given = _others(*arguments) if _others is not None else None
    if not arguments:
        key, digest = given or ("", "")
        return f"{key} lightning-indexer {VERSION}", f"{digest}1"
    _, stages, options, *_ = arguments
    if (assemble := stages.get("amdgcn")) is not None:
        stages["amdgcn"] = lambda src, metadata: repair(assemble(src, metadata), options.arch)
    return None


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def _refuse_interpreted(jit_fn: Any) -> None:
    if (reason := missing() or cdna.missing()) is not None:
        raise CompileError(reason)
    from triton.language import standard

    # Gluon's decorator compiles at all times; the functions of Triton that its kernels call are then interpreted.
    if not hasattr(jit_fn, "cache_key") or not hasattr(standard.sum, "cache_key"):
        raise CompileError(
            f"{getattr(jit_fn, '__name__', jit_fn)} runs in Triton's interpreter and cannot be compiled: "
            "TRITON_INTERPRET was set when it, or Triton, was imported"
        )
