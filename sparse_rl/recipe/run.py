"""The recipe of any kind, and the `Run` that a recipe resolves to: what is known before a model is loaded.

A kind of recipe is a dataclass whose fields are the keys of its YAML. It nests the configurations of its components
(trainer/config.py, rollout/config.py, ...); the keys of a `flat` field stand at the top level of the YAML. Its
methods derive facts from the keys, and build what the kind needs: a kind that trains builds its trainer.

    run = recipe.prepare()                 # or, for a training, prepare_training()
    with engines(run)(run.policies[0]) as engine: ...      # sampling.py
    trainer = recipe.make_trainer(run, folder)

A recipe is read and checked without torch, so this module imports torch, and what needs it, only inside functions.

"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar, cast

from rollout.config import SAMPLE_LIVE, SERVERS, RolloutConfig, SamplingConfig
from rollout.context.config import PromptCacheConfig, TrainedPromptCache
from sparse_rl.config import Configuration, PathText, PositiveInt, Seed, Text, as_mapping, dotted, flat, show
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.files import fingerprint
from sparse_rl.methods.config import FullConfig, PolicyConfig, TriAttentionConfig
from sparse_rl.progress import say, stage, warn
from sparse_rl.recipe.yaml_text import dump_yaml, parse_yaml
from trainer.config import LaunchConfig, LoraConfig, ReplayConfig, ScorersConfig, TrainingConfig, check_sampled

if TYPE_CHECKING:
    from rollout.recorded import RecordedRollouts
    from sparse_rl.policies.base import Policy

R = TypeVar("R", bound="Recipe", covariant=True)
C = TypeVar("C", bound="Recipe")
NOT_YAML = {"yaml": False}
SHOWN = 3  # rows with unreadable golds in a message


def command_of(kind: str) -> str:
    return kind if kind in ("eval", "perplexity", "budgets", "bench") else "train"


@dataclass(frozen=True)
class Run(Generic[R]):
    """A recipe, and facts about it. The fields from `rows` on are set only for a training run.

    recipe : the recipe, with the engine chosen and, for training, the attention kernel
    config : configuration of the recipe's model, or of `live`
    shape : shape of the cache of the layers without a sliding window: (layers, kv heads, head dim)
    policies : cache policies that the engine samples under
    tokenizer : tokenizer of the recipe's model; None if it was not loaded
    live : module in memory to sample from instead of the recipe's model
    findings : topic -> text, as `sparse-rl train --dry-run` prints them
    remarks : warnings about settings that are allowed but unwise
    skeleton : the model on the meta device, without memory
    rows, held_out : rows of the recipe's dataset, and of its validation dataset
    rewards : (functions, weights) of the recipe's rewards
    checkpoint : checkpoint from which the run resumes; None for a new run
    """

    recipe: R
    config: Any
    shape: tuple[int, int, int] = (0, 0, 0)
    policies: list[Policy] = field(default_factory=list)
    tokenizer: Any = None
    live: Any = None
    findings: Mapping[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    skeleton: Any = None
    rows: Any = None
    held_out: Any = None
    rewards: tuple[list[Callable], list[float]] = ([], [])
    checkpoint: Path | None = None

    @property
    def room(self) -> int | None:
        """Maximum number of prompt tokens that leaves room for a completion in the context length; None if unknown."""
        from sparse_rl.attention.families import context_length

        window = context_length(self.config)
        return None if window is None or self.recipe.rollout is None else window - self.recipe.sampling().max_tokens

    def with_data(self) -> Run[R]:
        """Return a copy with the rewards, and the rows of the datasets, of a recipe that trains."""
        recipe: Any = self.recipe
        room = self.room
        (key, specs), columns, sampled = recipe.named_rewards(), recipe.columns(), recipe.samples_behind_prompts()
        rewards = rewards_of(specs, key) if specs else self.rewards

        def rows_of(data: DataConfig, where: str) -> Any:
            from trainer.launch import once

            if data.traces:
                rows = read_recorded(data, self, where)
            else:
                rows = read_rows(data, self.tokenizer, columns, where, room if sampled else None)
            if isinstance(recipe, ToolsRecipe) and recipe.uses_tools:
                from rollout.turns import check_beginnings

                check_beginnings(recipe.environment, rows, where)
            once(f"golds of {where}", lambda: check_golds(rewards[0], rows, where))
            return rows

        rows, validation = rows_of(recipe.data, "data"), recipe.validation
        held_out = None if validation is None else rows_of(validation.limited_data(), "validation.data")
        return replace(self, rewards=rewards, rows=rows, held_out=held_out)

    def inputs(self) -> dict[str, str]:
        """Return the fingerprints, by name, of all rows and files that a training run reads; computed once."""
        from rewards import REWARDS
        from rewards.own import source_files
        from sparse_rl.models.weights import file_fingerprints
        from trainer.checkpoint import rows_fingerprint
        from trainer.launch import once

        recipe: Any = self.recipe

        def read() -> dict[str, str]:
            datasets = {"data": self.rows, "validation.data": self.held_out}
            inputs = {f"rows of {key}": rows_fingerprint(rows) for key, rows in datasets.items() if rows is not None}
            for key, (place, weights) in recipe.input_files().items():
                if place is not None:
                    digests = file_fingerprints(place, weights)
                    inputs |= {f"{key}/{name}": value for name, value in digests.items()}
            for own in {spec if isinstance(spec, str) else spec["name"] for spec in recipe.own_code()} - {*REWARDS}:
                inputs |= {f"module {name} of {own}": fingerprint(file) for name, file in source_files(own).items()}
            return inputs

        return once(f"inputs of {recipe.output_dir}", read)


@dataclass(frozen=True, kw_only=True)
class Recipe(Configuration):
    """Keys that every kind of recipe has.

    model : directory of a model, directory of a run with a final model, or name on the hub; only safetensors weights
        are loaded
    output_dir : directory of the run
    seed : seed of sampling, of the order of the training data, and of newly initialized weights
    dtype : dtype of the computation
    """

    kind: ClassVar[str]
    wanting: ClassVar[str]  # end of the error of `expect` for a recipe of another class; {} is that recipe's kind
    completion_key: ClassVar[str] = "max_completion_length"  # the key that limits a completion
    rollout = cast(RolloutConfig | None, None)  # the sampling engine; only some kinds have this key
    model: PathText
    output_dir: PathText
    seed: Seed = 42
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    trainer_options: dict[str, Any] = field(default_factory=dict, metadata=NOT_YAML)
    """Options of TRL's and transformers' trainers (options.py), which are top-level keys in the YAML."""
    warnings: list[str] = field(default_factory=list, init=False)
    """Warnings about valid but unwise settings, one line each."""

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, as plain YAML data, so that make_recipe(recipe.resolved()) == recipe."""
        return {"kind": self.kind, **as_mapping(self), **self.trainer_options}

    def as_yaml(self) -> str:
        """Return the text of an equivalent recipe file, with every key written out."""
        return dump_yaml(self.resolved())

    def models(self) -> list[str]:
        """Return the names of the models that the recipe uses one after another."""
        return [self.model]

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        """Return a copy of the recipe with each model name replaced by `directory_of(name)`."""
        return replace(self, model=directory_of(self.model))

    def expect(self, cls: type[C]) -> C:
        """Return the recipe itself if it is of class `cls`. Raises UserError otherwise."""
        if not isinstance(self, cls):
            wrong = f"a recipe of kind {self.kind} {cls.wanting.format(self.kind)}"
            raise UserError(f"{wrong}; sparse-rl {command_of(self.kind)} runs this recipe", "kind")
        return self

    def evaluation(self, run: str) -> dict[str, Any] | None:
        """Return an eval recipe, as a mapping, for the run in the folder `run`. None if this recipe has no problems."""
        return None

    # ---- sampling -----------------------------------------------------------------------------------------------

    def with_rollout(self, **changed: Any) -> Self:
        """Return a copy of the recipe with some engine settings replaced."""
        assert self.rollout is not None
        replacement: dict[str, Any] = {"rollout": replace(self.rollout, **changed)}
        return replace(self, **replacement)

    def check_model_len(self) -> None:
        """Raise UserError if `rollout.max_model_len` is too small for a prompt and a completion."""
        need = max(bound or 1 for bound in self.prompt_bounds()) + self.sampling().max_tokens
        if self.rollout is not None and (self.rollout.max_model_len or need) < need:
            wrong = f"must hold a prompt and a completion, at least {need} tokens here; raise or remove this key"
            raise UserError(wrong, "rollout.max_model_len")

    def sampling(self, samples: int = 1) -> SamplingConfig:
        """Return the engine's sampling settings for `samples` completions per prompt."""
        raise NotImplementedError

    def samples_behind_prompts(self) -> bool:
        """True if completions of the dataset's prompts are sampled; False if the dataset has the completions."""
        return True

    def sequences(self) -> int | None:
        """Return the maximum number of sequences that one call of the engine returns to a process; None if unknown."""
        raise NotImplementedError

    def caches(self) -> list[PolicyConfig | None]:
        """Return the cache policies that the engine uses one after another; None is the policy saved with the model."""
        return []

    def prompt_caches(self) -> list[PromptCacheConfig]:
        """Return the settings, used one after another, for compacting contexts; empty if no context is compacted."""
        return []

    def prompt_sources(self) -> dict[str, DataConfig]:
        """Return the datasets that supply prompts: dotted key -> dataset."""
        return {}

    def refuse_without_context(self, why: str) -> None:
        """Raise UserError if a dataset has no column of contexts."""
        for key, data in self.prompt_sources().items():
            if not data.has_context:
                wrong = f"{why}; say which column holds them, as in columns: {{context: article}}"
                raise UserError(wrong, f"{key}.columns")

    def prompt_bounds(self) -> list[int | None]:
        """Return the maximum number of tokens in a prompt for each dataset in `prompt_sources`; None means unknown."""
        return [data.max_prompt_tokens for data in self.prompt_sources().values()]

    def unbounded(self) -> str:
        """Return the keys, not set, that would bound the length of prompts. Synthetic prompts are short."""
        free = (key for key, d in self.prompt_sources().items() if not d.synthetic and not d.max_prompt_tokens)
        return ", ".join(f"{key}.max_prompt_tokens" for key in free)

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments of `make_engine`, except model, policy and progress. The engine must be chosen."""
        assert self.rollout is not None
        return self.rollout.arguments(self.dtype, self.longest_prompt(), self.sampling().max_tokens)

    def longest_prompt(self) -> int | None:
        """Return the maximum number of tokens in a prompt; None means unknown."""
        bounds = self.prompt_bounds()
        return None if None in bounds else max((bound or 0 for bound in bounds), default=None)

    # ---- the run ------------------------------------------------------------------------------------------------

    @property
    def from_scratch(self) -> bool:
        """True if the model's weights are not read, but initialized."""
        return False

    def load_shape(self) -> Any:
        """Return the configuration of the model, or that of the table of known models (models/hub.py)."""
        from sparse_rl.models.load import load_shape

        return load_shape(self.model)

    def prepare(self, live: Any = None) -> Run[Self]:
        """Resolve the recipe, check its model's files, and warn about unwise settings.

        live : module in memory to sample from; by default the recipe's model is loaded later
        """
        from sparse_rl.models.load import load_config, load_tokenizer

        run = self.prepare_model(load_config(self.model), live)
        return replace(run, tokenizer=load_tokenizer(self.model))

    def prepare_model(self, config: Any, live: Any = None) -> Run[Self]:
        """Do what `prepare` does, for a model with this configuration, but load no tokenizer."""
        from rollout.context import budgets
        from rollout.context.reader import check_movable
        from sparse_rl.attention.families import global_layers
        from sparse_rl.models.centres import check_parameters
        from sparse_rl.models.weights import check_weights, identify, meta_model

        skeleton = (meta_model if self.from_scratch else check_weights)(config, self.model)
        run = self.resolve(config, live)
        for compaction in self.prompt_caches():
            try:
                if compaction.budgets is not None:
                    model = identify(live or self.model)
                    budgets.load(compaction.budgets, global_layers(config), run.shape[1], model)
            except UserError as error:
                raise UserError(error.message, "prompt_cache.budgets") from error
            if compaction.by_text:
                check_movable(config, "prompt_cache.chunking")
        for policy in run.policies:
            check_parameters(self.model, policy)
        for remark in run.remarks:
            warn(remark)
        return replace(run, skeleton=skeleton)

    def resolve(self, config: Any, live: Any = None, cuda: bool | None = None) -> Run[Self]:
        """Resolve the recipe for a model configuration. Reads no file but the model's cache policy.

        live : module in memory to sample from; None means the recipe's model
        cuda : the machine, as in `choose_engine`: None is this one
        """
        from rollout.engine import choose_engine
        from rollout.vllm.memory import pool_bytes
        from sparse_rl.attention.families import is_text_part, longest_text, policy_shape, refuse_states
        from sparse_rl.policies.make import make_policy

        layers, kv_heads, head_dim = shape = policy_shape(config)
        if self.prompt_caches():
            refuse_states(config, "a compacted context holds no states", "prompt_cache")
        caches, remarks, recipe = self._cache_configs(), list[str](), self
        words = f"{self.model}: {config.model_type}, {_layer_words(config)}, {kv_heads} kv heads of {head_dim}"
        if is_text_part(config):
            words += ", the text part of a multimodal model"
        if (limit := longest_text(config)) is not None:
            words += f", for texts of at most {limit[0]:,} tokens: {limit[1]}"
        findings, policies = {"model": words}, [make_policy(cache) for cache in caches]
        if policies:
            findings["cache"] = ", ".join(map(repr, policies))
        if (rollout := self.rollout) is not None:
            launch = self.launch if isinstance(self, TrainRecipe) else None
            started = launch is not None and launch.rollout_gpus > 0
            if rollout.engine == "server" and not (rollout.servers or started or os.environ.get(SERVERS)):
                wrong = "needs at least one URL: [http://host:8000, ...]; or set launch.rollout_gpus in a training"
                raise UserError(wrong, "rollout.servers")
            engine, findings["rollouts"] = choose_engine(rollout, config if live is None else None, caches, cuda)
            recipe = self.with_rollout(engine=engine)
            if live is None:
                recipe.check_lengths(config)
                group = config.num_attention_heads // kv_heads
                named_remarks = [(cache.name, cache.remark(group, layers)) for cache in caches]
                remarks = [f"{name}: {remark}" for name, remark in named_remarks if remark is not None]
                free = engine == "vllm" and rollout.max_model_len is None and self.unbounded()
                if free and isinstance(recipe, TrainRecipe):  # which shares the GPU with vLLM
                    arguments = recipe.engine_arguments()
                    price = max(pool_bytes(policy, arguments, config, cuda=True) for policy in policies) / 1e9
                    tokens = f"{config.max_position_embeddings:,} tokens a sequence, up to {price:,.1f} GB"
                    remarks += [f"{free}: not set, so vLLM plans its cache for {tokens}"] if price > 1 else []
        config = config if live is None else live.config
        return Run(recipe, config, shape, policies, live=live, findings=findings, remarks=remarks)

    def _cache_configs(self) -> list[PolicyConfig]:
        """Return the cache policies. If none is named, the policy saved with the model is used, or else `full`."""
        from sparse_rl.models.directory import saved_policy

        caches = self.caches()
        saved = saved_policy(self.model) if None in caches else None
        fallback = FullConfig() if saved is None else saved.config
        return [fallback if cache is None else cache for cache in caches]

    def check_lengths(self, config: Any) -> None:
        """Raise UserError if the longest allowed prompt and a completion together exceed the model's context length.

        Prompts without a bound are checked against `Run.room` when the dataset is read. Completions from a dataset are
        truncated, so they are checked only for vllm, which must hold the longest sequence.
        """
        from sparse_rl.attention.families import context_length

        if (window := context_length(config)) is None or (rollout := self.rollout) is None:
            return
        bounds, sampled = self.prompt_bounds(), self.samples_behind_prompts()
        if not sampled and (rollout.engine in SAMPLE_LIVE or None in bounds):
            return
        completion = self.sampling().max_tokens
        prompt = max((bound or 1 for bound in bounds), default=1)
        if prompt + completion > window:
            lengths = f"{completion:,} tokens, after a prompt of {'at least 1' if prompt == 1 else f'up to {prompt:,}'}"
            wrong = f"{lengths}, exceed the model's context length of {window:,} tokens; lower this value"
            raise UserError(wrong, self.completion_key)
        if (rollout.max_model_len or 0) > window:
            wrong = f"{rollout.max_model_len:,} exceeds the model's context length of {window:,} tokens; lower this"
            raise UserError(f"{wrong} value", "rollout.max_model_len")


