"""`sparse-rl eval` and `sparse-rl rollout` with tools: each problem is a conversation, on which rewards, counts of
entries, files and pictures agree. The model is the small one of recipes/turns, which looks up keys with a tool.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from judging import shifted
from processes import python

from rollout.config import read_origin
from rollout.files import RolloutFiles
from sparse_rl.analysis.report import packed
from sparse_rl.commands.main import main
from sparse_rl.recipe import load_recipe, make_recipe
from sparse_rl.trace import EvictionTrace, load_traces, read_fingerprint, save_traces

MODEL = Path(__file__).parents[2] / "recipes/turns/model"
SMALL = ["tasks.look_ups.synthetic.size=3", "rollout.progress=false"]
STREAMING = "{{policy: streaming, sinks: 1, budget: 16, period: 4, turns: {}}}"
LATE = """
import asyncio, json, time

class Table:
    made = 0

    def __init__(self):
        Table.made += 1

    def reset(self, table, answer, **row):
        self.table, self.answer, self.asked = json.loads(table), answer, 0
        assert answer != "refused", "no such table"

    async def get(self, key: str) -> str:
        '''Look up a key.

        Args:
            key: The key to look up.
        '''
        self.asked += 1
        await asyncio.sleep({seconds})
        return self.table[key]

    def get_reward(self):
        return float(self.asked >= 4)
