"""The synthetic task `one_liners`: find a function from examples and write it as a program. Worked answers are right,
programs are tested on values that the prompt does not show, the splits are disjoint, and tokenizing loses no text."""

import itertools
import random
import re

import pytest

from rewards.code import CodeReward, program_of
from rewards.sandbox import absent_parts
from sparse_rl.data.synthetic import FORMULAS, INPUTS, NAMES, OneLiners
from sparse_rl.errors import UserError
from sparse_rl.recipe import load_recipe

TASKS = [OneLiners(), OneLiners(cases=2, note_probability=0.9), OneLiners(cases=6, note_probability=0.0)]


@pytest.fixture(scope="module")
def tokenizer():
    return OneLiners.tokenizer()


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
    for row in task.rows("train", 30, 1, True):
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
    task = OneLiners()
    worked = task.rows("evaluation", 6, 0, True)
    right = [row["completion"] for row in worked]
    others = [row["completion"].replace("}[b]", ",3:a+99}[b]") for row in worked]
    tables = [f"```\ndef f(a,b):return {examples_of(row['prompt'])}[b][a]\n```" for row in worked]
    reward = CodeReward(workers=1)
    tests = [row["tests"] for row in worked]
    assert reward(right, tests=tests) == [1.0] * 6
    assert reward(others, tests=tests) == [0.0] * 6
    assert reward(tables, tests=tests) == [0.0] * 6
    assert reward([text.replace("```", "") for text in right], tests=tests) == [0.0] * 6, "there is no block"


def without_notes(text):
    return re.sub(r"\[(?!b\]).*?\]", "", text)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_idea_fits_the_first_example_and_is_judged_by_the_second(task):
    for row in task.rows("train", 40, 2, True):
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
    task, count = OneLiners(note_probability=1.0), 0
    for row in task.rows("train", 20, 3, True):
        notes = re.findall(r"\[(?!b\])(.*?)\]", row["completion"])
        assert len(notes) == task.cases - 1
        entries = row["answer"][1 : row["answer"].index("}")].split(",")
        for first, note in enumerate(notes, start=1):
            formulas = "".join(f"{entry}," for entry in entries[:first])
            assert note.startswith(formulas)
            assert row["prompt"].endswith(note.removeprefix(formulas) + "\n")
            count += 1
    assert count == 60
    share = sum(row["completion"].count("[") - 1 for row in OneLiners().rows("train", 500, 0, True)) / (500 * 3)
    assert 0.25 < share < 0.35


def test_the_example_of_the_module_is_a_worked_answer():
    documentation = OneLiners.__doc__
    task, problem, shown = OneLiners(cases=2), (NAMES.index("a+3"), NAMES.index("a*2")), [(2, 4), (3, 1)]
    prompt = task.prompt(problem, shown)
    assert prompt.rstrip() in documentation
    texts = [task.response(problem, shown, random.Random(seed)).split("\n") for seed in range(200)]
    assert any(all(line in documentation for line in lines) for lines in texts)


def test_wrong_sizes_are_an_error():
    with pytest.raises(UserError, match=r"found only \d+ distinct train functions, 100 requested; raise cases"):
        OneLiners(cases=1).rows("train", 100, 0)
    with pytest.raises(UserError, match="unknown split 'test'; one of train, calibration, evaluation"):
        OneLiners().rows("test", 1, 0)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_texts_are_made_of_the_words_of_the_vocabulary(task, tokenizer):
    for row in task.rows("train", 50, 0, True):
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
        assert len(tokenizer(row["prompt"])["input_ids"]) == 2 + 6 * task.cases
        assert ids[: 2 + 6 * task.cases] == tokenizer(row["prompt"])["input_ids"]
        assert tokenizer(text + "<eos>")["input_ids"] == [*ids, tokenizer.eos_token_id]
    assert "def f(a,b):return {" in tokenizer.convert_ids_to_tokens(ids)
    assert len(tokenizer) == OneLiners.vocabulary == OneLiners.config().vocab_size
    assert len(set(OneLiners.words)) == len(OneLiners.words) <= OneLiners.vocabulary


def test_every_completion_fits_the_recipes_limit(tokenizer):
    """The longest worked answer has three ideas in every step and a note before every step but the first."""
    task = OneLiners(note_probability=1.0)
    problem, shown = (NAMES.index("a*3"),) * 4, [(2, 5)] * 4
    texts = [task.response(problem, shown, random.Random(seed)) for seed in range(400)]
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts) + 1
    assert load_recipe("one_liners/grpo").grpo.max_completion_length == longest
    assert load_recipe("one_liners/eval").max_completion_length == longest
