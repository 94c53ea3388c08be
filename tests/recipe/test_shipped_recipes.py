"""Every shipped recipe is valid, has the settings of its paper, and runs, scaled down, on a tiny model of its
family."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from policy_cases import BOUNDED
from small_recipes import family_of, shortened, small_evaluation, small_training

from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.methods.config import AMConfig, ClusteredConfig, FullConfig, GKVConfig, LayeredConfig, LinedConfig
from sparse_rl.methods.pages.clustered import Clustered
from sparse_rl.models.directory import saved_policy
from sparse_rl.models.load import load_tokenizer
from sparse_rl.policies import make_policy
from sparse_rl.recipe import (
    BudgetsRecipe,
    DistillRecipe,
    EvalRecipe,
    GRPORecipe,
    KVpopRecipe,
    PerplexityRecipe,
    SFTRecipe,
    TaughtRecipe,
    TrainRecipe,
    list_recipes,
    load_recipe,
)

ROOT = Path(__file__).parents[2]
NAMES = list_recipes()
TRAINING_RECIPES = [name for name in NAMES if isinstance(load_recipe(name), TrainRecipe)]
EVALUATION_RECIPES = [name for name in NAMES if load_recipe(name).kind == "eval"]
DATA = ROOT.parent / "shared/data"
WRAPPED = {"packing": True, "packing_strategy": "wrapped"}  # TRL's options of the workshop paper's first phase
BFLOAT16 = "deepseek-r1-distill-qwen-7b/rl_sparse"  # the only recipe that keeps its dtype


# ---- contents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_shipped_recipe_is_valid_and_names_its_command(name: str) -> None:
    """Each shipped recipe loads without a warning, has an output directory of its own, and begins with a comment whose
    command names the recipe."""
    recipe = load_recipe(name)
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    assert recipe.warnings == []
    assert recipe.output_dir == f"runs/{name}"
    assert text.startswith("# ")
    assert f"sparse-rl {'train' if isinstance(recipe, TrainRecipe) else recipe.kind} {name}" in text
    assert max(map(len, text.splitlines())) <= 120
    if isinstance(recipe, TrainRecipe):
        assert recipe.trainer_options == (WRAPPED if name.endswith("/uptrain") else {})


def test_the_folders_of_shipped_recipes_are_these() -> None:
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
    }


def differing(a: str, b: str) -> set[str]:
    """Return the keys, besides output_dir, in which two recipes differ."""
    first, second = (load_recipe(name).resolved() for name in (a, b))
    return {key for key in first if first[key] != second[key]} - {"output_dir"}


def test_recipes_that_are_compared_differ_only_in_the_compared_key() -> None:
    assert differing("quickstart/grpo", "quickstart/grpo_full") == {"cache"}
    assert differing("quickstart/grpo", "quickstart/grpo_mismatch") == {"train_attention"}
    for model in ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-8b"):
        assert differing(f"{model}/rl_sparse", f"{model}/rl_full") == {"cache"}
    between_models = differing("deepseek-r1-distill-qwen-7b/rl_sparse", "deepseek-r1-distill-llama-8b/rl_sparse")
    assert between_models == {"model", "cache"}
    assert differing("eval/amc23", "eval/amc23_16k") == {"max_completion_length"}


@pytest.mark.parametrize("name", [name for name in TRAINING_RECIPES if name.startswith("deepseek") and "rl_" in name])
def test_grpo_recipes_have_the_settings_of_g_kv(name: str) -> None:
    """The GRPO recipe has G-KV's settings: 16 prompts x 8 samples, 400 steps, 4096 tokens, temperature 0.6, learning
    rate 1e-6, no KL, budget 2048, and validation on 32 problems of the training set with 4 samples each."""
    recipe = load_recipe(name)
    assert isinstance(recipe, GRPORecipe)
    assert recipe.validation is not None
    batch, training = recipe.update_rows(), recipe.training
    assert (batch, batch // recipe.grpo.num_generations, training.max_steps) == (128, 16, 400)
    assert (training.lr_scheduler_type, training.warmup_steps) == ("constant_with_warmup", 20)
    assert (recipe.grpo.max_completion_length, recipe.grpo.temperature, training.learning_rate) == (
        4096,
        0.6,
        1e-6,
    )
    assert (recipe.grpo.loss_type, recipe.grpo.beta, recipe.grpo.importance_correction) == ("grpo", 0.0, "none")
    assert recipe.grpo.zero_truncated_advantages
    assert recipe.grpo.train_attention == "replay"
    assert (recipe.validation.problems, recipe.validation.samples) == (32, 4)
    assert recipe.validation.data == recipe.data
    if name.endswith("rl_sparse"):
        lam = 0.9 if "llama" in name else 0.7
        assert recipe.cache == GKVConfig(budget=2048, window=16, period=128, alpha=0.8, lam=lam)


@pytest.mark.parametrize("name", ["distill", "streaming_plus"])
def test_distillation_recipes_have_the_settings_of_g_kv(name: str) -> None:
    """The distillation recipe has the settings of G-KV sections 7.1 and 7.4: 250 steps, batch 128, learning rate 1e-6,
    sequences of 4096 tokens, correct outputs only, and temperature 0.6. The budget, 2048, is that of RL-Sparse."""
    recipe = load_recipe(f"deepseek-r1-distill-qwen-7b/{name}")
    assert isinstance(recipe, DistillRecipe)
    assert recipe.distill.keep == "math"
    assert recipe.distill.completions == "data"
    batch, training = recipe.update_rows(), recipe.training
    assert (batch, training.max_steps, training.learning_rate) == (128, 250, 1e-6)
    cache: Any = recipe.cache
    assert (recipe.distill.max_length, recipe.loss.temperature, cache.budget) == (4096, 0.6, 2048)
    assert recipe.distill.overlong == "truncate"
    assert differing("deepseek-r1-distill-qwen-7b/distill", "deepseek-r1-distill-qwen-7b/streaming_plus") == {"cache"}


@pytest.mark.parametrize("model", ["qwen3-4b-instruct-2507", "qwen3-8b"])
def test_retrofit_recipes_have_the_settings_of_kvpop(model: str) -> None:
    """The retrofit recipes have the settings of KVpop algorithm 1: 2,000 steps, batch 128, sequences of 16,384 tokens,
    a loss over the top 256 tokens, window w 256, sinks s 4, budget 2048 or 4096, and the paper's learning rates."""
    for name in ("kvpop_mlp", "kvpop_mlstm", "streaming_plus"):
        for budget, k in ((None, 1788), (4096, 3836), (2276, 2016), (4292, 4032)):
            recipe = load_recipe(f"{model}/{name}", [] if budget is None else [f"cache.budget={budget}"])
            assert isinstance(recipe, KVpopRecipe)
            assert recipe.kvpop.packing
            batch, training = recipe.update_rows(), recipe.training
            assert (batch, recipe.training.max_steps, recipe.kvpop.max_length, recipe.loss.top_k) == (
                128,
                2000,
                16384,
                256,
            )
            assert (recipe.training.learning_rate, recipe.kvpop.scorer_learning_rate) == (8e-5, 1e-3)
            assert (recipe.kvpop.scorer_final_learning_rate, recipe.kvpop.scorer_warmup_steps) == (8e-5, 100)
            assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (
                0.9,
                0.95,
                1e-4,
            )
            assert (recipe.loss.kl_weight, recipe.loss.ce_weight, recipe.kvpop.boundary_weight) == (1, 0, 1)
            policy: Any = recipe.cache
            assert (policy.sinks, policy.window, policy.k + policy.state_entries) == (4, 256, k)
            assert policy.budget == (budget or 2048)
            if name == "kvpop_mlstm":
                assert not policy.scorer.norm
    assert differing(f"{model}/kvpop_mlp", f"{model}/streaming_plus") == {"cache"}


