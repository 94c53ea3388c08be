"""`sparse-rl verify`: replay the rollouts of a folder, and check that their log-probs equal the sampler's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.origin import COMPLETIONS, Origin, read_origin
from sparse_rl.commands.arguments import file_path, number
from sparse_rl.commands.console import Session, quiet_loading, warn
from sparse_rl.errors import UserError
from sparse_rl.models.directory import CONFIG_FILE, model_directory

if TYPE_CHECKING:
    from rollout.verify import Gap

ABOUT = "Replay rollouts on disk and compare their log-probs with the sampler's; exit status 1 if the gap is too large."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", metavar="ROLLOUTS", type=file_path, help="a folder that sparse-rl rollout wrote")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="default: the model that sampled them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the sampler's")
    parser.add_argument(
        "--bound", metavar="NATS", type=number, help="largest allowed gap of a token; default: depends on the dtype"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, session: Session) -> int:
    origin = read_origin(options.rollouts)
    directory, dtype = _model(options.model, origin), options.dtype or origin.dtype
    import torch

    from rollout.files import RolloutFiles
    from rollout.verify import Gap, check_model, default_bound, verify
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
    gaps: dict[str, Gap] = {}
    for file, gap in verify(model, RolloutFiles(options.rollouts, origin), bound):
        gaps.setdefault(file.name, Gap()).add(gap)
    whole = Gap()
    for gap in gaps.values():
        whole.add(gap)
    if options.json:
        facts = {"holds": not whole.beyond, "bound": bound, "dtype": dtype, "made_by": origin.made_by}
        files = [{"file": name, **gap.as_numbers()} for name, gap in gaps.items()]
        print(json.dumps({**facts, "model": directory, **whole.as_numbers(), "files": files}))
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


def _model(name_or_path: str | None, origin: Origin) -> str:
    """Return the replaying model's directory or hub name. Raises UserError if the sampler's is needed but missing."""
    if name_or_path is None and Path(origin.model).is_absolute() and not Path(origin.model).is_dir():
        raise UserError(
            f"{origin.model}, the model that sampled these rollouts, does not exist; name the model",
            "MODEL",
        )
    return model_directory(name_or_path or origin.model)


def _lines(origin: Origin, model: str, dtype: str, gaps: dict[str, Gap]) -> list[str]:
    """Return lines that describe sampler, caches and replaying model, and the gap of each file."""
    sampling = origin.sampling
    truncation = [
        f"{name} {getattr(sampling, name):g}" for name in ("top_p", "top_k") if getattr(sampling, name) is not None
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
