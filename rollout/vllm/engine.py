"""VLLMEngine: rollouts at production speed, with the very policies of the reference engine and their record.

It keeps its own copy of the weights (`load_weights` replaces them). In-process by default, so that every data-parallel
rank of a trainer can have its own; `multiprocess` and `tensor_parallel` put it into processes of its own.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import secrets
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import distributed
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rollout.engine import Rollout, SamplingConfig, check_given
from rollout.sampling import sequence_seed
from sparse_rl.attention import cache_shape
from sparse_rl.models.load import load_config
from sparse_rl.policies import Policy
from sparse_rl.trace import EvictionTrace

Request = tuple[list[int], int | list[int]]  # a prompt, and the seed to sample by or the completion that is given
ATTEMPTS = 3  # for a request that was preempted after an eviction


class VLLMEngine:
    """Samples with vLLM under any policy.

    Parameters
    ----------
    model : a directory
    policy : what the cache keeps
    dtype : of the weights, the cache and the forward
    max_batch : sequences that run at a time (vLLM's max_num_seqs)
    max_model_len : the longest prompt + completion; None: the model's context
    max_prompt : the longest prompt; the pool must hold it whole. None: max_model_len
    kv_cache_gb : GiB for the cache; None: on a GPU by `gpu_memory_utilization`, on a CPU what is needed, at most 1
    gpu_memory_utilization : share of the GPU's memory for weights and cache together
    block_size : tokens of a cache block; None: the platform's own choice, 32 on a CPU
    max_num_batched_tokens : tokens of a forward; a longer prompt is prefilled in chunks. None: vLLM's choice
    tensor_parallel : processes that share the model's heads
    multiprocess : run the engine in a process of its own (always so for tensor_parallel > 1)
    progress : show a progress bar
    exact : in float32 on a CPU, compute as the trainer does, to the last bit, rather than by vLLM's own kernels
    sleep_mode : let `sleep` give a GPU's memory back; nothing on a CPU

    Raises
    ------
    ValueError
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
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be >= 1, got {max_batch}")
        from rollout.vllm import compat

        compat.check_version()
        compat.prepare_environment()
        self.separate = multiprocess or tensor_parallel > 1
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.separate else "0"
        import vllm

        compat.register()
        self.config = config = load_config(str(model))
        layers, kv_heads, head_dim = cache_shape(config)
        compat.refuse_head_size(head_dim)
        if kv_heads % tensor_parallel:
            raise ValueError(f"tensor_parallel {tensor_parallel} does not divide the model's {kv_heads} kv heads")
        if not self.separate and VLLMEngine.in_process is not None and VLLMEngine.in_process() is not None:
            raise ValueError("this process has a vllm engine already; close it first")
        self.policy, self.max_batch, self.progress = policy, max_batch, progress
        self.shape = layers, kv_heads
        sleeping = compat.sleep_arguments(sleep_mode)
        self.can_sleep = bool(sleeping)
        self.eos = _stop_tokens(model, config)
        block = block_size or compat.default_block_size()
        longest = max_model_len or config.max_position_embeddings
        held = policy.schedule.most_held(max_prompt or longest, longest)
        entries = max_batch * (held + (block or 0)) + 2 * (block or 0)  # one block more for vLLM itself
        need = 2 * layers * kv_heads * head_dim * entries * (4 if dtype == "float32" else 2)
        optional = {
            "max_model_len": max_model_len,
            "block_size": block,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "max_num_seqs": max_batch,
            "tensor_parallel_size": tensor_parallel,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": 0,
            "worker_extension_cls": "rollout.vllm.worker.WorkerExtension",
            **{name: value for name, value in optional.items() if value is not None},
            **compat.memory_arguments(kv_cache_gb, gpu_memory_utilization, need),
            **compat.launch_arguments(self.separate),
            **sleeping,
            **compat.engine_arguments(policy, dtype=dtype, record=True, max_prompt=max_prompt, exact=exact),
        }
        self.had_group = distributed.is_available() and distributed.is_initialized()
        with compat.undisturbed(self.had_group):
            self.llm: Any = vllm.LLM(**arguments)
        if not self.separate:
            VLLMEngine.in_process = weakref.ref(self)
        self.max_model_len: int = self.llm.llm_engine.model_config.max_model_len
        self.max_prompt = self.max_model_len if max_prompt is None else min(max_prompt, self.max_model_len)

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Rollout]:
        """See `Engine.generate`. A sequence whose cache was recomputed after a preemption is sampled anew."""
        self._check(prompts, sampling)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        times: Counter[tuple[int, ...]] = Counter()
        requests: list[Request] = []
        for prompt in prompts:
            key = tuple(prompt)
            for _ in range(sampling.n):
                requests.append((list(prompt), sequence_seed(seed, key, times[key])))
                times[key] += 1  # the same prompt given twice is sampled anew
        return self._sampled(requests, sampling)

    def simulate(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Rollout]:
        """See `Engine.simulate`."""
        check_given(prompts, completions)
        sampling = SamplingConfig(max(map(len, completions), default=1), temperature=temperature, ignore_eos=True)
        for prompt, completion in zip(prompts, completions, strict=True):
            self._check([prompt], SamplingConfig(len(completion)))
        pairs = zip(prompts, completions, strict=True)
        return self._sampled([(list(prompt), list(completion)) for prompt, completion in pairs], sampling)

    def _sampled(self, requests: list[Request], sampling: SamplingConfig) -> list[Rollout]:
        rollouts: list[Rollout | None] = [None] * len(requests)
        waiting = list(range(len(requests)))
        hidden = None if self.progress else True  # None: hidden where stderr is not a terminal
        with tqdm(total=len(requests), desc="rollout", unit="seq", leave=False, disable=hidden) as bar:
            for _ in range(ATTEMPTS):
                for place, output in self._run([(i, *requests[i]) for i in waiting], sampling):
                    rollouts[place] = self._rollout(requests[place][0], output)
                    bar.update(rollouts[place] is not None)
                self._set_logprobs(rollouts)
                waiting = [i for i in waiting if rollouts[i] is None]
                if not waiting:
                    return rollouts  # type: ignore[return-value]
        raise RuntimeError(
            f"{len(waiting)} sequences were preempted {ATTEMPTS} times; lower max_batch or raise kv_cache_gb"
        )

    def _check(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> None:
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {i} is empty; a prompt needs at least one token")
            if len(prompt) > self.max_prompt:
                raise ValueError(f"prompt {i} has {len(prompt)} tokens, and max_prompt is {self.max_prompt}")
            if len(prompt) + sampling.max_tokens > self.max_model_len:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens: with max_tokens {sampling.max_tokens} that is more than "
                    f"max_model_len {self.max_model_len}"
                )

    def _run(
        self, requests: list[tuple[int, list[int], int | list[int]]], sampling: SamplingConfig
    ) -> Iterable[tuple[int, Any]]:
        """(place, vLLM's output) as sequences finish."""
        import vllm

        stop = self.eos if sampling.stop_token_ids is None else list(sampling.stop_token_ids)
        if sampling.stop_token_ids is None and sampling.ignore_eos:
            stop = []
        engine = self.llm.llm_engine
        self.llm.collective_rpc("begin_sampling", args=(dataclasses.asdict(sampling),))
        for place, prompt, source in requests:
            count, name = (len(source), "given") if isinstance(source, list) else (sampling.max_tokens, "seed")
            parameters = vllm.SamplingParams(
                max_tokens=count,
                temperature=1.0,  # the true one, top_p, top_k and the seed are the workers' (worker.SequenceSampler)
                extra_args={name: source},
                stop_token_ids=stop,
                ignore_eos=True,  # which tokens stop is said above
                detokenize=False,
                output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(place), {"prompt_token_ids": prompt}, parameters)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield int(output.request_id), output
        finally:
            if engine.has_unfinished_requests():  # interrupted: leave nothing behind
                engine.abort_request([str(place) for place, _, _ in requests])

    def _rollout(self, prompt: list[int], output: Any) -> Rollout | None:
        """Still without log-probs. None for a preempted sequence: its record does not tell what it attended to."""
        sampled = output.outputs[0]
        completion = list(sampled.token_ids)
        record = output.kv_transfer_params or {"evict_at": None}
        if record.get("preempted"):
            return None
        length = len(prompt) + len(completion)
        if record["evict_at"] is None:
            trace = EvictionTrace.dense(*self.shape, length)
        else:
            evict_at = np.frombuffer(record["evict_at"], np.int32).reshape(record["shape"])
            trace = EvictionTrace.recorded(torch.from_numpy(evict_at.copy()))
        return Rollout(prompt, completion, [], [], trace, sampled.finish_reason)

    def _set_logprobs(self, rollouts: Sequence[Rollout | None]) -> None:
        """What the workers have noted, each the same: all of them sample."""
        for request_id, drawn in self.llm.collective_rpc("logprobs")[0].items():
            rollout = rollouts[int(request_id.split("-")[0])]  # vLLM appends a suffix to our ids
            if rollout is not None:
                pairs = drawn[-len(rollout.completion_ids) :]
                rollout.logprobs, rollout.model_logprobs = map(list, zip(*pairs, strict=True))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, by the names of the Hugging Face checkpoint.

        ValueError for one left out, an unknown name or a wrong shape; some are then replaced, and some are not.
        """
        checked = self._checked(weights)
        if not self.separate:
            self._replace(checked)
            return
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.safetensors"
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in checked}, file)
            self._replace(str(file))

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, held against the model: vLLM fuses weights, and would not miss one of those."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        shapes = {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}
        missing = {name for name, _ in model.named_parameters()}
        for name, tensor in weights:
            if name not in shapes:
                raise ValueError(f"the engine cannot take the weights: its model has no {name!r}")
            if tensor.shape != shapes[name]:
                wrong = f"{name!r} is {list(shapes[name])}, got {list(tensor.shape)}"
                raise ValueError(f"the engine cannot take the weights: {wrong}")
            missing.discard(name)
            yield name, tensor
        if missing:
            raise ValueError(f"the engine cannot take the weights: not handed over: {', '.join(sorted(missing)[:3])}")

    def _replace(self, source: Any) -> None:
        self.llm.collective_rpc("replace_weights", args=(source,))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory back between two `generate`; nothing without `sleep_mode`.

        level : 1 keeps the weights in host memory, 2 drops them: `load_weights` before the next `generate`
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if self.can_sleep:
            self.llm.sleep(level=level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again: of "weights" (as `load_weights` needs it), of "kv_cache", or None, of both."""
        if self.can_sleep:
            self.llm.wake_up(None if tags is None else list(tags))

    def close(self) -> None:
        """Let the engine, its cache and its processes go."""
        from rollout.vllm import compat

        if getattr(self, "llm", None) is not None:
            with compat.undisturbed(self.had_group):
                self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            if not self.separate:
                VLLMEngine.in_process = None
            gc.collect()


def _stop_tokens(model: str | Path, config: Any) -> list[int]:
    """The end-of-sequence tokens that the model's directory names."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(str(model)).eos_token_id
    except OSError:
        eos = None
    eos = config.eos_token_id if eos is None else eos
    return list(eos) if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
