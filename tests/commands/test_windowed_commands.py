"""The commands on a model directory whose layers have sliding windows: evaluation after compacted contexts, and
`rollout`, `verify`, `inspect` and `plot`. Ratios, bytes and shares of held tokens count the global layers, which are
the layers without a window.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from eager import sharpened
from judging import gap

from rollout.config import read_origin
from rollout.files import RolloutFiles
from sparse_rl.analysis.traces import trace_statistics
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.main import main
from sparse_rl.data.synthetic import EOS_ID, PAD_ID, RunningSum
from sparse_rl.models.load import load_model
from sparse_rl.trace import load_traces

CHAT = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>;{% endif %}"
CONTEXTS = ("a1b2c3d4" * 5, "e5f6g7" * 5)
WINDOW = 12
GKV = "{policy: gkv, budget: 16, window: 4, period: 4}"


@pytest.fixture(scope="module")
def model(tmp_path_factory, new_model):
    """A directory with a tiny random Gemma 3, whose layers 0 and 2 have a window of 12 tokens."""
    folder = tmp_path_factory.mktemp("models") / "gemma"
    kinds = ["sliding_attention", "full_attention"] * 2
    ids = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "bos_token_id": None}
    gemma = new_model("gemma3_text", vocab_size=RunningSum.vocabulary, num_hidden_layers=4, layer_types=kinds, **ids)
    sharpened(gemma).save_pretrained(folder)
    tokenizer = RunningSum.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def asking(tmp_path, model):
    """asking(prompt_cache) -> the file of an evaluation with six questions about two contexts."""

    def make(prompt_cache: Any, **keys: Any) -> Path:
        rows = [{"text": CONTEXTS[i % 2], "prompt": f"Q{c}?", "answer": "1"} for i, c in enumerate("abcdef")]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {
            "kind": "eval", "model": str(model), "output_dir": str(tmp_path / "out"), "dtype": "float32",
            "tasks": {"one": {"path": str(tmp_path / "rows.jsonl"), "columns": {"context": "text"}}},
            "accuracy": "boxed", "samples": 1, "max_completion_length": 12, "rollout": {"engine": "hf"},
            "prompt_cache": prompt_cache, **keys,
        }  # fmt: skip
        (tmp_path / "eval.yaml").write_text(json.dumps(recipe))
        return tmp_path / "eval.yaml"

    return make


def output_of(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_an_evaluation_after_contexts_counts_global_layers(asking, tmp_path, capsys):
    policies = [
        {"policy": "full"}, {"policy": "am", "ratio": [0.1, 0.4], "study_tokens": 4},
        {"policy": "am", "on_policy": True, "ratio": 0.2}, {"policy": "evict", "ratio": 0.2, "heads": "global"},
        {"policy": "cartridge", "ratio": 0.2, "cartridge": {"steps": 2}, "study_tokens": 4, "study_samples": 1},
    ]  # fmt: skip
    output_of(capsys, "eval", asking(policies))
    rows = json.loads((tmp_path / "out/eval.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["full", "am", "am", "am", "evict", "cartridge"]
    lengths = [1 + len(context) for context in CONTEXTS]  # with the template's first token
    per_entry = 2 * 2 * (2 * 8 + 1) * 4  # global layers x kv heads x (key, value and bias) x 4 bytes
    for row in rows:
        assert row["contexts"]["whole_bytes"] == mean(lengths) * per_entry
        ratio = row["parameters"].get("ratio", 1)
        if row["policy"] != "evict":  # whose heads keep different numbers
            kept = [1 + round(ratio * (n - 1)) for n in lengths]
            assert row["contexts"]["bytes"] == mean(kept) * per_entry
        if row["policy"] == "full":
            assert row["mean_peak_entries"] == row["peak_entries"] - (lengths[0] - lengths[1]) / 2
        assert row["retention"] == 1 if row["policy"] == "full" else row["retention"] < 0.8


def test_contexts_that_move_keys_are_refused(asking, capsys):
    error = output_of(capsys, "eval", asking({"chunking": "text", "chunk": 10}), status=2)
    assert "prompt_cache.chunking: the model has layers with sliding windows" in error.splitlines()[-1]


@pytest.mark.parametrize("block", [{"policy": "evict", "ratio": 0.3}, {"queries": ["context"], "ratio": 0.3}], ids=str)
def test_rollouts_after_contexts_are_verified(block, asking, tmp_path, capsys):
    output_of(capsys, "rollout", asking(block), "--out", tmp_path / "kept")
    files = sorted((tmp_path / "kept").glob("traces-*"))
    for trace in (trace for file in files for trace in load_traces(file)):
        assert trace.windows == [WINDOW, 0, WINDOW, 0]
    report = json.loads(output_of(capsys, "verify", tmp_path / "kept", "--json"))
    assert report["largest"] <= 1e-5
    statistics = json.loads(output_of(capsys, "inspect", files[0], "--json"))
    assert statistics["global_layers"] == [1, 3]
    assert len(statistics["kept_per_head"]) == 2


@pytest.fixture
def sampling(tmp_path, model, monkeypatch):
    """The file of a recipe that samples running sums."""
    monkeypatch.chdir(tmp_path)
    recipe = {
        "kind": "grpo", "model": str(model), "output_dir": str(tmp_path / "out"), "dtype": "float32",
        "data": {"synthetic": {"task": "running_sum", "size": 64}}, "rewards": ["boxed"],
        "cache": {"policy": "full"}, "rollout": {"engine": "hf"}, "max_steps": 1,
        "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 40,
    }  # fmt: skip
    (tmp_path / "grpo.yaml").write_text(json.dumps(recipe))
    return tmp_path / "grpo.yaml"


def test_rollouts_with_evictions(sampling, tmp_path, capsys):
    output_of(capsys, "rollout", sampling, f"cache={GKV}", "--problems", "3")
    folder = tmp_path / "out/rollouts"
    report = json.loads(output_of(capsys, "verify", folder, "--json"))
    assert report["largest"] <= 1e-5
    file = folder / "traces-00000.safetensors"
    statistics = json.loads(output_of(capsys, "inspect", file, "--json"))
    traces = load_traces(file)
    assert statistics["global_layers"] == [1, 3]
    assert statistics["sections"]["windowed"]["shape"] == {"layer": 4}
    held = torch.stack([(t.evict_at[[1, 3]] >= len(t) - 1)[..., :-1].float().mean() for t in traces])
    assert statistics["retention"]["mean"] == pytest.approx(float(held.mean()), abs=1e-4)
    text = output_of(capsys, "inspect", file)
    assert "6 traces, 2 layers × 2 kv heads; layers with a sliding window are not counted" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows if row[1].isdigit()] == ["1", "3"]
    assert output_of(capsys, "plot", file).strip() == str(file.with_suffix(".png"))
    assert statistics == trace_statistics(traces, statistics["fingerprint"])


def test_rollouts_with_a_full_cache(sampling, model, tmp_path, capsys):
    output_of(capsys, "rollout", sampling, "--problems", "3")
    folder = tmp_path / "out/rollouts"
    assert not list(folder.glob("traces-*"))
    assert json.loads(output_of(capsys, "verify", folder, "--json"))["largest"] <= 1e-5
    files, loaded = RolloutFiles(folder, read_origin(folder)), load_model(str(model))
    for windows, least, most in (([WINDOW, 0] * 2, 0, 1e-5), ([0] * 4, 0.1, 100)):
        (part,) = files.parts(4, 2, windows)
        assert part.rollouts[0].trace.windows == (windows if any(windows) else [])
        with torch.no_grad():
            assert least <= gap(replay_logprobs(loaded, part.rollouts), part.rollouts) <= most