"""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The folders of the rollouts of three problems, two conversations each: turns -> folder."""
    folders = {turns: tmp_path_factory.mktemp("turns") / turns for turns in ("kept", "prefilled")}
    for turns, folder in folders.items():
        words = [*SMALL, "sweep={}", f"cache={STREAMING.format(turns)}", "--out", str(folder)]
        assert main(["rollout", "turns/eval", *words]) == 0
    return folders


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The folder of an evaluation of the same conversations, and of those with a full cache."""
    folder = tmp_path_factory.mktemp("turns") / "eval"
    policies = ", ".join(["full", *(STREAMING.format(turns) for turns in ("kept", "prefilled"))])
    words = [*SMALL, f"sweep={{policy: [{policies}]}}", f"output_dir={folder}"]
    assert main(["eval", "turns/eval", *words]) == 0
    return folder, words


def rows_of(folder: Path) -> list[dict]:
    return json.loads((folder / "eval.json").read_text())["rows"]


def read(folder: Path) -> tuple[list, list[dict]]:
    """Return the rollouts of a folder, and the further keys of their lines."""
    parts = list(RolloutFiles(folder, read_origin(folder)).parts(2, 2))
    return [r for part in parts for r in part.rollouts], [line for part in parts for line in part.further]


def most_seen(rollout) -> int:
    """Return the maximum number of tokens that a query after the prompt sees in a kv head, counted one by one."""
    evict_at, queries = rollout.trace.evict_at, range(len(rollout.prompt_ids), len(rollout.trace) - 1)
    return max((int((evict_at[:, :, : q + 1] > q).sum(-1).max()) for q in queries), default=0)


@pytest.mark.parametrize("turns", ["kept", "prefilled"])
def test_rollouts_of_conversations_replay_exactly(turns, sampled, tmp_path, capfd):
    assert main(["verify", str(sampled[turns])]) == 0
    rollouts, lines = read(sampled[turns])
    assert len({line["conversation"] for line in lines}) == 6
    assert any(rollout.spans for rollout in rollouts) is (turns == "kept")
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in sampled[turns].iterdir():
        (wrong / file.name).write_bytes(file.read_bytes())
    for file in wrong.glob("traces-*"):
        later = [EvictionTrace.recorded(shifted(t.evict_at, 1), t.further) for t in load_traces(file)]
        save_traces(file, later, read_fingerprint(file))
    assert main(["verify", str(wrong)]) == 1
    assert "the gap is too large" in capfd.readouterr().err


def test_the_turns_of_a_prefilled_conversation_follow_one_another(sampled):
    rollouts, lines = read(sampled["prefilled"])
    pairs = list(zip(rollouts, rollouts[1:], lines, lines[1:], strict=False))
    within = [a.prompt_ids + a.completion_ids == b.prompt_ids[: len(a.trace)] for a, b, x, y in pairs
              if x["conversation"] == y["conversation"]]  # fmt: skip
    between = [len(a.trace) < len(b.prompt_ids) for a, b, x, y in pairs if x["conversation"] != y["conversation"]]
    assert all(within) and len(within) > 6 and not any(between)
    assert read_origin(sampled["prefilled"]).rollouts == len(rollouts)


def test_recorded_conversations_are_not_trained(sampled, capfd):
    for folder in sampled.values():
        words = [f"data={{traces: [{folder}]}}", "rewards=[boxed]", "num_generations=2", "environment=null"]
        words += ["max_tool_calling_iterations=null", f"cache={STREAMING.format('kept')}", "rollout=null"]
        assert main(["train", "turns/grpo", *words, "--dry-run"]) == 2
        assert "a conversation of several turns" in capfd.readouterr().err


def test_an_evaluation_judges_whole_conversations(evaluated, sampled):
    full, *rows = rows_of(evaluated[0])
    assert full["accuracy"] > 0.6 and full["turns"] == pytest.approx(5, abs=0.2)
    for turns, row in zip(sampled, rows, strict=True):
        rollouts, lines = read(sampled[turns])  # the same conversations
        last = {line["conversation"]: line for line in lines}.values()
        right = [f"\\boxed{{{line['answer']}}}" in line["messages"][-1].get("content", "") for line in last]
        shifted_right = [f"\\boxed{{{x['answer']}}}" in y["messages"][-1].get("content", "")
                         for x, y in zip(last, list(last)[2:], strict=False)]  # fmt: skip
        assert row["accuracy"] == pytest.approx(sum(right) / 6)
        assert row["peak_entries"] == max(map(most_seen, rollouts))
        assert row["longest_prompt"] == max(len(rollout.prompt_ids) for rollout in rollouts)
        answers = [[message["role"] for message in line["messages"]].count("assistant") for line in last]
        failed = [sum("error" in m["content"] for m in line["messages"] if m["role"] == "tool") for line in last]
        assert (row["turns"], row["tool_failures"]) == (pytest.approx(sum(answers) / 6), pytest.approx(sum(failed) / 6))
        assert sum(shifted_right) < 5, "the answers of other problems must not count"
    kept, prefilled = rows
    assert kept["longest_prompt"] < prefilled["longest_prompt"] and prefilled["peak_entries"] <= 20


@pytest.mark.slow
def test_an_interrupted_evaluation_ends_with_the_same_rows(evaluated, tmp_path):
    folder, words = evaluated
    again = tmp_path / "again"
    words = [*words[:-1], f"output_dir={again}"]
    again.mkdir()
    lines = (folder / "eval_completions.jsonl").read_text().splitlines()
    (again / "eval_completions.jsonl").write_text("\n".join(lines[:10]) + "\n")
    assert main(["eval", "turns/eval", *words, "--resume"]) == 0
    timed = ("seconds", "tokens_per_second")
    rows = [[{k: v for k, v in row.items() if k not in timed} for row in rows_of(f)] for f in (folder, again)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_vllm_has_the_conversations_of_hf(evaluated, sampled, tmp_path):
    """Rows of evaluations; tokens, log-probs and records of rollouts. Control: kept and prefilled turns differ."""
    pytest.importorskip("vllm")

    def run(*words: str) -> None:
        done = python("-m", "sparse_rl.cli", *words, "rollout.engine=vllm", "rollout.kv_cache_gb=0.1", timeout=1800)
        assert done.returncode == 0, done.stderr

    folder, words = evaluated
    run("eval", "turns/eval", *words[:-1], f"output_dir={tmp_path / 'eval'}")
    timed = ("seconds", "tokens_per_second")
    hf, vllm = (
        [{k: v for k, v in row.items() if k not in timed} for row in rows_of(f)] for f in (folder, tmp_path / "eval")
    )
    assert hf == vllm
    outcomes = []
    for turns, own in sampled.items():
        run(
            "rollout",
            "turns/eval",
            *SMALL,
            "sweep={}",
            f"cache={STREAMING.format(turns)}",
            "--out",
            str(tmp_path / turns),
        )
        for (rollouts, lines), out in ((read(own), outcomes), (read(tmp_path / turns), outcomes)):
            of_rollouts = [[r.prompt_ids, r.completion_ids, r.logprobs, r.trace.evict_at.tolist()] for r in rollouts]
            out.append([of_rollouts, [[line["conversation"], line["messages"]] for line in lines]])
    assert outcomes[0] == outcomes[1] != outcomes[2] == outcomes[3]


def test_an_environment_may_judge_and_a_late_tool_counts_as_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["eval", "turns/eval", *SMALL, "sweep={}", "cache=full", "accuracy=environment"]
    rows = []
    for name, seconds, limit in (("prompt", 0, 5), ("late", 0.5, 0.05)):
        Path(f"{name}.py").write_text(LATE.replace("{seconds}", str(seconds)))
        few = [
            f"environment={name}.py:Table",
            "samples=1",
            f"tool_seconds={limit}",
            f"output_dir={name}",
            "further_accuracy={boxed: boxed}",
        ]
        assert main([*words, *few]) == 0
        rows += rows_of(Path(name))
    prompt, late = rows
    assert (prompt["accuracy"], prompt["tool_failures"], prompt["turns"]) == (1.0, 0.0, 5.0)
    assert prompt["further_accuracy"]["boxed"]["accuracy"] >= 0.5
    assert (late["accuracy"], late["tool_failures"], late["turns"]) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["prompt_cache={policy: am}", "sweep={}"], "prompt_cache: is followed by one completion, not by turns"),
        (["forced_answer={text: x}"], "forced_answer: is followed by one completion"),
        (["environment=null"], "max_tool_calling_iterations: has no effect without tools or environment"),
        (["environment=null", "max_tool_calling_iterations=null", "accuracy=environment"], "accuracy: environment is"),
        (["environment=nowhere:Table"], "environment: nowhere:Table cannot be loaded"),
        (["accuracy=environment"], "rewards: there is no reward"),
        (["tasks={mine: {path: rows.jsonl}}"], "environment: Table cannot be reset: AssertionError no such table"),
        (["max_completion_length=100000"], "max_completion_length: 100,000 tokens"),
        (["toolz=[x]"], "did you mean tools"),
    ],
)
def test_what_does_not_go_with_tools_is_one_line(words, wrong, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(LATE.replace("{seconds}", "0"))
    row = {"prompt": [{"role": "user", "content": "c"}], "answer": "refused", "table": "{}"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    if "reset" in wrong:
        words = [*words, "environment=own.py:Table"]
    assert main(["eval", "turns/eval", *words, "--dry-run"]) == 2
    error = capfd.readouterr().err
    assert wrong in error and error.count("\n") == 1


def test_other_commands_refuse_conversations(capfd):
    for command in (["mismatch", "turns/grpo"], ["rollout", "turns/grpo", "--score"]):
        assert main(command) == 2
        assert "single completions, not conversations" in capfd.readouterr().err


def test_a_run_with_tools_is_evaluated_with_them():
    data = "{synthetic: {task: look_ups, size: 4, split: evaluation}}"
    recipe = load_recipe("turns/grpo", [f"validation={{data: {data}}}"])
    questions = make_recipe(recipe.evaluation("run"))
    assert (questions.tools, questions.environment) == (recipe.tools, recipe.environment)
    assert questions.tool_limits() == recipe.tool_limits() == (6, 5)
    own = load_recipe("turns/grpo", [f"validation={{data: {data}}}", "rewards=[]"])
    assert own.evaluation("run")["accuracy"] == "environment" != questions.accuracy


def test_the_coloured_completion_marks_what_was_read():
    trace = EvictionTrace.dense(1, 1, 12)
    parts = packed(trace, ["x"] * 12, 2, [(0, 3), (5, 8), (8, 10)])["parts"]
    read = torch.zeros(12, dtype=torch.bool)
    for (start, _, was_read), end in zip(parts, [*(part[0] for part in parts[1:]), 12], strict=True):
        read[start:end] = was_read
    assert read.nonzero().flatten().tolist() == [5, 6]
    assert [title for _, title, _ in parts] == ["turn 1", "read, not sampled", "turn 2", "turn 3"]
    titles = ["read, not sampled", "turn 1", "read, not sampled"]
    assert packed(trace, ["x"] * 12, 2, [(2, 6)])["parts"] == [
        [start, title, title != "turn 1"] for start, title in zip((2, 4, 8), titles, strict=True)
    ]
    assert packed(trace, ["x"] * 12, 2)["parts"] == [[2, "completion", False]]
