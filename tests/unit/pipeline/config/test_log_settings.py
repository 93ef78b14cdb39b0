"""The `log:` section: sizes, times, and every mistake in them with its line."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.changelog.maintain.maintenance import MaintenancePolicy
from tailrace.changelog.maintain.retention import RetentionPolicy
from tailrace.pipeline.config.document import Problem
from tailrace.pipeline.config.setting_values import InvalidQuantity, parse_duration, parse_size
from tailrace.pipeline.config.settings import LogSettings
from tailrace.pipeline.config.settings_file import check_settings, load_settings
from tailrace.storage.objects import ObjectPath

FILE = """\
name: shop
source:
  url: postgresql://localhost/shop
  tables: ["public.*"]
log:
  path: ./changes
{log}
tables: {{path: ./lake}}
"""


def write(folder: Path, *lines: str) -> Path:
    file = folder / "tailrace.yaml"
    file.write_text(FILE.format(log="\n".join(f"  {line}" for line in lines)))
    return file


def log_of(folder: Path, *lines: str, **environment: str) -> LogSettings:
    return load_settings(write(folder, *lines), environment=environment).log


def problem_of(folder: Path, *lines: str) -> Problem:
    (problem,) = check_settings(write(folder, *lines), environment={})
    return problem


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("17", 17), ("17B", 17), ("3kB", 3_000), ("3KB", 3_000), ("2MB", 2_000_000),
        ("50GB", 50 * 10**9), ("1TB", 10**12), ("1KiB", 1024), ("128MiB", 128 << 20), ("1.5GiB", 3 << 29),
        ("2tib", 2 << 40), ("128 MiB", 128 << 20), (" 5 B ", 5),
    ],
)  # fmt: skip
def test_a_size_is_a_number_of_bytes_or_has_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("90s", 90), ("0.5s", 0.5), ("10min", 600), ("2h", 7200), ("7d", 604_800), ("1 D", 86_400)],
)  # fmt: skip
def test_a_duration_is_a_number_of_seconds_or_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "GB", "50G", "-1", "1e9", "1,000", "5 0", "0x10", "1_000", "ten", "9999999TB"])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidQuantity) as refused:
        parse_size(text)
    assert "50GB" in refused.value.hint


@pytest.mark.parametrize("text", ["", "d", "5m", "5 months", "1:30", "-1d", "1w", "inf", "nan", "99999d"])
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidQuantity) as refused:
        parse_duration(text)
    assert "min, h and d" in refused.value.hint


def test_by_default_a_log_keeps_a_week_and_has_no_limit(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    assert log.maintenance_policy == MaintenancePolicy()
    assert log.maintenance_policy.retention == RetentionPolicy(age_seconds=7 * 86_400, bytes=None, max_bytes=None)


def test_everything_about_the_log_can_be_set(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        "max_bytes: 50GB",
        "retention: {age: 36h, bytes: 20GB}",
        "seal: {bytes: 64MiB, commits: 100, age: 90}",
        "grace: 1min",
    )
    assert log.path == tmp_path / "changes"
    assert log.maintenance_policy == MaintenancePolicy(
        seal_bytes=64 << 20,
        seal_commits=100,
        seal_seconds=90.0,
        grace_seconds=60.0,
        retention=RetentionPolicy(age_seconds=36 * 3600, bytes=20 * 10**9, max_bytes=50 * 10**9),
    )


@pytest.mark.parametrize("none", ["none", "None", '"none"'])
def test_none_keeps_rows_for_ever_and_sets_no_limit(tmp_path: Path, none: str) -> None:
    policy = log_of(
        tmp_path, f"max_bytes: {none}", f"retention: {{age: {none}, bytes: {none}}}"
    ).maintenance_policy.retention
    assert policy == RetentionPolicy(age_seconds=None, bytes=None, max_bytes=None)


def test_a_limit_may_come_from_the_environment(tmp_path: Path) -> None:
    log = log_of(tmp_path, "max_bytes: ${ROOM}", "grace: ${GRACE:-30}", ROOM="2GiB")
    assert (log.max_bytes, log.grace) == (2 << 30, 30.0)


def test_a_log_with_a_limit_seals_before_unsealed_commits_fill_it(tmp_path: Path) -> None:
    assert log_of(tmp_path, "max_bytes: 64MiB").maintenance_policy.seal_bytes == 8 << 20
    assert log_of(tmp_path, "max_bytes: 64GiB").maintenance_policy.seal_bytes == 128 << 20


@pytest.mark.parametrize(
    ("lines", "line", "where", "message", "hint"),
    [
        (["max_bytes: 50G"], 7, "log.max_bytes", "is not a size", "50GB"),
        (["max_bytes: 50"], 7, "log.max_bytes", "is less than 1 MiB", "Was a unit forgotten?"),
        (["max_bytes: -5GB"], 7, "log.max_bytes", "is not a size", "50GB"),
        (["max_bytes: yes"], 7, "log.max_bytes", "must be a number", "50GB"),
        (["max_bytes: [5GB]"], 7, "log.max_bytes", "must be a number", "50GB"),
        (["max_bytes:"], 7, "log.max_bytes", "has no value", "50GB"),
        (["max_bytes: 2026-01-01"], 7, "log.max_bytes", "must be a number", "50GB"),
        (["grace: 1min", "retention: 7d"], 8, "log.retention", "must be a mapping", "age: 7d, bytes: 20GB"),
        (["retention:"], 7, "log.retention", "has no value", "age: 7d"),
        (["retention:", "  age: 7days"], 8, "log.retention.age", "is not a length of time", "min, h and d"),
        (["retention:", "  age:"], 8, "log.retention.age", "has no value", "7d"),
        (["retention:", "  age: 7d", "  bytes: 1:30"], 9, "log.retention.bytes", "is not a size", "GiB"),
        (["seal:", "  bytes: none"], 8, "log.seal.bytes", "is not a size", "MiB"),
        (["seal: {commits: 0}"], 7, "log.seal.commits", "whole number, 1 or larger", "commits: 4096"),
        (["seal: {commits: 1.5}"], 7, "log.seal.commits", "whole number, 1 or larger", "commits: 4096"),
        (["seal: {commits: many}"], 7, "log.seal.commits", "whole number, 1 or larger", "commits: 4096"),
        (["seal: {age: none}"], 7, "log.seal.age", "is not a length of time", "7d"),
        (["seal: {size: 5MB}"], 7, "log.seal.size", "is not a known key", "Known here: bytes, commits, age"),
        (["grace: 5m"], 7, "log.grace", "is not a length of time", "min"),
        (["max_byte: 5GB"], 7, "log.max_byte", "is not a known key", "Did you mean `max_bytes`?"),
        (["commits: 5"], 7, "log.commits", "is not a known key", "Move it: it belongs under `log.seal`."),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_remedy(
    tmp_path: Path, lines: list[str], line: int, where: str, message: str, hint: str
) -> None:
    problem = problem_of(tmp_path, *lines)
    assert (problem.line, problem.where) == (line, where)
    assert message in problem.message
    assert hint in problem.hint


def test_checking_a_log_section_loads_nothing_heavy(tmp_path: Path) -> None:
    file = write(tmp_path, "max_bytes: 50GB", "retention: {age: none}", "seal: {age: 5min}")
    code = (
        "import sys\nfrom tailrace.pipeline.config.settings_file import check_settings\n"
        "assert check_settings(sys.argv[1]) == []\n"
        "sys.exit(str({'pyarrow', 'numpy'} & set(sys.modules)) if 'pyarrow' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- a log in an object store ----------------------------------------------------------------------------


def in_store(folder: Path, *lines: str) -> Path:
    file = write(folder, *lines)
    file.write_text(file.read_text().replace("path: ./changes", "path: s3://my-bucket/shop/changes"))
    return file


def test_a_log_may_be_in_an_object_store(tmp_path: Path) -> None:
    found = load_settings(in_store(tmp_path, "endpoint: http://minio:9000", "region: eu-west-1"), environment={}).log
    assert found.path == ObjectPath.parse("s3://my-bucket/shop/changes")
    assert isinstance(found.path, ObjectPath)
    assert found.path.options == (("endpoint", "http://minio:9000"), ("region", "eu-west-1"))
    assert pickle.loads(pickle.dumps(found.path)).options == found.path.options


def test_both_url_schemes_of_a_store_are_the_same_log(tmp_path: Path) -> None:
    file = in_store(tmp_path)
    ours = load_settings(file, environment={}).log.path
    file.write_text(file.read_text().replace("s3://", "s3a://"))
    sparks = load_settings(file, environment={}).log.path
    assert (sparks, str(sparks)) == (ours, "s3://my-bucket/shop/changes")


def test_an_untested_store_is_refused_with_the_list_of_tested_ones(tmp_path: Path) -> None:
    file = in_store(tmp_path)
    file.write_text(file.read_text().replace("s3://", "gs://"))
    (problem,) = check_settings(file, environment={})
    assert "Tests run against moto's S3 server" in problem.hint


@pytest.mark.parametrize(
    ("path", "message"),
    [("s3://b/x", "s3://bucket/prefix"), ("s3://My_Bucket/x", "s3://bucket"), ("s3://bucket/../x", "s3://bucket"),
     ("https://bucket/x", "s3://bucket"), ("s3://", "s3://bucket"), ("s3a://k:secret@bucket/x", "s3://bucket")],
)  # fmt: skip
def test_an_invalid_address_is_reported(tmp_path: Path, path: str, message: str) -> None:
    file = in_store(tmp_path)
    file.write_text(file.read_text().replace("s3://my-bucket/shop/changes", path))
    (problem,) = check_settings(file, environment={})
    assert problem.where == "log.path"
    assert message in problem.message
    assert "secret" not in str(problem)


@pytest.mark.parametrize("endpoint", ["minio:9000", "http://user:secret@minio", "http://minio/bucket", "ftp://minio"])
def test_an_endpoint_is_an_address_and_nothing_more(tmp_path: Path, endpoint: str) -> None:
    (problem,) = check_settings(in_store(tmp_path, f"endpoint: {endpoint}"), environment={})
    assert problem.where == "log.endpoint"
    assert "secret" not in str(problem)


def test_a_folder_has_no_endpoint(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, "endpoint: https://minio:9000")
    assert (problem.where, "has an endpoint or a region" in problem.message) == ("log", True)
