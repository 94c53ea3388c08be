"""Every shipped recipe is valid, has the settings of its paper, and runs, scaled down, on a tiny model of its
family."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from policy_cases import BOUNDED
from small_recipes import SHIPPED, family_of, shortened, small_evaluation, small_training

from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.methods.config import ClusteredConfig, FullConfig, LinedConfig
from sparse_rl.models.directory import saved_policy
from sparse_rl.models.load import load_tokenizer
from sparse_rl.policies import make_policy
from sparse_rl.recipe import (
    BudgetsRecipe,
    GRPORecipe,
    TaughtRecipe,
    TrainRecipe,
    list_recipes,
    load_recipe,
)

ROOT = Path(__file__).parents[2]
NAMES = list_recipes()
RECIPES = {name: load_recipe(name) for name in NAMES}
TRAINING_RECIPES = [name for name in NAMES if isinstance(RECIPES[name], TrainRecipe)]
EVALUATION_RECIPES = [name for name in NAMES if RECIPES[name].kind == "eval"]
DATA = ROOT.parent / "shared/data"
WRAPPED = {"packing": True, "packing_strategy": "wrapped"}  # TRL's options of the workshop paper's first phase
TOOLS = {"turns/grpo": {"max_tool_calling_iterations": 6}, "turns/sft": {"assistant_only_loss": True}}
BFLOAT16 = "deepseek-r1-distill-qwen-7b/rl_sparse"  # the only recipe that keeps its dtype


@pytest.mark.parametrize("name", NAMES)
def test_each_shipped_recipe_is_valid_and_names_its_command(name):
    recipe = load_recipe(name)
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    assert recipe.warnings == []
    assert recipe.output_dir == f"runs/{name}"
    assert text.startswith("# ")
    assert f"sparse-rl {'train' if isinstance(recipe, TrainRecipe) else recipe.kind} {name}" in text
    assert max(map(len, text.splitlines())) <= 120
    if isinstance(recipe, TrainRecipe):
        assert recipe.trainer_options == (WRAPPED if name.endswith("/uptrain") else TOOLS.get(name, {}))


def test_the_folders_of_shipped_recipes_are_these():
    assert {name.split("/")[0] for name in NAMES} == {
        "bench",
        "budgets",
        "deepseek-r1-distill-llama-8b",
        "deepseek-r1-distill-qwen-7b",
        "eval",
        "gemma3-12b",
        "llama-3.2-3b-instruct",
        "mistral-7b",
        "one_liners",
        "quickstart",
        "qwen2.5-1.5b",
        "qwen3-30b-a3b",
        "qwen3-4b",
        "qwen3-4b-instruct-2507",
        "qwen3-8b",
        "retrieval",
        "turns",
    }


def differing(a: str, b: str) -> set[str]:
    """Return the keys, besides output_dir, in which two recipes differ."""
    first, second = (load_recipe(name).resolved() for name in (a, b))
    return {key for key in first if first[key] != second[key]} - {"output_dir"}


def test_recipes_that_are_compared_differ_only_in_the_compared_key():
    assert differing("quickstart/grpo", "quickstart/grpo_full") == {"cache"}
    assert differing("quickstart/grpo", "quickstart/grpo_mismatch") == {"train_attention"}
    for model in ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-8b"):
        assert differing(f"{model}/rl_sparse", f"{model}/rl_full") == {"cache"}
    between_models = differing("deepseek-r1-distill-qwen-7b/rl_sparse", "deepseek-r1-distill-llama-8b/rl_sparse")
    assert between_models == {"model", "cache"}
    assert differing("eval/amc23", "eval/amc23_16k") == {"max_completion_length"}
    assert differing(f"{QWEN}/distill", f"{QWEN}/streaming_plus") == {"cache"}
    assert differing(KVPOP[0], KVPOP[2]) == differing(KVPOP[3], KVPOP[5]) == {"cache"}
    assert differing("qwen2.5-1.5b/grpo", "qwen2.5-1.5b/grpo_am") == {"cache"}
    assert differing("qwen2.5-1.5b/grpo", "qwen2.5-1.5b/grpo_clustered") == {"cache"}


QWEN, LLAMA = "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-8b"
RETROFITS = ("kvpop_mlp", "kvpop_mlstm", "streaming_plus")
KVPOP = [f"{model}/{name}" for model in ("qwen3-4b-instruct-2507", "qwen3-8b") for name in RETROFITS]
WORKSHOP, SCORERS = "qwen3-4b-instruct-2507/kvpop_workshop", "llama-3.2-3b-instruct/kvpop_scorers"
UPTRAIN = "qwen3-4b-instruct-2507/uptrain"
SETTINGS = [  # (recipes, a part of their resolved content)
    (  # G-KV sections 7.1 and 7.3
        [f"{model}/{name}" for model in (QWEN, LLAMA) for name in ("rl_sparse", "rl_full")],
        """{num_generations: 8, max_steps: 400, lr_scheduler_type: constant_with_warmup, warmup_steps: 20, beta: 0.0,
        max_completion_length: 4096, temperature: 0.6, top_p: 0.95, learning_rate: 1.0e-6, loss_type: grpo,
        train_attention: replay, importance_correction: none, zero_truncated_advantages: true,
        validation: {problems: 32, samples: 4}}""",
    ),
    ([f"{QWEN}/rl_sparse", f"{LLAMA}/rl_sparse"], "cache: {budget: 2048, window: 16, period: 128, alpha: 0.8}"),
    ([f"{QWEN}/rl_sparse"], "cache: {policy: gkv, lam: 0.7}"),
    ([f"{LLAMA}/rl_sparse"], "cache: {policy: gkv, lam: 0.9}"),
    (  # G-KV sections 7.1 and 7.4; the budget is that of RL-Sparse
        [f"{QWEN}/distill", f"{QWEN}/streaming_plus"],
        """{keep: math, completions: data, max_steps: 250, learning_rate: 1.0e-6, max_length: 4096, temperature: 0.6,
        overlong: truncate, cache: {budget: 2048}}""",
    ),
    (  # KVpop, algorithm 1
        KVPOP,
        """{packing: true, max_steps: 2000, max_length: 16384, top_k: 256, scorer_learning_rate: 1.0e-3,
        scorer_final_learning_rate: 8.0e-5, scorer_warmup_steps: 100, kl_weight: 1.0, ce_weight: 0.0,
        boundary_weight: 1.0, cache: {sinks: 4, window: 256, budget: 2048}}""",
    ),
    (KVPOP[1::3], "cache: {scorer: {norm: false}}"),
    (
        [*KVPOP, UPTRAIN, WORKSHOP, SCORERS],
        "{learning_rate: 8.0e-5, adam_beta1: 0.9, adam_beta2: 0.95, weight_decay: 1.0e-4}",
    ),
    # table 2 of the workshop paper; the recipe of figure 3 has another model, length and number of steps
    ([UPTRAIN, WORKSHOP, SCORERS], "{lr_scheduler_type: constant, max_grad_norm: 1.0}"),
    ([UPTRAIN], "{max_length: 8192, completion_only_loss: false, max_steps: 5000}"),
    (
        [WORKSHOP],
        """{max_length: 8192, ce_weight: 0.9, kl_weight: 0.1, top_k: 256, target: {normalise: false}, max_steps: 2000,
        boundary: {margin: true, balance_min: 1.0, balance_max: 1.0}, data: {shuffle_seed: 43},
        cache: {sinks: 4, window: 64, scorer: {norm: false}}}""",
    ),
    ([SCORERS], "{max_length: 4096, max_steps: 3000}"),
    (  # table 7 of Attention Matching
        ["eval/am_aime25"],
        r"""{top_k: 20, samples: 4, max_completion_length: 8192, cache: {budget: 1024, period: 1024, window: 20},
        forced_answer: {text: "\nI need to respond with the answer.\n</think>Final Answer: "}}""",
    ),
    # G-KV: AMC at 16,384 tokens, and table 1. KVpop: 16 samples and top-k 20
    (["eval/amc23"], "{max_completion_length: 32768, samples: 32, top_k: null, temperature: 0.6, top_p: 0.95}"),
    (["eval/amc23_16k"], "{max_completion_length: 16384, samples: 32, top_k: null, temperature: 0.6, top_p: 0.95}"),
    (["eval/gkv_4k"], "{max_completion_length: 4096, samples: 32, top_k: null, temperature: 0.6, top_p: 0.95}"),
    (
        [f"eval/kvpop_{name}" for name in ("contests", "gpqa", "livecodebench")],
        "{max_completion_length: 32768, samples: 16, top_k: 20, temperature: 0.6, top_p: 0.95}",
    ),
    (["eval/kvpop_gpqa"], "accuracy: letter"),
    (["eval/kvpop_livecodebench"], "accuracy: code"),
    (["eval/wikisalad"], "{model: Qwen/Qwen3-4B-Instruct-2507, accuracy: {name: short_answer, match: exact}}"),
]


def differences(actual: Any, expected: Any, place: str = "") -> list[str]:
    """Return the places at which the expected part of a content differs."""
    if isinstance(expected, dict):
        return [line for key, part in expected.items() for line in differences(actual[key], part, f"{place}.{key}")]
    return [] if actual == expected else [f"{place} is {actual!r}, not {expected!r}"]


@pytest.mark.parametrize(("name", "part"), [(name, part) for names, part in SETTINGS for name in names])
def test_recipes_have_the_settings_of_their_papers(name, part):
    recipe = load_recipe(name)
    assert differences(recipe.resolved(), yaml.safe_load(part)) == []
    assert not isinstance(recipe, TrainRecipe) or recipe.update_rows() == 128
    assert not isinstance(recipe, GRPORecipe) or recipe.validation.data == recipe.data


@pytest.mark.parametrize("name", TRAINING_RECIPES)
def test_no_shipped_training_leaves_the_length_of_vllm_unbounded(name):
    """Else vLLM plans for the model's whole context, in a GPU that training shares. Synthetic prompts are short."""
    recipe = load_recipe(name)
    if recipe.rollout is not None and not recipe.prompt_caches():  # which only hf compacts
        bounded = recipe.with_rollout(engine="vllm").engine_arguments()["max_model_len"]
        assert (bounded is None) == (recipe.data.synthetic is not None)
        assert recipe.unbounded() == ""
    repeated = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text()).get("validation", {"data": {}})
    assert "max_prompt_tokens" not in repeated["data"]  # validation inherits it


