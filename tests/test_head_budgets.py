"""`sparse-rl budgets` measures sensitivity curves, and writes head budgets. The curves equal a plain loop over the
engine; an interrupted measurement continues, and ends with the same file. Files of other models are refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import interrupted_after

from rollout import SamplingConfig, make_engine
from rollout.context import PromptCacheConfig
from rollout.context.budgets import Varied, allocate, global_shares, load, padding, save
from rollout.measure.journal import Journal
from sparse_rl.commands.budgets import CURVES, RESULTS, BudgetsMeasurement, measure
from sparse_rl.commands.main import main
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.models.directory import WEIGHTS
from sparse_rl.models.weights import Identity, identify
from sparse_rl.recipe import BudgetsRecipe, make_recipe

QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart/model"
CONTEXTS = ("a1b2c3d4" * 5, "e5f6g7" * 5, "h1" * 20)
RATIOS = [0.0, 0.1, 0.5]
LAYERS, HEADS = 2, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The quickstart's model, whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    shutil.copytree(QUICKSTART, folder)
    RunningSum.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def recipe_of(tmp_path, model, monkeypatch):
    """recipe_of(output_dir, **keys) -> a recipe: six questions about three contexts, of which two are used."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": CONTEXTS[i % 3], "prompt": f"Q{c}?"} for i, c in enumerate("abcdef")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(output_dir: str = "out", **keys: Any) -> BudgetsRecipe:
        mapping = {
            "kind": "budgets", "model": model, "output_dir": output_dir, "dtype": "float32", "contexts": 2,
            "tasks": {"one": {"path": str(tmp_path / "rows.jsonl"), "columns": {"context": "text"}}},
            "ratios": RATIOS, "base": 0.1, "max_completion_length": 6, "rollout": {"progress": False},
        }  # fmt: skip
        return make_recipe({**mapping, **keys}).expect(BudgetsRecipe)

    return make


@pytest.fixture
def written(recipe_of):
    """The content of a file of head budgets."""
    content = measure(recipe_of(), progress=False)
    return content


def test_curves_equal_a_plain_loop_over_the_engine(written, model):
    """The shares are those of algorithm 4 on the mean curves."""
    engine, tokenizer = make_engine("hf", model=model, policy="full"), RunningSum.tokenizer()
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    config, sampling = PromptCacheConfig(first=0), SamplingConfig(6, 0.6, 0.95, seed=42)
    for number, text in enumerate(CONTEXTS[:2]):
        tokens, questions = encode(text), [encode(f"Q{c}?") for c in "abcdef"[number::3]]
        assert written["contexts"][number] == {
            "task": "one", "problem": number, "tokens": len(tokens), "questions": 2,
        }  # fmt: skip
        full = engine.compact(tokens, PromptCacheConfig(policy="full", first=0))
        answers = [r.completion_ids for r in engine.generate(questions, sampling, full)]

        def loss(context: Any, questions: Any = questions, answers: Any = answers) -> float:
            logprobs = [r.model_logprobs for r in engine.simulate(questions, answers, context=context)]
            return -sum(map(sum, logprobs)) / sum(map(len, logprobs))

        def compacted(changed: tuple[int, int] | None, ratio: float = 0, tokens: Any = tokens) -> Any:
            counts = [[round(0.1 * len(tokens))] * HEADS for _ in range(LAYERS)]
            if changed is not None:
                counts[changed[0]][changed[1]] = max(1, round(ratio * len(tokens)))
            return engine.study(tokens, config).compacted(config, counts)

        assert written["full_losses"][number] == pytest.approx(loss(full), abs=1e-4)
        assert written["baseline_losses"][number] == pytest.approx(loss(compacted(None)), abs=1e-4)
        for layer in range(LAYERS):
            for head in range(HEADS):
                losses = [loss(compacted((layer, head), ratio)) for ratio in RATIOS]
                assert written["losses"][number][layer][head] == pytest.approx(losses, abs=1e-4)
                assert written["losses"][number][layer][head][1] == written["baseline_losses"][number]
    curves = torch.tensor(written["losses"], dtype=torch.float64).mean(0)
    expected = allocate(curves, RATIOS, 0.1)
    assert torch.tensor(written["shares"], dtype=torch.float64) == pytest.approx((expected / expected.mean()).numpy())


def test_equal_numbers_of_entries_share_one_loss(model):
    engine = make_engine("hf", model=model, policy="full")
    varied, calls = Varied(engine.study(range(10, 50), PromptCacheConfig(first=0)), PromptCacheConfig(first=0), 0.1), []

    def loss(context: Any) -> float:
        calls.append((context.evict_at() > 40).sum(-1).tolist())
        return float(len(calls))

    assert varied.curve(1, 0, [0.0, 0.01, 0.1, 1.0], loss, 9.0) == [1.0, 1.0, 9.0, 2.0]
    assert calls == [[[4, 4], [1, 4]], [[4, 4], [40, 4]]]


