"""GRPO with tools: a conversation is a row. Its gradient, its resume, refusals, and processes that differ in turns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from processes import without_launch
from trainer_runs import KillAt, Killed, steps, timeless

from sparse_rl.attention import replay_logprobs
from sparse_rl.attention.support import score_draws
from sparse_rl.data.synthetic import LookUps, LookUpTable
from sparse_rl.errors import UserError
from sparse_rl.models.directory import model_directory, saved_policy
from sparse_rl.models.load import load_tokenizer
from sparse_rl.recipe import load_recipe, make_recipe
from trainer import SparseGRPOArguments, SparseGRPOTrainer
from trainer.rundir import RunLog

GKV = {"policy": "gkv", "budget": 20, "window": 4, "period": 8}
MODEL = model_directory("turns/model")
SHORT = [
    f"model={MODEL}",
    "data.synthetic.size=64",
    "max_steps=4",
    "per_device_train_batch_size=8",
    "learning_rate=1e-3",
    "importance_correction=token_truncate",
]
BOTH = pytest.mark.parametrize("turns", ["kept", "prefilled"])


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


def made(
    folder: Path, turns: str, *words: str, cls: type = SparseGRPOTrainer, callbacks: Any = (), **given: Any
) -> Any:
    """Return a trainer of the recipe turns/grpo, made in Python."""
    cache = {**GKV, "turns": turns}
    recipe = load_recipe("turns/grpo", [*SHORT, f"output_dir={folder}", *words])
    folder.mkdir(exist_ok=True, parents=True)
    run = recipe.prepare_training()
    options = {**run.recipe.training_arguments(), **vars(run.recipe.grpo)}
    arguments: dict[str, Any] = {
        "model": MODEL,
        "reward_funcs": varied,
        "args": SparseGRPOArguments(**options),
        "train_dataset": run.rows,
        "cache": cache,
        "environment_factory": LookUpTable,
        "rollout": {"progress": False},
        "callbacks": [RunLog(folder), *callbacks],
    }
    return cls(**{**arguments, **given})


class Watched(SparseGRPOTrainer):
    """Compares the first gradient with gradients that are made by hand from the rollouts of the turns."""

    distances: dict[str, float]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        self.seen, self.shown = list(self.batch.conversations), out["advantages"].clone()
        self.masks = out["tool_mask"] * out["completion_mask"]
        return out

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        weights = list(self.model.parameters())
        own = torch.cat([w.grad.flatten().clone() for w in weights])
        by_row, by_turn = [], []
        for conversation, advantage in zip(self.seen, self.shown, strict=True):
            scored = list(replay_logprobs(self.model, conversation.rollouts))
            if conversation.kept:
                scored = [scored[0][start:end] for start, end in conversation.whole().spans]
            by_row.append(-advantage * (torch.cat(scored) - torch.cat(scored).detach()).exp().mean())
            by_turn += [-advantage * (turn - turn.detach()).exp().mean() for turn in scored]
        self.distances = {}
        for name, losses in (("conversation", by_row), ("turn", by_turn)):
            gradient = torch.autograd.grad(torch.stack(losses).mean(), weights, retain_graph=True)
            gap = torch.cat([g.flatten() for g in gradient]) - own
            self.distances[name] = float(gap.norm() / own.norm())
        return loss


@BOTH
def test_the_gradient_is_that_of_a_mean_per_conversation(turns, tmp_path):
    """The control is a mean per turn. The engine's log-probs and the trainer's are equal for the sampled tokens.

    A policy's own metrics are those of a sequence that was sampled under its trace.
    """
    words = ("max_steps=1", "per_device_train_batch_size=16", "max_grad_norm=0")
    trainer, measured = made(tmp_path, turns, *words, cls=Watched), []
    trainer.own_metrics.record_policy = measured.append
    trainer.train()
    (rollout,) = measured
    assert any(rollout is conversation.rollouts[-1] for conversation in trainer.seen)
    assert trainer.distances["conversation"] <= 3e-6 and trainer.distances["turn"] > 0.05, trainer.distances
    (line,) = steps(tmp_path)
    assert line["replay/gap_max"] <= 1e-5 and line["grad_norm"] > 0
    assert line["turns/mean"] == sum(c.turns for c in trainer.seen) / 16 > 2 and line["tools/late"] == 0
    assert line["tools/call_frequency"] > 1
    assert int(trainer.masks.sum()) == sum(sum(c.whole().sampled) for c in trainer.seen)
    assert saved_policy_turns(trainer, tmp_path) == turns


def saved_policy_turns(trainer: Any, folder: Path) -> str:
    trainer.save_model(str(folder / "model"))
    return saved_policy(folder / "model").config.turns


@pytest.mark.few(1)
@BOTH
def test_a_run_resumed_in_mid_buffer_has_the_same_bits(turns, tmp_path):
    words = ("save_steps=1", "steps_per_generation=4", "num_generations=4")
    whole = made(tmp_path / "whole", turns, *words)
    whole.train()
    with pytest.raises(Killed):
        made(tmp_path / "killed", turns, *words, callbacks=[KillAt(3)]).train()
    again = made(tmp_path / "killed", turns, *words)
    again.train(resume_from_checkpoint=str(tmp_path / "killed/checkpoint-3"))
    bits = [torch.cat([w.detach().flatten() for w in t.model.parameters()]) for t in (whole, again)]
    assert torch.equal(*bits)
    assert timeless(steps(tmp_path / "killed")) == timeless(steps(tmp_path / "whole"))
    other = made(tmp_path / "other", turns, *words, "learning_rate=9e-4")
    other.train()
    assert not torch.equal(bits[0], torch.cat([w.detach().flatten() for w in other.model.parameters()]))  # control


class Hanging(LookUpTable):
    """Its third and fourth conversations never get an answer."""

    made = 0

    def __init__(self) -> None:
        Hanging.made += 1
        self.number = Hanging.made

    def get(self, key: str) -> str:
        """Look up a key.

        Args:
            key: The key to look up.
        """
        if self.number in (3, 4):
            import threading

            threading.Event().wait()
        return super().get(key)

    def get_reward(self) -> float:
        return float(self.number)


def test_a_late_tool_ends_its_conversation_and_its_environment_is_not_used_again(tmp_path):
    Hanging.made = 0
    words = ("max_steps=2", "tool_seconds=1", "num_generations=4", "replay_guard.enabled=false")
    trainer = made(tmp_path, "kept", *words, environment_factory=Hanging, reward_funcs=[])
    trainer.train()
    first, second = steps(tmp_path)
    assert (first["tools/late"], second["tools/late"]) == (2, 0)
    numbers = [environment.number for environment in trainer._environment_pool[None]]
    assert numbers == [1, 2, 5, 6, 7, 8, 9, 10]
    assert second["rewards/Hanging/mean"] == sum(numbers) / 8


def test_tokens_of_tools_are_not_scored_where_sampling_is_truncated(tmp_path, monkeypatch):
    """They have no supports; scored over the whole vocabulary, they would take more memory than all else."""
    scored = []

    def watched(hidden: Any, head: Any, labels: Any, sizes: Any, *given: Any) -> Any:
        scored.append((len(sizes), int(sizes.min())))
        return score_draws(hidden, head, labels, sizes, *given)

    monkeypatch.setattr("trainer.grpo.trainer.score_draws", watched)
    made(tmp_path, "kept", "max_steps=1", "top_p=0.9").train()
    (line,) = steps(tmp_path)
    assert line["replay/gap_max"] <= 1e-5 and line["grad_norm"] > 0 and line["tools/call_frequency"] > 0
    assert {smallest > 0 for _, smallest in scored} == {True}
    assert {count for count, _ in scored} == {round(8 * line["completions/mean_length"])}  # which counts sampled tokens


def test_tools_change_neither_the_update_s_time_nor_the_trainer_s_random_numbers(tmp_path, monkeypatch):
    seconds, same = [0.0], []

    class Watching(SparseGRPOTrainer):
        def _tool_call_loop(self, *given: Any) -> Any:
            before = torch.get_rng_state()
            out = super()._tool_call_loop(*given)
            same.append(torch.equal(before, torch.get_rng_state()))
            return out

    class Slow(LookUpTable):
        def get(self, key: str) -> str:
            """Look up a key.

            Args:
                key: The key to look up.
            """
            seconds[0] += 1000.0
            torch.rand(1)
            return super().get(key)

    monkeypatch.setattr("trainer.grpo.metrics.now", lambda: seconds[0])
    made(tmp_path, "kept", "max_steps=1", cls=Watching, environment_factory=Slow).train()
    (line,) = steps(tmp_path)
    assert same == [True]
    assert line["time/generate"] == seconds[0] > 0 == line["time/update"]


# ---- refusals --------------------------------------------------------------------------------------------------------


def untyped(key):
    """Look up."""


def typed(key: str) -> str:
    """Look up.

    Args:
        key: A key.
    """
    return key


class NoReset:
    def get(self, key: str) -> str:
        """Look up.

        Args:
            key: A key.
        """
        return key


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no type hints": ({"tools": [untyped]}, "tools: untyped needs type hints and a docstring"),
    "not a function": ({"tools": ["get"]}, "tools: 'get' needs type hints and a docstring"),
    "twice": ({"tools": [typed, typed]}, "tools: two tools are called typed; rename one"),
    "no reset": ({"environment_factory": NoReset}, "environment_factory: NoReset has no method reset"),
    "no reward": ({"environment_factory": LookUpTable, "reward_funcs": []}, "rewards: there is no reward"),
    "text": ({"tools": [typed], "processing_class": None}, "tools: the tokenizer's chat template cannot write tool"),
    "prefilled am": (
        {"tools": [typed], "cache": {"policy": "am", "budget": 8, "window": 3, "period": 4, "turns": "prefilled"}},
        "cache.turns: prefilled turns are not replayed under am",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tools_cannot_do_is_refused_before_a_model_is_loaded(name, tiny, tmp_path):
    given, says = REFUSED[name]
    tokenizer = load_tokenizer(MODEL if "processing_class" not in given else tiny())
    arguments = {"reward_funcs": [len], "cache": GKV, **given, "processing_class": tokenizer}
    args = SparseGRPOArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(UserError, match=says):
        SparseGRPOTrainer(model=tiny(), args=args, train_dataset=[{"prompt": "a"}], **arguments)


class Refusing(LookUpTable):
    """It raises, or exits, for a row that says so."""

    def reset(self, wrong: str, **row: Any) -> None:
        super().reset(**row)
        if wrong:
            raise {"raises": KeyError, "exits": SystemExit}[wrong]("no such table")


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_an_environment_that_cannot_be_reset_is_one_line(tmp_path):
    rows = [{**row, "prompt": asked(row["prompt"])} for row in LookUps().rows("train", 8, 0)]
    for wrong, error in (("raises", "KeyError 'no such table'"), ("exits", "SystemExit no such table"), ("", None)):
        given = {"train_dataset": Dataset.from_list([{**row, "wrong": wrong} for row in rows])}
        trainer = made(tmp_path / wrong, "kept", "max_steps=1", environment_factory=Refusing, **given)
        refused = pytest.raises(UserError, match=f"environment: Refusing cannot be reset: {error}")
        with refused if wrong else nullcontext():
            trainer.train()


def test_a_wrong_name_of_an_environment_is_refused_before_the_first_step(tmp_path):
    texts = LookUps().rows("train", 8, 0)
    rows = [{**row, "prompt": asked(row["prompt"])} for row in texts]
    named = [{**row, "environment": name} for row, name in zip(rows, "aabbaabb", strict=True)]
    wrong, files = [{**named[0], "environment": "c"}, *named[1:]], {}
    for name, lines in (("named", named), ("wrong", wrong), ("none", rows)):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("\n".join(map(json.dumps, lines)))
    table = "sparse_rl.data.synthetic:LookUpTable"
    two = {**RECIPE, "environment": {"a": table, "b": table}, "num_generations": 2, "per_device_train_batch_size": 4}
    for name, value in (("wrong", "'c'"), ("none", "None")):
        says = f"data: a row has environment {value}, not one of a, b"
        with pytest.raises(UserError, match=says):
            make_recipe({**two, "data": {"path": str(files[name])}}).prepare_training()
        keys = "train_dataset", "eval_dataset"
        for key, other in (keys, reversed(keys)):
            given = {key: Dataset.from_json(str(files[name])), other: Dataset.from_json(str(files["named"]))}
            with pytest.raises(UserError, match=says.replace("data", key, 1)):
                made(tmp_path / "run", "kept", environment_factory={"a": LookUpTable, "b": LookUpTable}, **given)
    assert make_recipe({**two, "data": {"path": str(files["named"])}}).prepare_training()  # control
    with pytest.raises(UserError, match="train_dataset: with tools, prompts must be chat messages"):
        made(tmp_path / "run", "kept", train_dataset=Dataset.from_list(texts))


RECIPE = load_recipe("turns/grpo", [f"model={MODEL}", "data.synthetic.size=64"]).resolved()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"environment": "sparse_rl.data.synthetic:Nothing"},
            "environment: .*Nothing cannot be loaded: Attrib",
        ),
        ({"tools": ["nowhere.py:get"]}, "tools: nowhere.py:get cannot be loaded: FileNotFoundError"),
        ({"environment": None}, "max_tool_calling_iterations: has no effect without tools or environment"),
        ({"rewards": [], "environment": None, "max_tool_calling_iterations": None}, "rewards: name at least one"),
        ({"cache": {"policy": "gkv", "budget": 9, "turns": "forgotten"}}, "turns: expected one of kept, prefilled"),
        ({"cache": {**RECIPE["cache"], "turns": "prefilled"}, "top_p": 0.9}, "cache.turns: prefilled turns do not rec"),
        ({"cache": {"policy": "clustered", "turns": "prefilled"}}, "cache.turns: prefilled turns are not replayed"),
        ({"data": {**RECIPE["data"], "chat": False}}, "data: with tools, prompts must be chat messages, but they are"),
    ],
)
def test_a_recipe_is_refused_in_one_line(changed, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says) as caught:
        make_recipe({**RECIPE, **changed}).prepare_training()
    assert "\n" not in str(caught.value)


def test_a_recipe_without_changes_is_accepted_and_its_tools_belong_to_its_inputs():
    """Control of the refusals. A resume compares the files of tools."""
    run = make_recipe({**RECIPE, "tools": ["test_grpo_turns:typed"]}).prepare_training()
    assert run.findings["turns"] == "kept, with test_grpo_turns:typed, sparse_rl.data.synthetic:LookUpTable"
    assert any(name.endswith("of test_grpo_turns:typed") for name in run.inputs())
    assert make_recipe(RECIPE).evaluation("run") is None


def test_the_task_is_solved_by_its_worked_answers():
    rows = LookUps().rows("train", 8, 0, with_response=True)
    table = LookUpTable()
    for row in rows:
        table.reset(**row)
        calls = [m["tool_calls"][0]["function"]["arguments"] for m in row["completion"] if "tool_calls" in m]
        given = [table.get(**call) for call in calls]
        assert given == [m["content"] for m in row["completion"] if m["role"] == "tool"]
        assert row["completion"][-1]["content"].endswith(f"\\boxed{{{sum(int(x[0]) for x in given) % 10}}}")
        assert [call["key"] for call in calls] == [row["prompt"], *(x[1] for x in given[:-1])]
    assert LookUps().rows("train", 8, 0) == [{k: v for k, v in row.items() if k != "completion"} for row in rows]


# ---- two processes ---------------------------------------------------------------------------------------------------

LAUNCHED = """
import sys
from pathlib import Path
from trainer.arguments import prepare_deepspeed
prepare_deepspeed()
from sparse_rl.recipe import load_recipe
from trainer.grpo import trainer as module

