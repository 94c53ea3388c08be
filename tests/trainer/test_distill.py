"""Distillation: its loss and gradients equal a dense float64 reference, and its runs by recipe train."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from datasets import Dataset
from dense_matched import DenseView
from peft import LoraConfig
from trainer_runs import small

from rollout import make_engine
from sparse_rl.attention.families import windows_of
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.commands.console import training_line
from sparse_rl.commands.train import train
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.experts import RouterReplay
from sparse_rl.recipe import make_recipe
from sparse_rl.trace import EvictionTrace
from trainer.batch import Example
from trainer.config import DistillationLossConfig
from trainer.distill import DistillArguments, DistillTrainer
from trainer.losses import DistillationLoss

LENGTHS = ((5, 20), (12, 9), (3, 31), (20, 2), (1, 12))
POLICY = {"policy": "gkv", "budget": 10, "window": 3, "period": 4}
DEEPER = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
SETTINGS: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False, "disable_tqdm": True,
}  # fmt: skip


def examples_of(recipe: Any) -> list[Any]:
    """Return the sequences that a recipe trains on."""
    return recipe.examples(recipe.prepare_training())[0]


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return [Example(*(torch.randint(3, 64, (n,), generator=generator).tolist() for n in pair)) for pair in LENGTHS]


@pytest.fixture
def distill(new_model, rows, tmp_path):
    """distill(student=None, families=("qwen3", "llama"), deeper={}, **settings) returns a trainer of a tiny student
    under evictions, with a deeper teacher. deeper : further settings of the teacher's configuration
    """

    def make(student=None, families=("qwen3", "llama"), deeper=MappingProxyType({}), **settings):
        student = student or new_model(families[0])
        teacher = new_model(families[1], seed=5, num_hidden_layers=3, hidden_size=48, **deeper)
        engine = make_engine("hf", model=copy.deepcopy(student), policy=POLICY)
        loss = vars(settings.pop("loss", DistillationLossConfig()))
        args = DistillArguments(output_dir=str(tmp_path / "run"), **{**SETTINGS, **loss, **settings})
        return DistillTrainer(student, args, rows, teacher=teacher, engine=engine)

    return make


def dense_logits(model: Any, rollout: Example, trace: EvictionTrace) -> torch.Tensor:
    ids = torch.tensor([rollout.prompt + rollout.completion])
    view: Any = DenseView(EvictionTrace(trace.evict_at))
    if "routed" in trace.further:
        view.routers = RouterReplay(trace.further["routed"][:, None], "cpu")
    out = adopt(model)(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    return out[0, len(rollout.prompt) - 1 : -1]


def reference(trainer: DistillTrainer, rollouts: list[Example]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss per token and its gradients, computed in float64, one sequence at a time,
    under dense masks."""
    student, teacher = (copy.deepcopy(m).double() for m in (trainer.model, trainer.teacher))
    student.zero_grad()
    total, tokens, loss, top_k = torch.zeros((), dtype=torch.float64), 0, trainer.args.loss, trainer.args.loss.top_k
    for rollout in rollouts:
        s = (dense_logits(student, rollout, rollout.trace) / loss.temperature).log_softmax(-1)
        windows = windows_of(teacher.config)
        full = EvictionTrace.dense(3, rollout.trace.kv_heads, len(rollout.trace), windows)
        with torch.no_grad():
            t = (dense_logits(teacher, rollout, full) / loss.temperature).log_softmax(-1)
        if top_k is not None:
            likeliest = t.argsort(-1, descending=True)[:, :top_k]
            s, t = (
                torch.cat([k, (1 - k.exp().sum(-1, keepdim=True)).log()], -1)
                for k in (s.gather(1, likeliest), t.gather(1, likeliest))
            )
        total = total + loss.temperature**2 * (t.exp() * (t - s)).sum()
        tokens += len(rollout.completion)
    mean = total / tokens
    mean.backward()
    return float(mean.detach()), {name: weight.grad for name, weight in student.named_parameters()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": True},
        {"loss": DistillationLossConfig(temperature=0.7, chunk=7)},
        {"loss": DistillationLossConfig(temperature=2.0, chunk=16, top_k=8), "packing": True},
        {"packing": True, "gradient_checkpointing": True},
        {"packing": True, "gradient_checkpointing": True, "attention_kernel": "flex_sorted"},
        {"families": ("granite", "granite"), "loss": DistillationLossConfig(chunk=16)},
        {"families": ("granite", "granite"), "loss": DistillationLossConfig(top_k=8)},
        {"families": ("qwen3_moe", "mixtral"), "packing": True, "gradient_checkpointing": True},
        {"families": ("gemma3_text", "olmo3"), "deeper": DEEPER},
        {"families": ("gemma3_text", "olmo3"), "deeper": DEEPER, "packing": True, "gradient_checkpointing": True},
    ],
    ids=[
        *("padded", "packed", "chunked", "top-k", "checkpointed", "FlexAttention"),
        *("scaled logits", "scaled logits, top-k", "experts"),
        *("windows, padded", "windows, packed, checkpointed"),
    ],
)
@pytest.mark.few(4)
def test_loss_and_gradients_equal_the_dense_reference(settings, flex_trains, distill, rows):
    trainer = distill(**settings)
    rollouts = trainer._with_traces(rows)
    assert sum(r.trace.retention() < 1 for r in rollouts) >= 4
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, rollouts)
    loss.backward()
    assert set(flex_trains) == ({True} if "attention_kernel" in settings else set())
    expected, gradients = reference(trainer, rollouts)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
    for name, weight in trainer.model.named_parameters():
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad.double(), gradients[name], rtol=1e-5, atol=1e-5, msg=name)


