"""Hooks of mkdocs: pages from files that stand outside of docs/, and links between all of them.

Pages keep links that work where the repository is read: `../packages/cdna-sim/README.md`, `docs/semantics.md`. On the
site a link to a file that is a page leads to that page, any other file to the repository.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository that are pages, by their place in docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "packages/cdna-sim/README.md": "cdna_sim/index.md",
    "packages/cdna-sim/docs/model.md": "cdna_sim/model.md",
}
GLOSSARY = "glossary.md"
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    files.append(File.generated(config, GLOSSARY, content=glossary()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Sets links to what they mean on the site."""
    place = page.file.src_uri
    source = next((path for path, uri in OUTSIDE.items() if uri == place), f"docs/{place}")
    if place == GLOSSARY:
        source = "CONTRIBUTING.md"
    return LINK.sub(lambda match: resolved(match[1], source, place, config["repo_url"]) + (match[2] or ""), markdown)


def resolved(link: str, source: str, place: str, repository: str) -> str:
    """A link of the file ``source``, as the page at ``place`` needs it."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target in OUTSIDE:
        page = OUTSIDE[target]
    elif target.startswith("docs/") and (ROOT / target).is_file():
        page = target.removeprefix("docs/")
    elif (ROOT / target).exists():
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{repository}/{kind}/main/{target}"
    else:
        return link  # mkdocs says that it is broken
    return os.path.relpath(page, posixpath.dirname(place) or ".")


def glossary() -> str:
    """The glossary, which stands in CONTRIBUTING.md beside the rule that asks for it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"^## Glossary\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    return f"# Glossary\n{section[1]}"