def _layer_words(config: Any) -> str:
    """Describe a model's layers, for example "6 layers, of which 5 have a sliding window of 512 tokens"."""
    from sparse_rl.attention.families import state_layers, windows_of

    windows = windows_of(config)
    sliding, words = sum(map(bool, windows)), f"{len(windows)} layers"
    if states := len(state_layers(config)):
        return f"{config.num_hidden_layers} layers, of which {len(windows)} have a cache, and {states} a state"
    return f"{words}, of which {sliding} have a sliding window of {max(windows)} tokens" if sliding else words


# ---- rewards and rows --------------------------------------------------------------------------------------------


def rewards_of(named: list[Any], key: str) -> tuple[list[Callable], list[float]]:
    """Return (functions, weights) of the rewards that a recipe key names. Raises UserError for an invalid reward.

    The functions raise UserError, too, if a reward fails (rewards/own.py).
    """
    from rewards import make_rewards
    from rewards.own import Bounded

    try:
        own = named == ["environment"] and key != "rewards"  # TRL adds it to those of a training
        functions, weights = ([environment_reward], [1.0]) if own else make_rewards(named)
    except ValueError as error:
        raise UserError(str(error), key) from error
    return [Bounded(function, partial(UserError, key=key)) for function in functions], weights


def loaded(path: str, key: str) -> Any:
    """Return the object that a key names as FILE.py:NAME or MODULE:NAME. Raises UserError if there is none."""
    from rewards.own import own_reward

    try:
        return own_reward(path)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"{path} cannot be loaded: {type(error).__name__}: {error}", key) from error


