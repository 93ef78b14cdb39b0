"""How readable the sources and the docs are may only improve; the counters are tried on small inputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support import tidy
from tests.support.tidy import Docstring, Module, Offender, Piece

PATH = "src/tailrace/tables/thing.py"


def module(text: str, path: str = PATH) -> Module:
    return tidy.parse(path, text)


def docstring(text: str) -> Module:
    return module(f'"""{text}"""\n')


def named(*paths: str) -> list[Module]:
    return [module("", f"src/tailrace/{path}.py") for path in paths]


def words_of(count: int) -> str:
    """A sentence of so many words."""
    return " ".join(["Read", *["on"] * (count - 1)]) + "."


def test_every_count_is_exactly_its_limit() -> None:
    said = tidy.complaints(tidy.offenders(), tidy.load_limits().every)
    assert not said, "\n".join(["the limits only go down:", *said])


def test_every_module_that_may_be_short_is_one_that_is_and_has_a_reason() -> None:
    short = {Path(each.places[0].rpartition(":")[0]) for each in tidy.short_modules(tidy.modules())}
    names = {module.name for module in tidy.modules() if Path(module.path) in short}
    allowed = tidy.load_limits().short_modules
    assert set(allowed) <= names, "no longer short, or no longer there"
    assert all(allowed.values())


def test_a_count_above_its_limit_shows_the_offenders_and_one_below_asks_for_a_lower_limit() -> None:
    found = {"long-lines": [Offender(places=("a.py:3", "b.py:4"), text="121 characters")], "told": []}
    assert tidy.complaints(found, {"long-lines": 1, "told": 0}) == []
    (above,) = tidy.complaints(found, {"long-lines": 0, "told": 0})
    assert above.startswith("long-lines: 1, above its limit of 0")
    assert above.endswith("\n  a.py:3, b.py:4: 121 characters")
    (below,) = tidy.complaints(found, {"long-lines": 1, "told": 2})
    assert below.startswith("told: 0, below its limit of 2; lower it: python -m tests.support.tidy --lower")


def test_a_count_without_a_limit_and_a_limit_without_a_count_are_complaints() -> None:
    said = tidy.complaints({"told": []}, {"whoever": 1})
    assert [line.partition(":")[0] for line in said] == ["told", "whoever"]


def test_limits_are_lowered_and_never_raised() -> None:
    text = '# A comment.\nlong-lines = 5\n"is none" = 2\nother = 3\n"tailrace.x" = "a port"\n'
    found = {"long-lines": [], "is none": [Offender(places=("a.py:1",), text="")] * 9}
    assert tidy.lowered(text, found) == text.replace("long-lines = 5", "long-lines = 0")


def test_an_offender_that_there_is_stands_in_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {name: list[Offender]() for name in tidy.load_limits().every}
    found["long-lines"] = [Offender(places=("a.py:3",), text="121 characters")] * 1000
    monkeypatch.setattr(tidy, "offenders", lambda: found)
    assert tidy.main(["long-lines"]) == 1
    assert "[long-lines] a.py:3: 121 characters" in capsys.readouterr().out


# --- each counter, where it counts and where it does not ----------------------------------------------------


def test_a_class_counts_where_two_modules_define_it_however_deep() -> None:
    nested = "def f():\n    if True:\n        class _Kept: ...\n"
    (found,) = tidy.classes_in_two_modules([module("class _Kept: ...", "a.py"), module(nested, "b.py")])
    assert found == Offender(places=("a.py:1", "b.py:3"), text="class _Kept")
    twice_in_one = "class A:\n    class Kept: ...\nclass B:\n    class Kept: ...\n"
    assert not tidy.classes_in_two_modules([module(twice_in_one, "a.py"), module("class C: ...", "b.py")])


def test_a_file_name_counts_where_it_is_used_twice() -> None:
    (found,) = tidy.module_names_twice(named("model/batch", "runtime/batch", "runtime/loop"))
    assert found.text == "module batch"
    assert not tidy.module_names_twice(named("model/__init__", "runtime/__init__", "__main__", "demo/__main__"))


def test_backends_of_one_port_share_their_file_names() -> None:
    ported = ("capture/postgres/connect", "capture/mysql/connect", "capture/memory/connect")
    tables = ("tables/delta/commits", "tables/iceberg/commits")
    assert not tidy.module_names_twice(named(*ported, *tables))
    assert len(tidy.module_names_twice(named(*ported, "spark/connect"))) == 1
    assert len(tidy.module_names_twice(named("spark/delta/commits", "spark/iceberg/commits"))) == 1


def test_a_module_counts_that_is_named_for_an_activity() -> None:
    found = tidy.gerund_modules(named("spark/folding", "spark/iceberg_remaking", "spark/merging_rows"))
    assert [each.text for each in found] == ["module folding", "module iceberg_remaking"]
    assert not tidy.gerund_modules(named("model/schema_mapping", "model/string", "cli/setting", "tables/settings"))


@pytest.mark.parametrize("end", [",", ";", ";\n"])
def test_a_docstring_counts_that_does_not_end(end: str) -> None:
    texts = (f'"""It is{end}"""', f'class A:\n    """It is{end}"""', f'def f():\n    """It is{end}"""')
    for text in (*texts, f'class A:\n    a: int\n    """It is{end}"""', f'A = 1\n"""It is{end}"""'):
        assert len(tidy.unfinished_docstrings([module(text)])) == 1, text
    assert not tidy.unfinished_docstrings([docstring("It is."), module('A = "it is,"\n')])


@pytest.mark.parametrize("begun", ["Whether it", "What it", "Of it", "Where it", "Which it", "Who it"])
def test_a_docstring_counts_that_begins_as_a_question(begun: str) -> None:
    assert len(tidy.question_docstrings([docstring(f"{begun} is.")])) == 1
    assert not tidy.question_docstrings([docstring(f"Return {begun.lower()} is."), docstring("Often it is.")])


def test_a_long_sentence_counts_in_docstrings_and_in_prose() -> None:
    assert len(tidy.long_sentences_in_docstrings([docstring(f"Short. {words_of(31)}")])) == 1
    assert not tidy.long_sentences_in_docstrings([docstring(f"Short. {words_of(30)} {words_of(30)}")])
    assert len(tidy.long_sentences(tidy.paragraphs("a.md", words_of(31)))) == 1
    assert not tidy.long_sentences(tidy.paragraphs("a.md", words_of(30)))


def test_code_and_examples_are_no_sentences() -> None:
    fenced = f"Look:\n\n```text\n{words_of(40)}\n```\n"
    assert not tidy.long_sentences(tidy.paragraphs("a.md", fenced))
    assert not tidy.long_sentences_in_docstrings([docstring(f"Look:\n\n    {words_of(40)}\n\nThat is it.\n")])
    assert not tidy.long_sentences(tidy.paragraphs("a.md", f"Run `{words_of(40)}` now."))


def test_a_cell_an_item_and_a_heading_are_sentences_of_their_own() -> None:
    half = words_of(20).rstrip(".")
    assert not tidy.long_sentences(tidy.paragraphs("a.md", f"| {half} | {half} |\n|---|---|\n| {half} | {half} |\n"))
    assert len(tidy.long_sentences(tidy.paragraphs("a.md", f"| {half} {half} | {half} |\n"))) == 1
    assert not tidy.long_sentences(tidy.paragraphs("a.md", f"# {half}\n{half}\n- {half}\n- {half}\n1. {half}\n"))
    assert len(tidy.long_sentences(tidy.paragraphs("a.md", f"{half}\n{half}\n"))) == 1


def test_a_sentence_ends_before_code_and_not_after_an_abbreviation() -> None:
    piece = Piece(path="a.md", line=5, text="It is there, e.g. Here,\nor `a. B`. `C` too. And [this. Or](x.md).")
    found = tidy.sentences(piece)
    assert [each.line for each in found] == [5, 6, 6, 6]
    assert [each.text for each in found][:3] == ["It is there, e.g. Here, or CODE.", "CODE too.", "And this."]


def test_a_long_first_sentence_counts_unless_it_is_an_attribute_s() -> None:
    long, short = words_of(16), words_of(15)
    for text in (f'"""{long}"""', f'class A:\n    """{long}"""', f'async def f():\n    """{long}"""'):
        assert len(tidy.long_first_sentences([module(text)])) == 1, text
    assert not tidy.long_first_sentences([docstring(f"{short} {long}"), module(f'A = 1\n"""{long}"""')])


def test_a_module_counts_that_is_long_or_short() -> None:
    long, middle, short = (module("a = 1\n" * lines) for lines in (501, 500, 59))
    assert [each.text for each in tidy.long_modules([long, middle, short])] == ["501 lines"]
    assert [each.text for each in tidy.short_modules([long, middle, short, module("a = 1\n" * 60)])] == ["59 lines"]
    assert not tidy.short_modules([short], ["tailrace.tables.thing"])
    assert not tidy.short_modules(named("tables/__init__", "__main__"))


def test_a_function_counts_that_is_long() -> None:
    long, right = (f"class A:\n    def f():\n{'        a = 1' + chr(10):s}" + "        b = 1\n" * n for n in (69, 68))
    (found,) = tidy.long_functions([module(long)])
    assert found == Offender(places=(f"{PATH}:2",), text="f: 71 lines")
    assert not tidy.long_functions([module(right), module("class A:\n" + "    a = 1\n" * 90)])


def test_a_place_counts_that_the_formatter_is_kept_from() -> None:
    assert [each.places for each in tidy.format_skips([module("a = 1\nb = 1  # fmt: skip\n")])] == [(f"{PATH}:2",)]
    assert not tidy.format_skips([module('a = "# fmt: skip"\nb = 1  # skipped\n')])


def test_a_line_counts_that_is_too_long() -> None:
    assert len(tidy.long_lines([module("#" * 121 + "\n")])) == 1
    assert not tidy.long_lines([module("#" * 120 + "\n")])


SAID = {
    "whoever": ("Whoever reads", "who ever reads"), "anew": ("load it anew", "renew it"),
    "comings": ("its comings", "shortcomings"), "aside": ("set aside", "set_aside"),
    "beside": ("beside it", "besides it"), "told": ("is told", "retold"), "letters": ("its letters", "dead letters"),
    "wish": ("if wished", "wishful"), "is none": ("there is\nnone", "is nonesuch"),
    "stretch": ("all stretches", "stretched"), "by itself": ("ends by itself", "ends itself"),
    "betook": ("it betook", "it took"), "thereof": ("a part thereof", "therefore"),
    "hereby": ("hereby ends", "thereby ends"), "made anew": ("was made anew", "made new"),
    "what became of": ("what became of it", "what became clear"), "let go": ("let go of", "letting go"),
    "sees to": ("sees to it", "sees two"),
}  # fmt: skip


@pytest.mark.parametrize("name", tidy.WORDS)
def test_a_word_counts_in_every_kind_of_text_and_not_in_code(name: str) -> None:
    said, other = SAID[name]
    one_line = " ".join(said.split())
    for text in (f'"""It {said}."""', f"# It {one_line}.", f"a = 'It {one_line}.'", f'a = f"It {{1}} {one_line}."'):
        assert len(tidy.words([module(text)], [])[name]) == 1, text
    page = tidy.paragraphs("a.md", f"It {said}.\n\nIt {other}, `{said}`.\n\n```\n{said}\n```\n")
    assert [each.places for each in tidy.words([], page)[name]] == [("a.md:1",)]
    variable = "_".join(said.split())
    assert not tidy.words([docstring(f"It {other}, `{said}`."), module(f'a = f"{{{variable}}}"')], [])[name]


@pytest.mark.parametrize("before", ["dead", "Capital", "lower-case"])
def test_letters_may_be_characters_or_dead(before: str) -> None:
    assert not tidy.words([docstring(f"All {before}\nletters.")], [])["letters"]


def test_docstrings_strings_and_comments_are_told_apart() -> None:
    found = module('"""Of it."""\na = 1  # "c"\n"""Of a."""\nb = "# s"\n"""x"""\nf("y")\n"""no docstring"""\n')
    assert [(each.line, each.text, each.of_attribute) for each in found.docstrings] == [
        (1, "Of it.", False), (3, "Of a.", True), (5, "x", True),
    ]  # fmt: skip
    assert found.comments == (Piece(path=PATH, line=2, text='# "c"'),)
    assert [(each.line, each.text) for each in found.strings] == [(4, '"# s"'), (6, '"y"'), (7, '"""no docstring"""')]
    assert all(isinstance(each, Docstring) and dataclasses.is_dataclass(each) for each in found.docstrings)
