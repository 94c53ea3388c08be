"""The running-sum task: texts survive tokenisation, splits are disjoint, an answer fits only its own problem."""

import random

import pytest
import torch

from sparse_rl.data import running_sum
from sparse_rl.data.running_sum import RunningSum, build_model, build_tokenizer, generate_problems, grade, rows
from sparse_rl.data.synthetic import SPLITS, split_of

# computed by hand
EXAMPLES = [
    (
        "Qa1b4c0d2e0f3g3h3?",
        r"a1A1;b4A1B5;[c0d2e0f3g3h3]c0B5C5;[d2e0f3g3h3]d2C5D7;e0D7E7;f3E7F0;g3F0G3;h3G3H6;\boxed{6}",
    ),
    ("Qa2b1c3d0e0f4g0h2?", r"a2A2;b1A2B3;c3B3C6;d0C6D6;e0D6E6;f4E6F0;g0F0G0;h2G0H2;\boxed{2}"),
]
TASKS = [
    RunningSum(),
    RunningSum(n=12),
    RunningSum(n=5, digits=10, note_probability=0.9),
    RunningSum(n=1, note_probability=0.0),
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def without_notes(text):
    while "[" in text:
        text = text[: text.index("[")] + text[text.index("]") + 1 :]
    return text


@pytest.mark.parametrize(("prompt", "response"), EXAMPLES)
def test_examples(prompt, response, tokenizer):
    task, problem = RunningSum(note_probability=0.0), tuple(int(digit) for digit in prompt[2:-1:2])
    assert task.prompt(problem) == prompt
    assert task.response(problem, random.Random(0)) == without_notes(response)
    assert grade(response, task.answer(problem))
    assert tokenizer.decode(tokenizer(prompt + response)["input_ids"]) == prompt + response
    # one seed writes exactly this text, with its notes
    noisy = RunningSum()
    assert response in {noisy.response(problem, random.Random(seed)) for seed in range(4000)}


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_a_response_is_graded_correct_only_for_its_problems_answer(task):
    rng = random.Random(1)
    for _ in range(50):
        problem = task.problem(rng)
        response = task.response(problem, rng)
        assert [digit for digit in "0123456789" if grade(response, digit)] == [task.answer(problem)]
        assert not grade(response + ";", task.answer(problem)) and not grade(response[:-1], task.answer(problem))
        assert not grade(response + "<unused3>", task.answer(problem))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_lengths(task, tokenizer):
    rng = random.Random(2)
    longest = RunningSum(task.n, task.digits, note_probability=1.0)
    for _ in range(20):
        problem = task.problem(rng)
        assert len(tokenizer(task.prompt(problem))["input_ids"]) == task.prompt_tokens
        assert len(tokenizer(task.response(problem, rng))["input_ids"]) + 1 <= task.max_response
        assert len(tokenizer(longest.response(problem, rng))["input_ids"]) + 1 == task.max_response  # tight bound


def test_notes_come_as_often_as_asked():
    responses = [row["completion"] for row in rows("train", 500, 0, True)]
    share = sum(text.count("[") for text in responses) / (500 * 7)
    assert 0.27 < share < 0.33
    assert not any("[" in row["completion"] for row in rows("train", 50, 0, True, RunningSum(note_probability=0.0)))


# ---- splits ------------------------------------------------------------------------------------------------


def test_splits_never_meet_whatever_the_seed():
    drawn = {split: set() for split in SPLITS}
    for split, seen in drawn.items():
        for seed in range(3):
            problems = generate_problems(2000, seed, split=split)
            assert len(set(problems)) == len(problems) and all(split_of(p) == split for p in problems)
            seen.update(problems)
    assert not drawn["train"] & drawn["calibration"] and not drawn["train"] & drawn["evaluation"]
    assert not drawn["calibration"] & drawn["evaluation"]
    # the control: on a task this small, seeds alone would not keep two draws apart
    small = RunningSum(n=5)
    assert set(generate_problems(500, 0, task=small)) & set(generate_problems(500, 1, task=small))


def test_the_split_is_a_constant_of_the_problem():
    # fixed: with another hash, problems that an earlier run trained on would be held out
    fixed = {(0,) * 8: "calibration", (0, 0, 0, 0, 0, 0, 0, 2): "train", (0, 0, 0, 0, 0, 0, 2, 1): "evaluation"}
    assert {problem: split_of(problem) for problem in fixed} == fixed
    rng = random.Random(0)
    counts = [split_of(RunningSum().problem(rng)) for _ in range(5000)]
    assert 0.77 < counts.count("train") / 5000 < 0.83 and 0.08 < counts.count("evaluation") / 5000 < 0.12


def test_problems_are_reproducible_and_exclusions_hold():
    first = generate_problems(100, 3)
    assert generate_problems(100, 3) == first and generate_problems(100, 4) != first
    assert generate_problems(50, 3) == first[:50]
    assert not set(generate_problems(100, 3, exclude=first)) & set(first)


def test_too_few_problems_are_an_error():
    tiny = RunningSum(n=2, digits=3)  # nine problems
    with pytest.raises(ValueError, match=r"found only \d distinct train problems, 10 requested"):
        generate_problems(10, 0, task=tiny)
    with pytest.raises(ValueError, match="unknown split 'test'; one of train, calibration, evaluation"):
        rows("test", 1, 0)
    with pytest.raises(ValueError, match="n 1 to 12"):
        RunningSum(n=13)


def test_rows():
    plain, worked = rows("evaluation", 20, 5), rows("evaluation", 20, 5, with_response=True)
    assert [set(row) for row in plain] == [{"prompt", "answer"}] * 20
    assert [{**row, "completion": None} for row in plain] == [{**row, "completion": None} for row in worked]
    for row in worked:
        assert grade(row["completion"], row["answer"]) and "<eos>" not in row["completion"]


# ---- tokenizer and model -----------------------------------------------------------------------------------


def test_text_round_trips_exactly(tokenizer):
    rng = random.Random(0)
    letters = [symbol for symbol in running_sum.SYMBOLS if symbol not in ("<pad>", "<eos>", "<unk>")]
    for _ in range(200):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 60)))
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special_tokens=True) == text
        assert max(ids, default=0) < len(running_sum.SYMBOLS) - 1
    assert tokenizer.decode(tokenizer("a\n b")["input_ids"]) == "a<unk><unk>b"  # unknown characters become <unk>


