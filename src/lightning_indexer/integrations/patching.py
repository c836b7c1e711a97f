"""Replacing a function of another project: checked before anything changes, all or nothing, and taken back so too.

A *seam* is a function that an engine looks up by name each time it scores a prefill chunk. Modules that have imported
it hold their own name for it, so every loaded module with that function is a *site* to patch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import io
import logging
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


class IntegrationError(RuntimeError):
    """An engine is not there, or not as expected. Nothing has been changed."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A function to replace.

    Attributes:
        modules: where it must be found under its name; the first one decides which function it is.
        attribute: its name.
        parameters: the names of its parameters, in order.
        make: from the function that was there, the one to put in its place.
        more: it may have more parameters after those: what ``make`` gives hands calls with them on.
        owner: the class of the first module that it belongs to; "": it is the modules' own.
        alone: other modules that hold the function keep it, or get it by another seam.
    """

    modules: tuple[str, ...]
    attribute: str
    parameters: tuple[str, ...]
    make: Callable[[Function], Function]
    more: bool = False
    owner: str = ""
    alone: bool = False

    def fits(self, found: tuple[str, ...] | None) -> bool:
        """True for a function with these parameters; None, where they cannot be read, is no reason against ``more``."""
        if found is None:
            return self.more
        return (found[: len(self.parameters)] if self.more else found) == self.parameters


@dataclass(slots=True)
class _Site:
    module: ModuleType | type
    attribute: str
    original: Function
    replacement: Function

    def __str__(self) -> str:
        above = f"{self.module.__module__}." if isinstance(self.module, type) else ""
        return f"{above}{self.module.__name__}.{self.attribute}"

    @property
    def current(self) -> object:
        return vars(self.module).get(self.attribute)


@dataclass(slots=True)
class Integration:
    """What one engine's adapter has replaced.

    Attributes:
        engine: its name in messages.
        package: whose loaded modules are searched for further sites.
        logger: says once what was replaced.
    """

    engine: str
    package: str
    logger: logging.Logger
    _sites: list[_Site] = field(default_factory=list)

    def install(self, seams: Sequence[Seam], version: str) -> tuple[str, ...]:
        """Replaces every seam, or none.

        A second call changes nothing. ``version`` goes into messages.

        Returns:
            The full names that are replaced now.

        Raises:
            IntegrationError: a module, a function or a signature is not as expected.
        """
        if self._sites:
            self._check_in_place()
            self.logger.info("%s: already installed, nothing to do: %s", self.engine, ", ".join(self.replaced))
            return self.replaced
        sites: list[_Site] = []
        for seam in seams:
            # Two seams may be one function under two modules' names; two modules may have one name.
            known = {(id(site.module), site.attribute) for site in sites}
            sites += [site for site in self._find(seam, version) if (id(site.module), site.attribute) not in known]
        _set([(site, site.replacement) for site in sites])
        self._sites = sites
        self.logger.info("%s %s: lightning-indexer replaced %s", self.engine, version, ", ".join(self.replaced))
        return self.replaced

    def uninstall(self) -> tuple[str, ...]:
        """Puts back what :meth:`install` found.

        Returns:
            The full names that were restored.

        Raises:
            IntegrationError: nothing is installed, or someone else has replaced a function since; nothing is restored.
        """
        if not self._sites:
            raise IntegrationError(f"{self.engine}: nothing to uninstall, lightning-indexer is not installed there")
        self._check_in_place()
        # Modules that were imported since took the replacement with them.
        sites = list(self._sites)
        for site in self._sites:
            sites += [
                _Site(module, site.attribute, site.original, site.replacement)
                for module in self._modules_with(site.attribute, site.replacement)
                if all(known.module is not module or known.attribute != site.attribute for known in sites)
            ]
        _set([(site, site.original) for site in sites])
        self._sites = []
        names = tuple(map(str, sites))
        self.logger.info("%s: restored %s", self.engine, ", ".join(names))
        return names

    @property
    def replaced(self) -> tuple[str, ...]:
        """Full names of the functions that are replaced now."""
        return tuple(map(str, self._sites))

    def _find(self, seam: Seam, version: str) -> list[_Site]:
        original: Function | None = None
        modules: list[ModuleType | type] = []
        for name in seam.modules:
            where = f"{self.engine} {version}: {name}"
            try:
                module: ModuleType | type = importlib.import_module(name)
            except ImportError as error:
                raise IntegrationError(f"{where} cannot be imported ({error}); nothing was replaced") from error
            if seam.owner:
                module, where = getattr(module, seam.owner, module), f"{where}.{seam.owner}"
            found = vars(module).get(seam.attribute)
            if not callable(found):
                raise IntegrationError(
                    f"{where} has no function {seam.attribute}: this version has no such seam; nothing was replaced"
                )
            if original is not None and found is not original:
                raise IntegrationError(
                    f"{where}.{seam.attribute} is not the function of {seam.modules[0]}: something else has replaced "
                    "it; nothing was replaced"
                )
            original = found
            modules.append(module)
        assert original is not None
        actual = parameters(original)
        if not seam.fits(actual):
            takes = "parameters that cannot be read" if actual is None else f"({', '.join(actual)})"
            raise IntegrationError(
                f"{self.engine} {version}: {seam.modules[0]}.{seam.attribute} takes {takes}, expected "
                f"({', '.join(seam.parameters)}): this version has another seam; nothing was replaced"
            )
        if not seam.alone:
            modules += [m for m in self._modules_with(seam.attribute, original) if all(m is not n for n in modules)]
        replacement = functools.wraps(original)(seam.make(original))
        return [_Site(module, seam.attribute, original, replacement) for module in modules]

    def _modules_with(self, attribute: str, function: object) -> list[ModuleType]:
        """Loaded modules of the engine that hold ``function`` under that name; nothing is imported for it."""
        prefix = self.package + "."
        loaded = [m for name, m in sys.modules.items() if name.startswith(prefix) and isinstance(m, ModuleType)]
        # One module may be loaded under two names.
        once = {id(module): module for module in loaded}.values()
        return [module for module in once if vars(module).get(attribute) is function]

    def _check_in_place(self) -> None:
        for site in self._sites:
            if site.current is not site.replacement:
                raise IntegrationError(
                    f"{self.engine}: {site} was replaced by {_describe(site.current)} since lightning-indexer was "
                    "installed; nothing was changed"
                )


def _set(changes: Sequence[tuple[_Site, Function]]) -> None:
    """Makes every change; where one fails, takes back those made."""
    done: list[tuple[_Site, object]] = []
    try:
        for site, value in changes:
            before = site.current
            setattr(site.module, site.attribute, value)
            done.append((site, before))
    except BaseException:
        for site, before in reversed(done):
            setattr(site.module, site.attribute, before)
        raise


def parameters(function: Function) -> tuple[str, ...] | None:
    """The names of a function's parameters; of a compiled one, from its documentation; None where neither tells."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        pass
    # pybind11 writes `name(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], …) -> torch.Tensor`.
    match = re.match(r"\w+\((.*)\)\s*->", (function.__doc__ or "").strip())
    if match is None:
        return None
    names = re.findall(r"(?:^|, )(\w+): ", match[1])
    return tuple(names) or None


