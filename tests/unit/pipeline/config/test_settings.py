"""The settings file: what is accepted, and every mistake with its line and remedy."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tailrace.errors import ConfigError, ExitCode
from tailrace.model.policies import DEFAULT_POLICIES, EvolutionPolicy
from tailrace.model.schema import TableId
from tailrace.pipeline.config.document import Problem
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import check_settings, load_settings
from tailrace.pipeline.config.source_settings import SourceSettings, matches, matches_message

CONTRACT = """\
# tailrace.yaml
name: shop
source:
  url: postgresql://tailrace:${PGPASSWORD}@localhost:5432/shop   # ${VAR} from the environment
  tables: ["public.*"]            # globs over schema.table; `exclude:` too
log: ./shop/changes               # folder; paths are relative to this file
tables:
  format: delta
  path: ./shop/lake               # one Delta table at <path>/<schema>/<table>
"""

ENVIRONMENT = {"PGPASSWORD": "s3cret-word"}


def write(folder: Path, text: str | bytes = CONTRACT) -> Path:
    file = folder / "tailrace.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def settings_of(folder: Path, text: str = CONTRACT, **environment: str) -> PipelineSettings:
    return load_settings(write(folder, text), environment=ENVIRONMENT | environment)


def problems_of(folder: Path, text: str | bytes, **environment: str) -> list[Problem]:
    problems = check_settings(write(folder, text), environment=ENVIRONMENT | environment)
    assert all(problem.hint and problem.message for problem in problems)
    return problems


def problem_of(folder: Path, text: str | bytes, **environment: str) -> Problem:
    (problem,) = problems_of(folder, text, **environment)
    return problem


def source(*tables: str, exclude: tuple[str, ...] = ()) -> SourceSettings:
    values = {"url": "postgresql://host/db", "tables": tables, "exclude": exclude}
    return SourceSettings.model_validate(values)


# ---- what is accepted


def test_the_documented_file_loads_and_its_paths_start_at_its_folder(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert settings.name == "shop"
    assert settings.source.url == "postgresql://tailrace:s3cret-word@localhost:5432/shop"
    assert settings.source.tables == ("public.*",)
    assert settings.source.exclude == ()
    assert settings.log.path == tmp_path / "shop" / "changes"
    assert settings.tables.format == "delta"
    assert settings.tables.path == tmp_path / "shop" / "lake"
    assert settings.file == tmp_path / "tailrace.yaml"


def test_slot_and_publication_are_named_and_created_by_default(tmp_path: Path) -> None:
    plain = settings_of(tmp_path).source
    assert (plain.slot.name, plain.slot.create) == (None, True)
    assert (plain.publication.name, plain.publication.create) == (None, True)
    named = settings_of(
        tmp_path,
        CONTRACT.replace("log:", "  slot: {name: my_slot, create: false}\n  publication: {name: My Pub}\nlog:"),
    ).source
    assert (named.slot.name, named.slot.create) == ("my_slot", False)
    assert (named.publication.name, named.publication.create) == ("My Pub", True)


def test_the_log_may_be_written_as_a_mapping_with_a_path(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, CONTRACT.replace("log: ./shop/changes", "log: {path: ./shop/changes}"))
    assert settings.log.path == tmp_path / "shop" / "changes"


def test_the_format_is_delta_if_none_is_named(tmp_path: Path) -> None:
    assert settings_of(tmp_path, CONTRACT.replace("  format: delta\n", "")).tables.format == "delta"


def test_absolute_paths_stay_and_a_tilde_is_the_home_folder(tmp_path: Path) -> None:
    text = CONTRACT.replace("./shop/changes", "/somewhere/changes").replace("./shop/lake", "~/lake")
    settings = settings_of(tmp_path, text)
    assert settings.log.path == Path("/somewhere/changes")
    assert settings.tables.path == Path("~/lake").expanduser().resolve()


def test_paths_start_at_the_file_wherever_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep")
    monkeypatch.chdir(tmp_path)
    settings = load_settings("deep/tailrace.yaml", environment=ENVIRONMENT)
    assert settings.log.path == tmp_path / "deep" / "shop" / "changes"
    assert settings.file == tmp_path / "deep" / "tailrace.yaml"


def test_paths_start_at_the_link_when_the_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    target = write(tmp_path / "mounted")
    (tmp_path / "tailrace.yaml").symlink_to(target)
    settings = load_settings(tmp_path / "tailrace.yaml", environment=ENVIRONMENT)
    assert settings.log.path == tmp_path / "shop" / "changes"


def test_a_file_with_a_byte_order_mark_loads(tmp_path: Path) -> None:
    assert problems_of(tmp_path, b"\xef\xbb\xbf" + CONTRACT.encode()) == []


@pytest.mark.parametrize(
    "url",
    [
        "postgres://host/db",
        "postgresql://u:p%40ss@host:5432/db?sslmode=require",
        "postgresql:///db?host=/var/run/postgresql",
        "postgresql://one:5432,two:5433/db",
        "postgresql://[::1]:5432/db",
        "postgresql://host",
    ],
)
def test_a_url_that_libpq_takes_is_taken(tmp_path: Path, url: str) -> None:
    assert settings_of(tmp_path, CONTRACT, PGURL=url).source.url
    text = CONTRACT.replace("postgresql://tailrace:${PGPASSWORD}@localhost:5432/shop", "${PGURL}")
    assert settings_of(tmp_path, text, PGURL=url).source.url == url


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with pytest.raises(ValidationError):
        settings.name = "other"


# ---- variables


@pytest.mark.parametrize(
    ("written", "environment", "read"),
    [
        ("${WHO}", {"WHO": "me"}, "me"),
        ("a-${WHO}-${WHO}", {"WHO": "me"}, "a-me-me"),
        ("${WHO:-you}", {}, "you"),
        ("${WHO:-you}", {"WHO": ""}, "you"),
        ("${WHO:-you}", {"WHO": "me"}, "me"),
        ('"${WHO}"', {"WHO": "me"}, "me"),
    ],
)
def test_variables_come_from_the_environment(
    tmp_path: Path, written: str, environment: dict[str, str], read: str
) -> None:
    assert settings_of(tmp_path, CONTRACT.replace("name: shop", f"name: {written}"), **environment).name == read


@pytest.mark.parametrize(
    ("written", "read"), [("a$$b", "a$b"), ("a$$${WHO}", "a$me"), ("$${WHO}", "${WHO}"), ("a$b", "a$b"), ("a$", "a$")]
)
def test_two_dollars_are_one_and_a_lone_one_stays(tmp_path: Path, written: str, read: str) -> None:
    settings = settings_of(tmp_path, CONTRACT.replace("./shop/changes", f"./{written}"), WHO="me")
    assert settings.log.path == tmp_path / read


def test_what_a_variable_holds_is_not_searched_for_variables(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, CONTRACT.replace("./shop/changes", "./${A}"), A="${B}$$")
    assert settings.log.path == tmp_path / "${B}$$"


def test_a_variable_can_switch_a_flag(tmp_path: Path) -> None:
    text = CONTRACT.replace("log:", '  slot: {name: s, create: "${CREATE:-true}"}\nlog:')
    assert settings_of(tmp_path, text).source.slot.create is True
    assert settings_of(tmp_path, text, CREATE="false").source.slot.create is False


def test_a_password_from_a_variable_may_hold_any_character(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, PGPASSWORD="p@ss/w:rd%41 ?#")
    assert settings.source.url == "postgresql://tailrace:p%40ss%2Fw%3Ard%2541%20%3F%23@localhost:5432/shop"


def test_only_the_password_is_encoded_in_a_url_of_variables(tmp_path: Path) -> None:
    text = CONTRACT.replace("tailrace:${PGPASSWORD}@localhost:5432/shop", "${U}:${P:-a@b}@${H}/${D}")
    settings = settings_of(tmp_path, text, U="me", H="[::1]:5432", D="db?sslmode=require")
    assert settings.source.url == "postgresql://me:a%40b@[::1]:5432/db?sslmode=require"


def test_a_variable_that_is_not_set_is_reported_with_its_line(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, CONTRACT.replace("PGPASSWORD", "NO_SUCH"))
    assert (problem.line, problem.column, problem.where) == (4, 30, "source.url")
    assert "NO_SUCH, which is not set" in problem.message
    assert "${NO_SUCH:-default}" in problem.hint


def test_every_variable_that_is_not_set_is_reported_on_its_own_line(tmp_path: Path) -> None:
    text = CONTRACT.replace("./shop/changes ", '"./${ONE}\n  ${TWO}"')
    lines_and_messages = [(problem.line, problem.message) for problem in problems_of(tmp_path, text)]
    assert [line for line, _ in lines_and_messages] == [6, 7]
    assert "ONE" in lines_and_messages[0][1]
    assert "TWO" in lines_and_messages[1][1]


@pytest.mark.parametrize("written", ["${}", "${1X}", "${X", "${X-y}", "${A:-${B}}"])
def test_a_malformed_variable_is_a_problem_and_not_text(tmp_path: Path, written: str) -> None:
    problem = problem_of(tmp_path, CONTRACT.replace("./shop/changes", f'"./{written}"'), X="x")
    assert (problem.line, problem.where) == (6, "log")
    assert "does not begin a variable" in problem.message
    assert "$$" in problem.hint


# ---- globs


@pytest.mark.parametrize(
    ("glob", "schema", "name", "matched"),
    [
        ("public.*", "public", "orders", True),
        ("public.*", "public", "a.b", True),
        ("public.*", "Public", "orders", False),
        ("public.orders", "public", "Orders", False),
        ("*.orders", "eu", "orders", True),
        ("*.*", "any thing", 'a "quoted" name', True),
        ("public.order?", "public", "orders", True),
        ("public.order?", "public", "order", False),
        ("public.[a-c]*", "public", "beer", True),
        ("public.[!a-c]*", "public", "beer", False),
        ("public.[[]x]", "public", "[x]", True),
        ("a.b.c", "a.b", "c", True),
        ("a.b.c", "a", "b.c", True),
        ("a.b.c", "a.b.c", "", False),
        ("[a.b].c", "b", "c", True),
        ("[a.b].c", "[a", "b].c", False),
        ("public.*", "public2", "orders", False),
    ],
)
def test_a_glob_matches_schema_and_table_verbatim(glob: str, schema: str, name: str, matched: bool) -> None:
    assert matches(source(glob), TableId(schema, name)) is matched


def test_exclude_wins_over_tables() -> None:
    chosen = source("public.*", "audit.events", exclude=("*.*_old",))
    assert matches(chosen, TableId("public", "orders"))
    assert matches(chosen, TableId("audit", "events"))
    assert not matches(chosen, TableId("audit", "other"))
    assert not matches(chosen, TableId("public", "orders_old"))


def test_messages_are_chosen_by_their_prefix() -> None:
    chosen = SourceSettings.model_validate(
        {"url": "postgresql://host/db", "tables": ["a.b"], "messages": ["orders", "mail-*"]}
    )
    assert [matches_message(chosen, prefix) for prefix in ("orders", "mail-x", "orders2", "Orders", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert matches_message(source("a.b"), "anything")


@pytest.mark.parametrize(
    ("line", "where", "message", "hint"),
    [
        ('messages: ["a["]', "source.messages[0]", "opens a bracket", "[[]"),
        ("messages: orders", "source.messages", "must be a list", 'messages: ["orders"'),
        ("origin: maybe", "source.origin", "unknown value", "origin: none"),
        ("invalid_text: drop", "source.invalid_text", "unknown value", "invalid_text: replace"),
        ("invalid_text:", "source.invalid_text", "has no value", "invalid_text: replace"),
    ],
)
def test_settings_of_how_the_source_is_read_are_checked(
    tmp_path: Path, line: str, where: str, message: str, hint: str
) -> None:
    problem = problem_of(tmp_path, CONTRACT.replace('["public.*"]', f'["public.*"]\n  {line}'))
    assert (problem.line, problem.where) == (6, where)
    assert message in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("glob", "message", "hint"),
    [
        ("orders", "names no schema", '"public.orders"'),
        ("", "names no schema", '"public.*"'),
        ("[a.b]", "names no schema", "dot between"),
        (".orders", "lacks a schema or a table", "public.*"),
        ("public.", "lacks a schema or a table", "public.*"),
        ("public.[ab", "opens a bracket", "[[]"),
    ],
)
def test_an_impossible_glob_is_refused(tmp_path: Path, glob: str, message: str, hint: str) -> None:
    problem = problem_of(tmp_path, CONTRACT.replace('["public.*"]', f'["a.b", "{glob}"]'))
    assert (problem.line, problem.column, problem.where) == (5, 19, "source.tables[1]")
    assert message in problem.message
    assert hint in problem.hint


# ---- mistakes, one at a time


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "message", "hint"),
    [
        ("name: shop", "name: my shop", 2, "name", "1 to 63 letters", "name: shop"),
        ("name: shop", "name: 7", 2, "name", "must be text", "name: shop"),
        ("name: shop", "name: 2024-13-45", 2, "name", "must be text", "name: shop"),
        ("name: shop", "name: [a]", 2, "name", "must be text", "name: shop"),
        ("name: shop", "name: !!python/object:os.system x", 2, "name", "must be text", "name: shop"),
        ("name: shop", "name:", 2, "name", "has no value", "name: shop"),
        ("name: shop", f"name: {'x' * 64}", 2, "name", "1 to 63 letters", "name: shop"),
        ("name: shop\n", "", 2, "name", "is missing", "name: shop"),
        ("  url:", "  ulr:", 3, "source.url", "is missing", "url: postgresql://"),
        ('  tables: ["public.*"]', "", 3, "source.tables", "is missing", 'tables: ["public.*"]'),
        ('["public.*"]', "public.*", 5, "source.tables", "must be a list", 'tables: ["public.*"]'),
        ('["public.*"]', "[]", 5, "source.tables", "must not be empty", 'tables: ["public.*"]'),
        ('["public.*"]', "[5]", 5, "source.tables[0]", "must be text", 'tables: ["public.*"]'),
        ("log: ./shop/changes", "log: 5", 6, "log", "must be a mapping", "log: ./shop/changes"),
        ("log: ./shop/changes", "log:", 6, "log", "has no value", "log: ./shop/changes"),
        ("log: ./shop/changes", 'log: ""', 6, "log", "must be the path of a folder", "./shop/changes"),
        ("log: ./shop/changes", r'log: "a\0b"', 6, "log", "must be the path of a folder", "./shop/changes"),
        ("log: ./shop/changes", "log: {path: 5}", 6, "log.path", "must be the path of a folder", "./shop/changes"),
        ("log: ./shop/changes", "log: gs://bucket/x", 6, "log", "or `s3://bucket/prefix`", "my-bucket"),
        ("log: ./shop/changes", "log: {}", 6, "log.path", "is missing", "log: ./shop/changes"),
        ("format: delta", "format: csv", 8, "tables.format", "not a table format", "format: delta"),
        ("format: delta", "format: 1", 8, "tables.format", "unknown value", "format: delta"),
        ("  path: ./shop/lake", "", 7, "tables.path", "is missing", "path: ./shop/lake"),
        ("./shop/lake", "s3a://bucket/lake", 9, "tables.path", "lake tables need a file system", "all machines share"),
        ("./shop/lake", "./shop/changes", 9, "tables.path", "is the log's folder", "separate folders"),
        ("./shop/lake", "shop/../shop/changes/", 9, "tables.path", "is the log's folder", "separate folders"),
        ("./shop/lake", "./shop/changes/lake", 9, "tables.path", "is inside the log's", "separate folders"),
        ("./shop/lake", "./shop", 9, "tables.path", "contains the log's folder", "separate folders"),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_remedy(
    tmp_path: Path, old: str, new: str, line: int, where: str, message: str, hint: str
) -> None:
    assert old in CONTRACT
    found = {problem.where: problem for problem in problems_of(tmp_path, CONTRACT.replace(old, new, 1))}
    found.pop("source.ulr", None)
    assert list(found) == [where]
    assert found[where].line == line
    assert message in found[where].message
    assert hint in found[where].hint


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:topsecret@h/db", "MySQL (`mysql://`), which is not available yet"),
        ("mariadb://u:topsecret@h/db", "MariaDB (`mariadb://`), which is not available yet"),
        ("mssql+pyodbc://u:topsecret@h/db", "SQL Server"),
        ("http://u:topsecret@h/db", "not a known source"),
        ("host=h password=topsecret", "must be a URL"),
        ("postgresql://u:top@secret@h/db", "special character"),
        ("postgresql://u:top/secret@h/db", "has a port that is not a number"),
        ("postgresql://u:top%secret@h/db", "special character"),
        ("postgresql://u:top secret@h/db", "spaces or control characters"),
        ("postgresql://u:topsecret@h:99999/db", "has a port that is not a number"),
    ],
)
def test_a_url_we_cannot_use_is_refused_without_being_shown(tmp_path: Path, url: str, message: str) -> None:
    text = CONTRACT.replace("postgresql://tailrace:${PGPASSWORD}@localhost:5432/shop", f'"{url}"')
    problem = problem_of(tmp_path, text)
    assert (problem.line, problem.where) == (4, "source.url")
    assert message in problem.message
    assert "secret" not in str(problem)


@pytest.mark.parametrize(
    ("slot", "where", "message"),
    [
        ("slot: {name: Upper}", "source.slot.name", "lower-case"),
        (f"slot: {{name: {'x' * 64}}}", "source.slot.name", "1 to 63"),
        ("slot: {create: perhaps}", "source.slot.create", "true or false"),
        ("slot: {create: 7}", "source.slot.create", "true or false"),
        ("slot: {create: false}", "source.slot", "needs a `name`"),
        ("slot: mine", "source.slot", "must be a mapping"),
        ("publication: {create: false}", "source.publication", "needs a `name`"),
        ("publication: {name: a'b}", "source.publication.name", "without quotes"),
        ('publication: {name: ""}', "source.publication.name", "1 to 55 bytes"),
        (f"publication: {{name: {'ü' * 28}}}", "source.publication.name", "1 to 55 bytes"),
    ],
)
def test_an_impossible_slot_or_publication_is_refused(tmp_path: Path, slot: str, where: str, message: str) -> None:
    problem = problem_of(tmp_path, CONTRACT.replace("log:", f"  {slot}\nlog:"))
    assert (problem.line, problem.where) == (6, where)
    assert message in problem.message


def test_a_source_type_is_refused_because_the_url_says_it(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, CONTRACT.replace("log:", "  type: postgresql\nlog:"))
    assert (problem.where, problem.message) == ("source.type", "is not a known key")
    assert problem.hint == "Remove it: the scheme of `url` says what the source is, e.g. `postgresql://…`."


@pytest.mark.parametrize(
    ("line_added", "where", "hint"),
    [
        ("sorce: x", "sorce", "Did you mean `source`?"),
        ("exclude: []", "exclude", "Move it: it belongs under `source`."),
        ("path: x", "path", "Move it: it belongs under `log` or under `tables`."),
        ("colour: red", "colour", "Known here: name, source, log, tables, load, spark, transforms."),
        ("file: x", "file", "Move it: it belongs under `tables.upkeep`."),
        ("<<: {a: b}", "<<", "Known here: name, source, log, tables, load, spark, transforms."),
        ("1: x", "1", "Known here: name, source, log, tables, load, spark, transforms."),
    ],
)
def test_an_unknown_key_is_reported_with_the_probable_one(
    tmp_path: Path, line_added: str, where: str, hint: str
) -> None:
    problem = problem_of(tmp_path, CONTRACT + line_added)
    assert (problem.line, problem.column, problem.where) == (10, 1, where)
    assert problem.message == "is not a known key"
    assert hint in problem.hint


def test_a_key_set_twice_is_reported_with_both_lines(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, CONTRACT + "name: other\n")
    assert (problem.line, problem.where) == (10, "name")
    assert problem.message == "is set twice; first on line 2"


# ---- files that are not settings at all


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("", 1, "the file is empty", "name, source, log and tables"),
        ("# nothing\n\n", 1, "the file is empty", "name, source, log and tables"),
        ("- a\n- b\n", 1, "must be a mapping", "name, source, log and tables"),
        ("shop", 1, "must be a mapping", "name, source, log and tables"),
        ("name: shop\nsource:\n\turl: x\n", 3, "a tab", "spaces"),
        ("name:\tshop\n", 1, "a tab", "spaces"),
        ("name: shop\nsource: a: b\n", 2, "there is a `:`", "quotes"),
        ("name: [shop\n", 2, "this is not YAML", "brackets"),
        ('name: "shop\n', 2, "this is not YAML", "quotes"),
        ("name: shop\n---\nname: b\n", 2, "a second document", "---"),
        ("source: {tables: [*.orders]}", 1, "a `*` or `&`", "quotes"),
        ("name: shop\nurl: *topsecret\n", 2, "a `*` or `&`", "quotes"),
        ("name: shop\nlog: \x01\n", 2, "character that YAML does not allow", "control character"),
        ("[" * 5000, 1, "nested too deeply", "right file"),
        (b"name: shop\nlog: \xff\n", 2, "not UTF-8", "UTF-8"),
        ("name: shöp".encode("utf-16"), 1, "not UTF-8", "UTF-8"),
        (b"#" * (2 << 20), 0, "larger than 1 MiB", "right file"),
    ],
)
def test_a_file_that_is_not_a_settings_file_is_reported_with_its_line(
    tmp_path: Path, text: str | bytes, line: int, message: str, hint: str
) -> None:
    problem = problem_of(tmp_path, text)
    assert problem.line == line
    assert message in problem.message
    assert hint in problem.hint
    assert "topsecret" not in str(problem)


def test_a_value_that_contains_itself_is_a_problem_and_not_a_hang(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, CONTRACT.replace('["public.*"]', "&loop [*loop]"))
    assert any("contains itself" in problem.hint for problem in problems)


def test_aliases_that_multiply_are_a_problem_and_not_a_full_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    problems = problems_of(tmp_path, CONTRACT + "\n".join(lines))
    assert any("too many values" in problem.message for problem in problems)


def test_a_missing_file_a_folder_and_an_unreadable_path_are_reported(tmp_path: Path) -> None:
    (missing,) = check_settings(tmp_path / "none.yaml")
    (folder,) = check_settings(tmp_path)
    (through_a_file,) = check_settings(write(tmp_path) / "x.yaml")
    (no_path,) = check_settings("a\0b")
    assert (missing.line, missing.message) == (0, "the file does not exist")
    assert folder.message == "this is a folder"
    assert "cannot be read: not a directory" in through_a_file.message
    assert "cannot be read" in no_path.message


# ---- many at once, and loading


MANY = """\
name: my shop
source:
  url: mysql://u:topsecret@h/db
  tables: [orders, "public.*", "x.[y"]
  exlude: []
