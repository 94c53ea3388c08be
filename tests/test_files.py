"""An endless file, or a file larger than any of its kind can be, is refused in one line before it is read."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.config import ORIGIN, read_origin
from rollout.context import PromptCacheConfig, budgets
from rollout.context.cache import load_context
from rollout.vllm.serve import compact_text
from sparse_rl.analysis.results import read_sweep
from sparse_rl.commands.main import main
from sparse_rl.commands.plot import draw_bench, draw_budgets
from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import read_pieces
from sparse_rl.errors import UserError
from sparse_rl.files import MOST_JSON, MOST_TEXT, check_folder, open_tensors, read_json, read_text
from sparse_rl.models.directory import POLICY_FILE, saved_policy
from sparse_rl.models.load import load_config, load_tokenizer
from sparse_rl.models.weights import stored_shapes
from sparse_rl.trace import load_traces
from trainer.teacher import INDEX, _read_index

QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart/model"


def stored_shapes_beside(file: Path) -> object:
    return stored_shapes(file.parent)


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
def test_read_text_refuses_endless_files(make_endless, tmp_path):
    refused = make_endless(tmp_path / "file", MOST_JSON)
    with pytest.raises(UserError, match=refused):
        read_text(tmp_path / "file")


def test_every_kind_of_line_ending_is_read_as_a_newline(tmp_path):
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    assert read_text(tmp_path / "file") == "a\nb\nc\n"


def test_a_file_of_exactly_the_limit_is_read(tmp_path):
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
def test_commands_refuse_endless_files(read, limit, make_endless, tmp_path):
    file = tmp_path / "eval.json"
    refused = make_endless(file, limit)
    with pytest.raises(UserError, match=f"{file} .*{refused}"):
        read(file)


@pytest.mark.parametrize("make_endless", [device, pipe])
def test_endless_files_of_data_are_refused(make_endless, tmp_path):
    file = tmp_path / "rows.jsonl"
    make_endless(file, 0)
    with pytest.raises(UserError, match="not a regular file"):
        load_data(DataConfig(path=str(file)), None)


@pytest.mark.parametrize("make_endless", ENDLESS)
@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_endless_files_of_a_model_are_refused(name, make_endless, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(QUICKSTART, model)
    (model / name).unlink(missing_ok=True)
    refused = make_endless(model / name, MOST_JSON)
    for load in (load_config, load_tokenizer):
        with pytest.raises(UserError, match=f"{name} cannot be read: .*{refused}"):
            load(str(model))


def test_too_large_files_of_policy_and_origin_are_refused(tmp_path):
    for name, read in ((POLICY_FILE, saved_policy), ("rollouts.json", read_origin)):
        too_large(tmp_path / name, MOST_JSON)
        with pytest.raises(UserError, match="are read"):
            read(tmp_path)


CONTENTS = {
    "empty": b"",
    "cut": b'{"shares": [[1, ',
    "deep list": b"[" * 100_000,
    "deep mapping": b'{"a":' * 100_000,
    "list": b"[1]",
    "number": b"1",
    "text": b'"x"',
    "null": b"null",
    "many digits": b'{"shares": ' + b"9" * 10_000 + b"}",
    "not UTF-8": b'\xff\xfe{"a": 1}',
    "NUL": b"\0" * 8,
    "half a surrogate pair": b'{"rows": [{"task": "\\ud800"}], "model": "\\uDFFF"}',
    "nothing of use": b"{}",
    "wrong types": b'{"rows": {"a": 1}, "shares": "a", "policy": [1], "format_version": {}, "contexts": 3}',
}
IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "endless device": lambda file: file.symlink_to("/dev/zero"),
    "link to itself": lambda file: file.symlink_to(file),
    "dangling link": lambda file: file.symlink_to(file.with_name("absent")),
}
READERS: dict[str, Callable[[Path], object]] = {
    "eval.json": read_sweep,
    "bench.json": lambda file: draw_bench(file, file.with_suffix(".png")),
    "head_budgets.json": lambda file: draw_budgets(file),
    "budgets.json": lambda file: budgets.load(file, range(2), 2),
    POLICY_FILE: lambda file: saved_policy(file.parent),
    ORIGIN: lambda file: read_origin(file.parent),
    INDEX: lambda file: _read_index(file.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_files_with_wrong_content_are_refused_in_one_line(name, tmp_path):
    for number, (what, content) in enumerate({**CONTENTS, **IN_THE_WAY}.items()):
        file = tmp_path / str(number) / name
        file.parent.mkdir()
        content(file) if callable(content) else file.write_bytes(content)
        with pytest.raises(UserError) as caught:
            READERS[name](file)
        line = str(caught.value)
        assert str(file if what in CONTENTS else file.parent) in line
        assert "\n" not in line
        assert len(line) < 600


def test_a_mapping_with_a_whole_surrogate_pair_is_read(tmp_path):
    """Control of the test above."""
    (tmp_path / "file").write_text('{"a": "\\ud83d\\ude00", "b": 1e999}')
    assert read_json(tmp_path / "file") == {"a": "😀", "b": float("inf")}


@pytest.mark.parametrize("what", IN_THE_WAY)
@pytest.mark.parametrize(
    "read", [open_tensors, load_traces, load_context, stored_shapes_beside], ids=lambda f: f.__name__
)
def test_things_that_are_no_file_are_not_opened_as_tensors(what, read, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    IN_THE_WAY[what](tmp_path / "model.safetensors")
    with pytest.raises((UserError, OSError)):
        read(tmp_path / "model.safetensors")


@pytest.mark.parametrize("suffix", ["safetensors", "yaml", "jsonl", "json", "png"])
def test_inspect_refuses_what_is_no_trace_in_one_line(suffix, tmp_path, capsys):
    for number, content in enumerate([*CONTENTS.values(), *IN_THE_WAY.values()]):
        file = tmp_path / f"{number}.{suffix}"
        content(file) if callable(content) else file.write_bytes(content)
        status = main(["inspect", str(file)])
        out, err = capsys.readouterr()
        assert status == 2
        assert len((out + err).splitlines()) == 1


@pytest.mark.parametrize("name", ["absent", "absent/deep", ".", "a b", "a\nb", "漢字", "100%d", "{x}", "x" * 255])
def test_a_folder_that_can_be_written_is_accepted_and_left_as_it_was(name, tmp_path):
    (tmp_path / "log").write_text("log")
    (tmp_path / "other").mkdir()
    check_folder(tmp_path / name, "output_dir", ["log", "log2"], ["other", "other2"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["log", "other"]


@pytest.mark.parametrize(
    "name", ["/proc/x", "/proc/self/x/y", "/sys/x", "/dev/null", "/dev/null/x", "/dev/full", "/dev/fd/x"]
)
def test_a_folder_where_nothing_can_be_written_is_refused(name):
    with pytest.raises(UserError, match=f"^output_dir: {name} cannot be written: /.*; name another folder$"):
        check_folder(Path(name), "output_dir", [])


def test_a_file_or_a_dangling_link_instead_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "dangling", "loop"):
        for place in (tmp_path / name, tmp_path / name / "below"):
            with pytest.raises(UserError, match=f"{place} cannot be written: {tmp_path / name} "):
                check_folder(place, "--out", [])


def test_a_full_disk_is_found(tmp_path):
    """The limit of a file's size stands for a full disk: both show only when something is written."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written: .*File too large"):
            check_folder(tmp_path, "output_dir", [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", [*IN_THE_WAY, "file"])
def test_things_in_the_way_are_named(what, tmp_path):
    make = {**IN_THE_WAY, "file": Path.touch}[what]
    for number, name in enumerate(("log", "checkpoint-12", "unrelated")):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        if what == {"log": "file", "checkpoint-12": "folder", "unrelated": what}[name]:
            check_folder(folder, "output_dir", ["log"], ["checkpoint-*"])
        else:
            with pytest.raises(UserError, match=f"{folder / name} is not a (file|folder) that can be"):
                check_folder(folder, "output_dir", ["log"], ["checkpoint-*"])
