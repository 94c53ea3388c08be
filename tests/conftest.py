"""Shared fixtures: tiny random models of every family, trained models, and policies.

The trained models are the quickstart's model, which comes with the package, and stories260K if it is present.

`new_model` builds a model that a test may change; `model_of` returns a shared model that a test must not change.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollout import choice, make
from rollout.hf import HFEngine
from sparse_rl.attention.interface import adopt
from sparse_rl.attention.kernels.flex import flex_attend
from sparse_rl.data.running_sum import SYMBOLS
from sparse_rl.methods.config import accepted_parameters
from sparse_rl.policies import Policy, make_policy
from sparse_rl.trace import SECTIONS, EvictionTrace, Section

# `nohup` makes this process and its children ignore the signal
signal.signal(signal.SIGINT, signal.default_int_handler)

STORIES = Path(__file__).parents[2] / "shared/models/stories260K"
QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart/model"
TRAINED = {"quickstart": (QUICKSTART, SYMBOLS.index("Q")), "stories260K": (STORIES, 1)}  # and the first token of a text
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # moderate logits: neither flat (no eviction matters) nor so steep that rounding shows
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 256.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
OWN: dict[str, dict[str, Any]] = {  # settings of single families, with values other than 1 for all factors
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "ministral3": {"rope_parameters": {"rope_theta": 1e6, **YARN}},
    "phi3": {"partial_rotary_factor": 0.75, "pad_token_id": None},
    "granite": {
        **{"logits_scaling": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 4.0},
        "attention_bias": True,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "glm4": {"attention_bias": True, "pad_token_id": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen2_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False},
        "shared_expert_intermediate_size": 32,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None},
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
        **{"routed_scaling_factor": 1.5, "pad_token_id": None, "num_hidden_layers": 3},
    },
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": None},
    "gemma3_text": {
        **{"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        **{
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
    },
    "olmo3": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": None},
}


def build(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny random model that has random biases and norms too; `overrides` replace entries of TINY."""
    config = AutoConfig.for_model(family, **{**TINY, **OWN.get(family, {}), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.data.add_(0.1 * torch.randn_like(weight))
            if name.endswith("mlp.gate.weight"):  # of a router; some families initialise it to 0
                weight.data.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.eval()


@cache
def lend(name: str) -> PreTrainedModel:
    """Return the shared model of that name; skip the test if the trained model is not installed."""
    if name not in TRAINED:
        return build(name)
    folder, _ = TRAINED[name]
    if name == "stories260K" and not (folder / "model.safetensors").exists():
        pytest.skip("the trained model stories260K is not here")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def new_model() -> Callable[..., PreTrainedModel]:
    """new_model(family, seed=0, **config) -> a new model, which the test may change."""
    return build


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], PreTrainedModel]:
    """model_of(a family, or a key of TRAINED) -> a shared model with our attention, which tests must not change."""
    return lambda name: adopt(lend(name))


@pytest.fixture(scope="session")
def policy_of() -> Callable[..., Policy]:
    """policy_of(name, budget=..., ...) -> the policy of that name, built with those parameters that it accepts."""

    def make(name: str, **parameters: Any) -> Policy:
        accepted = accepted_parameters(name)
        return make_policy(name, **{key: value for key, value in parameters.items() if key in accepted})

    return make


@pytest.fixture(scope="session")
def prompts_of(model_of: Callable[[str], PreTrainedModel]) -> Callable[..., list[list[int]]]:
    """prompts_of(name, lengths, seed=0) -> prompts: random tokens, or texts sampled from the trained model itself."""

    def make(name: str, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        if name not in TRAINED:
            return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]
        model, ids = model_of(name), torch.full((len(lengths), 1), TRAINED[name][1])
        with torch.no_grad():
            while ids.shape[1] < max(lengths):
                chances = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]

    return make


