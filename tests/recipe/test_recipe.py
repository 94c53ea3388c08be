"""A recipe runs exactly as written, and every mistake in it gives one line that names the key and the correction."""

import dataclasses
from typing import get_args

import pytest
import yaml

from docs.reference import defaults
from rollout.config import RolloutConfig
from sparse_rl import recipe as recipes
from sparse_rl.config import NamedConfiguration, yaml_fields
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import CONFIGS, FullConfig, SnapKVConfig, StreamingConfig, TovaConfig
from sparse_rl.recipe import KINDS, TrainRecipe, load_recipe, make_recipe
from sparse_rl.recipe import load as recipe_loading
from sparse_rl.recipe.options import PASSED_THROUGH
from sparse_rl.recipe.yaml_text import dump_yaml, parse_yaml
from trainer.config import GuardConfig, LaunchConfig, LoraConfig, Scheduler

GRPO = """
kind: grpo
model: some/model
output_dir: runs/x
learning_rate: 1e-6
data: {path: problems.jsonl, columns: {prompt: problem}}
cache: {policy: gkv, budget: 512, window: 16, period: 128}
rewards: [math, {name: format, weight: 0.1}]
"""
SFT = "{kind: sft, model: m, output_dir: o, data: {synthetic: {task: running_sum, size: 8}}}"
EVAL = "{kind: eval, model: m, output_dir: o, tasks: {aime: {path: aime.jsonl}}}"
DISTILL = "{kind: distill, model: m, output_dir: o, data: {path: said.jsonl}, cache: {policy: tova, budget: 64}}"
KVPOP = """
kind: kvpop
model: m
output_dir: runs/x
data: {path: x.jsonl}
cache: {policy: kvpop, budget: 64, window: 16}
"""
PERPLEXITY = "{kind: perplexity, model: m, output_dir: o, text: book.txt}"
BUDGETS = "{kind: budgets, model: m, output_dir: o, tasks: {a: {path: a.jsonl, columns: {context: text}}}}"
LEARNED = "{policy: kvpop, budget: 8, window: 2}"
AM = "policy: am, budget: 12, sinks: 1, window: 4, period: 6"
BENCH = "{kind: bench, model: m, output_dir: o, cache: {policy: tova, budget: 64}}"
TEXTS = {
    **{"grpo": GRPO, "distill": DISTILL, "kvpop": KVPOP, "sft": SFT},
    **{"eval": EVAL, "perplexity": PERPLEXITY, "budgets": BUDGETS, "bench": BENCH},
}


def make(text=GRPO, overrides=()):
    """Return the recipe of a YAML text."""
    return make_recipe(parse_yaml(text, "r.yaml"), overrides, "r.yaml")


def refused(*overrides, text=GRPO):
    """Return the one-line error of a recipe that is refused."""
    with pytest.raises(UserError) as caught:
        make(text, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_recipe_of_each_kind_has_its_values_and_its_kinds_defaults():
    recipes_by_kind = {kind: make(text) for kind, text in TEXTS.items()}
    assert {kind: type(recipe) for kind, recipe in recipes_by_kind.items()} == KINDS
    grpo, distill, kvpop, sft = (recipes_by_kind[kind] for kind in ("grpo", "distill", "kvpop", "sft"))
    evaluation, perplexity = recipes_by_kind["eval"], recipes_by_kind["perplexity"]
    assert (kvpop.loss.top_k, kvpop.training.learning_rate, kvpop.kvpop.scorer_learning_rate) == (256, 8e-5, 1e-3)
    assert (distill.loss.divergence, distill.loss.top_k) == ("forward", None)
    assert (grpo.kind, grpo.training.learning_rate, grpo.grpo.loss_type, grpo.grpo.beta) == ("grpo", 1e-6, "grpo", 0.0)
    assert grpo.data.columns == {"prompt": "problem"}
    assert grpo.rewards[1] == {"name": "format", "weight": 0.1}
    assert sft.data.synthetic.size == 8
    assert evaluation.tasks["aime"].path == "aime.jsonl"
    assert (perplexity.text, perplexity.prompt_tokens, perplexity.sequences()) == ("book.txt", 1024, None)
    assert grpo.warnings == [] == evaluation.warnings


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_recipe_loads_as_the_same_recipe(kind, tmp_path):
    overrides = (
        ["seed=7"]
        if not issubclass(KINDS[kind], TrainRecipe)
        else ["seed=7", *(["lora.r=4"] if kind != "kvpop" else []), "run_name='1e-6'", "warmup_steps=0.1"]
    )
    options = {"optim": "sgd", "lr_scheduler_kwargs": {"fused": True, "eps": 1e-8}} if kind in PASSED_THROUGH else {}
    if options:
        overrides += ["optim=sgd", "lr_scheduler_kwargs={fused: true, eps: 1e-8}"]
    first = make(TEXTS[kind], overrides)
    (tmp_path / "resolved.yaml").write_text(first.as_yaml(), encoding="utf-8")
    loaded = load_recipe(tmp_path / "resolved.yaml")
    assert loaded == first
    assert loaded.trainer_options == options
    assert load_recipe(tmp_path / "resolved.yaml", ["seed=8"]) != first  # control
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text())["seed"] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_in_the_resolved_recipe(kind):
    assert set(make(TEXTS[kind]).resolved()) == {"kind", *yaml_fields(KINDS[kind])}