def test_global_shares_count_the_keys_with_the_highest_scores(model):
    """At ratio 1 the shares are equal. Control: negated scores give other shares."""
    engine, config = make_engine("hf", model=model, policy="full"), PromptCacheConfig(first=2, last=1)
    measured = engine.study(range(10, 50), config).scores(config)
    assert measured.shape == (LAYERS, HEADS, 37)
    ratios = (0.02, 0.3, 1.0)
    shares = global_shares(measured, ratios)
    assert shares.sum((1, 2)).tolist() == pytest.approx([1.0] * 3)
    flat = [(float(measured[i, j, k]), i, j) for i in range(LAYERS) for j in range(HEADS) for k in range(37)]
    for place, ratio in enumerate(ratios):
        kept = sorted(flat, reverse=True)[: round(ratio * len(flat))]
        plain = [[sum((i, j) == head[1:] for head in kept) / len(kept) for j in range(HEADS)] for i in range(LAYERS)]
        assert torch.allclose(shares[place], torch.tensor(plain, dtype=torch.float64))
    assert shares[2].flatten().tolist() == [0.25] * 4
    assert not torch.equal(global_shares(-measured, ratios)[1], shares[1])


def test_scores_choose_the_keys_of_a_compaction(model):
    engine, config = make_engine("hf", model=model, policy="full"), PromptCacheConfig(policy="evict", ratio=0.2)
    studied = engine.study(range(10, 50), config)
    best = studied.scores(config).topk(8).indices.sort(-1).values + 1
    for place, layer in enumerate(studied.compacted(config).layers):
        assert torch.equal(layer.positions[0, :, 1:], best[place])


def test_padding_counts_the_longest_heads():
    assert padding([[4, 2], [2, 1]]) == pytest.approx((6 / 4.5, 8 / 4.5))
    assert padding([[3, 3], [3, 3]]) == (1, 1)


@pytest.mark.parametrize("writes", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 7))])
def test_an_interrupted_measurement_ends_with_the_same_file(recipe_of, tmp_path, writes):
    measure(recipe_of("whole"), progress=False)
    with interrupted_after(writes):
        measure(recipe_of("out"), progress=False)
    with (tmp_path / "out" / CURVES).open("a") as file:
        file.write('{"point": "half a li')
    assert not (tmp_path / "out" / RESULTS).exists()
    lines: list[Any] = []
    add = Journal.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", lambda journal, new: (lines.extend(new), add(journal, new))[1])
        measure(recipe_of("out"), progress=False, resume=True)
    assert len(lines) == 2 * (LAYERS * HEADS + 1) - writes
    assert (tmp_path / "out" / RESULTS).read_text() == (tmp_path / "whole" / RESULTS).read_text()


def test_other_settings_do_not_continue_a_journal(recipe_of, tmp_path):
    measure(recipe_of(), progress=False)
    content = measure(recipe_of(base=0.5), progress=False, resume=True)
    assert content["base"] == 0.5
    assert len((tmp_path / "out" / CURVES).read_text().splitlines()) == 4 * (LAYERS * HEADS + 1)


