"""Count what makes the sources and the docs hard to read, and hold each count to a limit that only goes down.

`python -m tests.support.tidy` prints every offender with its file and line; names of limits or words after it
choose some. `--lower` rewrites the limits that are higher than they need to be; nothing here raises one. The sources
are parsed and never imported.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
LIMITS_FILE = ROOT / "tests" / "unit" / "tidy_limits.toml"
SENTENCE_WORDS_MAX, FIRST_SENTENCE_WORDS_MAX = 30, 15
MODULE_LINES_MAX, MODULE_LINES_MIN, FUNCTION_LINES_MAX, LINE_CHARACTERS_MAX = 500, 60, 70, 120
UNNAMED = frozenset({"__init__", "__main__"})
"""Files whose names Python prescribes."""
BACKENDS = {
    "tables": frozenset({"delta", "iceberg"}),
    "capture": frozenset({"postgres", "mysql", "mariadb", "sqlserver", "memory"}),
}
"""Sibling packages that implement one port: their files have the same names on purpose."""
NOUNS_IN_ING = frozenset({"staging", "string", "setting", "mapping", "encoding", "ring", "thing"})
QUESTIONS = frozenset({"whether", "what", "of", "where", "which", "who"})
NO_LETTERS_BEFORE = frozenset({"dead", "capital", "small", "upper", "lower", "upper-case", "lower-case", "ascii"})
"""Before `letters`, these make it mean characters, or the dead letters that the glossary knows."""
_WORDS = {
    "whoever": "whoever",
    "anew": "anew",
    "comings": "comings",
    "aside": "aside",
    "beside": "beside",
    "told": "told",
    "letters": "letters",
    "wish": "wish(?:es|ed)?",
    "is none": r"is\s+none",
    "stretch": "stretch(?:es)?",
    "by itself": r"by\s+itself",
    "betook": "betook",
    "thereof": "thereof",
    "hereby": "hereby",
    "made anew": r"made\s+anew",
    "what became of": r"what\s+became\s+of",
    "let go": r"let\s+go",
    "sees to": r"sees\s+to",
}
WORDS = {name: re.compile(rf"(?<![\w-]){pattern}(?![\w-])", re.IGNORECASE) for name, pattern in _WORDS.items()}
"""Words and phrases that say less than plain ones, by the name of their limit."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Prose or code from one place."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Docstring(Piece):
    """The docstring of a module, a class, a function, or an attribute."""

    of_attribute: bool


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A class or a function, wherever it stands."""

    name: str
    line: int
    lines: int
    is_class: bool


@dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed file of the package."""

    path: str
    text: str
    definitions: tuple[Definition, ...]
    docstrings: tuple[Docstring, ...]
    comments: tuple[Piece, ...]
    strings: tuple[Piece, ...]

    @property
    def name(self) -> str:
        return ".".join(PurePosixPath(self.path).with_suffix("").parts).removeprefix("src.")

    @property
    def stem(self) -> str:
        return PurePosixPath(self.path).stem

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@dataclass(frozen=True, kw_only=True)
class Offender:
    """One thing that counts, and every place where it stands."""

    places: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{', '.join(self.places)}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the file of limits says."""

    counts: Mapping[str, int]
    words: Mapping[str, int]
    short_modules: Mapping[str, str]
    """Modules that may be short, with the reason."""

    @property
    def every(self) -> dict[str, int]:
        return {**self.counts, **self.words}


# --- reading ------------------------------------------------------------------------------------------------


_STRING_OR_COMMENT = re.compile(
    r"""(?P<prefix>[rRbBfFuU]{0,2})(?P<string>\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''|"""
    r"""\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)
"""A tokenizer for these two: the standard one takes seconds for the whole package."""


