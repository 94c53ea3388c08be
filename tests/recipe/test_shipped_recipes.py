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

from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.methods.config import AMConfig, GKVConfig
from sparse_rl.models.directory import saved_policy
from sparse_rl.models.load import load_tokenizer
from sparse_rl.policies import make_policy
from sparse_rl.recipe import (
    DistillRecipe,
    EvalRecipe,
    GRPORecipe,
    KVpopRecipe,
    Recipe,
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
CHAT = (
    "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' if enable_thinking is not defined or enable_thinking else '>;' }}{% endif %}"
)
BFLOAT16 = "deepseek-r1-distill-qwen-7b/rl_sparse"  # the only recipe that keeps its dtype


def family(name: str) -> str:
    """Return the model family of a recipe."""
    model = load_recipe(name).model.lower()
    return "llama" if "llama" in model else "qwen2" if "qwen2" in model or "distill-qwen" in model else "qwen3"


@pytest.fixture(scope="session")
def tiny_model(new_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], str]:
    """tiny_model(family, chat) returns the directory of a tiny random model; with chat True, its tokenizer has a chat
    template."""
    from transformers import GenerationConfig

    from sparse_rl.data.running_sum import EOS_ID, PAD_ID, build_tokenizer

    folders: dict[tuple[str, bool], str] = {}

    def make(family: str, chat: bool) -> str:
        if (family, chat) not in folders:
            folder = tmp_path_factory.mktemp(f"{family}-{chat}")
            ids = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "bos_token_id": None}
            model = new_model(family, initializer_range=0.2, **ids)
            model.generation_config = GenerationConfig(eos_token_id=[EOS_ID, 40, 41, 42], pad_token_id=PAD_ID)
            model.save_pretrained(folder)
            tokenizer = build_tokenizer()
            tokenizer.chat_template = CHAT if chat else None
            tokenizer.save_pretrained(folder)
            folders[family, chat] = str(folder)
        return folders[family, chat]

    return make