def test_recipes_of_the_workshop_paper_have_its_settings() -> None:
    """The recipes have the settings of the workshop paper's table 2: 5,000 steps of uptraining and
    2,000 of the retrofit, of 128 rows of 8,192 tokens; k 444 at budget 512 and 1,980 at 2,048, window 64, losses 0.9 CE
    + 0.1 KL. The target is not normalised, and the boundary loss does not balance its pairs of tokens.
    The recipe of figure 3 has another model, length and number of steps."""
    uptrain = load_recipe("qwen3-4b-instruct-2507/uptrain")
    assert isinstance(uptrain, SFTRecipe)
    assert (uptrain.sft.max_length, uptrain.sft.completion_only_loss) == (8192, False)
    for budget, k in ((512, 444), (2048, 1980)):
        retrofit = load_recipe("qwen3-4b-instruct-2507/kvpop_workshop", [f"cache.budget={budget}"])
        assert isinstance(retrofit, KVpopRecipe)
        policy: Any = retrofit.cache
        assert (policy.k, policy.sinks, policy.window, policy.scorer.norm) == (k, 4, 64, False)
        assert (retrofit.model, retrofit.kvpop.max_length) == (uptrain.output_dir, 8192)
        assert (retrofit.loss.ce_weight, retrofit.loss.kl_weight, retrofit.loss.top_k) == (0.9, 0.1, 256)
        assert not retrofit.kvpop.target.normalise
        boundary = retrofit.kvpop.boundary
        assert (boundary.margin, boundary.balance_min, boundary.balance_max) == (True, 1, 1)
        assert (retrofit.data.path, retrofit.data.shuffle_seed) == (uptrain.data.path, 43)
    scorers = load_recipe("llama-3.2-3b-instruct/kvpop_scorers")
    assert isinstance(scorers, KVpopRecipe)
    assert scorers.kvpop.max_length == 4096
    assert scorers.cache == load_recipe("qwen3-4b-instruct-2507/kvpop_workshop").cache
    for recipe, steps in ((uptrain, 5000), (retrofit, 2000), (scorers, 3000)):
        training = recipe.training
        assert (recipe.update_rows(), training.max_steps, training.learning_rate) == (128, steps, 8e-5)
        assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 1e-4)
        assert (training.lr_scheduler_type, training.max_grad_norm) == ("constant", 1.0)


