"""WikiSalad: a salad is a prompt made of paragraphs of several articles in the order of a pattern such as ABAB, with
one question for each paragraph. Salads have the authors' form and contain only source text; each question becomes a
row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewards.short_answer import ShortAnswerReward
from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.wikisalad import Question, flatten, main, make_salads, read_squad, salad_prompt
from sparse_rl.errors import UserError

AUTHORS = Path(__file__).parents[3] / "shared/data"  # optional, outside the repository
PATTERNS = ["A", "ABAB", "AABBAABB", "ABCABC", "AAABBBCCCAAABBBCCC", "BA"]
SOURCE = [
    Question(
        f"Town_{t}", f"Town {t} has {p} bridges.", f"How many bridges has town {t}, {p}, {q}?", (str(p),) * (q < 2)
    )
    for t in range(5)
    for p in range(4)
    for q in range(3)
]


def as_row(question: Question) -> dict[str, Any]:
    """Return a question as a row of SQuAD."""
    answers = {"text": list(question.answers), "answer_start": [0] * len(question.answers)}
    return {"id": "x", "title": question.title, "context": question.context, "question": question.question} | {
        "answers": answers
    }


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Any, str], str]:
    """file(rows or content, name) returns the path of a file with these rows or this content."""

    def write(content: Any, name: str) -> str:
        path = tmp_path / name
        lines = "".join(json.dumps(row) + "\n" for row in content) if name.endswith(".jsonl") else json.dumps(content)
        path.write_text(lines)
        return str(path)

    return write


def rows_printed_by(capsys: pytest.CaptureFixture, *words: str) -> list[dict[str, Any]]:
    assert main(words) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---- salads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_salad_follows_its_pattern_and_its_source(pattern: str, seed: int) -> None:
    """Each letter of a pattern is one article in the salad, in the pattern's order; the questions of a salad are
    consecutive in the source, and no question occurs twice."""
    index_of = {question.question: i for i, question in enumerate(SOURCE)}
    for number, salad in enumerate(make_salads(SOURCE, pattern, 20, seed)):
        questions = salad["questions"]
        assert salad["example_id"] == number
        assert salad["metadata"]["pattern"] == pattern
        assert "".join(question["topic"] for question in questions) == pattern
        assert [question["segment_id"] for question in questions] == list(range(len(pattern)))
        articles = dict(zip(dict.fromkeys(pattern), salad["metadata"]["articles"], strict=True))
        assert len(set(articles.values())) == len(articles)
        for question in questions:
            source = SOURCE[index_of[question["question"]]]
            assert question["article"] == source.title == articles[question["topic"]]
            assert question["answers"] == {"text": list(source.answers)}
        for topic in articles:
            indices = [index_of[question["question"]] for question in questions if question["topic"] == topic]
            assert indices == list(range(indices[0], indices[0] + len(indices)))
        assert salad["prompt"] == salad_prompt(SOURCE[index_of[question["question"]]] for question in questions)


def test_the_seed_determines_the_salads() -> None:
    first, repeated, other_seed = (list(make_salads(SOURCE, "ABAB", 30, seed)) for seed in (0, 0, 1))
    assert first == repeated != other_seed
    assert len({salad["metadata"]["articles"][0] for salad in first}) == 5
    assert len({salad["questions"][0]["question"] for salad in first}) > 10
    assert list(make_salads(SOURCE, "ABAB", 5, 0)) == first[:5]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("abab", "pattern: expected capital letters"),
        ("", "pattern: expected capital letters"),
        ("ABCDEF", "ABCDEF needs 6 articles with at least 1 questions each, but only 5 of 5 articles have them"),
        ("A" * 13, "needs 1 articles with at least 13 questions each, but only 0 of 5 articles have them"),
    ],
)
def test_a_pattern_that_the_source_cannot_fill_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(make_salads(SOURCE, pattern, 1))


def test_squad_is_read_in_each_of_its_forms(file: Callable) -> None:
    """SQuAD can be rows in JSON lines, a JSON list of rows, or the one object of a SQuAD file, even a large one."""
    rows = [as_row(question) for question in SOURCE]
    assert read_squad(file(rows, "a.jsonl")) == read_squad(file(rows, "a.json")) == SOURCE
    paragraphs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for question in SOURCE:
        given_answers = [{"text": text, "answer_start": 3} for text in question.answers * 2]  # a true answer, repeated
        entry = {
            "id": "x",
            "question": question.question,
            "answers": given_answers,
            "is_impossible": not given_answers,
        }
        paragraphs.setdefault((question.title, question.context), []).append(entry)
    articles = [
        {"title": title, "paragraphs": [{"context": c, "qas": q} for (t, c), q in paragraphs.items() if t == title]}
        for title in dict.fromkeys(question.title for question in SOURCE)
    ]
    assert read_squad(file({"version": "v2.0", "data": articles}, "own.json")) == SOURCE
    large = {"title": "Large", "paragraphs": [{"context": "word " * 4_000_000, "qas": []}]}
    assert read_squad(file({"version": "v2.0", "data": [large, *articles]}, "large.json")) == SOURCE


# ---- questions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["ABCABC", "AAABBBCCCAAABBBCCC"])
def test_the_programs_turn_squad_into_rows_that_a_recipe_reads(
    pattern: str, file: Callable, capsys: pytest.CaptureFixture
) -> None:
    """The program `make` turns SQuAD into salads, `questions` turns salads into rows, and a data block reads the
    rows."""
    squad = file([as_row(question) for question in SOURCE], "squad.jsonl")
    salads = rows_printed_by(capsys, "make", squad, "--pattern", pattern, "--count", "7", "--seed", "3")
    assert salads == list(make_salads(SOURCE, pattern, 7, 3))
    rows = rows_printed_by(capsys, "questions", file(salads, "salads.jsonl"))
    assert rows == list(flatten(salads))
    assert len(rows) == 7 * len(pattern)
    assert "".join(row["topic"] for row in rows) == pattern * 7
    data = load_data(DataConfig(path=file(rows, "rows.jsonl"), chat=False))
    assert data.to_list() == [dict(row) for row in rows]
    assert any(not row["answers"] for row in rows)
    first, question = rows[0], salads[0]["questions"][0]
    instruction = "\n\nAnswer the following question in one short phrase. Do not include any other text.\n\nQuestion: "
    assert first["prompt"] == f"{salads[0]['prompt']}{instruction}{question['question']}\n\nAnswer:"
    assert {name: first[name] for name in ("pattern", "segment", "topic")} == {
        "pattern": pattern, "segment": 0, "topic": "A",
    }  # fmt: skip
    assert first["answers"] == question["answers"]["text"]


@pytest.mark.parametrize(
    ("name", "questions", "answerable", "nowhere"),
    [("easy", 400, 382, 62), ("medium", 800, 602, 140), ("hard", 600, 512, 110), ("very_hard", 900, 646, 131)],
)
def test_the_authors_salads_have_our_prompts_and_their_answers_are_accepted(
    name: str, questions: int, answerable: int, nowhere: int, capsys: pytest.CaptureFixture
) -> None:
    """The authors' prompts equal ours for the same segments, and a correct answer is accepted.

    Equality refuses a true answer of more than 100 characters: it compares only the first sentence of such a text.
    """
    path = AUTHORS / f"wikisalad_{name}.jsonl"
    if not path.is_file():
        pytest.skip("the authors' rows are not here")
    for salad in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        bodies = re.split(r"(?:^|\n\n)# Segment \d+: .*\n\n", salad["prompt"])[1:]
        segments = [
            Question(question["article"], body.rpartition("\n\n\nQuestion ")[0], question["question"], ())
            for question, body in zip(salad["questions"], bodies, strict=True)
        ]
        assert salad_prompt(segments) == salad["prompt"]
        assert "".join(question["topic"] for question in salad["questions"]) == salad["metadata"]["pattern"]
    rows = rows_printed_by(capsys, "questions", str(path))
    assert len(rows) == questions
    assert sum(bool(row["answers"]) for row in rows) == answerable
    cut_off = [row for row in rows if row["answers"] and row["answers"][0].strip().lower() not in row["prompt"].lower()]
    assert len(cut_off) == nowhere  # the authors cut paragraphs after three sentences; these answers were cut off
    answers_given = [f" {row['answers'][0]}\nmore" if row["answers"] else " none" for row in rows]
    true = [row["answers"] for row in rows]
    judged = ShortAnswerReward(match="contained", unanswerable="left_out")(answers_given, answers=true)
    assert judged == [1.0 if answers else None for answers in true]
    exact = ShortAnswerReward(unanswerable="left_out")(answers_given, answers=true)
    refused = [answers for answers, reward in zip(true, exact, strict=True) if reward == 0]
    assert len(refused) <= 1
    assert all(len(answers[0]) > 100 for answers in refused)


# ---- errors --------------------------------------------------------------------------------------------------------

SALAD = {"prompt": "p", "questions": [{"question": "q", "answers": {"text": ["a"]}}]}


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (["questions"], [{"questions": []}], "no text 'prompt'"),
        (["questions"], [{"prompt": "p"}], "no list of 'questions'; is it a file of salads?"),
        (["questions"], [{"prompt": "p", "questions": "q"}], "no list of 'questions'"),
        (["questions"], [SALAD, {"prompt": "p", "questions": [{"question": "q"}]}], "row 2: expected answers"),
        (["questions"], [{"prompt": "p", "questions": [{"question": 3, "answers": ["a"]}]}], "no text 'question'"),
        (["questions"], [], "has no rows"),
        (["questions"], [3], "rows that are not JSON objects"),
        (["make", "--pattern", "AB"], [{"title": "t"}], "row 1 has no text 'context'; it has title"),
        (["make", "--pattern", "AB"], [as_row(SOURCE[0]) | {"answers": 3}], "row 1: expected answers {text: [...]}"),
        (["questions"], [SALAD | {"metadata": 3}], "metadata is not a mapping"),
        (["make", "--pattern", "AB"], [{"data": [3]}], "does not have the format of SQuAD's own files"),
        (["make", "--pattern", "AB"], [{"data": [{"title": "t"}]}], "does not have the format of SQuAD's own files"),
        (["make", "--pattern", "AB"], [as_row(SOURCE[0])], "needs 2 articles"),
        (["make"], [], "the following arguments are required: --pattern"),
        (["make", "--pattern", "AB", "--count", "0"], [], "--count: expected a whole number from 1 to 1,000,000"),
        (["make", "--pattern", "AB", "--seed", "x"], [], "--seed"),
        (["mix"], [], "invalid choice"),
    ],
)
def test_each_user_error_gives_one_line(
    words: list[str], content: Any, message: str, file: Callable, capsys: pytest.CaptureFixture
) -> None:
    assert main([words[0], file(content, "it.jsonl"), *words[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wikisalad: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_file_that_cannot_be_read_gives_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "broken.jsonl").write_text('\n{"prompt": \n')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    for path, message in (
        ("nothing.jsonl", "No such file"),
        (".", "Is a directory"),
        ("broken.jsonl", "line 2: not JSON"),
        ("deep.json", "not JSON"),
        ("latin.jsonl", "can't decode byte"),
        ("null\0", "null byte"),
    ):
        assert main(["questions", str(tmp_path / path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert message in err
    assert main([]) == 2
    assert "required: make | questions" in capsys.readouterr().err
