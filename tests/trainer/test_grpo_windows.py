"""Training of models with sliding windows: windows are replayed beside the policy's evictions, in every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eager import eager_copy, largest_difference, plain_logprobs, sampled_logprobs
from judging import gap
from safetensors.torch import load_file
from trainer_runs import GKV, SAMPLED, small, steps, trained
from transformers import AutoModelForCausalLM

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.train import train
from sparse_rl.models.load import head_of, load_model
from sparse_rl.recipe import make_recipe
from sparse_rl.trace import NEVER, EvictionTrace
from trainer.batch import Batch, Example
from trainer.grpo.metrics import ReplayGapError

NOISE = 1e-5
FAMILIES = ("gemma3_text", "olmo3")
FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


def without_windows(rollout: Rollout) -> Rollout:
    """Return the rollout with a trace in which no token leaves a sliding window."""
    trace = rollout.trace
    has_window = torch.tensor(trace.windows)[:, None, None] > 0
    wrong = EvictionTrace(trace.evict_at.masked_fill(has_window, NEVER), trace.further, validate=False)
    return replace(rollout, trace=wrong)


@pytest.fixture
def sampled(new_model, prompts_of):
    """Return a Gemma 3 of 4 layers, of which 0 and 2 have a window of 12 tokens, and sequences that it samples."""
    model = new_model("gemma3_text", **FOUR)
    prompts = prompts_of("gemma3_text", (4, 11, 28))
    return model, make_engine("hf", model=model, policy=GKV).generate(
        prompts, SamplingConfig(30, seed=1, ignore_eos=True)
    )


def test_control_without_windows_the_guard_stops_the_run(grpo, sampled):
    model, rollouts = sampled
    assert gap(replay_logprobs(model, rollouts), rollouts) <= NOISE
    assert gap(replay_logprobs(model, [without_windows(r) for r in rollouts]), rollouts) >= 0.1
    trainer = grpo(family="gemma3_text")
    generate = trainer.engine.generate
    trainer.engine.generate = lambda *args: [without_windows(r) for r in generate(*args)]
    with pytest.raises(ReplayGapError, match="replay gap"):
        trainer.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_full_attention_in_training_keeps_the_windows(family, grpo):
    trainer = grpo(family=family, train_attention="full", importance_correction="none")
    rows = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer._compute_loss(trainer.model, rows)
    eager = eager_copy(load_model(trainer.model.name_or_path))
    ours, theirs, sampler = [], [], []
    for i, logprobs in enumerate(trainer.batch.logprobs[1]):
        prompt, completion = (rows[f"{name}_ids"][i][rows[f"{name}_mask"][i] > 0] for name in ("prompt", "completion"))
        with torch.no_grad():
            logits = eager(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        theirs.append(logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, completion[:, None])[:, 0])
        ours.append(logprobs[: len(completion)])
        sampler.append(rows["sampling_per_token_logps"][i, : len(completion)])
    assert max(map(len, ours)) == 20
    assert largest_difference(ours, theirs) <= NOISE
    assert largest_difference(sampler, theirs) > 1e-3


@pytest.mark.parametrize(
    "packing", [pytest.param(False, id="padded", marks=pytest.mark.slow), pytest.param(True, id="packed")]
)
def test_every_kernel_gives_the_same_gradients(packing, flex_trains, sampled):
    model, rollouts = sampled
    model.train()

    def gradients(kernel: str, checkpointed: bool = False, change: Callable = lambda r: r) -> list[torch.Tensor]:
        model.gradient_checkpointing_disable()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        examples = [Example.from_rollout(change(r)) for r in rollouts]
        batch = Batch.make(examples, torch.device("cpu"), packing, kernel)
        hidden = batch.hidden(model, replayed=True)
        weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
        model.zero_grad()
        (hidden * weights).sum().backward()
        return [hidden.detach(), *(weight.grad.clone() for weight in model.model.parameters())]

    def distance(others: list[torch.Tensor]) -> float:
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(others, plain, strict=True))

    plain = gradients("sdpa")
    for kernel in ("gather", "dense", "flex", "flex_sorted"):
        assert distance(gradients(kernel)) <= NOISE, kernel
    assert flex_trains.count(True) == flex_trains.count(False) == 4  # one call for each layer
    assert distance(gradients("gather", checkpointed=True)) <= NOISE
    assert distance(gradients("gather", change=without_windows)) > 0.01


def test_full_rows_equal_eager_attention(sampled):
    model, rollouts = sampled
    theirs = [plain_logprobs(eager_copy(model), r) for r in rollouts]
    for packing in (False, True):
        batch = Batch.make([Example.from_rollout(r) for r in rollouts], torch.device("cpu"), packing)
        with torch.no_grad():
            logits = head_of(model)(batch.hidden(model, replayed=False)).log_softmax(-1)
        flat = logits.gather(-1, batch.targets[:, None])[:, 0]
        ours = dict(zip((id(e.trace) for e in batch.examples), flat.split([30] * len(rollouts)), strict=True))
        assert largest_difference([ours[id(r.trace)] for r in rollouts], theirs) <= NOISE


def test_metrics_count_the_global_layers_alone(grpo, tiny):
    """Retention and bytes are those of the two global layers of four, counted here from the traces token by token."""
    trainer = grpo(family="gemma3_text", model=tiny("gemma3_text", **FOUR), max_steps=1)
    generate, rollouts = trainer.engine.generate, []

    def listening(prompts: Any, sampling: SamplingConfig) -> list[Rollout]:
        rollouts.append(generate(prompts, sampling))
        return rollouts[-1]

    trainer.engine.generate = listening
    (line,) = trained(trainer)
    kept, held, fed = 0.0, 0, 0
    for rollout in rollouts[-1]:
        seen = len(rollout.trace) - 1
        layers = [rollout.trace.evict_at[layer].tolist() for layer in (1, 3)]
        counts = [sum(at >= seen for at in head[:seen]) for heads in layers for head in heads]
        kept += sum(counts) / len(counts) / seen
        fed += seen
        # the cache grows to budget + period entries, but holds at least the prompt
        held += max(len(rollout.prompt_ids), min(seen, GKV["budget"] + GKV["period"]))
    of_entry = 2 * 2 * 2 * 8 * 4  # keys and values, global layers, kv heads, head_dim, bytes of a float32
    assert line["cache/retention"] == pytest.approx(kept / len(rollouts[-1]), rel=1e-6)
    assert line["cache/bytes_full"] == fed * of_entry
    assert line["cache/bytes_held"] == held * of_entry


@pytest.mark.slow
def test_a_trained_adapter_is_merged_and_the_model_loads_in_transformers(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    keys = small(tiny("gemma3_text", **FOUR), tmp_path / "run", cache=GKV, lora={"r": 4}, learning_rate=1e-2)
    folder = train(make_recipe({**keys, **SAMPLED["grpo"]}))
    assert max(line["replay/gap_max"] for line in steps(tmp_path / "run")) <= NOISE
    assert json.loads((folder / "cache_policy.json").read_text())["policy"] == "gkv"
    assert "sparse-rl serve" not in (folder / "README.md").read_text()
    assert len(load_file(tmp_path / "run/adapter/adapter_model.safetensors")) == 4 * 7 * 2
    engine = make_engine("hf", model=folder, policy="full")
    rollouts = engine.generate([list(range(3, 50)), [5, 6, 7]], SamplingConfig(40, seed=0, ignore_eos=True))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs = [plain_logprobs(plain, r) for r in rollouts]
        plain.config.sliding_window = 99
        wrong = [plain_logprobs(plain, r) for r in rollouts]
    assert largest_difference(theirs, sampled_logprobs(rollouts)) <= NOISE
    assert largest_difference(wrong, sampled_logprobs(rollouts)) >= 0.1  # control
