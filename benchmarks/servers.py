"""Servers of rollouts: what they cost, written to benchmarks/results/CASE.json. A Linux machine with two cores.

    OMP_NUM_THREADS=1 python benchmarks/servers.py server_take server_push     # --small tests that they run

The server, or the engine in process, is pinned to core 1, and the client to core 0.

server_take         seconds that a finished sequence costs a worker of a server between two steps
server_throughput   seconds for some sequences: vLLM in process, and a server. With `geometric` lengths, each token ends
                    its sequence with a probability of about 1/128
server_push         seconds in which a server gets new weights: from the client's memory, and in a body
server_ahead        GRPO on a server: seconds of a step with `rollout.ahead` 0 and 1. `ideal` is the longer part of a
                    step with 0: sampling and the new weights, or the rest
"""

from __future__ import annotations

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import httpx
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.results import HOUSE, Case, measure_cases
from rollout import SamplingConfig, make_engine
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.metrics import read_metrics
from sparse_rl.policies import make_policy

PORT, CACHE = 8731, {"policy": "streaming", "sinks": 1, "budget": 40, "period": 8}
OURS, THEIRS = 0, 1  # cores


def take(tokens: int, layers: int, kv_heads: int) -> dict[str, Any]:
    """Evictions of 128 entries at a time; all but 600 tokens are evicted."""
    from rollout.vllm.sampling import Dropped, ServerRecord

    generator = np.random.default_rng(0)
    orders = [[generator.permutation(tokens - 600) for _ in range(kv_heads)] for _ in range(layers)]
    order = np.asarray(orders, np.int32).transpose(2, 0, 1)
    parts = [order[start : start + 128] for start in range(0, len(order) - 127, 128)]
    dropped = [Dropped(np.full(128, 640 + 128 * i), part) for i, part in enumerate(parts)]
    steps = [(["a"], [step], torch.zeros(1, 2)) for step in range(tokens - 640)]

    taken: list[float] = []
    for _ in range(9):
        record = ServerRecord()
        record.admit("a", 0)
        record.dropped[record.numbers["a"]] = list(dropped)
        record.drawn = list(steps)
        start = time.perf_counter()
        pickle.dumps(record.take({0: tokens}))
        taken.append(time.perf_counter() - start)
    return {"seconds": statistics.median(taken[1:])}


def model_of(folder: Path, hidden: int, layers: int) -> str:
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, **heads,
        eos_token_id=2, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    RunningSum.tokenizer().save_pretrained(folder)
    return str(folder)


@contextmanager
def serving(model: str, batch: int, folder: Path) -> Iterator[str]:
    """Run a server, pinned to its core. Yields its URL."""
    cache = ",".join(f"{name}={value}" for name, value in CACHE.items())
    words = ["serve", model, "--rollouts", "--port", str(PORT), "--cache", cache, "--dtype", "float32"]
    words += ["--kv-cache-gb", "0.2", "--max-batch", str(batch), "--max-model-len", "512"]
    command, url = [*pinned(THEIRS), *words], f"http://127.0.0.1:{PORT}"
    log = folder / "server.log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=HOUSE) as server:
        try:
            while not answers(url):
                assert server.poll() is None, log.read_text()
                time.sleep(0.3)
            yield url
        finally:
            server.terminate()


def pinned(core: int) -> list[str]:
    return ["taskset", "-c", str(core), sys.executable, "-m", "sparse_rl.cli"]


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/rollouts").is_success
    return False


def median_seconds(work: Callable[[], Any], runs: int = 3) -> float:
    """Return the median of the seconds of some runs, after a warm-up."""
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def throughput(lengths: str, batch: int, hidden: int, layers: int, tokens: int) -> dict[str, Any]:
    prompts = [[3 + i % 100, 7, 9, 11] for i in range(4 * batch)]
    sampling = SamplingConfig(tokens, seed=1, ignore_eos=lengths == "equal")
    made, sampled = dict[str, Any](), []

    def measure(name: str, core: int, kind: Any, **options: Any) -> None:
        os.sched_setaffinity(0, {core})
        engine = make_engine(kind, model=model, policy=make_policy(CACHE), **options)
        made[name] = median_seconds(lambda: sampled.append(engine.generate(prompts, sampling)))
        engine.close()

    with tempfile.TemporaryDirectory() as folder:
        model = model_of(Path(folder), hidden, layers)
        measure("in process", THEIRS, "vllm", kv_cache_gb=0.2, max_batch=batch, max_model_len=512)
        with serving(model, batch, Path(folder)) as url:
            measure("server", OURS, "server", servers=[url])
    ids = [[rollout.completion_ids for rollout in rollouts] for rollouts in sampled]
    assert all(one == ids[0] for one in ids)
    made |= {"tokens": sum(map(len, ids[0])), "share": made["in process"] / made["server"]}
    return made | ({"seconds of a step": made["in process"] / (4 * tokens)} if lengths == "equal" else {})


def push(hidden: int, layers: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {OURS})
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(Path(folder), hidden, layers)
        weights = [(n, w.detach()) for n, w in Qwen3ForCausalLM.from_pretrained(model).named_parameters()]
        made = {"MB": sum(weight.nbytes for _, weight in weights) / 1e6}
        with serving(model, 8, Path(folder)) as url:
            engine = make_engine("server", model=model, policy=make_policy(CACHE), servers=[url])
            for name, near in (("from memory", True), ("in a body", False)):
                engine.servers[0].near = near
                made[name] = median_seconds(lambda: engine.load_weights(iter(weights)))
            engine.close()
    return made


def ahead(completions: int, steps: int) -> dict[str, Any]:
    """completions : of a step"""
    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, serving("recipes/quickstart/model", 128, Path(folder)) as url:
        for number in (0, 1):
            run, log = Path(folder) / f"ahead{number}", Path(folder) / "run.log"
            words = ["train", "quickstart/grpo", f"output_dir={run}", "rollout.engine=server", f"max_steps={steps}"]
            words += [f"rollout.servers=[{url}]", f"rollout.ahead={number}", "importance_correction=token_truncate"]
            words += [f"per_device_train_batch_size={completions}"]
            with log.open("w") as file:
                ended = subprocess.run([*pinned(OURS), *words], stdout=file, stderr=file, cwd=HOUSE, check=False)
            assert ended.returncode == 0, log.read_text()
            lines = [line for line in read_metrics(run) if "time/step" in line][2:-1]
            spent = {name: statistics.mean(line[f"time/{name}"] for line in lines) for name in PARTS}
            made |= {f"{name}, ahead {number}": seconds for name, seconds in spent.items()}
            if number == 0:
                sampling = spent["generate"] + spent["sync"]
                made["ideal"] = max(sampling, spent["step"] - sampling)
    return made | {"over ideal": made["step, ahead 1"] / made["ideal"]}


PARTS = ("step", "generate", "sync", "logprobs", "update")
CASES = {
    "server_take": Case(take, ("tokens", "layers", "kv heads"), [(2048, 28, 4), (8192, 28, 4)]),
    "server_throughput": Case(
        throughput,
        ("lengths", "batch", "hidden", "layers", "at most"),
        [("equal", 16, 256, 2, 64), ("equal", 16, 640, 8, 128), ("geometric", 16, 640, 8, 256)],
    ),
    "server_push": Case(push, ("hidden", "layers"), [(256, 2), (1024, 12)]),
    "server_ahead": Case(ahead, ("completions", "steps"), [(64, 12), (128, 12), (256, 12)]),
}

if __name__ == "__main__":
    measure_cases(CASES, __doc__ or "")