def test_the_attention_matching_recipe_has_the_settings_of_its_paper() -> None:
    """The Attention Matching recipe has the settings of the paper's table 7: 2,048 physical entries for 8,192 tokens,
    window 20, 4 runs, top-k 20, and the paper's text that forces an answer at the limit."""
    recipe = load_recipe("eval/am_aime25")
    assert isinstance(recipe, EvalRecipe)
    assert recipe.forced_answer is not None
    assert recipe.forced_answer.text == "\nI need to respond with the answer.\n</think>Final Answer: "
    assert recipe.sampling().top_k == 20
    (cache,) = recipe.caches()
    assert isinstance(cache, AMConfig)
    assert cache.schedule.peak == 2048
    assert (cache.budget, cache.period, cache.window) == (1024, 1024, 20)
    assert (recipe.samples, recipe.max_completion_length) == (4, 8192)
    for name in ("grpo", "grpo_am"):
        cache = load_recipe(f"qwen2.5-1.5b/{name}").caches()[0]
        assert cache is not None
        assert cache.schedule.peak == 160
    assert differing("qwen2.5-1.5b/grpo", "qwen2.5-1.5b/grpo_am") == {"cache"}


def test_recipes_of_one_shot_compaction_have_the_settings_of_the_paper() -> None:
    """The recipes for QuALITY and LongHealth have the paper's settings: 2,048 new tokens, self-study and repetition
    with one answer to each starter, 50,000 queries, QuALITY in one part and LongHealth in five under every method. The
    overrides that the comments name load, and the other recipes for QuALITY differ from it only in their methods."""
    for name, size, tokens, parts in (("quality", "0.05", 8192, 1), ("longhealth", "0.1", 60_000, 5)):
        recipe = load_recipe(f"eval/{name}")
        assert isinstance(recipe, EvalRecipe)
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


