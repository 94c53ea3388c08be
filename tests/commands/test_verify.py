"""`sparse-rl verify` replays rollouts on disk under their traces, and reports the gap: the largest difference between
the replayed and the recorded log-probs. Right rollouts have a gap below a bound (exit status 0); with wrong traces,
weights or log-probs it exceeds the bound (status 1); files that cannot be replayed are refused (status 2).
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import shifted, with_supports
from learned import SCORERS, save_learned, with_scorers

from rollout.config import read_origin
from rollout.files import RolloutFiles
from rollout.verify import BOUNDS
from sparse_rl.commands.main import main
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.methods.config import CONFIGS, accepted_parameters
from sparse_rl.models.load import load_plain_model
from sparse_rl.policies import make_policy
from sparse_rl.trace import EvictionTrace, load_traces, read_fingerprint, save_traces

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"
GKV = "cache={policy: gkv, budget: 20, window: 4, period: 8}"
PAGES = {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "press": {"policy": "press", "options": {"window_size": 4}},  # policies that the usual settings do not fit
    "clustered": PAGES,
    "layered": {
        "policy": "layered",
        "parts": [{"layers": 1, "cache": {"policy": "gkv", "budget": 12, "window": 4}}, {"layers": 1, "cache": PAGES}],
    },
    "kvpop": {"policy": "kvpop", "budget": 20, "window": 5, "sinks": 2, "scorer": SCORERS["mlp"]},
    "dms": {"policy": "dms", "window": 5, "sinks": 2, "bias": 0.1, "scorer": SCORERS["mlp"]},
}
SIZES = {"budget": 20, "window": 4, "period": 8}
SETTINGS = [
    "temperature=0.6",
    "temperature=0",
    "temperature=1.3 top_p=0.8",
    "top_k=5",
    "temperature=0.7 top_p=0.9 top_k=7",
]


def cache_of(name: str) -> dict[str, Any]:
    """Return a cache block with a small budget for any policy."""
    accepted = accepted_parameters(name)
    return SPECIAL.get(name, {"policy": name, **{key: value for key, value in SIZES.items() if key in accepted}})


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The folders that the command `rollout` has written so far, by its words."""
    return defaultdict(lambda: tmp_path_factory.mktemp("sampled") / "rollouts")


@pytest.fixture
def rollouts(workdir, sampled, capfd):
    """rollouts(words of `rollout`) returns a copy of the folder that the command writes: 12 completions of the
    quickstart's trained model."""

    def make(*words: str, recipe: str = "grpo.yaml") -> Path:
        arguments = ["model=quickstart/model", "max_completion_length=48", "rollout.progress=false", *words]
        if not (made := sampled[recipe, *words]).exists():
            assert main(["rollout", recipe, *arguments, "--problems", "6", "--out", str(made)]) == 0
            capfd.readouterr()
        return shutil.copytree(made, workdir / "sampled", dirs_exist_ok=True)

    return make


@pytest.fixture
def verified(capfd):
    """verified(folder, words) returns (exit status, output of --json) of the command."""

    def check(folder: Path, *words: object) -> tuple[int, dict[str, Any]]:
        status = main(["verify", str(folder), *map(str, words), "--json"])
        captured = capfd.readouterr()
        assert ("the gap is too large" in captured.err) is (status == 1), captured.err
        return status, json.loads(captured.out)

    return check


@pytest.fixture
def refused(capfd):
    """refused(words) returns the one-line error of the command, which must exit with status 2."""

    def check(*words: object) -> str:
        assert main(["verify", *map(str, words)]) == 2
        captured = capfd.readouterr()
        assert captured.err.count("\n") == 1
        assert not captured.out
        return captured.err

    return check


def change_traces(folder: Path, change: Callable[[EvictionTrace], EvictionTrace]) -> None:
    for file in folder.glob("traces-*"):
        save_traces(file, [change(trace) for trace in load_traces(file)], read_fingerprint(file))


