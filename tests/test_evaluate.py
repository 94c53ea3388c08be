"""`evaluate` writes one row for each task and cache. pass@k equals an enumeration of subsets, and every number of a row
equals a recount of the completions.
"""

import io
import itertools
import json
import statistics
from dataclasses import replace

import pytest
from rich.console import Console

from rollout.measure.accuracy import mean_and_error, pass_at_k
from sparse_rl.analysis.tables import accuracy_table, cache_labels
from sparse_rl.commands.eval import evaluate
from sparse_rl.commands.rollout import sample
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.models.directory import save_policy
from sparse_rl.models.load import load_config, model_fingerprint
from sparse_rl.policies import fingerprint, make_policy
from sparse_rl.recipe import make_recipe
from sparse_rl.trace import load_traces

ACCURACY = '''
def even(completions, answer, **_):
    """Right where the text has an even length; no gold, no score."""
    return [None if a == "none" else float(len(c) % 2 == 0) for c, a in zip(completions, answer)]

def long(completions, answer, **_):
    """Right where the text is long; of the even answers alone."""
    return [None if int(a) % 2 else float(len(c) > 20) for c, a in zip(completions, answer)]

def half(completions, **_):
    return [0.5 for _ in completions]

def broken(completions, **_):
    raise KeyError("nothing\\nhere")

def short(completions, **_):
    return [1.0]

def strange(completions, prompts, completion_ids, problem_id, log_metric, **_):
    log_metric("seen", 1.0)
    assert len(prompts) == len(completion_ids) == len(problem_id) == len(completions)
    return [float(i) for i in problem_id]
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny untrained model on disk; its completions are random."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    RunningSum.save_untrained(folder, 0)
    return folder


@pytest.fixture
def recipe_of(tmp_path, model, monkeypatch):
    """recipe_of(rows, **keys) -> an eval recipe on these rows, with the functions above as accuracy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evaluation_accuracy.py").write_text(ACCURACY)

    def make(rows, accuracy="even", output_dir="out", **keys):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        mapping = {
            "kind": "eval", "model": str(model), "output_dir": str(tmp_path / output_dir), "dtype": "float32",
            "tasks": {"one": {"path": str(tmp_path / "rows.jsonl")}}, "accuracy": f"evaluation_accuracy:{accuracy}",
            "samples": 4, "temperature": 1.0, "top_p": 1.0, "max_completion_length": 40,
        }  # fmt: skip
        keys["rollout"] = {"engine": "hf", **keys.get("rollout", {})}
        return make_recipe({**mapping, **keys})

    return make


def rows_of(n, none=()):
    """Return n problems; those in `none` have an answer that the accuracy "even" cannot score."""
    return [{"prompt": f"Qa{i}b{9 - i}?", "answer": "none" if i in none else str(i), "problem_id": i} for i in range(n)]


def completions(recipe_dir):
    """Return the completions that the last evaluation wrote, without times and the digests of their points."""
    lines = [json.loads(line) for line in (recipe_dir / "out" / "eval_completions.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "point")} for line in lines]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [True] * correct + [False] * (n - correct)
        hits = [any(subset) for subset in itertools.combinations(samples, k)]
        assert pass_at_k(n, correct, k) == pytest.approx(sum(hits) / len(hits))


def test_the_standard_error_treats_problems_as_independent():
    """Control: 16 samples of two problems, taken as 16 independent values, give a smaller error than two problems."""
    values = [0.0, 0.25, 1.0, 0.5]
    mean, error = mean_and_error(values)
    assert mean == statistics.mean(values)
    assert error == pytest.approx(statistics.stdev(values) / 2)
    assert mean_and_error([1.0]) == (1.0, None)
    assert mean_and_error([]) == (None, None)
    # control: the samples of one problem are not independent
    samples = [1.0] * 8 + [0.0] * 8
    assert mean_and_error(samples)[1] < mean_and_error([1.0, 0.0])[1]


def test_a_row_summarises_its_completions(recipe_of, tmp_path):
    recipe = recipe_of(rows_of(6, none={2}), sweep={"policy": ["streaming", "full"], "cache": {"budget": [8]}})
    rows = evaluate(recipe, progress=False)
    assert [(r.policy, r.parameters.get("budget")) for r in rows] == [("streaming", 8), ("full", None)]
    lines = completions(tmp_path)
    assert len(lines) == 2 * 6 * 4
    for row in rows:
        own_lines = [line for line in lines if line["policy"] == row.policy]
        by_problem = {i: [x["correct"] for x in own_lines if x["problem"] == i] for i in range(6)}
        assert by_problem.pop(2) == [None] * 4
        shares = [sum(flags) / 4 for flags in by_problem.values()]
        assert (row.problems, row.excluded, row.samples) == (5, 1, 4)
        assert row.accuracy == pytest.approx(statistics.mean(shares)) == row.pass_at_k[1]
        assert row.standard_error == pytest.approx(statistics.stdev(shares) / 5**0.5)
        assert row.pass_at_k[4] == pytest.approx(statistics.mean(any(f) for f in by_problem.values()))
        assert list(row.pass_at_k) == [1, 2, 4]
        assert row.retention == pytest.approx(statistics.mean(x["retention"] for x in own_lines))
        right = [x["retention"] for x in own_lines if x["correct"]]
        assert row.retention_correct == pytest.approx(statistics.mean(right))
        assert row.length == pytest.approx(statistics.mean(x["tokens"] for x in own_lines))
        assert row.truncated == pytest.approx(statistics.mean(x["finish_reason"] == "length" for x in own_lines))
        assert row.tokens == sum(x["tokens"] for x in own_lines)
        assert row.seconds > 0
    assert rows[0].peak_entries == 9 < rows[1].peak_entries == max(x["tokens"] for x in completions(tmp_path)) + 6 - 1
    fed = [x["tokens"] + 5 if x["tokens"] > 1 else 0 for x in completions(tmp_path) if x["policy"] == "full"]
    assert 0 < rows[0].mean_peak_entries <= 9
    assert 0 < rows[0].mean_entries <= rows[0].peak_entries  # without completions of one token
    assert rows[1].mean_peak_entries == pytest.approx(statistics.mean(fed))
    assert rows[0].longest_prompt == 6
    assert rows[1].retention == 1 > rows[0].retention


def test_further_accuracies_judge_the_same_completions(recipe_of, tmp_path):
    accuracies = {"even": "evaluation_accuracy:even", "long": "evaluation_accuracy:long"}
    rows = rows_of(6)
    plain = evaluate(recipe_of(rows), progress=False)[0]
    before = completions(tmp_path)
    row = evaluate(recipe_of(rows, further_accuracy=accuracies), progress=False)[0]
    lines = completions(tmp_path)
    assert replace(row, further_accuracy={}, seconds=0, tokens_per_second=0) == replace(
        plain, seconds=0, tokens_per_second=0
    )
    rewards = [line.pop("further_rewards") for line in lines]
    assert lines == before
    assert [given["even"] for given in rewards] == [line["reward"] for line in lines]
    even, long = row.further_accuracy["even"], row.further_accuracy["long"]
    assert (even.accuracy, even.standard_error, even.problems) == (row.accuracy, row.standard_error, row.problems)
    shares = [
        statistics.mean(len(x["completion"]) > 20 for x in lines if x["problem"] == problem) for problem in (0, 2, 4)
    ]
    assert long.problems == 3
    assert long.accuracy == pytest.approx(statistics.mean(shares))
    assert long.standard_error == pytest.approx(statistics.stdev(shares) / 3**0.5)
    assert 0 < long.accuracy < 1
    content = json.loads((tmp_path / "out" / "eval.json").read_text())["rows"][0]["further_accuracy"]
    assert content["long"] == {"accuracy": long.accuracy, "standard_error": long.standard_error, "problems": 3}
    table = accuracy_table([row])
    cells = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert cells["even"] == cells["pass@1"]
    assert cells["long"].endswith(" (3)")
    assert "(m)" in str(table.caption)
    assert accuracy_table([plain]).caption is None
    odd = replace(row, task="[/a]", further_accuracy={"[/b]": even})  # text that rich would interpret as markup
    console = Console(file=io.StringIO(), width=200)
    console.print(accuracy_table([odd]))
    assert "[/a]" in console.file.getvalue()
    assert "[/b]" in console.file.getvalue()


def test_unanswerable_questions_count_as_wrong_or_are_left_out(recipe_of):
    """Of 4 questions one has no answer."""
    rows = [{"prompt": f"Qa{i}?", "answers": ["Aa", " "] if i < 3 else []} for i in range(4)]
    spec = {"name": "short_answer", "match": "contained"}
    further = {"answerable": {**spec, "unanswerable": "left_out"}, "exact": {"name": "short_answer"}}
    recipe = replace(recipe_of(rows, further_accuracy=further), accuracy=spec)
    row = evaluate(recipe, progress=False)[0]
    assert (row.problems, row.excluded, row.further_accuracy["answerable"].problems) == (4, 0, 3)
    assert 4 * row.accuracy == pytest.approx(3 * row.further_accuracy["answerable"].accuracy)
    assert row.further_accuracy["exact"].accuracy <= row.accuracy
    with pytest.raises(
        UserError, match=r"tasks\.one: the accuracy reward needs a column 'answers'; the source has prompt"
    ):
        evaluate(replace(recipe_of(rows_of(2), further_accuracy={"short": "short_answer"})), progress=False)
    for wrong, message in (("broken", "broken raised KeyError"), ("short", "short returned 1"), ("none", "reward .*")):
        with pytest.raises(UserError, match=rf"further_accuracy\.mine: {message}"):
            evaluate(recipe_of(rows_of(2), further_accuracy={"mine": f"evaluation_accuracy:{wrong}"}), progress=False)


def test_each_cache_has_one_engine_and_only_one_engine_is_open(recipe_of, as_vllm, monkeypatch):
    recipe = recipe_of(rows_of(3), sweep={"policy": ["streaming", "full"], "cache": {"budget": [8]}})
    recipe = replace(recipe, tasks={"a": recipe.tasks["one"], "b": recipe.tasks["one"]})
    expected = evaluate(recipe, progress=False)
    assert as_vllm == []
    recipe = replace(recipe, rollout=replace(recipe.rollout, engine="auto"))
    rows = evaluate(recipe, progress=False)
    assert as_vllm == ["streaming", "closed", "full", "closed"]
    assert [(row.task, row.policy) for row in rows] == [(t, p) for t in "ab" for p in ("streaming", "full")]
    assert [row.accuracy for row in rows] == [row.accuracy for row in expected]
    assert evaluate(recipe, model=RunningSum.untrained(0), progress=False)[0].accuracy == rows[0].accuracy
    assert len(as_vllm) == 4  # the engine samples from a live module directly
    monkeypatch.setattr("sparse_rl.commands.eval._score", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(recipe, progress=False)
    assert as_vllm[4:] == ["streaming", "closed"]  # closed after an error too


def test_eval_json_holds_the_recipe_the_versions_and_the_rows(recipe_of, tmp_path):
    recipe = recipe_of(rows_of(2))
    rows = evaluate(recipe, progress=False)
    content = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert make_recipe(content["recipe"]) == recipe
    assert content["seed"] == 42
    assert "torch" in content["versions"]
    assert content["format_version"] == 1
    assert content["rows"][0]["accuracy"] == rows[0].accuracy
    assert content["rows"][0]["budget"] is None
    assert accuracy_table(rows).row_count == 1


def test_results_do_not_depend_on_the_batch(recipe_of, tmp_path):
    """A problem that occurs twice gets other samples the second time."""
    rows = rows_of(5) + rows_of(1)

    def texts(**keys):
        evaluate(recipe_of(rows, cache={"policy": "streaming", "budget": 8}, **keys), progress=False)
        return {(x["problem"], x["sample"]): x["completion"] for x in completions(tmp_path)}

    first = texts(rollout={"max_batch": 4})
    assert first == texts(rollout={"max_batch": 64}) == texts(rollout={"max_batch": 7})
    assert [first[0, s] for s in range(4)] != [first[5, s] for s in range(4)]
    assert first != texts(seed=1)


def test_a_model_in_memory_gives_the_same_results_as_its_directory(recipe_of, tmp_path):
    first = evaluate(recipe_of(rows_of(3)), progress=False)
    lines = completions(tmp_path)
    second = evaluate(recipe_of(rows_of(3)), model=RunningSum.untrained(0), progress=False)
    assert first[0].accuracy == second[0].accuracy
    assert lines == completions(tmp_path)


def test_a_completion_is_correct_if_its_reward_is_at_least_1(recipe_of):
    row = evaluate(recipe_of(rows_of(2), "half"), progress=False)[0]
    assert row.accuracy == 0
    assert row.retention_correct is None


def test_held_and_read_entries_are_reported_separately(recipe_of):
    """Clustered attention holds all entries and reads few; `lined` reads all that it holds; `layered` is between."""
    clustered = {"policy": "clustered", "page": 4, "window": 4, "open_pages": 1}
    lined = {"policy": "lined", "window": 4, "period": 1}
    parts = [{"layers": 1, "cache": lined}, {"layers": 1, "cache": clustered}]
    swept = [clustered, "full", lined, {"policy": "layered", "parts": parts}]
    *rows, lined_row, layered_row = evaluate(recipe_of(rows_of(2), sweep={"policy": swept}), progress=False)
    assert rows[0].retention == 1
    assert rows[0].mean_peak_entries > rows[0].read_entries
    assert lined_row.retention < 0.9
    assert lined_row.peak_entries == lined_row.read_entries < rows[0].read_entries
    assert lined_row.retention < layered_row.retention < 1
    assert lined_row.peak_entries < layered_row.peak_entries < rows[0].peak_entries
    assert layered_row.read_entries < layered_row.peak_entries
    longest = rows[1].peak_entries
    assert rows[1].read_entries == longest > 20
    assert rows[0].peak_entries > rows[0].read_entries > 8
    names = [str(column.header) for column in accuracy_table(rows).columns]
    assert "held" in names
    assert "read" in names
    assert "peak" not in names
    assert "peak" in [str(column.header) for column in accuracy_table(rows[1:]).columns]


def test_labels_of_two_caches_with_the_same_policy_show_the_key_that_differs(recipe_of):
    swept = [{"policy": "clustered", "open_pages": 1}, {"policy": "clustered", "open_pages": 2}, "full"]
    rows = evaluate(recipe_of(rows_of(2), sweep={"policy": swept}), progress=False)
    assert cache_labels(rows) == ["clustered, open_pages 1", "clustered, open_pages 2", "full"]
    assert cache_labels(rows[1:]) == ["clustered", "full"]


def test_an_answer_is_forced_at_the_limit(recipe_of, tmp_path):
    """A completion that has not ended after 40 - 7 - 5 tokens continues with the text (5) and the answer (7)."""
    free = evaluate(recipe_of(rows_of(6)), progress=False)[0]
    before = completions(tmp_path)
    row = evaluate(recipe_of(rows_of(6), forced_answer={"text": "=[5]=", "tokens": 7}), progress=False)[0]
    after = completions(tmp_path)
    start = 40 - 7 - 5
    long = [line["tokens"] > start for line in before]
    assert any(long)
    assert not all(long)
    for was, now, forced in zip(before, after, long, strict=True):
        if not forced:
            assert now == was
        else:
            before_it, text, _ = now["completion"].partition("=[5]=")
            assert text
            assert was["completion"].startswith(before_it)
            assert start + 5 <= now["tokens"] <= 40
    assert row.forced == sum(long) / len(long)
    assert free.forced == 0


@pytest.mark.parametrize(("tokens", "max_completion_length"), [(38, 40), (64, 40), (1, 3)])
def test_a_forced_answer_that_leaves_no_tokens_before_it_is_refused(recipe_of, tokens, max_completion_length):
    """The text and the answer (`tokens`) would fill the whole completion."""
    answer = {"text": "=5", "tokens": tokens}
    with pytest.raises(UserError, match="tokens after it fill max_completion_length"):
        evaluate(recipe_of(rows_of(1), forced_answer=answer, max_completion_length=max_completion_length))


def test_the_accuracy_is_none_if_no_problem_has_a_score(recipe_of):
    row = evaluate(recipe_of(rows_of(2, none={0, 1})), progress=False)[0]
    assert row.accuracy is None
    assert row.excluded == 2
    assert row.pass_at_k == {}
    assert row.length > 0
    assert accuracy_table([row]).row_count == 1


def test_the_accuracy_gets_the_same_arguments_as_a_reward(recipe_of):
    row = evaluate(recipe_of(rows_of(3), "strange"), progress=False)[0]
    assert row.accuracy == pytest.approx(2 / 3)


def test_a_recipe_without_a_cache_uses_the_policy_that_is_saved_with_the_model(recipe_of, tmp_path):
    recipe = recipe_of(rows_of(1))
    assert [p.name for p in recipe.prepare().policies] == ["full"]
    RunningSum.save_untrained(tmp_path / "trained", 0)
    save_policy(tmp_path / "trained", make_policy("streaming", budget=20))
    recipe = recipe_of(rows_of(1), model=str(tmp_path / "trained"))
    assert [fingerprint(p) for p in recipe.prepare().policies] == [fingerprint(make_policy("streaming", budget=20))]
    recipe = recipe_of(rows_of(1), model=str(tmp_path / "trained"), cache="full")
    assert [p.name for p in recipe.prepare().policies] == ["full"]


@pytest.mark.parametrize(
    ("accuracy", "message"),
    [
        ("broken", "accuracy: broken raised KeyError"),
        ("short", "accuracy: short returned 1 values for 8 completions"),
        ("missing", "accuracy: reward .* cannot be imported"),
    ],
)
def test_an_error_of_the_accuracy_function_is_one_line(recipe_of, accuracy, message):
    with pytest.raises(UserError, match=message) as caught:
        evaluate(recipe_of(rows_of(2), accuracy), progress=False)
    assert "\n" not in str(caught.value)


def test_a_math_accuracy_needs_a_column_of_answers(recipe_of):
    with pytest.raises(UserError, match=r"tasks\.one\.columns\.answer"):
        evaluate(replace(recipe_of([{"prompt": "Q?"}]), accuracy="boxed"), progress=False)


def test_an_engine_with_separate_weights_gives_the_same_samples(recipe_of, tmp_path, as_vllm):
    recipe = recipe_of(rows_of(3), cache={"policy": "streaming", "budget": 8})
    expected = sample(recipe, tmp_path / "hf")
    with_own_weights = sample(replace(recipe, rollout=replace(recipe.rollout, engine="vllm")), tmp_path / "own")
    assert with_own_weights == expected
    lines = [(tmp_path / name / "completions.jsonl").read_text() for name in ("hf", "own")]
    assert lines[0] == lines[1]
    assert as_vllm == ["streaming", "closed"]


@pytest.mark.parametrize("kind", ["eval", "grpo"])
def test_samples_are_kept_with_their_traces(recipe_of, tmp_path, model, kind):
    cache = {"policy": "streaming", "budget": 8, "period": 4}
    recipe = recipe_of(rows_of(5), cache=cache)
    if kind == "grpo":
        keys = {"kind": "grpo", "model": str(model), "output_dir": "x", "dtype": "float32", "rewards": ["boxed"]}
        keys |= {"data": {"path": str(tmp_path / "rows.jsonl")}, "cache": cache}
        keys |= {"num_generations": 4, "max_completion_length": 40, "rollout": {"engine": "hf"}}
        recipe = make_recipe(keys)
    recipe = replace(recipe, rollout=replace(recipe.rollout, max_batch=8))  # two problems at a time
    outputs = sample(recipe, tmp_path / "samples", problems=3)
    lines = [json.loads(line) for line in (tmp_path / "samples" / "completions.jsonl").read_text().splitlines()]
    expected_fingerprint = {
        "model": model_fingerprint(load_config(str(model))),
        "policy": fingerprint(make_policy(cache)),
    }
    files = sorted((tmp_path / "samples").glob("traces-*.safetensors"))
    parts = [load_traces(file, expected_fingerprint) for file in files]
    assert [len(part) for part in parts] == [8, 4]
    for line, trace, fact in zip(lines, [trace for part in parts for trace in part], outputs, strict=True):
        assert {name: line[name] for name in fact} == fact
        assert line["retention"] == trace.retention()
    assert min(fact["retention"] for fact in outputs) < 1
    assert [line["prompt"] for line in lines[::4]] == [row["prompt"] for row in rows_of(3)]


def test_samples_of_a_full_cache_have_no_traces(recipe_of, tmp_path):
    assert all(output["retention"] == 1 for output in sample(recipe_of(rows_of(2), cache="full"), tmp_path / "samples"))
    assert sorted(file.name for file in (tmp_path / "samples").iterdir()) == ["completions.jsonl", "rollouts.json"]
