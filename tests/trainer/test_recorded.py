"""Training from recorded rollouts (`data.traces`): nothing is sampled or simulated. The numbers are, to the bit, those
of a run that samples or simulates the same sequences. Wrong records change them, or are refused.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from safetensors.torch import load_file
from trainer_runs import GKV, SAMPLED, SETTINGS, check_resumed, digits, small, steps, timeless

from rollout import make_engine
from rollout.recorded import RecordedRollouts, recorded_rows
from sparse_rl.commands.rollout import sample
from sparse_rl.commands.train import train
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config, load_tokenizer
from sparse_rl.policies import make_policy
from sparse_rl.recipe import make_recipe
from sparse_rl.trace import EvictionTrace, load_traces, read_fingerprint, save_traces
from trainer.distill import DistillArguments, DistillTrainer
from trainer.grpo.metrics import ReplayGapError
from trainer.grpo.trainer import SparseGRPOArguments, SparseGRPOTrainer

SEED = 42
FIRST = (SEED + 1) * 1_000_003 + 1  # seed of the first generation of a run of one process
CROSS_ENTROPY = {"kl_weight": 0, "ce_weight": 1}


@pytest.fixture
def recipe(tiny, tmp_path):
    """recipe(kind, name, **keys) returns a recipe of one training step on the tiny model, in the folder `name`."""

    def make(kind: str, name: str, **keys: Any) -> Any:
        own = SAMPLED["grpo"] if kind == "grpo" else {"kind": kind}
        shared = {**small(tiny(), tmp_path / name, cache=GKV, seed=SEED, max_steps=1), **own}
        shared |= {"gradient_checkpointing": False, **keys}
        for key in ("cache",) * (kind == "sft") + ("rollout",) * ("traces" in shared["data"] and "rollout" not in keys):
            del shared[key]
        return make_recipe(shared)

    return make


@pytest.fixture
def recorded(recipe, tmp_path):
    """recorded(name, problems, **keys) returns a folder with 4 samples of each problem."""

    def make(name: str = "recorded", problems: int = 24, **keys: Any) -> Path:
        sample(recipe("grpo", name, **{"seed": FIRST, **keys}), tmp_path / name, problems, score=True)
        return tmp_path / name

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def change_traces(folder: Path, change: Callable[[list[EvictionTrace]], list[EvictionTrace]]) -> None:
    for file in folder.glob("traces-*"):
        save_traces(file, change(load_traces(file)), read_fingerprint(file))


def one_later(traces: list[EvictionTrace]) -> list[EvictionTrace]:
    evict_at = [torch.where(t.evict_at < 2**30, t.evict_at + 1, t.evict_at) for t in traces]
    return [EvictionTrace.recorded(late, t.further) for late, t in zip(evict_at, traces, strict=True)]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left | right)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def write_lines(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_grpo_from_recorded_groups_equals_the_first_update_of_the_run_that_samples_them(recipe, recorded, tmp_path):
    live = weights(train(recipe("grpo", "live")))
    folder = recorded()
    replayed = weights(train(recipe("grpo", "replayed", data={"traces": str(folder)}, rewards=["recorded"])))
    assert same(live, replayed)
    (ours,), (theirs,) = (timeless(steps(tmp_path / name)) for name in ("replayed", "live"))
    assert theirs.pop("sync/probe_gap") < 1e-5
    assert ours["replay/gap_max"] < 1e-5
    assert {name.replace("recorded", "digits"): value for name, value in ours.items()} == theirs
    change_traces(folder, one_later)  # the controls
    with pytest.raises(ReplayGapError, match="replay gap"):
        train(recipe("grpo", "late", data={"traces": str(folder)}))
    unguarded = recipe("grpo", "unguarded", data={"traces": str(folder)}, replay_guard={"enabled": False})
    assert not same(live, weights(train(unguarded)))
    change_traces(folder, lambda traces: traces[::-1])
    with pytest.raises(UserError, match=r"data\.traces: .* do not belong together"):
        recipe("grpo", "swapped", data={"traces": str(folder)}).prepare_training()


def test_distillation_and_sft_from_recorded_files_equal_those_with_evictions_made_in_place(recipe, recorded, tiny):
    folder = recorded(problems=4)
    data = {"traces": str(folder)}

    def in_place(trainer: Any) -> None:
        trainer.engine = make_engine("hf", model=tiny(), policy=GKV)

    distilled = weights(train(recipe("distill", "distilled", data=data)))
    assert same(distilled, weights(train(recipe("distill", "simulated", data=data), show=in_place)))
    simulated = weights(train(recipe("distill", "likewise", data=data, **CROSS_ENTROPY), show=in_place))
    tuned = recipe("sft", "tuned", data=data, lr_scheduler_type="constant")
    assert tuned.resolved()["kind"] == "distill"
    assert same(weights(train(tuned)), simulated)
    change_traces(folder, one_later)  # the control
    assert not same(distilled, weights(train(recipe("distill", "late", data=data))))


AM = {"policy": "am", "budget": 12, "window": 4, "period": 4, "reference_queries": 16}
PAGES = {"policy": "clustered", "page": 2, "window": 4, "sinks": 1, "open_pages": 2}
RECORDS: dict[str, dict[str, Any]] = {
    "gkv": {},
    "full": {"cache": "full"},
    "supports": {"top_p": 0.8},
    "supports, full": {"top_p": 0.8, "cache": "full"},
    "am": {"cache": AM},
    "clustered": {"cache": PAGES},
    "layered": {
        "cache": {"policy": "layered", "parts": [{"layers": 1, "cache": GKV}, {"layers": 1, "cache": PAGES}]},
    },
    "experts": {"family": "qwen3_moe"},
    "windows": {"family": "gemma3_text", "cache": "streaming"},
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.few(2)
def test_the_cross_entropy_of_every_record_is_that_of_the_sampler(name, recipe, recorded, tiny, tmp_path):
    """The first step's cross-entropy is the mean of the recorded log-probs, before truncation."""
    keys = dict(RECORDS[name])
    model = tiny(keys.pop("family", "qwen3"))
    if keys.get("cache") == "streaming":
        keys["cache"] = {"policy": "streaming", "budget": 8, "period": 2}
    folder = recorded(problems=4, model=model, **keys)
    train(recipe("sft", "tuned", model=model, data={"traces": str(folder)}, per_device_train_batch_size=16))
    (step,) = steps(tmp_path / "tuned")
    logprobs = [x for line in lines(folder) for x in line.get("model_logprobs", line["logprobs"])]
    assert step["ce"] == pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-5)
    assert "kl" not in step