def test_the_methods_of_attention_matching_are_all_there() -> None:
    """Section 4 and appendix B.3: four variants of Attention Matching, four methods that evict, six summaries, and a
    summary that is compacted. All but the simplest variant have on-policy queries of self-study and repetition."""
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
        ("attention", ("repeat",), False, None), ("omp", both, True, "plain"),
    }  # fmt: skip
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


def test_the_recipe_of_gemma_3_has_the_methods_of_the_other_models() -> None:
    """Figure 3 of Attention Matching: the methods of eval/quality_methods, without the compacted summary of table 2,
    with other head budgets, and the model's own sampling. The prompt has no system message."""
    recipe, others = load_recipe("gemma3-12b/quality"), load_recipe("eval/quality_methods")
    assert isinstance(recipe, EvalRecipe)
    changed = {"model", "temperature", "top_k", "tasks", "prompt_cache"}
    assert differing("gemma3-12b/quality", "eval/quality_methods") == changed
    assert (recipe.temperature, recipe.top_p, recipe.top_k) == (1.0, 0.95, 64)
    assert recipe.tasks["quality"].system_prompt is None
    without = [dataclasses.replace(cache, budgets=None) for cache in others.prompt_caches()]
    assert [dataclasses.replace(cache, budgets=None) for cache in recipe.prompt_caches()] == without[:-2]
    assert {cache.budgets for cache in recipe.prompt_caches() if cache.policy == "am"} == {"optimized_agnostic.json"}


def test_one_part_of_attention_matching_is_left_out_at_a_time() -> None:
    """Figure 4: each block of eval/quality_ablations differs from the first fitted one in one setting, apart from
    `evict`, which leaves out biases and values. Figure 5: eight kinds of queries. Figure 9: three statistics."""
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


def test_the_recipe_of_clustered_attention_reads_the_stated_number_of_entries() -> None:
    """The recipe differs from qwen2.5-1.5b/grpo only in its cache. At the end of the longest completion a query reads
    at most 219 entries, as the recipe's comment says."""
    assert differing("qwen2.5-1.5b/grpo", "qwen2.5-1.5b/grpo_clustered") == {"cache"}
    cache = load_recipe("qwen2.5-1.5b/grpo_clustered").caches()[0]
    policy = make_policy(cache)
    assert policy.most_read(512, 512 + 1024 - 1) == 219  # the number in the recipe's comment


def test_the_wikisalad_recipe_has_the_settings_of_lukas_table_1() -> None:
    """Section 4.2 of LuKA: Qwen3-4B-Instruct-2507; pages of 16 tokens, weighted by attention, 3 of them opened; 128
    recent tokens; 1/8 of the prompt's length; 8 lined, 20 clustered and 8 lined layers. Equations 1 and 3."""
    recipe = load_recipe("eval/wikisalad")
    assert isinstance(recipe, EvalRecipe)
    assert recipe.model == "Qwen/Qwen3-4B-Instruct-2507"
    assert list(recipe.tasks) == ["easy", "medium", "hard", "very_hard"]
    lined = LinedConfig(compression=8, of="prompt", window=128, period=1)
    clustered = ClusteredConfig(
        page=16, window=128, open_pages=3, compressor="attention", bias="none", softmax="nested"
    )
    full, *sparse, mixed = recipe.caches()
    assert (full, sparse) == (FullConfig(), [lined, clustered])
    assert isinstance(mixed, LayeredConfig)
    assert [(part.layers, part.cache) for part in mixed.ranges] == [(8, lined), (20, clustered), (8, lined)]
    assert recipe.accuracy == {"name": "short_answer", "match": "exact"}


