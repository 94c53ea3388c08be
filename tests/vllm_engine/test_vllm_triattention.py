"""TriAttention in vLLM reads the centres in the model's directory, and decides as the reference engine does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from policy_cases import UNCALIBRATED
from ties import agrees_with_hf, same_decisions
from tiny import FOLDER, QUICKSTART, directory_of, loaded, prompts_of, random_prompts

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import FAMILIES
from sparse_rl.errors import UserError
from sparse_rl.methods.triattention.policy import measure_centres
from sparse_rl.models.centres import write_centres
from sparse_rl.models.directory import CENTRES_FILE
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER

ON_BOTH = [name for name, only_hf in FAMILIES.items() if only_hf is None and name not in UNCALIBRATED]
CELLS = [(name, period) for name in ON_BOTH for period in (1, 16) if period == 16 or name in ON_BOTH[:2]]
SAMPLING = SamplingConfig(60, temperature=1.0, seed=2, ignore_eos=True)


@cache
def calibrated(model: Path) -> Path:
    """Return a copy of a model's directory, with centres that were measured on random tokens."""
    folder = Path(mkdtemp(dir=FOLDER.name)) / "model"
    shutil.copytree(model, folder)
    (ids,) = random_prompts((300,), seed=5)
    write_centres(folder, measure_centres(loaded(folder), ids))
    return folder


@pytest.mark.parametrize(
    ("family", "period"),
    [pytest.param(*cell, marks=[] if cell == ("qwen2", 16) else pytest.mark.slow) for cell in CELLS],
)
def test_decisions_equal_the_reference_engines(family: str, period: int, open_engine: Callable) -> None:
    """Control: centres of another text."""
    policy, prompts = make_policy("triattention", budget=64, window=8, period=period), random_prompts((5, 63, 81, 200))
    folder = calibrated(directory_of(family))
    sampled = open_engine(policy, folder).generate(prompts, SAMPLING)
    agrees_with_hf(policy, prompts, SAMPLING, {"exact": sampled}, folder)
    assert all(bool((r.trace.evict_at < NEVER).any()) for r in sampled if len(r.prompt_ids) > 5)
    other = policy.with_centres(measure_centres(loaded(directory_of(family)), list(range(20)) * 10))
    hf = make_engine("hf", model=loaded(folder), policy=policy)
    hf.policy = other
    assert not any(map(same_decisions, hf.generate(prompts[1:], SAMPLING), sampled[1:]))


@pytest.mark.slow
def test_a_trained_model_decides_alike_in_both_engines(open_engine: Callable) -> None:
    """No sequence may differ, not even by a tie."""
    policy, folder = make_policy("triattention", budget=24, window=4, period=8), calibrated(QUICKSTART)
    prompts = prompts_of("quickstart", (9, 30, 60, 90), seed=4)
    sampled = open_engine(policy, folder).generate(prompts, SAMPLING)
    expected = make_engine("hf", model=loaded(folder), policy=policy).generate(prompts, SAMPLING)
    assert all(map(same_decisions, expected, sampled))


def test_a_model_without_centres_is_refused(tmp_path: Path) -> None:
    shutil.copytree(calibrated(directory_of("qwen2")), tmp_path / "model")
    (tmp_path / "model" / CENTRES_FILE).unlink()
    with pytest.raises(UserError, match="the policy triattention needs"):
        make_engine("vllm", model=str(tmp_path / "model"), policy=make_policy("triattention", budget=64))