@pytest.fixture
def problems_for(tmp_path: Path) -> Callable[[Any], str]:
    """problems_for(data) returns a local file with the columns that a data block reads."""

    def make(data: Any) -> str:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        question, answer = data.columns.get("prompt", "prompt"), data.columns.get("answer", "answer")
        marker = f"so {data.answer_after} " if data.answer_after else ""
        completion, context = data.columns.get("completion", "completion"), data.columns.get("context", "context")
        pairs = [(a, b) for a in range(8) for b in range(5)]
        rows = [
            {
                question: f"{a}+{b}=",
                answer: f"{marker}{a + b}",
                "answers": [str(a + b)],
                context: "1+2=3;" * 4,
                completion: f"{a}+{b} makes it \\boxed{{{a + b}}}",
            }
            for a, b in pairs
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return make


def shortened(recipe: Recipe) -> str:
    """Return an override that scales a recipe's cache down, so that a dozen tokens are enough for evictions."""
    cache = recipe.resolved()["cache"]
    most = {"budget": 12, "window": 4, "period": 4, "reference_queries": 16, "page": 2}
    small = {key: min(value, cache[key]) for key, value in most.items() if key in cache}
    return f"cache={json.dumps(cache | small)}"


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
        assert recipe.trainer_options == {}


def test_the_folders_of_shipped_recipes_are_these() -> None:
    assert {name.split("/")[0] for name in NAMES} == {
        "deepseek-r1-distill-llama-8b",
        "deepseek-r1-distill-qwen-7b",
        "eval",
        "quickstart",
        "qwen2.5-1.5b",
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
    rate 1e-6, no KL, budget 2048, and 32 held-out problems with 4 samples each."""
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
    if name.endswith("rl_sparse"):
        lam = 0.9 if "llama" in name else 0.7
        assert recipe.cache == GKVConfig(budget=2048, window=16, period=128, alpha=0.8, lam=lam)


@pytest.mark.parametrize("name", ["distill", "streaming_plus"])
def test_distillation_recipes_have_the_settings_of_g_kv(name: str) -> None:
    """The distillation recipe has the settings of G-KV appendix C: 250 steps, batch 128, learning rate 1e-6, 4096
    tokens, budget 2048, correct outputs only, and temperature 0.6."""
    recipe = load_recipe(f"deepseek-r1-distill-qwen-7b/{name}")
    assert isinstance(recipe, DistillRecipe)
    assert recipe.distill.keep == "math"
    assert recipe.distill.completions == "data"
    batch, training = recipe.update_rows(), recipe.training
    assert (batch, training.max_steps, training.learning_rate) == (128, 250, 1e-6)
    cache: Any = recipe.cache
    assert (recipe.distill.max_completion_length, recipe.loss.temperature, cache.budget) == (4096, 0.6, 2048)
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


def test_the_attention_matching_recipe_has_the_settings_of_its_paper() -> None:
    """The Attention Matching recipe has the settings of the paper's table 7: 2,048 physical entries for 8,192 tokens,
    window 20, 4 runs, and an answer that is forced at the limit."""
    recipe = load_recipe("eval/am_aime25")
    assert isinstance(recipe, EvalRecipe)
    assert recipe.forced_answer is not None
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
    """The recipes for QuALITY and LongHealth have the paper's settings: 2,048 new tokens, one sample, self-study and
    repetition, 50,000 queries, and the sweeps that the comments name."""
    for name, size in (("quality", "0.05"), ("longhealth", "0.1")):
        recipe = load_recipe(f"eval/{name}")
        assert isinstance(recipe, EvalRecipe)
        assert recipe.samples == 1
        assert recipe.accuracy == "boxed"
        assert (recipe.max_completion_length, recipe.sampling().top_k) == (2048, 20)
        assert {tuple(cache.queries) for cache in recipe.prompt_caches()} == {("self_study", "repeat")}
        assert {(cache.first, cache.most_queries) for cache in recipe.prompt_caches()} == {(0, 50_000)}
        text = (ROOT / f"recipes/eval/{name}.yaml").read_text()
        for override in re.findall(r"\.\.\. (prompt_cache[^ ]*=[^ \n\"]+)(?= |\n)", text):
            load_recipe(
                f"eval/{name}", [override, f"prompt_cache.ratio={size}"] if "null" not in override else [override]
            )
    text = (ROOT / "recipes/eval/quality.yaml").read_text()
    rows = re.findall(r"^#     [\w+-]+(?: eviction)? {2,}((?:\w+: .*))$", text, re.M)
    assert len(rows) == 6
    for row in rows:
        assert len(load_recipe("eval/quality", [f"prompt_cache={{{row}, ratio: [0.01, 0.2]}}"]).prompt_caches()) == 2


def test_the_recipe_of_clustered_attention_reads_the_stated_number_of_entries() -> None:
    """The recipe differs from qwen2.5-1.5b/grpo only in its cache. At the end of the longest completion a query reads
    at most 219 entries, as the recipe's comment says."""
    assert differing("qwen2.5-1.5b/grpo", "qwen2.5-1.5b/grpo_clustered") == {"cache"}
    cache = load_recipe("qwen2.5-1.5b/grpo_clustered").caches()[0]
    policy = make_policy(cache)
    assert policy.most_read(512, 512 + 1024 - 1) == 219  # the number in the recipe's comment


def test_evaluation_recipes_have_the_settings_of_their_papers() -> None:
    """The evaluation recipes have the papers' settings. G-KV: AMC at 32,768 tokens and at 16,384 tokens, and 4,096
    tokens at budget 2048. KVpop: 16 samples and top-k 20."""
    long, short, trained, kvpop = (load_recipe(f"eval/{name}") for name in ("amc23", "amc23_16k", "gkv_4k", "kvpop"))
    for recipe, length, samples, top_k in (
        (long, 32768, 32, None),
        (short, 16384, 32, None),
        (trained, 4096, 32, None),
        (kvpop, 32768, 16, 20),
    ):
        assert isinstance(recipe, EvalRecipe)
        sampling = recipe.sampling(recipe.samples)
        assert (sampling.max_tokens, sampling.n, sampling.top_k) == (length, samples, top_k)
        assert (sampling.temperature, sampling.top_p) == (0.6, 0.95)
    rl = load_recipe("deepseek-r1-distill-qwen-7b/rl_sparse")
    assert isinstance(trained, EvalRecipe)
    assert isinstance(rl, GRPORecipe)
    assert trained.caches() == [rl.cache]
    assert trained.max_completion_length == rl.grpo.max_completion_length


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
def test_each_recipe_trains_at_a_small_size(
    name: str, tiny_model: Callable, problems_for: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two training steps of each recipe, at a hundredth of its size, have finite losses and an exact replay, and export
    a model."""
    from sparse_rl.commands.train import train
    from sparse_rl.metrics import read_metrics

    monkeypatch.setenv("WANDB_MODE", "disabled")
    recipe = load_recipe(name)
    folder = tmp_path / "run"
    chat = recipe.data.synthetic is None
    overrides = [
        f"model={tiny_model(family(name), chat)}",
        f"output_dir={folder}",
        "launch={processes: 1, zero_stage: 0}",
        "max_steps=2",
        "gradient_accumulation_steps=1",
        "logging_steps=1",
        "report_to=[]",
        "per_device_train_batch_size=8",
    ]
    if name != BFLOAT16:
        overrides.append("dtype=float32")
    if chat:
        overrides += [f"data.path={problems_for(recipe.data)}", "data.subset=null", "data.split=train"]
    else:
        overrides.append("data.synthetic.size=64")
        if recipe.data.synthetic.task == "retrieval":  # the tiny model reads it letter by letter
            overrides += ["data.synthetic.facts=4", "data.synthetic.restated=2"]
    if isinstance(recipe, SFTRecipe):
        overrides += ["warmup_steps=1", "stop_check_every=2"]
        monkeypatch.setattr("sparse_rl.commands.trainers.CHECK_PROBLEMS", 8)
    if isinstance(recipe, GRPORecipe):
        overrides += ["num_generations=4", "max_completion_length=16", shortened(recipe)]
        if recipe.validation is not None:
            file = problems_for(recipe.validation.data)
            overrides += [f"validation.data.path={file}", "validation.data.split=train", "validation.data.subset=null"]
            overrides += ["validation.every=1", "validation.problems=2", "validation.samples=2"]
    if isinstance(recipe, DistillRecipe):
        overrides += [shortened(recipe)]
        if recipe.validation is not None:
            overrides += ["validation.every=1", "validation.problems=2"]
    if isinstance(recipe, KVpopRecipe):
        small = {**recipe.cache.as_block(), "sinks": 2, "window": 4, "budget": 12, "state_entries": 0}
        overrides += [f"cache={json.dumps(small)}", "max_length=128"]
        if recipe.validation is not None:
            overrides += ["validation.every=1", "validation.problems=2"]
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
        f"model={tiny_model(family(name), name != 'quickstart/eval')}",
        f"output_dir={tmp_path / 'run'}",
        "dtype=float32",
        f"samples={min(recipe.samples, 2)}",
        "max_completion_length=12",
    ]
    for task, data in recipe.tasks.items():
        if data.synthetic is None:
            overrides += [f"tasks.{task}.path={problems_for(data)}", f"tasks.{task}.split=train"]
            overrides += [f"tasks.{task}.subset=null"]
        overrides.append(f"tasks.{task}.limit=2")
    if recipe.sweep.policy:
        overrides += ["cache={window: 4, period: 4}", "sweep.cache.budget=[12]"]
    elif recipe.cache is not None:
        overrides.append(shortened(recipe))
    if recipe.forced_answer is not None:
        overrides.append("forced_answer={text: '1', tokens: 4}")
    if recipe.prompt_cache is not None:
        overrides += ["prompt_cache.study_samples=1", "prompt_cache.study_tokens=4"]
    rows = evaluate(load_recipe(name, overrides), progress=False)
    points = len(recipe.sweep.policy) or len(recipe.prompt_caches()) or 1
    assert len(rows) == points * len(recipe.tasks)
    assert all(row.problems == 2 and row.accuracy is not None and 0 <= row.accuracy <= 1 for row in rows)
    assert {row.task for row in rows} == set(recipe.tasks)


def test_the_perplexity_recipe_runs_at_a_small_size(tiny_model: Callable, tmp_path: Path) -> None:
    """The perplexity recipe runs, scaled down, under a sweep that the recipe's comment names."""
    from sparse_rl.commands.perplexity import measure

    (name,) = (name for name in NAMES if load_recipe(name).kind == "perplexity")
    (tmp_path / "book.txt").write_text("Qa1b2c3?a1A1;" * 20)
    overrides = [f"model={tiny_model('qwen3', True)}", f"text={tmp_path}/book.txt", f"output_dir={tmp_path / 'run'}"]
    overrides += ["prompt_tokens=16", "completion_tokens=16", "dtype=float32", "rollout.engine=hf"]
    rows = measure(
        load_recipe(name, [*overrides, "sweep={policy: [full, streaming, h2o], cache: {budget: [8, 12]}}"]), False
    )
    assert [(row.policy, row.budget) for row in rows] == [
        ("full", None), ("streaming", 8), ("streaming", 12), ("h2o", 8), ("h2o", 12),
    ]  # fmt: skip
    assert len({row.nll for row in rows}) == 5


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation problems are not here")
@pytest.mark.parametrize(
    ("task", "name"), [(t, f"eval/{t}") for t in ("aime24", "aime25", "amc23", "math500", "gsm8k")]
)
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