def change_line(folder: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "completions.jsonl"
    lines = file.read_text().splitlines()
    line = json.loads(lines[number - 1])
    change(line)
    file.write_text("\n".join([*lines[: number - 1], json.dumps(line), *lines[number:]]) + "\n")


def change_origin(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    origin = json.loads((folder / "rollouts.json").read_text())
    change(origin)
    (folder / "rollouts.json").write_text(json.dumps(origin))


def with_evictions_one_later(trace: EvictionTrace) -> EvictionTrace:
    return EvictionTrace.recorded(shifted(trace.evict_at, 1), trace.further)


def with_heads_swapped(trace: EvictionTrace) -> EvictionTrace:
    """Return a trace in which each kv head has the evictions and opened pages of the other one."""
    further = {name: x.flip(1) if name == "opened" else x for name, x in trace.further.items()}
    return EvictionTrace(trace.evict_at.flip(1), further)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(3)
def test_rollouts_of_every_policy_replay_exactly(name, rollouts, verified, workdir, capfd):
    cache, words = cache_of(name), []
    if name in ("kvpop", "dms"):
        policy = make_policy(cache)
        save_learned(with_scorers(load_plain_model(QUICKSTART), policy), policy, workdir / "learned")
        shutil.copy(QUICKSTART / "tokenizer.json", workdir / "learned")
        shutil.copy(QUICKSTART / "tokenizer_config.json", workdir / "learned")
        words = ["model=learned"]
    if name == "triattention":
        shutil.copytree(QUICKSTART, workdir / "calibrated")
        (workdir / "text.txt").write_text("Qa1b4c0d2?" * 40)
        assert main(["calibrate", "calibrated", "text.txt"]) == 0
        capfd.readouterr()
        words = ["model=calibrated"]
    folder = rollouts(*words, f"cache={json.dumps(cache)}")
    status, report = verified(folder)
    assert status == 0
    assert report["holds"]
    assert report["largest"] <= report["bound"] == 1e-5
    assert json.loads(report["made_by"]["policy"])["policy"] == name
    assert report["rollouts"] == 12
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert report["tokens"] == sum(line["tokens"] for line in lines) > 300
    if name == "full":
        assert [file["file"] for file in report["files"]] == ["completions.jsonl"]
        return
    # both changes give traces that a sampler could have recorded
    change_traces(folder, with_heads_swapped if name in ("am", "clustered", "layered") else with_evictions_one_later)
    status, report = verified(folder)
    assert status == 1
    assert not report["holds"]
    assert report["largest"] > 1e-3
    assert report["beyond"] > 0
    assert [file["file"] for file in report["files"]] == ["traces-00000.safetensors"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("cache", [GKV, "cache=full"])
@pytest.mark.few(3)
def test_log_probs_are_compared_as_they_were_sampled(cache, settings, rollouts, verified):
    """Controls: with another recorded temperature or truncation the gap is too large."""
    words = ["sweep={}", "top_p=1.0", "top_k=null", *settings.split()]
    folder = rollouts(cache, *words, recipe="eval.yaml")
    status, report = verified(folder)
    assert status == 0
    assert report["largest"] <= 1e-5
    line = json.loads((folder / "completions.jsonl").read_text().splitlines()[0])
    assert ("model_logprobs" in line) is ("top" in settings)
    change_origin(folder, lambda origin: origin["sampling"].update(temperature=0.9))
    assert verified(folder)[0] == 1
    if "top" in settings:  # without them the log-probs would be the model's own, which are lower
        change_origin(folder, lambda origin: origin["sampling"].update(top_p=1.0, top_k=None))
        assert verified(folder)[0] == 1


def test_each_file_of_traces_has_a_gap_in_the_report(rollouts, verified, capfd):
    folder = rollouts(GKV, "rollout.max_batch=4")
    status, report = verified(folder)
    assert status == 0
    assert [file["rollouts"] for file in report["files"]] == [4, 4, 4]
    last = sorted(folder.glob("traces-*"))[-1]
    save_traces(last, [with_heads_swapped(trace) for trace in load_traces(last)], read_fingerprint(last))
    status, report = verified(folder)
    assert status == 1
    assert [file["beyond"] > 0 for file in report["files"]] == [False, False, True]
    assert 9 <= report["line"] <= 12
    assert main(["verify", str(folder)]) == 1
    out, err = capfd.readouterr()
    assert out.count("4 rollouts, ") == 3
    assert "by hf in float32, temperature 1\n" in out
    assert '"policy": "gkv"' in out
    assert f"in line {report['line']} of completions.jsonl at token {report['token']} of its completion" in err


def test_wrong_rollouts_are_detected(rollouts, verified, refused, workdir):
    folder = rollouts(GKV)
    assert verified(folder)[0] == 0
    model = load_plain_model(QUICKSTART)
    model.get_input_embeddings().weight.data[5] *= 1.001
    shutil.copytree(QUICKSTART, workdir / "touched")
    model.save_pretrained(workdir / "touched")
    assert verified(folder, workdir / "touched")[0] == 1
    RunningSum.save_untrained(workdir / "other", 0)
    status, report = verified(folder, workdir / "other")
    assert status == 1
    assert report["mean"] > 1
    assert verified(folder, QUICKSTART)[0] == 0
    model.get_input_embeddings().weight.data[8] = float("nan")
    model.save_pretrained(workdir / "nan")
    assert "is not a finite number: the model gives NaN" in refused(folder, "nan")

    original = (folder / "completions.jsonl").read_text()
    change_line(folder, 5, lambda line: line["logprobs"].__setitem__(7, line["logprobs"][7] - 1e-3))
    status, report = verified(folder)
    assert status == 1
    assert (report["line"], report["token"], report["beyond"]) == (5, 7, 1)
    assert report["largest"] == pytest.approx(1e-3, rel=0.02)
    assert verified(folder, "--bound", 0.01)[0] == 0
    (folder / "completions.jsonl").write_text(original)

    change_traces(folder, with_heads_swapped)
    status, report = verified(folder)
    assert status == 1
    assert report["largest"] > 1


def test_rollouts_of_float32_attention_have_a_wider_bound(rollouts, verified, monkeypatch):
    monkeypatch.setattr("sparse_rl.kernels.exact._exact", True)  # monkeypatch then restores it
    folder = rollouts(GKV, "rollout.exact=false")
    status, report = verified(folder)
    assert status == 0
    assert report["bound"] == 1e-4
    assert report["largest"] <= 1e-4
    mean = report["mean"]
    change_origin(folder, lambda origin: origin.update(exact=True))
    assert verified(folder)[1]["mean"] != mean


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_a_separate_bound(dtype, rollouts, verified):
    """Also if they are replayed in float32. Control: with evictions one query later the gap is too large."""
    folder = rollouts(GKV, f"dtype={dtype}")
    status, report = verified(folder)
    assert status == 0
    assert report["dtype"] == dtype
    assert 1e-5 < report["largest"] <= report["bound"]
    assert verified(folder, "--bound", 1e-5)[0] == 1
    in_float32 = verified(folder, "--dtype", "float32")[1]  # the bound of the coarser dtype applies
    assert in_float32["bound"] == report["bound"]
    assert in_float32["largest"] != report["largest"]
    change_traces(folder, with_evictions_one_later)
    assert verified(folder)[0] == 1


def test_rollouts_on_disk_equal_the_sampled_ones(rollouts, monkeypatch, workdir):
    from rollout.hf import HFEngine

    sampled = []
    generate = HFEngine.generate

    def recording(*args: Any, **options: Any) -> Any:
        sampled.extend(outputs := generate(*args, **options))
        return outputs

    monkeypatch.setattr(HFEngine, "generate", recording)
    for words in ([GKV, "top_p=0.8", "rollout.max_batch=4", "seed=1"], ["cache=full", "seed=1"]):
        sampled.clear()
        shutil.rmtree(workdir / "sampled", ignore_errors=True)
        folder = rollouts(*words)
        parts = list(RolloutFiles(folder, read_origin(folder)).parts(2, 2))
        assert [part.line for part in parts] == ([1, 5, 9] if "top_p=0.8" in words else [1])
        loaded = [rollout for part in parts for rollout in part.rollouts]
        for ours, theirs in zip(loaded, sampled, strict=True):
            assert (ours.prompt_ids, ours.completion_ids) == (theirs.prompt_ids, theirs.completion_ids)
            assert ours.finish_reason == theirs.finish_reason
            assert torch.equal(ours.trace.evict_at, theirs.trace.evict_at)
            for name in ("logprobs", "model_logprobs"):
                assert torch.equal(*(torch.tensor(getattr(rollout, name)) for rollout in (ours, theirs)))


def test_rollouts_with_supports_have_traces_also_under_a_full_cache(rollouts, verified, refused, capfd):
    """Both log-probs are checked: with all tokens for supports, and with a wrong log-prob, the gap is too large."""
    assert not list(rollouts("cache=full").glob("traces-*"))
    folder = rollouts("cache=full", "top_p=0.9", "min_p=0.01")
    (file,) = folder.glob("traces-*")
    origin = read_origin(folder)
    (part,) = RolloutFiles(folder, origin).parts(2, 2)
    assert all("support" in r.trace.further for r in part.rollouts)
    status, report = verified(folder)
    assert (status, report["bound"]) == (0, 1e-5)
    assert main(["verify", str(folder)]) == 0
    assert "top_p 0.9, min_p 0.01\n" in capfd.readouterr().out
    original = (folder / "completions.jsonl").read_text()
    change_line(folder, 5, lambda line: line["logprobs"].__setitem__(7, line["logprobs"][7] - 1e-3))
    status, report = verified(folder)
    assert (status, report["line"], report["token"], report["beyond"]) == (1, 5, 7, 1)
    (folder / "completions.jsonl").write_text(original)
    every = [with_supports(r.trace, [range(64)] * len(r.completion_ids), 64) for r in part.rollouts]
    save_traces(file, every, origin.made_by)
    assert verified(folder)[0] == 1
    others = [with_supports(r.trace, [[(i + 1) % 64] for i in r.completion_ids], 64) for r in part.rollouts]
    save_traces(file, others, origin.made_by)
    assert "line 1: " in (message := refused(folder))
    assert "sampled tokens are not in the supports that they were drawn from" in message
    file.unlink()
    assert "lacks its traces" in refused(folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_of_vllm_replay_exactly(dtype, rollouts, verified, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = rollouts(GKV, "rollout={engine: vllm, kv_cache_gb: 0.05}", f"dtype={dtype}", "top_p=0.9")
    assert json.loads((folder / "rollouts.json").read_text())["engine"] == "vllm"
    status, report = verified(folder)
    assert status == 0
    assert report["bound"] == BOUNDS[dtype]
    change_traces(folder, with_evictions_one_later)
    assert verified(folder)[0] == 1


def test_paths_that_are_not_rollout_folders_are_refused(rollouts, refused, workdir):
    folder = rollouts(GKV)
    folder.rename(workdir / "rollouts")
    for wrong in ("nowhere", workdir / "rollouts" / "traces-00000.safetensors", workdir, QUICKSTART):
        assert "holds no rollouts with their log-probs: there is no rollouts.json" in refused(wrong)
    for text, message in (
        ("{", "cannot be read"),
        ("[]", "it is not a mapping"),
        ('{"format_version": 9}', "has format version 9, but 1 is needed"),
        ('{"format_version": 1}', "model: missing"),
    ):
        (workdir / "rollouts" / "rollouts.json").write_text(text)
        assert message in refused(workdir / "rollouts")


def test_another_model_is_refused_or_gives_a_warning(rollouts, refused, workdir, capfd):
    folder = rollouts(GKV)
    assert "no directory" in refused(folder, "nowhere")
    load_plain_model(QUICKSTART).save_pretrained(workdir / "deep")
    config = json.loads((workdir / "deep" / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (workdir / "deep" / "config.json").write_text(json.dumps(config))
    assert "deep is qwen3-L3-H2-D32, but these rollouts were sampled by qwen3-L2-H2-D32" in refused(folder, "deep")
    change_origin(folder, lambda origin: origin.update(vocabulary=50))
    assert "has 64 tokens, but the rollouts' model has 50" in refused(folder)
    change_origin(folder, lambda origin: origin.update(vocabulary=64, model="/nowhere/model"))
    assert "/nowhere/model, the model that sampled these rollouts, does not exist; name the model" in refused(folder)
    assert main(["verify", str(folder), "quickstart/model"]) == 0
    shutil.copytree(QUICKSTART, workdir / "turned")
    config = json.loads((workdir / "turned" / "config.json").read_text())
    (workdir / "turned" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    capfd.readouterr()
    assert main(["verify", str(folder), "turned"]) == 1
    assert "warning: config.json of turned differs from that of the model" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda line: line.pop("logprobs"),
            "line 2: the line has no list logprobs of the",
        ),
        (lambda line: line["logprobs"].pop(), "line 2: the line has no list logprobs"),
        (lambda line: line["logprobs"].__setitem__(0, 0.5), "line 2: logprobs has a value that is not a log-prob"),
        (
            lambda line: line["logprobs"].__setitem__(0, float("nan")),
            "line 2: logprobs has a value that is not a log-prob",
        ),
        (lambda line: line.pop("prompt_ids"), "line 2: prompt_ids 0 is empty"),
        (
            lambda line: line["completion_ids"].__setitem__(0, 64),
            "line 2: completion_ids 0 has token 64; the model's token ids are",
        ),
        (lambda line: line["prompt_ids"].append(3), "the two files do not belong together"),
        (lambda line: line.pop("model_logprobs"), "line 2: the line has no list model_logprobs"),
    ],
)
def test_a_damaged_line_is_refused(change, message, rollouts, refused):
    folder = rollouts(GKV, "top_p=0.9")
    change_line(folder, 2, change)
    assert message in refused(folder)


def test_traces_that_do_not_belong_to_the_lines_are_refused(rollouts, refused, workdir):
    folder = rollouts(GKV, "rollout.max_batch=4", "max_completion_length=80")  # some end before
    lines = (folder / "completions.jsonl").read_text()
    first, second, third = sorted(folder.glob("traces-*"))
    original = third.read_bytes()
    third.unlink()
    assert "has more lines than the 8 traces" in refused(folder)
    third.write_bytes(original)
    (folder / "completions.jsonl").write_text("".join(lines.splitlines(keepends=True)[:10]))
    assert "holds 4 traces, but completions.jsonl has only 2 lines left" in refused(folder)
    (folder / "completions.jsonl").write_text(lines + "{\n")
    assert "has more lines than the 12" in refused(folder)
    (folder / "completions.jsonl").write_text("{\n" + lines)
    assert "completions.jsonl, line 1: the line is not JSON" in refused(folder)
    (folder / "completions.jsonl").write_bytes(b"\xff" + lines.encode())
    assert "completions.jsonl cannot be read" in refused(folder)
    (folder / "completions.jsonl").write_text(lines)
    shutil.copy(second, first)
    assert "the two files do not belong together" in refused(folder)
    save_traces(first, load_traces(first), {**read_fingerprint(first), "policy": "another"})
    assert "was recorded with policy 'another'" in refused(folder)
    first.write_bytes(first.read_bytes()[:-1])
    assert "cannot be read" in refused(folder)
    (folder / "completions.jsonl").unlink()
    assert "completions.jsonl cannot be read: No such file" in refused(folder)
    for file in (first, second, third):
        file.unlink()
    assert "lacks its traces" in refused(folder)


def test_a_section_that_no_view_replays_is_refused(rollouts, refused, with_visits):
    folder = rollouts(GKV)
    change_traces(folder, lambda trace: with_visits(trace, [1]))
    assert "no view replays traces with the sections evict_at, visits, gains" in refused(folder)


def test_invalid_options_are_refused(refused):
    assert "expected a number > 0, got '-1'" in refused("x", "--bound=-1")
    assert "invalid choice: 'float8'" in refused("x", "--dtype", "float8")


def test_the_bound_is_the_models_own_rounding_if_that_is_larger(rollouts, verified, workdir):
    """Large queries amplify rounding. Controls: ten times the rounding, and a bound that the user gives."""
    from eager import sharpened
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(QUICKSTART)
    for _ in range(3):
        sharpened(model)
    for file in QUICKSTART.glob("*token*"):
        shutil.copy(file, workdir)
    model.save_pretrained(workdir / "sharp")
    for file in QUICKSTART.glob("*token*"):
        shutil.copy(file, workdir / "sharp")
    folder = rollouts(GKV, "model=sharp", "rollout.engine=hf")
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    name = next(key for key, value in lines[0].items() if isinstance(value, list) and isinstance(value[0], float))

    def differ_by(difference: float) -> None:
        def change(line: dict[str, Any]) -> None:
            line[name] = [lines[0][name][0] + difference, *line[name][1:]]

        change_line(folder, 1, change)

    differ_by(1e-3)
    own = verified(folder)[1]["bound"]
    assert own > 2e-5
    for difference, status in ((own / 2, 0), (10 * own, 1)):
        differ_by(difference)
        assert verified(folder)[0] == status
    differ_by(own / 2)
    assert verified(folder, "--bound", 1e-5)[0] == 1