def test_budgets_of_the_papers_recipes_have_the_stated_number_of_free_entries():
    for names, counts in (
        (KVPOP, {2048: 1788, 4096: 3836, 2276: 2016, 4292: 4032}),
        ([WORKSHOP], {512: 444, 2048: 1980}),
    ):
        for name in names:
            for budget, count in counts.items():
                cache: Any = load_recipe(name, [f"cache.budget={budget}"]).cache
                assert cache.k + cache.state_entries == count
    retrofit, uptrain = load_recipe(WORKSHOP), load_recipe(UPTRAIN)
    assert (retrofit.model, retrofit.data.path) == (uptrain.output_dir, uptrain.data.path)
    assert load_recipe(SCORERS).cache == retrofit.cache
    for name, peak in (("eval/am_aime25", 2048), ("qwen2.5-1.5b/grpo", 160), ("qwen2.5-1.5b/grpo_am", 160)):
        assert load_recipe(name).caches()[0].schedule.peak == peak


def test_recipes_of_one_shot_compaction_have_the_settings_of_the_paper():
    """QuALITY in one part and LongHealth in five under every method"""
    for name, size, tokens, parts in (("quality", "0.05", 8192, 1), ("longhealth", "0.1", 60_000, 5)):
        recipe = load_recipe(f"eval/{name}")
        assert recipe.samples == 1
        assert recipe.accuracy == "boxed"
        assert (recipe.max_completion_length, recipe.sampling().top_k) == (2048, 20)
        caches = [cache for cache in recipe.prompt_caches() if cache.chooses]
        assert ("self_study", "repeat") in {tuple(cache.queries) for cache in caches}
        assert {(cache.first, cache.most_queries) for cache in caches} == {(0, 50_000)}
        assert {cache.study_samples for cache in caches} == {1}
        assert {cache.study_tokens for cache in caches if {"self_study", "question"} & {*cache.queries}} == {2048}
        assert {len(cache.parts(tokens)) for cache in caches} == {parts}
        text = (ROOT / f"recipes/eval/{name}.yaml").read_text()
        for override in re.findall(r"\.\.\. (prompt_cache[^ ]*=[^ \n\"]+)(?= |\n)", text):
            load_recipe(
                f"eval/{name}", [override, f"prompt_cache.ratio={size}"] if "null" not in override else [override]
            )
    for name in ("methods", "ablations", "queries", "aggregations"):
        assert differing("eval/quality", f"eval/quality_{name}") == {"prompt_cache"}
        assert {len(cache.parts(8192)) for cache in load_recipe(f"eval/quality_{name}").prompt_caches()
                if cache.chooses} == {1}  # fmt: skip


