"""Hugging Face ``transformers``: the indexers of ``deepseek_v32``, ``glm_moe_dsa`` and ``deepseek_v4``.

Their eager code makes [B, S, H, T] float32 scores. :func:`install` replaces the ``forward`` of the indexer classes, or
of the indexers of one model: projections and rotary embedding stay those of the model, scoring and selection are
``fp8_mqa_topk``, some rows at a time. docs/engines.md has the details.

Reads transformers 5.17 and newer. What is replaced is known by its text: a class whose code changed is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from lightning_indexer.integrations.patching import IntegrationError, distribution_version, text_of
from lightning_indexer.integrations.transformers.indexers import INDEXERS, Indexer
from lightning_indexer.integrations.transformers.keys import FORMATS

Precision = Literal["fp8", "bfloat16"]
OLDEST = (5, 17)

_LOGGER = logging.getLogger("lightning_indexer.transformers")
_NOTHING = object()


@dataclass(slots=True)
class _Patch:
    """An attribute that was set, and what its owner had of its own before."""

    owner: Any
    attribute: str
    name: str
    replacement: object
    original: object = field(default=_NOTHING)

    def apply(self) -> None:
        self.original = vars(self.owner).get(self.attribute, _NOTHING)
        setattr(self.owner, self.attribute, self.replacement)

    def revert(self) -> None:
        if self.original is _NOTHING:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)

    @property
    def in_place(self) -> bool:
        return vars(self.owner).get(self.attribute) is self.replacement


_PATCHES: list[_Patch] = []
_INSTALLED: list[Precision] = []  # none or one


def install(model: nn.Module | None = None, *, precision: Precision = "fp8") -> tuple[str, ...]:
    """Replaces scoring and selection of the indexers in this process.

    Args:
        model: its indexers alone, where they are on; None: the classes, and so every model whose indexers have no
            ``forward`` of their own. A model that accelerate has given offloading hooks has to be named.
        precision: ``"fp8"``, as the published models score: q and K rotated by a Hadamard matrix and quantised, a scale
            for each row and head of q and each key. The model's cache then holds K as fp8 bytes with the scale behind.
            ``"bfloat16"``: operands of the eager code, whose products are summed in another order. Models of another
            dtype are rounded to bfloat16 for it.

    Returns:
        The full names that are replaced. A second call adds the indexers of another model, and changes no other.

    Raises:
        IntegrationError: transformers is not installed or older than 5.17, an indexer's code is not the known one, the
            model has no indexer, or another precision is installed. Nothing is replaced.
        TypeError, ValueError: not a module; an unknown precision.
    """
    if precision not in FORMATS:
        raise ValueError(f"precision: got {precision!r}, expected one of {', '.join(FORMATS)}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module or None")
    if _INSTALLED and _INSTALLED[0] != precision:
        raise IntegrationError(
            f"transformers: {_INSTALLED[0]} is installed, {precision} was asked for: uninstall first"
        )
    version = _checked_version()
    patches = _patches_of_classes(version, precision) if model is None else _patches_of(model, version, precision)
    known = {(id(patch.owner), patch.attribute) for patch in _PATCHES}
    new = [patch for patch in patches if (id(patch.owner), patch.attribute) not in known]
    for patch in new:
        patch.apply()
    _PATCHES.extend(new)
    _INSTALLED[:] = [precision]
    if new:
        names = ", ".join(dict.fromkeys(patch.name for patch in new))
        _LOGGER.info("transformers %s: lightning-indexer replaced %s, %s", version, names, precision)
    return replaced()


def uninstall() -> tuple[str, ...]:
    """Puts back what :func:`install` found, and returns the names. Caches filled meanwhile are of no further use.

    Raises:
        IntegrationError: nothing is installed, or another party has replaced a ``forward`` since; nothing is restored.
    """
    if not _PATCHES:
        raise IntegrationError("transformers: nothing to uninstall, lightning-indexer is not installed there")
    for patch in _PATCHES:
        if not patch.in_place:
            raise IntegrationError(
                f"transformers: {patch.name} was replaced by another party since lightning-indexer was installed; "
                "nothing was changed"
            )
    names = replaced()
    for patch in reversed(_PATCHES):
        patch.revert()
    _PATCHES.clear()
    _INSTALLED.clear()
    return names


def replaced() -> tuple[str, ...]:
    """Full names of what is replaced now."""
    return tuple(patch.name for patch in _PATCHES)


def _checked_version() -> str:
    if importlib.util.find_spec("transformers") is None:
        raise IntegrationError("transformers is not installed here: nothing was replaced")
    version = distribution_version("transformers")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise IntegrationError(f"transformers {version} is older than 5.17, the first with these indexers")
    return version


def _patches_of_classes(version: str, precision: Precision) -> list[_Patch]:
    patches = []
    for indexer in INDEXERS:
        try:
            owner = getattr(importlib.import_module(indexer.module), indexer.name)
        except (ImportError, AttributeError) as error:
            raise IntegrationError(
                f"transformers {version} has no {indexer.module}.{indexer.name} ({error}); nothing was replaced"
            ) from error
        _check(indexer, owner, version)
        patches.append(
            _Patch(owner, "forward", f"{indexer.module}.{indexer.name}.forward", _forward(indexer, precision))
        )
    return patches


def _patches_of(model: nn.Module, version: str, precision: Precision) -> list[_Patch]:
    known = {(indexer.module, indexer.name): indexer for indexer in INDEXERS}
    patches = []
    for name, module in model.named_modules():
        indexer = known.get((type(module).__module__, type(module).__name__))
        if indexer is None:
            continue
        _check(indexer, type(module), version)
        # accelerate keeps the forward that its hooks wrap under this name.
        attribute = "_old_forward" if "_old_forward" in vars(module) else "forward"
        replacement = types.MethodType(_forward(indexer, precision), module)
        patches.append(_Patch(module, attribute, f"{name}.{attribute}", replacement))
    if not patches:
        names = ", ".join(indexer.name for indexer in INDEXERS)
        raise IntegrationError(f"transformers: {type(model).__name__} has none of {names}; nothing was replaced")
    return patches


def _forward(indexer: Indexer, precision: Precision) -> Callable[..., Any]:
    return indexer.make(FORMATS[precision])


def _check(indexer: Indexer, owner: type, version: str) -> None:
    """The class has the code that ``indexer`` replaces."""
    for name, known in indexer.texts.items():
        method = _original(owner, name)
        found = text_of(method)
        if found != known:
            raise IntegrationError(
                f"transformers {version}: {indexer.module}.{indexer.name}.{name} has changed since 5.17 (its text is "
                f"{found}, expected {known}): this version has another indexer; nothing was replaced"
            )


def _original(owner: type, path: str) -> Callable[..., Any]:
    """A method of the class; or of its module, a function or, behind a dot, a method of another class. As it was before
    :func:`install`.

    Raises:
        IntegrationError: there is none.
    """
    holder: Any = owner
    if path not in vars(owner):
        holder = importlib.import_module(owner.__module__)
        if "." in path:
            other, path = path.split(".")
            holder = getattr(holder, other, None)
    method: Callable[..., Any] | None = getattr(holder, "__dict__", {}).get(path)
    if method is None:
        raise IntegrationError(f"{owner.__module__} has no {path}: this version has another indexer")
    for patch in _PATCHES:
        if patch.owner is holder and patch.attribute == path and patch.original is not _NOTHING:
            return patch.original  # type: ignore[return-value]
    return method
