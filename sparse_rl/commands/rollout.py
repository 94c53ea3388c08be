"""`sparse-rl rollout`: sample problems of a recipe, and keep their completions and traces."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparse_rl.commands.arguments import add_recipe, positive, read_recipe
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import UserError

ABOUT = "Sample problems of a recipe and keep their completions and traces."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: OUTPUT_DIR/rollouts")
    parser.add_argument("--problems", metavar="N", type=positive, default=8)


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.recipe import EvalRecipe, GRPORecipe
    from sparse_rl.samples import sample

    recipe = read_recipe(options)
    if not isinstance(recipe, GRPORecipe | EvalRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} has no cache to sample under; use one of grpo or eval", "kind")
    folder = options.out or Path(recipe.output_dir) / "rollouts"
    session.folder = folder
    quiet_loading(session.verbose)
    rollouts = sample(recipe, folder, options.problems)
    lengths, kept = [one["tokens"] for one in rollouts], [one["retention"] for one in rollouts]
    cut = sum(one["finish_reason"] == "length" for one in rollouts)
    print(
        f"{len(rollouts)} completions, {sum(lengths) / len(lengths):.0f} tokens on average ({min(lengths)} to "
        f"{max(lengths)}), {cut} cut off; kept at the end {sum(kept) / len(kept):.1%} of the cache"
    )
    print("\n".join(str(file) for file in (folder / "completions.jsonl", *sorted(folder.glob("traces-*.safetensors")))))
    return 0
