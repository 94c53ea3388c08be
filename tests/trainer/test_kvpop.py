"""KVpop's retrofit: its loss and gradients equal a dense float64 reference, its runs resume, and its files can be
loaded."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_matched import DenseView
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import windows_of
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views import map_of_model
from sparse_rl.commands.train import train
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.methods.kvpop.view import LearnedView
from sparse_rl.metrics import read_metrics
from sparse_rl.models.directory import attach_scorers, saved_policy
from sparse_rl.models.load import load_model
from sparse_rl.policies.make import make_policy
from sparse_rl.trace import EvictionTrace
from trainer.batch import Example
from trainer.config import DistillationLossConfig
from trainer.losses import ScorerLoss
from trainer.retrofit import KVpopArguments, KVpopTrainer, _warm_cosine

LENGTHS = ((5, 40), (12, 9), (3, 61), (20, 22))
CACHE = {"policy": "kvpop", "budget": 14, "sinks": 2, "window": 4}
WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SETTINGS: dict[str, Any] = {"use_cpu": True, "report_to": [], "gradient_checkpointing": False, "disable_tqdm": True}


def rows() -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    return [Example(*(torch.randint(3, 64, (n,), generator=generator).tolist() for n in pair)) for pair in LENGTHS]


@pytest.fixture
def kvpop(new_model, tmp_path):
    """kvpop(scorer, windows=False, **settings) returns a trainer of a tiny student whose scorers are far from their
    initial values. windows : True gives layers 0 and 2 of the student a sliding window
    """

    def make(scorer: Any = "mlp", **settings: Any) -> KVpopTrainer:
        student = new_model("gemma3_text", **WINDOWS) if settings.pop("windows", False) else new_model("qwen3")
        policy: Any = make_policy({**CACHE, "scorer": scorer, "prefill": settings.pop("prefill", "dense")})
        torch.manual_seed(1)
        attach_scorers(student, policy)
        for weight in student.cache_scorers.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        teacher = new_model("llama", seed=5, num_hidden_layers=3, hidden_size=48)
        options = {key: settings.pop(key) for key in ("train_base",) if key in settings}
        options["boundary"] = BoundaryConfig(queries=None)
        options |= vars(settings.pop("loss", DistillationLossConfig()))
        args = KVpopArguments(output_dir=str(tmp_path / "run"), **options, **{**SETTINGS, **settings})
        return KVpopTrainer(student, teacher, policy, args, rows())

    return make


def reference(trainer, examples=None):
    """Compute the distillation loss KL + CE in float64, one sequence at a time under dense masks of the eviction
    decisions. Return the loss, its gradients, and the share of completion tokens with the largest logit.
    """
    model, loss = trainer.model, trainer.args.loss
    student, teacher = (copy.deepcopy(m).double() for m in (model, trainer.teacher))
    total, tokens, right = torch.zeros((), dtype=torch.float64), 0, 0
    for row in examples or rows():
        ids = torch.tensor([row.prompt + row.completion])
        policy = trainer.policy.config
        prompts = torch.tensor([len(row.prompt)]) if policy.prefill == "dense" else None
        view = LearnedView(model.cache_scorers, policy, torch.tensor([ids.shape[1]]), prompts=prompts)
        whole = map_of_model(view, model.config, torch.tensor([ids.shape[1]]), ids.shape[1])
        with torch.no_grad():
            adopt(model)(input_ids=ids, attention_mask=NO_MASK, kv_view=whole, use_cache=False)
        decided = torch.cat([view._decided[layer].evict_at for layer in range(2)])
        trace = EvictionTrace.recorded(decided).beside_windows(windows_of(model.config))
        assert (trace.evict_at < ids.shape[1]).any() or ids.shape[1] <= 21
        logprobs = []
        for side, masks in ((student, trace.evict_at), (teacher, EvictionTrace.dense(3, 2, ids.shape[1]).evict_at)):
            dense = DenseView(EvictionTrace(masks))
            out = adopt(side)(input_ids=ids, attention_mask=NO_MASK, kv_view=dense, use_cache=False).logits
            logprobs.append(out[0, len(row.prompt) - 1 : -1].log_softmax(-1))
        s, t = logprobs[0], logprobs[1].detach()
        total = total + loss.kl_weight * (t.exp() * (t - s)).sum()
        total = total - loss.ce_weight * s.gather(-1, torch.tensor(row.completion)[:, None]).sum()
        tokens += len(row.completion)
        for values, token in zip(s.tolist(), row.completion, strict=True):
            right += values[token] == max(values)
    (total / tokens).backward()
    gradients = {name: weight.grad for name, weight in student.named_parameters()}
    return float((total / tokens).detach()), gradients, right / tokens


@pytest.mark.parametrize("scorer", ["mlp", "mlstm", "recency"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill": "masked"},
        {"gradient_checkpointing": True},
        {"weights": (0.1, 0.9)},
        {"attention_kernel": "flex_sorted"},
        {"windows": True, "weights": (0.1, 0.9)},
    ],
    ids=str,
)
@pytest.mark.few(4)
def test_loss_and_gradients_equal_the_dense_reference(scorer, settings, flex_trains, kvpop):
    settings = dict(settings)
    kl, ce = settings.pop("weights", (1.0, 0.0))
    trainer = kvpop(scorer, loss=DistillationLossConfig(kl_weight=kl, ce_weight=ce, chunk=7), **settings)
    expected, gradients, accuracy = reference(trainer)
    model = trainer.model.train()
    if settings:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rollouts = trainer._with_traces(rows())
    loss, *sums, count = trainer._losses(model, rollouts)
    (loss / count).backward()
    boundary = sums[trainer.summed.index("boundary")] / count
    assert set(flex_trains) == ({True} if "attention_kernel" in settings else set())
    assert float((loss / count - boundary).detach()) == pytest.approx(expected, abs=1e-5)
    assert float(sums[trainer.summed.index("right")] / count) == pytest.approx(accuracy)
    for name, weight in model.named_parameters():
        if "cache_scorers" in name:
            assert weight.grad is not None, name
            assert weight.grad.abs().max() > 0, name
        else:
            wanted_gradient = gradients[name]
            assert (weight.grad - wanted_gradient).abs().max() <= 1e-5 * max(1.0, float(wanted_gradient.abs().max())), (
                name
            )
    if scorer == "recency":
        assert float(boundary) == 0
        return
    boundary_gradients = {
        name: weight.grad.clone() for name, weight in model.named_parameters() if "cache_scorers" in name
    }
    model.zero_grad()
    trainer.args.kvpop = dataclasses.replace(trainer.args.kvpop, boundary_weight=0.0)
    loss, *_ = trainer._losses(model, rollouts)
    (loss / count).backward()
    for name, weight in model.named_parameters():
        if "cache_scorers" in name:
            assert weight.grad is None or (weight.grad == 0).all(), name
        else:
            assert (weight.grad - gradients[name]).abs().max() <= 1e-5 * max(1.0, float(gradients[name].abs().max()))
    assert all(value.abs().max() > 0 for value in boundary_gradients.values())


def test_validation_measures_the_token_accuracy_under_the_mask(kvpop):
    """Completions are those that the model prefers with a full cache. Control: if nothing is evicted, it is 1."""
    trainer = kvpop("mlp")
    for row in (examples := rows()):
        ids = list(row.prompt)
        for _ in row.completion:
            ids.append(int(trainer.model(torch.tensor([ids])).logits[0, -1].argmax()))
        row.completion[:] = ids[len(row.prompt) :]
    trainer.eval_dataset = examples
    accuracy = trainer.evaluate()["eval_token_accuracy"]
    assert accuracy == pytest.approx(reference(trainer, examples)[2])
    assert 0 < accuracy < 1
    trainer.policy = make_policy({**CACHE, "budget": 200, "scorer": "mlp"})
    trainer.scorer_loss = ScorerLoss(trainer.policy.config, trainer.args.kvpop.target, trainer.args.kvpop.boundary)
    assert trainer.evaluate()["eval_token_accuracy"] == 1


def test_model_and_scorers_have_separate_learning_rates(kvpop):
    """The scorers' rate rises for 100 steps to 1e-3, then falls as a cosine to 8e-5."""
    trainer = kvpop("mlstm", learning_rate=1e-4, lr_scheduler_type="constant", weight_decay=0.1, warmup_steps=0)
    trainer.create_optimizer()
    trainer.create_scheduler(400)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(400):
        for group in trainer.optimizer.param_groups:
            rates[group["scorer"]].append(group["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert set(rates[False]) == {1e-4}
    scorer_rates = rates[True][::2]
    assert scorer_rates[0] == 0
    assert scorer_rates[100] == pytest.approx(1e-3)
    assert max(scorer_rates) == scorer_rates[100]
    assert scorer_rates[399] == pytest.approx(8e-5, rel=0.01)
    assert scorer_rates[250] == pytest.approx((1e-3 + 8e-5) / 2, rel=0.01)
    assert _warm_cosine(0, warmup=0, steps=10, low=0.1) == 1
    counted = sum(len(group["params"]) for group in trainer.optimizer.param_groups)
    assert counted == len(list(trainer.model.parameters()))
    decayed = {id(w) for g in trainer.optimizer.param_groups if g["weight_decay"] for w in g["params"]}
    names = {name: id(weight) in decayed for name, weight in trainer.model.named_parameters()}
    assert not names["cache_scorers.0.alpha"]
    assert names["cache_scorers.0.query"]
    assert not names["model.norm.weight"]
    assert names["model.layers.0.mlp.up_proj.weight"]


def test_a_frozen_model_trains_only_its_scorers(kvpop):
    trainer = kvpop("mlp", train_base=False)
    loss, *_ = trainer._losses(trainer.model.train(), trainer._with_traces(rows()))
    loss.backward()
    for name, weight in trainer.model.named_parameters():
        assert (weight.grad is not None) == ("cache_scorers" in name), name


@pytest.fixture
def recipe(retrofit, tiny):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 0}
    own = {"teacher": tiny(num_hidden_layers=3), "boundary": {"queries": 16}, "scorer_learning_rate": 1e-2}
    return lambda **keys: retrofit(**{**sizes, **own, "cache": CACHE, "seed": 3, **keys})


def validation(every: int) -> dict[str, Any]:
    return {"data": {"synthetic": {"task": "running_sum", "size": 8, "n": 6, "split": "evaluation"}}, "every": every}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"packing": True, "max_length": 90, "teacher": None, "top_k": 8, "gradient_checkpointing": True},
        {"cache": {**CACHE, "scorer": {"name": "mlstm", "value": "full"}}, "kl_weight": 0.1, "ce_weight": 0.9},
        {"cache": {**CACHE, "scorer": "recency"}},
        {"cache": {**CACHE, "prefill": "masked"}},
        {"train_base": False, "target": {"normaliser": "dense", "group": "mean", "lookahead": 20}},
    ],
    ids=["mlp", "packed", "mlstm", "streaming+", "masked prefill", "frozen"],
)
@pytest.mark.few(2)
def test_a_run_logs_its_losses_and_saves_a_loadable_model(keys, recipe, tmp_path, tiny):
    small_recipe = recipe(validation=validation(every=2), **keys)
    final = train(small_recipe)
    lines = read_metrics(tmp_path / "run")
    steps, held_out = ([line for line in lines if name in line] for name in ("loss", "eval_kl"))
    assert len(steps) == 4
    assert len(held_out) == 3
    for line in steps:
        assert line["kl"] >= 0
        assert 0 <= line["token_accuracy"] <= 1
        assert 0 < line["cache/retention"] < 1
        if small_recipe.loss.ce_weight == 0:
            assert line["loss"] == pytest.approx(line["kl"] + line["boundary_loss"], rel=1e-5)
    assert all(0 < line["eval_recall"] <= 1 for line in held_out)
    assert all(0 <= line["eval_token_accuracy"] <= 1 for line in held_out)
    has_weights = small_recipe.cache.scorer.name != "recency"
    assert all((line["boundary_loss"] > 0) == has_weights for line in steps)
    # The directory is that of an ordinary model, with the scorers and the policy in files beside it.
    assert not any("cache_scorer" in name for name in load_file(final / "model.safetensors"))
    assert (final / "cache_scorer.safetensors").is_file()
    assert json.loads((final / "cache_policy.json").read_text())["policy"] == "kvpop"
    base = AutoModelForCausalLM.from_pretrained(final)
    with_scorers = load_model(final)
    assert not hasattr(base, "cache_scorers")
    assert len(with_scorers.cache_scorers) == 2
    if "train_base" in keys:
        start = AutoModelForCausalLM.from_pretrained(tiny())
        pairs = zip(start.parameters(), base.parameters(), strict=True)
        assert all(torch.equal(weight, initial) for weight, initial in pairs)
        assert with_scorers.cache_scorers[0].out.abs().max() > 0
    engine = make_engine("hf", model=str(final))
    (rollout,) = engine.generate([list(range(3, 60))], SamplingConfig(max_tokens=20, seed=0, ignore_eos=True))
    assert engine.policy.config == small_recipe.cache
    assert (rollout.trace.kept_counts() == small_recipe.cache.budget).all()


