"""WikiSalad: a salad is a prompt made of paragraphs of several articles in the order of a pattern such as ABAB, with
one question for each paragraph. Salads have the authors' form and contain only source text; each question becomes a
row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_long_texts import article, patient

from rewards.text import ShortAnswerReward
from sparse_rl.data.config import DataConfig
from sparse_rl.data.convert import Question, flatten, main, make_salads, read_squad, salad_prompt
from sparse_rl.data.problems import load_data
from sparse_rl.errors import UserError

AUTHORS = Path(__file__).parents[3] / "shared/data"  # optional, outside the repository
OF_MODEL = ["--model", str(Path(__file__).parents[2] / "recipes/quickstart/model"), "--tokens", "9"]
LONGHEALTH = ["longhealth", "--patients", "1"]
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
def file(tmp_path):
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


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_salad_follows_its_pattern_and_its_source(pattern, seed):
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


def test_the_seed_determines_the_salads():
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
def test_a_pattern_that_the_source_cannot_fill_is_refused(pattern, message):
    with pytest.raises(UserError, match=message):
        list(make_salads(SOURCE, pattern, 1))


def test_squad_is_read_in_each_of_its_forms(file):
    rows = [as_row(question) for question in SOURCE]
    assert read_squad(file(rows, "a.jsonl")) == read_squad(file(rows, "a.json")) == SOURCE
    paragraphs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for question in SOURCE:
        given_answers = [{"text": text, "answer_start": 3} for text in question.answers * 2]  # a true answer, repeated
        entry = {"id": "x", "question": question.question, "answers": given_answers, "is_impossible": not given_answers}
        paragraphs.setdefault((question.title, question.context), []).append(entry)
    articles = [
        {"title": title, "paragraphs": [{"context": c, "qas": q} for (t, c), q in paragraphs.items() if t == title]}
        for title in dict.fromkeys(question.title for question in SOURCE)
    ]
    assert read_squad(file({"version": "v2.0", "data": articles}, "own.json")) == SOURCE
    large = {"title": "Large", "paragraphs": [{"context": "word " * 4_000_000, "qas": []}]}
    assert read_squad(file({"version": "v2.0", "data": [large, *articles]}, "large.json")) == SOURCE


@pytest.mark.parametrize("pattern", ["ABCABC", "AAABBBCCCAAABBBCCC"])
def test_the_programs_turn_squad_into_rows_that_a_recipe_reads(pattern, file, capsys):
    squad = file([as_row(question) for question in SOURCE], "squad.jsonl")
    salads = rows_printed_by(capsys, "wikisalad", squad, "--pattern", pattern, "--count", "7", "--seed", "3")
    assert salads == list(make_salads(SOURCE, pattern, 7, 3))
    rows = rows_printed_by(capsys, "wikisalad-questions", file(salads, "salads.jsonl"))
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
    name, questions, answerable, nowhere, capsys
):
    """Equality refuses a true answer of more than 100 characters: it compares only its first sentence."""
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
    rows = rows_printed_by(capsys, "wikisalad-questions", str(path))
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


MAKE, QUESTIONS = ["wikisalad", "--pattern", "AB"], ["wikisalad-questions"]
SALAD = {"prompt": "p", "questions": [{"question": "q", "answers": {"text": ["a"]}}]}


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (QUESTIONS, [{"questions": []}], "no text 'prompt'"),
        (QUESTIONS, [{"prompt": "p"}], "no list 'questions'"),
        (QUESTIONS, [{"prompt": "p", "questions": "q"}], "no list 'questions'"),
        (QUESTIONS, [SALAD, {"prompt": "p", "questions": [{"question": "q"}]}], "row 2: expected answers"),
        (QUESTIONS, [{"prompt": "p", "questions": [{"question": 3, "answers": ["a"]}]}], "no text 'question'"),
        (QUESTIONS, [], "no rows"),
        (QUESTIONS, [3], "row 1 is not a JSON object"),
        (MAKE, [{"title": "t"}], "row 1 has no text 'context'; it has title"),
        (MAKE, [as_row(SOURCE[0]) | {"answers": 3}], "row 1: expected answers {text: [...]}"),
        (MAKE, [{"data": [3]}], "does not have the format of SQuAD's own files"),
        (MAKE, [{"data": [{"title": "t"}]}], "does not have the format of SQuAD's own files"),
        (MAKE, [as_row(SOURCE[0])], "needs 2 articles"),
        (["nemotron", *OF_MODEL], [{"problem": "x"}], "row 1 has no list 'messages'; it has problem"),
        (["nemotron", *OF_MODEL], '{"messages": 1', "line 1 is not JSON"),
        (["nemotron", *OF_MODEL], [{"messages": []}], "no rows"),
        (["longmino", *OF_MODEL], [1], "row 1 is not a JSON object"),
        (["longmino", *OF_MODEL], [], "no rows"),
        (["quality"], [{"questions": []}], "row 1 has no text 'article'"),
        (["quality"], [{"article": "a"}], "row 1 has no list 'questions'"),
        (["quality"], [article("7", "a", 5)], "article 7 has a question without gold_label"),
        (["quality"], [{"article": "a", "article_id": 1, "questions": [3]}], "article 1 has no list 'options'"),
        (LONGHEALTH, [{"p1": 3}], "p1 has no mapping 'texts'"),
        (LONGHEALTH, [{"p1": {"texts": {}, "name": "p"}}], "p1 has no text 'birthday'"),
        (LONGHEALTH, [{"p1": {**patient("p1"), "questions": [{}]}}], "p1, question 1 has no text 'answer_a'"),
    ],
)
def test_each_user_error_gives_one_line(words, content, message, file, capsys):
    place = file(content, "it.jsonl")
    if isinstance(content, str):
        Path(place).write_text(content + "\n")
    assert main([words[0], place, *words[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("convert: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_file_that_cannot_be_read_gives_one_line(tmp_path, capsys):
    (tmp_path / "broken.jsonl").write_text('\n{"prompt": \n')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    for path, message in (
        ("nothing.jsonl", "No such file"),
        (".", "Is a directory"),
        ("broken.jsonl", "line 2 is not JSON"),
        ("deep.json", "nested more than"),
        ("latin.jsonl", "line 1 is not UTF-8"),
    ):
        assert main(["wikisalad-questions", str(tmp_path / path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert message in err
    for words in (["wikisalad"], ["wikisalad", "--pattern", "AB", "--count", "0", "a.jsonl"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
