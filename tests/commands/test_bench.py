"""`sparse-rl bench` times sampling and compactions. The tests cover the counts (tokens, steps, compactions, bytes), the
durations of parts by a clock whose time is known, resuming, points that are left out, output and errors. No test
depends on a real duration.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import SamplingConfig, make_engine
from rollout.timing import sampling as timing
from rollout.timing.sampling import time_sampling
from sparse_rl.analysis.timing import labels, plot_timing, timing_tables
from sparse_rl.clock import Clock, part
from sparse_rl.commands import bench as command
from sparse_rl.commands.bench import load_bench, timing_of
from sparse_rl.commands.bench_points import duration, prepare_benches, spread
from sparse_rl.commands.main import main
from sparse_rl.errors import UserError
from sparse_rl.policies import make_policy
from sparse_rl.recipe import BenchRecipe, load_recipe, make_recipe

ROOT = Path(__file__).parents[2]
RECIPE = """
kind: bench
model: {model}
output_dir: out
dtype: float32
sweep:
  policy: [streaming, {{policy: gkv, window: 4}}, {{policy: gkv, window: 4, alpha: 0}}]
  cache: {{budget: [16], period: [4]}}
batch: [1, 5]
prompt_tokens: 10
length: [24, 40]
contexts: {{length: [30], compactions: [{{ratio: [0.2]}}, {{policy: evict, queries: [context], ratio: [0.2]}}]}}
repetitions: 2
rollout: {{engine: hf, progress: false}}
"""


@pytest.fixture
def bench(workdir: Path, model: Path) -> Callable[..., BenchRecipe]:
    """bench(*overrides) returns a small recipe; the fixture also writes it to bench.yaml."""
    (workdir / "bench.yaml").write_text(RECIPE.format(model=model))
    return lambda *overrides: load_recipe("bench.yaml", list(overrides)).expect(BenchRecipe)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of this machine, which serves only estimates."""
    from rollout.timing.estimate import Machine
    from sparse_rl.commands import bench_points

    monkeypatch.setattr(bench_points, "measured_machine", lambda dtype, device: Machine(1e10, 1e10, 1e-3, 1e-3))


# ---- the clock ------------------------------------------------------------------------------------------------------


def ticking() -> Callable[[], float]:
    """Return a clock whose time is 0, 1, 2, ... at successive calls."""
    ticks = count()
    return lambda: float(next(ticks))


def test_parts_are_recorded_only_while_a_clock_runs() -> None:
    with part("before"):
        pass
    with Clock(now=ticking()) as clock, part("within"):
        pass
    with part("after"):
        pass
    assert clock.parts == [("within", 0, 1.0)]


def test_a_part_within_a_part_and_details_are_not_recorded() -> None:
    """A part that runs within another counts for the outer part only. Control: a detailed clock records details."""

    @part("detail", detail=True)
    def detail() -> int:
        return 7

    for detailed in (False, True):
        with Clock(detailed, ticking()) as clock:
            with part("outer"), part("inner"):
                assert detail() == 7
            clock.step(3, 10, 2)
            detail()
        expected = [("outer", 0, 1.0), *([("detail", 1, 1.0)] if detailed else [])]
        assert clock.parts == expected


def test_a_part_ends_when_its_block_raises() -> None:
    with Clock(now=ticking()) as clock:
        with pytest.raises(ValueError, match="no"), part("failing"):
            raise ValueError("no")
        with part("next"):
            pass
    assert [name for name, *_ in clock.parts] == ["failing", "next"]