def test_ids_round_trip_up_to_the_padded_vocabulary(tokenizer):
    assert len(tokenizer) == running_sum.VOCABULARY == 64 and len(running_sum.SYMBOLS) == 51
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert all(tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(i)) == i for i in range(64))
    assert tokenizer(r"\boxed{6}")["input_ids"] == [2, 10, 3]


def test_a_training_text_ends_in_exactly_one_end_token(tokenizer):
    """A training text ends in exactly one end token after TRL's SFTTrainer has appended the end token, if it is
    missing, and tokenized the prompt-completion row."""
    for row in rows("train", 20, 0, True):
        completion = row["completion"]
        if not completion.endswith(tokenizer.eos_token):
            completion += tokenizer.eos_token
        ids = tokenizer(row["prompt"] + completion)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1
        assert ids[:18] == tokenizer(row["prompt"])["input_ids"] and 0 not in ids


@pytest.mark.slow
def test_trl_trains_on_exactly_one_end_token(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    options = trl.SFTConfig(output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True, max_steps=1)
    data = datasets.Dataset.from_list(rows("train", 8, 0, True))
    trainer = trl.SFTTrainer(build_model(0), options, train_dataset=data, processing_class=build_tokenizer())
    for row in trainer.train_dataset:
        assert row["input_ids"].count(1) == 1 and row["input_ids"][-1] == 1
    batch = next(iter(trainer.get_train_dataloader()))
    assert ((batch["labels"] == 1).sum(-1) == 1).all() and (batch["labels"][:, :18] == -100).all()


def test_models_depend_only_on_their_seed():
    before = torch.get_rng_state()
    first, again, other = build_model(0), build_model(0), build_model(1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert weights[0].dtype == torch.float32 and weights[0].numel() == 102_848
    assert build_model(0, layers=1, head_dim=16).config.head_dim == 16


def test_a_saved_directory_is_a_model_that_stops(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    running_sum.save_untrained(tmp_path, 0)
    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = EXAMPLES[0][0] + EXAMPLES[0][1] + "<eos>"
    assert (
        loaded(text)["input_ids"] == tokenizer(text)["input_ids"] and loaded.decode(loaded(text)["input_ids"]) == text
    )
    assert loaded.chat_template is None and len(loaded) == model.config.vocab_size
    assert model.generation_config.eos_token_id == 1 and model.dtype == torch.float32
    for ours, theirs in zip(build_model(0).parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