def test_the_methods_of_attention_matching_are_all_there():
    """Section 4 and appendix B.3: four variants, four methods that evict, six summaries, and a compacted summary."""
    methods = load_recipe("eval/quality_methods").prompt_caches()
    assert len(methods) == 2 + 8 * 5 + 6 + 2
    fitted = {
        (cache.select, tuple(cache.queries), cache.on_policy, cache.summary)
        for cache in methods
        if cache.policy == "am"
    }
    both = ("self_study", "repeat")
    assert fitted == {
        ("omp", both, True, None), ("omp_fast", both, True, None), ("attention", both, True, None),
        ("attention", ("repeat",), True, None), ("omp", both, True, "plain"),
    }  # fmt: skip
    assert None not in {cache.budgets for cache in methods if cache.policy == "am"}
    for_long = [cache for cache in load_recipe("eval/longhealth").prompt_caches() if cache.policy == "am"]
    assert {(cache.select, tuple(cache.queries), cache.on_policy, None) for cache in for_long} == {
        variant for variant in fitted if variant[-1] is None
    }
    assert None not in {cache.budgets for cache in for_long}
    (cache, *_) = load_recipe("eval/quality").prompt_caches()
    assert cache.on_policy
    assert cache.budgets is not None
    evicting = {
        (tuple(cache.queries), cache.aggregate, cache.pool, cache.pooling, cache.heads)
        for cache in methods
        if cache.policy == "evict"
    }
    assert evicting == {
        (("context",), "mean", 1, "mean", "equal"), (("question",), "mean", 7, "max", "equal"),
        (("question",), "mean", 7, "max", "pyramid"), (("repeat",), "max", 1, "mean", "global"),
    }  # fmt: skip
    assert [cache.summary for cache in methods if cache.policy == "full"] == [
        None, "plain", "detailed", "for_questions", "concise", "shortest", "plain",
    ]  # fmt: skip