def test_slices_hold_whole_problems_and_keep_reads_the_recorded_completions(recipe, recorded):
    folder = str(recorded(problems=4))
    rows = [((*row["prompt_ids"], *row["completion_ids"]), row["reward"]) for row in lines(Path(folder))]
    least = min(max(reward for _, reward in half) for half in (rows[:8], rows[8:]))
    first, second = ({"traces": folder, "split": f"train[{part}]"} for part in (":50%", "50%:"))
    for reward in ("trainer_runs:digits", "recorded"):
        keys = {"keep": reward, "keep_from": least, "validation": {"data": second}}
        made = recipe("distill", "kept", data=first, **keys)
        kept, held_out = ([(*e.prompt, *e.completion) for e in part] for part in made.examples(made.prepare_training()))
        assert kept == [tokens for tokens, reward in rows[:8] if reward >= least]
        assert held_out == [tokens for tokens, reward in rows[8:] if reward >= least]
        assert len(kept) + len(held_out) < 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "distill"])
def test_a_resumed_run_equals_an_uninterrupted_one(kind, recipe, recorded, tmp_path):
    data = {"traces": str(recorded())}
    own = {"steps_per_generation": 2, "num_iterations": 2} if kind == "grpo" else {}
    check_resumed(lambda **keys: recipe(kind, "run", **{"data": data, **own, **keys}), tmp_path)


