"""VLLMEngine: rollouts at production speed, with the very policies of the reference engine and their record.

It keeps its own copy of the weights (`load_weights` replaces them). In-process by default, so that every data-parallel
rank of a trainer can have its own; `multiprocess` and `tensor_parallel` put it into processes of its own.
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

from rollout.config import SamplingConfig
from rollout.context import Context
from rollout.context.files import save_context
from rollout.engine import Rollout, sampling_stage
from rollout.requests import NotFiniteLogprobError, Request, requests_to_sample, requests_to_simulate, stop_tokens
from rollout.vllm.beside import beside_cache
from rollout.vllm.compat import arguments, plugin, refusals
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.handover import handed_over
from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.models.directory import attach_scorers, check_scorers
from sparse_rl.models.load import load_config, load_generation_config
from sparse_rl.models.weights import stored_shapes
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage
from sparse_rl.temporary import temporary_folder
from sparse_rl.trace import NEVER, EvictionTrace

OTHERWISE = "; or use the hf engine"
CONTEXT = "context"  # the name of the one that a run goes on from
ATTEMPTS = 3  # for a request that was preempted after an eviction


class VLLMEngine:
    """Samples with vLLM under any policy. Of several threads one uses it at a time; the others wait.

    Parameters
    ----------
    model : a directory
    policy : what the cache keeps
    dtype : of the weights, the cache and the forward
    max_batch : sequences that run at a time (vLLM's max_num_seqs)
    max_model_len : the longest prompt + completion; None: the model's context
    max_prompt : the longest prompt; the pool must hold it whole. None: max_model_len
    kv_cache_gb : GiB for the cache, at most: it takes no more than max_batch sequences can fill. None: on a GPU by
        `gpu_memory_utilization`, on a CPU 1
    gpu_memory_utilization : share of the GPU's memory for weights and cache together, at most
    block_size : tokens of a cache block; None: the platform's own choice, 32 on a CPU
    max_num_batched_tokens : tokens of a forward; a longer prompt is prefilled in chunks. None: vLLM's choice
    tensor_parallel : processes that share the model's heads
    multiprocess : run the engine in a process of its own (always so for tensor_parallel > 1)
    progress : show a progress bar
    exact : in float32 on a CPU, compute attention by the trainer's own function (exact.py), not by vLLM's kernels
    sleep_mode : let `sleep` give a GPU's memory back; nothing on a CPU
    context_entries : sequences may go on from a compacted context (rollout/context), and hold at most so many entries;
        the policy is then a full cache
    full_graphs : on a GPU, run a decode step as one CUDA graph

    Raises
    ------
    UserError
        No vLLM, another version, a head size that the platform refuses, or a second engine in this process.
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
        self.held: Context | None = None  # by the workers
        self.turn = threading.Lock()
        self.shape = layers, kv_heads
        self.generation_config = load_generation_config(model)
        behind: dict[str, Any] = {} if context_entries is None else {"contexts": (), "most": context_entries}
        ours = arguments.engine_arguments(
            policy, dtype=dtype, max_prompt=max_prompt, exact=exact, full_graphs=full_graphs, **behind
        )
        kept = arguments.BehindContext(policy.config) if behind else policy
        itemsize = 4 if dtype == "float32" else 2
        beside = beside_cache(kept, config, itemsize=itemsize, max_batch=max_batch, tensor_parallel=tensor_parallel)
        options: dict[str, Any] = {
            "dtype": dtype,
            "enable_sleep_mode": self.can_sleep,  # it takes the cache's memory; what stands beside the cache stays
            "max_model_len": max_model_len,
            "block_size": block_size or arguments.default_block_size(),
            "max_num_batched_tokens": max_num_batched_tokens,
            **arguments.memory_arguments(kv_cache_gb, gpu_memory_utilization, beside),
            **arguments.launch_arguments(self.separate),
            **ours,
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
        """See `Engine.generate`. A sequence whose cache was recomputed after a preemption is sampled anew."""
        return self._rollouts(requests_to_sample(prompts, sampling, self.config.vocab_size, context), sampling)

    def simulate(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        """See `Engine.simulate`."""
        return self._rollouts(*requests_to_simulate(prompts, completions, temperature, self.config.vocab_size, context))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> NoReturn:
        """See `Engine.prefill`."""
        raise UserError("the vllm engine cannot hand out a prefilled cache; use the engine hf")

    def _rollouts(self, requests: list[Request], sampling: SamplingConfig) -> list[Rollout]:
        self._check_room(requests, sampling)
        rollouts: dict[int, Rollout] = {}
        waiting = requests
        with self.turn, sampling_stage(requests, self.progress) as shown:
            for _ in range(ATTEMPTS):
                rollouts.update(self._run(waiting, sampling, shown))
                waiting = [request for request in waiting if request.place not in rollouts]
                if not waiting:
                    return [rollouts[request.place] for request in requests]
                shown.advance(-len(waiting))
        raise StoppedError(
            f"{len(waiting)} sequences were preempted {ATTEMPTS} times; lower max_batch or raise kv_cache_gb"
        )

    def _check_room(self, requests: list[Request], sampling: SamplingConfig) -> None:
        for request in requests:
            length, number, context = len(request.tokens), request.place // sampling.n, request.context
            if context is None and length > self.max_prompt:
                raise UserError(f"prompt {number} has {length} tokens, and max_prompt is {self.max_prompt}")
            if length + request.max_tokens > self.max_model_len:
                raise UserError(
                    f"prompt {number} has {length} tokens: with max_tokens {request.max_tokens} that is more than "
                    f"max_model_len {self.max_model_len}"
                )
            if context is not None:
                context.check_shape(cache_shape(self.config))
                if self.context_entries is None:
                    raise UserError("this engine goes on from no context; give make_engine the option context_entries")
            held = length + request.max_tokens - (0 if context is None else len(context.tokens) - context.entries)
            if self.context_entries is not None and held > self.context_entries:
                raise UserError(
                    f"prompt {number} comes to {held} entries, and context_entries is {self.context_entries}"
                )

    def _run(self, requests: list[Request], sampling: SamplingConfig, shown: Stage) -> dict[int, Rollout]:
        """Place -> rollout of each request, but those that were preempted."""
        self.llm.collective_rpc("begin_run", args=(dataclasses.asdict(sampling),))
        try:
            if requests and (context := requests[0].context) is not None and context is not self.held:
                self._hold(context)
            return dict(self._with_records(requests, self._sample(requests, sampling, shown)))
        finally:
            self.llm.collective_rpc("end_run")

    def _hold(self, context: Context) -> None:
        """Hand the workers a context's entries, which they keep until another comes."""
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            source: Any = context
            if self.separate:
                save_context(source := f"{folder}/context.safetensors", context)
            self.llm.collective_rpc("hold_context", args=(CONTEXT, source))
        self.held = context

    def _sample(self, requests: list[Request], sampling: SamplingConfig, shown: Stage) -> dict[int, Any]:
        """Place -> vLLM's output of each request."""
        import vllm

        stop = stop_tokens(sampling, self.generation_config, self.config)
        engine = self.llm.llm_engine
        sampled: dict[int, Any] = {}
        try:
            for request in requests:
                asked: dict[str, Any] = {"place": request.place}
                asked |= {"seed": request.seed} if request.forced is None else {"forced": request.forced}
                if (context := request.context) is not None:
                    asked["context"] = [CONTEXT, len(context.tokens), context.entries]
                parameters = vllm.SamplingParams(
                    max_tokens=request.max_tokens,
                    temperature=1.0,  # the true one, top_p, top_k and the seed: samplers.py
                    extra_args={KEY: asked},
                    stop_token_ids=stop,
                    ignore_eos=True,  # which tokens stop stands above
                    detokenize=False,
                    output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(str(request.place), {"prompt_token_ids": request.tokens}, parameters)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        place, drawn = int(output.request_id), output.outputs[0]
                        if drawn.finish_reason == "error":  # compat/finite.py; vLLM itself fails none of ours
                            raise NotFiniteLogprobError(*divmod(place, sampling.n), len(drawn.token_ids), self.dtype)
                        sampled[place] = drawn
                        shown.advance()
            return sampled
        finally:
            if engine.has_unfinished_requests():  # interrupted: leave nothing behind
                engine.abort_request([str(request.place) for request in requests])

    def _with_records(self, requests: list[Request], sampled: dict[int, Any]) -> Iterator[tuple[int, Rollout]]:
        """(place, rollout): what was sampled, with what the workers have recorded of it, some sequences at a time."""
        for start in range(0, len(requests), self.max_batch):
            part = requests[start : start + self.max_batch]
            lengths = {r.place: len(r.tokens) + len(sampled[r.place].token_ids) for r in part}
            ranks = self.llm.collective_rpc("take_results", args=(lengths,))
            for request, *results in zip(part, *ranks, strict=True):
                if results[0]["preempted"]:  # its record does not tell what it attended to
                    continue
                output, length = sampled[request.place], lengths[request.place]
                logprobs, model_logprobs = np.frombuffer(results[0]["logprobs"], np.float32).reshape(-1, 2).T.tolist()
                trace = self._trace(request, [result["evict_at"] for result in results], length)
                completion, reason = list(output.token_ids), output.finish_reason
                yield request.place, Rollout(request.tokens, completion, logprobs, model_logprobs, trace, reason)

    def _trace(self, request: Request, ranks: list[bytes | None], length: int) -> EvictionTrace:
        """ranks : the evictions that each of them has recorded (`Result`)"""
        if request.context is not None:
            return request.context.trace(length)
        evict_at = torch.full((*self.shape, length), NEVER, dtype=torch.int32)
        if ranks[0] is not None:
            heads = [np.frombuffer(rank, np.int32).reshape(self.shape[0], -1, length) for rank in ranks if rank]
            evict_at = torch.from_numpy(np.concatenate(heads, axis=1))
        return EvictionTrace.recorded(evict_at, self.policy.further(len(request.prompt), length))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, by the names of the Hugging Face checkpoint.

        UserError for one left out, an unknown name or a wrong shape; some are then replaced, and some are not.
        """
        checked = self._checked(weights)
        if not self.separate:
            self._replace("replace_weights", checked)
            return
        with handed_over(checked) as (path, places):
            self._replace("receive_weights", path, places)

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same, held against the model: vLLM fuses weights, and would not miss one of those."""
        shapes, needed = self._expected
        missing = set(needed)
        for name, tensor in weights:
            if name not in shapes:
                raise UserError(f"the engine cannot take the weights: its model has no {name!r}")
            if tensor.shape != (own := shapes[name]):
                raise UserError(f"the engine cannot take the weights: {name!r} is {[*own]}, got {[*tensor.shape]}")
            missing.discard(name)
            yield name, tensor
        if missing:
            raise UserError(f"the engine cannot take the weights: not handed over: {', '.join(sorted(missing)[:3])}")

    @cached_property
    def _expected(self) -> tuple[dict[str, torch.Size], frozenset[str]]:
        """Name -> shape of all that may come, a tied head under both of its names; and the names that must.

        The model's class is called by itself: under ZeRO-3 `from_config` would partition weights that have no data.
        """
        with torch.device("meta"):
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
            model = kind(self.config)
            if isinstance(self.policy, LearnedPolicy):
                attach_scorers(model, self.policy)
        shapes = {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}
        return shapes, frozenset(name for name, _ in model.named_parameters())

    def scorer_digests(self) -> dict[str, list[str]]:
        """See `Engine.scorer_digests`."""
        ranks = self.llm.collective_rpc("scorer_digests")
        return {name: [head for rank in ranks for head in rank[name]] for name in ranks[0]}

    def _replace(self, how: str, *source: Any) -> None:
        with self.turn:
            self.llm.collective_rpc(how, args=source)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory back between two `generate`; nothing without `sleep_mode`.

        level : 1 keeps the weights in host memory, 2 drops them: `load_weights` before the next `generate`
        """
        if level not in (1, 2):
            raise UserError(f"level must be 1 or 2, got {level!r}")
        if self.can_sleep:
            with self.turn:
                self.llm.sleep(level=level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again: of "weights" (as `load_weights` needs it), of "kv_cache", or None, of both."""
        if self.can_sleep:
            with self.turn:
                self.llm.wake_up(None if tags is None else list(tags))

    def close(self) -> None:
        """Let the engine, its cache and its processes go."""
        if getattr(self, "llm", None) is None:
            return
        with self.turn, plugin.undisturbed(self.had_group):
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        if not self.separate:
            VLLMEngine.in_process = None
        gc.collect()
