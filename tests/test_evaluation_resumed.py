"""An evaluation that is interrupted and continued, or shared by several processes, ends with the same results except
for times, and does no work twice.

A *point* is one task under one cache. The *journal* is a file of finished results; each line has a point and a *unit*,
a part of the point's work.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from interrupting import interrupted_after

from rollout.hf import HFEngine
from rollout.measure.journal import Journal, point_key
from sparse_rl.commands.arguments import refuse_used
from sparse_rl.commands.eval import evaluate
from sparse_rl.commands.main import main
from sparse_rl.commands.perplexity import measure
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.recipe import EvalRecipe, make_recipe

TIMES = ("seconds", "tokens_per_second")
HOLD_A_POINT = """
import sys
from pathlib import Path
from rollout.measure.journal import Journal

with Journal(Path(sys.argv[1]), resume=True) as journal, journal.take(sys.argv[2]) as taken:
    print(taken, flush=True)
    sys.stdin.read()
"""


def without_times(value: Any) -> Any:
    """Return the content of eval.json without durations and speeds."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def results(folder: Path, name: str = "eval.json") -> Any:
    """Return the results of an evaluation without times, and without the name of its folder."""
    content = without_times(json.loads((folder / name).read_text()))
    content["recipe"].pop("output_dir")
    return content


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tiny untrained model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    RunningSum.save_untrained(folder, 0)
    return str(folder)


@pytest.fixture
def recipe_of(tmp_path, model, monkeypatch):
    """recipe_of(output_dir, **keys) -> an evaluation of two tasks under two caches, in parts of two problems."""
    monkeypatch.chdir(tmp_path)

    def make(output_dir: str = "out", **keys: Any) -> EvalRecipe:
        sums = {"task": "running_sum", "split": "evaluation"}
        mapping = {
            "kind": "eval", "model": model, "output_dir": str(tmp_path / output_dir), "dtype": "float32",
            "tasks": {"long": {"synthetic": {**sums, "size": 5}}, "short": {"synthetic": {**sums, "size": 3, "n": 4}}},
            "accuracy": "boxed", "samples": 2, "max_completion_length": 20, "top_p": 1.0,
            "sweep": {"policy": ["streaming", "full"], "cache": {"budget": [16]}},
            "rollout": {"engine": "hf", "max_batch": 4},
        }  # fmt: skip
        return make_recipe({**mapping, **keys}).expect(EvalRecipe)

    return make


@pytest.fixture
def sampled(monkeypatch):
    """A list to which each call of an engine adds the number of its prompts."""
    counts: list[int] = []
    generate, simulate = HFEngine.generate, HFEngine.simulate

    def counted_generate(engine: HFEngine, prompts: Any, *arguments: Any, **options: Any) -> Any:
        counts.append(len(prompts))
        return generate(engine, prompts, *arguments, **options)

    def counted_simulate(engine: HFEngine, prompts: Any, *arguments: Any, **options: Any) -> Any:
        counts.append(len(prompts))
        return simulate(engine, prompts, *arguments, **options)

    monkeypatch.setattr(HFEngine, "generate", counted_generate)
    monkeypatch.setattr(HFEngine, "simulate", counted_simulate)
    return counts


def line(point: str, unit: int, value: Any = None) -> dict[str, Any]:
    return {"point": point, "unit": [unit], "value": value, "completion": "long text"}


def test_half_a_line_of_a_killed_process_is_ignored(tmp_path):
    """The file is cut at each byte."""
    file = tmp_path / "journal.jsonl"
    with Journal(file) as journal:
        journal.add([line("a", 0, 1), line("a", 1, 2)])
    whole = file.read_bytes()
    for cut in range(1, len(whole)):
        file.write_bytes(whole[:cut])
        with Journal(file, resume=True) as journal:
            complete = whole[:cut].count(b"\n")
            assert len(journal.lines("a")) == complete
            journal.add([line("a", 2, 3)])
            assert len(journal.lines("a")) in (complete + 1, complete + 2)  # + 2: only the end of a line was missing
        with Journal(file, resume=True) as journal:
            assert {item["value"] for item in journal.lines("a")} >= {3}


FORGED = {  # lines that no evaluation writes
    "deep list": "[" * 100_000, "deep mapping": '{"a":' * 100_000, "number": "1", "text": '"x"', "null": "null",
    "list": "[1]", "list of names": '["point", "unit"]', "NUL": "\0\0", "many digits": "9" * 10_000,
    **{
        f"{key} {value!r}": json.dumps({"point": "a", "unit": [0], "value": 0} | {key: value})
        for key, values in {
            "point": [[1], {}, None, 1, True],
            "unit": ["ab", [[1]], [{}], {}, None, 1, ["a", 1], [1.0], [True], [None], [0, "b"]],
        }.items()
        for value in values
    },
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_forged_lines_are_ignored(what, tmp_path):
    file, forged = tmp_path / "journal.jsonl", FORGED[what].encode() + b"\n\xff\xfe\n"
    genuine = "".join(json.dumps(line("a", unit, unit)) + "\n" for unit in (3, 1)).encode()
    for content in (genuine, forged + genuine, genuine + forged):
        file.write_bytes(content)
        with Journal(file, resume=True) as journal:
            assert [item["value"] for item in journal.lines("a")] == [1, 3]
            journal.add([line("a", 2, 2)])
            assert [item["value"] for item in journal.lines("a")] == [1, 2, 3]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda file: file.symlink_to(file)])