async def environment_reward(environments: Sequence[Any], **_: Any) -> list[Any]:
    """Return what `get_reward` of each environment returns: None without this method, and 0 if the environment is None,
    because a late tool still uses it."""
    scores = [0.0 if one is None else one.get_reward() if hasattr(one, "get_reward") else None for one in environments]
    return [await score if inspect.isawaitable(score) else score for score in scores]


def read_rows(
    config: DataConfig, tokenizer: Any, require: Sequence[str], where: str = "data", room: int | None = None
) -> Any:
    """Return the rows of a dataset, which all processes of a launch share; the arguments are those of `load_data`."""
    from sparse_rl.data.problems import load_data
    from trainer.launch import once_on_disk

    return once_on_disk(
        f"{where} {require} {config} {room}",
        lambda: load_data(config, tokenizer, require=require, where=where, room=room),
    )


def read_recorded(config: DataConfig, run: Run[Any], where: str) -> Any:
    """Return the rollouts of the folders `config.traces` as rows, which all processes of a launch share."""
    from rollout.recorded import recorded_rows
    from trainer.launch import once_on_disk

    recipe, arguments = run.recipe, (config, run.config, run.tokenizer, run.recipe.samples_in_row())
    try:
        rows = once_on_disk(f"{where} {config} {arguments[-1]}", lambda: recorded_rows(*arguments))
    except UserError as error:
        key = error.key if error.key == "num_generations" else f"{where}.traces"
        raise UserError(error.message, key) from error
    if lacking := [name for name in recipe.columns() if name not in rows.column_names]:
        raise UserError(f"the rollouts have no {lacking[0]}, which this recipe needs; sample again", f"{where}.traces")
    names = [spec if isinstance(spec, str) else spec.get("name") for spec in recipe.named_rewards()[1]]
    if "recorded" in names and any(sample["reward"] is None for samples in rows["samples"] for sample in samples):
        mend = "sample again with sparse-rl rollout --score, or set rewards"
        raise UserError(f"a line has no key reward, which the reward recorded reads; {mend}", f"{where}.traces")
    return rows


