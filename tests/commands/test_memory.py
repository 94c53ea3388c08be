"""`sparse-rl doctor` predicts memory by formulae. The tests compare each formula ("counted bytes") with the bytes that
are really allocated (`Peak` measures them), and check the plan, the list of all parts of a recipe's memory.
"""

import re
import shutil

import pytest
import torch
from peaks import Peak, kept_for_backward
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from planned import GRPO, plan

from rollout import SamplingConfig, make_engine
from rollout.hf import HFEngine
from rollout.sampling import sample
from rollout.vllm.memory import beside_cache
from sparse_rl.attention.families import cache_shape
from sparse_rl.commands import memory
from sparse_rl.commands.doctor import fit
from sparse_rl.commands.memory import Item, Plan, verdict, verdicts
from sparse_rl.data.config import DataConfig, SyntheticConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.synthetic import TASKS, RunningSum
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.kernels.flex import make_tiles
from sparse_rl.kernels.future import future_bytes
from sparse_rl.kernels.masked import visible_mask
from sparse_rl.matching import match
from sparse_rl.methods.kvpop.dms import CHUNK, GatedView
from sparse_rl.methods.kvpop.scorers import make_scorer
from sparse_rl.models.directory import model_directory
from sparse_rl.models.weights import meta_model
from sparse_rl.policies import Entries, make_policy
from sparse_rl.policies.cache import GROW, cache_bytes, query_bytes, state_bytes
from sparse_rl.policies.rules import redundancy
from sparse_rl.recipe import load_recipe, make_recipe
from sparse_rl.recipe.sampling import prompt_tokens, tool_use
from sparse_rl.trace import EvictionTrace
from sparse_rl.trace.record import trace_bytes
from trainer.config import LaunchConfig, LoraConfig
from trainer.losses import DistillationLoss, TopK
from trainer.memory import activation_bytes, count_parameters, lora_parameters, training_state


def tiny_config(**overrides):
    """Return the configuration of the quickstart's model with changed sizes."""
    config = RunningSum.untrained(0).config
    keys = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    return type(config)(**{**keys, **overrides})


def test_traces_and_masks_have_the_sizes_that_the_docs_state():
    assert trace_bytes(28, 2, 4096, 16) == pytest.approx(14.7e6, rel=0.01)
    masks = torch.empty(16, 28, 2, 4096, 4096, dtype=torch.bool, device="meta")
    assert masks.nbytes == pytest.approx(15.0e9, rel=0.01)


def test_counted_bytes_of_traces_and_masks_are_exact():
    traces = [EvictionTrace.dense(3, 2, 50) for _ in range(4)]
    assert trace_bytes(3, 2, 50, 4) == sum(t.evict_at.nbytes for t in traces)
    assert visible_mask(torch.stack([t.evict_at[0] for t in traces])).nbytes == 4 * 2 * 50 * 50


def test_redundancy_of_a_long_prompt_is_computed_in_tiles():
    """The whole similarity matrix of 8k entries would take 268 MB for one kv head."""
    keys = torch.randn(1, 1, 8192, 16, generator=torch.Generator().manual_seed(0))
    positions, lengths = torch.arange(8192).expand(1, 1, 8192), torch.tensor([8192])
    with Peak() as peak:
        redundancy(Entries(keys, keys, positions, lengths, lengths, None, 1.0, {}))
    assert 0 < peak.bytes < 20e6 < 4 * 8192**2 / 10