@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.lock"])
def test_a_journal_that_is_no_file_is_refused(make, name, tmp_path):
    """Every command with a journal checks its folder so, before it does anything else."""
    refuse_used(tmp_path, ("journal.jsonl",), "output_dir", overwrite=True)
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{tmp_path / name} is not a file that can be written"):
        refuse_used(tmp_path, ("journal.jsonl",), "output_dir", overwrite=True)


def test_a_reward_that_is_no_finite_number_ends_an_evaluation(recipe_of, tmp_path):
    for value in ("float('nan')", "float('inf')", "-1e39"):
        (tmp_path / "mine.py").write_text(f"def reward(completions, **_):\n    return [{value}] * len(completions)\n")
        with pytest.raises(UserError, match=r"reward returned \S+ in row 1 of \d+; a reward is a number from"):
            evaluate(recipe_of(accuracy=f"{tmp_path}/mine.py:reward"), progress=False)


def test_lines_are_ordered_by_unit_and_kept_once(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.add([line("a", 2, "first"), line("b", 0)])
        journal.add([line("a", 0), line("a", 2, "second")])
        assert [item["unit"] for item in journal.lines("a")] == [[0], [2]]
        assert journal.lines("a")[1]["value"] == "first"
        assert "completion" not in journal.lines("a")[0]  # texts are not kept in memory
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 3


def test_only_one_process_at_a_time_works_on_a_point(tmp_path):
    file, point, other = tmp_path / "journal.jsonl", point_key("one"), point_key("other")
    with Journal(file) as journal:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD_A_POINT, str(file), point],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout.readline() == "True\n"
        with journal.take(point) as taken:
            assert not taken
        with journal.take(other) as taken:
            assert taken
    with pytest.raises(UserError, match="in use by another process"):
        Journal(file)
    process.kill()
    process.wait()
    with Journal(file) as journal, journal.take(point) as taken:
        assert taken


CONTEXTS = ["a1b2c3d4" * 5, "e5f6a7" * 5]
WRITES = {
    "sweep": (0, 1, 3, 6),
    "contexts": (0, 1, 2, 3),
    "perplexity": (0, 1, 4),
}  # of the journal before an interrupt


