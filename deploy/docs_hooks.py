"""What mkdocs.yml cannot say itself: the repository's address, links out of docs/, pages that other branches bring.

mkdocs calls these functions by their names (https://www.mkdocs.org/dev-guide/plugins/#events).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
LINK: Final = re.compile(r"(\]\()(\.\.?/[^()\s#]+)(#[^()\s]*)?(\))")
TOPICS: Final = "<!-- topics -->"
"""Where a page has the README's generated table of topics."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the repository's address, and drop entries of the navigation that have no page."""
    config.repo_url = address()
    config.edit_uri = f"{address()}/edit/HEAD/docs/"
    config.nav = present(config.nav or [], Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside of docs/ lead to the repository; the table of topics is put in."""
    del files
    folder = Path(page.file.abs_src_path or config.docs_dir).parent
    linked = LINK.sub(lambda found: _absolute(found, folder, Path(config.docs_dir)), markdown)
    return linked.replace(TOPICS, topics() if TOPICS in linked else "")


def address() -> str:
    """As the project's metadata has it."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    return found


def topics() -> str:
    """The table of topics of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("<!-- topics:begin")[2].partition("\n")[2].partition("<!-- topics:end")[0]


def present(entries: list[Any], docs: Path) -> list[Any]:
    """The navigation without pages that do not exist, and without sections that are empty then."""
    kept: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            kept += [entry] if (docs / entry).exists() else []
            continue
        ((title, below),) = entry.items()
        inner = present(below if isinstance(below, list) else [below], docs)
        kept += [{title: inner}] if inner else []
    return kept


def _absolute(found: re.Match[str], folder: Path, docs: Path) -> str:
    opening, path, anchor, closing = found.groups()
    target = (folder / path).resolve()
    if target.is_relative_to(docs) or not target.is_relative_to(ROOT):
        return found.group()
    kind = "tree" if target.is_dir() else "blob"
    return f"{opening}{address()}/{kind}/HEAD/{target.relative_to(ROOT)}{anchor or ''}{closing}"