@pytest.mark.parametrize(
    ("top_p", "top_k", "per_logit"), [(1.0, None, 12), (1.0, 20, 16), (0.9, 20, 16), (0.9, None, 25)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_measured_bytes_of_sampling_are_at_most_the_counted_bytes(device, record, temperature, top_p, top_k, per_logit):
    """Of the counted 30 bytes a logit, 28 are those of a GPU's sort for top-p: beside the log-prob and what it returns
    (4 + 12 bytes), it works in a copy of 12 bytes, inside the operator. 2 bytes are the bits of 16 steps' supports. The
    device meta takes the operators of a GPU."""
    logits, uniform = torch.randn(6, 5000, device=device), torch.rand(6, dtype=torch.float64, device=device)
    sampling = SamplingConfig(1, temperature, top_p=top_p, top_k=top_k, record_support=record)
    per_logit = max(per_logit, 22 * sampling.records_support)
    with Peak() as peak:
        sample(logits, sampling, uniform)
    counted = beside_cache(make_policy("full"), tiny_config(vocab_size=5000), itemsize=2, max_batch=6).sampler
    assert peak.bytes == pytest.approx(per_logit * 6 * 5000, rel=0.01)
    assert peak.bytes < 28 * 6 * 5000 < counted == 30 * 6 * 5000


def update_of(model, tokens, autocast, checkpointing):
    """Return the bytes of activations that a forward and a backward pass of the model's layers hold at their peaks."""
    ids = torch.randint(3, 64, (-(-tokens // 160), min(tokens, 160)))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    model.train()

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return model.model(input_ids=ids, use_cache=False).last_hidden_state

    forward().sum().backward()  # the gradients exist from now on
    with Peak() as ahead:
        out = forward()
    with Peak() as back:
        out.sum().backward()
    return ahead.bytes, kept_for_backward(model, forward), back.bytes


@pytest.mark.parametrize("autocast", [False, True])
def test_measured_activations_agree_with_the_counted_ones(new_model, autocast):
    """Weights in float32 under autocast keep the input of each layer in float32. Control: 2 bytes are too few."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "num_attention_heads": 4}
    model = new_model("qwen2", num_hidden_layers=6, **sizes)
    model = model if autocast else model.bfloat16()
    shape, tokens, stream = meta_model(model.config), 4 * 160, 4 if autocast else 2
    kept, again = activation_bytes(shape, tokens, 2, stream, checkpointing=True)
    _, held, back = update_of(model, tokens, autocast, True)
    assert kept == pytest.approx(held, rel=0.13)
    assert again == pytest.approx(back, rel=0.05)
    halved, _ = activation_bytes(shape, tokens, 2, 2, checkpointing=True)
    assert (halved < 0.85 * held) == autocast
    unchecked, _ = activation_bytes(shape, tokens, 2, stream, checkpointing=False)
    assert unchecked == pytest.approx(update_of(model, tokens, autocast, False)[1], rel=0.15)


def loss_of(recipe, config):
    return next(item.device for item in plan(recipe, config).items if item.name == "head and loss")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("divergence", "top_k"), [("forward", None), ("reverse", 64), ("jsd", None), ("jsd", 64)])
@pytest.mark.few(3)
def test_measured_bytes_of_a_distillation_loss_agree_with_the_counted_ones(divergence, top_k, autocast):
    """Once with a wide vocabulary, where a chunk's logits count, and once with a wide head, where its gradient does."""
    base = {key: value for key, value in GRPO.items() if key != "rewards"} | {"divergence": divergence, "top_k": top_k}
    recipe = make_recipe({**base, "kind": "distill", "data": {"path": "x.jsonl"}, "chunk": 16})
    loss, dtype = DistillationLoss(recipe.loss), torch.float32 if autocast else torch.bfloat16
    for vocabulary, hidden in ((20_000, 8), (2000, 512)):
        head, teacher = (torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype) for _ in range(2))
        states, targets = torch.randn(32, hidden, dtype=dtype, requires_grad=True), torch.zeros(32, dtype=torch.long)
        given = teacher(states).detach()
        reference = TopK.of_logits(given, top_k, 1.0) if top_k else given
        for _ in range(2):  # the second time, the gradients exist
            with Peak() as peak:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    total = loss(states, head, reference.__getitem__, targets)[0]
                total.backward()
        counted = loss_of(recipe, tiny_config(vocab_size=vocabulary, hidden_size=hidden))
        counted -= 8 * hidden * (8 * (512 + 100) - 32)  # for 32 tokens instead of 8 rows
        assert (0.7 if top_k else 0.85) * counted < peak.bytes < 1.1 * counted


def test_copies_of_weights_under_autocast_last_until_the_forward_pass_ends(new_model):
    """Few tokens: nearly all bytes of the forward pass are those copies; the backward pass copies a layer at a time."""
    model = new_model("qwen2", num_hidden_layers=8, hidden_size=64, intermediate_size=512)
    copies = 2 * sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
    ahead, _, back = update_of(model, 4, True, True)
    assert copies < ahead < 1.1 * copies
    assert back < 0.8 * copies


def test_rows_fitted_one_after_the_other_equal_rows_fitted_together(new_model, monkeypatch):
    policy = make_policy("am", budget=16, window=4, period=8)
    engine, prompts = HFEngine(new_model("qwen2"), policy), [[i + 1] * 5 for i in range(4)]
    whole = engine.generate(prompts, SamplingConfig(40, seed=1, ignore_eos=True))
    monkeypatch.setattr("sparse_rl.methods.am.policy.FITTED_AT_ONCE", 1)
    calls = []
    monkeypatch.setattr(
        "sparse_rl.methods.am.policy.match", lambda block, *rest: calls.append(1) or match(block, *rest)
    )
    alone = engine.generate(prompts, SamplingConfig(40, seed=1, ignore_eos=True))
    assert len(calls) == 4 * 2 * 3  # sequences, layers, compactions
    for together, separately in zip(whole, alone, strict=True):
        assert together.completion_ids == separately.completion_ids
        assert together.logprobs == separately.logprobs
        assert bool((together.trace.evict_at == separately.trace.evict_at).all())


PAGES = {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2}


@pytest.mark.parametrize("changed", [{}, {"open_pages": 5}, {"compressor": "attention"}])
def test_counted_bytes_of_traces_include_the_recorded_pages(new_model, changed):
    """Under clustered attention the trace records the opened pages; `trace_bytes` counts all sections that grow."""
    policy = make_policy({**PAGES, **changed})
    rollouts = HFEngine(new_model("qwen2"), policy).generate([[1, 2, 3]] * 2, SamplingConfig(40, ignore_eos=True))
    recorded = [
        values.nbytes
        for r in rollouts
        for name, values in r.trace.sections.items()
        if name not in ("paged_with", "closed_at")
    ]
    layers, kv_heads, length = rollouts[0].trace.shape
    assert sum(recorded) == trace_bytes(layers, kv_heads, length, 2, policy.config.recorded)


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(600, 4, 2), (1200, 4, 2), (600, 8, 2), (600, 2, 2)])
def test_soft_gates_take_the_memory_of_a_chunk_of_queries(length, heads, kv_heads, monkeypatch):
    """Control: all queries in one chunk, with S x S biases for S positions, take far more."""
    policy = make_policy("dms", window=64, scorer={"name": "linear"}).config
    scores = torch.randn(1, kv_heads, length, requires_grad=True)
    q, k, v = (torch.randn(1, n, length, 16, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    measured = []
    for chunk in (CHUNK, length):
        monkeypatch.setattr("sparse_rl.methods.kvpop.dms.CHUNK", chunk)
        view = GatedView([lambda *_: (scores, torch.zeros(kv_heads))], policy, torch.tensor([length]), temperature=0.5)
        with Peak() as peak:
            view.attend(0, q, k, v, 0.25).sum().backward()
        measured.append(peak.bytes)
    assert measured[1] > length / CHUNK / 1.5 * measured[0]


def test_a_plan_counts_the_target_of_learning_scorers():
    retrofit = {key: GRPO[key] for key in ("model", "output_dir", "dtype", "data")}
    retrofit |= {"kind": "kvpop", "max_length": 118, "per_device_train_batch_size": 8}
    sizes = {"window": 8, "scorer": "linear"}
    kvpop, dms = {"policy": "kvpop", "budget": 32, **sizes}, {"policy": "dms", **sizes}
    config = tiny_config()
    heads, (*_, dim) = config.num_attention_heads, cache_shape(config)
    for recipe, learns in (
        (retrofit | {"cache": kvpop}, True),
        (GRPO | {"cache": kvpop, "scorers": {"weight": 1.0}}, True),
        (retrofit | {"cache": dms}, False),
        (GRPO | {"cache": kvpop}, False),
    ):
        for cuda in (False, True):
            items = {item.name: item for item in plan(make_recipe(recipe), config, cuda=cuda).items}
            assert ("future attention" in items) == learns
            if learns:
                assert items["future attention"].device == future_bytes(8, heads, dim, 118, 4, cuda)
                assert items["future attention"].when == "update"


def test_a_plan_counts_the_scorers_of_a_retrofit():
    recipe = {key: GRPO[key] for key in ("model", "output_dir", "dtype", "data")} | {"kind": "kvpop", "max_length": 600}
    recipe |= {"cache": {"policy": "kvpop", "window": 64, "budget": 128, "scorer": "linear"}}
    config = tiny_config()
    layers, heads, dim = cache_shape(config)
    scorers = layers * count_parameters(make_scorer("linear", heads=heads, dim=dim))
    parameters = count_parameters(meta_model(config))
    optimizer = {}
    for train_base in (False, True):
        memory_plan = plan(make_recipe(recipe | {"train_base": train_base}), config, cuda=False)
        assert memory_plan.parameters == parameters + scorers
        optimizer[train_base] = next(item.device for item in memory_plan.items if item.name == "optimizer")
    assert optimizer == {False: 8 * scorers, True: 8 * (parameters + scorers)}


def test_a_plan_counts_the_cache_of_each_group_of_layers():
    parts = [{"layers": 1, "cache": {"policy": "lined", "window": 8}}, {"layers": 1, "cache": PAGES}]
    items_of = {}
    for name, cache in (("layered", {"policy": "layered", "parts": parts}), ("clustered", PAGES), ("full", "full")):
        items_of[name] = plan(make_recipe({**GRPO, "cache": cache}), tiny_config(num_hidden_layers=2)).items
    lined, paged = (item for item in items_of["layered"] if item.name.startswith("KV cache"))
    (alone,) = (item for item in items_of["clustered"] if item.name.startswith("KV cache"))
    assert 2 * paged.device == alone.device > 4 * lined.device
    assert "lined in 1 layers" in lined.note
    assert "clustered in 1 layers" in paged.note
    traces = {name: sum(item.host for item in items if item.name == "traces") for name, items in items_of.items()}
    assert traces["layered"] == traces["clustered"] > 0


def test_a_plan_counts_conversations_that_are_kept_between_turns():
    """On the device for hf, in host memory for vllm, and nowhere if turns are prefilled or there are no tools."""
    sparse = {"policy": "gkv", "budget": 20, "window": 4, "period": 8}

    def items(engine: str, **cache: str) -> dict[str, Item]:
        tools = {"environment": "sparse_rl.data.synthetic:LookUpTable"} if cache else {}
        recipe = {**GRPO, "cache": sparse | cache, "rollout": {"engine": engine, "max_batch": 2}, **tools}
        recipe |= {"data": {"path": "rows.jsonl", "max_prompt_tokens": 50}}
        return {item.name: item for item in plan(make_recipe(recipe), tiny_config()).items}

    kept, prefilled, without = (items("hf", **cache) for cache in ({"turns": "kept"}, {"turns": "prefilled"}, {}))
    count, held = 8, 28  # a batch, and budget and period
    config = tiny_config()
    unit_bytes = cache_bytes(held, *cache_shape(config), 4)
    assert unit_bytes < kept["kept conversations"].device / (2 * count) < 1.5 * unit_bytes
    assert "kept conversations" not in prefilled | without
    assert "128 entries" in kept["KV cache of 2"].note  # 28, and an answer of 100 tokens
    assert "149 entries" in prefilled["KV cache of 2"].note and "50 entries" in without["KV cache of 2"].note
    kept, prefilled, without = (items("vllm", **cache) for cache in ({"turns": "kept"}, {"turns": "prefilled"}, {}))
    assert kept["vllm: kept conversations"].host > 2 * count * unit_bytes
    assert "vllm: kept conversations" not in prefilled | without
    sparse = {"policy": "lined", "window": 4, "compression": 2}  # without a peak: the longest conversation
    unit_bytes = cache_bytes(149, *cache_shape(config), 4)
    assert unit_bytes <= items("hf", turns="kept")["kept conversations"].device / (2 * count) < 1.5 * unit_bytes
    pools = [plan["vllm: KV pool"].device for plan in (without, kept, prefilled)]
    assert pools == sorted(set(pools))


def test_a_plan_counts_the_schemas_of_tools(tmp_path):
    """As many tokens as the prompts of the first turns have more than the same messages alone. Control: a plan without
    the tokenizer, which `doctor` loads."""
    folder = shutil.copytree(model_directory("turns/model"), tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text("{%- if tools -%}<u>{{ tools | tojson }}<eos>{%- endif -%}" + template.read_text())
    words = [f"model={folder}", "cache.turns=prefilled", "data.synthetic.size=64"]
    recipe = load_recipe("turns/grpo", words)
    run = recipe.prepare_training()
    talks, prompts = tool_use(run, run.recipe.data, run.rows), prompt_tokens(run.rows, run.tokenizer, run.recipe.data)
    more = {len(long) - len(short) for long, short in zip(talks.prompts(), prompts, strict=True)}
    notes = [item.note for item in plan(recipe, run.config).items], fit(recipe, run.config)[0].columns[-1].cells
    without, counted = (int(re.search(r"(\d+) entries", " ".join(some))[1]) for some in notes)
    assert {counted - without} == more != {0}


def test_counted_bytes_of_the_last_queries_equal_the_allocated_bytes(new_model):
    model = new_model("qwen2")
    policy = make_policy("am", budget=16, window=4, period=8)
    cache = HFEngine(model, policy).prefill([[1, 2, 3], [4]]).cache
    held = sum(layer.queries.nbytes for layer in cache.of_policy.layers.values())
    layers, _, dim = cache_shape(model.config)
    assert held == 2 * query_bytes(policy, layers, model.config.num_attention_heads, dim, 4) > 0


def test_a_plan_widens_heads_for_biases(monkeypatch):
    """vLLM's own kernels have no biases, so each head gets more numbers that hold them: 136 or 160 instead of 128."""
    monkeypatch.setattr("rollout.engine.choose_engine", lambda *_: ("vllm", ""))
    am = {"policy": "am", "budget": 32, "period": 32}
    config = tiny_config(num_attention_heads=4, head_dim=128)
    notes = {}
    for dtype, cuda, exact in (
        ("float32", False, True),
        ("float32", False, False),
        ("float32", True, True),
        ("bfloat16", False, True),
    ):
        recipe = make_recipe({**GRPO, "cache": am, "dtype": dtype, "rollout": {"engine": "vllm", "exact": exact}})
        items = plan(recipe, config, cuda=cuda).items
        (notes[dtype, cuda, exact],) = [item.note for item in items if item.name.startswith("KV cache")]
    assert "heads of" not in notes["float32", False, True]  # attention is computed in float64
    assert "heads of 160" in notes["float32", False, False]
    assert "heads of 136" in notes["float32", True, True]
    assert "heads of 160" in notes["bfloat16", False, True]


def test_a_plan_counts_all_memory_of_vllm(monkeypatch):
    monkeypatch.setattr("rollout.engine.choose_engine", lambda *_: ("vllm", ""))
    gkv = {"policy": "gkv", "budget": 4096, "window": 16, "period": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
    config = tiny_config(vocab_size=150_000, num_hidden_layers=8, max_position_embeddings=8192, **heads)
    for cache, size in (({"policy": "full"}, 64), (gkv, 64), (gkv, 256)):
        rollout = {"engine": "vllm", "gpu_memory_utilization": 0.3, "max_batch": size, "max_model_len": 8192}
        items = plan(make_recipe({**GRPO, "cache": cache, "rollout": rollout}), config, cuda=True).items
        held = {item.name: item.device for item in items if item.name.startswith("vllm")}
        assert list(held) == ["vllm: weights", "vllm: KV pool", "vllm: beside the pool", "vllm: sampler"]
        assert 0.23 * 80e9 < sum(held.values()) <= 0.3 * 80e9
        assert held["vllm: sampler"] == 30 * size * 150_000
        rows = size + -(-size // 8) + 1  # of the sequences, of held prompts and of padding
        queries = 8 * rows * 16 * 16 * 128 * 4 if cache is gkv else 0  # layers, rows, window, heads, dim, float32
        per_entry = held["vllm: KV pool"] / (2 * 128 * 4) * 8 if cache is gkv else 0  # a position and a score
        assert held["vllm: beside the pool"] == pytest.approx(queries + per_entry)


@pytest.mark.parametrize(("cuda", "block", "rest"), [(True, 16, 24e9), (False, 32, 2**30)])
def test_a_pool_is_no_larger_than_all_sequences_can_fill(monkeypatch, cuda, block, rest):
    monkeypatch.setattr("rollout.engine.choose_engine", lambda *_: ("vllm", ""))
    """Their prompts and peaks, and a prompt that is held for its samples."""
    cache = {"policy": "streaming", "budget": 100, "period": 10}  # 110 tokens: 7 blocks of 16, or 4 of 32
    for most in (2, 1_000_000):
        rollout = {"engine": "vllm", "max_batch": most, "max_model_len": 8192}
        recipe = {**GRPO, "data": {**GRPO["data"], "max_prompt_tokens": 50}, "cache": cache, "rollout": rollout}
        items = plan(make_recipe(recipe), tiny_config(max_position_embeddings=8192), cuda=cuda).items
        pool = next(item for item in items if item.name == "vllm: KV pool")
        needed = cache_bytes(((most + 1) * -(-110 // block) + 1) * block, *cache_shape(tiny_config()), 4)
        assert pool.device == needed if most == 2 else 0.5 * rest < pool.device <= rest < needed
        assert ("that 2 sequences and a shared prompt can fill" in pool.note) == (most == 2)


def test_what_a_sleep_keeps_is_in_host_memory(monkeypatch):
    """GRPO keeps no weights, since it loads new ones into vLLM afterwards. The buffers beside the pool are kept."""
    monkeypatch.setattr("rollout.engine.choose_engine", lambda *_: ("vllm", ""))
    config, distilled = tiny_config(), {key: value for key, value in GRPO.items() if key != "rewards"}
    distilled |= {"kind": "distill", "data": {"path": "said.jsonl"}}
    for recipe, sleep, kept in ((GRPO, True, False), (distilled, True, True), (distilled, False, False)):
        items = plan(make_recipe({**recipe, "rollout": {"engine": "vllm", "sleep": sleep}}), config, cuda=False).items
        weights, beside = (item for item in items if item.name in ("vllm: weights", "vllm: beside the pool"))
        assert weights.host == kept * weights.device
        assert weights.device == 4 * count_parameters(meta_model(config))
        assert beside.host == sleep * beside.device
        assert beside.when == ("sampling" if sleep else "always")


@pytest.mark.parametrize("name", ["full", "streaming", "tova", "gkv"])
@pytest.mark.parametrize(("prompt", "total"), [(5, 30), (24, 60), (40, 90), (200, 260), (6, 7)])
def test_most_held_is_the_maximum_over_all_steps(policy_of, name, prompt, total):
    policy = policy_of(name, budget=24, window=4, period=8, sinks=1)
    grows = policy_of(name, budget={"tokens": [20, 90], "entries": [14, 44]}, window=4, period=8, sinks=1).schedule
    most = max((grows.attended(prompt, n) for n in range(prompt + 1, total)), default=0)
    assert grows.most_held(prompt, total - 1) == max(prompt, most)
    held = [prompt] + [policy.schedule.held(prompt, n - 1) + 1 for n in range(prompt + 1, total)]
    assert policy.schedule.most_held(prompt, total - 1) == max(held)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("name", ["full", "streaming", "gkv"])
@pytest.mark.few(4)
def test_cache_bytes_equal_the_allocated_bytes(new_model, policy_of, family, name):
    model, policy = new_model(family), policy_of(name, budget=40, window=8, period=8)
    engine = make_engine("hf", model=model, policy=policy)
    engine.generate([[5, 6, 7, 8]] * 4, SamplingConfig(120, seed=0, ignore_eos=True))
    shape = cache_shape(model.config)
    entries = policy.schedule.most_held(4, 123)
    expected = 4 * cache_bytes(entries, *shape, 4)
    if name == "full":
        assert expected <= engine.peak_cache_bytes <= 4 * cache_bytes(entries + GROW, *shape, 4)
    else:
        assert engine.peak_cache_bytes == expected
        assert engine.peak_cache_bytes != 4 * cache_bytes(entries + 1, *shape, 4)  # control: one entry more


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(("weights", "compute"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_under_autocast_the_cache_has_the_dtype_of_autocast(new_model, policy_of, family, weights, compute):
    model, policy = new_model(family).to(weights), policy_of("streaming", budget=40, period=8)
    engine = make_engine("hf", model=model, policy=policy)
    with torch.autocast("cpu", dtype=compute):
        engine.generate([[5, 6, 7, 8]] * 4, SamplingConfig(80, seed=0, ignore_eos=True))
    assert engine.peak_cache_bytes == 4 * cache_bytes(48, *cache_shape(model.config), compute.itemsize)


def test_state_is_counted_per_entry():
    assert state_bytes(make_policy("full"), 10, 2, 3, 8) == 2 * 3 * 10 * 8
    h2o = make_policy("h2o", budget=8)
    assert state_bytes(h2o, 10, 2, 3, 8) == 2 * 3 * 10 * (8 + 4 * len(h2o.entry_memory)) > 2 * 3 * 10 * 8


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_without_allocating_them(new_model, family, tied):
    model = new_model(family, tie_word_embeddings=tied)
    counted = meta_model(model.config)
    assert count_parameters(counted) == sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in counted.parameters())


@pytest.mark.parametrize("targets", ["all-linear", ".*(q|k)_proj", ["q_proj", "down_proj"]])
def test_adapter_parameters_equal_those_of_peft(new_model, targets):
    model = new_model("qwen2")
    counted = lora_parameters(meta_model(model.config), LoraConfig(r=4, target_modules=targets))
    adapted = get_peft_model(model, PeftLora(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    assert counted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_training_state_equals_the_bytes_that_adamw_holds(new_model):
    model = new_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    optimizer.step()
    count = count_parameters(model)
    state = training_state(count, count, itemsize=4, adapters=False, launch=LaunchConfig())
    moments = sum(s[k].nbytes for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))
    assert state["weights"] == (sum(p.nbytes for p in model.parameters()), 0)
    assert state["gradients"] == (sum(p.grad.nbytes for p in model.parameters()), 0)
    assert state["optimizer"] == (moments, 0)


def test_zero_partitions_more_with_each_stage():
    """16 bytes per parameter, as in the ZeRO paper's table for 8 processes; float32 gradients add 2 bytes."""
    total = {}
    for stage in (1, 2, 3):
        for dtype, more in (("weights", 0), ("float32", 2)):
            launch = LaunchConfig(processes=8, zero_stage=stage, gradient_dtype=dtype)
            state = training_state(8000, 8000, itemsize=2, adapters=False, launch=launch)
            total[stage, more] = sum(device for device, _ in state.values())
    for more in (0, 2):
        assert total[1, more] == 8000 * (2 + 2 + more + 12 / 8)
        assert total[2, more] == 8000 * (2 + (14 + more) / 8)
        assert total[3, more] == 8000 * (16 + more) / 8
    for stage in (1, 2, 3):
        launch = LaunchConfig(processes=8, zero_stage=stage, offload=True)
        state = training_state(8000, 8000, itemsize=2, adapters=False, launch=launch)
        assert state["optimizer"] == (0, 12000)
        assert (state["weights"][0] == 0) == (stage == 3)
        assert (state["gradients"][0] == 0) == (stage == 3)


def test_the_total_of_a_plan_is_the_training_state_plus_the_larger_stage():
    recipe = make_recipe(GRPO)
    memory_plan = plan(recipe, tiny_config(), cuda=False)
    items = {item.name: item for item in memory_plan.items}
    assert memory_plan.parameters == 102_848
    shape = cache_shape(tiny_config())
    entry = cache_bytes(1, *shape, 4) + state_bytes(make_policy(recipe.cache), 1, *shape)
    assert items["KV cache of 8"].device == 8 * 40 * entry
    assert items["traces"].host == trace_bytes(*shape[:2], 118, 8)
    always = items["weights"].device + items["gradients"].device + items["optimizer"].device
    assert always == 16 * memory_plan.parameters
    parts = [items[name].device for name in ("head and loss", "a layer's activations")]
    assert memory_plan.device == always + max(items["activations"].device + max(parts), items["KV cache of 8"].device)
    assert memory_plan.host == items["traces"].host
    for cut, size in (({"top_p": 0.9}, 64), ({"top_k": 1}, 8), ({"top_k": 1000}, 4 + 4 * 2)):  # W is 2
        recorded = plan(make_recipe({**GRPO, **cut}), tiny_config(), cuda=False)
        assert recorded.host == memory_plan.host + 8 * 118 * size


@pytest.mark.parametrize(
    ("change", "present", "absent"),
    [
        ({"train_attention": "full"}, "activations", "traces"),
        ({"cache": "full"}, "activations", "traces"),
        ({"beta": 0.1}, "reference model", "gathered weights"),
        ({"launch": {"zero_stage": 3}}, "gathered weights", "weights under autocast"),
        ({"dtype": "bfloat16"}, "weights under autocast", "gathered weights"),
        ({"dtype": "bfloat16", "lora": {"r": 4}}, "activations", "weights under autocast"),
    ],
)
def test_a_plan_has_the_parts_that_the_recipe_needs(change, present, absent):
    names = [item.name for item in plan(make_recipe({**GRPO, **change}), tiny_config()).items]
    assert present in names
    assert absent not in names


def test_checkpointing_and_eviction_save_memory():
    config = tiny_config(num_hidden_layers=8)

    def peak(**change):
        return plan(make_recipe({**GRPO, **change}), config).device

    assert peak(gradient_checkpointing=True) < peak(gradient_checkpointing=False)
    items = {i.name: i for i in plan(make_recipe({**GRPO, "cache": "full"}), config).items}
    assert (
        items["KV cache of 8"].device
        > {i.name: i for i in plan(make_recipe(GRPO), config).items}["KV cache of 8"].device
    )


def test_an_evaluation_counts_the_largest_cache_of_its_sweep():
    task = {"kind": "eval", "model": "m", "output_dir": "o", "tasks": {"t": GRPO["data"]}, "samples": 4}
    task["rollout"] = {"engine": "hf"}
    sweep = {"sweep": {"policy": ["full", "streaming"], "cache": {"budget": [16, 32]}}, "max_completion_length": 100}
    memory_plan = plan(make_recipe({**task, **sweep}), tiny_config())
    (cache,) = (item for item in memory_plan.items if item.name.startswith("KV"))
    assert cache.note.startswith("full: ")
    assert memory_plan.device == 2 * memory_plan.parameters + cache.device


def test_training_without_a_teacher_counts_a_tile_of_logits_or_the_heads_gradient():
    """TRL's head holds 4,096 x 32,768 logits at most, in training of both kinds."""
    sft = {"kind": "sft", "model": "m", "output_dir": "o", "data": GRPO["data"], "max_length": 118, "dtype": "float32"}
    tokens, hidden = 8 * 118, tiny_config().hidden_size
    for recipe in (make_recipe(sft), make_recipe(GRPO)):
        small, large, huge = (loss_of(recipe, tiny_config(vocab_size=size)) for size in (1000, 30_000, 130_000))
        assert (small, large) == (tokens * (1000 * 4 + 8 * hidden), tokens * (30_000 * 4 + 8 * hidden))
        assert huge == tokens * (32_768 * 4 + 8 * hidden)
    wide = tiny_config(vocab_size=1000, hidden_size=1024)
    assert loss_of(recipe, wide) == 1024 * (8 * tokens + 6 * 1000)
    assert loss_of(make_recipe({**GRPO, "lora": {"r": 4}}), wide) == tokens * (1000 * 4 + 8 * 1024)  # a frozen head


def test_a_plan_counts_the_buffers_of_deepspeed():
    """Buckets of at most 5e8 gradients, held twice; under stage 3 gathered weights, at most 1e9 and the embedding."""
    large = tiny_config(hidden_size=4096, intermediate_size=16_384, num_hidden_layers=12)
    for config, parameters, gathered in ((tiny_config(), 102_848, 102_848), (large, 500_000_000, 1_000_262_144)):
        for stage, dtype, size in ((1, "float32", 4), (2, "float32", 4), (2, "weights", 2), (3, "float32", 4)):
            launch = {"processes": 8, "zero_stage": stage, "gradient_dtype": dtype}
            items = {
                i.name: i for i in plan(make_recipe({**GRPO, "dtype": "bfloat16", "launch": launch}), config).items
            }
            assert items["DeepSpeed: bucket"].device == 2 * size * parameters
            assert ("DeepSpeed: gathered" in items) == (stage == 3)
            assert stage < 3 or items["DeepSpeed: gathered"].device == 2 * gathered


def test_the_larger_part_of_an_update_counts_and_a_gpu_holds_more_than_pytorch_knows(monkeypatch):
    made = Plan(0, [Item("a", 100), Item("b", 10, when="sampling"), Item("c", 20, when="update")])
    for part, size in (("forward", 1), ("loss", 3), ("backward", 2)):
        made.items.append(Item("d", size, when=part))
    assert made.device == 123
    made.items.append(Item("e", 14, when="sampling"))
    assert made.device == 124
    on_gpu, on_cpu = (
        {item.name: item for item in plan(make_recipe(GRPO), tiny_config(), cuda=cuda).items} for cuda in (True, False)
    )
    assert on_gpu.keys() - on_cpu.keys() == {"outside PyTorch", "tiles", "gradients of keys"}
    assert on_gpu["outside PyTorch"].device == memory.OUTSIDE
    layers, kv_heads, _ = cache_shape(tiny_config())
    rows = layers * 8 * kv_heads
    assert on_gpu["tiles"].device == make_tiles(torch.zeros(rows, 118, dtype=torch.int32), 128, 128).nbytes
    monkeypatch.setattr(memory, "KEPT", 1)  # one layer at a time, but autograd keeps all if nothing is recomputed
    for checkpointing, held in ((True, 1), (False, layers)):
        recipe = make_recipe({**GRPO, "gradient_checkpointing": checkpointing})
        (tiles,) = (item.device for item in plan(recipe, tiny_config(), cuda=True).items if item.name == "tiles")
        assert tiles * layers == on_gpu["tiles"].device * held


def test_verdict_says_if_the_plan_fits_the_free_memory():
    assert "fits" in verdict(50, 100, "x")
    assert "tight" in verdict(95, 100, "x")
    assert "does not" in verdict(101, 100, "x")
    memory_plan = plan(make_recipe(GRPO), tiny_config())
    launch = LaunchConfig(processes=4, machines=2, main_process_ip="head")
    assert len(verdicts(memory_plan, launch, 10**12, 10**12)) == 2
    assert len(verdicts(memory_plan, launch, 10**12, None)) == 1  # another machine, whose host memory is unknown
    one_verdict = verdicts(memory_plan, launch, None, 2 * (memory_plan.device + memory_plan.host))
    assert len(one_verdict) == 1
    assert "2 processes" in one_verdict[0]
    assert "tight" in one_verdict[0]


def test_a_distillation_counts_its_teacher_and_its_simulating_model(tmp_path):
    """A second copy of the student simulates the evictions, unless it is the same model as the teacher."""
    config, larger = tiny_config(), tiny_config(num_hidden_layers=6)
    larger.save_pretrained(tmp_path)
    parameters, teacher_parameters = (count_parameters(meta_model(c)) for c in (config, larger))
    base = {key: value for key, value in GRPO.items() if key != "rewards"}
    base |= {"kind": "distill", "data": {"path": "said.jsonl"}}

    def held(**keys):
        items = plan(make_recipe({**base, **keys}), config, cuda=False).items
        return {item.name: item.device for item in items if item.name in ("teacher", "simulating model")}

    both = {"teacher": teacher_parameters * 4, "simulating model": parameters * 4}
    assert held(teacher=str(tmp_path)) == both
    assert teacher_parameters > 2 * parameters
    assert held() == {"teacher": parameters * 4}  # the starting model teaches and simulates
    assert held(refresh_every=50) == {"teacher": parameters * 4, "simulating model": parameters * 4}
    assert held(completions="student") == {"teacher": parameters * 4}
    assert held(teacher_cache="t", top_k=8) == {"simulating model": parameters * 4}
    shards = {"processes": 2, "zero_stage": 3}
    assert held(launch=shards) == {"teacher": parameters * 2, "simulating model": parameters * 4}


@pytest.mark.parametrize(("task", "keys"), [("running_sum", {"n": 5}), ("retrieval", {"facts": 9, "restated": 2})])
def test_prompts_of_a_synthetic_task_have_the_planned_length(task, keys):
    data = DataConfig(synthetic=SyntheticConfig(task=task, size=4, **keys))
    tokenizer = TASKS[task].tokenizer()
    lengths = {len(prompt_ids(row["prompt"], tokenizer)) for row in load_data(data, tokenizer)}
    assert lengths == {memory.prompt_tokens(data)}