def test_the_recipes_for_pg19_have_the_settings_of_lukas_figures() -> None:
    """Section 5 of LuKA: the first 512 tokens (figures 4 and 6) or 1,024 tokens (figure 5) of a book. A fraction of 1
    opens all pages of these tokens."""
    fractions, modes = load_recipe("eval/pg19"), load_recipe("eval/pg19_modes")
    assert isinstance(fractions, PerplexityRecipe)
    assert isinstance(modes, PerplexityRecipe)
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
            assert isinstance(cache, ClusteredConfig)
            assert (cache.page, cache.window, cache.bias, cache.softmax) == (16, window, "none", "nested")
            policy = make_policy(cache)
            assert isinstance(policy, Clustered)
            closed = int(policy.pages.closed(1, 510))
            assert cache.fraction is not None
            assert policy.most_opened(closed) == math.ceil(cache.fraction * closed - 1e-9)
    parts = modes.caches()[-1]
    assert isinstance(parts, LayeredConfig)
    assert parts.spans(28) == [9, 10, 9]


def test_evaluation_recipes_have_the_settings_of_their_papers() -> None:
    """The evaluation recipes have the papers' settings. G-KV: AMC at 16,384 tokens, and table 1 at 4,096 tokens and at
    three budgets, the last of which is that of the training. KVpop: 16 samples and top-k 20."""
    long, short, trained = (load_recipe(f"eval/{name}") for name in ("amc23", "amc23_16k", "gkv_4k"))
    contests, gpqa = load_recipe("eval/kvpop_contests"), load_recipe("eval/kvpop_gpqa")
    programs = load_recipe("eval/kvpop_livecodebench")
    for recipe, length, samples, top_k in (
        (long, 32768, 32, None),
        (short, 16384, 32, None),
        (trained, 4096, 32, None),
        (contests, 32768, 16, 20),
        (gpqa, 32768, 16, 20),
        (programs, 32768, 16, 20),
    ):
        assert isinstance(recipe, EvalRecipe)
        sampling = recipe.sampling(recipe.samples)
        assert (sampling.max_tokens, sampling.n, sampling.top_k) == (length, samples, top_k)
        assert (sampling.temperature, sampling.top_p) == (0.6, 0.95)
    rl = load_recipe("deepseek-r1-distill-qwen-7b/rl_sparse")
    assert isinstance(trained, EvalRecipe)
    assert isinstance(rl, GRPORecipe)
    assert isinstance(rl.cache, GKVConfig)
    assert trained.caches() == [dataclasses.replace(rl.cache, budget=budget) for budget in (512, 1024, 2048)]
    assert trained.max_completion_length == rl.grpo.max_completion_length
    assert isinstance(contests, EvalRecipe)
    assert {task: data.thinking for task, data in contests.tasks.items()} == dict.fromkeys(
        ("aime24", "aime25", "hmmt_feb25", "hmmt_nov25"), True
    )
    assert isinstance(gpqa, EvalRecipe)
    assert (list(gpqa.tasks), gpqa.accuracy) == (["gpqa_diamond"], "letter")
    assert isinstance(programs, EvalRecipe)
    assert (list(programs.tasks), programs.accuracy) == (["livecodebench"], "code")


def test_sweeps_of_g_kv_compare_the_policies_of_its_figures() -> None:
    """eval/gkv_budgets has the policies of figure 5, StreamingLLM's window being the budget. eval/gkv_scores has those
    of figure 4, at budget 512: the global score without redundancy, in each form at each alpha, MorphKV and CAKE."""
    recipe = load_recipe("eval/gkv_budgets")
    assert isinstance(recipe, EvalRecipe)
    caches: list[Any] = recipe.caches()
    held = {cache.name: [c.budget - c.sinks for c in caches if c.name == cache.name] for cache in caches[1:]}
    assert caches[0].name == "full"
    assert held == {name: [512, 1024, 2048] for name in ("streaming", "snapkv", "morphkv", "rkv", "gkv")}
    assert {cache.period for cache in caches[1:]} == {128}
    scores = load_recipe("eval/gkv_scores")
    assert isinstance(scores, EvalRecipe)
    assert (scores.max_completion_length, scores.samples) == (16384, 32)
    points: list[Any] = scores.caches()
    assert {(cache.budget, cache.window, cache.period) for cache in points} == {(512, 16, 128)}
    assert [cache.name for cache in points[:2]] == ["morphkv", "cake"]
    assert {(cache.name, cache.redundancy, cache.pooling) for cache in points[2:]} == {("gkv", False, 1)}
    forms = {form: [cache.alpha for cache in points[2:] if cache.form == form] for form in ("max", "mean", "sum")}
    assert all(alphas == [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0] for alphas in forms.values())


