"""The quickstart's task `running_sum`: add up digits modulo 10, step by step. Tokenizing loses no text, the splits are
disjoint, and an answer is correct only for its own problem."""

import random

import pytest
import torch

from sparse_rl.data.synthetic import SYMBOLS, RunningSum, grade, split_of

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
    return RunningSum.tokenizer()


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
def test_a_prompt_has_two_tokens_for_each_digit_and_two_more(task, tokenizer):
    rng = random.Random(2)
    for _ in range(20):
        problem = task.problem(rng)
        assert len(tokenizer(task.prompt(problem))["input_ids"]) == 2 * task.n + 2


def test_the_share_of_steps_with_notes_is_the_note_probability():
    responses = [row["completion"] for row in RunningSum().rows("train", 500, 0, True)]
    share = sum(text.count("[") for text in responses) / (500 * 7)
    assert 0.27 < share < 0.33
    assert not any("[" in row["completion"] for row in RunningSum(note_probability=0.0).rows("train", 50, 0, True))


def test_the_split_of_a_problem_never_changes():
    """With another hash, an evaluation would contain problems on which an earlier run was trained."""
    fixed = {(0,) * 8: "calibration", (0, 0, 0, 0, 0, 0, 0, 2): "train", (0, 0, 0, 0, 0, 0, 2, 1): "evaluation"}
    assert {problem: split_of(problem) for problem in fixed} == fixed
    rng = random.Random(0)
    counts = [split_of(RunningSum().problem(rng)) for _ in range(5000)]
    assert 0.77 < counts.count("train") / 5000 < 0.83
    assert 0.08 < counts.count("evaluation") / 5000 < 0.12


def test_problems_are_distinct_and_exclusions_hold():
    first = RunningSum().problems("train", 100, 3)
    assert len(set(first)) == 100
    assert not set(RunningSum().problems("train", 100, 3, first)) & set(first)


def test_too_few_problems_are_an_error():
    tiny = RunningSum(n=2, digits=3)  # nine problems
    with pytest.raises(ValueError, match=r"found only \d distinct train problems, 10 requested"):
        tiny.problems("train", 10, 0)
    with pytest.raises(ValueError, match="unknown split 'test'; one of train, calibration, evaluation"):
        RunningSum().rows("test", 1, 0)


def test_rows_with_and_without_responses_have_the_same_problems():
    plain, worked = RunningSum().rows("evaluation", 20, 5), RunningSum().rows("evaluation", 20, 5, with_response=True)
    assert [set(row) for row in plain] == [{"prompt", "answer"}] * 20
    assert [{**row, "completion": None} for row in plain] == [{**row, "completion": None} for row in worked]
    for row in worked:
        assert grade(row["completion"], row["answer"])
        assert "<eos>" not in row["completion"]


def test_decoding_the_tokens_of_a_text_gives_the_text(tokenizer):
    rng = random.Random(0)
    letters = [symbol for symbol in SYMBOLS if symbol not in ("<pad>", "<eos>", "<unk>")]
    for _ in range(200):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 60)))
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert max(ids, default=0) < len(SYMBOLS) - 1
    assert tokenizer.decode(tokenizer("a\n b")["input_ids"]) == "a<unk><unk>b"  # unknown characters become <unk>


def test_every_id_of_the_padded_vocabulary_has_its_own_token(tokenizer):
    assert len(tokenizer) == RunningSum.vocabulary == 64
    assert len(SYMBOLS) == 51
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert all(tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(i)) == i for i in range(64))
    assert tokenizer(r"\boxed{6}")["input_ids"] == [2, 10, 3]


def test_a_training_text_ends_in_exactly_one_end_token(tokenizer):
    """As TRL's SFTTrainer does: it appends the end token if it is missing, and tokenizes both parts together."""
    for row in RunningSum().rows("train", 20, 0, True):
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
    data = datasets.Dataset.from_list(RunningSum().rows("train", 8, 0, True))
    trainer = trl.SFTTrainer(
        RunningSum.untrained(0), options, train_dataset=data, processing_class=RunningSum.tokenizer()
    )
    for row in trainer.train_dataset:
        assert row["input_ids"].count(1) == 1
        assert row["input_ids"][-1] == 1
    batch = next(iter(trainer.get_train_dataloader()))
    assert ((batch["labels"] == 1).sum(-1) == 1).all()
    assert (batch["labels"][:, :18] == -100).all()


def test_models_depend_only_on_their_seed():
    before = torch.get_rng_state()
    first, repeated, other_seed = RunningSum.untrained(0), RunningSum.untrained(0), RunningSum.untrained(1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, repeated, other_seed)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].dtype == torch.float32
    assert weights[0].numel() == 102_848
    assert RunningSum.untrained(0, num_hidden_layers=1, head_dim=16).config.head_dim == 16


def test_a_saved_untrained_model_loads_with_its_tokenizer_and_end_token(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    RunningSum.save_untrained(tmp_path, 0)
    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = EXAMPLES[0][0] + EXAMPLES[0][1] + "<eos>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.chat_template is None
    assert len(loaded) == model.config.vocab_size
    assert model.generation_config.eos_token_id == 1
    assert model.dtype == torch.float32
    for ours, theirs in zip(RunningSum.untrained(0).parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