def test_the_resolved_cache_has_every_parameter():
    cache = make().resolved()["cache"]
    assert cache == {"policy": "gkv", "budget": 512, "window": 16, "period": 128, "sinks": 0, "form": "max"} | {
        "alpha": 0.8, "redundancy": True, "lam": 0.7, "pooling": 1
    }  # fmt: skip
    assert make(KVPOP).resolved()["cache"]["scorer"] == {"name": "mlp", "gamma": None, "hidden": None}
    assert make(EVAL, ["cache=full"]).resolved()["cache"] == {"policy": "full"}


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "1e+3", "5", ".5"])
def test_numbers_without_a_point_or_sign_are_read_as_numbers(text):
    """YAML 1.1 reads 1e-6 as text. Recipes read it as a number, in a file and in an override."""
    expected = float(text)
    for recipe in (make(GRPO.replace("1e-6", text)), make(GRPO, [f"learning_rate={text}"])):
        assert recipe.training.learning_rate == expected
        assert isinstance(recipe.training.learning_rate, float)
    assert "got '1e-6'" in refused("learning_rate='1e-6'")  # control: quoted text stays text


@pytest.mark.parametrize(
    "value", ["1e-6", "no", "on", "2024-01-01", "010", "1:30", "true", "null", "~", "<<", ".5", "0o7", "= x"]
)
def test_text_that_looks_like_another_type_is_saved_as_text(value):
    assert parse_yaml(dump_yaml({"a": value}), "x") == {"a": value}
    assert yaml.safe_load(dump_yaml({"a": value})) == {"a": value}  # for YAML 1.1 readers too


def test_plain_words_and_dates_are_read_as_text():
    assert parse_yaml("[no, on, 2024-01-01, 010, 1:30]", "x") == ["no", "on", "2024-01-01", 10, "1:30"]
    assert yaml.safe_load("[no, 010]") == [False, 8]  # control: YAML 1.1 reads other values


def test_overrides_set_keys_and_keys_inside_blocks():
    overrides = ["cache.budget=64", "data.path=x.jsonl", "lora.r=8", "launch.processes=2", "rewards=math", "top_k=null"]
    recipe = make(GRPO, overrides)
    assert recipe.cache.budget == 64
    assert recipe.cache.window == 16
    assert recipe.data.path == "x.jsonl"
    assert recipe.lora.r == 8
    assert recipe.lora.alpha == 32
    assert recipe.launch.processes == 2
    assert recipe.rewards == ["math"]
    assert recipe.grpo.top_k is None
    assert make(GRPO, ["cache=full"]).cache == FullConfig()
    assert make(GRPO, ["seed=1", "seed=2"]).seed == 2


def test_an_override_of_a_yaml_anchor_changes_one_place_only():
    """The tasks a and b are one YAML node (anchor and alias). An override of a does not change b."""
    text = EVAL.replace("{aime: {path: aime.jsonl}}", "{a: &d {path: a.jsonl}, b: *d}")
    recipe = make(text, ["tasks.a.limit=3"])
    assert (recipe.tasks["a"].limit, recipe.tasks["b"].limit) == (3, None)


def test_malformed_overrides_are_refused():
    assert "'seed' is not of the form key=value" in refused("seed")
    assert "not of the form" in refused("cache.=3")
    assert "model is not a block but 'some/model'" in refused("model.x=3")
    assert "command line: seed=[1, line 1" in refused("seed=[1")
    assert refused("seed=x").startswith("command line: seed:")
    assert refused(text=GRPO + "seed: x").startswith("r.yaml: seed:")