def test_the_benches_of_two_papers_have_their_settings():
    """Attention Matching's table 1; LuKA's figure 3: equations 1 to 4 without a bias, 128 recent tokens."""
    contexts = load_recipe("bench/am_stages").contexts
    assert contexts.length == [60_000]
    blocks = contexts.points()
    assert {len(block.parts(60_000)) for block in blocks} == {5}
    assert [block.queries for block in blocks[:3]] == [["context"], ["repeat"], ["self_study"]]
    both = ["self_study", "repeat"]
    chosen = [(block.select, block.queries) for block in blocks[3:]]
    assert chosen == [("attention", both), ("omp", both), ("omp_fast", both)]
    cache = load_recipe("bench/luka_step").caches()[-1]
    assert (cache.page, cache.window, cache.open_pages, cache.sinks) == (16, 128, 3, 0)
    assert (cache.compressor, cache.bias, cache.softmax) == ("attention", "none", "nested")


def test_the_recipe_of_gemma_3_has_the_methods_of_the_other_models():
    """Figure 3 of Attention Matching; the model's own sampling, and no system message."""
    recipe, others = load_recipe("gemma3-12b/quality"), load_recipe("eval/quality_methods")
    changed = {"model", "temperature", "top_k", "tasks", "prompt_cache"}
    assert differing("gemma3-12b/quality", "eval/quality_methods") == changed
    assert (recipe.temperature, recipe.top_p, recipe.top_k) == (1.0, 0.95, 64)
    assert recipe.tasks["quality"].system_prompt is None
    without = [dataclasses.replace(cache, budgets=None) for cache in others.prompt_caches()]
    assert [dataclasses.replace(cache, budgets=None) for cache in recipe.prompt_caches()] == without[:-2]
    assert {cache.budgets for cache in recipe.prompt_caches() if cache.policy == "am"} == {"optimized_agnostic.json"}