def test_budgets_of_another_model_are_refused(written, model, tmp_path):
    file, config = tmp_path / "out" / RESULTS, PromptCacheConfig(ratio=0.2, budgets=str(tmp_path / "out" / RESULTS))
    assert written["model"] == {"name": model, "fingerprint": identify(model).fingerprint}
    torch.testing.assert_close(load(file, range(LAYERS), HEADS, identify(model)).tolist(), written["shares"])
    engine = make_engine("hf", model=model, policy="full")
    engine.compact(range(10, 50), config)
    engine.load_weights({n: w + 0.01 for n, w in engine.model.named_parameters()}.items())
    for use in (
        lambda: load(file, range(LAYERS), HEADS, Identity("b", "0")),
        lambda: engine.compact(range(10, 50), config),
    ):
        with pytest.raises(UserError, match=r"head_budgets\.json is of another model: it was made with") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_published_formats_of_head_budgets_are_read(tmp_path):
    shares, model = [[0.1, 0.3], [0.2, 0.2], [0.4, 0.0]], Identity("any", "12")
    expected = torch.tensor(shares, dtype=torch.float64) / 0.2
    by_name = {f"L{i}H{j}": share for i, row in enumerate(shares) for j, share in enumerate(row)}
    (tmp_path / "a.json").write_text(json.dumps(by_name))
    (tmp_path / "a.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in shares))
    (tmp_path / "bare.json").write_text(json.dumps({"shares": shares}))
    save(tmp_path / "b.json", expected, losses=[1])
    for name in ("a.json", "a.tsv", "bare.json", "b.json"):
        torch.testing.assert_close(load(tmp_path / name, range(3), 2, model), expected)
        with pytest.raises(UserError, match=r"shape \[3, 2\], but the model has \[2, 3\]"):
            load(tmp_path / name, range(2), 3, model)


def test_budgets_name_the_layers_without_a_window(tmp_path):
    """The files of the paper's authors for Gemma 3 name the heads of every sixth layer alone."""
    layers, shares = [5, 11], [[0.1, 0.3], [0.2, 0.4]]
    expected = torch.tensor(shares, dtype=torch.float64) / 0.25
    by_name = {f"L{layer}H{j}": row[j] for layer, row in zip(layers, shares, strict=True) for j in (1, 0)}
    (tmp_path / "a.json").write_text(json.dumps(dict(reversed(by_name.items()))))
    save(tmp_path / "b.json", expected, layers=layers)
    (tmp_path / "bare.json").write_text(json.dumps({"shares": shares}))
    for name in ("a.json", "b.json", "bare.json"):
        torch.testing.assert_close(load(tmp_path / name, layers, 2), expected)
    for name in ("a.json", "b.json"):
        with pytest.raises(UserError, match=r"layers 5, 11, but the model's layers without a sliding window are 0, 1"):
            load(tmp_path / name, range(2), 2)
        with pytest.raises(UserError, match=r"shape \[2, 2\], but the model has \[3, 2\] layers and kv heads"):
            load(tmp_path / name, [5, 11, 17], 2)
    torch.testing.assert_close(load(tmp_path / "bare.json", range(2), 2), expected)
    (tmp_path / "other.json").write_text(json.dumps({**by_name, "mean": 1}))
    with pytest.raises(UserError, match="mean does not name a layer and a kv head"):
        load(tmp_path / "other.json", layers, 2)


def test_budgets_of_sliding_windows_are_those_of_the_global_layers(recipe_of, new_model, model, tmp_path, capsys):
    for kinds in (["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]):
        folder = tmp_path / kinds[0]
        new_model("gemma3_text", layer_types=kinds, max_position_embeddings=512).save_pretrained(folder)
        RunningSum.tokenizer().save_pretrained(folder)
    recipe = recipe_of(model=str(tmp_path / "sliding_attention"))
    (tmp_path / "b.yaml").write_text(recipe.as_yaml())
    assert main(["budgets", "b.yaml", "--dry-run"]) == 0
    assert "1 layers without a window x 2 kv heads x 3 ratios x 2 contexts = 12" in capsys.readouterr().out
    content = measure(recipe, progress=False)
    assert content["layers"] == [1]
    assert [len(row) for row in content["shares"]] == [2]
    assert len((tmp_path / "out" / CURVES).read_text().splitlines()) == 2 * (2 + 1)
    assert {*BudgetsMeasurement.table(content).columns[0].cells} == {"1"}
    config = PromptCacheConfig(ratio=0.2, budgets=str(tmp_path / "out" / RESULTS))
    context = make_engine("hf", model=recipe.model, policy="full").compact(range(10, 50), config)
    expected = [[max(1, round(share * 0.2 * 39)) + 1 for share in row] for row in content["shares"]]
    kept = [[int((bias > float("-inf")).sum()) for bias in layer.bias[0]] for layer in context.layers]
    assert kept == expected
    other = make_engine("hf", model=tmp_path / "full_attention", policy="full")
    with pytest.raises(UserError, match=r"layers 1, but the model's layers without a sliding window are 0") as caught:
        other.compact(range(10, 50), config)
    assert "\n" not in str(caught.value)


def test_damaged_files_of_head_budgets_are_refused_in_one_line(tmp_path):
    save(tmp_path / "whole.json", torch.ones(2, 2))
    whole = (tmp_path / "whole.json").read_text()
    damaged = {
        "cut.json": (whole[:-9], "holds no head budgets"),
        "version.json": (
            whole.replace('"format_version": 1', '"format_version": 2'),
            "format version 2, but 1 is read",
        ),
        "maker.json": (whole.replace('"fingerprint"', '"finger"'), "holds no head budgets"),
        "absent.json": ('{"L0H0": 1, "L0H1": 1, "L1H0": 1, "L2H0": 1}', "L1H1"),
        "ragged.tsv": ("1\t1\n1\n", "holds no head budgets"),
        "text.tsv": ("1\ta\n", "could not convert"),
        "nan.tsv": ("nan\t1\n1\t1\n", r"shares\[0\]\[0\]: expected a finite number"),
        "below.json": ('{"shares": [[-1, 1], [1, 1]]}', "a head budget below 0, or no head budget above 0"),
        "zeros.json": ('{"shares": [[0, 0], [0, 0]]}', "a head budget below 0, or no head budget above 0"),
        "huge.json": ('{"shares": [[1e999, 1], [1, 1]]}', "holds no head budgets"),
        "digits.json": (f'{{"shares": [[{10**30}, {10**40}], [1, 1]]}}', "holds no head budgets"),
        "texts.json": ('{"shares": [["a", "b"], ["c", "d"]]}', "holds no head budgets"),
        "flags.json": ('{"shares": [[true, true], [true, true]]}', "holds no head budgets"),
        "mappings.json": ('{"shares": [[{}, {}], [{}, {}]]}', "holds no head budgets"),
        "flat.json": ('{"shares": 1}', "holds no head budgets"),
        "cube.json": ('{"shares": [[[1, 1]], [[1, 1]]]}', "holds no head budgets"),
        "model.json": (
            '{"model": {"name": [1], "fingerprint": {}}, "shares": [[1, 1], [1, 1]]}',
            "holds no head budgets",
        ),
        "listed.json": ('{"model": [], "shares": [[1, 1], [1, 1]]}', "holds no head budgets"),
        "layers.json": ('{"layers": [0, 1e999], "shares": [[1, 1], [1, 1]]}', "holds no head budgets"),
        "named.json": ('{"L0H0": 1, "L0H1": [1], "L1H0": 1, "L1H1": 1}', "holds no head budgets"),
    }
    for name, (text, message) in damaged.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            load(tmp_path / name, range(2), 2)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_mistakes_that_the_data_show_are_found_before_the_model_is_loaded(recipe_of, monkeypatch):
    monkeypatch.setattr("sparse_rl.recipe.sampling.load_for_sampling", lambda _: pytest.fail("loaded"))
    for keys, message in (
        ({"contexts": 4}, "contexts: the tasks have 3 contexts, fewer than 4"),
        ({"prompt_cache": {"last": 60}}, r"tasks\.one: problem 1: the context has 40 tokens, but first \+ last is 60"),
        ({"max_completion_length": 1000}, r"tasks\.one: problem 1 has 43 tokens, which with 1000 tokens of answer"),
    ):
        with pytest.raises(UserError, match=message):
            measure(recipe_of(**keys), progress=False)


def test_the_command_writes_a_file_that_eval_uses(recipe_of, tmp_path, capsys, model):
    (tmp_path / "b.yaml").write_text(recipe_of().as_yaml())
    assert main(["budgets", "b.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "2, of 30 to 40 tokens, with 4 questions" in out
    assert "2 layers x 2 kv heads x 3 ratios x 2 contexts = 24" in out
    assert not (tmp_path / "out").exists()
    assert main(["budgets", "b.yaml"]) == 0
    assert capsys.readouterr().out.endswith(f"out/{RESULTS}\n")
    assert main(["budgets", "b.yaml"]) == 2
    assert f"already holds {RESULTS}" in capsys.readouterr().err
    assert main(["budgets", "b.yaml", "--resume"]) == 0
    rows = [{"text": CONTEXTS[0], "prompt": "Qa?", "answer": "1"}]
    (tmp_path / "answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = {
        "kind": "eval", "model": model, "output_dir": "scored", "dtype": "float32", "samples": 1, "accuracy": "boxed",
        "tasks": {"one": {"path": "answered.jsonl", "columns": {"context": "text"}}}, "rollout": {"engine": "hf"},
        "prompt_cache": {"ratio": 0.2, "budgets": f"out/{RESULTS}"}, "max_completion_length": 4,
    }  # fmt: skip
    (tmp_path / "e.yaml").write_text(make_recipe(mapping).as_yaml())
    assert main(["eval", "e.yaml", "rollout.progress=false"]) == 0
    shutil.copytree(model, tmp_path / "other")
    other = make_engine("hf", model=model, policy="full")
    other.load_weights({n: w + 0.01 for n, w in other.model.named_parameters()}.items())
    (tmp_path / "other" / WEIGHTS).unlink()
    other.model.save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert main(["eval", "e.yaml", "model=other", "output_dir=o2"]) == 2
    assert f"prompt_cache.budgets: out/{RESULTS} is of another model" in capsys.readouterr().err
    for command in ("eval", "train", "perplexity"):
        assert main([command, "b.yaml"]) == 2
        assert "a recipe of kind budgets " in capsys.readouterr().err
    assert main(["budgets", "e.yaml"]) == 2
    assert "a recipe of kind eval measures no head budgets; it needs kind: budgets" in capsys.readouterr().err
