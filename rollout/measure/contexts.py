"""Accuracy after compacted contexts (rollout/context): pass@1 of each task after each compaction of its contexts.

Problems are grouped by context. A context is prefilled, and its reference queries are computed, once for all
compactions that share these queries. After each compaction, all questions about the context are answered. Scores and
rows are the same as in any other evaluation (accuracy.py).

Reference generations are the answers after the full context, scored after the same context when it is compacted.
Attention Matching, appendix F.2, calls their mean loss the log-perplexity on original-cache generations. The lines of
the full cache's point hold the answers' token ids, so references are exact also after an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from rollout.context import Context, PromptCacheConfig
from rollout.context.cache import load_context, save_context
from rollout.context.reader import ContextPrompts
from rollout.engine import Engine, Rollout
from rollout.measure.accuracy import ContextCosts, Task, TaskPoint, sample_in_parts
from rollout.measure.journal import Journal, Line, point_key, progress_of
from rollout.sampling import NotFiniteLogprobError
from sparse_rl.data.tokens import SplitPrompt
from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from rollout.hf import HFEngine


IDS, NLL = "completion_ids", "reference_nll"  # keys of a line


def reference_lines(
    engine: Engine, point: TaskPoint, problems: Sequence[int], rollouts: Sequence[Rollout], context: Context
) -> list[Line]:
    """Return, for each rollout of the `problems` after a context, further keys and values of its line in the journal.

    `reference_nll` is the mean negative log-likelihood per token, in nats at temperature 1, of the full cache's answer
    to the same problem with the same sample index. If the point is the full cache's, `completion_ids` is this answer.
    Without references the results are empty.
    """
    if (full := point.reference) is None:
        return [{} for _ in rollouts]
    units = [(problem, sample) for problem in problems for sample in range(point.sampling.n)]
    own, lines_of_full = full is point, full.journal.units(full.key)
    answers = [r.completion_ids for r in rollouts] if own else [lines_of_full[unit][IDS] for unit in units]
    prompts = [point.task.prompts[problem] for problem, _ in units]
    try:
        scores = engine.logprobs(prompts, answers, context)
    except NotFiniteLogprobError as error:
        raise NotFiniteLogprobError(*units[error.prompt], error.step, error.dtype) from error
    lines: list[Line] = [{NLL: -logprobs.double().mean().item()} for logprobs in scores]
    return [{**line, IDS: ids} for line, ids in zip(lines, answers, strict=True)] if own else lines


# Settings that only the compaction uses. Configurations that differ only in these settings, and divide a context into
# the same parts, share one prefill of the context and its reference queries.
COMPACTION = {"policy", "ratio", "select", "aggregate", "pool", "pooling", "ridge", "fit", "fit_biases", "fit_values"}
COMPACTION |= {"heads", "budgets", "chunk", "chunks", "cartridge"}


@dataclass(frozen=True)
class Questions:
    """Prompts of the problems of a task, each split into its context and the rest, and prompts about each context."""

    prompts: Sequence[SplitPrompt]
    about: ContextPrompts


@dataclass(frozen=True)
class ContextTask(Task):
    """A task whose problems have contexts. `prompts` holds only the part of each prompt after its context."""

    questions: Questions = field(kw_only=True)


@dataclass(frozen=True)
class Compacted:
    """A context that was compacted with the settings of index `cache`, and the indices of the problems about it."""

    cache: int
    problems: list[int]
    context: Context
    costs: ContextCosts


def compacted_contexts(
    engine: HFEngine,
    questions: Questions,
    caches: Sequence[PromptCacheConfig],
    finished: Sequence[Container[int]] | None = None,
) -> Iterator[Compacted]:
    """Compact the context of every problem, once with each of the settings `caches`. Yields results context by context.

    caches : settings of the compactions; `first` and `last` count tokens of the context's text, without chat template
    finished : for each of `caches`, the indices of the problems that need no answers
    """
    for (first, tokens), problems in problems_by_context(questions).items():
        waiting = {
            place: replace(cache, first=cache.first + first)
            for place, cache in enumerate(caches)
            if finished is None or any(problem not in finished[place] for problem in problems)
        }
        while waiting:
            try:
                shared = _read_alike(waiting, len(tokens))
                studied = engine.study(tokens, waiting[shared[0]], questions.about)
                for place in sorted(shared, key=lambda at: not waiting[at].keeps_all):
                    context = studied.compacted(waiting.pop(place))
                    whole_bytes = studied.nbytes * len(tokens) // studied.length  # a summary has other tokens
                    sizes = len(tokens), context.nbytes, whole_bytes
                    yield Compacted(place, problems, context, ContextCosts(1, *sizes, context.seconds))
                    del context
                del studied  # frees its memory before the next context is prefilled
            except UserError as error:
                raise UserError(f"problem {problems[0] + 1}: {error.message}", "prompt_cache") from error


def problems_by_context(questions: Questions) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Return (number of tokens before the context's text, token ids of the context) -> indices of its problems."""
    problems_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, prompt in enumerate(questions.prompts):
        problems_of.setdefault((prompt.first, tuple(prompt.context)), []).append(place)
    return problems_of


