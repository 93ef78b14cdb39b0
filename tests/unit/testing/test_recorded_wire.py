"""Bytes of a real server are decoded to the same result as when they were recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.model.mirror import Mirror
from tailrace.testing.checks import ContractBroken
from tailrace.testing.recorded_wire import Recording, load, record

GOLDENS = sorted((Path(__file__).parents[2] / "fixtures" / "wire-format-1").glob("*.json"))


def golden(name: str) -> Recording:
    return load(next(path for path in GOLDENS if path.stem.endswith(name)))


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_a_golden_is_decoded_to_the_rows_it_was_recorded_with(path: Path) -> None:
    recording = load(path)
    assert recording.batches
    assert recording.error is None
    recording.check()


def test_the_rows_are_those_of_the_statements() -> None:
    """So a golden file is not only unchanged, but right."""
    mirror, sizes = Mirror(), []
    for event in (event for batch in golden("keys").replay().batches for event in batch.events()):
        mirror.apply(event.row_write())
        sizes.append({key: len(row["note"]) for key, row in mirror.rows.items()})
    assert sizes == [
        {(1,): 3000},
        {(1,): 3000, (2,): 0},
        {(1,): 3000, (2,): 0},
        {(1,): 3000, (2,): 0},
        {(11,): 3000, (2,): 0},
        {(11,): 3000, (2,): 0},
        {(12,): 3000, (2,): 0},
        {(12,): 3000},
        {},
    ]
    shapes = [batch.schema.names for batch in golden("shapes").replay().batches]
    assert shapes == [["id", "a", "b"], ["id", "a", "b", "c"], ["id", "b", "c"]]


def test_a_decoder_with_another_result_is_reported_with_the_difference() -> None:
    recording = golden("types")
    (batch,) = recording.batches
    place = batch.data.schema.get_field_index("t")
    other = batch.data.set_column(place, batch.data.schema.field(place), batch.data.column(place).take([2, 1, 0]))
    with pytest.raises(ContractBroken, match=r"public\.every has other values or columns: t"):
        replace(recording, batches=(replace(batch, data=other),)).check()
    with pytest.raises(ContractBroken, match="ended with no error, recorded is protocol-violation"):
        replace(recording, error="protocol-violation", batches=()).check()


def test_a_fault_of_the_decoder_is_recorded_and_reproduced(tmp_path: Path) -> None:
    recording = golden("types")
    broken = (*recording.messages[:2], recording.messages[2][:-3], *recording.messages[3:])
    with pytest.raises(ContractBroken, match="ended with protocol-violation, recorded is none"):
        replace(recording, messages=broken).check()
    replace(recording, messages=broken, batches=(), error="protocol-violation").save(tmp_path / "fault.json")
    load(tmp_path / "fault.json").check()


def test_a_recording_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    recording = golden("identities")
    recording.save(tmp_path / "again.json")
    again = load(tmp_path / "again.json")
    again.check()
    assert replace(again, batches=()) == replace(recording, batches=())
    assert [batch.data.schema for batch in again.batches] == [batch.data.schema for batch in recording.batches]


@pytest.mark.parametrize("content", ["", "{}", json.dumps({"format": 2})])
def test_a_file_that_is_not_a_recording_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match="not a recording"):
        load(tmp_path / "x.json")


@pytest.mark.parametrize(("name", "said"), [("none.json", "No such file"), ("", "Is a directory")])
def test_a_missing_recording_is_reported_with_its_path(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot be read: {said}") as raised:
        load(tmp_path / name)
    assert raised.value.hint == "Check the path."


def test_publications_must_be_a_list() -> None:
    with pytest.raises(ConfigError, match="not a list") as raised:
        record("postgresql://localhost/shop", slot="mine", publications="mine")
    assert "publications=['mine']" in raised.value.hint
