"""`sparse-rl verify`: replay the rollouts of a folder, and check that their log-probs equal the sampler's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import COMPLETIONS, Origin, read_origin
from sparse_rl.commands.arguments import file_path, number
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import UserError
from sparse_rl.models.directory import CONFIG_FILE, model_directory
from sparse_rl.progress import warn

if TYPE_CHECKING:
    from rollout.verify import Gap

ABOUT = "Replay rollouts on disk and compare their log-probs with the sampler's; exit status 1 if the gap is too large."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", metavar="ROLLOUTS", type=file_path, help="a folder that sparse-rl rollout wrote")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="default: the model that sampled them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the sampler's")
    parser.add_argument(
        "--bound",
        metavar="NATS",
        type=number,
        help="largest allowed gap of a token; default: by the dtype, and in float32 the model's own rounding if larger",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, session: Session) -> int:
    origin = read_origin(options.rollouts)
    named, dtype = options.model or origin.model, options.dtype or origin.dtype
    if options.model is None and Path(named).is_absolute() and not Path(named).is_dir():
        raise UserError(f"{named}, the model that sampled these rollouts, does not exist; name the model", "MODEL")
    directory = model_directory(named)
    import torch

    from rollout.files import RolloutFiles
    from rollout.verify import Gap, check_model, default_bound, own_rounding, verify
    from sparse_rl.models.load import load_config, load_model
    from sparse_rl.models.weights import check_weights

    quiet_loading(session.verbose)
    config = load_config(directory)
    if not check_model(origin, config, directory):
        warn(f"{CONFIG_FILE} of {directory} differs from that of the model that sampled these rollouts")
    check_weights(config, directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bound = options.bound or default_bound(origin, dtype, device)
    model = load_model(directory, dtype).to(device).eval()
    files = RolloutFiles(options.rollouts, origin)

    def measure() -> tuple[dict[str, Gap], Gap]:
        gaps, whole = dict[str, Gap](), Gap()
        for file, gap in verify(model, files, bound):
            gaps.setdefault(file.name, Gap()).add(gap)
            whole.add(gap)
        return gaps, whole

    gaps, whole = measure()
    if whole.beyond and options.bound is None and dtype == origin.dtype == "float32":
        bound = max(bound, own_rounding(model, files))
        gaps, whole = measure()
    if options.json:
        facts = {"holds": not whole.beyond, "bound": bound, "dtype": dtype, "made_by": origin.made_by}
        by_file = [{"file": name, **gap.as_numbers()} for name, gap in gaps.items()]
        print(json.dumps({**facts, "model": directory, **whole.as_numbers(), "files": by_file}))
    else:
        print("\n".join(_lines(origin, directory, dtype, gaps)))
    worst = f"{whole.largest:.1e}, in line {whole.line} of {COMPLETIONS} at token {whole.token} of its completion"
    if whole.beyond:
        count = f"{whole.beyond} of {whole.tokens} tokens are above the bound {bound:g}"
        print(f"sparse-rl: the gap is too large: {count}; the largest is {worst}", file=sys.stderr)
        return 1
    if not options.json:
        print(f"the invariant holds: none of {whole.tokens} tokens has a gap above {bound:g}; the largest is {worst}")
    return 0


def _lines(origin: Origin, model: str, dtype: str, gaps: dict[str, Gap]) -> list[str]:
    sampling = origin.sampling
    truncation = [
        f"{name} {getattr(sampling, name):g}" for name in ("top_p", "top_k", "min_p") if getattr(sampling, name)
    ]
    settings = ", ".join([f"temperature {sampling.temperature:g}", *(truncation if sampling.truncated_support else [])])
    caches: dict[str, Any] = {name: text for name, text in origin.made_by.items() if name != "model"}
    lines = {
        "sampled": f"by {origin.engine} in {origin.dtype}, {settings}",
        **caches,
        "replayed": f"by {model} in {dtype}",
    }
    lines |= {
        name: f"{gap.rollouts} rollouts, {gap.tokens} tokens: gap at most {gap.largest:.1e}, mean {gap.mean:.1e}"
        for name, gap in gaps.items()
    }
    width = max(map(len, lines))
    return [f"{name:<{width}} {text}" for name, text in lines.items()]