def test_one_part_of_attention_matching_is_left_out_at_a_time():
    """Figure 4, figure 5 (eight kinds of queries) and figure 9 (three statistics)"""
    full, whole, *others = load_recipe("eval/quality_ablations", ["seed=1"]).prompt_cache or []
    assert full.policy == "full"
    used = [f.name for f in dataclasses.fields(whole)]
    changed = [{name for name in used if getattr(block, name) != getattr(whole, name)} for block in others]
    assert changed == [
        {"fit_biases"}, {"fit_values"}, {"policy"}, {"budgets"}, {"queries", "study_tokens"}, {"on_policy"}, {"select"},
    ]  # fmt: skip
    kinds = [
        (tuple(block.queries), block.most_queries) for block in (load_recipe("eval/quality_queries").prompt_cache or [])
    ]
    assert len(set(kinds[1:])) == 8
    statistics = [block.aggregate for block in (load_recipe("eval/quality_aggregations").prompt_cache or [])]
    assert statistics[1:] == ["mean", "rms", "max"] * 5


def test_the_recipe_of_clustered_attention_reads_the_stated_number_of_entries():
    """At most 219, as the recipe's comment says."""
    cache = load_recipe("qwen2.5-1.5b/grpo_clustered").caches()[0]
    policy = make_policy(cache)
    assert policy.most_read(512, 512 + 1024 - 1) == 219  # the number in the recipe's comment


def test_the_wikisalad_recipe_has_the_settings_of_lukas_table_1():
    """Section 4.2 of LuKA: 8 lined, 20 clustered and 8 lined layers; equations 1 and 3."""
    recipe = load_recipe("eval/wikisalad")
    assert list(recipe.tasks) == ["easy", "medium", "hard", "very_hard"]
    lined = LinedConfig(compression=8, of="prompt", window=128, period=1)
    clustered = ClusteredConfig(
        page=16, window=128, open_pages=3, compressor="attention", bias="none", softmax="nested"
    )
    full, *sparse, mixed = recipe.caches()
    assert (full, sparse) == (FullConfig(), [lined, clustered])
    assert [(part.layers, part.cache) for part in mixed.ranges] == [(8, lined), (20, clustered), (8, lined)]


def test_the_recipes_for_pg19_have_the_settings_of_lukas_figures():
    """Section 5 of LuKA: the first 512 tokens (figures 4 and 6) or 1,024 tokens (figure 5) of a book."""
    fractions, modes = load_recipe("eval/pg19"), load_recipe("eval/pg19_modes")
    for recipe, tokens in ((fractions, 512), (modes, 1024)):
        assert (recipe.pieces, recipe.prompt_tokens, recipe.prompt_tokens + recipe.completion_tokens) == (1, 1, tokens)
    full, *caches = fractions.caches()
    shown = {(cache.compressor, cache.values) for cache in caches if isinstance(cache, ClusteredConfig)}
    assert full == FullConfig()
    assert shown == {
        *((compressor, "kept") for compressor in ("attention", "mean", "random")), ("attention", "zero"),
        ("mean", "zero"),
    }  # fmt: skip
    assert len(caches) == 5 * 11
    for window in (128, 16):
        for cache in load_recipe("eval/pg19", [f"sweep.cache.window=[{window}]"]).caches()[1:]:
            assert (cache.page, cache.window, cache.bias, cache.softmax) == (16, window, "none", "nested")
            policy = make_policy(cache)
            closed = int(policy.pages.closed(1, 510))
            assert policy.most_opened(closed) == math.ceil(cache.fraction * closed - 1e-9)
    parts = modes.caches()[-1]
    assert parts.spans(28) == [9, 10, 9]


