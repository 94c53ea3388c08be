"""Exactness: errors that rounding, another dtype or a missing record cause, written to benchmarks/results/CASE.json.

    OMP_NUM_THREADS=1 STORIES=DIR python benchmarks/exactness.py gap     # --small tests that it runs

gap              the gap of sampler and replay, by dtype and policy, of the quickstart's model and of the one in DIR:
                 the source of BOUNDS in rollout/verify.py. As a control, evictions are also replayed one position
                 later and earlier
experts          the gap with and without the recorded experts, and the choices of experts that rounding changes, on two
                 models. `near tie`: a random Qwen3-MoE whose routers have pairs of experts with weights that differ by
                 a factor of about 1 + 1e-7. `quickstart`: each of its MLPs became 8 experts, with noise of 20 %
gradient_dtype   |error| / |gradient| of a gradient that DeepSpeed adds up in float32 or in the weights' bfloat16, over
                 16 micro-batches of each of two processes; the reference adds up the same gradients in float64
states           the gap by the number of sampled tokens in hybrid models of random weights under gkv, if layers with a
                 state compute as transformers does, and as ours do with the state in float32 or float64
siege            the reward `code` under attack: hostile programs among honest ones, 8 at a time
"""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor, distributed, multiprocessing
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.results import Case, measure_cases
from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention import compute_exactly, make_view, replay_logprobs
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.models.load import load_model, load_tokenizer
from sparse_rl.trace import NEVER, EvictionTrace
from trainer.config import LaunchConfig

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "recipes/quickstart/model"
PROBLEMS = ["Qa1b4c0d2e0f3g3h3?", "Qa0b3c3d1e4f2g0h1?"]


def gaps(model: Any, rollouts: Sequence[Rollout], traces: Sequence[EvictionTrace] | None = None) -> Tensor:
    """Return |trainer's - sampler's log-prob| of each sampled token. traces : replayed instead of the recorded ones"""
    changed = [replace(r, trace=t) for r, t in zip(rollouts, traces or [r.trace for r in rollouts], strict=True)]
    sampled = torch.tensor([one for r in rollouts for one in r.model_logprobs])
    with torch.no_grad():
        return (torch.cat(replay_logprobs(model, changed)) - sampled).abs().double()


def gap(model: str, dtype: str, exact: bool, cache: dict[str, Any]) -> dict[str, Any]:
    """Measure 64 problems of the quickstart, or 30 stories of 200 tokens."""
    compute_exactly(exact)
    loaded = load_model(MODELS[model], dtype).eval()
    prompts, sampling = [[1], [1, 403, 407], [1, 261, 410, 400]], SamplingConfig(200, n=10, seed=0, ignore_eos=True)
    if model == "quickstart":
        prompts, sampling = load_tokenizer(MODELS[model])(PROBLEMS)["input_ids"], SamplingConfig(152, n=32, seed=0)
    rollouts = make_engine("hf", model=loaded, policy=cache).generate(prompts, sampling)
    measured: dict[str, Any] = {}
    for name, by in {"": 0, ", later": 1, ", earlier": -1}.items():
        if by and cache["policy"] not in ("streaming", "gkv"):
            continue
        moved = [torch.where(r.trace.evict_at < NEVER, r.trace.evict_at + by, NEVER).int() for r in rollouts]
        traces = [EvictionTrace(e, r.trace.further, validate=False) for e, r in zip(moved, rollouts, strict=True)]
        token_gaps = gaps(loaded, rollouts, traces)
        measured |= {
            "tokens": len(token_gaps),
            f"largest{name}": float(token_gaps.max()),
            f"mean{name}": float(token_gaps.mean()),
        }
    compute_exactly(True)
    return measured


BUDGET = {"budget": 40}
CACHES: list[dict[str, Any]] = [
    *({"policy": name, **BUDGET} for name in ("streaming", "h2o", "tova")),
    *({"policy": name, **BUDGET, "window": 8, "period": 8} for name in ("snapkv", "gkv", "rkv", "cake")),
    {"policy": "am", **BUDGET, "window": 4},
    {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2},
    {"policy": "full"},
]
DTYPES = [("float32", True), ("float32", False), ("float16", True), ("bfloat16", True)]  # dtype, `rollout.exact`


# ---- experts --------------------------------------------------------------------------------------------------------


