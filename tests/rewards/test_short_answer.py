"""The short-answer reward takes the answer from a completion, normalises it as SQuAD does, and compares it with the
true answers."""

from __future__ import annotations

import random
import re
import string

import pytest

from rewards import make_rewards
from rewards.text import ShortAnswerReward, normalised, short_answer

LONG = "word " * 30  # more than 100 characters


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" Paris\n\nQuestion: another", "Paris"),
        ("\n \n Paris \nLyon", "Paris"),
        ("Paris. It is large.", "Paris. It is large."),  # not long
        (f"It is Paris. {LONG}", "It is Paris"),
        (f"It is Paris! {LONG}\nLyon.", "It is Paris"),
        (f"It is 3.5 metres? {LONG}", "It is 3.5 metres"),  # a full stop within a word does not end a sentence
        (f"Paris. {LONG}", f"Paris. {LONG}".strip()),  # its first sentence is short
        (f"Paris {LONG}.", f"Paris {LONG}."),
        ("", ""),
        (" \n\n ", ""),
    ],
)
def test_the_answer_is_the_first_line_or_its_first_sentence(completion: str, answer: str) -> None:
    assert short_answer(completion) == answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Great\tWall!", "great wall"),
        ("an apple a day", "apple day"),
        ("Theatre, anthem & atlas", "theatre anthem atlas"),  # only whole words are articles
        ("U.S.A.", "usa"),  # punctuation is removed before articles
        ("Type-A or a Type-B", "typea or typeb"),
        ("6:00 a.m.", "600 am"),
        ("620–740", "620–740"),  # only ASCII punctuation is removed
        ("_a_ b", "b"),
        ("400,325", "400325"),
        ("'the'", ""),
        ("Frédéric", "frédéric"),
    ],
)
def test_normalisation_removes_case_punctuation_and_articles(text: str, expected: str) -> None:
    assert normalised(text) == expected


def test_normalisation_equals_squads_official_evaluation() -> None:
    """Normalisation equals SQuAD's steps on random texts of the characters and words that the steps change."""
    draw = random.Random(0)
    for _ in range(2000):
        text = "".join(
            draw.choice(["A", "an", "the", "x", "É", "7", " ", "\t", ".", "-", "_", "–", "'"]) for _ in range(9)
        )
        lower = text.lower()
        bare = "".join(letter for letter in lower if letter not in set(string.punctuation))
        assert normalised(text) == " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


@pytest.mark.parametrize(
    ("completion", "answers", "exact", "contained"),
    [
        ("The Danube.", ["danube"], 1, 1),
        ("Danube", ["the Rhine", "the Danube"], 1, 1),
        ("the river Danube", ["Danube"], 0, 1),
        ("Danube", ["the river Danube"], 0, 1),
        ("in art", ["heart"], 0, 0),
        ("art", ["heart"], 0, 1),  # a substring counts, as in the authors' code
        ("Rhine", ["Danube"], 0, 0),
        ("", ["Danube"], 0, 0),
        ("the", ["Danube"], 0, 0),  # normalisation leaves no text
        ("anything", ["the"], 0, 0),
        ("the", ["the"], 0, 0),
        ("Danube\nRhine", ["Rhine"], 0, 0),
    ],
)
def test_an_answer_must_equal_or_contain_one_of_the_true_answers(
    completion: str, answers: list[str], exact: float, contained: float
) -> None:
    message = [{"role": "assistant", "content": completion}]
    for match, reward in (("exact", exact), ("contained", contained)):
        function = ShortAnswerReward(match=match)  # type: ignore[arg-type]
        assert function([completion, message], answers=[answers, answers]) == [reward, reward]


def test_equal_answers_also_contain_the_true_answer_in_any_order() -> None:
    """If `match: exact` gives 1, so does `match: contained`. The order of the true answers does not matter."""
    texts = ["the Danube", "Danube river", "a Rhine", "", "42", "4"]
    for completion in texts:
        for one in texts:
            for two in texts:
                rewards = {
                    (match, order): ShortAnswerReward(match=match)([completion], answers=[list(order)])  # type: ignore[arg-type]
                    for match in ("exact", "contained")
                    for order in ((one, two), (two, one))
                }
                assert rewards["exact", (one, two)] == rewards["exact", (two, one)]
                assert rewards["contained", (one, two)] == rewards["contained", (two, one)]
                assert rewards["exact", (one, two)] <= rewards["contained", (one, two)]


@pytest.mark.parametrize("match", ["exact", "contained"])
@pytest.mark.parametrize("empty", [[], None])
def test_an_unanswerable_question_is_wrong_or_left_out(match: str, empty: list | None) -> None:
    """A question without true answers has reward 0 (`unanswerable: wrong`) or None (`left_out`)."""
    completions, answers = ["no answer", "", "7"], [empty, empty, ["7"]]
    for unanswerable, expected in (("wrong", [0.0, 0.0, 1.0]), ("left_out", [None, None, 1.0])):
        (function,), _ = make_rewards([{"name": "short_answer", "match": match, "unanswerable": unanswerable}])
        assert function(completions, answers=answers) == expected


def test_a_wrong_parameter_or_column_gives_a_one_line_error() -> None:
    for parameter in ("match", "unanswerable"):
        with pytest.raises(ValueError, match=f"reward 'short_answer': {parameter} must be one of"):
            make_rewards([{"name": "short_answer", parameter: "maybe"}])
    with pytest.raises(ValueError, match=r"needs a column 'answers', but the data has \['answer'\]"):
        ShortAnswerReward()(["7"], answer=["7"])
    with pytest.raises(ValueError, match="got 1 completions but 2 'answers'"):
        ShortAnswerReward()(["7"], answers=[["7"], ["8"]])
    for wrong in ("7", {"text": ["7"]}):
        with pytest.raises(ValueError, match="must be a list of texts for each completion, not"):
            ShortAnswerReward()(["7"], answers=[wrong])
