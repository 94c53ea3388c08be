"""`sparse-rl mismatch`: compare what a cache samples with what a full cache would, by length, and propose a budget.

The numbers are defined in rollout/measure/mismatch.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from sparse_rl.commands.arguments import add_recipe, number, positive, read_recipe
from sparse_rl.commands.console import Session, print_table, quiet_loading
from sparse_rl.commands.rollout import prepare_sampling, sampled_problems
from sparse_rl.errors import UserError
from sparse_rl.progress import stage
from sparse_rl.recipe import Run

if TYPE_CHECKING:
    from rollout.measure.mismatch import Bin, Scored
    from sparse_rl.policies.base import Policy

ABOUT = "Compare a cache's samples with a full cache by length, and propose a budget that grows."
ROUNDS = 4  # maximum number of proposed budgets that are measured


def budget_list(text: str) -> list[int]:
    return sorted({positive(item) for item in text.split(",")})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--problems", metavar="N", type=positive, default=16)
    parser.add_argument(
        "--budgets", metavar="N,N,...", type=budget_list, help="constant budgets to measure, and to propose from"
    )
    parser.add_argument("--bins", metavar="N", type=positive, default=8, help="maximum number of ranges of tokens seen")
    parser.add_argument(
        "--threshold", metavar="T", type=number, default=0.86, help="least 5th percentile of the acceptance"
    )


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options)
    samples = sampled_problems(recipe)[2]  # raises UserError for a kind without problems
    if recipe.prompt_caches():
        raise UserError("compares cache policies, not compacted contexts; remove this key", "prompt_cache")
    if getattr(recipe, "uses_tools", False):
        raise UserError("compares single completions, not conversations; remove tools and environment", "tools")
    quiet_loading(session.verbose)
    from rollout.config import SAMPLE_LIVE
    from rollout.measure.mismatch import bin_edges, bins
    from sparse_rl.recipe import sampling

    prepared, _, prompts = prepare_sampling(recipe, options.problems)
    if prepared.recipe.rollout.engine in SAMPLE_LIVE:
        prepared = replace(prepared, live=sampling.load_for_sampling(prepared.recipe))
    policies = with_budgets(prepared.policies, options.budgets)
    settings = prepared.recipe.sampling(samples)
    results = [measure(prepared, policy, prompts, settings) for policy in policies]
    edges = bin_edges(results, options.bins)
    statistics = [bins(scored, edges) for scored in results]
    show(list(zip(policies, results, statistics, strict=True)))
    if not options.budgets:
        return 0
    by_budget = dict(zip(options.budgets, statistics, strict=True))
    print(search(options.threshold, edges, by_budget, policies[0], lambda p: measure(prepared, p, prompts, settings)))
    return 0


def with_budgets(policies: Sequence[Policy], budgets: Sequence[int] | None) -> list[Policy]:
    """Return the first policy with each of the budgets; without budgets, all policies."""
    from sparse_rl.policies.make import make_policy

    if not budgets:
        return list(policies)
    block = policies[0].config.as_block()
    make_policy(block, budget={"tokens": [0], "entries": budgets[:1]})  # raises UserError if its budget cannot grow
    return [make_policy(block, budget=budget) for budget in budgets]


def measure(run: Run, policy: Policy, prompts: list[list[int]], settings: Any) -> Scored:
    from rollout.measure.accuracy import label, sample_in_parts
    from rollout.measure.mismatch import Scored, score
    from sparse_rl.recipe import sampling

    with sampling.engines(run, run.recipe.rollout.progress)(policy) as engine:
        rollouts = [rollout for _, part, _ in sample_in_parts(engine, prompts, settings) for rollout in part]
    model = sampling.load_for_sampling(run.recipe) if run.live is None else run.live
    row = stage("scoring", label(policy), total=len(rollouts), unit="rollout", shown=run.recipe.rollout.progress)
    parts = []
    with row as progress:
        for rollout in rollouts:
            parts.append(score(model, rollout, settings.temperature))
            progress.advance()
    return Scored.joined(parts)


def show(rows: Sequence[tuple[Policy, Scored, Sequence[Bin | None]]]) -> None:
    """Print a table of the bins of each policy, and its mean number of entries."""
    from rollout.measure.accuracy import label
    from sparse_rl.analysis.tables import table

    headings = ("cache", "tokens seen", "tokens", "ratio p5", "mean", "< 1e-4", "acceptance p5", "mean", "entries")
    cells = [
        [label(policy), f"{one.start}–{one.end - 1}", str(one.tokens), f"{one.ratio_p5:.4f}", f"{one.ratio_mean:.3f}",
         f"{one.ratio_rare:.2%}", f"{one.acceptance_p5:.4f}", f"{one.acceptance_mean:.4f}", f"{one.entries:.1f}"]
        for policy, _, statistics in rows for one in statistics if one is not None
    ]  # fmt: skip
    print_table(table("probability of the sampled tokens: full / small cache", headings, cells))
    for policy, scored, _ in rows:
        print(f"{label(policy)}: {scored.entries.mean():.1f} entries on average")


def search(threshold: float, edges: Sequence[int], by_budget: dict[int, Any], policy: Policy, measured: Any) -> str:
    """Propose a growing budget and measure it; raise it where it does not hold. Returns the outcome in words."""
    from rollout.measure.mismatch import bins, holds, propose
    from sparse_rl.policies.make import make_policy

    raised, bound = [0] * (len(edges) - 1), f"the 5th percentile of the acceptance at {threshold:g} or above"
    constant = [budget for budget, of_budget in by_budget.items() if all(holds(one, threshold) for one in of_budget)]
    words = f"the smallest measured constant budget that keeps {bound}: {min(constant, default='none')}"
    for _ in range(ROUNDS):
        budget = propose(by_budget, edges, threshold, raised)
        if budget is None:
            break
        proposed = make_policy({**policy.config.as_block(), "budget": budget})
        scored = measured(proposed)
        statistics = bins(scored, edges)
        show([(proposed, scored, statistics)])
        failing = [place for place, one in enumerate(statistics) if not holds(one, threshold)]
        if not failing:
            block = yaml.safe_dump(proposed.config.as_block(), default_flow_style=True, sort_keys=False, width=1000)
            return f"{words}\nthis growing budget keeps it:\ncache: {block.strip()}"
        for reach in range(1, len(edges) + len(by_budget)):  # if no budget changes, the cause lies in earlier bins
            raised = [steps + any(0 <= at - place <= reach for at in failing) for place, steps in enumerate(raised)]
            if propose(by_budget, edges, threshold, raised) != budget:
                break
        else:
            budget = None
            break
    if budget is None:
        return f"{words}\nno growing budget from these budgets keeps it; measure larger ones"
    return f"{words}\n{ROUNDS} growing budgets did not keep it; measure more or larger budgets, or more problems"
