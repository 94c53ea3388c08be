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
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, distributed
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from rollout.config import SamplingConfig
from rollout.context import Context
from rollout.context.files import save_context
from rollout.engine import Rollout, sampling_stage
from rollout.requests import NotFiniteLogprobError, Request, requests_to_sample, requests_to_simulate, stop_tokens
from rollout.vllm.beside import beside_cache
from rollout.vllm.compat import arguments, plugin, refusals
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.handover import handed_over
from rollout.vllm.record import Result
from sparse_rl.attention.families import cache_shape, windows_of
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.models.directory import attach_scorers, check_scorers
from sparse_rl.models.identity import UNKNOWN, identify
from sparse_rl.models.load import load_config, load_generation_config
from sparse_rl.models.weights import stored_shapes
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage
from sparse_rl.temporary import temporary_folder
from sparse_rl.trace import NEVER, EvictionTrace

OTHERWISE = "; or use the hf engine"
CONTEXT = "context"  # the workers' name of the context that a run continues
ATTEMPTS = 3  # attempts at sampling a request; under a policy that evicts, a preemption makes an attempt fail


class VLLMEngine:
    """Samples with vLLM. Threads that use the same engine wait for each other.

    model : model directory
    dtype : dtype of weights, cache and forward pass
    max_batch : maximum number of sequences that run at a time (vLLM's max_num_seqs)
    max_model_len : maximum length of prompt + completion; None means the model's context length
    max_prompt : maximum length of a prompt, which the cache must hold completely; None means max_model_len
    kv_cache_gb : maximum GiB for the cache, which never takes more than max_batch sequences can fill. None means 1 on a
        CPU, and on a GPU that `gpu_memory_utilization` is the limit
    gpu_memory_utilization : maximum share of the GPU's memory for weights and cache together
    block_size : tokens in a cache block; None means 32 on a CPU, and vLLM's choice on a GPU
    max_num_batched_tokens : maximum number of tokens in a forward pass; a longer prompt is prefilled in chunks. None
        means vLLM's choice
    tensor_parallel : number of processes that share the model's heads
    multiprocess : run the engine in a separate process (always done for tensor_parallel > 1)
    progress : show a progress bar
    exact : in float32 on a CPU, compute attention by the trainer's function (exact.py)
    sleep_mode : let `sleep` release a GPU's memory; has no effect on a CPU
    context_entries : maximum number of entries of a sequence that continues a compacted context (rollout/context),
        under a full cache; None means that no sequence may continue a context
    full_graphs : on a GPU, run a decode step as one CUDA graph

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
        refusals.refuse_engine(policy, config, self.can_sleep, OTHERWISE)
        stored_shapes(model)
        check_scorers(model, policy)
        layers, kv_heads, _ = cache_shape(config)
        if kv_heads % tensor_parallel:
            raise UserError(f"tensor_parallel {tensor_parallel} does not divide the model's {kv_heads} kv heads")
        if not self.separate and VLLMEngine.in_process is not None and VLLMEngine.in_process() is not None:
            raise UserError("this process has a vllm engine already; close it first")
        self.policy, self.max_batch, self.progress, self.dtype = policy, max_batch, progress, dtype
        self.context_entries = context_entries
        self.held: Context | None = None  # the context that the workers hold
        self.turn = threading.Lock()
        self.shape = layers, kv_heads
        self.identity = identify(model)  # read now: files that replace these later have other weights
        self.generation_config = load_generation_config(model)
        context_options: dict[str, Any] = {} if context_entries is None else {"contexts": (), "most": context_entries}
        policy_options = arguments.engine_arguments(
            policy, dtype=dtype, max_prompt=max_prompt, exact=exact, full_graphs=full_graphs, **context_options
        )
        bound = arguments.BehindContext(policy.config) if context_options else policy
        itemsize = 4 if dtype == "float32" else 2
        beside = beside_cache(bound, config, itemsize=itemsize, max_batch=max_batch, tensor_parallel=tensor_parallel)
        options: dict[str, Any] = {
            "dtype": dtype,
            "enable_sleep_mode": self.can_sleep,  # releases the memory of the cache, but not of our own buffers
            "max_model_len": max_model_len,
            "block_size": block_size or arguments.default_block_size(),
            "max_num_batched_tokens": max_num_batched_tokens,
            **arguments.memory_arguments(kv_cache_gb, gpu_memory_utilization, beside),
            **arguments.launch_arguments(self.separate),
            **policy_options,
        }
        self.had_group = distributed.is_available() and distributed.is_initialized()
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
                worker_cls="rollout.vllm.worker.EngineWorker",
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
        """Implement `Engine.generate`. If the policy evicts, a preempted sequence is sampled again."""
        return self._rollouts(requests_to_sample(prompts, sampling, self.config.vocab_size, context), sampling)

    def simulate(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        return self._rollouts(*requests_to_simulate(prompts, completions, temperature, self.config.vocab_size, context))

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], context: Context
    ) -> list[Tensor]:
        """Implement `Engine.logprobs`, token by token: `simulate`."""
        return [torch.tensor(r.model_logprobs) for r in self.simulate(prompts, completions, context=context)]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> NoReturn:
        """Raise UserError, because vLLM cannot return its cache."""
        raise UserError("the vllm engine cannot hand out a prefilled cache; use the engine hf")

    def _rollouts(self, requests: list[Request], sampling: SamplingConfig) -> list[Rollout]:
        self._check_room(requests, sampling)
        rollouts: dict[int, Rollout] = {}
        waiting = requests
        with self.turn, sampling_stage(requests, self.progress) as stage:
            for _ in range(ATTEMPTS):
                rollouts.update(self._run(waiting, sampling, stage))
                waiting = [request for request in waiting if request.place not in rollouts]
                if not waiting:
                    return [rollouts[request.place] for request in requests]
                stage.advance(-len(waiting))
        raise StoppedError(
            f"{len(waiting)} sequences were preempted {ATTEMPTS} times; lower max_batch or raise kv_cache_gb"
        )

    def _check_room(self, requests: list[Request], sampling: SamplingConfig) -> None:
        for request in requests:
            length, number, context = len(request.tokens), request.place // sampling.n, request.context
            if context is None and length > self.max_prompt:
                raise UserError(f"prompt {number} has {length} tokens, but max_prompt is {self.max_prompt}")
            if length + request.max_tokens > self.max_model_len:
                raise UserError(
                    f"prompt {number} has {length} tokens: with max_tokens {request.max_tokens} that is more than "
                    f"max_model_len {self.max_model_len}"
                )
            if context is not None:
                context.check_model(cache_shape(self.config), windows_of(self.config), self.identity)
                if self.context_entries is None:
                    raise UserError("this engine cannot continue a context; pass context_entries to make_engine")
            held = length + request.max_tokens - (0 if context is None else len(context.tokens) - context.entries)
            if self.context_entries is not None and held > self.context_entries:
                raise UserError(
                    f"prompt {number} may need {held} entries; raise context_entries, which is {self.context_entries}"
                )

    def _run(self, requests: list[Request], sampling: SamplingConfig, stage: Stage) -> dict[int, Rollout]:
        """Run the requests once. Returns place -> rollout, without the requests that were preempted."""
        self.llm.collective_rpc("begin_run", args=(dataclasses.asdict(sampling),))
        try:
            if requests and (context := requests[0].context) is not None and context is not self.held:
                self._hold(context)
            return dict(self._with_records(requests, self._sample(requests, sampling, stage)))
        finally:
            self.llm.collective_rpc("end_run")

    def _hold(self, context: Context) -> None:
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            source: Any = context
            if self.separate:
                save_context(source := f"{folder}/context.safetensors", context)
            self.llm.collective_rpc("hold_context", args=(CONTEXT, source))
        self.held = context

    def _sample(self, requests: list[Request], sampling: SamplingConfig, stage: Stage) -> dict[int, Any]:
        """Sample the requests. Returns place -> vLLM's output."""
        import vllm

        stop = stop_tokens(sampling, self.generation_config, self.config)
        engine = self.llm.llm_engine
        sampled: dict[int, Any] = {}
        try:
            for request in requests:
                extra: dict[str, Any] = {"place": request.place}
                extra |= {"seed": request.seed} if request.forced is None else {"forced": request.forced}
                if (context := request.context) is not None:
                    extra["context"] = [CONTEXT, len(context.tokens), context.entries]
                parameters = vllm.SamplingParams(
                    max_tokens=request.max_tokens,
                    temperature=1.0,  # samplers.py applies the real temperature, top_p, top_k and the seed
                    extra_args={KEY: extra},
                    stop_token_ids=stop,
                    ignore_eos=True,  # stop_token_ids already includes the end-of-sequence tokens
                    detokenize=False,
                    output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(str(request.place), {"prompt_token_ids": request.tokens}, parameters)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        place, sequence = int(output.request_id), output.outputs[0]
                        if sequence.finish_reason == "error":  # only compat/finite.py ends our requests this way
                            raise NotFiniteLogprobError(*divmod(place, sampling.n), len(sequence.token_ids), self.dtype)
                        sampled[place] = sequence
                        stage.advance()
            return sampled
        finally:
            if engine.has_unfinished_requests():  # sampling was interrupted
                engine.abort_request([str(request.place) for request in requests])

    def _with_records(self, requests: list[Request], sampled: dict[int, Any]) -> Iterator[tuple[int, Rollout]]:
        """Yield (place, rollout) for each request that was not preempted, from vLLM's outputs and the workers' records.

        The records are fetched for max_batch sequences at a time.
        """
        for start in range(0, len(requests), self.max_batch):
            part = requests[start : start + self.max_batch]
            lengths = {r.place: len(r.tokens) + len(sampled[r.place].token_ids) for r in part}
            ranks = self.llm.collective_rpc("take_results", args=(lengths,))
            for request, *results in zip(part, *ranks, strict=True):
                if results[0]["preempted"]:  # the record does not show which entries the request attended to
                    continue
                output, length = sampled[request.place], lengths[request.place]
                logprobs, model_logprobs = np.frombuffer(results[0]["logprobs"], np.float32).reshape(-1, 2).T.tolist()
                numbers = (logprobs, model_logprobs, self._trace(request, results, length), output.finish_reason)
                yield request.place, Rollout(request.tokens, list(output.token_ids), *numbers)

    def _trace(self, request: Request, ranks: list[Result], length: int) -> EvictionTrace:
        """Return the trace of a sequence of `length` tokens. ranks : results of all ranks, which route tokens alike"""
        routed = ranks[0]["routed"]
        if request.context is not None:
            return (request.context if routed is None else request.context.unrecorded()).trace(length)
        evict_at = torch.full((*self.shape, length), NEVER, dtype=torch.int32)
        if parts := [rank["evict_at"] for rank in ranks if rank["evict_at"] is not None]:
            heads = [np.frombuffer(part, np.int32).reshape(self.shape[0], -1, length) for part in parts]
            evict_at = torch.from_numpy(np.concatenate(heads, axis=1))
        further = self.policy.further(len(request.prompt), length)
        if routed is not None:
            by_token = np.frombuffer(routed, np.int16).reshape(length, self.shape[0], -1)
            further = {**further, "routed": torch.from_numpy(by_token.transpose(1, 0, 2).copy())}
        return EvictionTrace.recorded(evict_at, further)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights of the model and its scorers, each given as (name in transformers' module, tensor).

        Raises UserError for a missing weight, an unknown name or a wrong shape. Some weights may then be replaced.
        """
        checked = self._checked(weights)
        self.identity = UNKNOWN  # vLLM's workers hold the weights, in fused tensors
        if not self.separate:
            self._replace("replace_weights", checked)
            return
        with handed_over(checked) as (path, places):
            self._replace("receive_weights", path, places)

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Check the weights (vLLM would not notice a missing part of a fused one), and name them as in a checkpoint."""
        model, shapes, required = self._expected
        missing = set(required)
        for name, tensor in weights:
            if name not in shapes:
                raise UserError(f"the engine cannot take the weights: its model has no {name!r}")
            if tensor.shape != shapes[name]:
                wrong = f"{name!r} must have shape {[*shapes[name]]}, got {[*tensor.shape]}"
                raise UserError(f"the engine cannot take the weights: {wrong}")
            missing.discard(name)
            yield from revert_weight_conversion(model, {name: tensor.detach()}).items()
        if missing:
            names = ", ".join(sorted(missing)[:3])
            raise UserError(f"the engine cannot take the weights: these were not handed over: {names}")

    @cached_property
    def _expected(self) -> tuple[Any, dict[str, torch.Size], frozenset[str]]:
        """Return a model without data, name -> shape of the accepted weights, and the names of the required ones."""
        # `from_config` would partition the weights under ZeRO-3.
        with torch.device("meta"):
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
            model = model_class(self.config)
            if isinstance(self.policy, LearnedPolicy):
                attach_scorers(model, self.policy)
        # `state_dict` has buffers, and both names of a tied head.
        shapes = {name: weight.shape for name, weight in model.state_dict().items()}
        return model, shapes, frozenset(name for name, _ in model.named_parameters())

    def scorer_digests(self) -> dict[str, list[str]]:
        ranks = self.llm.collective_rpc("scorer_digests")
        return {name: [head for rank in ranks for head in rank[name]] for name in ranks[0]}

    def _replace(self, method: str, *source: Any) -> None:
        with self.turn:
            self.llm.collective_rpc(method, args=source)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Release the engine's GPU memory between two calls of `generate`. Has no effect without `sleep_mode`.

        level : 1 keeps the weights in host memory; 2 drops them, so that `load_weights` must precede `generate`
        """
        if level not in (1, 2):
            raise UserError(f"level must be 1 or 2, got {level!r}")
        if self.can_sleep:
            with self.turn:
                self.llm.sleep(level=level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` has released.

        tags : "weights", which `load_weights` needs, "kv_cache", or both; None means both
        """
        if self.can_sleep:
            with self.turn:
                self.llm.wake_up(None if tags is None else list(tags))

    def close(self) -> None:
        """Free the engine and its cache, and end its processes."""
        if getattr(self, "llm", None) is None:
            return
        with self.turn, plugin.undisturbed(self.had_group):
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        if not self.separate:
            VLLMEngine.in_process = None
        gc.collect()