def test_only_the_validation_examples_are_evaluated(distill, rows):
    """Control: the trainer's own validation examples."""
    trainer = distill()
    for given in (None, rows):  # it has none of its own
        with pytest.raises(UserError, match="eval_dataset: only the eval_dataset of the constructor is evaluated"):
            trainer.evaluate(given)
    trainer.eval_dataset = rows[:2]
    assert trainer.evaluate()["eval_kl"] > 0
    with pytest.raises(UserError, match="eval_dataset: only the eval_dataset of the constructor"):
        trainer.evaluate(rows[2:])


def test_a_script_does_not_resume_with_another_teacher_or_other_adapters(tiny, tmp_path):
    """Control: the same script, with more steps."""
    data = Dataset.from_list([{"prompt": "1+1=", "completion": "2"}] * 4)

    def script(r: int = 2, **changed: Any) -> DistillTrainer:
        steps = {"max_steps": changed.pop("max_steps", 1), "save_steps": 1}
        args = DistillArguments(output_dir=str(tmp_path), **SETTINGS, **steps)
        given = {"teacher": tiny(num_hidden_layers=3), **changed}
        lora = LoraConfig(r=r, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return DistillTrainer(tiny(), args, data, cache=POLICY, rollout={"engine": "hf"}, peft_config=lora, **given)

    script().train()
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"teacher": None}, "teacher/model.safetensors was "),
        ({"r": 4}, r"lora\.default\.r was 2 and is now 4"),
    )
    for changed, wrong in refused:
        with pytest.raises(UserError, match=wrong):
            script(**changed).train(resume_from_checkpoint=True)
    again = script(max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


def test_control_wrong_traces_and_temperatures_change_the_loss(distill, rows):
    """Control: the loss changes if evictions are one query late, and if nothing is evicted. It also differs from the
    loss that is not multiplied by the squared temperature.
    """
    trainer = distill(loss=DistillationLossConfig(temperature=2.0))
    rollouts = trainer._with_traces(rows)
    loss = float(trainer.compute_loss(trainer.model, rollouts))
    for change in (lambda e: torch.where(e < 2**30, e + 1, e), lambda e: torch.full_like(e, 2**30)):
        traces = [EvictionTrace(change(r.trace.evict_at), validate=False) for r in rollouts]
        other = [Example(r.prompt, r.completion, t) for r, t in zip(rollouts, traces, strict=True)]
        assert abs(float(trainer.compute_loss(trainer.model, other)) - loss) > 1e-3
    assert abs(loss / 4 - reference(trainer, rollouts)[0]) > 1e-2


def test_a_packed_row_does_not_depend_on_its_neighbours(distill, rows):
    from trainer.batch import Batch

    trainer = distill(packing=True)
    rollouts = trainer._with_traces(rows)
    packed, padded = Batch.make(rollouts, torch.device("cpu"), True), Batch.make(rollouts, torch.device("cpu"))
    assert packed.ids.shape == (4, 34)
    assert padded.ids.shape == (5, 34)
    student = trainer.model
    with torch.no_grad():
        together = packed.hidden(student, replayed=True)
        alone = [Batch.make([r], torch.device("cpu")) for r in packed.examples]
        separate = torch.cat([batch.hidden(student, replayed=True) for batch in alone])
    torch.testing.assert_close(together, separate, rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.targets, torch.cat([batch.targets for batch in alone]))


def test_the_top_k_loss_over_the_whole_vocabulary_equals_the_full_loss(distill, rows):
    trainer = distill()
    rollouts = trainer._with_traces(rows)
    full_loss = float(trainer.compute_loss(trainer.model, rollouts))
    trainer.loss = DistillationLoss(DistillationLossConfig(top_k=64))
    assert float(trainer.compute_loss(trainer.model, rollouts)) == pytest.approx(full_loss, rel=1e-6)


@pytest.fixture
def recipe(tiny, tmp_path):
    """recipe(**keys) returns a recipe that distils a tiny teacher into the tiny model in a few steps."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 0}
    own = {"teacher": tiny(num_hidden_layers=3), "cache": POLICY, "learning_rate": 3e-3, "max_completion_length": 64}
    data = {"synthetic": {"task": "running_sum", "size": 24, "n": 4}}
    shared = {**small(tiny(), tmp_path / "run", kind="distill", data=data, seed=3), **sizes, **own}
    return lambda **keys: make_recipe({**shared, "gradient_checkpointing": False, **keys})


def lines(folder: Path) -> list[dict[str, Any]]:
    from sparse_rl.metrics import read_metrics

    return read_metrics(folder)


def validation(every: int) -> dict[str, Any]:
    return {"data": {"synthetic": {"task": "running_sum", "size": 8, "n": 4, "split": "evaluation"}}, "every": every}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"teacher": None, "top_k": 8, "packing": True, "refresh_every": 1, "save_steps": 2},
        {"completions": "student", "max_completion_length": 12, "divergence": "reverse", "report_to": ["tensorboard"]},
        {"kl_weight": 0.1, "ce_weight": 0.9, "keep": "boxed", "lora": {"r": 4}},
    ],
    ids=["data", "refreshed", "on-policy", "lora"],
)
@pytest.mark.few(1)
def test_a_run_logs_its_losses_and_saves_the_model(keys, recipe, tmp_path):
    small_recipe = recipe(validation=validation(every=2), **keys)
    final = train(small_recipe)
    steps = [line for line in lines(tmp_path / "run") if "loss" in line]
    validations = [line for line in lines(tmp_path / "run") if "eval_kl" in line]
    held_out = [line["eval_kl"] for line in validations]
    assert len(steps) == 4
    assert len(held_out) == 3
    assert all(line["kl"] >= 0 and 0 < line["cache/retention"] < 1 for line in steps)
    assert all(0 <= line["token_accuracy"] <= 1 for line in steps)
    assert all(0 <= line["eval_token_accuracy"] <= 1 for line in validations)
    # the console's name for the retention, as in GRPO
    assert all("  kept " in str(training_line(0, 4, line)) for line in validations)
    if small_recipe.loss.ce_weight == 0:
        assert steps[0]["loss"] == pytest.approx(steps[0]["kl"], rel=1e-5)
        # without another teacher, the student starts equal to its teacher
        assert held_out[2] < held_out[0] or small_recipe.taught_by.teacher is None
    assert (final / "cache_policy.json").is_file()
    assert (final / "model.safetensors").is_file()


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.few(1)
def test_evictions_come_from_the_starting_model_or_the_student(every, recipe, tmp_path, monkeypatch):
    calls: list[tuple[list[Example], Any]] = []
    original = DistillTrainer._with_traces

    def keep(self: DistillTrainer, batch: Any) -> Any:
        before = copy.deepcopy(self.accelerator.unwrap_model(self.model))
        result = original(self, batch)
        calls.append((result, before))
        return result

    monkeypatch.setattr(DistillTrainer, "_with_traces", keep)
    data = {"synthetic": {"task": "running_sum", "size": 16, "n": 4}}
    small_recipe = recipe(data=data, refresh_every=every, learning_rate=0.05, save_steps=0)
    train(small_recipe)
    assert len(calls) == 4
    start = calls[0][1]
    expected_models = [start, start, calls[2][1], calls[2][1]] if every else [start] * 4
    last_models = [calls[3][1]] * 4
    for source, equal in ((expected_models, True), (last_models, False)):
        equalities = []
        for (result, _), model in zip(calls, source, strict=True):
            engine = make_engine("hf", model=copy.deepcopy(model), policy=POLICY)
            repeated = engine.simulate([r.prompt for r in result], [r.completion for r in result])
            equalities += [
                torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(repeated, result, strict=True)
            ]
        assert all(equalities) is equal


def test_overlong_rows_can_be_dropped(recipe):
    from sparse_rl.models.load import load_tokenizer

    small_recipe = recipe()
    tokenizer = load_tokenizer(small_recipe.model)
    rows = examples_of(small_recipe)
    longest = max(len(row.completion) for row in rows)
    assert len(rows) == 24
    assert all(row.completion[-1] == tokenizer.eos_token_id for row in rows)
    assert 0 < len(examples_of(recipe(max_completion_length=longest - 1, overlong="drop"))) < 24
    assert len(examples_of(recipe(keep="boxed"))) == 24  # all synthetic answers are correct
    with pytest.raises(UserError, match="no sequence is left"):
        examples_of(recipe(max_completion_length=1, overlong="drop"))


def test_overlong_rows_are_truncated(recipe, tmp_path, caplog):
    lines = [row for n in (3, 6) for row in RunningSum(n=n).rows("train", 12, 1, True)]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    shared = {"data": {"path": str(tmp_path / "said.jsonl")}, "max_steps": 1, "validation": None}
    unlimited = recipe(**shared)
    all_rows = examples_of(unlimited)
    longest = max(row.length for row in all_rows)
    for limits in ({"max_completion_length": 9}, {"max_length": longest - 1}, {"max_length": len(all_rows[-1].prompt)}):
        caplog.clear()
        computed = examples_of(recipe(**shared, **limits))
        length, completion = limits.get("max_length", 10**6), limits.get("max_completion_length", 10**6)
        fit = [row for row in all_rows if len(row.prompt) < length]
        cut = [row for row in fit if row.length > length or len(row.completion) > completion]
        dropped = 24 - len(fit)
        assert dropped == (12 if length < longest - 1 else 0)
        assert [row.prompt for row in computed] == [row.prompt for row in fit]
        for shown, row in zip(computed, fit, strict=True):
            assert shown.completion == row.completion[: min(length - len(row.prompt), completion)]
        message = f"{len(cut) + dropped} of 24 sequences are too long: {len(cut)} are truncated, {dropped} dropped"
        assert message in caplog.text
        assert len(cut) + dropped > 0
    train(recipe(**shared, max_completion_length=9))


def test_only_rows_with_correct_answers_are_kept(recipe, tmp_path):
    from sparse_rl.data.problems import load_data
    from sparse_rl.models.load import load_tokenizer

    all_kept = recipe(data={"synthetic": {"task": "running_sum", "size": 300, "n": 4}})
    tokenizer = load_tokenizer(all_kept.model)
    data = load_data(all_kept.data, tokenizer, require=("prompt", "completion", "answer"))
    rows = [{name: row[name] for name in ("prompt", "completion", "answer")} for row in data]
    correct = [i % 7 != 3 for i in range(300)]
    for row, is_right in zip(rows, correct, strict=True):
        row["answer"] = row["answer"] if is_right else str((int(row["answer"]) + 1) % 10)
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    only_right = recipe(data={"path": str(tmp_path / "said.jsonl")}, keep="boxed")
    all_rows = examples_of(all_kept)
    assert examples_of(only_right) == [row for row, is_right in zip(all_rows, correct, strict=True) if is_right]


def test_a_teacher_with_another_vocabulary_is_refused(recipe, tiny):
    with pytest.raises(UserError, match=r"teacher: has a vocabulary of 80 tokens, but the student.s has 64"):
        train(recipe(teacher=tiny(vocab_size=80)))