def check_lengths(questions: Mapping[str, Questions], answer: int, window: int | None) -> None:
    """Raise UserError if a context, a question of a task and an answer of `answer` tokens are longer than the `window`
    tokens that the model can read, if known.
    """
    for name, task_questions in questions.items():
        for place, prompt in enumerate(task_questions.prompts):
            tokens = len(prompt.context) + len(prompt.rest)
            if window is not None and tokens + answer > window:
                wrong = f"problem {place + 1} has {tokens} tokens, which with {answer} tokens of answer exceed the"
                remedy = "lower max_prompt_tokens or max_completion_length"
                raise UserError(f"{wrong} {window} tokens that the model can read; {remedy}", f"tasks.{name}")


def _read_alike(configs: Mapping[int, PromptCacheConfig], tokens: int) -> list[int]:
    """Return the indices of configurations that can share one prefill of a context of `tokens` tokens and its reference
    queries. A full context is in the first group, because its answers are the references of the others.

    The first index determines the reference queries. Each of the others has the same settings of prefill and reference
    queries, or needs no reference queries and the same text that is read as a whole.
    """

    def text(config: PromptCacheConfig) -> Any:
        return config.summary and (config.summary, config.summary_tokens, config.chunks, config.seed)

    def reading(config: PromptCacheConfig) -> Any:
        parts = (config.in_parts, config.chunk) if config.summary else config.parts(tokens)
        return {name: value for name, value in asdict(config).items() if name not in COMPACTION}, parts, text(config)

    def shares(config: PromptCacheConfig) -> bool:
        if config.chooses:
            return reading(config) == reading(configs[lead])
        edges = (config.first, config.last) == (configs[lead].first, configs[lead].last)
        return not configs[lead].by_text and text(config) == text(configs[lead]) and (edges or config.policy != "none")

    whole = next((place for place, config in configs.items() if config.keeps_all), None)
    leads = [place for place, config in configs.items() if config.chooses]
    if whole is not None:
        leads = [place for place in leads if not configs[place].by_text and configs[place].summary is None] + [whole]
    lead = next(iter(leads), next(iter(configs)))
    rest = (at for at, item in configs.items() if shares(item))
    return [lead, *(at for at in rest if at != lead)]


