"""Conversations with tools for evaluations and rollouts: what TRL's GRPOTrainer does around our loop, without training.

How a conversation begins, the schemas in its prompt, the parsing of a turn and the tokens around an answer are as in
training (grpo/turns.py), so a model is measured as it was trained. Nothing here knows what the samples are for.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from trl import chat_template_utils as templates
from trl.trainer.utils import start_event_loop_in_daemon

from rollout.config import SamplingConfig
from rollout.engine import Engine
from rollout.sampling import NotFiniteLogprobError
from rollout.turns import Conversation, ToolLoop, sample_turns
from sparse_rl.errors import UserError, reason
from trainer.grpo.trainer import GRPOTrainer
from trainer.grpo.turns import parsing_template


@dataclass
class ToolUse:
    """Samples conversations about the rows of a dataset, between whose turns tools are called.

    tools, environment_factory : as GRPOTrainer takes them
    tokenizer, thinking : the model's tokenizer, and the value of enable_thinking for its chat template
    rounds, seconds : maximum number of times that a conversation calls tools, and the time limit of a call
    longest : maximum number of tokens of a conversation after its prompt
    window : context length of the model in tokens; None means unlimited
    pools : environments by name, to use again
    late, loop : number of calls without an answer in time so far, and the event loop of asynchronous tools
    """

    rows: Sequence[Mapping[str, Any]]
    tools: Sequence[Callable]
    environment_factory: Any
    tokenizer: Any
    thinking: bool | None
    rounds: int
    seconds: float
    longest: int
    window: int | None
    pools: dict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))
    late: int = 0
    loop: Any = None

    def __post_init__(self) -> None:
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        names = {"processing_class": self.tokenizer, "_tokenizer": self.tokenizer, "_is_vlm": False}
        template = parsing_template(self.tokenizer, "tools")
        # all that TRL's method for the tokens around answers reads of its trainer
        self.rendering: Any = SimpleNamespace(chat_template=template, chat_template_kwargs=options, **names)

    def prompts(self) -> list[list[int]]:
        """Return the prompt of each row as token ids, with schemas of tools and what an environment's reset adds."""
        return [self._begin(row, Counter(), True)[0].prompt for row in self.rows]

    def converse(self, engine: Engine, places: Sequence[int], sampling: SamplingConfig) -> list[Conversation]:
        """Sample `sampling.n` conversations about each of some rows, row by row. The next call uses their environments
        again; that of a conversation with a late tool is None."""
        used, kept = Counter[Any](), engine.policy.config.turns == "kept"
        begun = [self._begin(self.rows[place], used, kept) for place in places for _ in range(sampling.n)]
        conversations, tools = [one for one, _ in begun], [named for _, named in begun]

        def sample(some: Sequence[Conversation], read: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
            try:
                sample_turns(engine, some, read, limits, replace(sampling, n=1))
            except NotFiniteLogprobError as error:
                place = next(i for i, one in enumerate(conversations) if one is some[error.prompt])
                raise error.of_prompt(place // sampling.n) from error

        def parse(place: int, before: list[int], ids: list[int]) -> Any:
            schemas: list[Any] = list(tools[place].values())
            return templates.parse_response(self.rendering._tokenizer, ids, prefix=before, tools=schemas)

        sample(conversations, [[] for _ in begun], [self.longest] * len(begun))
        if self.loop is None and any(inspect.iscoroutinefunction(tool) for some in tools for tool in some.values()):
            self.loop = start_event_loop_in_daemon("tools")[1]
        suffix: Any = lambda answers: GRPOTrainer._get_tool_suffix_ids(self.rendering, answers)  # noqa: E731
        limits = self.seconds, self.rounds, self.longest, self.window
        talk = ToolLoop(parse, suffix, *limits, self.loop, late=self.late)
        for place in talk.run(conversations, tools, sample):
            logging.getLogger("sparse_rl").warning("a tool did not answer in time; its conversation ends")
            for pool in self.pools.values():
                pool[:] = [one for one in pool if one is not conversations[place].environment]
            conversations[place].environment = None
        self.late = talk.late
        return conversations

    def _begin(
        self, row: Mapping[str, Any], used: Counter[Any], kept: bool
    ) -> tuple[Conversation, dict[str, Callable]]:
        """Return a conversation about a row, and its tools by name.

        used : number of environments of each name that other conversations have

        Raises UserError if the row does not suit, or its environment fails.
        """
        prompt, given, factory, name = row["prompt"], dict(row), self.environment_factory, None
        if isinstance(prompt, str):
            raise UserError("with tools, prompts must be chat messages, but they are text", "data")
        if isinstance(factory, Mapping):
            name, named = given.pop("environment", None), factory
            if (factory := named.get(name)) is None:
                raise UserError(f"a row has environment {name!r}, not one of {', '.join(named)}", "environment")
        tools, environment = list(self.tools), None
        if factory is not None:
            pool = self.pools[name]
            try:
                if used[name] == len(pool):
                    pool.append(factory())
                environment = pool[used[name]]
                seen = environment.reset(**given)
            except Exception as error:
                named = name or getattr(factory, "__name__", factory)
                raise UserError(f"{named} cannot be reset: {reason(error)}", "environment") from error
            used[name] += 1
            if seen is not None:
                prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + seen}]
            public = (n for n, _ in inspect.getmembers(type(environment), inspect.isfunction) if not n.startswith("_"))
            tools += [getattr(environment, n) for n in public if n not in ("reset", "get_reward")]
        of = self.rendering
        options = {"chat_template": of.chat_template, **of.chat_template_kwargs, "return_dict": False}
        ids = of.processing_class.apply_chat_template(
            prompt, tools=tools or None, add_generation_prompt=True, tokenize=True, **options
        )
        if self.window is not None and len(ids) + self.longest > self.window:
            wrong = f"after a prompt of {len(ids):,} with the schemas of tools, exceed the model's context length"
            raise UserError(f"{self.longest:,} tokens, {wrong} of {self.window:,}; lower this", "max_completion_length")
        return Conversation(list(ids), kept, environment=environment), {tool.__name__: tool for tool in tools}