class Counted(module.SparseGRPOTrainer):
    rounds = 0

    def _generate(self, prompts):
        if self.args.run_name == "control":  # weights are gathered for each turn
            return module.GRPOTrainer._generate(self, prompts)
        return super()._generate(prompts)

turns, folder, name, model = sys.argv[1:]
module.SparseGRPOTrainer = Counted
words = [f"model={model}", "max_steps=2", "per_device_train_batch_size=8", "launch.processes=2", "launch.zero_stage=3"]
words.append("data.synthetic.size=64")
recipe = load_recipe("turns/grpo", [*words, f"output_dir={folder}", f"run_name={name}", f"cache.turns={turns}"])
run = recipe.prepare_training()
trainer = run.recipe.make_trainer(run, Path(folder))
sample, rank = trainer.tool_sampling._sample, trainer.accelerator.process_index

def counted(*given):
    Counted.rounds += 1
    print("ROUND", rank, flush=True)
    if name == "control":
        with trainer.weight_sync.ready():
            return sample(*given)
    return sample(*given)

trainer.tool_sampling._sample = counted
if rank:
    trainer.max_tool_calling_iterations = 1  # so that the processes surely differ
trainer.train()
print("ROUNDS", rank, Counted.rounds, flush=True)
"""


@pytest.mark.slow
@BOTH
def test_processes_differ_in_their_turns_under_zero_3(turns, tmp_path):
    """Weights are gathered once for all turns. The control gathers them for each turn, and its collectives mismatch."""
    (tmp_path / "launched.py").write_text(LAUNCHED)

    def launched(name: str, timeout: int) -> tuple[int | None, str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += ["launched.py", turns, str(tmp_path / name), name, MODEL]
        log = tmp_path / f"{name}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=without_launch(), stdout=out, stderr=out, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, log.read_text()

    code, text = launched("once", 600)
    assert code == 0, text[-3000:]
    rounds = dict(re.findall(r"ROUNDS (\d) (\d+)", text))  # also after a progress bar
    assert int(rounds["0"]) > int(rounds["1"]) == 4
    assert all(line["replay/gap_max"] <= 1e-5 for line in steps(tmp_path / "once"))
    code, text = launched("control", 300)
    assert code != 0 and "ROUNDS" not in text
    assert text.count("ROUND 0") > text.count("ROUND 1") == 2  # until there, both had sampled alike
