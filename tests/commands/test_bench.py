"""`sparse-rl bench` times sampling and compactions. The tests cover the counts (tokens, steps, compactions, bytes), the
durations of parts by a clock whose time is known, output and errors. No test depends on a real duration.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

import pytest
import torch

from rollout import SamplingConfig, make_engine
from rollout.measure import timing
from rollout.measure.timing import time_sampling
from sparse_rl.analysis.timing import labels, plot_timing, timing_tables
from sparse_rl.clock import Clock, part
from sparse_rl.commands import bench as command
from sparse_rl.commands.bench import load_bench, timing_of
from sparse_rl.commands.bench_runs import prepare_benches, spread
from sparse_rl.commands.main import main
from sparse_rl.errors import UserError
from sparse_rl.policies import make_policy
from sparse_rl.policies.cache import cache_bytes
from sparse_rl.recipe import BenchRecipe, load_recipe, make_recipe
from sparse_rl.trace.record import trace_bytes


@pytest.fixture
def bench(workdir):
    """bench(*overrides) returns the small recipe bench.yaml."""
    return lambda *overrides: load_recipe("bench.yaml", list(overrides)).expect(BenchRecipe)


def ticking() -> Callable[[], float]:
    """Return a clock whose time is 0, 1, 2, ... at successive calls."""
    ticks = count()
    return lambda: float(next(ticks))


def test_parts_are_recorded_only_while_a_clock_runs():
    with part("before"):
        pass
    with Clock(now=ticking()) as clock, part("within"):
        pass
    with part("after"):
        pass
    assert clock.parts == [("within", 0, 1.0)]


def test_a_part_within_a_part_and_details_are_not_recorded():
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


def test_a_part_ends_when_its_block_raises():
    with Clock(now=ticking()) as clock:
        with pytest.raises(ValueError, match="no"), part("failing"):
            raise ValueError("no")
        with part("next"):
            pass
    assert [name for name, *_ in clock.parts] == ["failing", "next"]


def test_times_of_lengths_by_hand(monkeypatch):
    """Two sequences with prompts of 4 tokens. The clock ticks at the start (0), at the first step (1), twice in the
    compaction of the second step (2, 3), at the second step (4), at the third (5) and at the end.
    """
    monkeypatch.setattr(timing, "now", ticking())

    def sample() -> None:
        clock = Clock.running
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


def test_reading_the_prompts_is_not_decoding(monkeypatch):
    monkeypatch.setattr(timing, "now", ticking())

    def sample() -> None:
        clock = Clock.running
        clock.step(1, 0, 2, prefilled=False)
        with part("compaction"):  # at the end of the second prompt
            pass
        for tokens in (2, 2, 2, 1):
            clock.step(tokens, 0, 2)

    (measured,) = time_sampling(sample, 2, 4, [8])
    assert (measured.seconds, measured.decode_seconds, measured.decode_tokens) == (7.0, 3.0, 5)
    assert (measured.parts, measured.compactions) == ({}, 0)


def test_a_sequence_that_waits_is_seen(monkeypatch):
    """The second sequence is read when the first one ends: one is sampled at a time."""
    monkeypatch.setattr(timing, "now", ticking())

    def sample() -> None:
        clock = Clock.running
        for prefilled in (False, False, False, True):
            clock.step(1, 0, 1, prefilled=prefilled)

    (measured,) = time_sampling(sample, 2, 4, [6])
    assert (measured.decode_seconds, measured.decode_tokens, measured.at_once) == (3.0, 3, 1.0)


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
def test_the_engine_reports_tokens_steps_compactions_and_bytes(cache, model):
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


def test_parts_of_a_clustered_step_are_measured_within_the_step(model):
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


def test_memory_is_that_of_the_papers_appendix():
    """Keys and values under G-KV take (b + s) / length of the full cache's memory (G-KV, appendix G): savings of 96.1,
    92.9 and 86.7 % at 16,384 tokens. Its sizes are twice the paper's, which counts 2 of the 4 kv heads.
    """
    shape, batch, length = (28, 4, 128), 128, 16_384
    full = cache_bytes(batch * (length - 1), *shape, 2)
    assert round(full / 2**30) == 112
    sizes = []
    for budget in (512, 1024, 2048):
        schedule = make_policy("gkv", budget=budget, period=128, window=16).schedule
        sizes.append(cache_bytes(batch * schedule.most_held(128, length - 1), *shape, 2))
    assert [round(size / 2**30, 2) for size in sizes] == [4.38, 7.88, 14.88]
    assert [round(100 * (1 - size / full), 1) for size in sizes] == [96.1, 93.0, 86.7]
    assert trace_bytes(28, 4, length, batch) == 4 * 128 * 28 * 4 * 16_384


def test_a_bench_writes_rows_tables_and_a_picture(bench, workdir, capsys):
    assert main(["bench", "bench.yaml", "parts=true"]) == 0
    content = json.loads((workdir / "out/bench.json").read_text())
    rows, contexts = content["rows"], content["contexts"]
    names = ["full", "streaming 16", "gkv 16, alpha 0.8", "gkv 16, alpha 0.0"]
    assert labels(rows) == [name for name in names for _ in range(4)]
    assert [(row["batch"], row["length"]) for row in rows[:4]] == [(1, 24), (1, 40), (5, 24), (5, 40)]
    for row in rows:
        assert row["runs"] == 2
        assert row["tokens_per_second"] == median(row["speeds"]) > 0
        assert 0 <= row["spread"] < 2
        assert ("compaction_ms" in row) == (row["policy"] != "full")
        assert (row["ratio_to_full"] == 1) == (row["policy"] == "full")
        assert sum(row["parts_us"].values()) < 1e3 * row["step_ms"]
    assert [row["entries"] for row in contexts] == [6, 6]  # 0.2 of 30 tokens
    assert all({"prefill", "queries", "compaction", "selection"} <= row["seconds"].keys() for row in contexts)
    assert "fit of values" in contexts[0]["seconds"]
    assert "fit of values" not in contexts[1]["seconds"]  # evict fits nothing
    out = capsys.readouterr().out
    for words in ("Sampling on", "parts of a decode step", "Seconds of a context's compaction"):
        assert words in out, words
    assert (workdir / "out/bench.png").read_bytes()[:4] == b"\x89PNG"
    assert content["machine"]["torch"] == torch.__version__
    assert not list(workdir.glob("out/*.tmp"))

    assert main(["plot", "out"]) == 0
    assert "Sampling on" in capsys.readouterr().out


def test_an_interrupted_bench_keeps_its_rows(bench, workdir, monkeypatch, capsys):
    small = ["bench", "bench.yaml", "contexts=null", "length=[12]", "sweep={}", "repetitions=1"]
    written = command.replace_text

    def interrupting(*given: Any) -> Any:
        written(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "replace_text", interrupting)
    assert main(small) == 130
    monkeypatch.setattr(command, "replace_text", written)
    before = (workdir / "out/bench.json").read_text()
    assert [row["batch"] for row in json.loads(before)["rows"]] == [1]
    assert main(small) == 2
    assert "out already holds bench.json; add --overwrite to replace it" in capsys.readouterr().err
    assert (workdir / "out/bench.json").read_text() == before
    assert main([*small, "--overwrite"]) == 0
    assert [row["batch"] for row in json.loads((workdir / "out/bench.json").read_text())["rows"]] == [1, 5]


def test_a_dry_run_measures_nothing(bench, workdir, capsys):
    assert main(["bench", "bench.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "10 points, 2 runs each" in out
    assert not (workdir / "out").exists()


def test_a_point_that_exceeds_the_memory_is_a_row(bench, monkeypatch):
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
    assert len(timing_tables(content)) == 1


def test_random_weights_need_only_a_shape(bench, workdir):
    """Control: without random weights the model is missing."""
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


def test_other_recipes_are_timed_with_their_own_caches(workdir, capsys):
    recipe = load_bench("grpo.yaml", ["repetitions=1"])
    assert [point and point.name for point in recipe.points] == ["full", "streaming"]
    assert recipe.length == [recipe.prompt_tokens + 24]
    assert recipe.output_dir.endswith("out_bench")
    recipe = load_bench("eval.yaml", [])
    assert {point and point.name for point in recipe.points} == {"full", "streaming"}
    assert main(["bench", "sft.yaml"]) == 2
    assert "has nothing to time" in capsys.readouterr().err


def test_a_recipe_of_contexts_is_timed_by_its_compactions():
    recipe = make_recipe(timing_of(load_recipe("eval/quality")))
    assert recipe.contexts.points() == load_recipe("eval/quality").prompt_caches()
    assert recipe.length == []


@pytest.mark.parametrize("name", ["qwen2.5-1.5b/grpo", "eval/gkv_budgets", "eval/pg19"])
def test_shipped_recipes_can_be_timed(name):
    overrides = ["text=book.txt"] if name == "eval/pg19" else []
    recipe = make_recipe(timing_of(load_recipe(name, overrides)))
    own = [point for point in load_recipe(name, overrides).caches() if point is not None]
    assert all(point in recipe.points for point in own)


def test_spread_by_hand():
    assert spread([2.0, 4.0, 3.0]) == pytest.approx(2 / 3)
    assert spread([2.0]) is None


def test_a_picture_is_drawn_without_rows(tmp_path):
    content = {
        "rows": [], "contexts": [], "machine": {"device": "d", "threads": "1"},
        "recipe": {"model": "m", "random_weights": False, "shape": {}, "parts": False},
    }  # fmt: skip
    assert plot_timing(content, tmp_path / "empty.png").is_file()
    assert timing_tables(content) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "twelve_layers"])
def test_shipped_benches_run_in_vllm(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    overrides = [
        "rollout.engine=vllm", "parts=false", "contexts=null", f"output_dir={tmp_path / 'out'}",
        "sweep.policy=[streaming]", "batch=[4]", "repetitions=1", "length=[160]", "rollout.progress=false",
    ]  # fmt: skip
    assert main(["bench", f"bench/{name}", *overrides]) == 0
    rows = json.loads((tmp_path / "out/bench.json").read_text())["rows"]
    full, streaming = rows
    assert [row["engine"] for row in rows] == ["vllm", "vllm"]
    if name == "quickstart":
        assert streaming["cache_bytes"] < full["cache_bytes"]
    assert all(row["at_once"] == 4 for row in rows)
