"""Speed: each case times some ways to compute the same, in seconds, and writes benchmarks/results/CASE.json.

    OMP_NUM_THREADS=1 python benchmarks/speed.py topk sampler     # --small tests that they run

attention    tiles of 128 x 128 that FlexAttention visits if keys are in natural order and sorted in segments; as the
             ideal, the share of visible pairs; pairs that `gather` computes; lists of tiles; forward passes
training     forward and backward pass of a model under evictions by `gather` and by masks, and causal SDPA
topk         running_topk, and a Fenwick tree over ranks in C++, which does as much work token by token, but no sort
sampler      the sampler, and its reference, which sorts the vocabulary
top_p        rows of 192 whose top-p cuts elsewhere if the ranked probabilities are not normalised first
matching     forward and backward pass of a layer under Attention Matching, and under the same evictions alone
compaction   one compaction of 8 sequences in a layer: Attention Matching and G-KV
pursuits     our orthogonal matching pursuit, and the paper's, which solves a new least squares problem in each step;
             errors of mass and output of the fitted entries
contexts     compaction of random keys of a long context, in parts, 5 % kept
clustered    forward and backward pass of a layer under clustered attention, by a mask and in full
distill      loss and gradients with a teacher 5 times the student's size, or with a teacher cache
sandbox      the reward `code`: 90 right programs by the wall clock, in 1, 2 and 8 workers; and a plain subprocess.run

`sparse-rl bench benchmarks/recipes/NAME.yaml` measures whole engines with random weights.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.results import Case, measure_cases
from rollout import SamplingConfig, make_engine
from rollout.sampling import ranking, sample, sample_reference
from sparse_rl.attention import NO_MASK, adopt, compute_exactly, make_view
from sparse_rl.attention.views import ReplayView
from sparse_rl.kernels import running_topk
from sparse_rl.kernels.exact import sdpa
from sparse_rl.kernels.flex import flex_attend, make_tiles, segment_of, visible_share
from sparse_rl.kernels.masked import make_chunks, visited_share
from sparse_rl.matching import Block, Fit, match, residuals
from sparse_rl.methods.am.match import FAST_K, FAST_TAU, PURSUIT_BOUND, features, pursue
from sparse_rl.methods.am.view import MatchedView
from sparse_rl.methods.pages.view import PagedView
from sparse_rl.policies import Entries, Policy, make_policy
from sparse_rl.trace import NEVER, EvictionTrace

SINKS, WINDOW = 4, 256
Made = dict[str, Any]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def evictions(kind: str, length: int, budget: int, heads: int, window: int = WINDOW) -> Tensor:
    """Return evict_at, int32 [heads, S], if the best random scores are kept. kind "recency" favours recent tokens."""
    scores = seeded(1, heads, length) + (torch.arange(length) / budget if kind == "recency" else 0)
    return running_topk(scores, SINKS, window=window, k=budget - SINKS - window).evict_at[0]


def backward(attend: Callable[..., Tensor], *given: Tensor) -> None:
    attend(*(x.clone().requires_grad_() for x in given)).sum().backward()


# ---- attention ------------------------------------------------------------------------------------------------------


def attentions(
    evict_at: Tensor, scaling: float, *, grouped: bool, compiled: bool = True
) -> dict[str, Callable[..., Tensor]]:
    """Return name -> attend(q, k, v): FlexAttention under evict_at [1, Hkv, S] and without evictions, and flash SDPA.

    grouped : False repeats the kv heads for SDPA, because a CPU has flash attention only for equal numbers of heads
    compiled : False uses FlexAttention's plain operator
    """
    everything = torch.full_like(evict_at, 2 * evict_at.shape[-1])

    def ours(which: Tensor, in_segments: bool) -> Callable[..., Tensor]:
        return lambda q, k, v: flex_attend(which, q, k, v, scaling, in_segments=in_segments, compiled=compiled)[0]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)

    named = {"flex_sorted": ours(evict_at, True), "flex": ours(evict_at, False)}
    return {**named, "causal flex": ours(everything, False), "causal flash SDPA": dense}


def attention(scores: str, length: int, budget: int) -> Made:
    evict_at, eight = (evictions(scores, length, budget, heads) for heads in (4, 8))
    natural, ordered = (make_tiles(evict_at, length, segment) for segment in (None, segment_of(length)))
    made = {
        "ideal": visible_share(evict_at), "natural": natural.visited, "sorted": ordered.visited,
        "gathered": visited_share(make_chunks(evict_at)), "MB of the lists": ordered.nbytes / 1e6,
        "lists of 8 heads": lambda: make_tiles(eight, length, segment_of(length)),
    }  # fmt: skip
    if scores == "uniform" and length <= 16384:
        q, k, v = (seeded(1, heads, length, 64, seed=heads) for heads in (4, 2, 2))
        ways = attentions(evict_at[None, :2].contiguous(), 64**-0.5, grouped=False)
        made |= {name: partial(torch.no_grad()(attend), q, k, v) for name, attend in ways.items()}
    return made


def training(length: int, budget: int, layers: int = 4, heads: int = 8, kv_heads: int = 2, dim: int = 32) -> Made:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=512, hidden_size=heads * dim, intermediate_size=2 * heads * dim, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    evict_at = evictions("uniform", length, budget, layers * kv_heads, window=16).view(layers, kv_heads, length)
    kernels = {"masks": ("sdpa", True), "gather": ("gather", True), "gather in float32": ("gather", False)}
    return passes(Qwen2ForCausalLM(config), evict_at, kernels)


def passes(model: Any, evict_at: Tensor, kernels: Mapping[str, tuple[str, bool]]) -> Made:
    """Return name -> forward and backward pass of a model over one sequence, and the same under causal SDPA.

    evict_at : int32 [L, Hkv, S]; kernels : name -> `attention_kernel`, and True for exact attention
    """
    length, device = evict_at.shape[-1], model.device
    ids = torch.randint(0, 512, (1, length)).to(device)
    trace = EvictionTrace(evict_at.masked_fill(evict_at >= length - 1, NEVER))

    def train(**further: Any) -> None:
        model(input_ids=ids, use_cache=False, **further).logits.logsumexp(-1).mean().backward()
        model.zero_grad()

    def plain() -> None:
        model.set_attn_implementation("sdpa")
        train()

    def ours(kernel: str, exact: bool) -> None:
        compute_exactly(exact)
        adopt(model)
        train(attention_mask=NO_MASK, kv_view=make_view([trace], [0], length, device, kernel))
        compute_exactly(True)

    return {"causal SDPA": plain, **{name: partial(ours, *setting) for name, setting in kernels.items()}}


# ---- running top-k, sampler -----------------------------------------------------------------------------------------

FENWICK = r"""
#include <algorithm>
#include <cstdint>
#include <vector>
extern "C" void fenwick(const int32_t* ranks, int32_t* cutoff, int64_t rows, int64_t width, int64_t k) {
  int64_t top = 1;
  while (top * 2 <= width) top *= 2;
  std::vector<int32_t> tree(width + 1);
  for (int64_t row = 0; row < rows; ++row) {
    std::fill(tree.begin(), tree.end(), 0);
    for (int64_t t = 0; t < width; ++t) {
      for (int64_t i = ranks[row * width + t] + 1; i <= width; i += i & -i) ++tree[i];
      if (t + 1 < k) continue;
      int64_t place = 0, left = k;
      for (int64_t step = top; step; step /= 2)
        if (place + step <= width && tree[place + step] < left) { place += step; left -= tree[place]; }
      cutoff[row * width + t] = place;
    }
  }
}
"""


@cache
def compiled_fenwick() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "fenwick.cpp"), Path(folder, "fenwick.so")
        source.write_text(FENWICK)
        subprocess.run(["c++", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library)).fenwick


def topk(length: int, heads: int) -> Made:
    scores, k = seeded(1, heads, length), min(2016, length // 4)
    ours = partial(running_topk, scores, SINKS, window=WINDOW, k=k, kernel="torch")
    order = scores[0, :, SINKS : length - WINDOW].argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1).int().contiguous()
    cutoff = torch.full_like(ranks, -1)
    native, sizes = compiled_fenwick(), [ctypes.c_int64(n) for n in (*ranks.shape, k)]

    def tree() -> None:
        native(*(ctypes.c_void_p(x.data_ptr()) for x in (ranks, cutoff)), *sizes)

    tree()
    assert torch.equal(cutoff, ours().cutoff_rank[0, :, SINKS + WINDOW :])
    return {"ours": ours, "C++ Fenwick": tree}


def sampler(rows: int, vocabulary: int, top_k: int | None, top_p: float, device: str = "cpu") -> Made:
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    given = (3 * seeded(rows, vocabulary)).to(device), SamplingConfig(1, top_k=top_k, top_p=top_p), uniform
    assert torch.equal(sample(*given)[0], sample_reference(*given)[0])
    return {"reference": partial(sample_reference, *given), "sampler": partial(sample, *given)}


def top_p(deviation: float, rows: int = 192, size: int = 151_936, share: float = 0.95) -> Made:
    generator, cut = torch.Generator().manual_seed(0), 0
    for _ in range(rows):
        logprobs = (deviation * torch.randn(1, size, generator=generator)).log_softmax(-1)
        ranked = logprobs.gather(-1, ranking(logprobs, size))
        lengths = [int((mass.cumsum(-1) - mass < share).sum()) for mass in (ranked.log_softmax(-1).exp(), ranked.exp())]
        cut += lengths[0] != lengths[1]
    return {"rows": rows, "cut elsewhere": cut}


# ---- Attention Matching ---------------------------------------------------------------------------------------------

HEADS, GROUP, DIM = 2, 4, 64


def recorded(policy: Any, length: int) -> dict[str, Tensor]:
    """Return a batch of one row and layer. Its compactions evict random entries from those outside the window."""
    generator = torch.Generator().manual_seed(0)
    further = policy.further(64, length)
    evict_at = torch.full((1, 1, HEADS, length), NEVER, dtype=torch.int32)
    for now, head in product(further["refit_at"].tolist(), range(HEADS)):
        competes = torch.arange(now - policy.config.window)
        held = competes[evict_at[0, 0, head, : len(competes)] > now]
        order = torch.randperm(len(held), generator=generator)
        evict_at[0, 0, head, held[order[policy.config.refitted :]]] = now
    return {"evict_at": evict_at, "refit_at": further["refit_at"][None], "refit_with": further["refit_with"]}


def matching(length: int, budget: int, period: int) -> Made:
    policy = make_policy("am", budget=budget, period=period, reference_queries=128)
    batch, given = recorded(policy, length), [seeded(1, n, length, DIM, seed=n) for n in (HEADS * GROUP, HEADS, HEADS)]
    views = {
        "evictions, gathered": ReplayView({"evict_at": batch["evict_at"]}, "cpu", "gather"),
        "evictions, mask": ReplayView({"evict_at": batch["evict_at"]}, "cpu", "sdpa"),
        "am": MatchedView(batch, "cpu"),
        "am, constants": MatchedView(batch, "cpu", through=False),
    }

    def attend(view: Any, *tensors: Tensor) -> Any:
        return view.attend(0, *tensors, DIM**-0.5)

    return {name: partial(backward, partial(attend, view), *given) for name, view in views.items()}


def entries(
    policy: Policy, held: int, rows: int = 8, shape: tuple[int, int, int] = (HEADS, GROUP, DIM),
    device: str = "cpu", dtype: torch.dtype = torch.float32,
) -> Entries:  # fmt: skip
    """Return random entries of some rows, each of which holds `held` entries.

    shape : (kv heads, query heads per kv head, head dim)
    """
    heads, group, dim = shape
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    keys, values = (torch.randn(rows, heads, held, dim, **options).to(dtype) for _ in range(2))
    queries = torch.randn(rows, heads * group, policy.last_queries, dim, **options).to(dtype)
    lengths = torch.full((rows,), held, device=device)
    memory = policy.entry_memory.items()
    state = {name: torch.full((rows, heads, held), start, device=device) for name, start in memory}
    positions = torch.arange(held, device=device).expand(rows, heads, held)
    left, older = [policy.schedule.budget] * rows, held - policy.last_queries
    return Entries(keys, values, positions, lengths, lengths, queries, dim**-0.5, state, left, older)


def compaction(budget: int, period: int) -> Made:
    shared = {"budget": budget, "period": period, "window": 16}
    policies = {"gkv": make_policy("gkv", **shared)}
    policies |= {f"am, {n}": make_policy("am", **shared, reference_queries=n) for n in (32, 128)}
    if budget < 1024:  # otherwise it takes minutes
        policies["am, 128, omp"] = make_policy("am", **shared, reference_queries=128, select="omp")
    return {name: partial(p.compact, 0, entries(p, budget + period)) for name, p in policies.items()}


def paper_pursuit(phi: Tensor, count: int, k: int = 1, tau: int = 1) -> list[int]:
    """Return the choice of the paper's algorithm 2, or 1 if k and tau are 1. Unlike naive_pursuit and
    naive_fast_pursuit, compute one product per step, not a loop.
    """
    mass, chosen = phi.sum(-1), list[int]()
    missing = mass
    for u in range(1, math.ceil(count / k) + 1):
        agrees = missing @ phi
        agrees[chosen] = -torch.inf
        chosen += agrees.topk(min(k, count - len(chosen))).indices.tolist()
        if u % tau and len(chosen) < count:
            continue
        weights = torch.linalg.lstsq(phi[:, chosen], mass[:, None], driver="gels").solution[:, 0]
        missing = mass - phi[:, chosen] @ weights.clamp(min=math.exp(-PURSUIT_BOUND), max=math.exp(PURSUIT_BOUND))
    return chosen


def pursuits(count: int, chosen: int, queries: int) -> Made:
    """Check that all forms of a pursuit choose the same entries. Keys are in clusters, as in a text."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(16, DIM, generator=generator, dtype=torch.float64)
    keys = centres[torch.randint(16, (count,), generator=generator)]
    keys = keys + 0.5 * torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    asked, _ = (torch.randn(queries, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    values = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    bias, competes = torch.zeros(1, 1, count), torch.ones(1, 1, count) > 0
    block = Block(keys[None, None], values[None, None], asked[None, None], bias, competes, DIM**-0.5)
    phi, made = features(block.logits())[0][0, 0], Made()
    for select, (k, tau) in {"omp": (1, 1), "omp_fast": (FAST_K, FAST_TAU)}.items():
        ours = partial(pursue, phi[None], chosen, block.competing[0], False, at_once=k * tau)
        assert ours()[0][0].tolist() == paper_pursuit(phi, chosen, k, tau)
        made |= {f"{select}, the paper's": partial(paper_pursuit, phi, chosen, k, tau), f"{select}, ours": ours}
        mass, output = residuals(block, *match(block, chosen, Fit(select)))  # type: ignore[arg-type]
        made |= {f"{select}, error of mass": mass, f"{select}, error of output": output}
    return made


def contexts(select: str, tokens: int) -> Made:
    """Keys are in clusters, as in a text, and queries near the same clusters; the queries serve every part."""
    from rollout.context import Context, PromptCacheConfig
    from rollout.context.cache import LayerEntries
    from rollout.context.compact import Studied, StudiedParts
    from rollout.context.reader import Reader, Stages

    queries = 2048 if select == "attention" else 512
    config = PromptCacheConfig(ratio=0.05, select=cast(Any, select), chunk=4096, most_queries=queries)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(HEADS, 64, DIM, generator=generator)

    def near(count: int) -> Tensor:
        chosen = centres[:, torch.randint(64, (count,), generator=generator)]
        return (chosen + 0.5 * torch.randn(chosen.shape, generator=generator))[None]

    keys, asked = near(tokens), near(queries)
    positions, bias = torch.arange(tokens).expand(1, HEADS, -1), torch.zeros(1, HEADS, tokens)
    ids, reader = list(range(tokens)), cast(Reader, None)
    whole = LayerEntries(keys, torch.randn(keys.shape, generator=generator), bias, positions)
    parts = []
    for part in config.parts(tokens):
        own = (x[:, :, config.first + part.start : config.first + part.end] for x in whole)
        joined = (
            torch.cat([x[:, :, : config.first], part_of_x], dim=2) for x, part_of_x in zip(whole, own, strict=True)
        )
        context = Context(ids, [LayerEntries(*joined)], False)
        parts.append((part, Studied(context, [asked], DIM**-0.5, Stages(), reader)))
    context = Context(ids, [whole], False)
    studied = StudiedParts(ids, config.first, config.last, parts, reader, Stages(), context)
    return {"queries": queries, "compaction": partial(studied.compacted, config)}


# ---- clustered attention, distillation, programs, whole engines -----------------------------------------------------


def clustered(length: int, prompt: int = 256, group: int = 2) -> Made:
    policy: Any = make_policy("clustered", page=16, window=128, sinks=4, open_pages=3)
    pages, query = policy.pages, torch.arange(length)
    closed = pages.closed(torch.full_like(query, prompt), query)
    luck = torch.rand(HEADS, length, int(closed.max()), generator=torch.Generator().manual_seed(0))
    best = luck.masked_fill(torch.arange(int(closed.max())) >= closed[:, None], -1).topk(pages.most)
    batch = {
        "evict_at": torch.full((1, 1, HEADS, length), NEVER, dtype=torch.int32),
        "closed_at": pages.closing(prompt, length)[None],
        "opened": best.indices.masked_fill(best.values < 0, -1).to(torch.int16)[None, None],
        "paged_with": pages.settings(),
    }
    given = [seeded(1, n, length, DIM, seed=n) for n in (HEADS * group, HEADS, HEADS)]
    ways: dict[str, Callable[..., Any]] = {
        "gathered": PagedView(batch, "cpu").attend,
        "mask": PagedView(batch, "cpu", "dense").attend,
        "full": lambda _, q, k, v, scaling: sdpa(q, k, v, scaling, causal=True),
    }

    def attend(way: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Any:
        return way(0, q, k, v, DIM**-0.5)

    return {name: partial(backward, partial(attend, way), *given) for name, way in ways.items()}


def distill(rows: int, tokens: int, vocabulary: int = 4096, top: int = 256) -> Made:
    """The student's forward pass costs 1, its backward pass 2, and a teacher of t times its parameters t more."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer.batch import Example
    from trainer.distill import DistillArguments, DistillTrainer
    from trainer.teacher import TeacherCache, TeacherFacts, weights_fingerprint, write_teacher_cache

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    student, teacher = (
        Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocabulary, **heads, hidden_size=n, intermediate_size=3 * n, num_hidden_layers=n // 32
            )
        )
        for n in (128, 256)
    )
    data = [Example(*(torch.randint(vocabulary, (n,)).tolist() for n in (32, tokens))) for _ in range(rows)]
    folder = tempfile.mkdtemp()
    facts = TeacherFacts("-", weights_fingerprint(teacher), vocabulary, 1.0, top, "float16")
    write_teacher_cache(folder, teacher, data, facts)
    engine = make_engine("hf", model=student, policy={"policy": "gkv", "budget": 64, "window": 16, "period": 32})
    rollouts = engine.simulate([r.prompt for r in data], [r.completion for r in data])
    examples = [Example.from_rollout(rollout) for rollout in rollouts]

    def step(source: Any, top_k: int | None) -> Callable[[], None]:
        options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False}
        args = DistillArguments(output_dir=folder, bf16=False, top_k=top_k, **options)
        trainer = DistillTrainer(student, args, data, teacher=source, engine=engine)
        return lambda: trainer.compute_loss(trainer.model, examples).backward()

    sources = {"teacher": (teacher, None), f"teacher, top {top}": (teacher, top), "cache": (TeacherCache(folder), top)}
    return {name: step(*source) for name, source in sources.items()}


def sandbox(workers: int) -> Made:
    sys.path.append(str(Path(__file__).parents[1] / "tests/rewards"))
    from hostile_programs import fenced, honest_cases

    from rewards.code import CodeReward

    def first(tests: Any) -> Any:
        """Return tests with only the first of them."""
        if isinstance(tests, dict):
            return {key: value[:1] if isinstance(value, list) else value for key, value in tests.items()}
        return tests[:1]

    right = [case for case in honest_cases(600) if case.reward == 1 and "sleep" not in case.program]
    reward, made = CodeReward(workers=workers), Made(programs=90)
    for kind, place in (("stdin", 0), ("functional", 1)):
        chosen = [case for case in right if int(case.program.rpartition("# ")[2]) % 3 == place][:90]
        texts, tests = [fenced(case.program) for case in chosen], [first(case.tests) for case in chosen]
        assert reward(texts, tests=tests) == [1.0] * len(texts)
        made[kind] = partial(reward, texts, tests=tests)
    plain = [sys.executable, "-I", "-c", "a, b = map(int, input().split())\nprint(a + b)"]
    made["one program by subprocess.run"] = partial(subprocess.run, plain, input="1 2\n", text=True, stdout=-1)
    return made


PURSUITS = [(512, 64, 256), (1024, 128, 512), (2048, 256, 512), (4096, 205, 1024)]
TILES = [(4096, 1024), (16384, 2048), (16384, 512), (32768, 2048), (65536, 2048)]
CASES = {
    "attention": Case(
        attention, ("scores", "S", "B"), [(kind, *size) for size in TILES for kind in ("uniform", "recency")]
    ),
    "training": Case(training, ("S", "B"), [(1056, 256), (2048, 256), (4096, 256), (4096, 1024)]),
    "topk": Case(topk, ("S", "heads"), list(product((4096, 16384, 65536), (8, 64)))),
    "sampler": Case(
        sampler,
        ("rows", "vocabulary", "top_k", "top_p"),
        [(*size, k, p) for size in ((64, 64), (8, 32_000), (64, 151_936)) for k, p in product((None, 20), (1.0, 0.95))],
    ),
    "top_p": Case(top_p, ("deviation of the logits",), [(2,), (3,), (5,)]),
    "matching": Case(matching, ("S", "budget", "period"), [(4096, 256, 256), (4096, 512, 512)]),
    "compaction": Case(compaction, ("budget", "period"), [(512, 128), (1024, 1024)]),
    "pursuits": Case(pursuits, ("entries", "chosen", "queries"), PURSUITS),
    "contexts": Case(
        contexts, ("select", "tokens"), [*product(("omp_fast", "omp", "attention"), (2**k for k in range(12, 17)))]
    ),
    "clustered": Case(clustered, ("tokens",), [(2048,), (4096,), (8192,)]),
    "distill": Case(distill, ("rows", "tokens"), [(8, 512)], time.perf_counter),
    "sandbox": Case(sandbox, ("workers",), [(8,), (2,), (1,)], time.perf_counter),
}

if __name__ == "__main__":
    measure_cases(CASES, __doc__)
