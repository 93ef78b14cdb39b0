"""Pages of the documentation's site that do not lie in docs/: files that others link to, and the public names.

Links work on the site as they do in the repository: what a page links to outside docs/ becomes a page as well, and a
link to what is not there stays as it is, so that the build fails on it. The public names are read from
docs/reference/api.md, which alone says what stands together. Standard library only: tests ask here without MkDocs.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
API = "reference/api.md"
LINES = re.MULTILINE | re.DOTALL
TOKEN = re.compile(r"(?P<code>^```.*?^```|`[^`\n]+`)|\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)", LINES)
"""A link's target, or code, in which nothing is a link."""
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml", ".sh": "sh", "": "text"}
SEARCHED_NO = "---\nsearch:\n  exclude: true\n---\n\n"


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A section of the page of public names, and the names that are explained together."""

    title: str
    text: str
    names: tuple[str, ...]

    @property
    def page(self) -> str:
        return f"reference/api/{re.sub(r'[^a-z]+', '-', self.title.lower())}.md"

    @property
    def markdown(self) -> str:
        blocks = "\n\n".join(f"::: tailrace.{name}" for name in self.names)
        # It lies one folder deeper than the page that the text is from.
        return f"# {self.title}\n\n{moved(self.text, lambda target: f'../{target}')}\n\n{blocks}\n"


def topics() -> list[Topic]:
    """Each section's list holds the names; the text before it opens their page."""
    found = []
    for section in re.split(r"^## ", (DOCS / API).read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        text, _, names = body.partition("\n- ")
        found.append(Topic(title=title, text=text.strip(), names=tuple(re.findall(r"`(\w+)`", names))))
    return found


def linked_names(markdown: str) -> str:
    """The page of public names, each of them a link to where it is explained."""
    listed = re.compile(r"^- .*(?:\n  .*)*", re.MULTILINE)
    return listed.sub(lambda match: re.sub(r"`(\w+)`", r"[`\1`][tailrace.\1]", match[0]), markdown)


def with_lists(markdown: str) -> str:
    """The same text, where a list that follows a paragraph at once is one for MkDocs too."""
    begins = re.compile(r"(?P<code>^```.*?^```)|(?P<before>^(?![-#|> ]|\d+\. )[^\n]+\n)(?=- |1\. )", LINES)
    return begins.sub(lambda match: match[0] if match["code"] else f"{match['before']}\n", markdown)


# ---- what lies outside docs/ -------------------------------------------------------------------------------


def outside() -> list[str]:
    """What pages link to that is in the repository and not in docs/: paths from its root, folders too."""
    found: set[str] = set()
    waiting = [path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")]
    while waiting:
        page = waiting.pop()
        for target in targets(page):
            if target not in found and not target.startswith(("docs/", "../")) and (ROOT / target).exists():
                found.add(target)
                waiting.append(target)
    return sorted(found)


def targets(page: str) -> Iterator[str]:
    """The paths, from the repository's root, that a page links to."""
    path = ROOT / page
    if path.is_dir():
        yield from (file.relative_to(ROOT).as_posix() for file in _files(path))
    elif path.suffix == ".md":
        for match in TOKEN.finditer(path.read_text()):
            if match["target"]:
                yield posixpath.normpath(posixpath.join(posixpath.dirname(page), match["target"]))


def shown(path: str) -> str:
    """A file or folder of the repository as a page in Markdown."""
    file = ROOT / path
    if file.suffix == ".md":
        return moved(file.read_text(), lambda target: _within(path, target))
    if file.is_dir():
        names = [found.relative_to(file).as_posix() for found in _files(file)]
        body = "\n".join(f"- [{name}]({file.name}/{name})" for name in names)
    elif file.suffix == ".ipynb":
        body = "\n\n".join(_cell(cell) for cell in json.loads(file.read_text())["cells"])
    else:
        body = f"`````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n`````"
    return f"{SEARCHED_NO}# {path}\n\n{body}\n"


def moved(markdown: str, move: Callable[[str], str]) -> str:
    """The same text with other targets."""

    def one(match: re.Match[str]) -> str:
        return match[0] if match["code"] else f"]({move(match['target'])}{match['anchor'] or ''})"

    return TOKEN.sub(one, markdown)


def _within(page: str, target: str) -> str:
    """For a page outside docs/: what lies in docs/ is named from there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return f"/{path.removeprefix('docs/')}" if path.startswith("docs/") else target


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _cell(cell: dict[str, object]) -> str:
    source = cell["source"]
    text = "".join(source) if isinstance(source, list) else str(source)
    if cell["cell_type"] == "code":
        return f"```python\n{text}\n```"
    return re.sub("^# ", "## ", text, flags=re.MULTILINE)
