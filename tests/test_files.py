"""An endless file, or a file larger than any of its kind can be, is refused in one line before it is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.context import PromptCacheConfig, budgets
from rollout.origin import read_origin
from rollout.vllm.served_context import compact_text
from sparse_rl.analysis.sweeps import read_sweep
from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.text import read_pieces
from sparse_rl.errors import UserError
from sparse_rl.files import MOST_JSON, MOST_TEXT, read_text
from sparse_rl.models.directory import POLICY_FILE, saved_policy
from sparse_rl.models.load import load_config, load_tokenizer

QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart/model"


def device(file: Path, limit: int) -> str:
    """Make the file a link to an endless device. This and the next functions return the expected error."""
    file.symlink_to("/dev/zero")
    return "not a regular file"


def pipe(file: Path, limit: int) -> str:
    os.mkfifo(file)
    return "not a regular file"


def too_large(file: Path, limit: int) -> str:
    with file.open("wb") as opened:
        opened.truncate(limit + 1)
    return f"it has {limit + 1:,} bytes, and at most {limit:,} are read"


ENDLESS = [device, pipe, too_large]


@pytest.mark.parametrize("make_endless", ENDLESS)
def test_read_text_refuses_endless_files(make_endless: Callable, tmp_path: Path) -> None:
    """ENDLESS makes a link to an endless device, a pipe, or a file that is one byte too large. `read_text` refuses each
    before it reads.
    """
    refused = make_endless(tmp_path / "file", MOST_JSON)
    with pytest.raises(UserError, match=refused):
        read_text(tmp_path / "file")


def test_every_kind_of_line_ending_is_read_as_a_newline(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    assert read_text(tmp_path / "file") == "a\nb\nc\n"


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("é" * 5)  # 10 bytes
    assert read_text(tmp_path / "file", 10) == "é" * 5
    with pytest.raises(UserError, match="it has 10 bytes, and at most 9 are read"):
        read_text(tmp_path / "file", 9)


@pytest.mark.parametrize("make_endless", ENDLESS)
@pytest.mark.parametrize(
    ("read", "limit"),
    [
        (lambda file: read_pieces(str(file), None, 8), MOST_TEXT),
        (lambda file: compact_text(str(QUICKSTART), str(file), PromptCacheConfig(), "float32", None), MOST_JSON),
        (read_sweep, MOST_TEXT),
        (lambda file: budgets.load(file, range(2), 2), MOST_JSON),
    ],
    ids=["perplexity", "context", "plot", "budgets"],
)
def test_commands_refuse_endless_files(read: Callable, limit: int, make_endless: Callable, tmp_path: Path) -> None:
    """The functions by which commands read a user's file refuse it in one line that names the file."""
    file = tmp_path / "eval.json"
    refused = make_endless(file, limit)
    with pytest.raises(UserError, match=f"{file} .*{refused}"):
        read(file)


@pytest.mark.parametrize("make_endless", [device, pipe])
def test_endless_files_of_data_are_refused(make_endless: Callable, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    make_endless(file, 0)
    with pytest.raises(UserError, match="not a regular file"):
        load_data(DataConfig(path=str(file)), None)


@pytest.mark.parametrize("make_endless", ENDLESS)
@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_endless_files_of_a_model_are_refused(name: str, make_endless: Callable, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(QUICKSTART, model)
    (model / name).unlink(missing_ok=True)
    refused = make_endless(model / name, MOST_JSON)
    for load in (load_config, load_tokenizer):
        with pytest.raises(UserError, match=f"{name} cannot be read: .*{refused}"):
            load(str(model))


def test_too_large_files_of_policy_and_origin_are_refused(tmp_path: Path) -> None:
    for name, read in ((POLICY_FILE, saved_policy), ("rollouts.json", read_origin)):
        too_large(tmp_path / name, MOST_JSON)
        with pytest.raises(UserError, match="are read"):
            read(tmp_path)