@pytest.mark.slow
def test_processes_share_a_recorded_group(recipe, recorded, tmp_path):
    """Each of two processes takes two of the four samples of a group, and together they are one process."""
    data = {"traces": [str(recorded())]}
    (tmp_path / "reward.py").write_text("from __future__ import annotations\n\n" + inspect.getsource(digits))
    results = []
    for name, keys in {"alone": {}, "two": {"launch": {"processes": 2, "zero_stage": 2}}}.items():
        size = 4 if name == "alone" else 2
        made = recipe("grpo", name, data=data, rewards=["reward.py:digits"], per_device_train_batch_size=size, **keys)
        (tmp_path / "recipe.yaml").write_text(made.as_yaml())
        process = python("-m", "sparse_rl.cli", "train", "recipe.yaml", "max_steps=3", cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        results.append(steps(tmp_path / name))
    for key in ("loss", "grad_norm", "reward", "reward_std", "replay/gap_mean"):
        alone, two = ([line[key] for line in run] for run in results)
        assert two == pytest.approx(alone, rel=2e-5, abs=1e-6), key
    assert results[1][0]["replay/gap_max"] < 1e-5
    assert results[1][2]["replay/gap_mean"] > 1e-4  # the control: after an update the sampler's weights are others


def test_python_holds_records_against_the_trainer(recorded, tiny, tmp_path):
    """Controls: the same trainers with what belongs to the record."""
    folder, model, tokenizer = str(recorded(problems=4)), tiny(), load_tokenizer(tiny())
    config, data = load_config(model), DataConfig(traces=(folder,))
    record = RecordedRollouts([folder], model, config, make_policy(GKV))
    groups, single = recorded_rows(data, config, tokenizer, 4), recorded_rows(data, config, tokenizer)

    def grpo(rows: Any = groups, **changed: Any) -> Any:
        args = SparseGRPOArguments(output_dir=str(tmp_path), **{**SETTINGS, **changed})
        return SparseGRPOTrainer(model, digits, args, rows, processing_class=tokenizer, engine=record)

    def distill(rows: Any, engine: Any = record) -> Any:
        args = DistillArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
        return DistillTrainer(model, args, rows, engine=engine, cache=None if engine else GKV)

    grpo()
    for key, value in {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_completion_length": 10}.items():
        with pytest.raises(UserError) as error:
            grpo(**{key: value})
        assert error.value.key == key
    with pytest.raises(UserError, match="num_generations: is 2, but a row holds 4"):
        grpo(num_generations=2)
    examples = list(distill(single).train_dataset)
    assert all(example.place is not None for example in examples)
    distill(plain := [replace(example, place=None) for example in examples], None)
    for rows, engine in ((plain, record), (examples, None), ([*plain, *examples], None)):
        with pytest.raises(UserError, match="train_dataset: recorded examples need RecordedRollouts as the engine"):
            distill(rows, engine)


@pytest.fixture
def refused(recipe):
    """refused(folders, key, kind, **keys) returns the error of a recipe, whose key must be `key`."""

    def check(folders: Any, key: str, kind: str = "grpo", **keys: Any) -> str:
        with pytest.raises(UserError) as error:
            made = recipe(kind, "refused", **{"data": {"traces": folders}, **keys})
            run = made.prepare_training()
            made.examples(run)
        assert error.value.key == key
        return str(error.value)

    return check


def test_records_that_do_not_belong_to_the_recipe_are_refused(recipe, recorded, refused, tiny, tmp_path, capsys):
    folder = recorded(problems=4)
    text, copy = str(folder), tmp_path / "copy"
    assert "must divide the 4" in refused(text, "num_generations", num_generations=8)
    assert "at 1.0" in refused(text, "temperature", temperature=0.7)
    assert "at 1.0" in refused(text, "top_p", top_p=0.9)
    assert "up to 20" in refused(text, "max_completion_length", max_completion_length=10)
    assert "too long" in refused(text, "overlong", "distill", max_completion_length=3)
    assert "no effect" in refused(text, "rollout", rollout={"max_batch": 3})
    assert "no effect" in refused(text, "data.thinking", data={"traces": text, "thinking": True})
    assert "null is for" in refused(
        text, "rollout", data={"synthetic": {"task": "running_sum", "size": 8}}, rollout=None
    )
    assert "TRL's SFT" in refused(text, "packing", "sft", packing=True)
    assert "-L3-" in refused(text, "data.traces", model=tiny(num_hidden_layers=3))
    assert "no rollouts.json" in refused([text, str(tmp_path)], "data.traces")
    validation = {"data": {"traces": text}}
    assert "would sample" in refused(text, "validation", validation=validation)
    shutil.copytree(folder, copy)
    write_lines(copy, [{**row, "completion": "another text"} for row in lines(folder)])
    assert "tokenizer" in refused(str(copy), "data.traces")
    write_lines(copy, [{**row, "level": i // 2} for i, row in enumerate(lines(folder))])
    assert "line 3: key level differs between samples of one problem" in refused(str(copy), "data.traces")
    write_lines(copy, lines(folder)[:-1])
    assert "traces" in refused(str(copy), "data.traces")
    file = next(folder.glob("traces-*"))
    write_lines(copy, lines(folder)[:8])
    save_traces(copy / file.name, load_traces(file)[:8], read_fingerprint(file))
    assert "holds 8 of 16 rollouts" in refused(str(copy), "data.traces")
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    (copy / file.name).write_bytes(damaged)
    assert "damaged" in refused(str(copy), "data.traces")
    capsys.readouterr()
    other = {"policy": "streaming", "budget": 8, "period": 2}
    run = recipe("grpo", "other", data={"traces": text}, model=tiny(tie_word_embeddings=True), cache=other)
    assert "the guard is off" in run.prepare_training().findings["off-policy"]
    warned = capsys.readouterr().err
    assert "not sampled with the files of weights" in warned
    assert 'recorded under {"alpha": 0.8' in warned
