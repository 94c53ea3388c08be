"""An evaluation whose `prompt_cache` has `policy: full` reports the log-perplexity of the full cache's answers: the
mean negative log-likelihood of these answers after each compacted context (Attention Matching, appendix F.2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from interrupting import interrupted_after

from rollout import make_engine
from rollout.context import PromptCacheConfig
from rollout.hf import HFEngine
from rollout.measure.contexts import Questions, compacted_contexts
from sparse_rl.analysis.tables import accuracy_table
from sparse_rl.commands.eval import evaluate
from sparse_rl.commands.main import main
from sparse_rl.data.tokens import SplitPrompt
from sparse_rl.models.load import load_tokenizer
from sparse_rl.recipe import EvalRecipe, make_recipe

QUICKSTART = str(Path(__file__).parents[1] / "recipes/quickstart/model")
CONTEXTS = ("a1b2c3d4" * 5, "e5f6a7" * 5)
FULL, AM, EVICT = {"policy": "full"}, {"ratio": 0.3}, {"policy": "evict", "ratio": [0.1, 0.5]}
BLOCKS: list[dict[str, Any]] = [AM, EVICT, FULL]
TIMES = ("seconds", "tokens_per_second")


@pytest.fixture
def recipe_of(tmp_path, monkeypatch):
    """recipe_of(output_dir, prompt_cache, **keys) -> a recipe: five questions about two alternating contexts."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": CONTEXTS[i % 2], "prompt": f"Q{c}?", "answer": "1"} for i, c in enumerate("abcde")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(output_dir: str = "out", prompt_cache: Any = BLOCKS, **keys: Any) -> EvalRecipe:
        mapping = {
            "kind": "eval", "model": QUICKSTART, "output_dir": str(tmp_path / output_dir), "dtype": "float32",
            "tasks": {"one": {"path": str(tmp_path / "rows.jsonl"), "columns": {"context": "text"}}},
            "accuracy": "boxed", "samples": 2, "max_completion_length": 12, "top_p": 1.0,
            "rollout": {"engine": "hf", "max_batch": 4, "progress": False}, "prompt_cache": prompt_cache,
        }  # fmt: skip
        return make_recipe({**mapping, **keys}).expect(EvalRecipe)

    return make


@pytest.fixture
def work(monkeypatch):
    """Numbers of sequences that engines have sampled ("generate") and scored ("logprobs")."""
    counts = {"generate": 0, "logprobs": 0}
    for name in counts:
        monkeypatch.setattr(HFEngine, name, counting(name, getattr(HFEngine, name), counts))
    return counts


