"""The examples for other people's trainers: traces are read with numpy alone, and replayed without this package."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, python
from tiny import new_model, policy_of, prompts_of

from rollout import SamplingConfig, make_engine
from rollout.config import Origin
from rollout.files import written_rollouts
from sparse_rl.attention import replay_logprobs

EXAMPLES = ROOT / "docs" / "examples"
SAMPLING = SamplingConfig(max_tokens=24, temperature=0.7, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def example():
    """The module replay_plain, which registers an attention function with transformers."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("replay_plain")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """(the folder of six ragged rollouts under evictions, the model's directory, the rollouts)"""
    folder, directory = tmp_path_factory.mktemp("rollouts"), tmp_path_factory.mktemp("model")
    new_model("qwen3").save_pretrained(directory)
    policy = policy_of("gkv", budget=8, window=3, period=2)
    engine = make_engine("hf", model=str(directory), policy=policy, dtype="float32")
    rollouts = engine.generate(prompts_of("qwen3", (5, 20, 12, 9, 14, 7)), SAMPLING)
    origin = Origin(
        model=str(directory),
        vocabulary=64,
        engine="hf",
        dtype="float32",
        exact=True,
        sampling=SAMPLING,
        evicts=True,
        made_by={"policy": "gkv"},
    )
    with written_rollouts(folder, origin) as add:
        for part in (rollouts[:2], rollouts[2:]):
            add(part, [{"answer": "1"}] * len(part))
    return folder, directory, rollouts


def plain(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="replay")


def test_numpy_reads_what_was_written(example, sampled):
    folder, _, rollouts = sampled
    read = list(example.read_rollouts(folder))
    assert len(read) == len(rollouts) > 2
    for row, rollout in zip(read, rollouts, strict=True):
        assert row["completion_ids"] == list(rollout.completion_ids)
        assert (torch.tensor(row["evict_at"]) == rollout.trace.evict_at).all()
    process = python("-X", "importtime", str(EXAMPLES / "read_rollouts.py"), str(folder))
    assert process.stdout.count("tokens, of which") == len(rollouts), process.stderr[-2000:]
    assert not [name for name in ("torch", "safetensors", "sparse_rl") if f" {name}\n" in process.stderr]


@pytest.mark.parametrize("byte", [-1, 60])
def test_numpy_sees_damage(byte, example, sampled, tmp_path):
    file = next(sampled[0].glob("traces-*"))
    data = bytearray(file.read_bytes())
    data[byte] ^= 1
    (tmp_path / file.name).write_bytes(data)
    with pytest.raises((ValueError, KeyError)):
        importlib.import_module("read_rollouts").read_tensors(tmp_path / file.name)


def test_the_plain_loop_has_the_samplers_log_probs_and_our_gradients(example, sampled):
    folder, directory, rollouts = sampled
    rows, advantages = list(example.read_rollouts(folder)), [1.0, -0.5, 2.0, 0.3, -1.0, 0.7][: len(rollouts)]
    model = plain(directory)
    assert example.step(model, rows, advantages, SAMPLING.temperature) <= 1e-5

    ours = plain(directory)
    means = [
        (scores - torch.tensor(rollout.logprobs)).exp().mean()
        for scores, rollout in zip(replay_logprobs(ours, rollouts, SAMPLING.temperature), rollouts, strict=True)
    ]
    (-torch.stack(means) * torch.tensor(advantages)).mean().backward()
    gradients = dict(ours.named_parameters())
    for name, weight in model.named_parameters():
        expected = gradients[name].grad
        assert (weight.grad - expected).abs().max() <= 1e-5 * expected.abs().max(), name

    later = [{**row, "evict_at": row["evict_at"] + (row["evict_at"] < 2**30)} for row in rows]  # the control
    assert example.step(model, later, advantages, SAMPLING.temperature) > 1e-3


@pytest.mark.slow
def test_the_command_takes_a_step(sampled):
    folder, directory, _ = sampled
    assert json.loads((folder / "rollouts.json").read_text())["format_version"]
    process = python(str(EXAMPLES / "replay_plain.py"), str(folder), str(directory))
    assert float(process.stdout.removeprefix("largest gap:")) <= 1e-5, process.stderr[-2000:]
