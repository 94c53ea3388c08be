"""`sparse-rl rollout`: sample completions for a recipe's problems, and save them with their traces."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import COMPLETIONS, ORIGIN, TRACES, Origin, SamplingConfig
from sparse_rl.commands.arguments import (
    add_dry_run,
    add_overwrite,
    add_recipe,
    file_path,
    positive,
    print_findings,
    read_recipe,
    refuse_used,
)
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.commands.measurement import NOT_CHECKED
from sparse_rl.config import as_mapping
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.files import make_folder
from sparse_rl.progress import say, stage
from sparse_rl.recipe import EvalRecipe, GRPORecipe, PerplexityRecipe, Recipe, Run

if TYPE_CHECKING:
    from rollout.engine import Rollout
    from rollout.measure.contexts import Questions

ABOUT = "Sample completions for a recipe's problems and save them with their traces."
FILES = (COMPLETIONS, TRACES, ORIGIN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--out", metavar="DIR", type=file_path, help="default: OUTPUT_DIR/rollouts")
    parser.add_argument("--problems", metavar="N", type=positive, default=8)
    parser.add_argument("--score", action="store_true", help="also write the sum of a grpo recipe's rewards")
    add_overwrite(parser)
    add_dry_run(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options)
    sampled_problems(recipe)  # raises UserError for a kind without problems
    if options.score and not isinstance(recipe, GRPORecipe):
        raise UserError(f"needs the rewards of a recipe of kind grpo, not {recipe.kind}", "--score")
    if options.score and isinstance(recipe, GRPORecipe) and recipe.uses_tools:
        raise UserError("scores single completions, not conversations; use sparse-rl eval", "--score")
    folder = options.out or Path(recipe.output_dir) / "rollouts"
    refuse_used(folder, FILES, "--out", options.overwrite)
    quiet_loading(session.verbose)
    if options.dry_run:
        prepared, source, _ = prepare_sampling(recipe, options.problems)
        samples = sampled_problems(recipe)[2]
        count = f"{len(source)} problems x {samples} samples = {len(source) * samples:,} completions"
        limit = f"of up to {recipe.sampling().max_tokens:,} tokens"
        print_findings({**prepared.findings, "output": f"{count}, {limit}, into {folder}"}, NOT_CHECKED)
        return 0
    session.folder = folder
    rollouts = sample(recipe, folder, options.problems, options.score)
    lengths, kept = [item["tokens"] for item in rollouts], [item["retention"] for item in rollouts]
    cut = sum(item["finish_reason"] == "length" for item in rollouts)
    print(
        f"{len(rollouts)} completions, {sum(lengths) / len(lengths):.0f} tokens on average ({min(lengths)} to "
        f"{max(lengths)}), {cut} cut off; {sum(kept) / len(kept):.1%} of tokens held at the end"
    )
    print("\n".join(str(file) for pattern in FILES for file in sorted(folder.glob(pattern))))
    return 0


def sampled_problems(recipe: Recipe) -> tuple[DataConfig, str, int]:
    """Return (dataset, its key, samples per problem). Raises UserError for a kind that samples no completions."""
    if isinstance(recipe, GRPORecipe):
        return recipe.data, "data", recipe.grpo.num_generations
    if isinstance(recipe, EvalRecipe):
        where, data = next(iter(recipe.prompt_sources().items()))
        return data, where, recipe.samples
    perplexity = isinstance(recipe, PerplexityRecipe)
    problem = "is not supported here; use a recipe of kind grpo or eval"
    problem = "samples nothing; use sparse-rl perplexity" if perplexity else problem
    raise UserError(f"a recipe of kind {recipe.kind} {problem}", "kind")


def sample(recipe: Recipe, folder: Path, problems: int = 8, score: bool = False) -> list[dict[str, Any]]:
    """Sample a recipe's first `problems` problems, write the rollouts to `folder`, and return each rollout's `summary`.
    With `score`, write the weighted sum of each rollout's rewards too, under the key `reward`.

    Sampling uses the recipe's first cache or, if the problems have contexts to compact, its first prompt cache. The
    files (rollout/files.py) are written part by part, so any number of problems fits into memory.
    """
    samples = sampled_problems(recipe)[2]
    with stage("loading", recipe.model):
        from rollout.files import written_rollouts
        from rollout.measure.accuracy import summary
        from sparse_rl.models.load import model_fingerprint
        from sparse_rl.models.weights import weights_digest
        from sparse_rl.policies.make import fingerprint
        from sparse_rl.recipe import sampling
        from sparse_rl.recipe.run import rewards_of

        prepared, source, prompts = prepare_sampling(recipe, problems)
        talks = sampling.tool_use(prepared, sampled_problems(recipe)[0], source)
        recipe, config, tokenizer = prepared.recipe, prepared.config, prepared.tokenizer
        policy, engine = prepared.policies[0], recipe.rollout
        assert engine is not None
        rewards = rewards_of(recipe.rewards, "rewards") if score and isinstance(recipe, GRPORecipe) else None
        say("rollouts", prepared.findings["rollouts"])
        make_folder(folder, "--out")
        made_by = {"model": model_fingerprint(config), "policy": fingerprint(policy)}
        settings = replace(recipe.sampling(samples), record_support=True)
        if caches := recipe.prompt_caches():
            made_by["prompt_cache"] = json.dumps(as_mapping(caches[0]), sort_keys=True)
            opened = _behind_contexts(prepared, prompts, settings, folder)
        else:
            opened = _plain(prepared, talks.prompts() if talks else prompts, settings, talks and talks.converse)
    origin = Origin(
        model=str(Path(recipe.model).absolute()) if Path(recipe.model).is_dir() else recipe.model,
        vocabulary=config.vocab_size,
        engine=engine.engine,  # type: ignore[arg-type]  # `prepare` has replaced auto
        dtype=recipe.dtype,
        exact=engine.exact,
        sampling=settings,
        evicts=policy.schedule.evicts or bool(caches),
        made_by=made_by,
        weights=weights_digest(recipe.model),
        # turns that are prefilled are rollouts, of at least one token; in the end, their number is written
        rollouts=len(source) * samples * (settings.max_tokens if talks and policy.config.turns != "kept" else 1),
    )
    summaries, done = list[dict[str, Any]](), 0
    row = stage("rollouts", total=len(source), unit="problem", shown=engine.progress)
    with opened as parts, written_rollouts(folder, origin) as add, row as progress:
        kept = [name for name in source.column_names if name != "context"]  # the prompt begins with the context
        for indices, part in parts:
            rows = [{name: source[i][name] for name in kept} for i in indices for _ in range(samples)]
            if talks:
                some = list(enumerate(zip(part, rows, strict=True), start=done + 1))
                done += len(part)
                of_talk = (
                    (row, {"conversation": n, "messages": talk.messages}, talk.rollouts) for n, (talk, row) in some
                )
                pairs = [({**row, **more}, turn) for row, more, turns in of_talk for turn in turns]
                rows, part = [row for row, _ in pairs], [turn for _, turn in pairs]
            texts = tokenizer.batch_decode([r.completion_ids for r in part], skip_special_tokens=True)
            summary_of_part = list(map(summary, part))
            further = [
                {**row, "completion": t, **item} for row, t, item in zip(rows, texts, summary_of_part, strict=True)
            ]
            if rewards is not None:
                _add_rewards(further, part, tokenizer, *rewards)
            add(part, further)
            summaries += summary_of_part
            progress.advance(len(indices))
    return summaries


def _add_rewards(
    lines: list[dict[str, Any]], rollouts: list[Rollout], tokenizer: Any, functions: list[Any], weights: list[float]
) -> None:
    """Add the key `reward` to lines: the weighted sum of the rewards, or None if no reward scores the line."""
    from sparse_rl.data.tokens import prompt_ends

    columns: dict[str, Any] = {name: [line[name] for line in lines] for name in lines[0]}
    columns["prompts"], columns["completions"] = columns.pop("prompt"), columns.pop("completion")
    if not isinstance(lines[0]["prompt"], str):
        columns["completions"] = [[{"role": "assistant", "content": text}] for text in columns["completions"]]
    columns["completion_ids"] = [rollout.completion_ids for rollout in rollouts]
    columns["prompt_ends"] = prompt_ends([rollout.prompt_ids for rollout in rollouts], tokenizer)
    scores = [function(**columns) for function in functions]
    for line, *values in zip(lines, *scores, strict=True):
        weighted = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        line["reward"] = sum(weighted) if weighted else None


def prepare_sampling(recipe: Recipe, problems: int) -> tuple[Run, Any, Any]:
    """Return (prepared recipe, the first `problems` rows of its dataset, their token ids or `Questions`)."""
    from sparse_rl.data.problems import load_data
    from sparse_rl.recipe import sampling

    data, where, _ = sampled_problems(recipe)
    prepared = recipe.prepare()
    few = replace(data, limit=min(problems, data.limit or problems))
    room = None if recipe.prompt_caches() else prepared.room
    source = load_data(few, prepared.tokenizer, where=where, room=room)
    if recipe.prompt_caches():
        return prepared, source, sampling.context_questions(source, prepared.tokenizer, data)
    return prepared, source, sampling.prompt_tokens(source, prepared.tokenizer, data)


Parts = Iterator[tuple[list[int], list[Any]]]  # (indices of problems, rollouts or conversations sorted by problem)


@contextmanager
def _plain(prepared: Run, prompts: list[list[int]], settings: SamplingConfig, converse: Any) -> Iterator[Parts]:
    """Yield an iterator over the sampled parts of plain prompts, under the recipe's first cache."""
    from rollout.measure.accuracy import sample_in_parts
    from sparse_rl.recipe import sampling

    with sampling.engines(prepared, prepared.recipe.rollout.progress)(prepared.policies[0]) as engine:
        parts = sample_in_parts(engine, prompts, settings, converse=converse)
        yield ((places, sampled) for places, sampled, _ in parts)


@contextmanager
def _behind_contexts(prepared: Run, questions: Questions, settings: SamplingConfig, folder: Path) -> Iterator[Parts]:
    """Yield an iterator over the sampled parts of problems whose contexts the first prompt cache compacts."""
    from rollout.measure.accuracy import sample_in_parts
    from sparse_rl.recipe import sampling

    engines = sampling.context_engines(prepared, folder, prepared.recipe.rollout.progress)
    first = prepared.recipe.prompt_caches()[:1]
    with engines.opened({"": questions}, {"": first}, settings.max_tokens) as (engine, contexts_of):

        def parts() -> Parts:
            for item in contexts_of(""):
                prompts = [questions.prompts[place].rest for place in item.problems]
                for places, rollouts, _ in sample_in_parts(engine, prompts, settings, item.context):
                    yield [item.problems[place] for place in places], rollouts

        yield parts()
