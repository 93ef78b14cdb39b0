"""What MkDocs is told beside mkdocs.yml: pages for files outside docs/, and the reference of the public names.

A public name that has no place in docs/reference/api.md is a warning, and the build is strict.
"""

from __future__ import annotations

import logging
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import tailrace
from tools import docs_pages

log = logging.getLogger("mkdocs.hooks.tailrace")  # strict counts the warnings of `mkdocs`


class Outside(File):  # type: ignore[misc] # no type where MkDocs is not installed
    """A file or folder of the repository that is not in docs/, as a page whatever its kind."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages. By their paths from docs/, `../…`, MkDocs resolves the links to them by itself."""
    listed = _listed(config.nav)
    for path in docs_pages.outside():
        page = Outside.generated(config, f"../{path}", content=docs_pages.shown(path))
        page.dest_uri = f"repository/{path}.html"
        page.inclusion = InclusionLevel.INCLUDED if page.src_uri in listed else InclusionLevel.NOT_IN_NAV
        files.append(page)
    topics = docs_pages.topics()
    for topic in topics:
        files.append(File.generated(config, topic.page, content=topic.markdown))
    _follow(config.nav, docs_pages.API, [topic.page for topic in topics])
    for name in sorted(set(tailrace.__all__).difference(*(topic.names for topic in topics))):
        log.warning("%s says nothing of the public name `%s`", docs_pages.API, name)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lists as the repository shows them; the names in the overview link to where they are explained."""
    if page.file.src_uri == docs_pages.API:
        markdown = docs_pages.linked_names(markdown)
    return docs_pages.with_lists(markdown)


def _listed(nav: Any) -> set[str]:
    """Every page in the navigation."""
    if isinstance(nav, str):
        return {nav}
    return set().union(*map(_listed, nav.values() if isinstance(nav, dict) else nav))


def _follow(nav: Any, page: str, pages: list[str]) -> None:
    """Put pages into the navigation, behind one that is there."""
    if isinstance(nav, list):
        if page in nav:
            nav.extend(pages)
        for item in nav:
            _follow(item, page, pages)
    elif isinstance(nav, dict):
        for item in nav.values():
            _follow(item, page, pages)
