"""Context files: a saved context loads unchanged, and any other file is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from judging import in_one_line
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import model_of, new_model, prompts_of

from rollout import SamplingConfig, make_engine
from rollout.context import Context, PromptCacheConfig, load_context, save_context
from rollout.context.cache import LayerEntries
from sparse_rl.errors import NotWrittenError, UserError
from sparse_rl.models.weights import Identity, identify


def example_context(dtype: torch.dtype = torch.float32) -> Context:
    """Return a context of 2 layers that share the memory of positions, and whose values are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 3, 4, 9]).expand(1, 2, 4)
    layers = []
    for _ in range(2):
        keys, values = (torch.randn(1, 2, 6, 4, generator=generator).to(dtype)[:, :, 1:5] for _ in range(2))
        layers.append(LayerEntries(keys, values, torch.randn(1, 2, 4, generator=generator), positions))
    layers[0].bias[0, 1, 3] = float("-inf")  # padding of a shorter head
    return Context(list(range(5, 17)), layers, True, {"prefill": 0.5, "compaction": 2.0}, model=Identity("a", "12"))


def same(ours: Context, theirs: Context) -> bool:
    """Return True if two contexts are equal in every part, bit for bit."""
    names = ("tokens", "fitted", "seconds", "model")
    if any(getattr(ours, name) != getattr(theirs, name) for name in names):
        return False
    layers = zip(ours.layers, theirs.layers, strict=True)
    parts = [pair for layer, other_layer in layers for pair in zip(layer, other_layer)]  # noqa: B905
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_context_loads_unchanged(dtype: torch.dtype, tmp_path: Path) -> None:
    """Control: the loaded context differs from a context in float64."""
    context = example_context(dtype)
    save_context(tmp_path / "context", context)
    assert same(load_context(tmp_path / "context"), context)
    assert not same(load_context(tmp_path / "context"), example_context(torch.float64))


@pytest.mark.parametrize("policy", ["am", "full", "none"])
def test_rollouts_after_a_loaded_context_equal_those_after_the_original(policy: str, tmp_path: Path) -> None:
    engine, (tokens, question) = make_engine("hf", model=model_of("qwen2"), policy="full"), prompts_of("qwen2", [40, 5])
    context = engine.compact(tokens, PromptCacheConfig(ratio=0.3, policy=policy, first=0))
    save_context(tmp_path / "context", context)
    sampling = SamplingConfig(max_tokens=8, seed=1, ignore_eos=True)
    ours, theirs = (engine.generate([question], sampling, c)[0] for c in (load_context(tmp_path / "context"), context))
    assert ours.completion_ids == theirs.completion_ids
    assert ours.logprobs == theirs.logprobs
    assert ours.prompt_ids == [*tokens, *question]
    assert torch.equal(ours.trace.evict_at, theirs.trace.evict_at)


def test_a_context_of_another_model_is_refused(tmp_path: Path) -> None:
    """And by its own model after a change of weights. Control: a context without a model is accepted."""
    models = [new_model("qwen2", seed=seed) for seed in (0, 1)]
    engine, other = (make_engine("hf", model=model, policy="full") for model in models)
    sampling, tokens = SamplingConfig(max_tokens=2, seed=1, ignore_eos=True), list(range(20, 50))
    save_context(tmp_path / "context", engine.compact(tokens, PromptCacheConfig(ratio=0.3)))
    context = load_context(tmp_path / "context")
    assert context.model == identify(models[0])
    assert len(context.model.fingerprint) == 16
    engine.generate([[5]], sampling, context)
    with pytest.raises(UserError, match="the context is of another model: it was made with") as caught:
        other.generate([[5]], sampling, context)
    assert "\n" not in str(caught.value)
    engine.load_weights(models[1].named_parameters())
    with pytest.raises(UserError, match="the context is of another model: it was made with"):
        engine.generate([[5]], sampling, context)
    save_context(tmp_path / "context", replace(context, model=Identity()))
    other.generate([[5]], sampling, load_context(tmp_path / "context"))


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """A file is refused if it is cut (at every 37th byte), or if one byte is changed (every 7th byte)."""
    file, broken = tmp_path / "context", tmp_path / "broken"
    save_context(file, example_context())
    content = file.read_bytes()
    for size in range(0, len(content), 37):
        broken.write_bytes(content[:size])
        assert isinstance(in_one_line(lambda: load_context(broken)), str)
    for at in range(0, len(content), 7):
        broken.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        line = in_one_line(lambda: load_context(broken))
        assert isinstance(line, str), at
        assert str(broken) in line


def test_files_of_version_1_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 had no record of the fits, so continuations cannot be replayed."""
    monkeypatch.setattr("rollout.context.cache.FORMAT_VERSION", "1")
    save_context(tmp_path / "context", example_context())
    loaded = load_context(tmp_path / "context")
    assert same(loaded, example_context())
    assert not loaded.recorded


def test_files_of_another_format_or_version_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "context"
    save_context(file, example_context())
    with safe_open(str(file), framework="pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert in_one_line(lambda: load_context(tmp_path / "absent")) == f"{tmp_path / 'absent'} does not exist"
    for changed, message in (
        ({"format": "sparse_rl.trace"}, "is not a compacted context (format 'sparse_rl.trace', expected 'sparse_rl."),
        ({"format_version": "1"}, "has format version '1'; the supported versions: 2 and 3; compact the context again"),
        *(({key: value}, "is damaged") for key, value in (("model", "{}"), ("fitted", "false"), ("sha256", "0"))),
    ):
        save_file(tensors, tmp_path / "other", metadata={**metadata, **changed})
        line = in_one_line(lambda: load_context(tmp_path / "other"))
        assert isinstance(line, str)
        assert message in line
    save_file({"a": torch.zeros(1)}, tmp_path / "bare")
    line = in_one_line(lambda: load_context(tmp_path / "bare"))
    assert isinstance(line, str)
    assert "is not a compacted context (format None, expected" in line


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotWrittenError, match=r"absent.*could not be written") as caught:
        save_context(tmp_path / "absent" / "context", example_context())
    assert "\n" not in str(caught.value)
