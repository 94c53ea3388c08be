"""Requests that a server refuses, because with plain vLLM they would crash the engine or bypass the cache policy."""

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
    "the model's log-probabilities for this request are not finite: the model's weights or activations are NaN or "
    "infinite; serve an undamaged checkpoint, or use another --dtype"
)
DEEPEST = 100  # maximum nesting of a JSON schema


class RefusedError(VLLMValidationError, ValueError):
    """Answered with status 400. Client routes expect a VLLMValidationError, development routes a ValueError."""


def refuse_what_stops_the_engine() -> None:
    """Make the server refuse requests with which vLLM's engine would crash, hang or report an error (status 400).

    Requests whose log-probs are not finite (finite.py) get status 500.
    """
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    validate_prompt, validate_parameters = InputProcessor._validate_model_input, InputProcessor._validate_params
    validate_structure = SamplingParams._validate_structured_outputs
    generate: Any = AsyncLLM.generate

    def validate_tokens(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        """Refuse a token that is in the tokenizer but not in the model, because it would crash the engine."""
        validate_prompt(self, prompt_input, prompt_type)
        largest = max(prompt_input.get("prompt_token_ids") or (0,))
        if largest >= self.model_config.get_vocab_size():
            raise RefusedError(f"Token id {largest} is out of vocabulary")

    def validate_what_is_ours(self: Any, params: Any, supported_tasks: Any) -> None:
        """Refuse extra_args with KEY, which workers would take for ours, and seeds that crash the engine (seeds.py)."""
        validate_parameters(self, params, supported_tasks)
        if KEY in (getattr(params, "extra_args", None) or {}):
            raise RefusedError(f"vllm_xargs: the name {KEY!r} is reserved for the server; leave it out")
        seeded = getattr(params, "seed", None) is not None and params.temperature > 0
        if seeded and self.speculative_config is not None and on_cpu():
            raise RefusedError(
                "seed: vLLM does not support a seed on a CPU with speculative decoding; leave one of the two out"
            )

    def validate_depth(self: Any, model_config: Any, structured_outputs_config: Any, tokenizer: Any) -> None:
        """Refuse a deeply nested schema: its compilation would block all other requests for a long time."""
        structure = self.structured_outputs
        if structure is not None and _depth(structure.json or structure.structural_tag) > DEEPEST:
            raise RefusedError(f"the JSON schema is nested deeper than {DEEPEST} levels")
        validate_structure(self, model_config, structured_outputs_config, tokenizer)

    def raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        """Refuse a request whose schema no token fits, such as {"$ref": "#"}: the engine ends it with an error."""
        if finish_reason == "error":
            raise RefusedError("no text fits the schema or grammar of the request; change it")

    async def generate_or_fail(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Raise an error if log-probs were not finite. Later code would drop the error of a stream without tokens."""
        outputs = generate(self, *args, **kwargs)
        try:
            async for output in outputs:
                if any((sample.finish_reason, sample.stop_reason) == ("error", REASON) for sample in output.outputs):
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
    """Make the server refuse calls after which the engine would prefill sampled tokens again, densely (status 400).

    The wrong entries, or none, would then be evicted. A new turn of a chat is a new prompt, and is served.
    """
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.async_llm import AsyncLLM

    pause, reset, sleep = AsyncLLM.pause_generation, AsyncLLM.reset_prefix_cache, AsyncLLM.sleep
    reason = "if the cache evicts, running requests cannot be prefilled again; let them end first"

    def beam_search(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse beam search, because each of its steps would be a new request. All routes call this first."""
        raise RefusedError(
            "use_beam_search: beam search is not served under a cache that evicts, because each of its steps prefills "
            "the whole text again; leave it out, or serve with --cache policy=full"
        )

    async def pause_generation(self: Any, *, mode: Any = "abort", clear_cache: bool = True, **more: Any) -> None:
        if mode == "keep" and clear_cache:
            raise RefusedError(f"mode=keep with clear_cache: {reason}")
        await pause(self, mode=mode, clear_cache=clear_cache, **more)

    async def reset_prefix_cache(
        self: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests:
            raise RefusedError(f"reset_running_requests: {reason}")
        return await reset(self, reset_running_requests, reset_connector)

    async def sleep_once_idle(self: Any, level: int = 1, mode: Any = "abort") -> None:
        if mode == "keep" and level >= 1:
            raise RefusedError(f"mode=keep: {reason}")
        await sleep(self, level, mode)

    BeamSearchOnlineMixin.beam_search = beam_search  # type: ignore[assignment, method-assign]
    AsyncLLM.pause_generation = pause_generation  # type: ignore[assignment, method-assign]
    AsyncLLM.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]
    AsyncLLM.sleep = sleep_once_idle  # type: ignore[method-assign]


def refuse_input_sessions() -> None:
    """Make engines in which our code assigns the slots of the cache refuse input sessions (status 400 in a server).

    In a session, a prompt is sent in pieces, each of which continues the tokens sampled before. For each piece, vLLM
    keeps the cache and schedules the session again, which our connectors would treat as a new request.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    process: Any = InputProcessor.process_inputs

    @wraps(process)
    def process_whole_prompts(self: Any, *args: Any, resumable: bool = False, **kwargs: Any) -> Any:
        if resumable and (config := cache_config(self.vllm_config)) is not None and config.physical:
            raise RefusedError("an input session cannot be served if the cache evicts or requests continue a context")
        return process(self, *args, resumable=resumable, **kwargs)

    InputProcessor.process_inputs = process_whole_prompts  # type: ignore[method-assign]


def _depth(schema: Any) -> int:
    """Return the nesting depth of a schema, given as a value or as text."""
    if isinstance(schema, str):
        depths = accumulate((c in "{[") - (c in "}]") for c in re.sub(r'"(?:\\.|[^"\\])*"', "", schema))
        return max(depths, default=0)
    depth, level = 0, [schema]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
