"""GRPO with tools and environments: conversations of several turns in the place of single completions.

TRL's are the schemas of tools in the prompt, the parsing of a turn, the tokens around an answer, environments and
rewards. Ours are the engine and the loop (rollout/turns.py). A conversation is a row of TRL's batch: its completion has
all tokens after the prompt, and `tool_mask` says which were sampled; so loss and advantages need nothing further.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from transformers.utils import get_json_schema
from trl import chat_template_utils as templates

from rollout.turns import Conversation, Message, RowTrace, ToolLoop, sample_turns, turn_lengths
from sparse_rl.attention.branches import branched_rows
from sparse_rl.attention.families import context_length, state_layers
from sparse_rl.errors import UserError, reason
from sparse_rl.experts import has_experts
from sparse_rl.models.load import base_of
from sparse_rl.trace import EvictionTrace

logger = logging.getLogger("sparse_rl")


# ---- checks before a model is loaded ---------------------------------------------------------------------------------


def check_tools(
    tools: Sequence[Callable], environments: Any, tokenizer: Any, rewards: int, keys: tuple[str, str]
) -> None:
    """Raise UserError if TRL cannot use these tools with this tokenizer.

    environments : class (or callable that makes an environment), or a mapping of names to such; None for none
    rewards : number of reward functions besides those of the environments
    keys : names of the settings in errors, for tools and for environments
    """
    single = [] if environments is None else [environments]
    own, of_class = False, list[Any]()
    for factory in environments.values() if isinstance(environments, Mapping) else single:
        members = dict(inspect.getmembers(factory, inspect.isfunction)) if isinstance(factory, type) else {}
        if "reset" not in members and (isinstance(factory, type) or not callable(factory)):
            name = getattr(factory, "__name__", factory)
            raise UserError(f"{name} has no method reset, with which a conversation begins", keys[1])
        own |= "get_reward" in members or not members
        of_class += tools_of(factory)
    for key, functions in zip(keys, (tools, of_class), strict=True):
        for function in functions:
            try:
                get_json_schema(function)
            except Exception as error:  # no docstring, no type hints, or a docstring of another style
                name = getattr(function, "__name__", repr(function))
                wrong = f"{name} needs type hints and a docstring with its Args: {reason(error)}"
                raise UserError(wrong, key) from error
    names = [getattr(tool, "__name__", "") for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two tools are called {twice}; rename one", keys[0])
    if not rewards and not own:
        raise UserError("there is no reward: name one, or use an environment with a method get_reward", "rewards")
    parsing_template(tokenizer, keys[0] if tools else keys[1])


def tools_of(factory: Any) -> list[Callable]:
    """Return the tools of an environment's class; [] for another callable that makes an environment."""
    members = inspect.getmembers(factory, inspect.isfunction) if isinstance(factory, type) else []
    own = "reset", "get_reward"
    return [MethodType(method, factory) for name, method in members if not name.startswith("_") and name not in own]


def schema_tokens(tokenizer: Any, tools: Sequence[Sequence[Callable]], **options: Any) -> int:
    """Return the number of tokens that the schemas of tools add to a prompt: the most of several lists of tools.

    options : arguments of apply_chat_template
    """
    text = [{"role": "user", "content": ""}]
    render = partial(tokenizer.apply_chat_template, text, tokenize=True, return_dict=False, **options)
    return max(len(render(tools=[*some] or None)) for some in tools) - len(render())


def parsing_template(tokenizer: Any, key: str) -> str | None:
    """Prepare a tokenizer for the parsing of tool calls. Returns the chat template to use; None: the tokenizer's own.

    Raises UserError at `key` if TRL does not know the tokenizer's template, or if it cannot write tool calls.
    """
    if not templates.supports_tool_calling(tokenizer):
        raise UserError("the tokenizer's chat template cannot write tool calls and their answers", key)
    try:
        if not any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
            templates.add_response_schema(tokenizer)
        kept = templates.is_chat_template_prefix_preserving(tokenizer)
        return None if kept else templates.get_training_chat_template(tokenizer)
    except Exception as error:  # TRL knows some families of templates alone
        wrong = f"TRL cannot parse tool calls of the tokenizer's chat template: {reason(error)}"
        raise UserError(wrong, key) from error


# ---- sampling --------------------------------------------------------------------------------------------------------