def parse(path: str, text: str) -> Module:
    """Parse one file of the package."""
    tree = ast.parse(text)
    statements = tuple(_statements(tree.body))
    docstrings = tuple(
        Docstring(path=path, line=node.lineno, text=str(node.value), of_attribute=of_attribute)
        for owner in (tree, *statements)
        for node, of_attribute in _docstring_nodes(owner)
    )
    starts = {each.line for each in docstrings}
    strings, comments, line, end = list[Piece](), list[Piece](), 1, 0
    for match in _STRING_OR_COMMENT.finditer(text):
        line, end = line + text.count("\n", end, match.start()), match.start()
        if match["comment"]:
            comments.append(Piece(path=path, line=line, text=match["comment"]))
        elif line not in starts:
            said = _EXPRESSION.sub("", match["string"]) if "f" in match["prefix"].lower() else match["string"]
            strings.append(Piece(path=path, line=line, text=said))
    definitions = tuple(
        Definition(
            name=node.name,
            line=node.lineno,
            lines=(node.end_lineno or node.lineno) - node.lineno + 1,
            is_class=isinstance(node, ast.ClassDef),
        )
        for node in statements
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return Module(
        path=path,
        text=text,
        definitions=definitions,
        docstrings=docstrings,
        comments=tuple(comments),
        strings=tuple(strings),
    )


_EXPRESSION = re.compile(r"\{[^{}]*\}")
"""In a string that is formatted."""
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _statements(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every statement, however deep; expressions hold none."""
    for node in block:
        yield node
        for name in _BLOCKS:
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from _statements(inner)


def _docstring_nodes(owner: ast.AST) -> Iterator[tuple[ast.Constant, bool]]:
    body = getattr(owner, "body", None)
    if not isinstance(body, list):
        return
    owns_docstring = isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    for before, statement in zip([None, *body], body, strict=False):
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            continue
        if not isinstance(statement.value.value, str):
            continue
        if before is None and owns_docstring:
            yield statement.value, False
        elif isinstance(before, ast.Assign | ast.AnnAssign):
            yield statement.value, True


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    paths = sorted((ROOT / "src" / "tailrace").rglob("*.py"))
    return tuple(parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


@functools.cache
def prose() -> tuple[Piece, ...]:
    """The prose of every page."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return tuple(
        piece
        for page in pages
        for piece in paragraphs(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"))
    )


_FENCE = re.compile(r"\s*(```|~~~)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_INDENTED = re.compile(r" {4,}\S|>>> ")


def paragraphs(path: str, text: str, *, first_line: int = 1) -> list[Piece]:
    """The paragraphs, list items, headings and table cells of a text, without its code."""
    found, lines, begun, fenced = list[Piece](), list[str](), first_line, False

    def end() -> None:
        if lines:
            found.append(Piece(path=path, line=begun, text="\n".join(lines)))
            lines.clear()

    for number, line in enumerate(text.splitlines(), start=first_line):
        if _FENCE.match(line):
            fenced = not fenced
            end()
        elif fenced:
            continue
        elif not line.strip():
            end()
        elif line.lstrip().startswith("|"):
            end()
            cells = line.strip().strip("|").split("|")
            found += [Piece(path=path, line=number, text=cell.strip()) for cell in cells if cell.strip(" -:")]
        else:
            if line.startswith("#") or _ITEM.match(line):
                end()
            if not lines:
                begun = number
            lines.append(line.strip().lstrip("#> "))
            if line.startswith("#"):
                end()
    end()
    return found


def docstring_paragraphs(docstring: Docstring) -> list[Piece]:
    """The paragraphs of a docstring, without its indented examples."""
    first, *rest = docstring.text.split("\n")
    indents = [len(line) - len(line.lstrip()) for line in rest if line.strip()]
    indent = min(indents, default=0)
    lines = [first, *(line[indent:] for line in rest)]
    return paragraphs(
        docstring.path, "\n".join("" if _INDENTED.match(line) else line for line in lines), first_line=docstring.line
    )


_CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_TAG = re.compile(r"<[^<>\n]+>")


def plain(text: str) -> str:
    """The text as it is read: a span of code is one word, a link its words. Lines stay where they are."""
    text = _CODE.sub(lambda code: "CODE" + "\n" * code[0].count("\n"), text)
    return _TAG.sub("", _LINK.sub(lambda link: link[1] + "\n" * (link[0].count("\n") - link[1].count("\n")), text))


_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]*_]*\s+(?=[\"'“‘(\[*_]*[A-Z0-9À-Ý])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|ca|no)\.$", re.IGNORECASE)


def sentences(piece: Piece) -> list[Piece]:
    """The sentences of a paragraph, each with the line that it begins in."""
    text, found, start = plain(piece.text), list[Piece](), 0
    ends = [end for end in _SENTENCE_END.finditer(text) if not _ABBREVIATION.search(text[: end.start() + 1])]
    for end in [*(end.end() for end in ends), len(text)]:
        if said := " ".join(text[start:end].split()):
            found.append(Piece(path=piece.path, line=piece.line + text.count("\n", 0, start), text=said))
        start = end
    return found


def word_count(text: str) -> int:
    """How many words a sentence has."""
    return sum(any(character.isalnum() for character in word) for word in text.split())


# --- counting -----------------------------------------------------------------------------------------------


def _at(path: str, line: int = 1) -> str:
    return f"{path}:{line}"


def _offenders(pieces: Iterable[Piece]) -> list[Offender]:
    return [Offender(places=(_at(piece.path, piece.line),), text=piece.text) for piece in pieces]


def classes_in_two_modules(found: Sequence[Module]) -> list[Offender]:
    """Names of classes, private and nested ones too, that more than one module defines."""
    places = defaultdict[str, dict[str, str]](dict)
    for module in found:
        for each in module.definitions:
            if each.is_class:
                places[each.name].setdefault(module.path, _at(module.path, each.line))
    return [
        Offender(places=tuple(where.values()), text=f"class {name}")
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def module_names_twice(found: Sequence[Module]) -> list[Offender]:
    """File names that are used more than once; sibling backends count as one place."""
    places = defaultdict[str, dict[tuple[str, ...], list[str]]](lambda: defaultdict(list))
    for module in found:
        if module.stem not in UNNAMED:
            places[module.stem][_without_backend(module.name)].append(_at(module.path))
    return [
        Offender(places=tuple(place for same in where.values() for place in same), text=f"module {stem}")
        for stem, where in sorted(places.items())
        if len(where) > 1
    ]


def _without_backend(name: str) -> tuple[str, ...]:
    *folders, stem = name.split(".")
    for before, folder in enumerate(folders[1:]):
        if folder in BACKENDS.get(folders[before], ()):
            folders[before + 1] = "*"
    return (*folders, stem)


def gerund_modules(found: Sequence[Module]) -> list[Offender]:
    """Modules named for an activity instead of a thing."""
    return [
        Offender(places=(_at(module.path),), text=f"module {module.stem}")
        for module in found
        if (last := module.stem.rpartition("_")[2]).endswith("ing") and last not in NOUNS_IN_ING
    ]


def unfinished_docstrings(found: Sequence[Module]) -> list[Offender]:
    """Docstrings that end in a comma or a semicolon."""
    return _offenders(
        Piece(path=each.path, line=each.line, text=each.text.strip().rpartition("\n")[2])
        for module in found
        for each in module.docstrings
        if each.text.rstrip().endswith((",", ";"))
    )


def question_docstrings(found: Sequence[Module]) -> list[Offender]:
    """Docstrings that begin like an indirect question instead of saying what the thing does."""
    return _offenders(
        Piece(path=each.path, line=each.line, text=each.text.strip().partition("\n")[0])
        for module in found
        for each in module.docstrings
        if (begun := re.match(r"\w+", each.text.strip())) and begun[0].lower() in QUESTIONS
    )


def long_sentences_in_docstrings(found: Sequence[Module]) -> list[Offender]:
    """Sentences of docstrings that are too long to be read once."""
    pieces = (piece for module in found for each in module.docstrings for piece in docstring_paragraphs(each))
    return long_sentences(pieces)


def long_sentences(pieces: Iterable[Piece]) -> list[Offender]:
    """Sentences that are too long to be read once."""
    every = (sentence for piece in pieces for sentence in sentences(piece))
    return _offenders(sentence for sentence in every if word_count(sentence.text) > SENTENCE_WORDS_MAX)


def long_first_sentences(found: Sequence[Module]) -> list[Offender]:
    """First sentences of the docstrings of modules, classes and functions that say more than what the thing does."""
    firsts = (
        sentences(pieces[0])[:1]
        for module in found
        for each in module.docstrings
        if not each.of_attribute and (pieces := docstring_paragraphs(each))
    )
    return _offenders(
        sentence for first in firsts for sentence in first if word_count(sentence.text) > FIRST_SENTENCE_WORDS_MAX
    )


def long_modules(found: Sequence[Module]) -> list[Offender]:
    """Modules that are too long to be known whole."""
    return [
        Offender(places=(_at(module.path),), text=f"{lines} lines")
        for module in found
        if (lines := len(module.lines)) > MODULE_LINES_MAX
    ]


def short_modules(found: Sequence[Module], allowed: Iterable[str] = ()) -> list[Offender]:
    """Modules so short that they belong into another, apart from those with a reason."""
    return [
        Offender(places=(_at(module.path),), text=f"{lines} lines")
        for module in found
        if (lines := len(module.lines)) < MODULE_LINES_MIN
        if module.stem not in UNNAMED and module.name not in set(allowed)
    ]


def long_functions(found: Sequence[Module]) -> list[Offender]:
    """Functions that do not fit on a page."""
    return [
        Offender(places=(_at(module.path, each.line),), text=f"{each.name}: {each.lines} lines")
        for module in found
        for each in module.definitions
        if not each.is_class and each.lines > FUNCTION_LINES_MAX
    ]


def format_skips(found: Sequence[Module]) -> list[Offender]:
    """Places that the formatter is kept from."""
    return _offenders(
        comment for module in found for comment in module.comments if re.match(r"# *fmt: *(?:skip|off)\b", comment.text)
    )


def long_lines(found: Sequence[Module]) -> list[Offender]:
    """Lines that are longer than any editor shows."""
    return [
        Offender(places=(_at(module.path, number),), text=f"{len(line)} characters")
        for module in found
        for number, line in enumerate(module.lines, start=1)
        if len(line) > LINE_CHARACTERS_MAX
    ]


COUNTS: Mapping[str, Callable[[Sequence[Module]], list[Offender]]] = {
    "classes-in-two-modules": classes_in_two_modules,
    "module-names-twice": module_names_twice,
    "gerund-modules": gerund_modules,
    "unfinished-docstrings": unfinished_docstrings,
    "question-docstrings": question_docstrings,
    "long-sentences-in-docstrings": long_sentences_in_docstrings,
    "long-first-sentences": long_first_sentences,
    "long-modules": long_modules,
    "long-functions": long_functions,
    "format-skips": format_skips,
    "long-lines": long_lines,
}
"""What is counted in the sources alone, by the name of the limit."""


def words(found: Sequence[Module], pages: Iterable[Piece]) -> dict[str, list[Offender]]:
    """The words of the list in docstrings, comments, texts of the sources, and pages."""
    offenders: dict[str, list[Offender]] = {name: [] for name in WORDS}
    own = (piece for module in found for piece in (*module.docstrings, *module.comments, *module.strings))
    for piece in (*own, *pages):
        if not _ANY_WORD.search(piece.text):
            continue
        text = plain(piece.text)
        for name, pattern in WORDS.items():
            for match in pattern.finditer(text):
                if name == "letters" and _before(text, match.start()) in NO_LETTERS_BEFORE:
                    continue
                offenders[name].append(_around(piece, text, match))
    return offenders


_ANY_WORD = re.compile("|".join(_WORDS.values()), re.IGNORECASE)


def _before(text: str, at: int) -> str:
    """The word before, in lower case."""
    said = re.search(r"([\w-]+)\s+$", text[:at])
    return said[1].lower() if said else ""


def _around(piece: Piece, text: str, match: re.Match[str]) -> Offender:
    start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    line = text[start : end if end >= 0 else None].strip()
    return Offender(places=(_at(piece.path, piece.line + text.count("\n", 0, match.start())),), text=line[:160])


@functools.cache
def load_limits() -> Limits:
    """Read the file of limits."""
    said = tomllib.loads(LIMITS_FILE.read_text(encoding="utf-8"))
    return Limits(counts=said["counts"], words=said["words"], short_modules=said["short-modules-allowed"])


@functools.cache
def offenders() -> dict[str, list[Offender]]:
    """Everything that counts today, by the name of its limit."""
    found, pages = modules(), prose()
    return {
        **{name: count(found) for name, count in COUNTS.items()},
        "short-modules": short_modules(found, load_limits().short_modules),
        "long-sentences-in-docs": long_sentences(pages),
        **words(found, pages),
    }


# --- holding to the limits ----------------------------------------------------------------------------------


SHOWN_MAX = 15
COMMAND = "python -m tests.support.tidy"


def complaints(found: Mapping[str, Sequence[Offender]], limits: Mapping[str, int]) -> list[str]:
    """A complaint for each count that is not exactly its limit."""
    said = [f"{name}: no limit in {LIMITS_FILE.name}" for name in found.keys() - limits.keys()]
    said += [f"{name}: nothing is counted by this name; remove its limit" for name in limits.keys() - found.keys()]
    for name in sorted(found.keys() & limits.keys()):
        count, limit = len(found[name]), limits[name]
        if count > limit:
            shown = "".join(f"\n  {each}" for each in found[name][:SHOWN_MAX])
            more = f"\n  … and {count - SHOWN_MAX} more" if count > SHOWN_MAX else ""
            said.append(f"{name}: {count}, above its limit of {limit}; remove what you added. There are:{shown}{more}")
        elif count < limit:
            said.append(f"{name}: {count}, below its limit of {limit}; lower it: {COMMAND} --lower")
    return said


def lowered(text: str, found: Mapping[str, Sequence[Offender]]) -> str:
    """The file of limits, with each limit that is too high set to the count."""

    def lower(line: re.Match[str]) -> str:
        offenders_now = found.get(line["name"])
        limit = int(line["limit"])
        return f"{line['key']} = {limit if offenders_now is None else min(limit, len(offenders_now))}"

    return re.sub(r'^(?P<key>"?(?P<name>[\w -]+?)"?) = (?P<limit>\d+)$', lower, text, flags=re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Print every offender; 1 if a count is above its limit."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="limits or words to show; all, if none is named")
    parser.add_argument("--lower", action="store_true", help="rewrite the limits that are too high")
    asked = parser.parse_args(arguments)
    found = offenders()
    if unknown := set(asked.names) - found.keys():
        parser.error(f"no such limits: {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    if asked.lower:
        LIMITS_FILE.write_text(lowered(LIMITS_FILE.read_text(encoding="utf-8"), found), encoding="utf-8")
        load_limits.cache_clear()
    limits = load_limits().every
    if not asked.lower:
        for name in asked.names or found:
            for each in found[name]:
                print(f"[{name}] {each}")
        print()
    for name in asked.names or found:
        print(f"{len(found[name]):6} of {limits.get(name, 0):6}  {name}")
    return int(any(len(each) > limits.get(name, 0) for name, each in found.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
