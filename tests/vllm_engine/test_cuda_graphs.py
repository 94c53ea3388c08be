"""A decode step as one CUDA graph, tested without a GPU: its operators are recorded from a dummy batch, as on a GPU,
and then rerun on their tensors. Numbers keep their recorded values and every tensor is read from its recorded address,
so the inputs of a step must be written where the previous step's were. torch takes the place of the attention
kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from judging import same, trainer_gap
from learned import learned_policy, save_learned, with_scorers
from test_cuda_backend import attend, use_backend, write  # noqa: F401
from ties import agrees_with_hf
from tiny import HEADS_OF_32, directory_of, new_model, policy_of, random_prompts
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rollout import SamplingConfig, make_engine
from rollout.context import PromptCacheConfig
from rollout.vllm.compat import paged
from rollout.vllm.state import Fixed
from sparse_rl.models.load import load_model

# the last length runs alone: its last chunk has one token, so that the batch looks like a decode step
LENGTHS = (5, 33, 64, 79, 80, 81, 100, 130, 193)
SIZES = (1, 4, 8)  # sizes of the batches that have a graph
GREEDY = SamplingConfig(60, temperature=0, ignore_eos=True)
# operators in which the host waits
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty"}


class Graph(TorchDispatchMode):
    """Records the calls made within its block; `replay` runs these calls again."""

    recording: Graph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.addresses: list[list[int]] = []  # of the tensors of each step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vllm":  # Python functions whose operators are recorded
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        indices = args[1] if name.startswith(("index", "_index")) and isinstance(args[1], (list, tuple)) else ()
        masked = any(index is not None and index.dtype == torch.bool for index in indices)
        assert name not in WAITS, f"{name} waits for the device"
        assert not masked, f"{name} waits for the device"
        out = func(*args, **(kwargs or {}))
        outputs = [] if func._schema.is_mutable or name in EMPTY else _listed(out)
        self.add(func, args, kwargs or {}, outputs)
        return out

    def add(self, *step: Any) -> None:
        self.steps.append(step)
        self.addresses.append(addresses(step[1:3]))

    def replay(self) -> None:
        for (run, args, kwargs, outputs), recorded in zip(self.steps, self.addresses, strict=True):
            assert addresses((args, kwargs)) == recorded, "a tensor has moved"
            out = run(*args, **kwargs)
            for old, new in zip(outputs, _listed(out), strict=False):
                if old.data_ptr() != new.data_ptr():  # if it is not a view
                    old.copy_(new)


def addresses(values: Any) -> list[int]:
    return [value.data_ptr() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _listed(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out or ())


def kernel(function: Callable) -> Callable:
    """Return the function wrapped so that a graph records it as one call."""

    def launch(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            function(*args, **kwargs)
        if Graph.recording is not None:
            Graph.recording.add(function, args, kwargs, [])

    return launch


class Graphs:
    """Wraps a model, as vLLM's CUDAGraphWrapper does."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.graphs: dict[Any, tuple[Graph, Any, list[int]]] = {}
        self.replayed: list[tuple[int, int]] = []  # (number of rows, number of padding rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
            return self.model(**inputs)
        size = context.batch_descriptor.num_tokens
        at = addresses(inputs)
        if size not in self.graphs:
            Graph.recording = Graph()
            with Graph.recording as graph:
                out = self.model(**inputs)
            Graph.recording = None
            self.graphs[size] = graph, out, at
            return out
        graph, out, recorded_addresses = self.graphs[size]
        assert at == recorded_addresses
        graph.replay()
        starts = next(iter(context.attn_metadata.values())).query_start_loc
        self.replayed.append((size, int((starts.diff() == 0).sum())))
        return out


