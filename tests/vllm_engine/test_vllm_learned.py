"""A learned policy in vLLM: it decides as training does and as the reference engine does, before a query attends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judging import gap, same, wrong_traces
from learned import SCORERS, learned_policy, save_learned, with_scorers, wrong_decisions

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.models.load import load_model

B = 20
LENGTHS = (1, 7, 20, 21, 22, 65, 80, 150)  # 65 and 81: a last chunk of one token, of 16


@pytest.fixture(scope="module")
def learned(new_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """learned(scorer, family="qwen3", seed=0) -> a model's directory with scorers far from where they start."""
    made: dict[Any, Path] = {}

    def make(scorer: str, family: str = "qwen3", seed: int = 0) -> Path:
        if (scorer, family, seed) not in made:
            sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2048}
            policy, folder = learned_policy(scorer, B), tmp_path_factory.mktemp(scorer)
            save_learned(with_scorers(new_model(family, **sizes), policy, seed, scale=0.2), policy, folder)
            made[scorer, family, seed] = folder
        return made[scorer, family, seed]

    return make


@pytest.mark.parametrize("chunk", [2048, 16])
@pytest.mark.parametrize("scorer", SCORERS)
def test_it_decides_as_training_and_hf_do(
    scorer: str,
    chunk: int,
    learned: Callable,
    open_engine: Callable,
    random_prompts: Callable,
    record_property: Callable,
) -> None:
    """Prompts whole and in chunks, several samples of each, more sequences than run at a time."""
    folder, prompts = learned(scorer), random_prompts(LENGTHS)
    model, policy = load_model(folder), learned_policy(scorer, B)
    engine = open_engine(None, folder, max_batch=10, max_num_batched_tokens=chunk)
    assert engine.policy.config == policy.config
    for n, temperature in ((3, 1.0), (1, 0.0)):
        sampling = SamplingConfig(max_tokens=30, seed=2, n=n, temperature=temperature, ignore_eos=True)
        rollouts = engine.generate(prompts, sampling)
        wrong, ties, heads = wrong_decisions(model, policy, rollouts)
        assert not wrong and ties <= heads / 100
        own = gap(replay_logprobs(model, rollouts, temperature or 1.0), rollouts)
        record_property("gap", own)
        assert own <= 1e-5
        for name, others in wrong_traces(rollouts).items():
            if name != "heads swapped" or scorer != "recency":
                assert gap(replay_logprobs(model, others, temperature or 1.0), rollouts) >= 100 * own, name
        reference = make_engine("hf", model=model, policy=policy).generate(prompts, sampling)
        assert same(rollouts, reference)
        for r in rollouts:
            for query in range(len(r.prompt_ids), len(r.trace) - 1):
                assert (r.trace.kept_counts(query) == min(query + 1, B)).all()
