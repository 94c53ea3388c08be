"""Requests that a server refuses: vLLM would let a client crash the engine, or go round the cache's policy."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import wraps
from itertools import accumulate
from typing import Any, NoReturn

from vllm.exceptions import GenerationError, VLLMValidationError

from rollout.vllm.compat.arguments import KEY, cache_config, on_cpu
from rollout.vllm.compat.finite import REASON

NOT_FINITE = (
    "the model's log-probabilities for this request are not finite: its weights, or its activations in this dtype, are "
    "NaN or infinite; serve a checkpoint that is whole, or another --dtype"
)
DEEPEST = 100  # levels of a JSON schema


class RefusedError(VLLMValidationError, ValueError):
    """Status 400: the client routes make it of a VLLMValidationError, the development routes of a ValueError."""


def refuse_what_stops_the_engine() -> None:
    """Answer with status 400 to requests that vLLM lets through, at which its engine dies, stands still or gives up,
    and with status 500 to one whose log-probs are not finite (finite.py).
    """
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    validate_prompt, validate_parameters = InputProcessor._validate_model_input, InputProcessor._validate_params
    validate_structure = SamplingParams._validate_structured_outputs
    generate: Any = AsyncLLM.generate

    def validate_tokens(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        """A token that the tokenizer has and the model has not would crash the engine."""
        validate_prompt(self, prompt_input, prompt_type)
        largest = max(prompt_input.get("prompt_token_ids") or (0,))
        if largest >= self.model_config.get_vocab_size():
            raise RefusedError(f"Token id {largest} is out of vocabulary")

    def validate_what_is_ours(self: Any, params: Any, supported_tasks: Any) -> None:
        """Refuse KEY, which workers take for ours, and a seed that would crash a CPU's engine (seeds.py)."""
        validate_parameters(self, params, supported_tasks)
        if KEY in (getattr(params, "extra_args", None) or {}):
            raise RefusedError(f"vllm_xargs: {KEY!r} is a name of the server's own")
        seeded = getattr(params, "seed", None) is not None and params.temperature > 0
        if seeded and self.speculative_config is not None and on_cpu():
            raise RefusedError("seed: vLLM keeps none on a CPU with speculative decoding; leave one of the two out")

    def validate_depth(self: Any, model_config: Any, structured_outputs_config: Any, tokenizer: Any) -> None:
        """The time that a schema takes to compile grows with its depth so fast that a deep one holds everybody up."""
        asked = self.structured_outputs
        if asked is not None and _depth(asked.json or asked.structural_tag) > DEEPEST:
            raise RefusedError(f"the JSON schema is nested deeper than {DEEPEST} levels")
        validate_structure(self, model_config, structured_outputs_config, tokenizer)

    def raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        """The engine gives a request up where no token fits the structure that it asks for: {"$ref": "#"}."""
        if finish_reason == "error":
            raise RefusedError("no text fits the structure that the request asks for")

    async def generate_or_fail(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """All endpoints ask here; behind it, a stream would drop an error without a token."""
        outputs = generate(self, *args, **kwargs)
        try:
            async for output in outputs:
                if any((one.finish_reason, one.stop_reason) == ("error", REASON) for one in output.outputs):
                    raise GenerationError(NOT_FINITE)
                yield output
        finally:
            await outputs.aclose()

    InputProcessor._validate_model_input = validate_tokens  # type: ignore[method-assign]
    InputProcessor._validate_params = validate_what_is_ours  # type: ignore[method-assign]
    SamplingParams._validate_structured_outputs = validate_depth  # type: ignore[method-assign]
    GenerateBaseServing._raise_if_error = raise_if_error  # type: ignore[method-assign]
    AsyncLLM.generate = generate_or_fail  # type: ignore[assignment, method-assign]


def refuse_what_goes_round_the_policy() -> None:
    """Answer with status 400 to what has the engine prefill again, densely, what it had sampled of a request.

    Nothing would be evicted then, or the wrong entries. A new turn of a chat is a new prompt, and is served.
    """
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.async_llm import AsyncLLM

    pause, reset, sleep = AsyncLLM.pause_generation, AsyncLLM.reset_prefix_cache, AsyncLLM.sleep
    forgets = "where the cache evicts, running requests cannot be prefilled anew; let them end first"

    def beam_search(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """All routes ask here, before they answer. Each step of a beam would be a request of its own."""
        raise RefusedError(
            "use_beam_search: beam search is not served under a cache that evicts, as each of its steps prefills the "
            "whole text anew; serve with --cache policy=full, or leave it out"
        )

    async def pause_generation(self: Any, *, mode: Any = "abort", clear_cache: bool = True, **more: Any) -> None:
        if mode == "keep" and clear_cache:
            raise RefusedError(f"mode=keep with clear_cache: {forgets}")
        await pause(self, mode=mode, clear_cache=clear_cache, **more)

    async def reset_prefix_cache(
        self: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests:
            raise RefusedError(f"reset_running_requests: {forgets}")
        return await reset(self, reset_running_requests, reset_connector)

    async def sleep_once_idle(self: Any, level: int = 1, mode: Any = "abort") -> None:
        if mode == "keep" and level >= 1:
            raise RefusedError(f"mode=keep: {forgets}")
        await sleep(self, level, mode)

    BeamSearchOnlineMixin.beam_search = beam_search  # type: ignore[assignment, method-assign]
    AsyncLLM.pause_generation = pause_generation  # type: ignore[assignment, method-assign]
    AsyncLLM.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]
    AsyncLLM.sleep = sleep_once_idle  # type: ignore[method-assign]


def refuse_input_sessions() -> None:
    """Answer with status 400 to a prompt that comes in pieces, each behind what was sampled of those before.

    vLLM keeps its cache and schedules it again, which our connectors would take for a new request. In every process,
    for every engine whose places in the cache are ours.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    process: Any = InputProcessor.process_inputs

    @wraps(process)
    def process_whole_prompts(self: Any, *args: Any, resumable: bool = False, **kwargs: Any) -> Any:
        if resumable and (config := cache_config(self.vllm_config)) is not None and config.physical:
            raise RefusedError("an input session cannot be served where the cache evicts, or behind a context")
        return process(self, *args, resumable=resumable, **kwargs)

    InputProcessor.process_inputs = process_whole_prompts  # type: ignore[method-assign]


def _depth(schema: Any) -> int:
    """How deep a schema is nested, as a value or as text; without recursion."""
    if isinstance(schema, str):
        depths = accumulate((c in "{[") - (c in "}]") for c in re.sub(r'"(?:\\.|[^"\\])*"', "", schema))
        return max(depths, default=0)
    depth, level = 0, [schema]
    while level := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth
