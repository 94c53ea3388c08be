"""`sparse-rl verify` replays rollouts on disk under their traces, and reports the gap: the largest difference between
the replayed and the recorded log-probs. Right rollouts have a gap below a bound (exit status 0); with wrong traces,
weights or log-probs it exceeds the bound (status 1); files that cannot be replayed are refused (status 2).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import shifted
from learned import SCORERS, save_learned, with_scorers

from rollout.files import RolloutFiles
from rollout.origin import read_origin
from rollout.verify import BOUNDS
from sparse_rl.commands.main import main
from sparse_rl.data.running_sum import save_untrained
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
Run = Callable[..., Path]


def cache_of(name: str) -> dict[str, Any]:
    """Return a cache block with a small budget for any policy."""
    accepted = accepted_parameters(name)
    return SPECIAL.get(name, {"policy": name, **{key: value for key, value in SIZES.items() if key in accepted}})


@pytest.fixture
def rollouts(workdir: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """rollouts(words of `rollout`) returns the folder that the command wrote: 12 completions of the quickstart's
    trained model."""

    def make(*words: str, recipe: str = "grpo.yaml") -> Path:
        arguments = ["model=quickstart/model", "max_completion_length=80", "rollout.progress=false", *words]
        assert main(["rollout", recipe, *arguments, "--problems", "6", "--out", "sampled", "--overwrite"]) == 0
        capfd.readouterr()
        return workdir / "sampled"

    return make


@pytest.fixture
def verified(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """verified(folder, words) returns (exit status, output of --json) of the command."""

    def check(folder: Path, *words: object) -> tuple[int, dict[str, Any]]:
        status = main(["verify", str(folder), *map(str, words), "--json"])
        captured = capfd.readouterr()
        assert ("the gap is too large" in captured.err) is (status == 1), captured.err
        return status, json.loads(captured.out)

    return check


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
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


# ---- exact replay ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(6)
def test_rollouts_of_every_policy_replay_exactly(
    name: str, rollouts: Run, verified: Callable, workdir: Path, record_property: Callable, capfd: pytest.CaptureFixture
) -> None:
    """Rollouts that the command `rollout` wrote replay with a gap of at most 1e-5. Control: with changed traces the gap
    is above 1e-3."""
    cache, words = cache_of(name), []
    if name in ("kvpop", "dms"):
        policy = make_policy(cache)
        save_learned(with_scorers(load_plain_model(QUICKSTART), policy), policy, workdir / "learned")
        shutil.copy(QUICKSTART / "tokenizer.json", workdir / "learned")
        shutil.copy(QUICKSTART / "tokenizer_config.json", workdir / "learned")
        words = ["model=learned"]
    folder = rollouts(*words, f"cache={json.dumps(cache)}")
    status, report = verified(folder)
    record_property("gap", report["largest"])
    assert status == 0
    assert report["holds"]
    assert report["largest"] <= report["bound"] == 1e-5
    assert json.loads(report["made_by"]["policy"])["policy"] == name
    assert report["rollouts"] == 12
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert report["tokens"] == sum(line["tokens"] for line in lines) > 300
    if name == "full":
        assert [file["file"] for file in report["files"]] == ["completions.jsonl"]
        assert main(["inspect", str(folder)]) == 0
        assert "rollouts under a full cache; sparse-rl verify" in capfd.readouterr().out
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
@pytest.mark.few(4)
def test_log_probs_are_compared_as_they_were_sampled(
    cache: str, settings: str, rollouts: Run, verified: Callable
) -> None:
    """Replayed log-probs are compared with the recorded ones at the sampling temperature, and with the model's own
    log-probs before top-p and top-k. Controls: with another recorded temperature or truncation the gap is too large."""
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


def test_each_file_of_traces_has_a_gap_in_the_report(
    rollouts: Run, verified: Callable, capfd: pytest.CaptureFixture
) -> None:
    """With a wrong trace in the last of three files, only this file exceeds the bound, and the message names the line
    and the token with the largest gap."""
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


def test_wrong_rollouts_are_detected(rollouts: Run, verified: Callable, workdir: Path) -> None:
    """The command detects rollouts with other weights, with evictions of other heads, or with one token's log-prob
    moved by a thousandth."""
    folder = rollouts(GKV)
    assert verified(folder)[0] == 0
    model = load_plain_model(QUICKSTART)
    model.get_input_embeddings().weight.data[5] *= 1.001
    shutil.copytree(QUICKSTART, workdir / "touched")
    model.save_pretrained(workdir / "touched")
    assert verified(folder, workdir / "touched")[0] == 1
    save_untrained(workdir / "other", 0)
    status, report = verified(folder, workdir / "other")
    assert status == 1
    assert report["mean"] > 1
    assert verified(folder, QUICKSTART)[0] == 0

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


def test_a_model_that_gives_nan_is_refused(rollouts: Run, workdir: Path, capfd: pytest.CaptureFixture) -> None:
    folder = rollouts(GKV)
    model = load_plain_model(QUICKSTART)
    model.get_input_embeddings().weight.data[8] = float("nan")
    model.save_pretrained(workdir / "nan")
    assert main(["verify", str(folder), "nan"]) == 2
    assert "is not a finite number: the model gives NaN" in capfd.readouterr().err


def test_rollouts_of_float32_attention_have_a_wider_bound(
    rollouts: Run, verified: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that were sampled with float32 attention are replayed with float32 attention. The bound of their gap is
    1e-4 instead of 1e-5."""
    monkeypatch.setattr("sparse_rl.attention.kernels.sdpa._exact", True)  # monkeypatch then restores it
    folder = rollouts(GKV, "rollout.exact=false")
    status, report = verified(folder)
    assert status == 0
    assert report["bound"] == 1e-4
    assert report["largest"] <= 1e-4
    mean = report["mean"]
    change_origin(folder, lambda origin: origin.update(exact=True))
    assert verified(folder)[1]["mean"] != mean


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_a_separate_bound(
    dtype: str, rollouts: Run, verified: Callable, record_property: Callable
) -> None:
    """Rollouts in half precision have a gap above 1e-5 and within the bound of their dtype, also if they are replayed
    in float32. Control: with evictions one query later the gap is too large."""
    folder = rollouts(GKV, f"dtype={dtype}")
    status, report = verified(folder)
    record_property("gap", report["largest"])
    assert status == 0
    assert report["dtype"] == dtype
    assert 1e-5 < report["largest"] <= report["bound"]
    assert verified(folder, "--bound", 1e-5)[0] == 1
    in_float32 = verified(folder, "--dtype", "float32")[1]  # the bound of the coarser dtype applies
    assert in_float32["bound"] == report["bound"]
    assert in_float32["largest"] != report["largest"]
    change_traces(folder, with_evictions_one_later)
    assert verified(folder)[0] == 1


