"""The synthetic task `one_liners`: find a function from examples and write it as a program. Worked answers are right,
programs are tested on values that the prompt does not show, the splits are disjoint, and tokenizing loses no text."""

import itertools
import random
import re
from pathlib import Path

import pytest

from rewards.code import CodeReward, program_of
from rewards.sandbox import absent_parts
from sparse_rl.data import one_liners
from sparse_rl.data.config import DataConfig, SyntheticConfig
from sparse_rl.data.one_liners import FORMULAS, INPUTS, OneLiners, build_config, build_tokenizer, rows
from sparse_rl.data.problems import load_data
from sparse_rl.data.synthetic import split_of
from sparse_rl.errors import UserError
from sparse_rl.recipe import load_recipe

SHIPPED = Path(__file__).parents[2] / "recipes/one_liners/model"
TASKS = [OneLiners(), OneLiners(cases=2, note_probability=0.9), OneLiners(cases=6, note_probability=0.0)]
NAMES = one_liners.NAMES


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def examples_of(prompt):
    """Return b -> {a: result}, read from the text of a prompt."""
    lines = re.findall(r"b(\d) (\d)>(\d+) (\d)>(\d+);", prompt)
    return {int(b): {int(x): int(first), int(y): int(second)} for b, x, first, y, second in lines}


def function_of(program):
    names = {}
    exec(program, names)
    return names["f"]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_the_program_of_a_worked_answer_is_the_hidden_function(task):
    """It agrees with both examples of each case, and a test asserts the results for all other values of `a`."""
    for row in rows("train", 30, 1, True, task):
        program = program_of(row["completion"])
        examples = examples_of(row["prompt"])
        assert program == f"def f(a,b):return {row['answer']}"
        assert list(examples) == list(range(task.cases))
        f, names = function_of(program), {}
        (test,) = row["tests"]
        for b, results in examples.items():
            assert len(results) == 2
            assert results == {a: f(a, b) for a in results}
        exec(f"asked = set()\ndef f(a, b): asked.add((a, b)); return {row['answer']}\n{test}", names)
        shown = {(a, b) for b, results in examples.items() for a in results}
        assert names["asked"] == set(itertools.product(INPUTS, range(task.cases))) - shown


def test_two_examples_determine_a_formula():
    """So another formula never agrees with the examples. One example is not enough for most formulas."""
    for a, other in itertools.permutations(INPUTS, 2):
        pairs = {(formula(a), formula(other)) for formula in FORMULAS.values()}
        assert len(pairs) == len(FORMULAS)
    assert len({formula(2) for formula in FORMULAS.values()}) < len(FORMULAS)
    assert all(eval(name, {"a": a}) == formula(a) for name, formula in FORMULAS.items() for a in INPUTS)


@pytest.mark.skipif(bool(absent_parts()), reason="the sandbox needs a newer kernel")
def test_the_reward_is_1_only_for_the_hidden_function():
    """The reward `code` refuses a program with another formula, and one that knows only the examples."""
    task = OneLiners()
    worked = rows("evaluation", 6, 0, True, task)
    right = [row["completion"] for row in worked]
    others = [row["completion"].replace("}[b]", ",3:a+99}[b]") for row in worked]
    tables = [f"```\ndef f(a,b):return {examples_of(row['prompt'])}[b][a]\n```" for row in worked]
    reward = CodeReward(workers=1)
    tests = [row["tests"] for row in worked]
    assert reward(right, tests=tests) == [1.0] * 6
    assert reward(others, tests=tests) == [0.0] * 6
    assert reward(tables, tests=tests) == [0.0] * 6
    assert reward([text[:-4] for text in right], tests=tests) == [0.0] * 6, "the block is not closed"


# ---- worked answers ------------------------------------------------------------------------------------------


def without_notes(text):
    return re.sub(r"\[(?!b\]).*?\]", "", text)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_idea_fits_the_first_example_and_is_judged_by_the_second(task):
    """A step ends with the first idea that fits both examples, and no idea is tried twice."""
    for row in rows("train", 40, 2, True, task):
        examples = examples_of(row["prompt"])
        work, _, program = without_notes(row["completion"]).partition("\n")
        steps = re.findall(r"b(\d) (\d)>(\d+) (\d)>(\d+)((?:\?[^?:]+=\d+[yn])+)(\d):([^,]+),", work)
        assert "".join(f"b{b} {x}>{y} {z}>{w}{ideas}{c}:{name}," for b, x, y, z, w, ideas, c, name in steps) == work
        assert program.count(":") == 1 + task.cases
        for case, (b, x, y, z, w, ideas, c, name) in enumerate(steps):
            assert int(b) == int(c) == case
            assert examples[case] == {int(x): int(y), int(z): int(w)}
            tried = re.findall(r"\?([^=]+)=(\d+)([yn])", ideas)
            assert [verdict for *_, verdict in tried] == ["n"] * (len(tried) - 1) + ["y"]
            assert len({idea for idea, *_ in tried}) == len(tried)
            assert tried[-1][0] == name
            for idea, result, verdict in tried:
                assert FORMULAS[idea](int(x)) == int(y)
                assert FORMULAS[idea](int(z)) == int(result)
                assert (result == w) == (verdict == "y")


