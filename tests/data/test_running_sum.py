"""The quickstart's task `running_sum`: add up digits modulo 10, step by step. Tokenizing loses no text, the splits are
disjoint, and an answer is correct only for its own problem."""

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
    """Return a response without its notes, the parts in brackets."""
    while "[" in text:
        text = text[: text.index("[")] + text[text.index("]") + 1 :]
    return text


@pytest.mark.parametrize(("prompt", "response"), EXAMPLES)
def test_examples_computed_by_hand_equal_the_tasks_texts(prompt, response, tokenizer):
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
        assert not grade(response + ";", task.answer(problem))
        assert not grade(response[:-1], task.answer(problem))
        assert not grade(response + "<unused3>", task.answer(problem))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_prompts_and_responses_have_the_stated_lengths(task, tokenizer):
    """Every prompt has `prompt_tokens` tokens. A response and its end token have at most `max_response`, which is
    reached if every step has a note."""
    rng = random.Random(2)
    longest = RunningSum(task.n, task.digits, note_probability=1.0)
    for _ in range(20):
        problem = task.problem(rng)
        assert len(tokenizer(task.prompt(problem))["input_ids"]) == task.prompt_tokens
        assert len(tokenizer(task.response(problem, rng))["input_ids"]) + 1 <= task.max_response
        assert len(tokenizer(longest.response(problem, rng))["input_ids"]) + 1 == task.max_response  # tight bound


def test_the_share_of_steps_with_notes_is_the_note_probability():
    """With the default probability 0.3, the share over 500 responses of 7 steps each is between 0.27 and 0.33. With
    probability 0 there are no notes."""
    responses = [row["completion"] for row in rows("train", 500, 0, True)]
    share = sum(text.count("[") for text in responses) / (500 * 7)
    assert 0.27 < share < 0.33
    assert not any("[" in row["completion"] for row in rows("train", 50, 0, True, RunningSum(note_probability=0.0)))


# ---- splits ------------------------------------------------------------------------------------------------


def test_splits_have_no_common_problem_for_any_seed():
    problems_of = {split: set() for split in SPLITS}
    for split, seen in problems_of.items():
        for seed in range(3):
            problems = generate_problems(2000, seed, split=split)
            assert len(set(problems)) == len(problems)
            assert all(split_of(p) == split for p in problems)
            seen.update(problems)
    assert not problems_of["train"] & problems_of["calibration"]
    assert not problems_of["train"] & problems_of["evaluation"]
    assert not problems_of["calibration"] & problems_of["evaluation"]
    # control: common problems are detected: the task below is so small that two seeds of one split share some
    small = RunningSum(n=5)
    assert set(generate_problems(500, 0, task=small)) & set(generate_problems(500, 1, task=small))


def test_the_split_of_a_problem_never_changes():
    """A problem's split follows from a hash of the problem. With another hash, an evaluation would contain problems on
    which an earlier run was trained. About 80 % of the problems are for training and 10 % for evaluation."""
    fixed = {(0,) * 8: "calibration", (0, 0, 0, 0, 0, 0, 0, 2): "train", (0, 0, 0, 0, 0, 0, 2, 1): "evaluation"}
    assert {problem: split_of(problem) for problem in fixed} == fixed
    rng = random.Random(0)
    counts = [split_of(RunningSum().problem(rng)) for _ in range(5000)]
    assert 0.77 < counts.count("train") / 5000 < 0.83
    assert 0.08 < counts.count("evaluation") / 5000 < 0.12


def test_problems_are_reproducible_and_exclusions_hold():
    first = generate_problems(100, 3)
    assert generate_problems(100, 3) == first
    assert generate_problems(100, 4) != first
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


def test_rows_with_and_without_responses_have_the_same_problems():
    plain, worked = rows("evaluation", 20, 5), rows("evaluation", 20, 5, with_response=True)
    assert [set(row) for row in plain] == [{"prompt", "answer"}] * 20
    assert [{**row, "completion": None} for row in plain] == [{**row, "completion": None} for row in worked]
    for row in worked:
        assert grade(row["completion"], row["answer"])
        assert "<eos>" not in row["completion"]


# ---- tokenizer and model -----------------------------------------------------------------------------------


def test_decoding_the_tokens_of_a_text_gives_the_text(tokenizer):
    rng = random.Random(0)
    letters = [symbol for symbol in running_sum.SYMBOLS if symbol not in ("<pad>", "<eos>", "<unk>")]
    for _ in range(200):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 60)))
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert max(ids, default=0) < len(running_sum.SYMBOLS) - 1
    assert tokenizer.decode(tokenizer("a\n b")["input_ids"]) == "a<unk><unk>b"  # unknown characters become <unk>


def test_every_id_of_the_padded_vocabulary_has_its_own_token(tokenizer):
    assert len(tokenizer) == running_sum.VOCABULARY == 64
    assert len(running_sum.SYMBOLS) == 51
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert all(tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(i)) == i for i in range(64))
    assert tokenizer(r"\boxed{6}")["input_ids"] == [2, 10, 3]


def test_a_training_text_ends_in_exactly_one_end_token(tokenizer):
    """The test prepares each row as TRL's SFTTrainer does: it appends the end token if it is missing, and tokenizes
    prompt and completion together."""
    for row in rows("train", 20, 0, True):
        completion = row["completion"]
        if not completion.endswith(tokenizer.eos_token):
            completion += tokenizer.eos_token
        ids = tokenizer(row["prompt"] + completion)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert ids.count(tokenizer.eos_token_id) == 1
        assert ids[:18] == tokenizer(row["prompt"])["input_ids"]
        assert 0 not in ids


@pytest.mark.slow
def test_trl_trains_on_exactly_one_end_token(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    options = trl.SFTConfig(output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True, max_steps=1)
    data = datasets.Dataset.from_list(rows("train", 8, 0, True))
    trainer = trl.SFTTrainer(build_model(0), options, train_dataset=data, processing_class=build_tokenizer())
    for row in trainer.train_dataset:
        assert row["input_ids"].count(1) == 1
        assert row["input_ids"][-1] == 1
    batch = next(iter(trainer.get_train_dataloader()))
    assert ((batch["labels"] == 1).sum(-1) == 1).all()
    assert (batch["labels"][:, :18] == -100).all()


def test_models_depend_only_on_their_seed():
    before = torch.get_rng_state()
    first, repeated, other_seed = build_model(0), build_model(0), build_model(1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, repeated, other_seed)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].dtype == torch.float32
    assert weights[0].numel() == 102_848
    assert build_model(0, layers=1, head_dim=16).config.head_dim == 16


def test_a_saved_untrained_model_loads_with_its_tokenizer_and_end_token(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    running_sum.save_untrained(tmp_path, 0)
    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = EXAMPLES[0][0] + EXAMPLES[0][1] + "<eos>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.chat_template is None
    assert len(loaded) == model.config.vocab_size
    assert model.generation_config.eos_token_id == 1
    assert model.dtype == torch.float32
    for ours, theirs in zip(build_model(0).parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