def check_golds(rewards: Sequence[Any], rows: Any, where: str) -> None:
    """Warn about rows that a reward can never score, because it cannot read their gold answer or tests.

    Rewards with the attribute `golds` (rewards/__init__.py) are asked, with empty completions. Raises UserError if a
    reward can score no row.
    """
    for reward in (reward for reward in rewards if getattr(reward, "golds", ())):
        unread: list[int] = []
        with stage("reading golds", where, total=len(rows), unit="row") as progress:
            for start in range(0, len(rows), 256):
                part = rows[start : start + 256]
                columns = {name: values for name, values in part.items() if name not in ("prompt", "completion")}
                try:
                    scores = reward(completions=[""] * len(part["prompt"]), **columns)
                except ValueError as error:  # a column is missing or of another type
                    raise UserError(str(error), where) from error
                unread += [start + place for place, score in enumerate(scores) if score is None]
                progress.advance(len(scores))
        if unread:
            golds = [name for name in reward.golds if name in rows.column_names]
            first = "; ".join(f"{i + 1}: {', '.join(show(rows[i][name]) for name in golds)}" for i in unread[:SHOWN])
            count = (
                f"the reward {reward.__name__} cannot read {' or '.join(golds)} of {len(unread)} of {len(rows)} rows"
            )
            if len(unread) == len(rows):
                raise UserError(f"{count}, so it can score no completion; row {first}", where)
            warn(f"{where}: {count}, whose completions it never scores; row {first}")