def near_tie(seed: int) -> Any:
    """Return a random model of 3 layers with 8 experts in each, in which a token takes 1 expert."""
    from sparse_rl.experts import routers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    counts = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "num_hidden_layers": 3}
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, head_dim=8, initializer_range=0.1, norm_topk_prob=True, **sizes, **counts
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for _, _, router in routers(model):
        half = router.weight.data.normal_(0, 0.3)[:4]
        router.weight.data[4:] = half * (1 + 1e-7 * torch.randn(half.shape))
    return model


def experts(name: str, dtype: str, seed: int) -> dict[str, Any]:
    """Measure 64 completions of 120 tokens. The sampler's attention is exact, the trainer's computes in the dtype."""
    from tests.upcycling import upcycled

    if name == "quickstart":
        model = upcycled(QUICKSTART, "qwen3_moe", seed=seed)
        prompts = load_tokenizer(str(QUICKSTART))(PROBLEMS)["input_ids"]
    else:
        model = near_tie(seed)
        prompts = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(seed)).tolist()
    model = adopt(model.to(getattr(torch, dtype)))
    engine = make_engine("hf", model=model, policy={"policy": "gkv", **BUDGET, "window": 8, "period": 8})
    rollouts = engine.generate(prompts, SamplingConfig(120, n=32, seed=seed, ignore_eos=True))
    compute_exactly(False)
    unrouted = [EvictionTrace(r.trace.evict_at) for r in rollouts]
    with_record, without = gaps(model, rollouts), gaps(model, rollouts, unrouted)
    differ, choices = changed_choices(model, rollouts)
    compute_exactly(True)
    return {
        **{"differ": differ, "choices": choices, "gap": float(with_record.max()), "mean": float(with_record.mean())},
        **{"gap_without": float(without.max()), "mean_without": float(without.mean())},
    }


@torch.no_grad()
def changed_choices(model: Any, rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Return the number of (token, layer) pairs whose router, in a replay with the recorded experts before it, chooses
    another set of experts than the sampler's; and the number of all pairs.
    """
    from sparse_rl.experts import RouterReplay

    chosen: dict[int, Tensor] = {}

    class Watching(RouterReplay):
        """Replays the recorded experts, and keeps the routers' own choices: layer -> int64 [tokens, K]."""

        def route(self, layer: int, own: Tensor, logits: Tensor) -> Tensor:
            chosen[layer] = own
            return super().route(layer, own, logits)

    differ = total = 0
    for r in rollouts:
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
        view: Any = make_view([r.trace], [0], ids.shape[1], "cpu")
        view.routers = Watching(r.trace.further["routed"][:, None], "cpu")
        model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False)
        for layer, own in chosen.items():
            taken = r.trace.further["routed"][layer, :-1].long()
            differ += int((own[:-1].sort(-1).values != taken.sort(-1).values).any(-1).sum())
            total += len(taken)
    return differ, total


# ---- gradients ------------------------------------------------------------------------------------------------------

PROCESSES, MICRO_BATCHES, SEQUENCES, TOKENS = 2, 16, 4, 64


def exact_gradient(model: Any, batches: Tensor) -> dict[str, Tensor]:
    """Return the mean of all processes' gradients, {name: float64 [...]}."""
    total = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in model.named_parameters()}
    for tokens in batches:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        for name, weight in model.named_parameters():
            total[name] += weight.grad.double() / (MICRO_BATCHES * PROCESSES)
    for gradient in total.values():
        distributed.all_reduce(gradient)
    model.zero_grad()
    return total