def test_rollouts_on_disk_equal_the_sampled_ones(rollouts: Run, monkeypatch: pytest.MonkeyPatch, workdir: Path) -> None:
    """Rollouts read from disk equal the sampled ones: their tokens, traces and both kinds of log-probs, to the last bit
    of float32."""
    from rollout.hf import HFEngine

    sampled = []
    generate = HFEngine.generate

    def recording(*args: Any, **options: Any) -> Any:
        sampled.extend(outputs := generate(*args, **options))
        return outputs

    monkeypatch.setattr(HFEngine, "generate", recording)
    for words in ([GKV, "top_p=0.8", "rollout.max_batch=4"], ["cache=full"]):
        sampled.clear()
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_of_vllm_replay_exactly(
    dtype: str, rollouts: Run, verified: Callable, monkeypatch: pytest.MonkeyPatch, record_property: Callable
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = rollouts(GKV, "rollout={engine: vllm, kv_cache_gb: 0.05}", f"dtype={dtype}", "top_p=0.9")
    assert json.loads((folder / "rollouts.json").read_text())["engine"] == "vllm"
    status, report = verified(folder)
    record_property("gap", report["largest"])
    assert status == 0
    assert report["bound"] == BOUNDS[dtype]
    change_traces(folder, with_evictions_one_later)
    assert verified(folder)[0] == 1


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_paths_that_are_not_rollout_folders_are_refused(rollouts: Run, refused: Callable, workdir: Path) -> None:
    assert "nowhere does not exist" in refused("nowhere")
    folder = rollouts(GKV)
    assert f"is a file; name its folder, {folder}" in refused(folder / "traces-00000.safetensors")
    folder.rename(workdir / "rollouts")
    assert f"there is no rollouts.json; name {workdir / 'rollouts'}" in refused(workdir)
    assert "sparse-rl rollout RECIPE --out DIR writes some" in refused(QUICKSTART)
    for text, message in (
        ("{", "cannot be read"),
        ("[]", "has format version null"),
        ('{"format_version": 9}', "has format version 9, but 1 is needed"),
        ('{"format_version": 1}', "model: missing"),
    ):
        (workdir / "rollouts" / "rollouts.json").write_text(text)
        assert message in refused(workdir / "rollouts")


def test_another_model_is_refused(rollouts: Run, refused: Callable, workdir: Path) -> None:
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


def test_a_model_of_another_configuration_gives_a_warning(
    rollouts: Run, workdir: Path, capfd: pytest.CaptureFixture
) -> None:
    """If the model's configuration differs from that of the sampling model, but not in shape, the command warns and
    replays. The gap shows if the difference matters, as it does here."""
    folder = rollouts(GKV)
    shutil.copytree(QUICKSTART, workdir / "turned")
    config = json.loads((workdir / "turned" / "config.json").read_text())
    config["rms_norm_eps"] = 1e-2
    (workdir / "turned" / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(folder), "turned"]) == 1
    assert "warning: config.json of turned differs from that of the model" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda line: line.pop("logprobs"),
            "line 2: the line has no list logprobs: the log-probs of the sampled tokens",
        ),
        (lambda line: line["logprobs"].pop(), "line 2: the line has "),
        (lambda line: line["logprobs"].__setitem__(0, 0.5), "line 2: logprobs has a value that is not a log-prob"),
        (
            lambda line: line["logprobs"].__setitem__(0, float("nan")),
            "line 2: logprobs has a value that is not a log-prob",
        ),
        (lambda line: line.pop("prompt_ids"), "line 2: the line has no list prompt_ids"),
        (
            lambda line: line["completion_ids"].__setitem__(0, 64),
            "line 2: completion_ids has token 64; the model's token ids are",
        ),
        (lambda line: line["prompt_ids"].append(3), "the two files do not belong together"),
    ],
)
@pytest.mark.few(3)
def test_a_damaged_line_is_refused(change: Callable, message: str, rollouts: Run, refused: Callable) -> None:
    folder = rollouts(GKV)
    change_line(folder, 2, change)
    assert message in refused(folder)


def test_truncated_sampling_needs_both_log_probs(rollouts: Run, refused: Callable) -> None:
    folder = rollouts(GKV, "top_p=0.9")
    change_line(folder, 3, lambda line: line.pop("model_logprobs"))
    assert "line 3: the line has no list model_logprobs" in refused(folder)


def test_traces_that_do_not_belong_to_the_lines_are_refused(rollouts: Run, refused: Callable, workdir: Path) -> None:
    """Files of traces and lines of completions must match in number, order and policy; damaged or missing files are
    refused too."""
    folder = rollouts(GKV, "rollout.max_batch=4")
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


def test_a_section_that_no_view_replays_is_refused(rollouts: Run, refused: Callable, with_visits: Callable) -> None:
    folder = rollouts(GKV)
    change_traces(folder, lambda trace: with_visits(trace, [1]))
    assert "no view replays traces with the sections evict_at, visits, gains" in refused(folder)


def test_invalid_options_are_refused(refused: Callable) -> None:
    assert "expected a number > 0, got '-1'" in refused("x", "--bound=-1")
    assert "invalid choice: 'float8'" in refused("x", "--dtype", "float8")
