"""The gain of eviction in the vLLM engine: tokens/s, peak blocks, concurrent requests, preemptions, compaction.

equal memory     blocks for 4 sequences without evictions, and 32 requests; with eviction all requests run concurrently
equal batch      blocks for all requests; a step reads less under eviction, but compactions take time. On a CPU with a
                 tiny model the fixed cost of a step dominates, on a GPU the bytes of the cache; so compare ratios
layers of 0.5B   as equal batch, on 3 layers of Qwen2.5-0.5B's shape: the share of compactions in a real model's step

The full cache is vLLM's own, with only our sampler. Runs are interleaved, and medians are reported.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py      # writes benchmarks/results/rollout.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this folder, where this file hides the package `rollout`

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.results import write
from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import cache_shape
from sparse_rl.models.directory import attach_scorers, save_policy, write_scorers
from sparse_rl.policies import make_policy

REQUESTS, PROMPT, LENGTH, BLOCK = 32, 48, 2048, 32
TINY = Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=12, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64,
)  # fmt: skip
LAYERS_OF_05B = Qwen2Config(
    vocab_size=512, hidden_size=896, intermediate_size=4864, num_hidden_layers=3, num_attention_heads=14,
    num_key_value_heads=2,
)  # fmt: skip
BUDGET = {"budget": 128, "period": 128}
CACHES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "streaming": {"policy": "streaming", **BUDGET},
    "gkv": {"policy": "gkv", "window": 16, "redundancy": False, **BUDGET},
    "gkv with redundancy": {"policy": "gkv", "window": 16, **BUDGET},
    "gkv, period 1": {"policy": "gkv", "window": 16, "budget": 128, "period": 1, "redundancy": False},
    "h2o": {"policy": "h2o", **BUDGET},
    "am": {"policy": "am", "window": 16, "reference_queries": 128, **BUDGET},
    **{  # budget: the peak of streaming and gkv
        f"kvpop, {name}": {"policy": "kvpop", "budget": 256, "window": 64, "scorer": scorer}
        for name, scorer in {
            "mlp": {"name": "mlp"},
            "mlstm delayed": {"name": "mlstm"},
            "mlstm immediate": {"name": "mlstm", "readout": "immediate"},
        }.items()
    },
}
LEARNED = tuple(name for name in CACHES if name.startswith("kvpop"))
WHOLE = -(-LENGTH // BLOCK)  # blocks of a sequence without evictions
# name -> model, caches, blocks of the pool, share of --tokens
QUESTIONS: dict[str, tuple[PretrainedConfig, tuple[str, ...], int, float]] = {
    "equal memory": (TINY, ("full", "streaming", "gkv", "gkv with redundancy"), 4 * WHOLE, 1.0),
    "equal batch": (TINY, tuple(CACHES), REQUESTS * WHOLE, 0.5),
    "layers of 0.5B": (
        LAYERS_OF_05B, ("full", "streaming", "gkv", "gkv with redundancy", "gkv, period 1", "am", *LEARNED),
        REQUESTS * WHOLE, 0.25,
    ),
}  # fmt: skip


def save_model(
    shape: PretrainedConfig, cache: dict[str, Any], folder: Path, device: str = "cpu", dtype: str = "float32"
) -> Path:
    """Save a random model of a shape. A learned cache's scorers are random too: new scorers would rank by recency.

    device, dtype : device on which the weights are drawn, and their dtype
    """
    place = folder / (cache["policy"] + "-" + "-".join(map(str, cache.get("scorer", {}).values())))
    if not place.exists():
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))
        policy: Any = make_policy(cache)
        if policy.layered_parameters:
            attach_scorers(model, policy)
            for weight in model.cache_scorers.parameters():
                weight.data += 0.1 * torch.randn_like(weight)
        model.save_pretrained(place)
        if policy.layered_parameters:
            write_scorers(place, model.state_dict())
            save_policy(place, policy)
    return place


class Watch:
    """Counts the events in an engine of this process since the last `reset`."""

    def __init__(self, engine: Any) -> None:
        from rollout.vllm.compat.paged import live_state

        self.core = engine.llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.core.kv_cache_manager.block_pool
        self.total = self.pool.get_num_free_blocks()
        self.reset()
        inner = engine.llm.llm_engine.step

        def step() -> Any:
            out = inner()
            self.blocks = max(self.blocks, self.total - self.pool.get_num_free_blocks())
            self.running = max(self.running, len(self.core.running))
            self.preempted |= {(r.request_id, r.num_preemptions) for r in self.core.waiting if r.num_preemptions}
            if self.prefilled is None and self.core.running and not self.core.waiting:
                running = self.core.running
                if all(r.num_computed_tokens >= r.num_prompt_tokens for r in running):
                    self.prefilled = now(), sum(r.num_output_tokens for r in running)
            return out

        engine.llm.llm_engine.step = step
        state = live_state()
        if state is not None:
            compact = state.compact

            def timed(due: Any) -> None:
                start = now()
                compact(due)
                self.compaction += now() - start

            state.compact = timed

    def reset(self) -> None:
        """Set all counts to 0."""
        self.blocks, self.running, self.compaction = 0, 0, 0.0
        self.preempted: set[tuple[str, int]] = set()
        # time at which no prompt was left to read, and the tokens that the running requests had sampled by then
        self.prefilled: tuple[float, int] | None = None


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def open_engine(
    model: Path,
    shape: PretrainedConfig,
    cache: dict[str, Any],
    blocks: int | None,
    dtype: str,
    *,
    requests: int = REQUESTS,
    length: int = LENGTH,
    **options: Any,
) -> Any:
    """Return a vLLM engine for `requests` sequences of `length` tokens.

    blocks : number of blocks of the pool; None leaves this number to `options`
    """
    if blocks is not None:
        layers, heads, dim = cache_shape(shape)
        block_bytes = 2 * layers * heads * dim * BLOCK * (4 if dtype == "float32" else 2)
        options["kv_cache_gb"] = (blocks + 1) * block_bytes / 2**30
    return make_engine(
        "vllm", model=str(model), policy=cache, dtype=dtype, max_batch=requests, max_model_len=length, block_size=BLOCK,
        exact=False, **options,
    )  # fmt: skip


def run(engine: Any, watch: Watch, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Sample `tokens` tokens after each prompt, and return the speed and the counts of `watch`.

    decoded_per_second starts when all prompts have been read. It is left out if the engine could not run all requests
    concurrently.
    """
    watch.reset()
    start = now()
    engine.generate(prompts, SamplingConfig(tokens, seed=0, ignore_eos=True))
    end = now()
    result = {
        "tokens_per_second": len(prompts) * tokens / (end - start),
        "peak_blocks": watch.blocks,
        "in_flight": watch.running,
        "preemptions": len(watch.preempted),
        "compaction_share": watch.compaction / (end - start),
    }
    if watch.prefilled is not None and watch.running == len(prompts) and not watch.preempted:
        since, sampled = watch.prefilled
        result["decoded_per_second"] = (len(prompts) * tokens - sampled) / (end - since)
    return result