def measure_gradient(rank: int, port: int, launch: LaunchConfig, results: Any) -> None:
    """Measure in process `rank` with the configuration of a training, and put the error into the queue `results`."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from trainer.arguments import deepspeed_config, prepare_deepspeed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prepare_deepspeed()
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(rank)
    batches = torch.randint(model.config.vocab_size, (MICRO_BATCHES, SEQUENCES, TOKENS), generator=generator)
    exact = exact_gradient(model, batches)
    config: dict[str, Any] = {**(deepspeed_config(launch) or {}), "gradient_clipping": 1.0}
    config |= {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
    config |= {"gradient_accumulation_steps": MICRO_BATCHES, "train_micro_batch_size_per_gpu": SEQUENCES}
    del config["train_batch_size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    trained = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for tokens in batches:
        trained.backward(trained(input_ids=tokens, labels=tokens).loss)
        if not trained.is_gradient_accumulation_boundary():
            trained.step()  # only counts the micro-batch
    errors = [safe_get_full_grad(weight).double() - exact[name] for name, weight in model.named_parameters()]
    size = sum(gradient.square().sum() for gradient in exact.values())
    results.put(float((sum(error.square().sum() for error in errors) / size) ** 0.5))


def gradient_dtype(stage: int, dtype: str) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    launch = LaunchConfig(processes=PROCESSES, zero_stage=stage, gradient_dtype=dtype)  # type: ignore[arg-type]
    multiprocessing.spawn(measure_gradient, (port, launch, results), PROCESSES)
    return {"error": results.get()}


# ---- programs -------------------------------------------------------------------------------------------------------


def states(family: str, form: str, length: int) -> dict[str, Any]:
    """Measure 4 completions of random tokens. The attention is exact in each form."""
    sys.path.append(str(ROOT / "tests"))
    from hybrid import hybrid, prompts

    from sparse_rl.states import convolution, delta, mamba2

    kind = {"qwen3_next": delta, "granite_nope": mamba2, "lfm2": convolution}[family]
    plain = kind.functions

    def functions(mixer: Any, exact: bool) -> dict[str, Any]:
        used = dict(plain(mixer, exact))
        if form == "transformers":
            return {}
        if form == "float32 state" and kind is delta:
            used["torch_recurrent_gated_delta_rule"] = rounded_delta
        if form == "float32 state" and kind is mamba2:
            used[mamba2.STEP] = lambda state, *args, **more: rounded_mamba(plain(mixer, True), state, *args, **more)
        return used

    def rounded_delta(*args: Any, initial_state: Tensor, **more: Any) -> Any:
        out, state = delta.step(*args, initial_state=initial_state.float(), **more)
        return out, state.float().double()

    def rounded_mamba(used: dict[str, Any], state: Tensor, *args: Any, **more: Any) -> Tensor:
        state.copy_(state.float())
        out: Tensor = used[mamba2.STEP](state, *args, **more)
        state.copy_(state.float())
        return out

    model, kind.functions = hybrid(family), functions
    try:
        engine = make_engine("hf", model=model, policy={"policy": "gkv", "budget": 64, "window": 8, "period": 32})
        rollouts = engine.generate(prompts(9, 70, 33, 50), SamplingConfig(length, seed=1, ignore_eos=True))
        by_token = gaps(model, rollouts).view(4, -1)
    finally:
        kind.functions = plain
    ends = [n for n in (64, 256, 1024, 4096) if n <= length]
    return {"mean": float(by_token.mean()), **{f"largest of {n}": float(by_token[:, :n].max()) for n in ends}}


def siege(per_class: int, honest: int) -> dict[str, Any]:
    """Count what attacks achieved, with a limit of 1 second of processor time for a test."""
    sys.path.append(str(ROOT / "tests/rewards"))
    from hostile_programs import besiege, honest_cases, hostile_cases

    with tempfile.TemporaryDirectory() as folder:
        victim = Path(folder) / "victim"
        hostile = list(hostile_cases(per_class, str(victim)))
        cases = [*hostile, *honest_cases(honest)]
        random.Random(0).shuffle(cases)
        findings = besiege(cases, victim, 1.0, workers=8)
    counted = ("wrong", "late", "processes", "files", "signals", "leaked")
    return {
        **{"hostile programs": len(hostile), "classes": len({case.label for case in hostile})},
        **{name: len(getattr(findings, name)) for name in counted},
        **{"parent's growth in MB": findings.growth / 2**20, "seconds": findings.seconds, "details": findings.broken},
    }


HYBRIDS, FORMS = ("lfm2", "qwen3_next", "granite_nope"), ("transformers", "float32 state", "float64")
MODELS = {"quickstart": str(QUICKSTART), "stories": os.environ.get("STORIES", "")}
CASES = {
    "gap": Case(
        gap,
        ("model", "dtype", "exact", "cache"),
        [(m, *dtype, c) for m in MODELS if MODELS[m] for dtype in DTYPES for c in CACHES],
    ),
    "experts": Case(
        experts,
        ("model", "dtype", "seed"),
        [
            (*one, seed)
            for one in (("near tie", "float32"), ("quickstart", "float32"), ("quickstart", "bfloat16"))
            for seed in range(3)
        ],
    ),
    "gradient_dtype": Case(
        gradient_dtype, ("stage", "dtype"), [(stage, dtype) for stage in (1, 2, 3) for dtype in ("float32", "weights")]
    ),
    "states": Case(
        states,
        ("family", "form", "tokens"),
        [("lfm2", "transformers", 64), *((f, form, n) for n in (1024, 4096) for f in HYBRIDS for form in FORMS)],
    ),
    "siege": Case(siege, ("per class", "honest programs"), [(1, 20), (45, 200)]),
}

if __name__ == "__main__":
    measure_cases(CASES, __doc__)