@pytest.mark.slow
def test_existing_scorers_are_trained_further(recipe, tmp_path, caplog):
    """The learning rates are near 0, so the scorers do not change."""
    first = train(recipe(output_dir=str(tmp_path / "first")))
    with caplog.at_level(logging.WARNING):
        train(recipe(output_dir=str(tmp_path / "second"), model=str(first), max_steps=1, scorer_learning_rate=1e-9,
                     scorer_final_learning_rate=1e-9, learning_rate=1e-9))  # fmt: skip
    assert "are trained further" in caplog.text
    before, after = (load_file(tmp_path / name / "model/cache_scorer.safetensors") for name in ("first", "second"))
    assert all((before[name] - after[name]).abs().max() < 1e-6 for name in before)
    assert before["0.out"].abs().max() > 1e-3
    with pytest.raises(UserError, match="the model carries scorers"):
        train(recipe(output_dir=str(tmp_path / "third"), model=str(first), cache={**CACHE, "scorer": "linear"}))


def test_texts_become_single_or_packed_rows(recipe):
    from sparse_rl.models.load import load_tokenizer

    def examples(one_recipe: Any) -> list[Any]:
        return one_recipe.examples(one_recipe.prepare_training())[0]

    unpacked, packed = recipe(), recipe(packing=True, max_length=80)
    tokenizer, alone = load_tokenizer(unpacked.model), examples(unpacked)
    assert len(alone) == 24
    assert all(row.completion[-1] == tokenizer.eos_token_id for row in alone)
    short = [row for row in alone if len(row.prompt) + len(row.completion) <= 80]
    assert 0 < len(short) < 24  # the longer ones are dropped
    together = examples(packed)
    stream = [token for row in short for token in row.prompt + row.completion]
    assert [token for row in together for token in row.prompt + row.completion] == stream
    assert {len(row.prompt) + len(row.completion) for row in together[:-1]} == {80}
    with pytest.raises(UserError, match="no text of at most 5 tokens is left"):
        examples(recipe(max_length=5))


