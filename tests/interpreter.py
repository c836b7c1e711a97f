"""Triton's interpreter without work whose result it throws away: what kernels compute and what is checked is the same.

- Overflow checks of integers: evaluated in full, then dropped, where ``debug`` is off, as it is by default.
- The language is patched anew at every call of a device function, which finds it patched already.
- The NumPy type of a Triton type is looked up in a table that is built for each look-up.

Where another Triton has other names, it stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses


def speed_up() -> None:
    """Changes the interpreter of this process; nothing where there is no Triton."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    with contextlib.suppress(AttributeError, TypeError):
        _drop_unused_checks(interpreter)
    with contextlib.suppress(AttributeError):
        _look_types_up_once(interpreter)
    with contextlib.suppress(AttributeError):
        _patch_once(interpreter)


def _drop_unused_checks(interpreter) -> None:
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _look_types_up_once(interpreter) -> None:
    look_up, known = interpreter._get_np_dtype, {}

    def get(triton_type):
        name = str(triton_type)
        if name not in known:
            known[name] = look_up(triton_type)
        return known[name]

    interpreter._get_np_dtype = get


def _patch_once(interpreter) -> None:
    """Inside of a launch, a function whose modules were patched by it needs no patch."""
    patch, scope, run = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.GridExecutor.__call__
    launches: list[set[int]] = []  # modules that are patched, by launch

    def patch_lang(function):
        modules = {id(module) for module in (interpreter.tl, interpreter.tl.core) if module in _modules(function)}
        if launches and modules <= launches[-1]:
            return scope()
        if launches:
            launches[-1].update(modules)
        return patch(function)

    def call(self, *arguments, **options):
        launches.append(set())
        try:
            return run(self, *arguments, **options)
        finally:
            launches.pop()

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call


_MODULES: dict[int, tuple[object, tuple[object, ...]]] = {}


def _modules(function) -> tuple[object, ...]:
    from types import ModuleType

    if id(function) not in _MODULES:
        found = tuple(value for value in function.__globals__.values() if isinstance(value, ModuleType))
        _MODULES[id(function)] = function, found  # held, so that its id stays its own
    return _MODULES[id(function)][1]
