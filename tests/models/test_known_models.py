"""The table SHAPES has the shape of every model of a hub that a shipped recipe names. Its parameter counts are the
published ones, so that `doctor` works without a network.
"""

from __future__ import annotations

import pytest
from planned import plan

from sparse_rl.attention.families import check_replayable, global_layers, policy_shape
from sparse_rl.commands.main import main
from sparse_rl.models import hub
from sparse_rl.models.hub import SHAPES
from sparse_rl.models.load import load_shape
from sparse_rl.models.weights import meta_model
from sparse_rl.recipe import list_recipes, load_recipe
from trainer.memory import count_parameters

PUBLISHED = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-3-12b-it": 11_766_034_176,  # published: 12,187,325,040 with the image encoder and its projection
}
ON_A_HUB = {name: load_recipe(name) for name in list_recipes() if load_recipe(name).model in PUBLISHED}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without a network."""
    monkeypatch.setattr(hub, "_unreachable", lambda: "there is no network")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_models_of_shipped_recipes_are_in_the_table() -> None:
    trained_here = ("quickstart/", "retrieval/", "one_liners/", "turns/", "runs/")
    named = {load_recipe(name).model for name in list_recipes()}
    assert {model for model in named if not model.startswith(trained_here)} == set(SHAPES)


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameter_counts_equal_the_published_ones(model: str) -> None:
    config = load_shape(model)
    check_replayable(config, model)
    assert count_parameters(meta_model(config)) == PUBLISHED[model]


def test_qwen3_30b_a3b_uses_3_3_billion_parameters_per_token() -> None:
    config = load_shape("Qwen/Qwen3-30B-A3B")
    idle = config.num_experts - config.num_experts_per_tok
    experts = config.num_hidden_layers * idle * 3 * config.hidden_size * config.moe_intermediate_size
    assert PUBLISHED["Qwen/Qwen3-30B-A3B"] - experts == 3_353_032_704  # published: 3.3B
    assert config.norm_topk_prob


@pytest.mark.parametrize("name", ON_A_HUB)
def test_shipped_recipes_fit_the_windows_of_their_models(name: str) -> None:
    ON_A_HUB[name].check_lengths(ON_A_HUB[name].load_shape())


def test_qwen3_30b_a3b_takes_the_memory_that_its_recipe_states() -> None:
    """The comment of the recipe states these sums in GB for 8 GPUs, fully trained and with LoRA."""
    lora = ["launch.zero_stage=0", "launch.offload=false", "lora.r=32"]
    for overrides, stated, host in (([], 65, 550), (lora, 66, 0)):
        recipe = load_recipe("qwen3-30b-a3b/grpo", [*overrides, "rollout.engine=hf"])
        made = plan(recipe, load_shape(recipe.model))
        items = {item.name: item for item in made.items}
        assert round(made.device / 1e9) == stated
        assert round(items["activations"].device / 1e9, 1) == 1.9
        assert round(items["a layer's activations"].device / 1e9, 1) == 2.1
        assert round(items["KV cache of 16"].device / 1e9, 1) == 3.6
        assert round(items["traces"].host / 1e9, 2) == 0.23
        assert round(8 * (made.host - items["traces"].host) / 1e9) == host


def test_gemma_3_12b_has_the_shape_that_the_paper_names() -> None:
    """Attention Matching, section 4.3: 64 kv heads with full attention, of size 256."""
    config = load_shape("google/gemma-3-12b-it")
    layers, kv_heads, head_dim = policy_shape(config)
    assert (layers * kv_heads, head_dim) == (64, 256)
    assert global_layers(config) == [5, 11, 17, 23, 29, 35, 41, 47]
    encoder = 27 * (4 * (1152 * 1152 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152)
    encoder += (3 * 14 * 14 + 1 + 64 * 64) * 1152 + 2 * 1152  # patches, positions, last norm
    projection = 1152 * 3840 + 1152
    assert PUBLISHED["google/gemma-3-12b-it"] + encoder + projection == 12_187_325_040


def test_gemma_3_12b_takes_the_memory_that_its_recipe_states() -> None:
    """The comment of the recipe states these sums in GB, for articles of 8,192 tokens and contexts of 65,536 tokens."""
    of_model = ["model=google/gemma-3-12b-it", "rollout.engine=hf"]
    for name, task, tokens, stated in (
        ("gemma3-12b/quality", "quality", 8192, (0.54, 18.9, 44)),
        ("eval/longhealth", "longhealth", 65_536, (4.35, 34.0, 71)),
    ):
        recipe = load_recipe(name, [*of_model, f"tasks.{task}.max_prompt_tokens={tokens}"])
        made = plan(recipe, load_shape(recipe.model))
        items = {item.name: item for item in made.items}
        assert round(items["weights"].device / 1e9, 1) == 23.5
        assert items["sliding windows of the context"].device == 40 * 1024 * 2 * 8 * 256 * 2 == 335_544_320
        sizes = items["context"].device / 1e9, items["KV cache of 32"].device / 1e9, made.device / 1e9
        assert (round(sizes[0], 2), round(sizes[1], 1), round(sizes[2])) == stated


def test_doctor_counts_memory_of_known_models_without_a_network(capsys: pytest.CaptureFixture) -> None:
    """For another model it says that the memory is unknown. An invalid name is an error."""
    assert main(["doctor", "qwen2.5-1.5b/grpo"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1,543,714,304 parameters" in out
    assert "its shape is taken from the table" in out
    assert "up to" not in out
    assert main(["doctor", "qwen2.5-1.5b/grpo", "model=somebody/some-model"]) == 0
    out = capsys.readouterr().out
    assert "memory        unknown: " in out
    assert "there is no network" in out
    assert "parameters" not in out
    assert main(["doctor", "qwen2.5-1.5b/grpo", "model=no hub name"]) == 2
    assert main(["train", "qwen2.5-1.5b/grpo", "--dry-run"]) == 2  # a command that needs the files still fails
    assert "there is no directory Qwen/Qwen2.5-1.5B-Instruct" in capsys.readouterr().err