log: ./${NO_SUCH}/x
tables:
  format: csv
  path: 5
name: again
"""


def test_every_problem_is_reported_in_the_order_of_the_lines(tmp_path: Path) -> None:
    assert [(problem.line, problem.where) for problem in problems_of(tmp_path, MANY)] == [
        (1, "name"),
        (3, "source.url"),
        (4, "source.tables[0]"),
        (4, "source.tables[2]"),
        (5, "source.exlude"),
        (6, "log"),
        (8, "tables.format"),
        (9, "tables.path"),
        (10, "name"),
    ]


def test_nested_folders_are_reported_together_with_other_problems(tmp_path: Path) -> None:
    text = CONTRACT.replace("./shop/lake", "./shop/changes/lake").replace("delta", "csv", 1)
    assert [problem.where for problem in problems_of(tmp_path, text)] == ["tables.format", "tables.path"]


def test_loading_reports_the_first_problem_and_the_number_of_others(tmp_path: Path) -> None:
    file = write(tmp_path, MANY)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, environment={})
    assert caught.value.exit_code is ExitCode.CONFIG
    assert caught.value.headline.startswith(f"{file}:1: `name` must be 1 to 63 letters")
    assert caught.value.headline.endswith("(and 8 more problems)")
    assert f"`tailrace check {file}`" in caught.value.hint


def test_loading_a_file_with_one_problem_counts_no_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path / "none.yaml")
    assert caught.value.headline == f"{tmp_path / 'none.yaml'}: the file does not exist"


def test_a_file_that_checks_clean_loads(tmp_path: Path) -> None:
    assert problems_of(tmp_path, CONTRACT) == []
    assert settings_of(tmp_path)


# ---- secrets


def test_no_text_form_of_the_settings_shows_the_url(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    shown = [
        repr(settings),
        str(settings),
        str(settings.source),
        settings.model_dump_json(),
        f"{settings.model_dump()}",
    ]
    assert not any("s3cret-word" in text or "localhost" in text for text in shown)


def test_the_password_shows_in_no_error_and_in_no_traceback(tmp_path: Path) -> None:
    file = write(tmp_path, CONTRACT.replace("5432", "port").replace("name: shop", "name: my shop"))
    with pytest.raises(ConfigError) as caught:
        load_settings(file, environment=ENVIRONMENT)
    shown = "".join(traceback.format_exception(caught.value)) + str(check_settings(file, environment=ENVIRONMENT))
    assert "s3cret-word" not in shown
    with pytest.raises(ValidationError) as refused:
        SourceSettings.model_validate({"url": "mysql://u:s3cret-word@h/db", "tables": ["a.b"]})
    assert "s3cret-word" not in str(refused.value)


def test_evolution_policies_are_set_by_kind_of_schema_change(tmp_path: Path) -> None:
    assert settings_of(tmp_path).tables.evolution.policies == DEFAULT_POLICIES
    evolution = settings_of(tmp_path, CONTRACT + "  evolution: {drop: apply, retype: stop}\n").tables.evolution
    assert evolution.policies == replace(DEFAULT_POLICIES, drop=EvolutionPolicy.APPLY, retype=EvolutionPolicy.STOP)


def test_a_file_without_narrow_stops_at_narrower_types_where_it_stops_at_others(tmp_path: Path) -> None:
    """Such a file was written before `narrow` was a kind of its own."""
    for setting, expected in (
        ("{}", ("narrow", EvolutionPolicy.REFRESH)),
        ("{retype: stop}", ("retype", EvolutionPolicy.STOP)),
        ("{widen: stop}", ("widen", EvolutionPolicy.STOP)),
        ("{narrow: stop}", ("narrow", EvolutionPolicy.STOP)),
        ("{narrow: refresh, retype: stop, widen: stop}", ("narrow", EvolutionPolicy.REFRESH)),
    ):
        evolution = settings_of(tmp_path, f"{CONTRACT}  evolution: {setting}\n").tables.evolution
        assert evolution.policies.narrow_policy == expected


@pytest.mark.parametrize(
    ("setting", "where", "message"),
    [
        ("{drop: maybe}", "tables.evolution.drop", "keep-null"),
        ("{retype: apply}", "tables.evolution.retype", "refresh"),
        ("{narrow: apply}", "tables.evolution.narrow", "refresh"),
        ("{dropp: apply}", "tables.evolution.dropp", "drop"),
        ("stop", "tables.evolution", ""),
    ],
)
def test_a_mistake_in_evolution_is_reported_with_the_known_values(
    tmp_path: Path, setting: str, where: str, message: str
) -> None:
    problem = problem_of(tmp_path, f"{CONTRACT}  evolution: {setting}\n")
    assert (problem.line, problem.where) == (10, where)
    assert message in problem.message + problem.hint


def test_upkeep_is_on_and_removes_nothing_by_default(tmp_path: Path) -> None:
    plain = settings_of(tmp_path).tables.upkeep
    assert (plain.join, plain.file, plain.budget, plain.remove_after) == (True, 128 << 20, 0.1, None)
    setting = "  upkeep: {join: false, file: 64MiB, budget: 25%, remove_after: 7d}\n"
    upkeep = settings_of(tmp_path, CONTRACT + setting).tables.upkeep
    assert (upkeep.join, upkeep.file, upkeep.budget, upkeep.remove_after) == (False, 64 << 20, 0.25, 7 * 86_400)
    assert settings_of(tmp_path, CONTRACT + "  upkeep: {remove_after: none}\n").tables.upkeep.remove_after is None
    layout = settings_of(tmp_path, CONTRACT + setting).tables.layout
    assert layout.location(TableId("public", "a"), "log").file_bytes == 64 << 20, "every writer aims at it"


@pytest.mark.parametrize(
    ("setting", "where", "message"),
    [
        ("{budget: 0%}", "tables.upkeep.budget", "from 1% to 99%"),
        ("{budget: 0.1}", "tables.upkeep.budget", "from 1% to 99%"),
        ("{budget: }", "tables.upkeep.budget", "has no value"),
        ("{remove_after: 10min}", "tables.upkeep.remove_after", "an hour or longer"),
        ("{file: 10}", "tables.upkeep.file", "less than 1 MiB"),
        ("{file: 1GiB}", "tables.upkeep.file", "more than 256 MiB"),
        ("{joined: true}", "tables.upkeep.joined", "is not a known key"),
        ("{join: maybe}", "tables.upkeep.join", "must be true or false"),
    ],
)
def test_a_mistake_in_upkeep_is_reported(tmp_path: Path, setting: str, where: str, message: str) -> None:
    problem = problem_of(tmp_path, f"{CONTRACT}  upkeep: {setting}\n")
    assert (problem.line, problem.where) == (10, where)
    assert message in problem.message
    assert problem.hint


def test_a_misspelled_key_of_upkeep_is_answered_with_every_known_key(tmp_path: Path) -> None:
    assert problem_of(tmp_path, f"{CONTRACT}  upkeep: {{fle: 64MiB}}\n").hint == "Did you mean `file`?"
    hint = problem_of(tmp_path, f"{CONTRACT}  upkeep: {{x: 1}}\n").hint
    assert hint == "Remove it. Known here: join, file, budget, remove_after."