@dataclass(frozen=True)
class ContextEngines:
    """The engine that compacts contexts, and the engine that samples answers after them.

    The engine hf does both. If vllm samples, hf first compacts all contexts and writes them to files.

    answering : opens the sampling engine; if another engine compacts, with the argument `context_entries`, the maximum
        number of entries of a sequence
    compacting : opens the compacting engine; None if the sampling engine compacts
    folder : folder for the temporary files
    window : maximum number of tokens that the model can read, if known
    """

    answering: Callable[..., AbstractContextManager[Any]]
    compacting: Callable[[], AbstractContextManager[Any]] | None
    folder: Path
    window: int | None = None

    @contextmanager
    def opened(
        self,
        questions: Mapping[str, Questions],
        caches: Mapping[str, Sequence[PromptCacheConfig]],
        answer: int,
        finished: Mapping[str, Sequence[Container[int]]] | None = None,
    ) -> Iterator[tuple[Any, Callable[[str], Iterator[Compacted]]]]:
        """Open the engines. Yields the sampling engine, and a function from a task's name to its compacted contexts.

        questions, caches : task's name -> the task's questions, and the settings of its compactions
        answer : maximum number of tokens that are sampled after a question
        finished : for each task and each of its compactions, the indices of the problems that need no answers
        """
        check_lengths(questions, answer, self.window)

        def compact_all(engine: Any, name: str) -> Iterator[Compacted]:
            done = None if finished is None else finished[name]
            return compacted_contexts(engine, questions[name], caches[name], done)

        if self.compacting is None:
            with self.answering() as engine:
                yield engine, partial(compact_all, engine)
            return
        with TemporaryDirectory(prefix="contexts-", dir=self.folder) as folder:
            stored: dict[str, list[tuple[Path, dict[str, Any]]]] = {name: [] for name in questions}
            largest = 0
            with self.compacting() as engine:
                every = ((name, item) for name in questions for item in compact_all(engine, name))
                for number, (name, item) in enumerate(every):
                    file = Path(folder) / f"{number:05d}.safetensors"
                    save_context(file, item.context)
                    longest = max(len(questions[name].prompts[place].rest) for place in item.problems)
                    largest = max(largest, item.context.entries + longest + answer)
                    stored[name].append((file, {"cache": item.cache, "problems": item.problems, "costs": item.costs}))
                    del item
                del engine
            with self.answering(context_entries=largest) as engine:
                yield engine, lambda name: (Compacted(context=load_context(f), **rest) for f, rest in stored[name])


def evaluate_contexts(
    points: Sequence[TaskPoint],
    engines: ContextEngines,
    journal: Journal,
    *,
    on_point: Callable[[], object],
    progress: bool = True,
) -> None:
    """Finish the points, each a task (ContextTask) with a setting of compactions, ordered by task. Processes share the
    work by task. `on_point` is called after each finished task.
    """
    names = list(dict.fromkeys(point.task_name for point in points))
    with progress_of(points, progress) as shown, ExitStack() as stack:
        taken = [name for name in names if stack.enter_context(journal.take(point_key("contexts", name)))]
        todo = {name: [point for point in points if point.task_name == name and not point.complete] for name in taken}
        if not any(todo.values()):
            return
        todo = {name: waiting for name, waiting in todo.items() if waiting}
        questions = {name: cast(ContextTask, waiting[0].task).questions for name, waiting in todo.items()}
        caches = {name: [point.cache for point in waiting] for name, waiting in todo.items()}
        finished = {name: [point.finished_problems() for point in waiting] for name, waiting in todo.items()}
        shown.tell("contexts")
        answer = points[0].sampling.max_tokens
        engine, contexts_of = stack.enter_context(engines.opened(questions, caches, answer, finished))
        for name, waiting in todo.items():
            for item in contexts_of(name):
                point, done = waiting[item.cache], finished[name][item.cache]
                shown.tell(f"{name}, answers, {label(point.cache)}")
                prompts = [point.task.prompts[place] for place in item.problems]
                skipped = [place for place, problem in enumerate(item.problems) if problem in done]
                about = {"context": item.problems[0], "costs": asdict(item.costs)}
                for part, rollouts, seconds in sample_in_parts(engine, prompts, point.sampling, item.context, skipped):
                    problems = [item.problems[place] for place in part]
                    scored = reference_lines(engine, point, problems, rollouts, item.context)
                    point.judge(problems, rollouts, seconds, named(point.cache), scored, **about)
                    shown.advance(len(set(problems) - done))
            on_point()


def named(config: PromptCacheConfig) -> tuple[str, dict[str, Any]]:
    settings = asdict(config)
    of_baselines = {"first", "last", *(("chunks", "summary", "summary_tokens") if config.summary else ())}
    if config.policy == "cartridge":
        of_baselines |= {"ratio", "cartridge", "study_samples", "study_tokens", "seed"}
    of_choosers = settings.keys() - {"policy", "cartridge"}
    used = [name for name in settings if name in (of_choosers if config.chooses else of_baselines)]
    return config.policy, {name: settings[name] for name in used}


def label(config: PromptCacheConfig) -> str:
    return f"{config.policy} {config.ratio:g}" if config.sized else config.policy
