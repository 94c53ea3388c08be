"""`sparse-rl plot --figure`: each analysis draws a picture and writes its numbers beside it; wrong use is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_rl.commands.main import main
from sparse_rl.commands.plot import FIGURES
from sparse_rl.commands.recordings import Recording
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.target import oracle_recall
from sparse_rl.models.load import load_model

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"
MORE = {}  # figure -> further arguments of its command


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Return a folder of rollouts of the quickstart's model under gkv."""
    folder = tmp_path_factory.mktemp("figures") / "rollouts"
    cache = "cache={policy: gkv, budget: 24, window: 4, period: 4}"
    command = ["rollout", "quickstart/grpo", "model=quickstart/model", cache, "max_completion_length=60"]
    assert main([*command, "rollout.engine=hf", "num_generations=2", "--problems", "2", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_with_its_numbers_beside_it(name, sampled, tmp_path, capsys):
    out = tmp_path / f"{name}.png"
    capsys.readouterr()
    assert main(["plot", str(sampled), "--figure", name, "--out", str(out), *MORE.get(name, [])]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out), str(out.with_suffix(".json"))]
    assert out.stat().st_size > 1000
    assert json.loads(out.with_suffix(".json").read_text())["figure"] == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "1"], "--layer: --layer needs --figure"),
        (["--figure", "evict_ratio", "--layer", "1"], "--layer: the figure evict_ratio does not use it"),
        (["--figure", "evict_ratio", "--metric", "loss"], "--metric: the figure evict_ratio does not use it"),
        (["--figure", "evict_ratios"], "invalid choice: 'evict_ratios'"),
        (["--figure", "evict_ratio", "--model", "nowhere", "--head", "-1"], "expected a whole number"),
        (["--figure", "kept_text", "--line", "5"], "--line: "),
        (["--figure", "kept_heads", "--line", "5"], "completions.jsonl has only 4 lines"),
        (["--figure", "kept_text", "--layer", "2"], "--layer: the model has the layers 0 to 1"),
        (["--figure", "cloud", "--head", "2"], "--head: a layer of the model has the kv heads 0 to 1"),
        (["--figure", "cloud", "--line", "2"], "--line: the figure cloud does not use it"),
        (["--figure", "overlap", "--teacher", "retrieval/model"], "--teacher: the figure overlap does not use it"),
        (["--teacher", "retrieval/model"], "--teacher: --teacher needs --figure"),
        (["--figure", "recall", "--teacher", "retrieval/model"], "MODEL: "),
    ],
)
def test_wrong_use_is_refused_in_one_line(arguments, message, sampled, capsys):
    capsys.readouterr()
    try:
        code = main(["plot", str(sampled), *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("name", ["kept_heads", "cloud", "kept_text"])
def test_a_file_of_traces_has_no_tokens(name, sampled, capsys):
    (file, *_) = sorted(sampled.glob("traces-*.safetensors"))
    assert main(["plot", str(file), "--figure", name]) == 2
    assert "is a file of traces without tokens; name the folder" in capsys.readouterr().err


@pytest.mark.parametrize("teacher", [None, "start"])
def test_recall_is_measured_by_the_attention_of_the_teacher(teacher, sampled, tmp_path):
    """The teacher is the sampler's model with other weights; without --teacher it is the sampler's model."""
    model = load_model(str(QUICKSTART))
    tokenizer_files = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(QUICKSTART, tmp_path / "start", ignore=tokenizer_files)
    expected, start = recall_of(model, sampled), perturbed(model)
    start.save_pretrained(tmp_path / "start")
    of_start = recall_of(start, sampled)
    assert of_start != pytest.approx(expected, abs=0.01)
    words = [] if teacher is None else ["--teacher", str(tmp_path / teacher)]
    out = tmp_path / "recall.png"
    assert main(["plot", str(sampled), "--figure", "recall", "--out", str(out), *words]) == 0
    numbers = json.loads(out.with_suffix(".json").read_text())
    assert numbers["mean"] == pytest.approx(expected if teacher is None else of_start, abs=1e-5)
    assert numbers["teacher"] == ("quickstart" if teacher is None else "start")


def recall_of(model: Any, folder: Path) -> float:
    """Return the mean recall of a folder of gkv's rollouts with a budget of 24 and a window of 4."""
    policy, recalls = KVpopPolicyConfig(budget=24, sinks=0, window=4), []
    for r in Recording(folder).rollouts:
        if len(r.trace) - 1 > max(len(r.prompt_ids), 24):
            tokens = [*r.prompt_ids, *r.completion_ids]
            recalls.append(oracle_recall(model, tokens, len(r.prompt_ids), r.trace, policy))
    return float(torch.stack([recall for recall in recalls if not recall.isnan().any()]).mean())


@torch.no_grad()
def perturbed(model: Any) -> Any:
    """Return the model with noise in its query and key projections."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight += weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def test_positions_compare_folders_and_files_of_traces(sampled, tmp_path):
    (file, *_) = sorted(sampled.glob("traces-*.safetensors"))
    out = tmp_path / "positions.png"
    assert main(["plot", str(sampled), str(file), "--figure", "positions", "--out", str(out)]) == 0
    numbers = json.loads(out.with_suffix(".json").read_text())
    ours, theirs = ({key: value for key, value in source.items() if key != "label"} for source in numbers["sources"])
    assert ours == theirs
    assert ours["sequences"] == 4
    assert numbers["models"][0] == "quickstart"


def test_a_line_is_found_as_in_the_list_of_rollouts(sampled):
    source = Recording(sampled)
    assert [source.rollout(line).completion_ids for line in (1, 4)] == [
        source.rollouts[place].completion_ids for place in (0, 3)
    ]
    line, longest = source.longest()
    lengths = [len(rollout.trace) for rollout in source.rollouts]
    assert len(longest.trace) == max(lengths) == lengths[line - 1]


def test_a_folder_without_rollouts_is_refused(tmp_path, capsys):
    assert main(["plot", str(tmp_path), "--figure", "evict_ratio"]) == 2
    assert "holds no rollouts with their log-probs" in capsys.readouterr().err


def test_the_numbers_never_replace_another_file(sampled, capsys):
    """The numbers of rollouts.png would be rollouts.json, a file of the folder."""
    before = (sampled / "rollouts.json").read_bytes()
    assert main(["plot", str(sampled), "--figure", "evict_ratio", "--out", str(sampled / "rollouts.png")]) == 2
    assert "exists and holds something else; name another --out" in capsys.readouterr().err
    assert (sampled / "rollouts.json").read_bytes() == before