@pytest.fixture
def flex_trains(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let torch differentiate FlexAttention's plain operator on a CPU, which it otherwise refuses.

    Returns one bool for each call through a view: True if the keys were sorted.
    """
    calls: list[bool] = []

    def counting(*args: Any, in_segments: bool, **kwargs: Any) -> Any:
        calls.append(in_segments)
        return flex_attend(*args, in_segments=in_segments, **kwargs)

    monkeypatch.setattr("sparse_rl.attention.kernels.masked.flex_attend", counting)
    module = importlib.import_module("torch.nn.attention.flex_attention")  # `import` would yield the function
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    return calls


def batch_visits(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int) -> torch.Tensor:
    """Return int32 [B, maximum number of visits], with -1 after a row's last visit."""
    moved = [values + start for values, start in zip(rows, starts, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(moved, batch_first=True, padding_value=-1)


VISITS = Section(
    name="visits",
    dtype=torch.int32,
    axes=("visit",),
    joined="visit",
    check=lambda values, *_: "visits must be positions" if bool((values < 0).any()) else None,
    batch=batch_visits,
    pack=lambda documents, starts, ends: torch.cat([v + start for v, start in zip(documents, starts, strict=True)]),
)
GAINS = Section(
    name="gains",
    dtype=torch.float32,
    axes=("visit", "layer"),  # not every section is joined along its last axis
    joined="visit",
    check=lambda *_: None,
    batch=lambda rows, starts, width: batch_visits(rows, [0] * len(rows), width),
    pack=lambda documents, starts, ends: torch.cat(list(documents)),
)


@pytest.fixture
def with_visits(monkeypatch: pytest.MonkeyPatch) -> Callable[[EvictionTrace, Sequence[int]], EvictionTrace]:
    """with_visits(trace, positions) -> the trace with two extra sections, which no view replays.

    visits : positions of visits, int32 [V]; gains : one number per visit and layer, float32 [V, L]
    """
    for section in (VISITS, GAINS):
        monkeypatch.setitem(SECTIONS, section.name, section)

    def add(trace: EvictionTrace, positions: Sequence[int]) -> EvictionTrace:
        visits = torch.tensor(positions, dtype=torch.int32)
        gains = torch.outer(visits, torch.arange(1, trace.layers + 1)) / 3
        return EvictionTrace(trace.evict_at, {"visits": visits, "gains": gains})

    return add


@pytest.fixture
def as_vllm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the engine "vllm" by hf with its own weights and vllm's options; returns the log of opens and closes."""
    events: list[str] = []

    class Separate(HFEngine):
        def __init__(
            self,
            model: str | Path,
            policy: Policy,
            *,
            dtype: str = "float32",
            max_batch: int = 64,
            max_prompt: int | None = None,
            max_model_len: int | None = None,
            kv_cache_gb: float | None = None,
            gpu_memory_utilization: float = 0.3,
            tensor_parallel: int = 1,
            sleep_mode: bool = False,
            full_graphs: bool = False,
            exact: bool = True,
            progress: bool = False,
        ) -> None:
            assert isinstance(model, (str, Path))
            super().__init__(model, policy, dtype=dtype, max_batch=max_batch)
            events.append(policy.name)

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr(make, "engine_class", lambda kind: {"vllm": Separate, "hf": HFEngine}[kind])
    monkeypatch.setattr(
        choice, "_vllm_refusal", lambda config, caches, cuda: "a live module" if config is None else None
    )
    return events


# ---- table of the comparisons with plain references, for docs/numerics.md -------------------------------------------

TALLY = "tally"


@pytest.fixture
def tally(record_property: Callable) -> Callable[..., None]:
    """tally(policy, compared=, ties=, gap=) adds counts to the table that is printed at the end of a run.

    compared : evictions, page choices or fitted numbers that were compared with a plain reference in tests/
    ties : differing choices that the reference decides by less than 1e-5
    gap : the largest |log p_trainer - log p_sampler|
    """

    def add(policy: str, compared: int = 0, ties: int = 0, gap: float = 0.0) -> None:
        record_property(TALLY, [policy, compared, ties, gap])

    return add


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but n cases of a test with the mark few(n). These n are evenly spread over its cases, the first
    and the last among them.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        mark = of_test[0].get_closest_marker("few")
        assert mark is not None
        (count,) = mark.args
        last = len(of_test) - 1
        run = {round(i * last / max(count - 1, 1)) for i in range(count)}
        for place, item in enumerate(of_test):
            if place not in run:
                item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: policy, comparisons, ties and the largest gap, over all tests that passed."""
    totals: dict[str, list[float]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", []):
            if name == TALLY and report.when == "call":
                policy, compared, ties, gap = value
                have = totals.setdefault(policy, [0, 0, 0.0])
                totals[policy] = [have[0] + compared, have[1] + ties, max(have[2], gap)]
    if totals:
        terminalreporter.section("compared with plain references; replay gap")
        terminalreporter.line("| policy | compared | ties | largest gap |")
        terminalreporter.line("|---|---|---|---|")
        for policy in sorted(totals):
            compared, ties, gap = totals[policy]
            terminalreporter.line(f"| {policy} | {compared:,} | {ties} | {gap:.1e} |")