@pytest.mark.parametrize("cls", [*KINDS.values(), *CONFIGS.values()])
def test_the_default_of_a_block_is_an_instance_of_its_class(cls):
    hints = yaml_fields(cls)
    for key, default in defaults(cls).items():
        if dataclasses.is_dataclass(default):
            assert isinstance(default, hints[key])
            assert default == type(default)()
            assert type(default) in (hints[key], *get_args(hints[key])) or issubclass(hints[key], NamedConfiguration)


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_key_is_refused_with_the_nearest_key(kind):
    cls = KINDS[kind]
    for key in yaml_fields(cls):
        line = refused(f"{key}x=1", text=TEXTS[kind])
        assert f"{key}x: unknown key; did you mean {key}" in line, line


@pytest.mark.parametrize("block", ["data", "launch", "rollout", "lora", "replay_guard", "validation.data"])
def test_a_misspelt_key_of_a_block_is_refused_with_the_nearest_key(block):
    cls = {"data": DataConfig, "launch": LaunchConfig, "rollout": RolloutConfig}.get(
        block, {"lora": LoraConfig, "replay_guard": GuardConfig}.get(block, DataConfig)
    )
    for key in yaml_fields(cls):
        line = refused(f"{block}.{key}x=1")
        assert f"{block}.{key}x: unknown key; did you mean {block}.{key}?" in line


def test_a_key_at_the_wrong_level_is_refused_with_its_right_place():
    assert "budget: unknown key; did you mean cache.budget?" in refused("budget=3")
    assert "did you mean launch.zero_stage?" in refused("zero_stage=2")
    assert "rollout.temperature: unknown key; did you mean temperature at the top level?" in refused(
        "rollout.temperature=1"
    )
    keys = "valid keys: ahead, engine, exact, full_graphs, gpu_memory_utilization, kv_cache_gb,"
    assert keys in refused("rollout.zzzz=1")