_IGNORED = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
)


def text_of(function: Callable[..., Any]) -> str:
    """A digest of a function's source without comments, layout and docstring; of any version of Python the same.

    Raises:
        IntegrationError: there is no source.
    """
    try:
        lines, _ = inspect.getsourcelines(inspect.unwrap(function))
    except (OSError, TypeError) as error:
        raise IntegrationError(f"{function!r} has no source to compare ({error})") from error
    return digest_of("".join(lines))


def digest_of(source: str) -> str:
    """That of a function's source."""
    tokens = list(_tokens(inspect.cleandoc("\n" + source)))
    # A docstring stands behind the colon that ends the signature.
    body = [text for before, text in zip(["", *tokens], tokens, strict=False) if not _is_docstring(before, text)]
    return hashlib.sha256(" ".join(body).encode()).hexdigest()[:16]


def _tokens(source: str) -> Iterator[str]:
    """The tokens that count. An f-string is one, as it is before Python 3.12, which takes it apart."""
    lines, depth, begin = source.splitlines(keepends=True), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name in ("FSTRING_START", "TSTRING_START"):
            if depth == 0:
                begin = token.start
            depth += 1
        elif name in ("FSTRING_END", "TSTRING_END"):
            depth -= 1
            if depth == 0:
                (first, left), (last, right) = begin, token.end
                inside = [*lines[first - 1 : last - 1], lines[last - 1][:right]]
                yield "".join(inside)[left:]
        elif depth == 0 and token.type not in _IGNORED:
            yield token.string


def _is_docstring(before: str, text: str) -> bool:
    return before == ":" and text.lstrip("rR").startswith('"""')


def distribution_version(*names: str) -> str:
    """The version of the first of these distributions that is installed, or ``of unknown version``."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _describe(value: object) -> str:
    if callable(value):
        return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', repr(value))}"
    return repr(value)
