"""VLLMEngine: samples at production speed, under the policies of the reference engine, and returns the same records.

The engine keeps its own copy of the weights. By default the engine runs in the caller's process, so that each
data-parallel rank of a trainer can have one; `multiprocess` or `tensor_parallel` > 1 moves it to separate processes.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

from rollout.config import SamplingConfig
from rollout.context import Context
from rollout.context.cache import save_context
from rollout.engine import Rollout, Turn, sampling_stage
from rollout.sampling import NotFiniteLogprobError, Request, requests_to_sample, requests_to_simulate, stop_tokens
from rollout.vllm.compat import arguments, plugin
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.conversations import KeptConversation, TurnRequest, turn_requests
from rollout.vllm.memory import beside_cache, prompt_groups
from rollout.vllm.sampling import joined
from rollout.vllm.weights import ModelWeights, handed_over
from sparse_rl.attention.families import cache_shape, windows_of
from sparse_rl.clock import Clock
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.models.centres import check_parameters
from sparse_rl.models.load import load_config, load_generation_config
from sparse_rl.models.weights import UNKNOWN, identify, stored_shapes
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage
from sparse_rl.temporary import temporary_folder
from sparse_rl.trace import EvictionTrace

OTHERWISE = "; or use the hf engine"
CONTEXT = "context"  # the workers' name of the context that a run continues
ATTEMPTS = 3  # attempts at sampling a request; under a policy that evicts, a preemption ends an attempt (scheduler.py)


class VLLMEngine:
    """Samples with vLLM. Threads that use the same engine wait for each other. Options as in RolloutConfig, and:

    model, dtype : model directory; dtype of weights, cache and forward pass
    max_prompt : maximum length of a prompt, which the cache must hold completely; None means max_model_len
    block_size : tokens in a cache block; None means 32 on a CPU, and vLLM's choice on a GPU
    max_num_batched_tokens : maximum number of tokens in a forward pass; a longer prompt is prefilled in chunks. None
        means vLLM's choice
    multiprocess : run the engine in a separate process (always done for tensor_parallel > 1)
    sleep_mode : let `sleep` release a GPU's memory; has no effect on a CPU
    context_entries : maximum number of entries of a sequence that continues a compacted context (rollout/context),
        under a full cache; None means that no sequence may continue a context

    Raises UserError if an option is invalid, if vLLM is missing or has another version, if vLLM cannot run the policy
    or the model on this platform, or if this process already has an engine.
    """

    shares_weights = False
    in_process: ClassVar[weakref.ref[VLLMEngine] | None] = None  # vLLM has one connector and one world per process

    def __init__(
        self,
        model: str | Path,
        policy: Policy,
        *,
        dtype: str = "float32",
        max_batch: int = 64,
        max_model_len: int | None = None,
        max_prompt: int | None = None,
        kv_cache_gb: float | None = None,
        gpu_memory_utilization: float = 0.3,
        block_size: int | None = None,
        max_num_batched_tokens: int | None = None,
        tensor_parallel: int = 1,
        multiprocess: bool = False,
        progress: bool = False,
        exact: bool = True,
        sleep_mode: bool = False,
        context_entries: int | None = None,
        full_graphs: bool = False,
    ) -> None:
        if max_batch < 1:
            raise UserError(f"max_batch must be >= 1, got {max_batch}")
        arguments.check_version(OTHERWISE)
        arguments.prepare_environment()
        self.separate = multiprocess or tensor_parallel > 1
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.separate else "0"
        import vllm

        plugin.register()
        self.config = config = load_config(str(model))
        self.can_sleep = sleep_mode and not arguments.on_cpu()
        arguments.refuse_engine(policy, config, OTHERWISE)
        stored_shapes(model)
        check_parameters(model, policy)
        layers, kv_heads, _ = cache_shape(config)
        if kv_heads % tensor_parallel:
            raise UserError(f"tensor_parallel {tensor_parallel} does not divide the model's {kv_heads} kv heads")
        if not self.separate and VLLMEngine.in_process is not None and VLLMEngine.in_process() is not None:
            raise UserError("this process has a vllm engine already; close it first")
        self.policy, self.max_batch, self.progress, self.dtype = policy, max_batch, progress, dtype
        self.context_entries = context_entries
        self.held: Context | None = None  # the context that the workers hold
        self.turn = threading.Lock()
        self.conversations: weakref.WeakSet[KeptConversation] = weakref.WeakSet()
        self.shape = layers, kv_heads
        self.identity = identify(model)  # read now: files that replace these later have other weights
        self.generation_config = load_generation_config(model)
        contexts = None if context_entries is None else ()
        policy_options = arguments.engine_arguments(
            policy,
            dtype=dtype,
            max_prompt=max_prompt,
            exact=exact,
            contexts=contexts,
            most=context_entries,
            full_graphs=full_graphs,
        )
        bound = policy if contexts is None else arguments.BehindContext(policy.config)
        self.caches_prompts = contexts is None and arguments.caches_prompts(policy, config)
        itemsize = 4 if dtype == "float32" else 2
        beside = beside_cache(bound, config, itemsize=itemsize, max_batch=max_batch, tensor_parallel=tensor_parallel)
        self.had_group = distributed.is_available() and distributed.is_initialized()
        launched = self.had_group and "LOCAL_RANK" in os.environ and not self.separate
        options: dict[str, Any] = {
            "dtype": dtype,
            "enable_sleep_mode": self.can_sleep,  # drops the cache; moves our buffers to host memory
            **arguments.model_arguments(config),
            **arguments.length_arguments(config, max_model_len),
            "block_size": block_size or arguments.default_block_size(),
            "max_num_batched_tokens": max_num_batched_tokens,
            **arguments.memory_arguments(kv_cache_gb, gpu_memory_utilization, beside),
            "distributed_executor_backend": "external_launcher" if launched else None,  # its own process's GPU alone
            **policy_options,
            "enable_prefix_caching": self.caches_prompts,
            "worker_cls": f"{arguments.WORKERS}EngineWorker",
        }
        with plugin.undisturbed(self.had_group):
            self.llm: Any = vllm.LLM(
                str(model),
                max_num_seqs=max_batch,
                tensor_parallel_size=tensor_parallel,
                skip_tokenizer_init=True,
                generation_config="vllm",
                load_format="safetensors",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                seed=0,
                **{name: value for name, value in options.items() if value is not None},
            )
        if not self.separate:
            VLLMEngine.in_process = weakref.ref(self)
        self.max_model_len: int = self.llm.llm_engine.model_config.max_model_len
        self.max_prompt = self.max_model_len if max_prompt is None else min(max_prompt, self.max_model_len)

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, context: Context | None = None
    ) -> list[Rollout]:
        return self._rollouts(requests_to_sample(prompts, sampling, self.config.vocab_size, context), sampling)

    def simulate(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        return self._rollouts(*requests_to_simulate(prompts, completions, temperature, self.config.vocab_size, context))

    def converse(
        self, turns: Sequence[Turn], sampling: SamplingConfig, keep: bool = True
    ) -> list[tuple[Rollout, KeptConversation | None]]:
        """Implement `Engine.converse`. In the next run after `held` is no longer referenced, and when the weights
        change, the workers let go of a conversation's entries.

        Raises UserError for a conversation that another engine holds, or whose entries are lost.
        """
        vocabulary = self.config.vocab_size
        requests = turn_requests(turns, sampling, keep, self.policy, vocabulary, self.conversations)
        self.conversations.update(request.next for request in requests if request.next is not None)
        rollouts = self._rollouts(requests, sampling)
        return [(rollout, request.next) for rollout, request in zip(rollouts, requests, strict=True)]

    def _lose_conversations(self) -> None:
        for held in list(self.conversations):
            held.lost = True

    def _live(self) -> list[int]:
        """Return the names of the conversations that may go on."""
        return [held.name for held in list(self.conversations) if not held.lost]

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], context: Context
    ) -> list[Tensor]:
        """Implement `Engine.logprobs`, token by token: `simulate`."""
        return [torch.tensor(r.model_logprobs) for r in self.simulate(prompts, completions, context=context)]

    def _rollouts(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        self._check_room(requests, sampling)
        rollouts, waiting = dict[int, Rollout](), list(requests)
        with self.turn, sampling_stage(requests, self.progress) as stage:
            for _ in range(ATTEMPTS):
                rollouts.update(self._run(waiting, sampling, stage))
                waiting = [request for request in waiting if request.place not in rollouts]
                if not waiting:
                    return [rollouts[request.place] for request in requests]
        often = f"{len(waiting)} sequences were preempted {ATTEMPTS} times"
        raise StoppedError(f"{often}; lower max_batch or raise kv_cache_gb")

    def _check_room(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        for request in requests:
            length, number, context = len(request.tokens), request.place // sampling.n, request.context
            reads = request.reads if isinstance(request, TurnRequest) else length
            room = self.max_prompt if request.held is None else max(self.max_prompt, self.policy.schedule.peak or 0)
            if context is None and reads > room:
                wrong = f"prompt {number} has {length} tokens"
                if request.held is not None:
                    wrong = f"conversation {number} holds {reads} entries with those of the tokens that it reads"
                raise UserError(f"{wrong}, but max_prompt is {self.max_prompt}")
            held = length + request.max_tokens
            if held > self.max_model_len:
                wrong = f"prompt {number} has {length} tokens: with max_tokens {request.max_tokens}"
                raise UserError(f"{wrong} that is more than max_model_len {self.max_model_len}")
            if context is not None:
                context.check_model(cache_shape(self.config), windows_of(self.config), self.identity)
                if self.context_entries is None:
                    raise UserError("this engine cannot continue a context; pass context_entries to make_engine")
                held -= len(context.tokens) - context.entries
            if (most := self.context_entries) is not None and held > most:
                raise UserError(f"prompt {number} may need {held} entries; raise context_entries, which is {most}")

    def _run(self, requests: list[Request], sampling: SamplingConfig, stage: Stage) -> dict[int, Rollout]:
        # weights may have changed since the last run, unless a conversation goes on
        begins = all(request.held is None for request in requests)
        if self.caches_prompts and begins and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps the prompts of an earlier run in its cache, although no request runs")
        self.llm.collective_rpc("begin_run", args=(dataclasses.asdict(sampling), self._live()))
        try:
            if requests and (context := requests[0].context) is not None and context is not self.held:
                self._hold(context)
            return dict(self._with_records(requests, self._sample(requests, sampling, stage)))
        finally:
            self.llm.collective_rpc("end_run", args=(self._live(),))

    def _hold(self, context: Context) -> None:
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            source: Any = context
            if self.separate:
                save_context(source := f"{folder}/context.safetensors", context)
            self.llm.collective_rpc("hold_context", args=(CONTEXT, source))
        self.held = context

    def _sample(self, requests: list[Request], sampling: SamplingConfig, stage: Stage) -> dict[int, Any]:
        import vllm

        stop = stop_tokens(sampling, self.generation_config, self.config)
        engine = self.llm.llm_engine
        sampled: dict[int, Any] = {}
        added: list[str] = []

        def add(place: int, tokens: list[int], max_tokens: int, request: Request, **extra: Any) -> None:
            extra |= {"place": place, "seed": request.seed}
            if request.forced is not None:
                extra["forced"] = request.forced
            if (context := request.context) is not None:
                extra["context"] = [CONTEXT, len(context.tokens), context.entries]
            parameters = vllm.SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0,  # sampling.py applies the real temperature, top_p, top_k and the seed
                extra_args={KEY: extra},
                stop_token_ids=stop,
                ignore_eos=True,  # stop_token_ids already includes the end-of-sequence tokens
                detokenize=False,
                output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            added.append(str(place))  # first: an interrupt may come when it is half added
            engine.add_request(str(place), {"prompt_token_ids": tokens}, parameters)

        try:
            for group in self._groups(requests):
                first = group[0]
                extra = {"group": str(first.place)} if len(group) > 1 else {}
                for request in group:
                    more = request.settings if isinstance(request, TurnRequest) else {}
                    add(request.place, request.tokens, request.max_tokens, request, **extra, **more)
                if extra:  # the holder (scheduler.py); its place is negative
                    add(-1 - first.place, first.tokens[:-1], 1, first, holds=extra["group"])
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        place, sequence = int(output.request_id), output.outputs[0]
                        # the samples of a holder that fails prefill the prompt, and may fail themselves
                        if place < 0 or sequence.stop_reason == "preempted":  # scheduler.py
                            continue
                        if sequence.finish_reason == "error":
                            step = len(sequence.token_ids)
                            raise NotFiniteLogprobError(*divmod(place, sampling.n), step, self.dtype)
                        sampled[place] = sequence
                        stage.advance()
            return sampled
        finally:
            if engine.has_unfinished_requests():  # sampling was interrupted
                engine.abort_request(added)

    def _groups(self, requests: list[Request]) -> Iterable[list[Request]]:
        return prompt_groups(requests, self.policy, self.llm.llm_engine.vllm_config)

    def _with_records(self, requests: list[Request], sampled: dict[int, Any]) -> Iterator[tuple[int, Rollout]]:
        """Yield (place, rollout) for each sampled request, from vLLM's outputs and the workers' records, which are
        fetched for max_batch sequences at a time.
        """
        requests = [request for request in requests if request.place in sampled]
        for start in range(0, len(requests), self.max_batch):
            part = requests[start : start + self.max_batch]
            lengths = {r.place: len(r.tokens) + len(sampled[r.place].token_ids) for r in part}
            ranks = self.llm.collective_rpc("take_results", args=(lengths,))
            for request, *results in zip(part, *ranks, strict=True):
                output, length = sampled[request.place], lengths[request.place]
                logprobs, model_logprobs, evict_at, sections, supports = joined(results, self.shape, length)
                numbers = list(output.token_ids), logprobs, model_logprobs
                if isinstance(request, TurnRequest):
                    sections = {**sections, **supports}
                    yield request.place, request.rollout(*numbers, evict_at, sections, output.finish_reason)
                    continue
                if (context := request.context) is not None:
                    trace = (context.unrecorded() if "routed" in sections else context).trace(length)
                else:
                    further = self.policy.further(len(request.prompt), length)
                    trace = EvictionTrace.recorded(evict_at, {**further, **sections})
                yield request.place, Rollout(request.tokens, *numbers, trace.beside(supports), output.finish_reason)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights of the model and its scorers, each given as (name in transformers' module, tensor). After
        an error, some weights may be replaced.
        """
        checked = self._weights.checked(weights)
        self._lose_conversations()
        self.identity = UNKNOWN  # vLLM's workers hold the weights, in fused tensors
        with self.turn, ExitStack() as stack:
            if self.separate:
                self.llm.collective_rpc("receive_weights", args=stack.enter_context(handed_over(checked)))
            else:
                self.llm.collective_rpc("replace_weights", args=(checked,))

    @cached_property
    def _weights(self) -> ModelWeights:
        return ModelWeights(self.config, self.policy)

    def scorer_digests(self) -> dict[str, list[str]]:
        ranks = self.llm.collective_rpc("scorer_digests")
        return {name: [head for rank in ranks for head in rank[name]] for name in ranks[0]}

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Release the engine's GPU memory between two calls of `generate`. Has no effect without `sleep_mode`. No
        conversation goes on after it.

        level : 1 keeps the weights in host memory; 2 drops them, so that `load_weights` must precede `generate`. The
            buffers beside the cache are kept in host memory at both levels, and any `wake_up` brings them back
        """
        if self.can_sleep:
            self._lose_conversations()
            with self.turn:
                self.llm.sleep(level=level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` has released: of "weights", which `load_weights` needs, and "kv_cache"."""
        if self.can_sleep:
            with self.turn:
                self.llm.wake_up(None if tags is None else list(tags))

    def close(self) -> None:
        if getattr(self, "llm", None) is None:
            return
        with self.turn, plugin.undisturbed(self.had_group):
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        if not self.separate:
            VLLMEngine.in_process = None
        gc.collect()


@contextmanager
def steps_reported(llm: Any) -> Iterator[None]:
    """Report each step of a `vllm.LLM` of this process to the running clock (sparse_rl/clock.py)."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    groups = scheduler.kv_cache_config.kv_cache_groups
    block_bytes = sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
    free = pool.get_num_free_blocks()
    plain_step, finished, reported = engine.step, 0, 0

    def step() -> Any:
        nonlocal finished, reported
        running = len(scheduler.running)
        outputs = plain_step()
        sampled_now = (o.outputs[0].token_ids for o in outputs if o.finished and int(o.request_id) >= 0)
        finished += sum(map(len, sampled_now))
        unfinished = [*scheduler.running, *scheduler.waiting]
        sampled = finished + sum(request.num_output_tokens for request in unfinished)
        reads = any(request.num_computed_tokens < request.num_prompt_tokens for request in unfinished)
        if Clock.running is not None:
            at_once = max(running, len(scheduler.running))  # the first step starts sequences, the last one ends them
            used = free - pool.get_num_free_blocks()
            Clock.running.step(sampled - reported, used * block_bytes, at_once, prefilled=not reads)
        reported = sampled
        return outputs

    engine.step = step
    try:
        yield
    finally:
        del engine.step  # the attribute of the object, which hides the method