WRONG: dict[str, list[tuple[str, ...]]] = {  # kind -> (overrides, ..., part of the error)
    "grpo": [
        ("data={traces: [a, b, a/]}", "data.traces: name each folder once"),
        ("temperature=hot", "temperature: expected a number > 0, got 'hot'"),
        ("temperature=0", "temperature: expected a number > 0, got 0"),
        ("temperature=true", "temperature: expected a number > 0, got true"),
        ("learning_rate=.inf", "learning_rate: expected a number > 0, got"),
        ("learning_rate=.nan", "learning_rate: expected a number > 0, got"),
        ("seed=true", "seed: expected a whole number >= 0, got true"),
        ("seed=1.5", "seed: expected a whole number >= 0, got 1.5"),
        ("gradient_checkpointing=1", "gradient_checkpointing: expected true or false, got 1"),
        ("gradient_checkpointing=yes", "expected true or false, got 'yes'"),
        ("model=3", "model: expected text that is not empty, got 3"),
        ("model=", "model: expected text that is not empty, got null"),
        ("max_steps=0", "max_steps: expected a whole number >= 1, or -1"),
        ("num_generations=1", "num_generations: expected a whole number >= 2, got 1"),
        ("loss_type=grp", "loss_type: expected one of grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo, vespo, got 'grp'"),
        ("launch.zero_stage=true", "launch.zero_stage: expected one of 0, 1, 2, 3, got true"),
        ("report_to=[wandb, x]", "report_to[1]: expected one of wandb, tensorboard, trackio, got 'x'"),
        ("lora=3", "lora: expected a mapping or null, got 3"),
        ("lora.r=0", "lora.r: expected a whole number >= 1, got 0"),
        ("lora.target_modules=[a, 1]", "lora.target_modules[1]: expected text that is not empty, got 1"),
        ("data.columns=[a]", "data.columns: expected a mapping, got ['a']"),
        ("data.columns.promt=a", "data.columns.promt: unknown column (did you mean 'prompt'?)"),
        ("data.prompt_template=x", "data.prompt_template: must contain {prompt}"),
        ("data.split=test", "data.split: a local file has only the split train"),
        ("data.synthetic={task: running_sum, size: 1}", "data.path: give either path"),
        ("data.path=null", "data.path: give either path"),
        ("launch.offload=true", "launch.offload: needs DeepSpeed"),
        ("launch={processes: 3, machines: 2, main_process_ip: a}", "launch.processes: 3 is not divisible by machines"),
        ("launch={processes: 2, machines: 2}", "launch.main_process_ip: is required with several machines"),
        ("rewards=[]", "rewards: name at least one reward"),
        ("rewards=[3]", "rewards[0]: expected a mapping or text that is not empty, got 3"),
        ("cache.budge=3", "did you mean 'budget'?"),
        ("cache.policy=gkw", "unknown cache policy 'gkw'"),
        ("cache={budget: 3}", "cache.policy: missing"),
        ("cache.budget=3", "command line: cache.budget: 3 must exceed window 16"),
        ("cache=3", "cache: a cache policy is a name or {policy: ..., its parameters}, got 3"),
        ("scorers={}", "scorers: gkv has no scorers to train; remove scorers, or set cache.policy to kvpop"),
        ("num_generations=3", "3 does not divide the global batch 8"),
        ("validation.every=2", "validation.data: missing; give a mapping"),
        ("kind=grop", f"unknown kind 'grop'; one of {', '.join(KINDS)} (did you mean grpo?)"),
        ("kind=null", f"kind: missing; one of {', '.join(KINDS)}"),
        ("lora.r=4", "launch.zero_stage=3", "LoRA under ZeRO-3"),
        ("uniform_groups=drop", "loss_type=dapo", "drop needs beta 0"),
        ("uniform_groups=drop", "beta=0.1", "drop needs beta 0"),
        ("uniform_groups=drop", "multi_objective_aggregation=normalize_then_sum", "uniform_groups: drop needs multi_"),
        ("validation.data={path: b.jsonl, thinking: false}", "must equal data.thinking"),
        ("importance_sampling_level=tokens", "importance_sampling_level: expected one of token, sequence"),
        ("multi_objective_aggregation=sum", "expected one of sum_then_normalize, normalize_then_sum"),
        ("ref_model_sync_steps=0", "ref_model_sync_steps: expected a whole number >= 1"),
        ("top_entropy_quantile=-1", "top_entropy_quantile: expected a number between 0 and 1"),
        ("router_aux_loss_coef=-0.01", "router_aux_loss_coef: expected a number >= 0"),
        ("log_level=loud", "log_level: expected one of detail"),
        ("sync_ref_model=true", "beta=0.1", "lora.r=4", "sync_ref_model: with lora the reference model, which has no"),
        ("sync_ref_model=true", "beta=0.1", f"cache={LEARNED}", "sync_ref_model: cache.policy kvpop has scorers, but"),
        ("lora.r=4", f"cache={LEARNED}", "lora: does not work with cache.policy kvpop"),
        ("lora.target_parameters=[mlp.experts.gate_up_proj]", "target_parameters: unknown key"),
        ("lora.r=4", "cache={policy: dms}", "lora: does not work with cache.policy dms"),
        ("scorers={}", "cache={policy: dms}", "scorers: dms has no scorers to train"),
        ("scorers={}", "cache={policy: streaming, budget: 12}", "scorers: streaming has no scorers to train"),
        (f"cache={{{AM}, fit: paper}}", "cache.fit: the paper's own solvers cannot be replayed in training"),
        (f"cache={{{AM}, reference_queries: 19}}", "19 is too many: the first compaction has"),
        ("match_gradient=straight", "match_gradient"),
        ("rollout.engine=trt", "rollout.engine: expected one of auto, hf, vllm"),
        ("rollout.kv_cache_gb=0", "rollout.kv_cache_gb: expected a number > 0 or null"),
        ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization: expected a number above 0, at most 1"),
        ("rollout.gpu_memory_utilization=0", "rollout.gpu_memory_utilization"),
        ("rollout.tensor_parallel=0", "rollout.tensor_parallel: expected a whole number >= 1"),
        ("rollout.tensor_parallel=2", "rollout.tensor_parallel: in training each process has an engine of its own"),
        ("rollout.max_model_len=100", "max_completion_length=100", "rollout.max_model_len: must hold a prompt and a"),
        ("rollout.sleep=1", "rollout.sleep: expected true or false"),
        ("prompt_cache={}", "cache: nothing is evicted after a context that prompt_cache compacts"),
        ("epsilon=1e308", "epsilon: expected a number"),
        ("beta=1e308", "beta: expected a number"),
        ("importance_clip=1e308", "importance_clip: expected a number"),
        ("epsilon=1e29", "epsilon: expected a number of at most 1,000, got 1e+29"),
        ("num_iterations=18446744073709551616", "num_iterations: expected a whole number of at most 2,147"),
        ("num_iterations=2147483647", "num_iterations: expected a whole number of at most 1,000"),
        ("rollout.kv_cache_gb=1e29", "rollout.kv_cache_gb: expected a number of at most 1,000,000"),
    ],
    "distill": [
        ("cache={policy: gkv}", "cache"),
        ("divergence=jsd", "jsd_beta=1.0", "jsd_beta"),
        ("kl_weight=0", "kl_weight"),
        ("renormalise=true", "renormalise"),
        ("teacher_cache=x", "teacher_cache"),
        ("teacher_cache=x", "top_k=8", "completions=student", "teacher_cache"),
        ("keep=boxed", "completions=student", "keep"),
        ("overlong=drop", "completions=student", "overlong: applies only to the dataset's completions"),
        ("refresh_every=3", "save_steps=4", "refresh_every"),
        ("temperature=0", "temperature"),
        ("tempertaure=1", "did you mean temperature"),
        ("train_sampling_strategy=group_by_length", "train_sampling_strategy: expected one of random, sequential"),
        ("packing=true", f"cache={{{AM}}}", "packing: sequences under am cannot be packed"),
        ("packing=true", "cache={policy: clustered}", "packing: sequences under clustered cannot be packed"),
        ("lora.r=4", f"cache={LEARNED}", "lora: does not work with cache.policy kvpop"),
    ],
    "kvpop": [
        ("data={traces: a}", "data.traces: kind kvpop makes its own evictions"),
        ("validation={data: {traces: a}}", "validation.data.traces: kind kvpop makes its own evictions"),
        ("cache={policy: gkv, budget: 64}", "cache.policy: recipes of kind kvpop train kvpop"),
        ("cache.scorer=mpl", "cache.scorer: unknown scorer 'mpl' (did you mean 'mlp'?)"),
        ("cache={policy: kvpop, budget: 6, sinks: 2, window: 4}", "cache.budget: 6 must exceed window 4 + sinks 2"),
        ("lora.r=4", "lora: kind kvpop trains the whole model"),
        ("boundary.late=2", "boundary.late: "),
        ("target.floor=0", "target.floor: "),
        ("scorer_final_learning_rate=1.0", "scorer_final_learning_rate: must not exceed scorer_learning_rate"),
        ("train_base=false", "cache.scorer=recency", "train_base: the scorer recency has no"),
        ("kl_weight=0", "kl_weight: one of kl_weight and ce_weight"),
        ("optim=lomo", "optim: groups parameters itself"),
        ("optim=galore_adamw_8bit_layerwise", "optim: groups parameters itself"),
    ],
    "sft": [
        ("train_sampling_strategy=group_by_length", "train_sampling_strategy: expected one of"),
        ("packing_strategy=best", "packing_strategy: expected one of bfd, bfd_split, wrapped"),
        ("prompt_cache={}", "prompt_cache: unknown key"),
        ("seed=4294967296", "seed: expected a whole number of at most 4,294,967,295, got 4294967296"),
        ("num_train_epochs=1e308", "num_train_epochs: expected a number"),
        ("num_train_epochs=1e29", "num_train_epochs: expected a number of at most 1,000,000"),
        ("output_dir=" + "a" * 256, "output_dir: expected text with names of at most 255 bytes"),
        ("model=" + "a" * 256, "model: expected text with names of at most 255 bytes"),
        ('output_dir="a\\0b"', "output_dir: contains a character that no file can hold"),
        ('output_dir="\\ud800"', "output_dir: contains a character that no file can hold"),
        ("learning_rate=1" + "0" * 39, "learning_rate: expected a number below"),
        ("data={path: a.jsonl}", "stop_at_accuracy=0.9", "stop_at_accuracy: needs fresh problems"),
    ],
    "eval": [
        ("rollout={engine: vllm, max_model_len: 100}", "max_completion_length=100", "rollout.max_model_len: must hold"),
        ("prompt_cache={}", "cache=full", "cache: nothing is evicted after a context that prompt_cache compacts"),
        ("prompt_cache={}", "sweep.cache.budget=[8]", "sweep: nothing is evicted"),
        ("prompt_cache={}", "tasks.aime.columns: prompt_cache compacts contexts"),
        ("prompt_cache=[]", "prompt_cache: name at least one"),
        ("prompt_cache={ratio: 2}", "prompt_cache.ratio: expected a number above 0, at most 1, got 2"),
        ("prompt_cache={ratio: [0.1, 0]}", "prompt_cache.ratio[1]: expected"),
        ("prompt_cache=[{}, {policy: amm}]", "prompt_cache[1].policy: "),
        ("prompt_cache={querys: []}", "prompt_cache.querys: unknown key; did you mean prompt_cache.queries"),
        ("prompt_cache={queries: []}", "prompt_cache.queries: name at least one"),
    ],
    "perplexity": [("prompt_cache={}", "prompt_cache: unknown key")],
    "budgets": [
        ("base=0.7", "ratios=[0, 0.1, 0.5]", "ratios: name at least two ratios, from at most base (0.7) to at least"),
        ("ratios=[0.5, 0.1]", "ratios: name ratios in increasing order"),
        ("ratios=[0.1, 1.2]", "ratios[1]: expected a number between 0 and 1"),
        ("tasks={}", "tasks: name at least one task"),
        ("tasks={a: {path: a.jsonl}}", "tasks.a.columns: head budgets are measured on contexts"),
        ("prompt_cache={policy: full}", "prompt_cache.policy: full selects no entries"),
        ("prompt_cache={budgets: b.json}", "prompt_cache.budgets: does not apply"),
        ("prompt_cache={ratio: 0.2}", "prompt_cache.ratio: does not apply"),
        ("prompt_cache={on_policy: true}", "prompt_cache.on_policy: does not apply"),
        ("prompt_cache={chunking: text}", "prompt_cache.chunking: does not apply"),
        ("rollout.engine=vllm", "rollout.engine: head budgets are measured with the engine hf"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [(kind, overrides, message) for kind, rows in WRONG.items() for *overrides, message in rows],
)
def test_errors_of_wrong_values_name_key_expected_and_found(kind, overrides, message):
    line = refused(*overrides, text=TEXTS[kind])
    assert message in line
    assert len(line) < 400


def test_missing_keys_and_documents_that_are_no_recipe_are_refused(tmp_path):
    for key in ("model", "output_dir", "data", "cache", "rewards"):
        mapping = {k: v for k, v in parse_yaml(GRPO, "x").items() if k != key}
        with pytest.raises(UserError, match=f"r.yaml: {key}: missing; give"):
            make_recipe(mapping, name="r.yaml")
    for text in ("", "[1]", "hello"):
        assert "expected a mapping of keys to values" in refused(text=text)
    assert "r.yaml, line 2" in refused(text="kind: grpo\n  x: y: z")
    (tmp_path / "latin.yaml").write_bytes(b"kind: \xff")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "latin.yaml")


def test_duplicate_keys_are_errors():
    assert "r.yaml, line 3: the key 'seed' is given twice (first in line 2)" in refused(
        text="kind: grpo\nseed: 1\nseed: 2"
    )
    assert "the key 'budget' is given twice" in refused("cache={budget: 1, budget: 2}")
    assert parse_yaml("{a: {x: 1}, b: {x: 1}}", "x") == {"a": {"x": 1}, "b": {"x": 1}}  # the control


def test_the_global_batch_must_hold_whole_groups():
    sizes = ["per_device_train_batch_size=2", "num_generations=8"]
    assert "num_generations: 8 does not divide the global batch 2" in refused(*sizes)
    for rest in (["gradient_accumulation_steps=4"], ["steps_per_generation=4"], ["launch.processes=4"]):
        make(GRPO, [*sizes, *rest])
    assert "steps_per_generation 3" in refused(*sizes, "steps_per_generation=3", "gradient_accumulation_steps=4")


def test_truncated_sampling_is_for_training_and_its_evaluation():
    recipe = make(GRPO, ["top_p=0.9", "top_k=50", "min_p=0.1", "validation={every: 1, data: {path: x}}"])
    assert recipe.warnings == []
    assert (recipe.sampling().top_p, recipe.sampling().top_k, recipe.sampling().min_p) == (0.9, 50, 0.1)
    evaluation = recipe.evaluation("run")
    assert [evaluation[key] for key in ("top_p", "top_k", "min_p")] == [0.9, 50, 0.1]


def test_an_error_after_a_change_of_policy_says_how_to_replace_the_block():
    assert "cache={policy: ...} replaces the whole block" in refused("cache.policy=full")
    assert "replaces" not in refused(text=GRPO.replace("gkv", "full"))
    assert make(GRPO, ["cache={policy: full}"]).cache == FullConfig()


def test_controls_of_the_refusals_are_accepted():
    make(GRPO, ["uniform_groups=drop", "lora.r=4", "launch.zero_stage=2"])
    assert make(SFT, ["stop_at_accuracy=0.9"]).sft.stop_at_accuracy == 0.9


def test_a_sweep_goes_over_any_parameter_of_a_policy():
    sweep = (
        "sweep={policy: [full, gkv, {policy: gkv, alpha: 0.1}], cache: {budget: [64], alpha: [0, 1], form: [max, sum]}}"
    )
    recipe = make(EVAL, [sweep, "cache={window: 8}"])
    full, *rest = recipe.caches()
    assert full == FullConfig()
    assert {(cache.alpha, cache.form) for cache in rest} == {
        (alpha, form) for alpha in (0.0, 1.0, 0.1) for form in ("max", "sum")
    }
    assert len(rest) == 6
    assert {(cache.budget, cache.window) for cache in rest} == {(64, 8)}
    assert recipe.warnings == []
    lent = make(EVAL, ["cache={budget: 64, alpha: 0.1}", "sweep.policy=[streaming,gkv,full]"])
    assert lent.warnings == ["cache.alpha does not apply to streaming, which lack this parameter"]
    for override, words in (
        ("sweep.budget=[4]", "sweep.budget: unknown key; did you mean "),
        ("sweep.cache.alhpa=[0.1]", "sweep.cache.alhpa: none of the policies gkv has this parameter"),
        ("sweep.cache.alpha=[]", "sweep.cache.alpha: name at least one value"),
        ("sweep.cache.alpha=[high]", "sweep: gkv: alpha: expected a number between 0 and 1, got 'high'"),
    ):
        assert words in refused("cache={policy: gkv, budget: 64}", override, text=EVAL)


def test_a_sweep_over_models_gives_one_recipe_for_each():
    recipe = make(EVAL, ["sweep.model=[a/b, c/d]", "sweep.policy=[full]"])
    assert recipe.models() == ["a/b", "c/d"]
    assert [(one.model, one.models()) for one in recipe.by_model()] == [("a/b", ["a/b"]), ("c/d", ["c/d"])]
    assert recipe.count_points() == 2 * len(recipe.tasks)
    assert recipe.with_models(str.upper).models() == ["A/B", "C/D"]


def test_a_sweep_gives_each_policy_the_shared_parameters_that_it_has():
    cache = "cache={window: 8, period: 4, sinks: 2}"
    recipe = make(EVAL, [cache, "sweep={policy: [full, streaming, snapkv], cache: {budget: [32, 64]}}"])
    assert recipe.caches() == [
        FullConfig(),
        StreamingConfig(period=4, sinks=2, budget=32),
        StreamingConfig(period=4, sinks=2, budget=64),
        SnapKVConfig(window=8, period=4, sinks=2, budget=32),
        SnapKVConfig(window=8, period=4, sinks=2, budget=64),
    ]
    assert make(EVAL).caches() == [None]
    assert make(EVAL, ["cache=full"]).caches() == [FullConfig()]
    swept = make(EVAL, ["cache={policy: tova, budget: 9}", "sweep.cache.budget=[4, 5]"]).caches()
    assert [cache.budget for cache in swept] == [4, 5]
    policies = "[snapkv, {policy: streaming, sinks: 4}, {policy: tova, budget: 9, window: 1}]"
    assert make(EVAL, [cache, f"sweep.policy={policies}", "sweep.cache.budget=[32, 64]"]).caches() == [
        SnapKVConfig(window=8, period=4, sinks=2, budget=32),
        SnapKVConfig(window=8, period=4, sinks=2, budget=64),
        StreamingConfig(period=4, sinks=4, budget=32),
        StreamingConfig(period=4, sinks=4, budget=64),
        TovaConfig(window=1, period=4, sinks=2, budget=9),
    ]
    assert "unknown cache policy 'gvk'" in refused(
        "cache.policy=gvk", "sweep={policy: tova, cache: {budget: 9}}", text=EVAL
    )
    assert "sweep.policy: policy: missing; name a cache policy" in refused("sweep={policy: [{budget: 4}]}", text=EVAL)
    assert "sweep: cache policy 'tova' has no parameter 'x'" in refused("sweep.policy={policy: tova, x: 1}", text=EVAL)
    mixed = "sweep={policy: [{policy: streaming, budget: 9}, full]}"
    assert "none of the policies streaming, full has this" in refused("cache={alpha: 1}", mixed, text=EVAL)
    assert "cache.windo: none of the policies" in refused("cache={windo: 8}", "sweep={policy: full}", text=EVAL)
    assert "sweep.cache: name the swept policies" in refused("sweep.cache.budget=4", text=EVAL)
    assert "sweep.policy: unknown cache policy 'x'" in refused("sweep={policy: x, cache: {budget: 4}}", text=EVAL)
    assert "needs a budget" in refused("sweep.policy=tova", text=EVAL)
    assert "tasks: name at least one" in refused("tasks={}", text=EVAL)


def test_options_of_the_trainers_pass_through_with_their_types():
    overrides = ["delta=2", "log_completions=true", "optim=sgd"]
    recipe = make(GRPO, overrides)
    assert recipe.trainer_options == {"delta": 2.0, "log_completions": True, "optim": "sgd"}
    assert "delta: expected a number > 0 or null, got 'x'" in refused("delta=x")
    assert "log_completions: expected true or false, got 1" in refused("log_completions=1")
    assert "logging_strategy: expected one of no, steps, epoch, got 'blue'" in refused("logging_strategy=blue")
    line = refused("optim=adamw_torhc")
    assert "optim: expected one of adamw_torch, " in line
    assert "did you mean 'adamw_torch'?" in line
    assert len(line) < 400
    assert "deltas: unknown key; did you mean delta?" in refused("deltas=1")
    assert "delta: unknown key" in refused("delta=1", text=SFT)  # `delta` is a key of another kind
    assert "trainer_options: unknown key" in refused("trainer_options={a: 1}")


@pytest.mark.parametrize(
    ("key", "correction"),
    [
        ("use_vllm", "rollout.engine"),
        ("vllm_mode", "rollout block"),
        ("vllm_importance_sampling_mode", "importance_correction"),
        ("bf16", "dtype: bfloat16"),
        ("fsdp_config", "launch.zero_stage"),
        ("deepspeed", "launch.zero_stage"),
        ("remove_unused_columns", "remove this option"),
        ("eval_strategy", "validation block"),
        ("eval_steps", "validation.every"),
        ("hub_token", "hf auth login"),
        ("model_name_or_path", "use model"),
    ],
)
def test_keys_that_would_break_replay_are_refused(key, correction):
    line = refused(f"{key}=true")
    assert f"{key}: not a key here" in line
    assert correction in line


def test_reentrant_checkpointing_is_refused():
    key = "gradient_checkpointing_kwargs"
    for value in ("{use_reentrant: true}", "'{\"use_reentrant\": true}'"):
        assert f"{key}.use_reentrant: the eviction trace does not survive" in refused(f"{key}={value}")
    assert make(GRPO, [f"{key}={{use_reentrant: false}}"]).trainer_options == {key: {"use_reentrant": False}}


def test_the_choices_of_schedulers_equal_those_of_transformers():
    schedulers = pytest.importorskip("transformers.trainer_utils").SchedulerType
    assert set(get_args(Scheduler)) == {member.value for member in schedulers}


def test_shipped_recipes_are_found_by_name(tmp_path, monkeypatch):
    package = tmp_path / "recipes"
    (package / "quickstart").mkdir(parents=True)
    (package / "qwen2.5-1.5b").mkdir()
    (package / "quickstart" / "grpo.yaml").write_text(GRPO)
    (package / "qwen2.5-1.5b" / "sft.yaml").write_text(dump_yaml(make(SFT).resolved()))
    (package / "accelerate.yaml").write_text("distributed_type: NO\n")
    monkeypatch.setattr(recipe_loading, "RECIPES", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    assert recipes.list_recipes() == ["quickstart/grpo", "qwen2.5-1.5b/sft"]
    assert load_recipe("quickstart/grpo") == make()
    assert load_recipe("qwen2.5-1.5b/sft", ["seed=3"]).seed == 3
    assert load_recipe("recipes/quickstart/grpo.yaml") == make()  # the recipe named by its path
    for wrong in ("quickstart/grop", "quickstart/grop.yaml", "recipes/quickstart/grop.yaml"):
        with pytest.raises(UserError, match=r"did you mean (recipes/)?quickstart/grpo"):
            load_recipe(wrong)
    with pytest.raises(UserError, match="shipped recipes: quickstart/grpo, qwen"):
        load_recipe("zzz")
    with pytest.raises(UserError, match=r"write recipes/quickstart/grpo\.yaml"):
        load_recipe("recipes/quickstart/grpo")


def test_a_recipe_is_frozen_and_a_changed_copy_is_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().seed = 3
    assert dataclasses.replace(make(), seed=3).seed == 3
    with pytest.raises(UserError, match="num_generations"):
        dataclasses.replace(make(), grpo=dataclasses.replace(make().grpo, num_generations=3))