def test_the_reasoning_sweep_has_every_policy_at_the_same_budgets() -> None:
    """The sweep has every policy at the same budgets, and as many caches as the recipe's comment says; the 4 sinks of
    StreamingLLM are added to each budget."""
    recipe, text = load_recipe("eval/reasoning"), (ROOT / "recipes/eval/reasoning.yaml").read_text()
    assert isinstance(recipe, EvalRecipe)
    results: dict[str, list[int]] = {}
    for cache in recipe.caches():
        assert cache is not None
        results.setdefault(cache.name, []).append(getattr(cache, "budget", 0))
    bounded = [name for name in results if name in BOUNDED]
    expected = {name: [512, 1024, 2048] for name in bounded} | {"full": [0]}
    assert results == expected | {"streaming": [4 + 512, 4 + 1024, 4 + 2048]}
    assert f"1 full + {len(bounded)} policies x 3 budgets = {len(recipe.caches())} caches" in text


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("streaming_plus")])
def test_recipes_without_scorers_do_not_mention_the_boundary_loss(name: str) -> None:
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    assert "1 x boundary loss" not in text
    assert "gamma" not in text
    assert "scorer_" not in text


def test_accelerate_configurations_start_8_processes_and_set_no_zero_stage() -> None:
    """The accelerate configurations are not recipes, and leave the ZeRO stage to the recipe."""
    files = sorted((ROOT / "recipes/accelerate_configs").glob("*.yaml"))
    assert [file.stem for file in files] == ["multi_gpu", "zero2", "zero3"]
    for file in files:
        content = yaml.safe_load(file.read_text())
        assert "kind" not in content
        assert content["num_processes"] == 8
        assert "zero_stage" not in content.get("deepspeed_config", {})
        assert f"--config_file recipes/accelerate_configs/{file.name} -m sparse_rl.cli train" in file.read_text()


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINING_RECIPES)
@pytest.mark.few(6)
def test_each_recipe_trains_at_a_small_size(
    name: str, stand_ins: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two training steps of each recipe, at a hundredth of its size, have finite losses and an exact replay, and export
    a model."""
    from sparse_rl.commands.train import train
    from sparse_rl.metrics import read_metrics

    monkeypatch.setenv("WANDB_MODE", "disabled")
    recipe = load_recipe(name)
    folder = tmp_path / "run"
    chat = recipe.data.synthetic is None
    monkeypatch.setattr("sparse_rl.commands.trainers.CHECK_PROBLEMS", 8)
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
        assert saved is not None
        assert saved.name == recipe.cache.name
        validated = [line["step"] for line in metrics if "eval_reward" in line]
        assert validated == ([1, 2] if recipe.validation is not None else [])
    elif isinstance(recipe, TaughtRecipe):
        assert all(line["cache/retention"] < 1 and line["kl"] > 0 for line in lines)
        assert [line["step"] for line in metrics if "eval_kl" in line] == ([0, 1, 2] if recipe.validation else [])
        assert (saved := saved_policy(model)) is not None
        assert saved.name == recipe.cache.name
    else:
        assert isinstance(recipe, SFTRecipe)
        assert any("accuracy_full" in line for line in metrics) is (recipe.sft.stop_at_accuracy is not None)


@pytest.mark.parametrize("name", EVALUATION_RECIPES)
@pytest.mark.few(5)
def test_each_evaluation_runs_at_a_small_size(
    name: str, tiny_model: Callable, problems_for: Callable, tmp_path: Path
) -> None:
    """Every task of each evaluation recipe runs on two problems, under the recipe's caches scaled down."""
    from sparse_rl.commands.eval import evaluate

    recipe = load_recipe(name)
    assert isinstance(recipe, EvalRecipe)
    for cache in recipe.caches():
        assert cache is None or make_policy(cache).config == cache
    overrides = [
        f"model={tiny_model(family_of(load_recipe(name).model), name != 'quickstart/eval')}",
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
            overrides += ["cache.window=4", "cache.period=4", "sweep.cache.budget=[12]"]
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
    assert isinstance(small, EvalRecipe)
    rows = evaluate(small, progress=False)
    points = len(small.prompt_caches() or small.caches())
    assert len(rows) == points * len(recipe.tasks)
    assert all(row.problems == 2 and row.accuracy is not None and 0 <= row.accuracy <= 1 for row in rows)
    assert {row.task for row in rows} == set(recipe.tasks)


@pytest.mark.parametrize("name", [name for name in NAMES if load_recipe(name).kind == "perplexity"])
@pytest.mark.few(1)
def test_each_perplexity_recipe_runs_at_a_small_size(name: str, tiny_model: Callable, tmp_path: Path) -> None:
    """The perplexity recipes run on a tiny model: on few tokens under a sweep that a recipe's comment names, and on 200
    tokens, so that pages close, under their own caches, with one fraction."""
    from sparse_rl.commands.perplexity import measure

    (tmp_path / "book.txt").write_text("Qa1b2c3?a1A1;" * 20)
    overrides = [f"model={tiny_model('qwen3', True)}", f"text={tmp_path}/book.txt", f"output_dir={tmp_path / 'run'}"]
    overrides += ["dtype=float32", "rollout.engine=hf"]
    short = ["prompt_tokens=16", "completion_tokens=16", "pieces=8"]
    swept = "sweep={policy: [full, streaming, h2o], cache: {budget: [8, 12]}}"
    rows = measure(load_recipe(name, [*overrides, *short, swept]), False)
    assert [(row.policy, row.budget) for row in rows] == [
        ("full", None), ("streaming", 8), ("streaming", 12), ("h2o", 8), ("h2o", 12),
    ]  # fmt: skip
    assert len({row.nll for row in rows}) == 5
    fraction = ["sweep.cache.fraction=[0.5]"] if load_recipe(name).sweep.cache else []
    overrides += [f"output_dir={tmp_path / 'own'}", "completion_tokens=200", *fraction]
    rows = measure(load_recipe(name, overrides), False)
    assert len(rows) == len(load_recipe(name).sweep.policy)
    different = [row.nll for row in rows if row.policy != "layered"]  # the model's two layers are both lined
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("name", [name for name in NAMES if load_recipe(name).kind == "budgets"])
def test_each_recipe_of_head_budgets_runs_at_a_small_size(name: str, stand_ins: Callable) -> None:
    from sparse_rl.commands.budgets import measure

    small = load_recipe(name, [*stand_ins(name), "dtype=float32", *small_evaluation(load_recipe(name))])
    content = measure(small.expect(BudgetsRecipe), progress=False)
    assert content is not None
    assert len(content["shares"]) == 2
    assert min(map(min, content["shares"])) >= 0


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation problems are not here")
@pytest.mark.parametrize(
    ("task", "name"), [(t, f"eval/{t}") for t in ("aime24", "aime25", "amc23", "math500", "gsm8k")]
)
@pytest.mark.few(2)
def test_evaluation_recipes_read_the_real_problems_from_local_files(task: str, name: str, tiny_model: Callable) -> None:
    """With local files, as the recipe's comment describes, the real problems are read with their answers. The recipe's
    accuracy function accepts right answers and refuses wrong ones."""
    from rewards import make_rewards

    file = DATA / ("gsm8k_test.jsonl" if task == "gsm8k" else f"{task}.jsonl")
    overrides = [f"tasks.{task}.path={file}", f"tasks.{task}.split=train", f"tasks.{task}.columns.prompt=problem"]
    if task == "gsm8k":
        overrides.append("tasks.gsm8k.answer_after=null")
    recipe = load_recipe(name, overrides)
    assert isinstance(recipe, EvalRecipe)
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
