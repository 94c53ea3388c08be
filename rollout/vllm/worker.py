"""vLLM's worker with our sampler, and for our engine with further methods and a cache no larger than its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.context import Context
from rollout.context.cache import load_context
from rollout.vllm.compat.arguments import KEY, cache_config, on_cpu
from rollout.vllm.compat.paged import live_state, own_heads
from rollout.vllm.compat.plugin import keep_transformers_classes
from rollout.vllm.compat.runner import Runner
from rollout.vllm.compat.runner_v2 import RunnerV2
from rollout.vllm.sampling import Result, RunRecord, SequenceSampler, ServerRecord
from rollout.vllm.weights import ModelWeights, received
from sparse_rl.errors import NotFiniteError
from sparse_rl.files import open_tensors
from sparse_rl.methods.kvpop.scorers import head_digests
from sparse_rl.models.directory import SCORERS
from sparse_rl.models.load import load_config

if on_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]


class PolicyWorker(Worker):
    """vLLM's worker with our sampler; the worker of a server."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        self.runner = (RunnerV2 if self.use_v2_model_runner else Runner)(self.model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Remove requests that have ended, and add those that begin, before vLLM builds the attention metadata."""
        if (state := live_state()) is not None:
            step = scheduler_output.kv_connector_metadata
            state.keep(step.finished)
            state.begin(step.ended, step.begun)
            state.let_go(step.let_go)
        return super().execute_model(scheduler_output)


class EngineWorker(PolicyWorker):
    def determine_available_memory(self) -> int:
        """Return the bytes of the cache: vLLM's value, but at most the bytes that all sequences take at maximum length,
        and under a policy that evicts a prompt that is held for a group, plus one block for vLLM itself.
        """
        config = cache_config(self.vllm_config)
        sequences = self.vllm_config.scheduler_config.max_num_seqs + (
            config is not None and config.policy.schedule.evicts
        )
        specs = self.get_kv_cache_spec().values()
        most = sum(sequences * spec.max_memory_usage_bytes(self.vllm_config) + spec.page_size_bytes for spec in specs)
        if (configured := self.cache_config.kv_cache_memory_bytes) is not None:
            self.cache_config.kv_cache_memory_bytes = min(configured, most)
        return min(super().determine_available_memory(), most)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        if self.model_config.using_transformers_backend():
            keep_transformers_classes()
        super().load_model(*arguments, **options)
        self.runner.capture()
        self.runner.draw = SequenceSampler(self.runner, self.runner.draw.plain)

    def begin_run(self, sampling: dict[str, Any], live: Sequence[int]) -> None:
        """Begin a run. live : names of the conversations whose entries are kept; those of others are let go"""
        self._set_record(SamplingConfig(**sampling), RunRecord(), live)

    def take_results(self, lengths: dict[int, int]) -> list[Result]:
        """Return this rank's results, as `RunRecord.take` does. Raises NotFiniteError if a score was NaN on this rank:
        vLLM's tokens only show the NaN scores of rank 0.
        """
        if (state := live_state()) is not None and bool(state.failed.any()):
            raise NotFiniteError(f"{state.policy.name}: a NaN score; the model's keys or queries are not finite")
        return self.runner.draw.record.take(lengths)

    def end_run(self, live: Sequence[int]) -> None:
        self._set_record(SamplingConfig(1), None, live)

    def _set_record(self, sampling: SamplingConfig, record: RunRecord | None, live: Sequence[int]) -> None:
        self.runner.draw.begin_run(sampling, record)
        if (state := live_state()) is not None:
            state.record = record
            state.failed.zero_()
            state.keep_only(live)

    def hold_context(self, name: str, source: str | Context) -> None:
        """Keep a compacted context, or the one in a file, until another context gets the same name."""
        live_state().hold(name, load_context(source) if isinstance(source, str) else source)

    def receive_weights(self, path: str, places: list[list]) -> None:
        """Replace weights by those of another process, given the two values that `handed_over` yields."""
        self.replace_weights(received(path, places))

    def replace_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights of the model and the scorers, given as (name in a Hugging Face checkpoint, tensor). The kept
        entries of conversations are let go.
        """
        if (state := live_state()) is not None:
            state.keep_only(())
        scorers: dict[str, Tensor] = {}

        def of_vllm() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(f"{SCORERS}."):
                    scorers[name.removeprefix(f"{SCORERS}.")] = tensor.detach()
                else:
                    yield name, tensor.detach()

        with torch.no_grad():
            self.runner.model.load_weights(of_vllm())
            if scorers:
                state = live_state()
                state.scorers.load(scorers, own_heads(len(state.heads)))

    def scorer_digests(self) -> dict[str, list[str]]:
        """Return digests of the scorers' weights for this rank's kv heads, by stored name (`Engine.scorer_digests`)."""
        scorers = getattr(live_state(), "scorers", None)
        return {} if scorers is None else head_digests(scorers.by_name())


class ServingWorker(EngineWorker):
    """The worker of a server of rollouts (routes.py)."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        self.runner.draw.record = self.record = ServerRecord()

    def execute_model(self, scheduler_output: Any) -> Any:
        if (state := live_state()) is not None:
            state.record = self.record
        for request in scheduler_output.scheduled_new_reqs:
            settings = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY, {})
            if "place" in settings:
                self.record.admit(request.req_id, settings["place"])
        return super().execute_model(scheduler_output)

    def take_rollouts(self, lengths: dict[int, int], forgotten: list[int]) -> tuple[list[Result], int]:
        """Return this rank's results, as `ServerRecord.take` does, and the number of entries that the record still has;
        it forgets other places.
        """
        results = self.record.take(lengths)
        self.record.forget(forgotten)
        return results, sum(len(value) for value in vars(self.record).values() if isinstance(value, dict))

    def serve_weights(self, path: str, version: int) -> None:
        """Replace all weights by those of a safetensors file that the API server has checked; nothing runs."""
        self.record.version = -1
        config = cache_config(self.vllm_config)
        assert config is not None  # every server of rollouts has it (engine_arguments)
        weights = ModelWeights(load_config(self.model_config.model), config.policy)
        with open_tensors(path) as file:
            self.replace_weights(weights.checked((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        self.record.version = version