@pytest.mark.parametrize(("kind", "writes"), [(kind, writes) for kind, counts in WRITES.items() for writes in counts])
@pytest.mark.few(3)
def test_an_interrupted_measurement_continues(kind, writes, recipe_of, tmp_path, model, sampled):
    """Only what is unfinished is sampled, and results equal those of a run without an interrupt."""
    rows = [{"text": CONTEXTS[i % 2], "prompt": f"Q{c}?", "answer": "1"} for i, c in enumerate("abcde")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rng = random.Random(0)
    (tmp_path / "book.txt").write_text("".join(rng.choice("0123456789abc;?") for _ in range(160)))
    after_contexts = {
        "tasks": {"one": {"path": str(tmp_path / "rows.jsonl"), "columns": {"context": "text"}}},
        "prompt_cache": [{"policy": "am", "ratio": 0.3}, {"policy": "evict", "ratio": 0.3}],
        "sweep": {},
    }
    of_text = {
        "kind": "perplexity", "model": model, "dtype": "float32", "text": str(tmp_path / "book.txt"),
        "prompt_tokens": 12, "completion_tokens": 20, "rollout": {"engine": "hf", "max_batch": 2},
        "sweep": {"policy": ["full", "streaming"]}, "cache": {"budget": 16},
    }  # fmt: skip

    def run(output_dir: str, **options: bool) -> int:
        """Return the number of sampled sequences."""
        sampled.clear()
        if kind == "perplexity":
            recipe: Any = make_recipe({**of_text, "output_dir": str(tmp_path / output_dir)})
            measure(recipe, progress=False, **options)
        else:
            evaluate(recipe_of(output_dir, **(after_contexts if kind == "contexts" else {})), progress=False, **options)
        return sum(sampled)

    in_all = run("whole")
    with interrupted_after(writes):
        run("out")
    kept = sum(sampled[:writes])
    assert run("out", resume=True) == in_all - kept
    name = "perplexity.json" if kind == "perplexity" else "eval.json"
    assert results(tmp_path / "out", name) == results(tmp_path / "whole", name)
    texts = [
        sorted((item["point"], item["unit"], item["completion"]) for item in map(json.loads, file.open()))
        for file in sorted(tmp_path.glob("*/eval_completions.jsonl"))
    ]
    assert texts[:1] == texts[1:]


@pytest.mark.slow
def test_resuming_samples_only_new_points(recipe_of, sampled):
    evaluate(recipe_of(), progress=False)
    sampled.clear()
    rows = evaluate(recipe_of(), progress=False, resume=True)
    assert len(rows) == 4
    assert not sampled
    sweep = {"policy": ["streaming", "full"], "cache": {"budget": [16, 20]}}
    assert len(evaluate(recipe_of(sweep=sweep), progress=False, resume=True)) == 6
    assert sum(sampled) == 8  # both tasks under one new cache
    sampled.clear()
    for change in ({"seed": 43}, {"temperature": 0.5}, {"accuracy": "math"}, {"samples": 1}):
        assert len(evaluate(recipe_of(**change), progress=False, resume=True)) == 4
        assert sum(sampled) == 16, change
        sampled.clear()


def test_a_changed_model_is_sampled_again(recipe_of, tmp_path, sampled):
    RunningSum.save_untrained(tmp_path / "model", 0)
    evaluate(recipe_of(model=str(tmp_path / "model")), progress=False)
    RunningSum.save_untrained(tmp_path / "model", 1)
    sampled.clear()
    evaluate(recipe_of(model=str(tmp_path / "model")), progress=False, resume=True)
    assert sum(sampled) == 16


def test_a_sweep_over_models_gives_the_rows_of_each_model(recipe_of, tmp_path, model):
    RunningSum.save_untrained(tmp_path / "other", 1)
    swept = {"policy": ["streaming", "full"], "cache": {"budget": [16]}, "model": [model, str(tmp_path / "other")]}
    rows = evaluate(recipe_of("both", sweep=swept), progress=False)
    assert [row.model for row in rows] == [model] * 4 + [str(tmp_path / "other")] * 4
    evaluate(recipe_of("one", model=str(tmp_path / "other")), progress=False)
    assert results(tmp_path / "both")["rows"][4:] == results(tmp_path / "one")["rows"]
    assert results(tmp_path / "both")["rows"][:4] != results(tmp_path / "one")["rows"]


@pytest.mark.slow
def test_a_point_that_another_process_holds_is_left_out(recipe_of, tmp_path, sampled):
    evaluate(recipe_of("whole"), progress=False)
    file = tmp_path / "out" / "eval_completions.jsonl"
    points = [json.loads(text)["point"] for text in (tmp_path / "whole/eval_completions.jsonl").open()]
    file.parent.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_POINT, str(file), points[0]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "True\n"
    rows = evaluate(recipe_of(), progress=False, resume=True)
    assert len(rows) == len(results(tmp_path / "out")["rows"]) == 3
    process.communicate()
    sampled.clear()
    assert len(evaluate(recipe_of(), progress=False, resume=True)) == 4
    assert sum(sampled) == 5
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_resume_and_overwrite_exclude_each_other(recipe_of, tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(recipe_of().as_yaml())
    assert main(["eval", "e.yaml", "--resume", "--overwrite"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_dry_run_checks_everything_and_writes_nothing(recipe_of, tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(recipe_of().as_yaml())
    assert main(["eval", "e.yaml", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "8 problems x 2 caches x 2 samples = 32, of up to 20 tokens" in output
    assert "not checked" in output
    assert not (tmp_path / "out").exists()
    assert main(["eval", "e.yaml", "--dry-run", "tasks.long={path: absent.jsonl}"]) == 2
    assert main(["eval", "e.yaml", "--dry-run", "accuracy=no_such_reward"]) == 2


@pytest.mark.slow
def test_an_evaluation_killed_at_random_moments_ends_with_the_same_results(recipe_of, tmp_path):
    recipe = recipe_of("whole", samples=8)
    evaluate(recipe, progress=False)
    (tmp_path / "e.yaml").write_text(recipe_of(samples=8).as_yaml())
    command = [sys.executable, "-m", "sparse_rl.cli", "eval", "e.yaml", "--resume"]
    began = time.monotonic()
    assert subprocess.run([*command, "output_dir=timed"], cwd=tmp_path, capture_output=True).returncode == 0
    duration, rng = time.monotonic() - began, random.Random(0)
    for attempt in range(10):
        processes = [
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(1 + attempt % 2)
        ]
        time.sleep(duration * rng.uniform(0.5, 1.0))
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    last = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in last] == [0, 0]
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    units = Counter(
        (item["point"], *item["unit"]) for item in map(json.loads, (tmp_path / "timed/eval_completions.jsonl").open())
    )
    assert set(units.values()) == {1}
