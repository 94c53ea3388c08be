"""Datasets of problems that a program solves: starter code, tests, rows selected by `where`, and files on the hub."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.source import meets
from sparse_rl.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def load(tmp_path: Path, rows: list[dict[str, Any]], **keys: Any) -> Any:
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(DataConfig(path=str(file), **keys), None)


ROWS = [
    {"prompt": "Add.", "code": "def add(a, b):\n", "day": "2024-08-01T00:00:00", "level": "easy", "rating": 3},
    {"prompt": "Print.", "code": "", "day": "2025-02-01T09:30:00", "level": "hard", "rating": 5},
    {"prompt": "Sort.", "code": None, "day": "2025-02-02T00:00:00", "level": "easy", "rating": None},
]


def test_an_instruction_with_the_starter_code_follows_the_problem(tmp_path):
    data = load(tmp_path, ROWS, columns={"starter_code": "code"}, prompt_template="Think. {prompt}")
    started, empty, missing = data["prompt"]
    assert started.startswith("Think. Add.\n\nComplete this Python code")
    assert "```python\ndef add(a, b):\n```" in started
    assert empty.startswith("Think. Print.\n\nWrite a Python program that reads the input from standard input")
    assert missing.startswith("Think. Sort.\n\nWrite a Python program")
    assert all(prompt.endswith("between ```python and ```.") for prompt in data["prompt"])
    assert "code" not in data.column_names


@pytest.mark.parametrize(
    "tests",
    [["assert add(1, 2) == 3"], '{"inputs": ["1"]}', {"ground_truth": "[]", "style": "rule"},
     [{"input": "", "output": "1"}]],
)  # fmt: skip
def test_tests_are_passed_on_unchanged_under_their_name(tmp_path, tests):
    rows = [{"prompt": str(number), "test_list": tests, "id": number} for number in range(3)]
    data = load(tmp_path, rows, columns={"tests": "test_list"}, where={"id": [0, 2]})
    assert data.column_names == ["prompt", "id", "tests"]
    assert data["tests"][:] == [tests, tests]
    assert data["prompt"][:] == ["0", "2"]
    renamed = [{"prompt": "0", "tests": tests}]
    assert (
        load(tmp_path, renamed)["tests"][0] == load(tmp_path, renamed, columns={"tests": "tests"})["tests"][0] == tests
    )


def test_a_row_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 1: it has no 'tests'"):
        load(tmp_path, [{"prompt": "a", "tests": None}, {"prompt": "b", "tests": "x"}], columns={"tests": "tests"})


@pytest.mark.parametrize(
    ("where", "prompts"),
    [
        ({}, ["Add.", "Print.", "Sort."]),
        ({"level": "easy"}, ["Add.", "Sort."]),
        ({"level": ["hard", "none"]}, ["Print."]),
        ({"day": {"from": "2024-09-01"}}, ["Print.", "Sort."]),
        ({"day": {"until": "2025-02-01"}}, ["Add.", "Print."]),  # the whole day
        ({"day": {"from": "2024-08-01", "until": "2024-08-01"}}, ["Add."]),
        ({"day": {"from": "2025"}, "level": "easy"}, ["Sort."]),
        ({"rating": {"from": 4}}, ["Print."]),
        ({"rating": 3}, ["Add."]),
    ],
)
def test_where_selects_rows(tmp_path, where, prompts):
    assert load(tmp_path, ROWS, where=where)["prompt"][:] == prompts


def test_dates_are_compared_as_text():
    assert meets(datetime.datetime(2025, 2, 1, 9), {"until": "2025-02-01"})
    assert meets(datetime.date(2025, 2, 1), {"from": "2025-02-01"})
    assert not meets(datetime.datetime(2025, 2, 2), {"until": "2025-02-01"})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"levl": "easy"}, "data.where.levl: no such column; the source has .*level"),
        ({"level": "medium"}, "data.where.level: no row is left; the values are 'easy', 'hard'"),
        ({"level": {"from": 3}}, "data.where.level: .* cannot be compared with 'easy'"),
        ({"rating": {"from": "2"}}, "data.where.rating: .* cannot be compared with 3"),
        ({"level": {"form": "a"}}, "where.level: give a value"),
        ({"level": {}}, "where.level: give a value"),
        ({"level": []}, "where.level: give a value"),
        ({"level": None}, "where.level: give a value"),
        ({"level": [["easy"]]}, "where.level: give a value"),
    ],
)
def test_a_wrong_condition_is_one_line(tmp_path, where, message):
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, ROWS, where=where)
    assert "\n" not in str(caught.value)


def test_an_error_shows_a_value_although_the_first_row_has_none(tmp_path):
    with pytest.raises(UserError, match="cannot be compared with 5"):
        load(tmp_path, ROWS[::-1], where={"rating": {"from": "2"}, "level": "easy"})


def test_files_on_the_hub_are_read_by_their_suffix(monkeypatch):
    def fake(kind: str, data_files: dict[str, list[str]], split: str) -> Any:
        assert kind == "json"
        assert data_files == {"test": ["hf://datasets/some/data/a.jsonl", "hf://datasets/some/data/sub/b.jsonl"]}
        assert split == "test[:1]"
        return datasets.Dataset.from_list(ROWS[:1])

    monkeypatch.setattr(datasets, "load_dataset", fake)
    config = DataConfig(path="some/data", files=["a.jsonl", "sub/b.jsonl"], split="test[:1]")
    assert load_data(config, None)["prompt"][:] == ["Add."]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "mine.jsonl", "files": ["a.jsonl"]}, "files: is for a dataset on the hub"),
        ({"path": "some/data", "files": ["a.txt"]}, "files: name files with one of the suffixes"),
        ({"path": "some/data", "files": ["a.json", "b.csv"]}, "files: name files with one of the suffixes"),
        ({"path": "some/data", "files": []}, "files: name files with one of the suffixes"),
        ({"path": "some/data", "release": "v6"}, "release: only datasets on the hub"),
    ],
)
def test_wrong_files_are_one_line(keys, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**keys)