@dataclass(frozen=True, kw_only=True)
class ToolsRecipe(Recipe):
    """Recipe that samples completions or, if it names tools or an environment, conversations in which tools are called.

    tools : functions that the model may call, as FILE.py:FUNCTION or MODULE:FUNCTION, with type hints and docstrings
    environment : class whose public methods are tools with a state of the conversation, as FILE.py:CLASS or
        MODULE:CLASS; or a mapping of names, which the data's column `environment` holds, to classes
    """

    tools: list[Text] = field(default_factory=list)
    environment: dict[str, Text] | Text | None = None

    @property
    def uses_tools(self) -> bool:
        """True if completions are conversations in which tools are called."""
        return bool(self.tools or self.environment)

    def tool_names(self) -> list[str]:
        """Return the names of the tools and environments, as given."""
        named = self.environment
        return [*self.tools, *(named.values() if isinstance(named, dict) else [named] if named else [])]

    def tool_limits(self) -> tuple[int | None, float]:
        """Return how often a conversation calls tools at most (None: any number), and the seconds that a call takes."""
        raise NotImplementedError

    def given_tools(self, tokenizer: Any, rewards: int) -> dict[str, Any]:
        """Return the tools and environments that the recipe names, as GRPOTrainer takes them.

        rewards : number of rewards besides those of environments

        Raises UserError if one cannot be loaded, or does not go with the tokenizer.
        """
        named = self.environment
        if isinstance(named, dict):
            factory: Any = {name: loaded(path, "environment") for name, path in named.items()}
        else:
            factory = named and loaded(named, "environment")
        tools = [loaded(path, "tools") for path in self.tools]
        if self.uses_tools:
            from trainer.grpo.turns import check_tools

            check_tools(tools, factory, tokenizer, rewards, ("tools", "environment"))
        return {"tools": tools, "environment_factory": factory}

    def schema_tokens(self, tokenizer: Any) -> int:
        """Return the number of tokens that the schemas of tools add to a prompt, at most."""
        from trainer.grpo.turns import parsing_template, schema_tokens, tools_of

        tools, factory = self.given_tools(tokenizer, 1).values()
        factories = list(factory.values()) if isinstance(factory, dict) else [factory]
        lists = [[*tools, *tools_of(one)] for one in factories]
        return schema_tokens(tokenizer, lists, chat_template=parsing_template(tokenizer, "tools"))


