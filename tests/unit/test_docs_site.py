"""The site leaves nothing out and links to nothing that is not there. MkDocs is not asked: it may not be installed."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tailrace
from tools import docs_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SPARKS = {"CdcSource", "register", "tables_at"}
"""Public, and imported by name alone."""
LINES_MAX = 60


class Loader(yaml.SafeLoader):
    """MkDocs makes Python objects of some tags; here they are nothing."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Loader)


def in_nav(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from in_nav(item)


PAGES = list(in_nav(SITE["nav"]))


def test_every_page_stands_in_the_navigation_once() -> None:
    inside = [page for page in PAGES if not page.startswith("../")]
    assert sorted(inside) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert all((DOCS / page).exists() for page in PAGES)


def test_the_index_lists_the_pages_in_the_order_of_the_navigation() -> None:
    lists = (DOCS / "README.md").read_text().partition("\n## ")[2]
    listed = [match["target"] for match in docs_pages.TOKEN.finditer(lists) if match["target"]]
    inside = [page for page in PAGES if not page.startswith("../") and page != "README.md"]
    assert [target for target in listed if not target.startswith("../")] == inside


def test_every_public_name_is_explained_once() -> None:
    names = [name for topic in docs_pages.topics() for name in topic.names]
    assert sorted(names) == sorted({*tailrace.__all__, *SPARKS})


def test_a_public_name_has_a_page_that_its_overview_links_to() -> None:
    sinks = next(topic for topic in docs_pages.topics() if topic.title == "Sinks")
    assert sinks.page == "reference/api/sinks.md"
    assert "\n::: tailrace.JsonlSink\n" in sinks.markdown
    assert "](../../guides/testing.md)" in sinks.markdown
    overview = docs_pages.linked_names((DOCS / docs_pages.API).read_text())
    assert all(f"[`{name}`][tailrace.{name}]" in overview for name in sinks.names)


WRITTEN = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md"]


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in WRITTEN])
def test_no_page_links_to_a_file_that_is_not_there(page: str) -> None:
    for target in docs_pages.targets(page):
        assert not target.startswith("/"), f"{target} is a link on the site alone"
        assert (ROOT / target).exists(), f"{page} links to {target}"


def test_what_pages_link_to_outside_docs_is_on_the_site() -> None:
    outside = docs_pages.outside()
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "examples/masking.py"} <= set(outside)
    assert "examples/declarative/run.py" in outside, "a file of a folder that is linked to"
    for path in outside:
        assert docs_pages.shown(path)


def test_a_page_outside_docs_leads_back_into_docs() -> None:
    readme = docs_pages.shown("examples/README.md")
    assert "](/guides/examples.md)" in readme
    assert "](lake_mirror.py)" in readme
    notebook = docs_pages.shown("examples/changes.ipynb")
    assert "```python\n" in notebook
    assert notebook.count("\n# ") == 1


def test_nothing_in_code_is_a_link_or_a_list() -> None:
    text = "see `a[0](b.md)` and [c](d.md#e)\n\n```python\nf[g](h.md)\ncall(\n- 1)\n```\n"
    assert docs_pages.moved(text, lambda target: f"../{target}") == text.replace("(d.md#e)", "(../d.md#e)")
    assert docs_pages.with_lists(text) == text


def test_a_list_may_follow_a_paragraph_at_once() -> None:
    assert docs_pages.with_lists("For this:\n- one\n  two\n- three\n") == "For this:\n\n- one\n  two\n- three\n"
    assert docs_pages.with_lists("- one\n  two\n- three\n") == "- one\n  two\n- three\n"


def test_the_site_fetches_nothing() -> None:
    assert SITE["theme"]["font"] is False
    assert {name for plugin in SITE["plugins"] for name in ([plugin] if isinstance(plugin, str) else plugin)} == {
        "search", "mkdocstrings",
    }  # fmt: skip
    assert not any("://" in style for style in SITE["extra_css"])
    assert "extra_javascript" not in SITE
    assert posixpath.commonpath([SITE["site_dir"], "build"]) == "build", "what `make clean` removes"


def test_the_readme_is_one_screen_that_begins_with_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= LINES_MAX
    assert readme.partition("```sh\n")[2].partition("```")[0] == "make demo\nmake test\n"
