"""`long_texts` turns the files of QuALITY (articles with questions) and LongHealth (patients with questions) into rows
for a recipe. Each text comes once with all its questions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rewards import make_rewards
from sparse_rl.data.config import DataConfig
from sparse_rl.data.convert import main
from sparse_rl.data.problems import load_data


def article(name: str, text: str, *labels: int) -> dict[str, Any]:
    """Return a row of QuALITY with one question for each correct option, counted from 1."""
    questions = [
        {
            "question": f"{name}{label}?",
            "options": ["w", "x", "y", "z"],
            "gold_label": label,
            "question_unique_id": name,
        }
        for label in labels
    ]
    return {"article_id": name, "article": text, "questions": questions}


def patient(name: str, *correct: str) -> dict[str, Any]:
    """Return a patient of LongHealth with one question for each correct option's text."""
    options = {f"answer_{letter}": f"is {letter}" for letter in "abcde"}
    questions = [{"No": i, "question": f"{name}?", **options, "correct": right} for i, right in enumerate(correct)]
    texts = {"text_0": f"{name} one", "text_1": f"{name} two"}
    return {"name": name, "birthday": "1.1.1950", "diagnosis": "flu", "texts": texts, "questions": questions}


def rows_of(capsys: pytest.CaptureFixture, *words: str) -> list[dict[str, Any]]:
    """Return the rows that the program prints."""
    assert main(words) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_articles_come_once_with_all_their_questions(tmp_path, capsys):
    """QuALITY lists an article in several rows."""
    file = tmp_path / "QuALITY.dev"
    articles = [
        article("1", " long ", 1, 4),
        article("2", "other", 2),
        article("1", "long", 3),
        article("3", "last", 1),
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in articles))
    rows = rows_of(capsys, "quality", str(file))
    assert [(row["context"], row["answer"]) for row in rows] == [
        ("long", "A"), ("long", "D"), ("long", "C"), ("other", "B"), ("last", "A")
    ]  # fmt: skip
    assert rows[1]["prompt"] == "14?\n\nA. w\nB. x\nC. y\nD. z"
    assert rows[1]["id"] == "1"
    assert rows_of(capsys, "quality", str(file), "--texts", "2") == rows[:4]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(DataConfig(path=str(tmp_path / "rows.jsonl"), columns={"context": "context"}))
    (right,), _ = make_rewards(["boxed"])
    assert right([r"so \boxed{D}", r"\boxed{A}"], answer=data["answer"][1:3]) == [1.0, 0.0]


def test_several_patients_share_one_text(tmp_path, capsys):
    """p5 is left out, and so is a question whose correct option is not among its options."""
    file = tmp_path / "benchmark.json"
    patients = {name: patient(name, "is b", "is e ", "none of them") for name in ("p3", "p1", "p2", "p4", "p5")}
    file.write_text(json.dumps(patients))
    rows = rows_of(capsys, "longhealth", str(file), "--patients", "2")
    assert len({row["context"] for row in rows}) == 2
    assert len(rows) == 4 * 2
    first = "<text_0>\np1 one\n</text_0>\n\n<text_1>\np1 two\n</text_1>\n\n<text_0>\np2 one\n</text_0>"
    assert rows[0]["context"].startswith(first)
    assert rows[3]["context"] == rows[0]["context"]
    assert [row["answer"] for row in rows] == ["B", "E"] * 4
    expected = "About this patient: ID p2, name p2, birthday 1.1.1950, diagnosis flu.\n\np2?\n\nA. is a\n"
    assert rows[2]["prompt"].startswith(expected)
    assert rows[2]["id"] == "p2_1"
    alone = rows_of(capsys, "longhealth", str(file), "--patients", "1", "--texts", "1")
    assert len(alone) == 2
    assert alone[0]["prompt"].startswith("p1?\n\nA. is a\n")
