"""Lists in text are those that JSON and Python have written, or a fault of their row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.sources.arrow import pa
from dlrm_hybrid.data.sources.cells import JSON, split_list
from dlrm_hybrid.data.sources.files import Block
from dlrm_hybrid.data.sources.values import read_values
from dlrm_hybrid.saved.inputs import ModelInputs
from dlrm_hybrid.types import DataError

SCHEMA = reading.loads(
    "label: y\ndense: []\ncategorical: [{name: t, max_length: 9, separator: json}]\n"
    "split: {by: fraction, test: 0.5}",
    "s.yaml",
)
LISTS: list[Any] = [["a", "Free To Play"], [], None, ["it's", 'b"', None, ""], ["a"], ["é", "\\"]]


def told(array: Any) -> tuple[list[Any], list[Any]]:
    columns = pa.record_batch([pa.array([0] * len(array)), array], ["y", "t"])
    block = Block(columns, np.arange(1, len(array) + 1, dtype=np.int64), ())
    values, bad = read_values(block, SCHEMA, "a.csv", labels=True)
    (coded,) = values.categories
    assert coded.length_N is not None
    keys: list[Any] = [coded.keys[index] for index in coded.index_M.tolist()]
    return [keys, coded.length_N.tolist()], [(one.row, one.column, one.reason) for one in bad]


@pytest.mark.parametrize("write", [json.dumps, str])
def test_lists_in_brackets_are_lists(write: Any) -> None:
    text = pa.array(["" if one is None else write(one) for one in LISTS], pa.binary())
    assert told(text) == told(pa.array(LISTS))


def test_text_that_is_no_list_is_a_bad_row() -> None:
    _, bad = told(pa.array(["['a']", "a", "['a' 'b']", "[[1]]", "{}", None]))
    assert [row for row, _, _ in bad] == [2, 3, 4, 5]
    assert bad[0] == (2, "t", '\'a\' is no list as ["a", "b"]')
    assert bad[2] == (4, "t", "'[[1]]' has list values in it")


ABOUT: dict[str, Any] = {
    "data": {"max_ind_range": None, "schema": asdict(SCHEMA)},
    "inputs": {"ids_1": {"columns": [{"name": "t", "first_id": 0, "vocabulary": "1.json"}]}},
}


def exported(folder: Path, about: Any = ABOUT, vocabulary: str = '["a", "b"]') -> Path:
    (folder / "model.json").write_text(json.dumps(about))
    (folder / "1.json").write_text(vocabulary)
    return folder


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within a value, and each of its keys."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


GONE = object()


@pytest.mark.parametrize("junk", [GONE, None, {}, "../x", "/dev/zero", -1, [[1]]])
def test_a_damaged_export_is_one_sentence(tmp_path: Path, junk: Any) -> None:
    for number in range(len(list(places(ABOUT)))):
        about = json.loads(json.dumps(ABOUT))
        inner, key = list(places(about))[number]
        inner[key] = junk
        if junk is GONE:
            del inner[key]
        try:
            ModelInputs(exported(tmp_path, about))([{"t": ["b"]}])
        except DataError as error:
            assert str(error).startswith((str(tmp_path), "row 1: ")) and "\n" not in str(error)
    for text in ("", "{", "[1]", '{"a": 1}', "null", "[" * 10_000):
        with pytest.raises(DataError, match=r"model\.json: it, or a vocabulary"):
            ModelInputs(exported(tmp_path, vocabulary=text))
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(DataError, match=r"model\.json: it, or a vocabulary"):
            ModelInputs(tmp_path)
    (tmp_path / "model.json").unlink()
    with pytest.raises(
        DataError, match=r"model\.json: No such file .*; name a folder that `export`"
    ):
        ModelInputs(tmp_path)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("../theirs.json", "leads out of its folder"),
        ("link.json", "leads out of its folder"),
        ("pipe", "is not a plain file"),
    ],
)
def test_an_export_names_plain_files_of_its_folder(tmp_path: Path, file: str, told: str) -> None:
    (tmp_path / "theirs.json").write_text("[]")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "link.json").symlink_to(tmp_path / "theirs.json")
    os.mkfifo(folder / "pipe")
    about = json.loads(json.dumps(ABOUT))
    about["inputs"]["ids_1"]["columns"][0]["vocabulary"] = file
    with pytest.raises(DataError, match=f"{file}: {told}"):
        ModelInputs(exported(folder, about))
    (folder / "model.json").unlink()
    os.mkfifo(folder / "model.json")
    with pytest.raises(DataError, match=r"model\.json: is not a plain file"):
        ModelInputs(folder)


values = st.lists(st.text(max_size=5) | st.integers() | st.none() | st.booleans(), max_size=4)


@given(values)
def test_what_was_written_is_read(items: list[Any]) -> None:
    wanted = [
        "" if one is None else one if isinstance(one, str) else json.dumps(one) for one in items
    ]
    assert split_list(json.dumps(items), JSON) == wanted
    assert split_list(json.dumps(items, ensure_ascii=False, indent=1), JSON) == wanted
    assert split_list(str(items), JSON) == wanted
    assert split_list(str(tuple(items)), JSON) == wanted


@given(st.text("[]()'\"\\,ab1 \n{}:.x", max_size=20) | st.text(max_size=9).map("[{}]".format))
def test_any_text_is_a_list_or_a_fault(text: str) -> None:
    try:
        found = split_list(text, JSON)
    except ValueError:
        return
    assert all(isinstance(one, str) for one in found)