def test_evaluation_recipes_have_the_tasks_and_caches_of_their_papers():
    rl, trained = load_recipe(f"{QWEN}/rl_sparse"), load_recipe("eval/gkv_4k")
    assert trained.caches() == [dataclasses.replace(rl.cache, budget=budget) for budget in (512, 1024, 2048)]
    contests = load_recipe("eval/kvpop_contests").tasks
    assert [*contests] == ["aime24", "aime25", "hmmt_feb25", "hmmt_nov25"]
    assert {data.thinking for data in contests.values()} == {True}
    assert [*load_recipe("eval/kvpop_gpqa").tasks] == ["gpqa_diamond"]
    assert [*load_recipe("eval/kvpop_livecodebench").tasks] == ["livecodebench"]


def test_sweeps_of_g_kv_compare_the_policies_of_its_figures():
    """Figures 5 (StreamingLLM's window is the budget) and 4 (the global score without redundancy at each alpha)."""
    recipe = load_recipe("eval/gkv_budgets")
    caches: list[Any] = recipe.caches()
    held = {cache.name: [c.budget - c.sinks for c in caches if c.name == cache.name] for cache in caches[1:]}
    assert caches[0].name == "full"
    assert held == {name: [512, 1024, 2048] for name in ("streaming", "snapkv", "morphkv", "rkv", "gkv")}
    assert {cache.period for cache in caches[1:]} == {128}
    scores = load_recipe("eval/gkv_scores")
    assert (scores.max_completion_length, scores.samples) == (16384, 32)
    points: list[Any] = scores.caches()
    assert {(cache.budget, cache.window, cache.period) for cache in points} == {(512, 16, 128)}
    assert [cache.name for cache in points[:2]] == ["morphkv", "cake"]
    assert {(cache.name, cache.redundancy, cache.pooling) for cache in points[2:]} == {("gkv", False, 1)}
    forms = {form: [cache.alpha for cache in points[2:] if cache.form == form] for form in ("max", "mean", "sum")}
    assert all(alphas == [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0] for alphas in forms.values())


def test_the_reasoning_sweep_has_every_policy_at_the_same_budgets():
    """The 4 sinks of StreamingLLM are added to each budget."""
    recipe, text = load_recipe("eval/reasoning"), (ROOT / "recipes/eval/reasoning.yaml").read_text()
    results: dict[str, list[int]] = {}
    for cache in recipe.caches():
        results.setdefault(cache.name, []).append(getattr(cache, "budget", 0))
    bounded = [name for name in results if name in BOUNDED]
    expected = {name: [512, 1024, 2048] for name in bounded} | {"full": [0]}
    assert results == expected | {"streaming": [4 + 512, 4 + 1024, 4 + 2048]}
    assert f"1 full + {len(bounded)} policies x 3 budgets = {len(recipe.caches())} caches" in text


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("streaming_plus")])
def test_recipes_without_scorers_do_not_mention_the_boundary_loss(name):
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    assert "1 x boundary loss" not in text
    assert "gamma" not in text
    assert "scorer_" not in text


def test_accelerate_configurations_start_8_processes_and_set_no_zero_stage():
    files = sorted((ROOT / "recipes/accelerate_configs").glob("*.yaml"))
    assert [file.stem for file in files] == ["multi_gpu", "zero2", "zero3"]
    for file in files:
        content = yaml.safe_load(file.read_text())
        assert "kind" not in content
        assert content["num_processes"] == 8
        assert "zero_stage" not in content.get("deepspeed_config", {})
        assert f"--config_file recipes/accelerate_configs/{file.name} -m sparse_rl.cli train" in file.read_text()