def test_times_of_lengths_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences with prompts of 4 tokens. The clock ticks at the start (0), at the first step (1), twice in the
    compaction of the second step (2, 3), at the second step (4), at the third (5) and at the end.
    """
    monkeypatch.setattr(timing, "now", ticking())

    def sample() -> None:
        clock = Clock.running
        assert clock is not None
        clock.step(2, 100, 2)
        with part("compaction"):
            pass
        clock.step(2, 300, 2)
        clock.step(2, 200, 1)

    first, second, third = time_sampling(sample, 2, 4, [5, 6, 7])
    assert (first.seconds, second.seconds, third.seconds) == (1.0, 4.0, 5.0)
    assert (first.decode_seconds, second.decode_seconds, third.decode_seconds) == (0.0, 3.0, 4.0)
    assert (first.decode_steps, second.decode_steps, third.decode_steps) == (0, 1, 2)
    assert (first.decode_tokens, second.decode_tokens, third.decode_tokens) == (0, 2, 4)
    assert (first.parts, second.parts, third.parts) == ({}, {"compaction": 1.0}, {"compaction": 1.0})
    assert (first.compactions, second.compactions, third.compactions) == (0, 1, 1)
    assert (first.cache_bytes, second.cache_bytes, third.cache_bytes) == (100, 300, 300)
    assert (first.at_once, second.at_once, third.at_once) == (2, 2, 1.5)


def test_reading_the_prompts_is_not_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the second prompt is still being read, the first sequence already has a token: decoding starts later."""
    monkeypatch.setattr(timing, "now", ticking())

    def sample() -> None:
        clock = Clock.running
        assert clock is not None
        clock.step(1, 0, 2, prefilled=False)
        with part("compaction"):  # at the end of the second prompt
            pass
        for tokens in (2, 2, 2, 1):
            clock.step(tokens, 0, 2)

    (measured,) = time_sampling(sample, 2, 4, [8])
    assert (measured.seconds, measured.decode_seconds, measured.decode_tokens) == (7.0, 3.0, 5)
    assert (measured.parts, measured.compactions) == ({}, 0)


def test_a_sequence_that_waits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sequence is read when the first one ends, so few steps have no unread prompt. Then decoding starts
    at the first step, and one sequence was sampled at a time.
    """
    monkeypatch.setattr(timing, "now", ticking())

    def sample() -> None:
        clock = Clock.running
        assert clock is not None
        for prefilled in (False, False, False, True):
            clock.step(1, 0, 1, prefilled=prefilled)

    (measured,) = time_sampling(sample, 2, 4, [6])
    assert (measured.decode_seconds, measured.decode_tokens, measured.at_once) == (3.0, 3, 1.0)


# ---- what is counted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache",
    [
        {"policy": "full"},
        {"policy": "streaming", "budget": 16, "period": 4},
        {"policy": "gkv", "budget": 16, "period": 4, "window": 4},
        {"policy": "h2o", "budget": 16, "period": 1},
    ],
    ids=lambda cache: cache["policy"],
)
def test_the_engine_reports_tokens_steps_compactions_and_bytes(cache: dict[str, Any], model: Path) -> None:
    """Compactions equal a count of the schedule token by token, and bytes the engine's own count."""
    engine, prompt, length, batch = make_engine("hf", model=model, policy=cache), 10, 40, 5
    prompts = [[7] * prompt] * batch
    (measured,) = time_sampling(
        lambda: engine.generate(prompts, SamplingConfig(length - prompt, seed=0, ignore_eos=True)),
        batch, prompt, [length],
    )  # fmt: skip
    assert measured.decode_steps == length - prompt - 1  # the first token comes from the prompt's logits
    assert measured.decode_tokens == batch * measured.decode_steps
    schedule = make_policy(cache).schedule
    assert measured.compactions == sum(schedule.due(prompt, seen) for seen in range(prompt + 1, length))
    assert (measured.compactions > 0) == (cache["policy"] != "full")
    assert measured.cache_bytes == engine.peak_cache_bytes  # type: ignore[attr-defined]
    assert measured.at_once == batch
    assert ("compaction" in measured.parts) == (cache["policy"] != "full")