# ---- recipes that train ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Configuration):
    """Validation on held-out problems at regular intervals. GRPO measures the rewards and the entropy of sampled
    completions. Distillation and KVpop measure KL and cross-entropy, also once before the first step. They do not use
    `samples`.

    data : held-out problems; if it sets no max_prompt_tokens, that of the recipe's `data` applies
    every : number of training steps between two validations
    problems : maximum number of held-out problems
    samples : number of completions sampled for each problem
    """

    data: DataConfig
    every: PositiveInt = 20
    problems: PositiveInt = 32
    samples: PositiveInt = 4

    def limited_data(self) -> DataConfig:
        """Return the configuration of the held-out dataset, limited to `problems` problems."""
        return replace(self.data, limit=self.problems)


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Recipe):
    """Keys of every kind of recipe that trains a model."""

    wanting: ClassVar[str] = "is not trained; use sparse-rl {}"
    validation = cast(ValidationConfig | None, None)  # only the kinds that use held-out problems have this key
    data: DataConfig
    training: TrainingConfig = flat(TrainingConfig)
    lora: LoraConfig | None = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.launch.rollout_gpus and not isinstance(self, SampledRecipe):
            raise UserError("nothing is sampled; remove it", "launch.rollout_gpus")
        options = self.trainer_options.get("gradient_checkpointing_kwargs")
        options = parse_yaml(options, "gradient_checkpointing_kwargs") if isinstance(options, str) else options
        if isinstance(options, dict) and options.get("use_reentrant"):
            wrong = "the eviction trace does not survive reentrant checkpointing; remove use_reentrant"
            raise UserError(wrong, "gradient_checkpointing_kwargs.use_reentrant")
        if self.lora is not None and self.launch.zero_stage == 3:
            wrong = "LoRA under ZeRO-3 requires reentrant checkpointing, which cannot be replayed; use stage 2 or lower"
            raise UserError(wrong, "launch.zero_stage")
        if (validation := self.validation) is not None and validation.data.max_prompt_tokens is None:
            data = replace(validation.data, max_prompt_tokens=self.data.max_prompt_tokens)
            object.__setattr__(self, "validation", replace(validation, data=data))

    def make_trainer(self, run: Run, folder: Path) -> Any:
        """Return the trainer of this recipe's run, with its engine, which writes to the run's folder."""
        raise NotImplementedError

    # ---- training data ------------------------------------------------------------------------------------------

    def prompt_sources(self) -> dict[str, DataConfig]:
        return {"data": self.data} | ({} if self.validation is None else {"validation.data": self.validation.data})

    def samples_behind_prompts(self) -> bool:
        return False

    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that the dataset must have."""
        return ("prompt", "completion")

    def named_rewards(self) -> tuple[str, list[Any]]:
        """Return (the key under which the recipe names rewards, the list of these rewards)."""
        return "rewards", []

    def own_code(self) -> list[Any]:
        """Return the rewards, tools and environments of a run, which may be the user's own code, as named in YAML."""
        return self.named_rewards()[1]

    def input_files(self) -> dict[str, tuple[str | None, bool]]:
        """Return the files that a run reads, which must not change: key -> (place or None, True if weights are read)"""
        template = self.trainer_options.get("chat_template_path")
        return {"model": (self.model, not self.from_scratch), "chat_template_path": (template, False)}

    # ---- batches ------------------------------------------------------------------------------------------------

    def update_rows(self) -> int:
        """Return the number of training rows in one update, over all processes."""
        training = self.training
        return training.per_device_train_batch_size * training.gradient_accumulation_steps * self.launch.processes

    def describe_batches(self, rows: int) -> str:
        """Describe the batches and steps for a dataset of `rows` rows. Raises UserError if the dataset is too small."""
        per_epoch = -(-rows // self.update_rows())
        return f"{self.update_rows()} rows a step, {per_epoch} steps an epoch, {self.count_steps(per_epoch)} steps"

    def count_steps(self, per_epoch: int) -> int:
        """Return the number of steps of the whole training, if one epoch has `per_epoch` steps."""
        training = self.training
        return training.max_steps if training.max_steps > 0 else max(1, round(per_epoch * training.num_train_epochs))

    def foresees(self) -> bool:
        """True if KVpop's scorers are trained, which requires their target, the mass of future attention."""
        return False

    # ---- memory -------------------------------------------------------------------------------------------------

    def longest_row(self, prompt: int) -> int | None:
        """Return the maximum number of tokens in a training row if a prompt has `prompt` tokens; None means unknown."""
        raise NotImplementedError

    def sequences(self) -> int:
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps

    # ---- the run ------------------------------------------------------------------------------------------------

    def prepare_training(self, resume: str | None = None, here: bool = True) -> Run[Self]:
        """Resolve the recipe and check everything except its output folder.

        resume : value of --resume; None means a new run
        here : True if this process trains; choices are then printed, and attention kernels are checked on its GPU
        """
        from sparse_rl.models.directory import saved_policy
        from sparse_rl.models.load import changed_generation_settings
        from trainer.checkpoint import checkpoint_to_resume

        for backend in self.training.report_to:
            if importlib.util.find_spec(backend) is None:
                raise UserError(f"{backend} is not installed; pip install {backend}, or leave it out here", "report_to")
        run = self.prepare()
        saved_policy(self.model)
        findings = {"recipe": f"{self.kind}, into {self.output_dir}", **run.findings}
        if changed := changed_generation_settings(self.model):
            findings["generation config"] = changed
        findings |= self.findings(run)
        run = run.with_data()
        if run.rewards[0]:
            weighted = (f"{getattr(f, '__name__', f)} × {weight:g}" for f, weight in zip(*run.rewards, strict=True))
            findings[self.named_rewards()[0]] = ", ".join(weighted)
        findings["data"] = f"{len(run.rows)} rows, with {', '.join(run.rows.column_names)}"
        findings["batch"] = self.describe_batches(len(run.rows))
        if self.validation is not None:
            findings["validation"] = f"{len(run.held_out)} problems, every {self.validation.every} steps"
        recipe, kernels = run.recipe.choose_kernel(run.config, here)
        findings |= kernels
        checkpoint = None
        if resume is not None:
            checkpoint = checkpoint_to_resume(resume, recipe.resolved(), run.inputs())
            findings["resume"] = str(checkpoint)
        for topic in ("rollouts", "off-policy", "attention kernel", "scorers' target", "generation config"):
            if here and topic in findings:
                say(topic, findings[topic])
        return replace(run, recipe=recipe, findings=findings, checkpoint=checkpoint)

    def findings(self, run: Run) -> dict[str, str]:
        """Return topic -> text about the parts of the training. Raises UserError if a part does not suit the model."""
        if self.lora is None:
            return {}
        from trainer.arguments import describe_adapters

        return {"lora": describe_adapters(self.lora, run.skeleton)}

    def choose_kernel(self, config: Any, here: bool) -> tuple[Self, dict[str, str]]:
        """Return (the recipe with its attention kernel chosen, findings that give the reason for the choice)."""
        return self, {}

    def weights_dtype(self) -> str:
        """Return the dtype in which the trained weights are kept."""
        from trainer.arguments import weights_dtype

        return weights_dtype(self.dtype, self.launch.zero_stage, self.lora is not None)

    def training_arguments(self) -> dict[str, Any]:
        """Return the options that transformers' TrainingArguments and TRL's configurations share."""
        from trainer.arguments import training_options

        return training_options(
            self.training,
            self.launch,
            output_dir=self.output_dir,
            seed=self.seed,
            dtype=self.dtype,
            more=self.trainer_options,
        )


@dataclass(frozen=True, kw_only=True)
class ReplayedRecipe(TrainRecipe):
    """Training whose attention reads only the entries that a cache under evictions would have held.

    The evictions were recorded when the sequences were sampled or simulated, or are decided in training's forward pass.
    """

    replay: ReplayConfig = flat(ReplayConfig)
    validation: ValidationConfig | None = None

    def attending_models(self) -> list[str]:
        """Return the names of the models that use the recipe's attention kernel."""
        return [self.model]

    def with_attention_kernel(self, kernel: str) -> Self:
        """Return a copy of the recipe that uses the attention kernel `kernel`."""
        chosen: dict[str, Any] = {"attention_kernel": kernel}
        return replace(self, replay=replace(self.replay, **chosen))

    def choose_kernel(self, config: Any, here: bool) -> tuple[Self, dict[str, str]]:
        from sparse_rl.attention.startup import check_target, choose_kernel, will_check
        from sparse_rl.models.load import load_config

        wanted = self.replay.attention_kernel
        if will_check(wanted) and not here:  # each training process compiles and checks on its own GPU
            return self, {"attention kernel": f"{wanted}; flex will be checked on the GPU, see sparse-rl doctor"}
        if will_check(wanted):
            say("attention kernel", "compiling and checking FlexAttention on this GPU, which takes a while")
        kernel, finding = choose_kernel(wanted, map(load_config, self.attending_models()), self.dtype)
        findings = {"attention kernel": finding}
        if here and self.foresees() and will_check("auto"):
            findings["scorers' target"] = str(check_target(config, self.dtype))
        return self.with_attention_kernel(kernel), findings


@dataclass(frozen=True, kw_only=True)
class SampledRecipe(ReplayedRecipe):
    """Training on sequences that an engine samples, or simulates, under a cache.

    cache : cache policy: {policy: name, parameters of the policy}, or just the name
    prompt_cache : settings for compacting the context of each prompt once for all its completions, as in an evaluation.
        The teacher of a distillation attends to the whole context. null means that the context is part of each prompt
    rollout : settings of the engine; null with data.traces, where nothing is sampled
    scorers : settings for training a learned policy's scorers further; null leaves the scorers unchanged
    """

    cache: PolicyConfig
    prompt_cache: TrainedPromptCache | None = None
    rollout: RolloutConfig | None = field(default_factory=RolloutConfig)
    scorers: ScorersConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_recorded()
        if self.launch.rollout_gpus:
            object.__setattr__(self, "rollout", self._served())
        optim = self.trainer_options.get("optim")
        lora, compaction = self.lora is not None, self.prompt_cache
        check_sampled(self.cache, self.rollout, self.scorers, lora=lora, optim=optim, prompt_cache=compaction)
        if compaction is not None:
            self.refuse_without_context("prompt_cache compacts contexts")
            if self.rollout is not None:  # only hf compacts contexts
                object.__setattr__(self, "rollout", replace(self.rollout, engine="hf"))
        self.check_model_len()

    def _served(self) -> RolloutConfig:
        """Return the settings of an engine that asks the servers of the launch. Raises UserError if it cannot."""
        rollout = self.rollout
        if rollout is None or self.prompt_cache is not None:
            raise UserError("nothing is sampled, or only by hf; remove it", "launch.rollout_gpus")
        if rollout.engine not in ("auto", "server") or rollout.servers:
            raise UserError("rollout names another engine, or other servers; remove it", "launch.rollout_gpus")
        if not rollout.exact:
            raise UserError("the servers of launch.rollout_gpus compute exactly; remove it", "rollout.exact")
        return replace(rollout, engine="server")

    def serving_words(self) -> list[str]:
        """Return what Python runs as a server for this recipe."""
        rollout, prompt = self.rollout, self.longest_prompt()
        assert rollout is not None
        length = rollout.max_model_len or (prompt and prompt + self.sampling().max_tokens)
        words = ["--dtype", self.dtype, "--max-batch", str(rollout.max_batch)]
        words += [] if length is None else ["--max-model-len", str(length)]
        words += [] if rollout.kv_cache_gb is None else ["--kv-cache-gb", str(rollout.kv_cache_gb)]
        for key, value in dotted(self.cache.as_block()).items():
            words += ["--cache", f"{key}={json.dumps(value)}"]
        words += ["--full-graphs"] * rollout.full_graphs
        return ["-m", "sparse_rl.cli", "serve", self.model, "--rollouts", *words]

    @property
    def recorded(self) -> bool:
        """True if the recipe trains on recorded rollouts, so that no engine samples or simulates."""
        return self.data.traces is not None

    def _check_recorded(self) -> None:
        """Raise UserError for settings of sampling beside recorded rollouts; without an engine, `rollout` is None."""
        validation = self.validation
        if validation is not None and (validation.data.traces is not None) != self.recorded:
            raise UserError("data and validation.data must both have traces, or neither", "validation.data.traces")
        if not self.recorded and self.rollout is None:
            raise UserError("null is for recorded rollouts (data.traces) alone", "rollout")
        if self.recorded and self.rollout is not None and self.rollout != type(self.rollout)():
            raise UserError("has no effect on recorded rollouts; remove this block, or set null", "rollout")
        if self.recorded and self.prompt_cache is not None:
            raise UserError("has no effect on recorded rollouts; remove this block", "prompt_cache")
        if self.recorded:
            object.__setattr__(self, "rollout", None)

    def samples_in_row(self) -> int:
        """Return the number of recorded samples of one problem that a row of the dataset holds."""
        return 1

    def recording(self, config: Any) -> RecordedRollouts:
        """Return the rollouts of data.traces. config : configuration of the recipe's model"""
        from rollout.recorded import RecordedRollouts
        from sparse_rl.policies.make import make_policy

        datasets = [self.data] if self.validation is None else [self.data, self.validation.data]
        folders = dict.fromkeys(folder for data in datasets for folder in data.traces or ())
        try:
            return RecordedRollouts(list(folders), self.model, config, make_policy(self.cache))
        except UserError as error:
            raise UserError(error.message, "data.traces") from error

    def findings(self, run: Run) -> dict[str, str]:
        from trainer.sampler import refuse_compacted_experts

        if self.prompt_cache is not None:
            refuse_compacted_experts(run.skeleton)
        topics = super().findings(run)
        if not self.recorded:
            return topics
        recording = self.recording(run.config)
        for warning in recording.warnings:
            warn(warning)
        return {**topics, "rollouts": recording.describe()}

    def sampled_by(self, run: Run) -> dict[str, Any]:
        """Return the parameters of a trainer that say how its sequences are sampled."""
        if self.recorded:
            return {"engine": self.recording(run.config)}
        settings = {"cache": self.cache, "prompt_cache": self.prompt_cache, "rollout": self.rollout}
        return {**settings, "max_prompt_tokens": self.longest_prompt()}

    def foresees(self) -> bool:
        return self.scorers is not None

    def caches(self) -> list[PolicyConfig | None]:
        return [self.cache]

    def prompt_caches(self) -> list[PromptCacheConfig]:
        return [] if self.prompt_cache is None else [self.prompt_cache]

    def input_files(self) -> dict[str, tuple[str | None, bool]]:
        from sparse_rl.models.directory import CENTRES_FILE

        budgets = None if self.prompt_cache is None else self.prompt_cache.budgets
        centres = f"{self.model}/{CENTRES_FILE}" if isinstance(self.cache, TriAttentionConfig) else None
        return {**super().input_files(), "prompt_cache.budgets": (budgets, False), "centres": (centres, False)}

    def longest_row(self, prompt: int) -> int | None:
        return prompt + self.sampling().max_tokens