@pytest.mark.parametrize("name", TRAINING_RECIPES)
@pytest.mark.few(2)
def test_each_recipe_trains_at_a_small_size(name, stand_ins, tmp_path, monkeypatch):
    from sparse_rl.commands.train import train
    from sparse_rl.metrics import read_metrics

    monkeypatch.setenv("WANDB_MODE", "disabled")
    recipe = load_recipe(name)
    folder = tmp_path / "run"
    chat = recipe.data.synthetic is None
    monkeypatch.setattr("sparse_rl.recipe.sft.CHECK_PROBLEMS", 8)
    overrides = [*stand_ins(name, chat=chat), *small_training(recipe), f"output_dir={folder}"]
    if name != BFLOAT16:
        overrides.append("dtype=float32")
    model = train(load_recipe(name, overrides))

    metrics = read_metrics(folder)
    lines = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    assert (folder / "recipe.yaml").is_file()
    assert (model / "model.safetensors").is_file()
    if isinstance(recipe, GRPORecipe):
        replayed = recipe.grpo.train_attention == "replay"
        limit = 0.05 if name == BFLOAT16 else 1e-5
        assert all((line["replay/gap_max"] <= limit) is replayed for line in lines)
        evicts = recipe.cache.name not in ("full", "clustered")
        assert all((line["cache/retention"] < 1) is evicts for line in lines)
        saved = saved_policy(model)
        assert saved.name == recipe.cache.name
        validated = [line["step"] for line in metrics if "eval_reward" in line]
        assert validated == ([1, 2] if recipe.validation is not None else [])
    elif isinstance(recipe, TaughtRecipe):
        assert all(line["cache/retention"] < 1 and line["kl"] > 0 for line in lines)
        assert [line["step"] for line in metrics if "eval_kl" in line] == ([0, 1, 2] if recipe.validation else [])
        assert (saved := saved_policy(model)) is not None
        assert saved.name == recipe.cache.name
    else:
        assert any("accuracy_full" in line for line in metrics) is (recipe.sft.stop_at_accuracy is not None)