def test_a_budget_that_is_never_reached_gives_a_warning(recipe):
    assert not recipe().warnings
    (warnings,) = recipe(cache={**CACHE, "budget": 400}).warnings
    assert "rows of at most 128 tokens never exceed the budget" in warnings


@pytest.mark.slow
def test_the_seed_determines_the_initial_scorers(recipe, tmp_path):
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(torch.seed() % 2**32)  # another process would have another seed
        folder = tmp_path / f"run{len(results)}"
        train(recipe(output_dir=str(folder), seed=seed, max_steps=1, scorer_learning_rate=1e-9,
                     scorer_final_learning_rate=1e-9))  # fmt: skip
        results.append(load_file(folder / "model/cache_scorer.safetensors")["0.inner"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda folder: (folder / "cache_scorer.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "cache_scorer.safetensors").write_bytes(b"x" * 40), "cannot be used"),
        (
            lambda folder: (folder / "cache_policy.json").write_text(
                json.dumps({"format_version": 1, **CACHE, "scorer": "linear"})
            ),
            "cannot be used: Error(s) in loading state_dict",
        ),
    ],
)
@pytest.mark.few(1)
def test_a_damaged_model_directory_is_refused(harm, says, recipe, tmp_path):
    final = train(recipe(max_steps=1))
    assert isinstance(saved_policy(final), KVpop)
    harm(final)
    with pytest.raises(UserError) as error:
        load_model(final)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_optimizer_of_the_recipe_is_used(recipe):
    for name, kind in (("adafactor", "Adafactor"), ("sgd", "SGD"), ("adamw_torch", "AdamW")):
        small_recipe = recipe(optim=name, output_dir=recipe().output_dir + name, attention_kernel="sdpa")
        Path(small_recipe.output_dir).mkdir()
        run, folder = small_recipe.prepare_training(), Path(small_recipe.output_dir)
        optimizer = run.recipe.make_trainer(run, folder).create_optimizer()
        assert type(optimizer).__name__ == kind
        assert {(group["scorer"], group["lr"]) for group in optimizer.param_groups} == {(False, 1e-3), (True, 1e-2)}


def test_scores_that_are_not_finite_stop_the_run(recipe, capfd):
    from sparse_rl.commands.main import main

    small_recipe = recipe(scorer_learning_rate=1e25, learning_rate=1e20, scorer_warmup_steps=0)
    file = Path(small_recipe.output_dir).with_suffix(".yaml")
    file.write_text(small_recipe.as_yaml())
    assert main(["train", str(file)]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("sparse-rl:") or "Trace" in line]
    assert lines == [
        "sparse-rl: error: after step 1 a score is NaN: the tokens cannot be ranked; "
        "start again with a lower scorer_learning_rate, or learning_rate"
    ]
