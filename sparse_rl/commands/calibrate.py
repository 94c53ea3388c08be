"""`sparse-rl calibrate`: measure the centres of a model's queries on a text, for the policy `triattention`."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparse_rl.commands.arguments import file_path, positive
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import UserError, unread
from sparse_rl.files import read_text
from sparse_rl.models.directory import model_directory

ABOUT = "Measure the centres of a model's queries on a text, once, for the policy triattention."
LEAST = 100  # tokens of a text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's directory, which gets the file, or a run's directory")
    parser.add_argument("text", metavar="TEXT", type=file_path, help="a text file, of any subject")
    parser.add_argument("--tokens", type=positive, default=32768, help="maximum number of tokens (default: 32768)")
    parser.add_argument("--replace", action="store_true", help="replace centres that fit the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")


def run(options: argparse.Namespace, session: Session) -> int:
    quiet_loading(session.verbose)
    import torch

    from sparse_rl.attention.families import context_length
    from sparse_rl.methods.triattention.policy import measure_centres
    from sparse_rl.models.centres import fitting_centres, write_centres
    from sparse_rl.models.load import load_plain_model, load_tokenizer

    directory = model_directory(options.model)
    if not Path(directory).is_dir():
        raise UserError(f"{directory} is no directory, in which to write the centres; download the model", "MODEL")
    if not options.replace and fitting_centres(directory):
        wrong = f"{directory} has centres; a model that was trained under triattention was trained under them"
        raise UserError(f"{wrong}, and needs no others. --replace measures new ones", "MODEL")
    try:
        text = read_text(options.text)
    except (OSError, ValueError) as error:
        raise UserError(f"{options.text} cannot be read: {unread(error)}", "TEXT") from error
    model = load_plain_model(directory, options.dtype).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    longest = context_length(model.config) or model.config.max_position_embeddings
    ids = load_tokenizer(directory).encode(text)[: min(options.tokens, longest)]
    if len(ids) < LEAST:
        raise UserError(f"{options.text} has {len(ids)} tokens; at least {LEAST} are needed", "TEXT")
    file = write_centres(directory, measure_centres(model, ids))
    print(f"{file}: centres of the queries of {directory}, from {len(ids):,} tokens")
    return 0