def test_parts_of_a_clustered_step_are_measured_within_the_step(model: Path) -> None:
    """The parts of a step take at most the whole step; without `detailed` there are none."""
    cache = {"policy": "clustered", "page": 4, "window": 8, "sinks": 2, "open_pages": 2}
    engine = make_engine("hf", model=model, policy=cache)
    for detailed in (True, False):
        (measured,) = time_sampling(
            lambda: engine.generate([[7] * 20], SamplingConfig(20, seed=0, ignore_eos=True)),
            1, 20, [40], detailed=detailed,
        )  # fmt: skip
        assert set(measured.parts) == ({"plan", "close", "choose", "gather", "logits", "sum"} if detailed else set())
        assert sum(measured.parts.values()) < measured.decode_seconds


def test_memory_is_that_of_the_papers_appendix() -> None:
    """Keys and values under G-KV take (b + s) / length of the full cache's memory (G-KV, appendix G): savings of 96.1,
    92.9 and 86.7 % at 16,384 tokens. Its sizes are twice the paper's, which counts 2 of the 4 kv heads.
    """
    recipe = make_recipe(
        {
            "kind": "bench", "model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "output_dir": "out",
            "random_weights": True, "batch": [128], "length": [16_384], "rollout": {"engine": "hf"},
            "sweep": {"policy": ["gkv"], "cache": {"budget": [512, 1024, 2048], "period": [128], "window": [16]}},
        }
    )  # fmt: skip
    (bench,) = prepare_benches(recipe.expect(BenchRecipe))
    full, *others = [bench._memory(point.cache, 128, 16_384) for point in bench.points]  # type: ignore[arg-type]
    assert round(full["keys and values"] / 2**30) == 112
    assert [round(other["keys and values"] / 2**30, 2) for other in others] == [4.38, 7.88, 14.88]
    savings = [100 * (1 - other["keys and values"] / full["keys and values"]) for other in others]
    assert [round(saving, 1) for saving in savings] == [96.1, 93.0, 86.7]
    assert others[2]["scores"] / others[2]["keys and values"] == pytest.approx(4 / (2 * 2 * 128))  # float32 by bfloat16
    assert others[0]["dense masks instead"] == 128 * 28 * 4 * 16_384**2
    assert others[0]["trace"] == 4 * 128 * 28 * 4 * 16_384


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_bench_writes_rows_tables_and_a_picture(bench: Any, workdir: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "bench.yaml", "parts=true"]) == 0
    lines = [json.loads(line) for line in (workdir / "out/bench_runs.jsonl").read_text().splitlines()]
    assert [line["unit"] for line in lines] == [[0]] * 10 + [[1]] * 10  # no point twice before all were measured once
    assert [line["point"] for line in lines[:10]] == [line["point"] for line in lines[10:]]
    content = json.loads((workdir / "out/bench.json").read_text())
    rows, contexts = content["rows"], content["contexts"]
    names = ["full", "streaming 16", "gkv 16, alpha 0.8", "gkv 16, alpha 0.0"]
    assert labels(rows) == [name for name in names for _ in range(4)]
    assert [(row["batch"], row["length"]) for row in rows[:4]] == [(1, 24), (1, 40), (5, 24), (5, 40)]
    for row in rows:
        assert row["runs"] == 2
        assert row["tokens_per_second"] > 0
        assert 0 <= row["spread"] < 2
        assert ("compaction_ms" in row) == (row["policy"] != "full")
        assert (row["ratio_to_full"] == 1) == (row["policy"] == "full")
        assert sum(row["parts_us"].values()) < 1e3 * row["step_ms"]
    assert [row["entries"] for row in contexts] == [6, 6]  # 0.2 of 30 tokens
    assert all({"prefill", "queries", "compaction", "selection"} <= row["seconds"].keys() for row in contexts)
    assert "fit of values" in contexts[0]["seconds"]
    assert "fit of values" not in contexts[1]["seconds"]  # evict fits nothing
    out = capsys.readouterr().out
    for words in ("Sampling on", "Computed memory", "parts of a decode step", "Seconds of a context's compaction"):
        assert words in out, words
    assert (workdir / "out/bench.png").read_bytes()[:4] == b"\x89PNG"
    assert content["machine"]["torch"] == torch.__version__
    assert not list(workdir.glob("out/*.tmp"))

    assert main(["plot", "out"]) == 0
    assert "Sampling on" in capsys.readouterr().out
    assert main(["inspect", "out"]) == 0
    assert "times and memory, 18 rows" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_an_interrupted_bench_continues(
    bench: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """--resume measures only what is missing. Control: other settings share no result."""
    file, written = workdir / "out/bench_runs.jsonl", command.write_results

    def interrupting(*given: Any) -> Any:
        if len(file.read_text().splitlines()) == 5:
            raise KeyboardInterrupt
        return written(*given)

    monkeypatch.setattr(command, "write_results", interrupting)
    assert main(["bench", "bench.yaml"]) == 130
    before = file.read_text()
    assert before.count("\n") == 5
    monkeypatch.setattr(command, "write_results", written)
    assert main(["bench", "bench.yaml"]) == 2
    assert "add --resume to continue" in capsys.readouterr().err
    assert main(["bench", "bench.yaml", "--resume"]) == 0
    assert file.read_text().startswith(before)
    assert file.read_text().count("\n") == 2 * (4 * 2 + 2)
    assert main(["bench", "bench.yaml", "--resume", "prompt_tokens=11", "batch=[1]", "repetitions=1"]) == 0
    assert file.read_text().count("\n") == 2 * (4 * 2 + 2) + 4  # the contexts have no prompts


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "changed",
    ["rollout.exact=false", "rollout.kv_cache_gb=1", "seed=1", "length=[24, 41]", "prompt_tokens=9", "batch=[1, 6]"],
)
@pytest.mark.few(2)
def test_results_of_other_settings_are_not_reused(changed: str, bench: Any) -> None:
    """A setting that may change times changes the keys of all points that are sampled. Control: `progress` does not."""

    def keys(*overrides: str) -> list[str]:
        (one,) = prepare_benches(bench("contexts=null", *overrides))
        return [point.key for point in one.points]

    assert keys() == keys("rollout.progress=true")
    assert {*keys()}.isdisjoint(keys(changed))


