"""If a log-prob is NaN or infinite, the hf engine stops with an error in the step that samples it, in every dtype."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import outcome
from tiny import new_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout import SamplingConfig, make_engine
from rollout.measure.accuracy import sample_in_parts
from rollout.sampling import NotFiniteLogprobError
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.main import main
from sparse_rl.errors import NotFiniteError
from sparse_rl.policies import make_policy

POISON = 63  # the token whose embedding is not finite
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]]
SAMPLING = SamplingConfig(6, seed=1, ignore_eos=True)
STREAMING = {"policy": "streaming", "budget": 8, "sinks": 2}
WEIGHTS = {  # name -> the weights in which one value is made non-finite
    "embedding": lambda model: model.model.embed_tokens.weight[POISON],
    "layer": lambda model: model.model.layers[1].mlp.down_proj.weight[3],
    "norm": lambda model: model.model.norm.weight,
    "head": lambda model: model.lm_head.weight[40],
}


def spoil(model: PreTrainedModel, weight: str, value: float = math.nan) -> PreTrainedModel:
    with torch.no_grad():
        WEIGHTS[weight](model)[2] = value
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spoilt_weight", WEIGHTS)
@pytest.mark.parametrize("policy", ["full", STREAMING], ids=["full", "streaming"])
@pytest.mark.few(8)
def test_a_weight_that_is_not_finite_is_an_error_in_the_first_step(policy: Any, spoilt_weight: str, dtype: str) -> None:
    """Under every sampling setting, the error names prompt, sample and step. Control: the model before."""
    model = new_model("qwen3").to(getattr(torch, dtype))
    engine = make_engine("hf", model=model, policy=make_policy(policy))
    prompts = [*PROMPTS[:1], [5, POISON, 6], *PROMPTS[1:]]
    failing_prompt = int(spoilt_weight == "embedding")  # it spoils only the rows with its token
    samplings = SAMPLING, replace(SAMPLING, temperature=0), replace(SAMPLING, top_k=5, top_p=0.9)
    for sampling in samplings:
        assert all(math.isfinite(p) for r in engine.generate(prompts, sampling) for p in r.logprobs)
    for value in (math.nan, math.inf, -math.inf):
        spoil(model, spoilt_weight, value)
        for sampling in samplings:
            with pytest.raises(NotFiniteLogprobError) as error:
                engine.generate(prompts, replace(sampling, n=2))
            result = error.value
            # with an infinite weight, the sign of the activations decides which prompt, sample and step fails first
            if spoilt_weight == "embedding" or math.isnan(value):
                assert (result.prompt, result.sample, result.step) == (failing_prompt, 0, 0)
        with pytest.raises(NotFiniteError, match=r"^prompt \d, sample 0: the log-probability of token \d of the compl"):
            engine.simulate(prompts, [[7, 8, 9]] * 4)
    assert "\n" not in str(result)
    assert dtype in str(result)
    assert ("overflows" in str(result)) == (dtype == "float16")


def test_simulation_stops_at_the_token_after_a_nan_embedding() -> None:
    """The token's own log-prob is finite; the next one's is not. As the last token it is no error."""
    model = spoil(new_model("qwen3"), "embedding")
    engine = make_engine("hf", model=model, policy=make_policy("full"))
    completions = [[7, 8, 9, 10, 11], [7, 8, POISON, 10, 11], [7, 8, 9, 10, POISON]]
    with pytest.raises(NotFiniteLogprobError) as error:
        engine.simulate(PROMPTS, completions)
    assert (error.value.prompt, error.value.sample, error.value.step) == (1, 0, 3)
    finite = engine.simulate(PROMPTS[::2], completions[::2])  # the last token of a completion is never fed
    assert all(math.isfinite(p) for rollout in finite for p in rollout.logprobs)


def test_an_overflow_in_float16_is_an_error() -> None:
    """The weights are finite in float16, but activations overflow. Control: in float32 the model samples."""
    model = new_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e6)
    engine = make_engine("hf", model=model, policy=make_policy("full"))
    engine.generate(PROMPTS, SAMPLING)
    with torch.no_grad():
        model.lm_head.weight.clamp_(-6e4, 6e4)
    model.half()
    assert all(weight.isfinite().all() for weight in model.parameters())
    with pytest.raises(NotFiniteError, match=r"activations in float16, are NaN or infinite.*float16 overflows"):
        engine.generate(PROMPTS, SAMPLING)


def test_log_probs_of_minus_infinity_are_no_error_at_tokens_that_are_not_sampled() -> None:
    """Tokens outside of top-k, or that the model rules out. Control: simulating a token that the model rules out."""
    model = new_model("qwen3")

    class RulesOutTokens(torch.nn.Module):
        """An output layer that gives the tokens 30 to 63 a logit of -inf."""

        def __init__(self, head: torch.nn.Module) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head(hidden).index_fill(-1, torch.arange(30, 64), -math.inf)

    model.set_output_embeddings(RulesOutTokens(model.get_output_embeddings()))
    engine = make_engine("hf", model=model, policy=make_policy("full"))
    for sampling in (SAMPLING, replace(SAMPLING, top_k=3, top_p=0.7), replace(SAMPLING, temperature=0)):
        for rollout in engine.generate(PROMPTS, sampling):
            assert all(math.isfinite(p) for p in (*rollout.logprobs, *rollout.model_logprobs))
    forced = engine.generate(PROMPTS, replace(SAMPLING, top_k=1, forced=(5, 6), forced_from=2))
    assert all(math.isfinite(p) for r in forced for p in (*r.logprobs, *r.model_logprobs))
    with pytest.raises(NotFiniteLogprobError):
        engine.simulate(PROMPTS[:1], [[5, 40]])


@pytest.mark.parametrize("token", [0, POISON])
def test_a_nan_padding_token_does_not_reach_other_sequences(token: int) -> None:
    """Rollouts and replay do not change by a bit, also if the padding token 0 has a NaN embedding."""
    model = new_model("qwen3")
    engine = make_engine("hf", model=model, policy=make_policy("gkv", budget=8, window=2, period=2))
    completions = [[30, 31, 32, 33], [34, 35], [36, 37, 38, 39, 40, 41]]
    expected = engine.simulate(PROMPTS, completions)
    replayed = replay_logprobs(model, expected)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = math.nan
    assert outcome(engine.simulate(PROMPTS, completions)) == outcome(expected)
    assert all(torch.equal(a, b) for a, b in zip(replay_logprobs(model, expected), replayed, strict=True))


def test_an_evaluation_names_the_problem_that_failed() -> None:
    """The error names the number of the problem, not its position in the batch that is sampled together."""
    engine = make_engine("hf", model=spoil(new_model("qwen3"), "embedding"), policy=make_policy("full"), max_batch=2)
    prompts = [*PROMPTS, [5, POISON, 6], [7, 8]]
    with pytest.raises(NotFiniteError, match=r"^prompt 3, sample 0: "):
        list(sample_in_parts(engine, prompts, SAMPLING))


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the quickstart's model with one NaN weight, and its tokenizer."""
    folder = tmp_path_factory.mktemp("spoilt") / "model"
    source = Path(__file__).parents[2] / "recipes/quickstart/model"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[-1].mlp.up_proj.weight[1, 1] = math.nan
    model.save_pretrained(folder)
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("command", ["eval", "rollout", "perplexity"])
@pytest.mark.few(5)
def test_a_command_reports_a_log_prob_that_is_not_finite_in_one_line(
    command: str, dtype: str, spoilt: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """The command reports the error in one line, exits with status 2 and writes no results."""
    out = tmp_path / "out"
    common = {"model": str(spoilt), "dtype": dtype, "rollout": {"engine": "hf", "progress": False}}
    data = {"synthetic": {"task": "running_sum", "size": 3, "n": 3}}
    recipe: dict[str, Any] = {"kind": "eval", "tasks": {"sums": data}, "max_completion_length": 8}
    recipe |= {"cache": STREAMING} if command == "eval" else {}
    if command == "perplexity":
        (tmp_path / "text.txt").write_text("Q" * 400)
        recipe = {"kind": "perplexity", "text": str(tmp_path / "text.txt"), "prompt_tokens": 10, "pieces": 2}
        recipe |= {"completion_tokens": 10}
    recipe |= {"output_dir": str(out)}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**recipe, **common}))
    words = ["--out", str(out)] if command == "rollout" else []
    assert main([command, str(tmp_path / "recipe.yaml"), *words]) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("sparse-rl"))
    assert "error: prompt 0, sample 0: the log-probability of token 0 of the completion is not" in line
    assert not (out / "eval.json").exists()
    assert not (out / "perplexity.json").exists()