def counting(name: str, method: Callable, counts: dict[str, int]) -> Callable:
    def counted(engine: HFEngine, *arguments: Any, **options: Any) -> Any:
        results = method(engine, *arguments, **options)
        counts[name] += len(results)
        return results

    return counted


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the completions that an evaluation wrote, in the order of their units."""
    lines = [json.loads(line) for line in (folder / "eval_completions.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["point"], line["unit"]))


def results(folder: Path) -> Any:
    """Return the rows of an evaluation without times."""

    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_times(item) for key, item in value.items() if key not in TIMES}
        return [without_times(item) for item in value] if isinstance(value, list) else value

    return without_times(json.loads((folder / "eval.json").read_text())["rows"])


def test_rows_equal_a_loop_over_the_engine(recipe_of, tmp_path):
    """Control: with the answers of other questions it does not."""
    rows = evaluate(recipe_of(), progress=False)
    assert [row.policy for row in rows] == ["am", "evict", "evict", "full"]
    answers = {
        (line["problem"], line["sample"]): line["completion_ids"]
        for line in lines_of(tmp_path / "out")
        if line["policy"] == "full"
    }
    assert len(answers) == 5 * 2
    assert all("completion_ids" not in line for line in lines_of(tmp_path / "out") if line["policy"] != "full")
    tokenizer, engine = load_tokenizer(QUICKSTART), make_engine("hf", model=QUICKSTART, policy="full")
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    settings = [AM, {**EVICT, "ratio": 0.1}, {**EVICT, "ratio": 0.5}, FULL]
    for row, block in zip(rows, settings, strict=True):
        nlls: dict[int, list[float]] = {problem: [] for problem in range(5)}
        others = []
        for number, text in enumerate(CONTEXTS):
            context = engine.compact(encode(text), PromptCacheConfig(**block, first=0))
            for problem in range(number, 5, 2):
                for sample in range(2):
                    question = encode(f"Q{'abcde'[problem]}?")
                    for ids, target in (
                        (answers[problem, sample], nlls[problem]),
                        (answers[(problem + 1) % 5, sample], others),
                    ):
                        (simulated,) = engine.simulate([question], [ids], context=context)
                        target.append(-mean(simulated.model_logprobs))
        means = [mean(values) for values in nlls.values()]
        assert row.log_perplexity == pytest.approx(mean(means), abs=1e-5)
        assert row.log_perplexity_error == pytest.approx(stdev(means) / 5**0.5, abs=1e-5)
        assert row.log_perplexity != pytest.approx(mean(others), abs=1e-2)


def test_a_summary_gives_no_references(recipe_of, tmp_path):
    """A summary that is kept whole has `policy: full`, too."""
    summary = {"policy": "full", "summary": "plain", "summary_tokens": 5}
    rows = evaluate(recipe_of("out", [summary, FULL]), progress=False)
    alone = evaluate(recipe_of("alone", [FULL]), progress=False)
    assert [row.parameters.get("summary") for row in rows] == ["plain", None]
    assert rows[1].log_perplexity == alone[0].log_perplexity
    assert rows[0].log_perplexity != pytest.approx(rows[1].log_perplexity, abs=1e-2)
    with_ids = {line["point"] for line in lines_of(tmp_path / "out") if "completion_ids" in line}
    assert with_ids == {line["point"] for line in lines_of(tmp_path / "alone")}
    (without,) = evaluate(recipe_of("without", [summary]), progress=False)
    assert without.log_perplexity is None


def test_the_full_row_is_the_loss_of_its_own_answers(recipe_of, tmp_path):
    """At another temperature it is still computed at temperature 1, so the sampled log-probs are a control."""
    for name, temperature in (("out", 1.0), ("other", 0.5)):
        (full,) = evaluate(recipe_of(name, FULL, temperature=temperature), progress=False)
        sampled = -mean(line["mean_logprob"] for line in lines_of(tmp_path / name))
        assert (full.log_perplexity == pytest.approx(sampled, abs=1e-5)) == (temperature == 1.0)
        assert full.log_perplexity is not None
        assert full.log_perplexity_error is not None


def test_without_a_full_cache_no_answer_is_scored(recipe_of, tmp_path, work):
    rows = evaluate(recipe_of("without", [AM, EVICT]), progress=False)
    assert {row.log_perplexity for row in rows} == {row.log_perplexity_error for row in rows} == {None}
    assert work["logprobs"] == 0
    assert "log-\nperplexity" not in [column.header for column in accuracy_table(rows).columns]
    scored = evaluate(recipe_of(), progress=False)
    assert work["logprobs"] == 4 * 5 * 2
    texts = [
        [(line["policy"], line["parameters"]["ratio"], line["unit"], line["completion"])
         for line in lines_of(tmp_path / name) if line["policy"] != "full"]
        for name in ("without", "out")
    ]  # fmt: skip
    assert sorted(texts[0]) == sorted(texts[1])
    assert [row.accuracy for row in rows] == [row.accuracy for row in scored[:-1]]


@pytest.mark.parametrize("writes", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 5, 11))])
@pytest.mark.few(1)
def test_an_interrupted_evaluation_has_the_same_rows(recipe_of, tmp_path, work, writes):
    evaluate(recipe_of("whole"), progress=False)
    in_all = dict(work)
    work.update(generate=0, logprobs=0)
    with interrupted_after(writes):
        evaluate(recipe_of(), progress=False)
    evaluate(recipe_of(), progress=False, resume=True)
    assert (
        in_all["logprobs"] <= work["logprobs"] <= in_all["logprobs"] + 4
    )  # and those of the part that was not written
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    scores = [[(line["unit"], line["reference_nll"]) for line in lines_of(tmp_path / n)] for n in ("out", "whole")]
    assert scores[0] == scores[1]


def test_a_compaction_added_later_is_scored_against_the_same_answers(recipe_of, tmp_path, work):
    """Control: other answers of the full cache in the journal give another log-perplexity."""
    evaluate(recipe_of("whole"), progress=False)
    evaluate(recipe_of("out", [AM, FULL]), progress=False)
    file = tmp_path / "out" / "eval_completions.jsonl"
    before = file.read_text()
    work.update(generate=0, logprobs=0)
    evaluate(recipe_of(), progress=False, resume=True)
    assert work == {"generate": 2 * 5 * 2, "logprobs": 2 * 5 * 2}
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    changed = [json.loads(line) for line in before.splitlines()]
    for line in changed:
        if line["policy"] == "full":
            line["completion_ids"] = line["completion_ids"][::-1]
    file.write_text("".join(json.dumps(line) + "\n" for line in changed))
    evaluate(recipe_of(), progress=False, resume=True)
    ours, whole = results(tmp_path / "out"), results(tmp_path / "whole")
    assert [row["accuracy"] for row in ours] == [row["accuracy"] for row in whole]
    assert ours[0]["log_perplexity"] == whole[0]["log_perplexity"]  # its lines were there before
    assert all(a["log_perplexity"] > b["log_perplexity"] + 0.1 for a, b in zip(ours[1:3], whole[1:3], strict=True))


def test_a_full_cache_added_later_scores_all_compactions(recipe_of, tmp_path):
    evaluate(recipe_of("whole"), progress=False)
    evaluate(recipe_of("out", [AM, EVICT]), progress=False)
    evaluate(recipe_of(), progress=False, resume=True)
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_the_full_cache_comes_first_for_each_context():
    """Also beside parts that are read alone, which cannot share its reading."""
    engine = make_engine("hf", model=QUICKSTART, policy="full")
    questions = Questions([SplitPrompt([5, *range(4, 34)], 1, [7]), SplitPrompt([5, *range(3, 34)], 1, [7])], [])
    am, text = PromptCacheConfig(first=0), PromptCacheConfig(first=0, chunking="text", chunk=20)
    full, none = replace(am, policy="full"), replace(am, policy="none")
    context_queries = replace(am, queries=["context"])
    for caches in (
        [am, full], [none, full], [full, am], [text, full], [text, am, full], [context_queries, text, none, full, am],
        [am, replace(full, last=2), full], [text, replace(full, chunking="text")],
    ):  # fmt: skip
        order = [item.cache for item in compacted_contexts(engine, questions, caches)]
        whole = next(i for i, cache in enumerate(caches) if cache.policy == "full")
        assert order[0] == order[len(caches)] == whole
        assert sorted(order[: len(caches)]) == sorted(order[len(caches) :]) == list(range(len(caches)))


def test_parts_that_are_read_alone_are_scored_too(recipe_of, work):
    blocks = [{"chunking": "text", "chunk": 20, "ratio": [0.1, 0.9]}, FULL]
    few, many, full = evaluate(recipe_of("out", blocks, samples=1, temperature=0.0), progress=False)
    assert full.log_perplexity < many.log_perplexity < few.log_perplexity
    assert work == {"generate": 15, "logprobs": 15}


def test_the_command_prints_and_draws_log_perplexity(recipe_of, tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(recipe_of().as_yaml())
    assert main(["eval", "e.yaml"]) == 0
    rows = results(tmp_path / "out")
    output = capsys.readouterr().out
    assert "log-perplexity of the full cache's answers: nats per token" in " ".join(output.split())
    assert all(f"{row['log_perplexity']:.4f} ± {row['log_perplexity_error']:.4f}" in output for row in rows)
    for words, name in (
        (["--metric", "log_perplexity"], "eval_log_perplexity.png"),
        (["--metric", "log_perplexity", "--axis", "seconds"], "eval_log_perplexity_by_seconds.png"),
        (["--axis", "seconds"], "eval_by_seconds.png"),
        (["--axis", "log_perplexity"], "eval_by_log_perplexity.png"),
        ([], "eval.png"),
    ):
        assert main(["plot", "out", *words]) == 0
        assert capsys.readouterr().out.strip().endswith(name)
        assert (tmp_path / "out" / name).stat().st_size
    assert main(["eval", "e.yaml", "--overwrite", "prompt_cache={ratio: [0.1, 0.2]}"]) == 0
    assert "perplexity" not in capsys.readouterr().out
    assert main(["plot", "out", "--metric", "log_perplexity"]) == 2
    assert "add policy: full to the recipe's prompt_cache" in capsys.readouterr().err


@pytest.mark.slow
def test_vllm_scores_the_same_answers(recipe_of, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = evaluate(recipe_of(), progress=False)
    on_vllm = {"rollout": {"engine": "vllm", "kv_cache_gb": 0.05, "max_batch": 4, "progress": False}}
    for row, theirs in zip(rows, evaluate(recipe_of("vllm", **on_vllm), progress=False), strict=True):
        assert row.log_perplexity == pytest.approx(theirs.log_perplexity, abs=1e-5)
        assert row.log_perplexity_error == pytest.approx(theirs.log_perplexity_error, abs=1e-5)