def runner_of(engine: Any) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def graphs_of(engine: Any) -> Iterator[Graphs]:
    """Within the block, the engine decodes by graphs if the batch is small enough; after the block it does not."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    runner = runner_of(engine)
    graphs, original = Graphs(runner.model), runner._determine_batch_execution_and_padding

    def determine(num_tokens: int, num_reqs: int, scheduled: Any = None, **options: Any) -> Any:
        scheduled = options.pop("num_scheduled_tokens_np", scheduled)
        padded = next((size for size in SIZES if size >= num_reqs), None)
        if padded is None or num_tokens != num_reqs or options["max_num_scheduled_tokens"] > 1:
            return original(num_tokens, num_reqs, scheduled, **options)
        batch = BatchDescriptor(num_tokens=padded, num_reqs=padded, uniform=True)
        return CUDAGraphMode.FULL, batch, False, None, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "model", graphs)
        patch.setattr(runner, "_determine_batch_execution_and_padding", determine)
        with torch.inference_mode():
            for size in reversed(SIZES):
                mode = CUDAGraphMode.FULL
                runner._dummy_run(size, cudagraph_runtime_mode=mode, uniform_decode=True, is_graph_capturing=True)
        yield graphs


@pytest.fixture
def kernels(use_backend: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:  # noqa: F811
    from vllm.v1.attention.backends import flash_attn, triton_attn

    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", kernel(write), raising=False)
    monkeypatch.setattr(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL", kernel(attend))
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", kernel(write))
    monkeypatch.setattr(triton_attn, "unified_attention", kernel(attend))
    return use_backend


@pytest.mark.parametrize(
    ("policy_name", "kind"),
    [
        *((name, "Flash") for name in ("gkv", "am", "h2o")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("streaming", "Flash"), ("gkv", "Triton"))),
    ],
)
@pytest.mark.few(1)
def test_decoding_with_graphs_equals_the_reference_engine(
    policy_name: str, kind: str, kernels: Callable, open_engine: Callable
) -> None:
    """Graphs of all three sizes are replayed, some with padding rows."""
    kernels(kind)
    policy, prompts = policy_of(policy_name, budget=64, window=8, period=16), random_prompts(LENGTHS)
    engine = open_engine(policy, exact=False, max_batch=8, max_num_batched_tokens=192)
    with graphs_of(engine) as graphs:
        rollouts = engine.generate(prompts[:-1], GREEDY) + engine.generate(prompts[-1:], GREEDY)
    assert {size for size, _ in graphs.replayed} == set(SIZES)
    assert len(graphs.replayed) > 50
    assert any(padding for _, padding in graphs.replayed)
    agrees_with_hf(policy, prompts, GREEDY, {"graphs": rollouts})


@pytest.mark.parametrize("scorer", [pytest.param("linear", marks=pytest.mark.slow), "delayed"])
def test_a_graph_evicts_before_a_layer_attends(
    scorer: str, kernels: Callable, open_engine: Callable, tmp_path: Any
) -> None:
    """As a learned policy must: `linear` scores a token on arrival, `delayed` when it leaves the window. A graph that
    was recorded before an update reads the new weights, also those of the scorers.
    """
    kernels("Flash")
    policy, prompts = learned_policy(scorer), random_prompts(LENGTHS)
    save_learned(with_scorers(new_model("qwen3", **HEADS_OF_32), policy, scale=0.2), policy, tmp_path)
    engine = open_engine(None, tmp_path, exact=False, max_batch=8, max_num_batched_tokens=192)
    with graphs_of(engine) as graphs:
        rollouts = engine.generate(prompts[:-1], GREEDY) + engine.generate(prompts[-1:], GREEDY)
        trained = with_scorers(new_model("qwen3", seed=1, **HEADS_OF_32), policy, seed=1, scale=0.2)
        engine.load_weights(trained.named_parameters())
        replayed = len(graphs.replayed)
        after_update = engine.generate(prompts[:4], GREEDY)
    assert 50 < replayed < len(graphs.replayed)
    assert any(padding for _, padding in graphs.replayed)
    model = load_model(tmp_path)
    assert same(rollouts, make_engine("hf", model=model, policy=policy).generate(prompts, GREEDY))
    assert same(after_update, make_engine("hf", model=trained, policy=policy).generate(prompts[:4], GREEDY))
    assert trainer_gap(model, rollouts, 1.0) <= 1e-5


@pytest.mark.slow
def test_graphs_continue_a_compacted_context_as_hf_does(kernels: Callable, open_engine: Callable) -> None:
    kernels("Flash")
    *prompts, text = random_prompts((5, 17, 40, 70))
    hf = make_engine("hf", model=directory_of("qwen2"), policy="full")
    context = hf.compact(text, PromptCacheConfig(ratio=0.3))
    engine = open_engine(policy_of("full"), exact=False, context_entries=200)
    with graphs_of(engine) as graphs:
        rollouts = engine.generate(prompts, GREEDY, context)
    assert len(graphs.replayed) > 50
    assert any(padding for _, padding in graphs.replayed)
    assert same(rollouts, hf.generate(prompts, GREEDY, context))


# ---- faults that the comparison must detect -------------------------------------------------------------------------


def fresh_lengths(runner: Any, patch: pytest.MonkeyPatch) -> None:
    return_new_tensors(patch, {"lengths"})


def fresh_places_of_queries(runner: Any, patch: pytest.MonkeyPatch) -> None:
    return_new_tensors(patch, {"block", "place"})


def return_new_tensors(patch: pytest.MonkeyPatch, names: set[str]) -> None:
    copy = Fixed.copy
    patch.setattr(Fixed, "copy", lambda self, name, *given: given[0] if name in names else copy(self, name, *given))


class Fresh:
    def __getitem__(self, part: slice) -> torch.Tensor:
        return torch.zeros(part.stop, dtype=torch.long)


def fresh_slots(runner: Any, patch: pytest.MonkeyPatch) -> None:
    builder = runner.attn_groups[0][0].get_metadata_builder()
    patch.setattr(builder, "slots", Fresh())


def padding_in_the_row_of_a_request(runner: Any, patch: pytest.MonkeyPatch) -> None:
    state = paged.live_state()
    begin = state.begin

    def begin_with_fault(ended: Any, begun: Any) -> None:
        begin(ended, begun)
        for item in begun:
            state.row[0] = state.row_of[item.block]

    patch.setattr(state, "begin", begin_with_fault)


def bounds_of_a_dummy_batch(runner: Any, patch: pytest.MonkeyPatch) -> None:
    """Make the graph's longest sequence that of a dummy batch. In a graph it is a fixed number."""
    patch.setattr(paged.live_state(), "longest", lambda logical, new: 1 if logical == 1024 else logical)


def test_control_faults_in_the_inputs_of_a_graph_are_detected(kernels: Callable, open_engine: Callable) -> None:
    """Each writes an input to another tensor than the recorded one, or uses a row or length of the dummy batch."""
    kernels("Flash")
    prompts, sampling = random_prompts((60, 64, 70)), SamplingConfig(40, temperature=0, ignore_eos=True)
    engine = open_engine(policy_of("gkv", budget=64, window=8, period=16), exact=False)
    rows = paged.live_state().free_rows
    # the null block has a row that belongs to no request
    assert int(paged.live_state().row[0]) not in rows
    assert len(rows) == 16 + 2  # 2 of held prompts
    expected = engine.generate(prompts, sampling)
    with graphs_of(engine):
        assert same(engine.generate(prompts, sampling), expected)
    faults = fresh_lengths, fresh_slots, fresh_places_of_queries, padding_in_the_row_of_a_request
    for add_fault in (*faults, bounds_of_a_dummy_batch):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
            add_fault(runner_of(engine), patch)
            with graphs_of(engine):
                assert same(engine.generate(prompts, sampling), expected), add_fault.__name__
