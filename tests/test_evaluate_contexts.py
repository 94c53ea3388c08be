"""With the recipe's key `prompt_cache`, `evaluate` reads each long context once, compacts its cache, and answers all
questions about the context from the compacted cache. The rows equal a plain loop over the engine, and without evictions
the answers equal those of the full prompt. Mistakes in recipes are refused in one line.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from datasets import Dataset

from rollout import SamplingConfig, make_engine
from rollout.context import PromptCacheConfig
from rollout.context.reader import ContextPrompts
from rollout.hf import HFEngine
from rollout.measure.contexts import COMPACTION, Questions, compacted_contexts
from sparse_rl.analysis.tables import accuracy_table, cache_labels
from sparse_rl.commands.eval import evaluate
from sparse_rl.commands.main import main
from sparse_rl.commands.rollout import sample
from sparse_rl.data.config import DataConfig
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.data.tokens import SplitPrompt, prompt_ids
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_tokenizer
from sparse_rl.recipe import EvalRecipe, make_recipe
from sparse_rl.recipe.sampling import context_questions
from sparse_rl.trace import load_traces

QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart/model"
CHAT = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>;{% endif %}"
CONTEXTS = ("a1b2c3d4" * 5, "e5f6g7" * 5)
REWARD = '''
def short(completions, **_):
    """Right where the text has no semicolon."""
    return [float(";" not in c[0]["content"]) for c in completions]
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The quickstart's model, as a chat model."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(QUICKSTART, folder)
    tokenizer = RunningSum.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def recipe_of(tmp_path, model, monkeypatch):
    """recipe_of(prompt_cache, **keys) -> a recipe: five questions about two alternating contexts; greedy answers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [{"text": CONTEXTS[i % 2], "prompt": f"Q{c}?", "answer": "1"} for i, c in enumerate("abcde")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(prompt_cache: Any = None, **keys: Any) -> EvalRecipe:
        mapping = {
            "kind": "eval", "model": model, "output_dir": str(tmp_path / "out"), "dtype": "float32",
            "tasks": {"one": {"path": str(tmp_path / "rows.jsonl"), "columns": {"context": "text"}}},
            "accuracy": "mine.py:short", "samples": 1, "temperature": 0.0, "max_completion_length": 12,
            "rollout": {"engine": "hf"}, "prompt_cache": prompt_cache,
        }  # fmt: skip
        return make_recipe({**mapping, **keys}).expect(EvalRecipe)

    return make


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the completions that an evaluation wrote."""
    return [json.loads(line) for line in (folder / "eval_completions.jsonl").read_text().splitlines()]


@pytest.fixture
def studies(monkeypatch):
    """Record every read of a context as (tokens, kinds of reference queries)."""
    readings: list[tuple[int, list[str]]] = []
    study = HFEngine.study

    def counting(self: HFEngine, tokens: Any, config: PromptCacheConfig, *more: Any) -> Any:
        readings.append((len(tokens), config.queries))
        return study(self, tokens, config, *more)

    monkeypatch.setattr(HFEngine, "study", counting)
    return readings


def test_a_context_without_evictions_equals_the_full_prompt(recipe_of, tmp_path):
    """Control: a context of which hardly anything is kept ("none") gives other answers."""
    (whole,) = evaluate(recipe_of(), progress=False)
    answers = {line["problem"]: line["completion"] for line in lines_of(tmp_path / "out")}
    full, none = evaluate(recipe_of([{"policy": "full"}, {"policy": "none"}]), progress=False)
    results: dict[str, dict[int, str]] = {"full": {}, "none": {}}
    for line in lines_of(tmp_path / "out"):
        results[line["policy"]][line["problem"]] = line["completion"]
    assert results["full"] == answers
    assert results["none"] != answers
    assert (full.accuracy, full.retention, full.peak_entries) == (whole.accuracy, 1.0, whole.peak_entries)
    assert none.retention < 0.6
    assert none.peak_entries < 25
    assert cache_labels([full, none]) == ["full", "none"]
    assert full.parameters == {"first": 0, "last": 0}


def test_rows_equal_a_loop_over_the_engine(recipe_of, tmp_path, model):
    block = {"ratio": [0.1, 0.4], "queries": ["repeat", "self_study"], "study_tokens": 4, "study_samples": 1, "last": 2}
    recipe = recipe_of(block, samples=2, temperature=1.0)
    rows = evaluate(recipe, progress=False)
    assert [row.parameters["ratio"] for row in rows] == [0.1, 0.4]
    assert cache_labels(rows) == ["am 0.1", "am 0.4"]
    lines = lines_of(tmp_path / "out")
    tokenizer, engine = load_tokenizer(model), make_engine("hf", model=model, policy="full")
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompts = ContextPrompts.of(tokenizer, lambda text: encode(f"{text}]>;"))
    for row in rows:
        own_lines = [line for line in lines if line["parameters"] == row.parameters]
        retained, contexts = [], []
        for number, text in enumerate(CONTEXTS):
            config = PromptCacheConfig(**{**block, "ratio": row.parameters["ratio"]}, first=1)
            contexts.append(engine.compact(encode(f"[{text}"), config, prompts))
            questions = [encode(f"Q{c}?]>;") for c in "abcde"[number::2]]
            sampling = SamplingConfig(12, n=2, temperature=1.0, top_p=0.95, seed=42)
            rollouts = engine.generate(questions, sampling, context=contexts[-1])
            texts = tokenizer.batch_decode([r.completion_ids for r in rollouts], skip_special_tokens=True)
            asked = [line for line in own_lines if line["problem"] % 2 == number]
            assert [line["completion"] for line in asked] == texts
            assert [line["problem"] for line in asked] == [p for p in range(number, 5, 2) for _ in range(2)]
            retained += [r.trace.retention() for r in rollouts]
        assert row.accuracy == pytest.approx(mean(";" not in line["completion"] for line in own_lines))
        assert row.retention == pytest.approx(mean(retained))
        assert row.problems == 5
        assert row.samples == 2
        assert row.contexts.contexts == 2
        assert row.contexts.tokens == mean((41, 31))
        assert row.contexts.bytes == mean(c.nbytes for c in contexts) < row.contexts.whole_bytes
        assert set(row.contexts.seconds) == {"prefill", "queries", "compaction"}
    written = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert written["rows"][1]["contexts"]["bytes"] == rows[1].contexts.bytes
    assert make_recipe(written["recipe"]) == recipe
    cells = {str(column.header): list(column.cells) for column in accuracy_table(rows).columns}
    assert cells["cache"] == ["am 0.1", "am 0.4"]
    assert len(cells["context"]) == len(cells["made in"]) == 2


def test_caches_with_the_same_reading_settings_share_one_reading(recipe_of, studies):
    """These caches need two kinds of queries, so each context is read twice, and once more for on-policy queries."""
    blocks = [
        {"policy": "full", "queries": ["random"]},
        {"ratio": [0.1, 0.2], "select": "omp"},
        {"policy": "evict", "ratio": 0.1, "aggregate": "max", "pool": 3},
        {"queries": ["context"]},
        {"policy": "none"},
        {"on_policy": True, "ratio": [0.1, 0.2]},
    ]
    rows = evaluate(recipe_of(blocks), progress=False)
    assert studies == [(n, [kind]) for n in (41, 31) for kind in ("repeat", "context", "repeat")]
    assert [row.policy for row in rows] == ["full", "am", "am", "evict", "am", "none", "am", "am"]


def test_every_key_belongs_to_the_reading_or_to_the_compaction():
    names = {f.name for f in fields(PromptCacheConfig)}
    read = {"queries", "window", "first", "last", "most_queries", "study_samples", "study_tokens", "seed"}
    read |= {"on_policy", "chunking", "summary", "summary_tokens"}
    # a new key must be in exactly one of the two sets
    assert read | COMPACTION == names
    assert not read & COMPACTION


def test_requests_about_a_context_are_answered_without_thinking(model):
    """Also if the task lets the model think: then the template of this test ends with "a", else with "b"."""
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{{ messages[0].content }}{{ 'b' if enable_thinking is false else 'a' }}"
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "1=2;Q?"}], "context": "1=2;"}])
    for thinking, end in ((True, "a"), (None, "a"), (False, "b")):
        questions = context_questions(rows, tokenizer, DataConfig(path="x.jsonl", thinking=thinking))
        assert tokenizer.decode(questions.prompts[0].rest)[-1] == end
        for request in (questions.about.repeat, questions.about.questions, *questions.about.requests):
            assert tokenizer.decode(request)[-1] == "b"


ABOUT = ContextPrompts()


def test_contexts_are_compacted_in_order(model: str) -> None:
    """Each context with each setting, and the seconds of each compaction are measured separately."""
    made: list[str] = []
    questions = Questions(
        [SplitPrompt([5, *range(6, 40)], 1, [7]), SplitPrompt([5, *range(7, 40)], 1, [7])], ContextPrompts()
    )
    caches = [PromptCacheConfig(first=0, ratio=ratio) for ratio in (0.1, 0.5)]
    engine = make_engine("hf", model=model, policy="full")
    for compacted in compacted_contexts(engine, questions, caches):
        entries = len(compacted.context.layers[0].keys[0, 0])
        made.append(f"{compacted.cache} {compacted.problems} {entries}")  # cache, its problems, kept entries
        assert compacted.costs.seconds["compaction"] > 0
    assert made == ["0 [0] 4", "1 [0] 18", "0 [1] 4", "1 [1] 17"]


def test_an_answer_can_be_forced_after_a_context(recipe_of, tmp_path):
    """With `forced_answer`, completions that would exceed the limit contain the forced text."""
    (row,) = evaluate(recipe_of({}, forced_answer={"text": "=[5]=", "tokens": 3}, samples=2), progress=False)
    assert row.forced > 0
    assert any("=[5]=" in line["completion"] for line in lines_of(tmp_path / "out"))


@pytest.mark.parametrize(("policy", "queries"), [("am", "repeat"), ("am", "context"), ("evict", "repeat")])
def test_rollouts_after_a_context_are_saved_with_their_traces(policy, queries, recipe_of, tmp_path, model, capsys):
    """`verify` can replay plain evictions, and fits to queries of the context's own tokens, but no other fits."""
    recipe = recipe_of(
        [{"policy": policy, "ratio": 0.2, "queries": [queries]}, {"policy": "full"}], samples=2, temperature=1
    )
    outputs = sample(recipe, tmp_path / "kept", problems=3)
    lines = [json.loads(line) for line in (tmp_path / "kept" / "completions.jsonl").read_text().splitlines()]
    traces = [t for file in sorted((tmp_path / "kept").glob("traces-*")) for t in load_traces(file)]
    assert len(outputs) == len(lines) == len(traces) == 6
    tokenizer = load_tokenizer(model)
    asked = [[{"role": "user", "content": f"{CONTEXTS[i % 2]}Q{c}?"}] for i, c in enumerate("abc")]
    assert [line["prompt"] for line in lines] == [asked[i] for i in (0, 0, 2, 2, 1, 1)]
    for line, trace in zip(lines, traces, strict=True):
        context = line["prompt"][0]["content"][:-3]
        assert line["prompt_ids"] == prompt_ids(line["prompt"], tokenizer, None, context)
        retained_counts = (trace.evict_at[..., : len(context) + 1] > len(context) + 1).sum(-1)
        assert bool((retained_counts == 1 + round(0.2 * len(context))).all())
        assert len(trace) > len(line["prompt_ids"])
        assert ("compacted_at" in trace.further) is (policy == "am")
        assert ("compacted_queries" in trace.further) is (policy == "am" and queries == "context")
    capsys.readouterr()
    if policy == "am" and queries == "repeat":  # no file stores biases, values or the queries of another text
        assert main(["verify", str(tmp_path / "kept")]) == 2
        assert "no view replays traces with the sections evict_at, compacted_at" in capsys.readouterr().err
    else:
        assert main(["verify", str(tmp_path / "kept"), "--json", "--bound", "2e-6"]) == 0
        assert json.loads(capsys.readouterr().out)["largest"] <= 2e-6


def test_errors_of_contexts_and_files_are_one_line(recipe_of, studies, tmp_path, capsys):
    with pytest.raises(UserError, match=r"prompt_cache: problem 1: the context has 41 tokens, but first \+ last is 61"):
        evaluate(recipe_of({"last": 60}), progress=False)
    (tmp_path / "b.json").write_text('{"shares": [[1.0]]}')
    with pytest.raises(UserError, match=r"prompt_cache\.budgets: b\.json has head budgets of shape \[1, 1\]"):
        evaluate(recipe_of({"budgets": "b.json"}), progress=False)
    with pytest.raises(UserError, match=r"tasks\.one: problem 1 has 47 tokens, which with 1000 tokens of answer"):
        evaluate(recipe_of({}, max_completion_length=1000), progress=False)
    assert not studies  # no context is read before the budgets file is read and all contexts are counted
    (tmp_path / "e.yaml").write_text(recipe_of({"ratio": 0.5}).as_yaml(), encoding="utf-8")
    assert main(["eval", "e.yaml", "prompt_cache=[{ratio: 2}]"]) == 2
    output = capsys.readouterr().err
    assert "error: command line: prompt_cache[0].ratio: expected a number" in output.splitlines()[-1]
    assert main(["eval", "e.yaml", "rollout.progress=false", "--overwrite"]) == 0
    assert "am 0.5" in capsys.readouterr().out
    assert main(["rollout", "e.yaml", "rollout.progress=false"]) == 0


def test_parts_are_not_read_alone_if_keys_cannot_be_moved(recipe_of, tmp_path, model):
    """The model's RoPE depends on the length of the text."""
    other = tmp_path / "partial"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    rope = {**config.get("rope_parameters", {}), "partial_rotary_factor": 0.5}
    (other / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    with pytest.raises(UserError, match=r"prompt_cache\.chunking: RoPE turns only a part of the model's keys"):
        evaluate(recipe_of({"chunking": "text"}, model=str(other)), progress=False)
    evaluate(recipe_of({"chunking": "kv"}, model=str(other)), progress=False)
    text = {"chunking": "text", "chunk": 20, "ratio": 0.4}
    (row,) = evaluate(recipe_of(text, output_dir=str(tmp_path / "second")), progress=False)
    assert row.parameters["chunking"] == "text"


def test_equal_prompt_caches_are_evaluated_once(recipe_of):
    points = recipe_of([{"ratio": [0.1, 0.1, 0.2]}, {"ratio": 0.2}, {"policy": "full", "ratio": [0.1, 0.2]}])
    caches = [(cache.policy, cache.ratio) for cache in points.prompt_caches()]
    assert caches == [("am", 0.1), ("am", 0.2), ("full", 0.1)]
    assert points.prompt_caches()[0] == replace(PromptCacheConfig(), first=0)
    assert recipe_of(rollout={"engine": "auto"}).rollout.engine == "auto"


@pytest.mark.slow
def test_vllm_continues_from_contexts_that_hf_has_compacted(recipe_of, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    blocks = [{"policy": "full"}, {"ratio": [0.1, 0.4], "last": 2}, {"policy": "none"}]
    on_vllm = {"rollout": {"engine": "vllm", "kv_cache_gb": 0.05, "max_batch": 4}}
    rows = evaluate(recipe_of(blocks, samples=2, temperature=1.0), progress=False)
    hf_lines = lines_of(tmp_path / "out")
    for row, theirs in zip(rows, evaluate(recipe_of(blocks, samples=2, temperature=1.0, **on_vllm)), strict=True):
        assert (row.accuracy, row.retention, row.parameters) == (theirs.accuracy, theirs.retention, theirs.parameters)
        assert row.contexts.bytes == theirs.contexts.bytes
    of = lambda lines: {(str(x["parameters"]), x["problem"], x["sample"]): x["completion"] for x in lines}  # noqa: E731
    assert of(lines_of(tmp_path / "out")) == of(hf_lines)
    ours, theirs = (sample(recipe_of(blocks[1], **more), tmp_path / name) for more, name in (({}, "a"), (on_vllm, "b")))
    assert [output["tokens"] for output in ours] == [output["tokens"] for output in theirs]
    for trace, vllm_trace in zip(load_traces(next((tmp_path / "a").glob("traces*"))),
                           load_traces(next((tmp_path / "b").glob("traces*"))), strict=True):  # fmt: skip
        assert trace.evict_at.equal(vllm_trace.evict_at)
        assert {*trace.sections} == {*vllm_trace.sections}
    assert not [*tmp_path.rglob("contexts-*")]