@pytest.mark.parametrize("name", EVALUATION_RECIPES)
@pytest.mark.few(2)
def test_each_evaluation_runs_at_a_small_size(name, tiny_model, problems_for, tmp_path):
    from sparse_rl.commands.eval import evaluate

    recipe = load_recipe(name)
    for cache in recipe.caches():
        assert cache is None or make_policy(cache).config == cache
    tiny = SHIPPED.get(recipe.model) or tiny_model(family_of(recipe.model), name != "quickstart/eval")
    overrides = [
        f"model={tiny}",
        f"output_dir={tmp_path / 'run'}",
        "dtype=float32",
        f"samples={min(recipe.samples, 2)}",
        "max_completion_length=12",
    ]
    for task, data in recipe.tasks.items():
        if data.synthetic is None:
            overrides += [f"tasks.{task}.path={problems_for(data)}", f"tasks.{task}.split=train"]
            overrides += [f"tasks.{task}.subset=null", f"tasks.{task}.columns={json.dumps(data.columns)}"]
        overrides.append(f"tasks.{task}.limit=2")
    if recipe.sweep.policy or recipe.sweep.cache:
        if any(hasattr(cache, "budget") for cache in recipe.caches()):
            if any("window" in cache.as_block() for cache in recipe.caches()):
                overrides.append("cache.window=4")
            overrides += ["cache.period=4", "sweep.cache.budget=[12]"]
        else:
            swept = json.dumps(recipe.resolved()["sweep"]["policy"])
            overrides.append("sweep.policy=" + swept.replace('"window": 128', '"window": 4').replace("16", "2"))
    elif recipe.cache is not None:
        overrides.append(shortened(recipe))
    if recipe.forced_answer is not None:
        overrides.append("forced_answer={text: '1', tokens: 4}")
    if recipe.prompt_cache is not None:
        blocks = yaml.safe_load((ROOT / f"recipes/{name}.yaml").read_text())["prompt_cache"]
        short = {"ratio": [0.1], "study_tokens": 4, "summary_tokens": 8, "budgets": None}  # no budgets of a tiny model
        shorter = [block | short for block in (blocks if isinstance(blocks, list) else [blocks])]
        overrides.append(f"prompt_cache={json.dumps(shorter)}")
    small = load_recipe(name, overrides)
    rows = evaluate(small, progress=False)
    points = len(small.prompt_caches() or small.caches())
    assert len(rows) == points * len(recipe.tasks)
    assert all(row.problems == 2 and row.accuracy is not None and 0 <= row.accuracy <= 1 for row in rows)
    assert {row.task for row in rows} == set(recipe.tasks)


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].kind == "perplexity"])
@pytest.mark.few(1)
def test_each_perplexity_recipe_runs_at_a_small_size(name, tiny_model, tmp_path):
    from sparse_rl.commands.perplexity import measure

    (tmp_path / "book.txt").write_text("Qa1b2c3?a1A1;" * 20)
    overrides = [f"model={tiny_model('qwen3', True)}", f"text={tmp_path}/book.txt", f"output_dir={tmp_path / 'run'}"]
    overrides += ["dtype=float32", "rollout.engine=hf"]
    short = ["prompt_tokens=16", "completion_tokens=16", "pieces=2"]
    swept = "sweep={policy: [full, streaming, h2o], cache: {budget: [8, 12]}}"
    rows = measure(load_recipe(name, [*overrides, *short, swept]), False)
    assert [(row.policy, row.parameters.get("budget")) for row in rows] == [
        ("full", None), ("streaming", 8), ("streaming", 12), ("h2o", 8), ("h2o", 12),
    ]  # fmt: skip
    assert len({row.nll for row in rows}) == 5
    fraction = ["sweep.cache.fraction=[0.5]"] if load_recipe(name).sweep.cache else []
    overrides += [f"output_dir={tmp_path / 'own'}", "completion_tokens=200", *fraction]
    rows = measure(load_recipe(name, overrides), False)
    assert len(rows) == len(load_recipe(name).sweep.policy)
    different = [row.nll for row in rows if row.policy != "layered"]  # the model's two layers are both lined
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].kind == "budgets"])
def test_each_recipe_of_head_budgets_runs_at_a_small_size(name, stand_ins):
    from sparse_rl.commands.budgets import measure

    small = load_recipe(name, [*stand_ins(name), "dtype=float32", *small_evaluation(load_recipe(name))])
    content = measure(small.expect(BudgetsRecipe), progress=False)
    assert len(content["shares"]) == 2
    assert min(map(min, content["shares"])) >= 0


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation problems are not here")
@pytest.mark.parametrize(
    ("task", "name"), [(t, f"eval/{t}") for t in ("aime24", "aime25", "amc23", "math500", "gsm8k")]
)
@pytest.mark.few(1)
def test_evaluation_recipes_read_the_real_problems_from_local_files(task, name, tiny_model):
    from rewards import make_rewards

    file = DATA / ("gsm8k_test.jsonl" if task == "gsm8k" else f"{task}.jsonl")
    overrides = [f"tasks.{task}.path={file}", f"tasks.{task}.split=train", f"tasks.{task}.columns.prompt=problem"]
    if task == "gsm8k":
        overrides.append("tasks.gsm8k.answer_after=null")
    recipe = load_recipe(name, overrides)
    tokenizer = load_tokenizer(tiny_model("qwen2", True))
    rows = load_data(dataclasses.replace(recipe.tasks[task], limit=30), tokenizer, require=("prompt", "answer"))
    assert all(row["prompt"][-1]["content"].endswith(r"put your final answer within \boxed{}.") for row in rows)
    assert all(prompt_ids(row["prompt"], tokenizer) for row in rows)
    (accuracy,), _ = make_rewards([recipe.accuracy])
    answers = rows["answer"][:3]
    right = accuracy([f"So it is $\\boxed{{{answer}}}$." for answer in answers], answer=answers)
    wrong = accuracy(["So it is $\\boxed{-123456}$."] * 3, answer=answers)
    assert right == [1.0] * 3
    assert wrong == [0.0] * 3