def test_a_note_repeats_what_is_still_needed():
    """A note has the formulas of the steps before it and the examples of the steps after it, in the prompt's words."""
    task, count = OneLiners(note_probability=1.0), 0
    for row in rows("train", 20, 3, True, task):
        notes = re.findall(r"\[(?!b\])(.*?)\]", row["completion"])
        assert len(notes) == task.cases - 1
        entries = row["answer"][1 : row["answer"].index("}")].split(",")
        for first, note in enumerate(notes, start=1):
            formulas = "".join(f"{entry}," for entry in entries[:first])
            assert note.startswith(formulas)
            assert row["prompt"].endswith(note.removeprefix(formulas) + "\n")
            count += 1
    assert count == 60
    share = sum(row["completion"].count("[") - 1 for row in rows("train", 500, 0, True)) / (500 * 3)
    assert 0.25 < share < 0.35


def test_the_example_of_the_module_is_a_worked_answer():
    documentation = one_liners.__doc__
    task, problem, shown = OneLiners(cases=2), (NAMES.index("a+3"), NAMES.index("a*2")), [(2, 4), (3, 1)]
    prompt = task.prompt(problem, shown)
    assert prompt.rstrip() in documentation
    texts = [task.response(problem, shown, random.Random(seed)).split("\n") for seed in range(200)]
    assert any(all(line in documentation for line in lines) for lines in texts)


# ---- splits --------------------------------------------------------------------------------------------------


def test_splits_have_no_common_function_for_any_seed():
    task = OneLiners(cases=2)
    functions = {split: set() for split in ("train", "calibration", "evaluation")}
    for split, seen in functions.items():
        for seed in range(2):
            answers = [row["answer"] for row in rows(split, 30, seed, task=task)]
            assert len(set(answers)) == 30
            problems = [tuple(NAMES.index(name) for name in re.findall(r"\d:([^,}]+)", answer)) for answer in answers]
            assert {split_of(problem) for problem in problems} == {split}
            seen.update(answers)
    assert not functions["train"] & (functions["calibration"] | functions["evaluation"])
    assert not functions["calibration"] & functions["evaluation"]
    # control: common functions are detected: this task is so small that two seeds of one split share some
    first, second = ({row["answer"] for row in rows("train", 200, seed, task=task)} for seed in (0, 1))
    assert first & second


def test_rows_are_reproducible():
    """Rows depend on the seed alone: fewer rows are the beginning of more rows, and completions change nothing else."""
    first = rows("train", 4, 3)
    assert rows("train", 2, 3) == first[:2]
    assert rows("train", 4, 4) != first
    worked = rows("train", 4, 3, True)
    assert [{**row, "completion": None} for row in first] == [{**row, "completion": None} for row in worked]


def test_wrong_sizes_are_an_error():
    with pytest.raises(UserError, match=r"found only \d+ distinct train functions, 100 requested; raise cases"):
        rows("train", 100, 0, task=OneLiners(cases=1))
    with pytest.raises(UserError, match="cases 1 to 6"):
        OneLiners(cases=7)
    with pytest.raises(UserError, match="unknown split 'test'; one of train, calibration, evaluation"):
        rows("test", 1, 0)


# ---- settings in a recipe ------------------------------------------------------------------------------------


def test_a_recipe_can_load_the_task(tokenizer):
    config = SyntheticConfig(task="one_liners", size=3, split="evaluation", cases=2, note_probability=0.5)
    loaded = load_data(DataConfig(synthetic=config), tokenizer, require=("prompt", "completion")).to_list()
    assert loaded == rows("evaluation", 3, 0, True, OneLiners(2, 0.5))


# ---- tokenizer and model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_texts_are_made_of_the_words_of_the_vocabulary(task, tokenizer):
    for row in rows("train", 50, 0, True, task):
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
        assert len(tokenizer(row["prompt"])["input_ids"]) == task.prompt_tokens
        assert ids[: task.prompt_tokens] == tokenizer(row["prompt"])["input_ids"]
        assert tokenizer(text + "<eos>")["input_ids"] == [*ids, tokenizer.eos_token_id]
    assert "def f(a,b):return {" in tokenizer.convert_ids_to_tokens(ids)
    assert len(tokenizer) == one_liners.VOCABULARY == build_config().vocab_size
    assert len(set(one_liners.WORDS)) == len(one_liners.WORDS) <= one_liners.VOCABULARY


def test_every_completion_fits_the_recipes_limit(tokenizer):
    """The longest worked answer has three ideas in every step and a note before every step but the first. Such answers
    with their end token have the length that the recipes allow."""
    task = OneLiners(note_probability=1.0)
    problem, shown = (NAMES.index("a*3"),) * 4, [(2, 5)] * 4
    texts = [task.response(problem, shown, random.Random(seed)) for seed in range(400)]
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts) + 1
    assert load_recipe("one_liners/grpo").grpo.max_completion_length == longest
    assert load_recipe("one_liners/eval").max_completion_length == longest


def test_the_shipped_model_folder_equals_the_one_that_the_task_writes(tmp_path):
    """The folder holds the configuration and the tokenizer, without weights."""
    one_liners.save_untrained(tmp_path)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == {file.name: file.read_text() for file in SHIPPED.iterdir()}
