"""The synthetic task `retrieval`: a document states facts ("name=digit") among filler words, then asks for them. Each
document answers its questions, the splits are disjoint, and tokenizing loses no text."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from sparse_rl.commands.train import what_next
from sparse_rl.data import retrieval
from sparse_rl.data.config import DataConfig, SyntheticConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.retrieval import Retrieval, build_config, build_tokenizer, problems, rows
from sparse_rl.data.synthetic import split_of
from sparse_rl.errors import UserError
from sparse_rl.recipe import load_recipe

pytest.importorskip("datasets")
SHIPPED = Path(__file__).parents[2] / "recipes/retrieval/model"
TASKS = [Retrieval(), Retrieval(facts=5, restated=1, filler=0), Retrieval(facts=100, restated=2, filler=5)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_answer_is_stated_in_the_document(task):
    """Each document states `facts` names with one digit each, `restated` times. The answer is the digit of the first
    question; the completion also answers the questions about all other facts."""
    for row in rows("train", 5, 1, True, task):
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
    """Each document states its facts in a new random order, and the words between the facts are filler."""
    documents = [row["prompt"].split(" asked: ")[0].split()[1:] for row in rows("train", 40, 0)]
    assert all(("=" in word) == (index % 3 == 0) for words in documents for index, word in enumerate(words))
    assert {word for words in documents for word in words if "=" not in word} == set(retrieval.FILLER)
    assert len({words[0] for words in documents}) > 30
    stated = documents[0][::3]
    rounds = [set(stated[start : start + 50]) for start in range(0, len(stated), 50)]
    assert max(map(len, rounds)) < 46, "each fact was stated once per round, in turns"
    digits = Counter(word[-1] for words in documents for word in set(words) if "=" in word)
    assert set(digits) == set("0123456789")
    assert max(digits.values()) < 1.4 * min(digits.values())


# ---- splits ------------------------------------------------------------------------------------------------


def test_splits_have_no_common_problem_for_any_seed():
    task = Retrieval(facts=2)
    problems_of = {split: set() for split in ("train", "calibration", "evaluation")}
    for split, seen in problems_of.items():
        for seed in range(2):
            result = list(islice(problems(split, seed, task), 400))
            assert {split_of(problem) for problem in result} == {split}
            seen.update(result)
    assert not problems_of["train"] & (problems_of["calibration"] | problems_of["evaluation"])
    assert not problems_of["calibration"] & problems_of["evaluation"]
    # control: common problems are detected: the task below is so small that two seeds of one split share some
    assert set(islice(problems("train", 0, Retrieval(1)), 500)) & set(islice(problems("train", 1, Retrieval(1)), 500))


def test_rows_are_reproducible():
    """Rows depend on the seed alone: fewer rows are the beginning of more rows, and completions change nothing else."""
    first = rows("train", 4, 3)
    assert rows("train", 2, 3) == first[:2]
    assert rows("train", 4, 4) != first
    worked = rows("train", 4, 3, True)
    assert [{**row, "completion": None} for row in first] == [{**row, "completion": None} for row in worked]


# ---- settings in a recipe ------------------------------------------------------------------------------------


def test_a_recipe_can_load_the_task(tokenizer):
    config = SyntheticConfig(task="retrieval", size=3, split="evaluation", facts=4, restated=2, filler=1)
    assert load_data(DataConfig(synthetic=config), tokenizer).to_list() == rows(
        "evaluation", 3, 0, task=Retrieval(4, 2, 1)
    )


def test_the_task_refuses_wrong_sizes_and_unknown_splits():
    with pytest.raises(UserError, match="facts 1 to 100"):
        Retrieval(facts=101)
    with pytest.raises(UserError, match="unknown split 'test'; one of train, calibration, evaluation"):
        rows("test", 1, 0)


# ---- tokenizer and model -----------------------------------------------------------------------------------


def test_one_word_is_one_token(tokenizer):
    for row in rows("train", 3, 0, True):
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text.split())
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.eos_token_id not in ids
        assert ids[: len(row["prompt"].split())] == tokenizer(row["prompt"])["input_ids"]
        assert tokenizer(text + "<eos>")["input_ids"] == [*ids, tokenizer.eos_token_id]
    assert len(tokenizer) == retrieval.VOCABULARY == build_config().vocab_size
    assert len(set(retrieval.WORDS)) == len(retrieval.WORDS) <= retrieval.VOCABULARY


def test_the_shipped_model_folder_equals_the_one_that_the_task_writes(tokenizer, tmp_path):
    """The folder holds the configuration and the tokenizer, without weights."""
    retrieval.save_untrained(tmp_path)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == {file.name: file.read_text() for file in SHIPPED.iterdir()}
    assert not list(SHIPPED.glob("*.safetensors"))


def test_the_end_of_a_training_does_not_propose_an_evaluation():
    """Control: a training of the quickstart's task does."""
    commands = {name: what_next(load_recipe(name)) for name in ("retrieval/sft", "quickstart/sft")}
    assert " eval " not in commands["retrieval/sft"]
    assert " eval " in commands["quickstart/sft"]