@pytest.mark.usefixtures("quick")
def test_a_second_process_is_refused_and_changes_no_file(
    bench: Any, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    """While another process measures, its folder is refused, with --resume and with --overwrite. Control: afterwards
    the command runs.
    """
    small = ["contexts=null", "length=[12]", "sweep={}", "batch=[1]", "repetitions=1"]
    (workdir / "out").mkdir()
    code = (
        "import sys; from pathlib import Path; from rollout.evaluation.journal import Journal, point_key\n"
        "with Journal(Path('out/bench_runs.jsonl'), resume=True) as j, j.take(point_key('bench_runs.jsonl')):\n"
        "    print('holds', flush=True); sys.stdin.readline()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds\n"
        before = sorted(file.name for file in (workdir / "out").iterdir())
        for option in ("--resume", "--overwrite"):
            assert main(["bench", "bench.yaml", *small, option]) == 2
            assert "is in use by another process" in capsys.readouterr().err
        assert sorted(file.name for file in (workdir / "out").iterdir()) == before
        other.communicate("\n")
    assert main(["bench", "bench.yaml", *small, "--resume"]) == 0


def test_a_dry_run_says_what_is_left_out_and_how_long_the_rest_takes(
    bench: Any, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "bench.yaml", "--dry-run", "length=[24, 100000]", "contexts.length=[30, 200000]"]) == 0
    out = capsys.readouterr().out
    assert "measured at 24 tokens" in out
    assert out.count("the model's context length is") == 2
    assert "10 points, 2 runs each" in out
    assert not (workdir / "out").exists()


@pytest.mark.usefixtures("quick")
def test_points_that_take_longest_are_left_out_until_the_rest_fits(bench: Any) -> None:
    (whole,) = prepare_benches(bench())
    total = sum(point.seconds for point in whole.points)
    (some,) = prepare_benches(bench(f"minutes={total / 60 / 2}"))
    assert sum(point.seconds for point in some.points) <= total / 2
    kept = {point.group for point in some.points}
    dropped = {point.group for point in whole.points} - kept
    assert len(some.left_out) == len(dropped) > 0
    of_kept = [str(point) for point in whole.points if point.group in kept]
    assert [str(point) for point in some.points] == of_kept  # all caches of a batch size stay, or none
    assert some.prepared.recipe.rollout.max_batch == max(some.prepared.recipe.batch)
    with pytest.raises(UserError, match="minutes: the smallest part takes about"):
        prepare_benches(bench("minutes=1e-6"))


@pytest.mark.usefixtures("quick")
def test_a_point_that_exceeds_the_memory_is_a_row(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.hf import HFEngine

    sample = HFEngine.generate

    def failing(self: Any, prompts: Any, *given: Any) -> Any:
        if len(prompts) == 5 and self.policy.name == "full":
            raise torch.OutOfMemoryError
        return sample(self, prompts, *given)

    monkeypatch.setattr(HFEngine, "generate", failing)
    recipe = bench("contexts=null", "length=[14]", "sweep={}", "cache={policy: streaming, budget: 12}", "repetitions=1")
    content = command.measure(recipe, prepare_benches(recipe))
    failed = [row for row in content["rows"] if "failure" in row]
    assert [(row["policy"], row["batch"]) for row in failed] == [("full", 5)]
    assert all("ratio_to_full" not in row for row in content["rows"] if row["batch"] == 5)
    assert len(timing_tables(content)) == 2


@pytest.mark.usefixtures("quick")
def test_random_weights_need_only_a_shape(bench: Any, workdir: Path) -> None:
    """A model on no disk is timed with another shape, also under learned policies. The global generator is unchanged.

    Control: without random weights the model is missing.
    """
    overrides = [
        "model=Qwen/Qwen3-8B", "random_weights=true", "contexts=null", "batch=[2]", "repetitions=1",
        "shape={num_hidden_layers: 2, hidden_size: 32, intermediate_size: 32, vocab_size: 64, head_dim: 16, "
        "num_attention_heads: 2, num_key_value_heads: 1}",
        "sweep.policy=[{policy: kvpop, window: 4, scorer: {name: mlp}}, {policy: dms, window: 4}, streaming]",
        "sweep.cache={budget: [16]}",
    ]  # fmt: skip
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    recipe = bench(*overrides)
    content = command.measure(recipe, prepare_benches(recipe))
    assert torch.rand(1) == expected
    assert [row["policy"] for row in content["rows"][::2]] == ["full", "kvpop", "dms", "streaming"]
    with pytest.raises(UserError, match="there is no directory Qwen/Qwen3-8B"):
        prepare_benches(bench(*overrides[:1], *overrides[2:-3]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["length=[]", "contexts=null"], "length: name at least one length, or set contexts"),
        (["length=[10]"], "length: 10 leaves no token to sample after a prompt of 10 tokens"),
        (["batch=[2, 2]"], "batch: a number is named twice"),
        (["random_weights=true", "shape={num_hidden_layers: 0}"], "shape: num_hidden_layers is 0"),
        (["batch=[]"], "batch: name at least one batch size"),
        (["batch=[0]"], "batch[0]: expected a whole number >= 1"),
        (["shape={num_hidden_layers: 3}"], "shape: only a model with random weights can have another shape"),
        (["random_weights=true", "shape={layers: 3}"], "shape.layers: unknown key"),
        (["random_weights=true", "shape={num_hidden_layers: many}"], "shape: "),
        (["random_weights=true", "shape={num_attention_heads: 3}"], "shape"),
        (["length=[100000]", "contexts=null"], "length: the model's context length is"),
        (["contexts.compactions=[{first: 30}]"], "contexts.length: the context has 30 tokens"),
        (["plain_vllm=true"], "plain_vllm: needs the engine vllm"),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel: "),
        (["cache.policy=gvk"], "unknown cache policy 'gvk'"),
        (["minutes=0"], "minutes: expected a number > 0"),
        (["no_such_key=1"], "no_such_key: unknown key"),
        (["model=nowhere"], "model: "),
        (["output_dir=bench.yaml"], "output_dir: "),
    ],
)
@pytest.mark.usefixtures("quick")
def test_mistakes_are_one_line(
    overrides: list[str], message: str, bench: Any, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "bench.yaml", *overrides]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


# ---- recipes of other kinds -----------------------------------------------------------------------------------------


def test_other_recipes_are_timed_with_their_own_caches(workdir: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = load_bench("grpo.yaml", ["repetitions=1"])
    assert isinstance(recipe, BenchRecipe)
    assert [point and point.name for point in recipe.points] == ["full", "streaming"]
    assert recipe.length == [recipe.prompt_tokens + 24]
    assert recipe.output_dir.endswith("out_bench")
    recipe = load_bench("eval.yaml", [])
    assert isinstance(recipe, BenchRecipe)
    assert {point and point.name for point in recipe.points} == {"full", "streaming"}
    assert main(["bench", "sft.yaml"]) == 2
    assert "has nothing to time" in capsys.readouterr().err


def test_a_recipe_of_contexts_is_timed_by_its_compactions() -> None:
    recipe = make_recipe(timing_of(load_recipe("eval/quality")))
    assert isinstance(recipe, BenchRecipe)
    assert recipe.contexts is not None
    assert recipe.contexts.points() == load_recipe("eval/quality").prompt_caches()
    assert recipe.length == []


@pytest.mark.parametrize("name", ["qwen2.5-1.5b/grpo", "eval/gkv_budgets", "eval/pg19"])
def test_shipped_recipes_can_be_timed(name: str) -> None:
    """Every key of the recipe that is made is valid, and its caches are those of the recipe, and the full cache."""
    overrides = ["text=book.txt"] if name == "eval/pg19" else []
    recipe = make_recipe(timing_of(load_recipe(name, overrides)))
    assert isinstance(recipe, BenchRecipe)
    own = [point for point in load_recipe(name, overrides).caches() if point is not None]
    assert all(point in recipe.points for point in own)


# ---- small functions ------------------------------------------------------------------------------------------------


def test_spread_and_duration_by_hand() -> None:
    assert spread([2.0, 4.0, 3.0]) == pytest.approx(2 / 3)
    assert spread([2.0]) is None
    assert [duration(seconds) for seconds in (5, 90, 7200)] == ["5 seconds", "1.5 minutes", "2.0 hours"]


def test_a_picture_is_drawn_without_rows(tmp_path: Path) -> None:
    content = {
        "rows": [], "contexts": [], "machine": {"device": "d", "threads": "1"},
        "recipe": {"model": "m", "random_weights": False, "shape": {}, "parts": False},
    }  # fmt: skip
    assert plot_timing(content, tmp_path / "empty.png").is_file()
    assert timing_tables(content) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "twelve_layers"])
def test_shipped_benches_run_in_vllm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both small recipes run in vLLM, with vLLM without the plugin beside it; eviction takes fewer blocks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    overrides = [
        "rollout.engine=vllm", "parts=false", "plain_vllm=true", "contexts=null", f"output_dir={tmp_path / 'out'}",
        "sweep.policy=[streaming]", "batch=[4]", "repetitions=1", "length=[160]", "rollout.progress=false",
    ]  # fmt: skip
    assert main(["bench", f"bench/{name}", *overrides]) == 0
    rows = json.loads((tmp_path / "out/bench.json").read_text())["rows"]
    assert [row["engine"] for row in rows] == ["vllm", "vllm", "vllm without the plugin"]
    full, streaming, plain = rows
    assert full["cache_bytes"] == plain["cache_bytes"]
    if name == "quickstart":
        assert streaming["cache_bytes"] < full["cache_bytes"]
    assert all(row["at_once"] == 4 for row in rows)