def measure(
    model: Path, shape: PretrainedConfig, cache: dict[str, Any], blocks: int, dtype: str, tokens: int, **options: Any
) -> dict[str, float]:
    """Return the result of one run on a new engine, after a warm-up.

    options : `requests`, `length`, and options of the engine
    """
    engine = open_engine(model, shape, cache, blocks, dtype, **options)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(512, (options.get("requests", REQUESTS), PROMPT), generator=generator).tolist()
    engine.generate(prompts, SamplingConfig(8, seed=0, ignore_eos=True))
    result = run(engine, Watch(engine), prompts, tokens)
    engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--tokens",
        type=int,
        default=LENGTH - PROMPT,
        help="tokens sampled per request; half of them at equal batch, a quarter on the larger layers",
    )
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument(
        "--caches",
        nargs="+",
        choices=CACHES,
        default=list(CACHES),
        help="caches to measure, in addition to the full cache",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollout.json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    runs: dict[tuple[str, str], list[dict[str, float]]] = {
        (question, name): []
        for question in options.questions
        for name in QUESTIONS[question][1]
        if name in ("full", *options.caches)
    }
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.runs):
            for question, name in runs:
                shape, _, blocks, share = QUESTIONS[question]
                tokens = int(share * options.tokens)
                model = save_model(shape, CACHES[name], Path(folder) / question)
                seen = measure(model, shape, CACHES[name], blocks, options.dtype, tokens)
                runs[question, name].append(seen)
    rows = []
    for (question, name), seen in runs.items():
        pairs = zip(seen, runs[question, "full"], strict=True)
        ratio = statistics.median(ours["tokens_per_second"] / full["tokens_per_second"] for ours, full in pairs)
        median = {
            key: statistics.median(one[key] for one in seen) for key in seen[0] if all(key in one for one in seen)
        }
        rows.append({"at": question, "cache": name, **median, "ratio_to_full": ratio, "runs": seen})
    asked = {
        question: {
            "model": {name: getattr(shape, name) for name in ("model_type", "hidden_size", "num_attention_heads")},
            "cache": dict(zip(("layers", "kv_heads", "head_dim"), cache_shape(shape), strict=True)),
            "pool_blocks": blocks,
            "generated": int(share * options.tokens),
        }
        for question, (shape, _, blocks, share) in QUESTIONS.items()
        if question in options.questions
    }
    load = {"requests": REQUESTS, "prompt": PROMPT, "block": BLOCK, "dtype": options.dtype}
    write(options.out, questions=asked, load=load, caches=CACHES, rows=rows)

    table = Table(title=f"vLLM engine, {REQUESTS} requests, {options.dtype}", title_justify="left")
    for column in ("at", "cache", "tokens/s", "ratio to full", "peak blocks", "in flight", "preempted", "compaction"):
        table.add_column(column, justify="left" if column in ("at", "cache") else "right")
    for row in rows:
        table.add_row(
            row["at"], row["cache"], f"{row['tokens_per_second']:.0f}", f"{row['ratio_to_full']:.2f}",
            f"{row['peak_blocks']:.0f}", f"{row['in_flight']:.0f}", f"{row['preemptions']:.0f}",
            f"{row['compaction_share']:.1%}", end_section=row is [r for r in rows if r["at"] == row["at"]][-1],
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
