"""The synthetic task `retrieval`: a document states facts ("name=digit") among filler words, then asks for them. Each
document answers its questions, the splits are disjoint, and tokenizing loses no text."""

from collections import Counter

import pytest

from sparse_rl.commands.train import what_next
from sparse_rl.data.synthetic import FILLER, Retrieval
from sparse_rl.recipe import load_recipe

TASKS = [Retrieval(), Retrieval(facts=5, restated=1, filler=0), Retrieval(facts=100, restated=2, filler=5)]


@pytest.fixture(scope="module")
def tokenizer():
    return Retrieval.tokenizer()


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_answer_is_stated_in_the_document(task):
    for row in task.rows("train", 5, 1, True):
        document, first = row["prompt"].split(" asked: ")
        counts = Counter(word for word in document.split() if "=" in word)
        facts = dict(word.split("=") for word in counts)
        assert len(facts) == len(counts) == task.facts, "no name has two digits"
        assert set(counts.values()) == {task.restated}
        words = [first, *row["completion"].split()]
        assert row["answer"] == words[1]
        assert row["completion"].startswith(" ")
        assert dict(zip(words[::2], words[1::2], strict=True)) == {f"{name}?": digit for name, digit in facts.items()}
        assert len(document.split()) == task.document_tokens


def test_facts_stand_in_random_order_among_words():
    documents = [row["prompt"].split(" asked: ")[0].split()[1:] for row in Retrieval().rows("train", 40, 0)]
    assert all(("=" in word) == (index % 3 == 0) for words in documents for index, word in enumerate(words))
    assert {word for words in documents for word in words if "=" not in word} == set(FILLER)
    assert len({words[0] for words in documents}) > 30
    stated = documents[0][::3]
    rounds = [set(stated[start : start + 50]) for start in range(0, len(stated), 50)]
    assert max(map(len, rounds)) < 46, "each fact was stated once per round, in turns"
    digits = Counter(word[-1] for words in documents for word in set(words) if "=" in word)
    assert set(digits) == set("0123456789")
    assert max(digits.values()) < 1.4 * min(digits.values())


def test_one_word_is_one_token(tokenizer):
    for row in Retrieval().rows("train", 3, 0, True):
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text.split())
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.eos_token_id not in ids
        assert ids[: len(row["prompt"].split())] == tokenizer(row["prompt"])["input_ids"]
        assert tokenizer(text + "<eos>")["input_ids"] == [*ids, tokenizer.eos_token_id]
    assert len(tokenizer) == Retrieval.vocabulary == Retrieval.config().vocab_size
    assert len(set(Retrieval.words)) == len(Retrieval.words) <= Retrieval.vocabulary


def test_the_end_of_a_training_does_not_propose_an_evaluation():
    commands = {name: what_next(load_recipe(name)) for name in ("retrieval/sft", "quickstart/sft")}
    assert " eval " not in commands["retrieval/sft"]
    assert " eval " in commands["quickstart/sft"]