class ToolSampling:
    """Samples the conversations of a trainer's batch. turns : as in a cache policy, kept or prefilled"""

    def __init__(self, trainer: Any, turns: str) -> None:
        self.trainer, self.kept = trainer, turns == "kept"
        self.late = 0  # number of late tools since the start

    def check_engine(self) -> None:
        """Raise UserError if the engine, or the model, does not go with conversations."""
        if not hasattr(self.trainer.engine, "converse"):
            name = type(self.trainer.engine).__name__
            raise UserError(f"the engine {name} samples no conversations of several turns; use hf", "rollout.engine")
        model = base_of(self.trainer.model)
        if not self.kept and (has_experts(model) or state_layers(model.config)):
            wrong = "prefilled turns are not replayed for a model with experts or with layers that have a state"
            raise UserError(f"{wrong}; use kept", "cache.turns")

    def lengths(self, prompt: int) -> tuple[int, int]:
        """Return `turn_lengths`. prompt : maximum number of tokens of a prompt without the schemas of tools"""
        trainer = self.trainer
        options = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        tools = trainer._env_tools.values() if trainer.environment_factories is not None else [trainer.tools]
        schemas = schema_tokens(trainer.processing_class, list(tools), **options)
        return turn_lengths(trainer.sampler.policy, prompt + schemas, trainer.sampling.max_tokens)

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[Conversation]:
        """Return conversations with these prompts (token ids), after the first turn of each."""
        conversations = [Conversation(list(prompt), self.kept) for prompt in prompts]
        limits = [self.trainer.sampling.max_tokens] * len(conversations)
        with self.trainer.clock.timed("generate"):
            self._sample(conversations, [[] for _ in conversations], limits)
        return conversations

    def _sample(self, conversations: list[Conversation], read: list[list[int]], limits: list[int]) -> None:
        trainer = self.trainer
        seed = trainer.sampling_seed(None if trainer.mode == "eval" else trainer.generations)
        sampling = dataclasses.replace(trainer.sampling, seed=seed)
        with trainer.refused_at_this_step():
            sample_turns(trainer.engine, conversations, read, limits, sampling)

    def go_on(self, conversations: Sequence[Conversation]) -> tuple[int, int]:
        """Run tools and sample turns until no conversation calls one. Returns the numbers of calls and of failures."""
        trainer, metrics = self.trainer, self.trainer._metrics[self.trainer.mode]
        named = trainer._batch_environments if trainer.environment_factories is not None else None

        def parse(row: int, before: list[int], ids: list[int]) -> Message:
            schemas = trainer.tools if named is None else trainer._env_tools[named[row]]
            return cast(Message, templates.parse_response(trainer._tokenizer, ids, prefix=before, tools=schemas))

        seconds, longest = trainer.args.sparse.tool_seconds, trainer.sampling.max_tokens
        limits = seconds, trainer.max_tool_calling_iterations, longest, context_length(base_of(trainer.model).config)
        loop = ToolLoop(parse, trainer._get_tool_suffix_ids, *limits, getattr(trainer, "async_loop", None), self.late)
        tools = [{**a, **b} for a, b in zip(trainer._sync_tool_dicts, trainer._async_tool_dicts, strict=True)]
        with trainer.clock.timed("generate"), torch.random.fork_rng(devices=[]):  # tools draw in no fixed order
            late = loop.run(conversations, tools, self._sample)
        self.late = loop.late
        for row in late:  # its environment is still in use: no other conversation may have it, and no reward read it
            logger.warning("a tool did not answer within %g seconds; its conversation ends", seconds)
            if named is not None:
                pool = trainer._environment_pool[named[row]]
                pool[:] = [environment for environment in pool if environment is not trainer.environments[row]]
                trainer.environments[row] = None
        counts = [sum(c.turns for c in conversations), len(conversations), len(late)]
        local = torch.tensor([counts], device=trainer.accelerator.device)
        turns, rows, ended = trainer.accelerator.gather(local).sum(0).tolist()
        metrics["turns/mean"].append(turns / rows)
        metrics["tools/late"].append(float(ended))
        return loop.calls, loop.failures


# ---- training --------------------------------------------------------------------------------------------------------


def replay_turns(trainer: Any, model: Any, ids: Tensor, starts: Tensor, traces: Sequence[Any]) -> Any:
    """Run a model on rows whose turns were prefilled, as rows with branches (sparse_rl/attention/branches.py).

    ids : token ids, padded on both sides, int64 [rows, width]
    starts : column of each row's first token, int64 [rows, 1]
    traces : (prompt tokens, trace) of each turn of each row

    Returns the model's output with log_probs and entropy of the sampled tokens, float [rows, width - 1]; 0 for others.
    """
    rows = branched_rows(traces, ids.device, trainer.args.attention_kernel)
    made = ids.gather(1, (rows.tokens + starts).clamp(max=ids.shape[1] - 1))
    out = trainer._forward(model, made, rows.tokens, made.masked_fill(~rows.scored, -100), rows.view)
    row, column = rows.scored.nonzero(as_tuple=True)
    places = row, starts[row, 0] + rows.tokens[row, column] - 1
    for name in ("log_probs", "entropy"):
        if (value := getattr(out, name, None)) is not None:
            spread = value.new_zeros(len(ids), ids.shape[1] - 1)
            setattr(out, name, spread.index_put(places, value[row, column - 1]))
    return out


def trace_state(trace: RowTrace) -> Any:
    """Return a row's trace as plain data and tensors, for a checkpoint."""
    if isinstance(trace, EvictionTrace):
        return trace.sections
    return [(prompt, turn.sections) for prompt, turn in trace]


def trace_of_state(state: Any) -> RowTrace:
    if isinstance(state, Mapping):
        return EvictionTrace.from_state(state)
    return tuple((prompt, EvictionTrace.from_state(sections)) for prompt, sections in state)
