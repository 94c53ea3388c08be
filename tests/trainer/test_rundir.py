"""A run directory is never overwritten, and only complete checkpoints of the same world size are resumed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.errors import LONGEST, UserError
from sparse_rl.metrics import METRICS_FILE, read_metrics
from sparse_rl.recipe import Recipe, make_recipe
from trainer import checkpoint as written
from trainer.checkpoint import (
    _checksum,
    checkpoints,
    damage,
    failure,
    file_digests,
    keep_last,
    locked,
    publish,
    read_manifest,
    refuse_running,
    refuse_used,
    set_aside_later,
    versions,
    write_manifest,
)
from trainer.rundir import RunLog, check_world

PARTS = (
    *("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"),
    *("progress_0.pt", "progress_1.pt"),
)


def recipe_of(folder: Path, *overrides: str, **keys):
    mapping = {
        "kind": "grpo", "model": "m", "output_dir": str(folder), "data": {"path": "a.jsonl"}, "rewards": ["boxed"],
        "cache": {"policy": "streaming", "budget": 8}, **keys,
    }  # fmt: skip
    return make_recipe(mapping, overrides)


def checkpoint(folder: Path, step: int, of=None, **fields) -> Path:
    """Write a complete checkpoint of two processes, as if by a run of the recipe `of`, and return its path."""
    partial, place = folder / "_partial" / f"checkpoint-{step}", folder / f"checkpoint-{step}"
    (partial / f"global_step{step}").mkdir(parents=True)
    for name in (*PARTS, f"global_step{step}/rank_1.pt"):
        (partial / name).write_bytes(f"{name} of step {step}".encode())
    recipe = of or recipe_of(folder)
    launch = {"processes": recipe.launch.processes, "zero_stage": recipe.launch.zero_stage}
    manifest = {"step": step, **launch, "recipe": recipe.resolved(), "versions": versions(), **fields}
    write_manifest(partial, file_digests(partial), **manifest)
    publish(partial, place)
    return place


def checkpoint_to_resume(recipe: Recipe, place: str) -> Path:
    return written.checkpoint_to_resume(place, recipe.resolved())


def test_a_used_directory_is_refused_if_files_would_be_lost(tmp_path):
    recipe = recipe_of(tmp_path)
    refuse_used(recipe.output_dir)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")  # killed before its first checkpoint
    refuse_used(recipe.output_dir)
    place = checkpoint(tmp_path, 1)
    with pytest.raises(UserError, match=r"output_dir.*holds an earlier run; use --resume"):
        refuse_used(recipe.output_dir)
    shutil.rmtree(place)
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"output_dir.*holds the model of an earlier run; choose another"):
        refuse_used(recipe.output_dir)
    with pytest.raises(UserError, match=r"--resume.*holds no complete checkpoint.*its run is finished"):
        checkpoint_to_resume(recipe, "newest")


@pytest.mark.parametrize("kind", [None, "truncated", "flipped", "rank", "manifest", "torn manifest"])
def test_resume_and_a_fresh_start_are_never_both_refused(kind, tmp_path):
    recipe = recipe_of(tmp_path)
    (tmp_path / "_partial" / "checkpoint-9").mkdir(parents=True)
    if kind is not None:
        DAMAGE[kind][0](checkpoint(tmp_path, 9))
    with pytest.raises(UserError, match="holds no complete checkpoint to resume from; start again, without --resume"):
        checkpoint_to_resume(recipe, "newest")
    refuse_used(recipe.output_dir)
    place = checkpoint(tmp_path, 8)
    assert checkpoint_to_resume(recipe, "newest") == place
    with pytest.raises(UserError, match="holds an earlier run"):
        refuse_used(recipe.output_dir)


def test_a_fresh_run_removes_the_metrics_of_the_run_before(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 2)))
    for resumed, kept in ((1, [0, 1]), (0, [])):
        state = SimpleNamespace(is_world_process_zero=True, global_step=resumed)
        RunLog(tmp_path).on_train_begin(None, state, None)
        assert [line["step"] for line in read_metrics(tmp_path)] == kept


HOLDER = """
import sys
from trainer.checkpoint import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_locked_directory_is_refused_until_its_process_dies(tmp_path):
    """A killed process releases the lock too, even if a child process still runs."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    forks = HOLDER.replace('print("', 'import os, time; os.fork() or time.sleep(5)\n    print("')
    for script in (HOLDER, forks):
        command[2] = script
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout.readline() == "locked\n"
            message = (
                rf"output_dir: .*run is in use by a run: process {holder.pid} on {re.escape(socket.gethostname())}; "
            )
            for attempt in (
                lambda: locked(str(tmp_path / "run")).__enter__(),
                lambda: refuse_running(f"{tmp_path}/run"),
            ):
                with pytest.raises(UserError, match=message):
                    attempt()
            holder.kill()
            holder.wait()
            refuse_running(str(tmp_path / "run"))
            with locked(str(tmp_path / "run")):
                pass


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with locked(str(tmp_path)):
        assert "has no file locks (No locks available): do not start a second run there" in caplog.text


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda c: os.truncate(c / "progress_1.pt", 5), r"progress_1\.pt is truncated \(5 bytes, 23 were"),
    "flipped": (lambda c: flip(c / "global_step9/rank_1.pt"), r"global_step9/rank_1\.pt has been altered \(its SHA"),
    "rank": (lambda c: (c / "progress_1.pt").unlink(), r"progress_1\.pt is missing"),
    "manifest": (lambda c: (c / "manifest.json").unlink(), r"manifest\.json is missing"),
    "torn manifest": (lambda c: os.truncate(c / "manifest.json", 300), r"manifest\.json is truncated or altered"),
    "altered manifest": (lambda c: alter(c, '"step": 9', '"step": 8'), r"manifest\.json has been altered"),
    "longer": (lambda c: (c / "trainer_state.json").write_bytes(b"x" * 99), r"trainer_state\.json is altered \(99"),
    "empty": (lambda c: [x.unlink() for x in c.rglob("*") if x.is_file()], r"manifest\.json is missing"),
}  # fmt: skip


def alter(folder: Path, old: str, new: str) -> None:
    file = folder / "manifest.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def crafted(folder: Path, content: dict) -> None:
    """Write a manifest with the given content and the matching checksum."""
    (folder / "manifest.json").write_text(json.dumps({**content, "checksum": _checksum(content)}))


def test_the_error_for_another_recipe_is_one_short_line(tmp_path):
    recipe, place = recipe_of(tmp_path), checkpoint(tmp_path, 9)
    crafted(place, {**read_manifest(place), "recipe": {}})
    with pytest.raises(UserError) as error:
        checkpoint_to_resume(recipe, "newest")
    output = str(error.value)
    assert output.count(" was null and is now ") == 20
    assert re.search(r"; and \d+ more keys\. Set the old values", output)
    assert len(output) < LONGEST
    assert "\n" not in output


def test_a_manifest_that_is_not_text_is_damaged(tmp_path):
    place = checkpoint(tmp_path, 9)
    for text in ("[" * 100_000, "[" * 900 + "]" * 900, "9" * 5000, "\udcff"):
        (place / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        assert damage(place) == "manifest.json is truncated or altered"


def test_a_checkpoint_with_an_unlisted_file_that_a_library_loads_is_damaged(tmp_path):
    place = checkpoint(tmp_path, 9)
    (place / "notes.txt").write_text("a user's own")
    assert damage(place) is None
    (place / "scaler.pt").write_bytes(b"x")
    assert damage(place) == "scaler.pt does not belong to the checkpoint: not in manifest.json"


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_checkpoint_before_is_used(kind, tmp_path, caplog):
    recipe = recipe_of(tmp_path)
    before, last = checkpoint(tmp_path, 8), checkpoint(tmp_path, 9)
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoint_to_resume(recipe, "newest") == last == checkpoint_to_resume(recipe, str(last))
    assert not caplog.messages
    damage, message = DAMAGE[kind]
    damage(last)
    assert checkpoint_to_resume(recipe, "newest") == before
    assert len(caplog.messages) == 1
    assert re.search(f"skipped .*checkpoint-9: {message}", caplog.messages[0])
    with pytest.raises(UserError, match=f"--resume: .*checkpoint-9 is not a complete checkpoint: {message}"):
        checkpoint_to_resume(recipe, str(last))
    (before / "progress_0.pt").unlink()
    with pytest.raises(UserError, match="holds no complete checkpoint to resume from"):
        checkpoint_to_resume(recipe, "newest")
    refuse_used(recipe.output_dir)


def test_another_number_of_processes_needs_updates_of_the_same_size(tmp_path, monkeypatch, caplog):
    two = recipe_of(tmp_path, launch={"processes": 2})
    checkpoint(tmp_path, 3, two)
    rows = two.training.per_device_train_batch_size * 2
    message = f"an update had {rows} rows, and has {rows // 2} now; set per_device_train_batch_size × gradient_acc"
    with pytest.raises(UserError, match=f"--resume: {message}umulation_steps to {rows}"):
        checkpoint_to_resume(recipe_of(tmp_path), "newest")
    with pytest.raises(UserError, match=r"launch\.zero_stage: was 0 and is now 2"):
        checkpoint_to_resume(recipe_of(tmp_path, launch={"processes": 2, "zero_stage": 2}), "newest")
    larger = recipe_of(tmp_path, f"per_device_train_batch_size={rows}")
    assert checkpoint_to_resume(larger, "newest").name == "checkpoint-3"
    assert "launch.processes, per_device_train_batch_size changed: the resumed run may differ" in caplog.text
    assert checkpoint_to_resume(two, "newest").name == "checkpoint-3"
    with pytest.raises(UserError, match=r"launch\.processes.*is 2, but 1 processes were started"):
        check_world(two.launch.processes)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_world(two.launch.processes)
    library = tmp_path / "library"
    unknown = checkpoint(library, 4, two, recipe=None)
    with pytest.raises(UserError, match=r"launch\.processes was 2 and is now 1"):
        checkpoint_to_resume(recipe_of(library), str(unknown))
    assert checkpoint_to_resume(recipe_of(library, launch={"processes": 2}), str(unknown)) == unknown


def test_the_error_for_a_changed_recipe_names_every_difference(tmp_path):
    checkpoint(tmp_path, 3)
    changed = recipe_of(
        tmp_path, "learning_rate=2e-6", "launch.zero_stage=3", "cache.budget=16", "cache.sinks=2", "logging_steps=7"
    )
    with pytest.raises(UserError) as error:
        checkpoint_to_resume(changed, "newest")
    assert str(error.value).endswith(
        "another recipe: cache.budget was 8 and is now 16; cache.sinks was 4 and is now 2; launch.zero_stage "
        "was 0 and is now 3; learning_rate was 1e-06 and is now 2e-06. Set the old values, or start a new run"
    )


def test_an_edited_policy_file_is_to_be_restored(tmp_path):
    """Its old hash cannot be set in a recipe: the file would be refused."""
    file = tmp_path / "own.py"
    file.write_text("from sparse_rl.policies.rules import Tova as Own\n")
    own = f"cache={{policy: '{file}:Own', budget: 8}}"
    checkpoint(tmp_path, 3, recipe_of(tmp_path, own))
    file.write_text(file.read_text() + "# edited\n")
    with pytest.raises(
        UserError, match=r"other rows or files: cache\.sha256 was .*\. Restore them, or start a new run$"
    ):
        checkpoint_to_resume(recipe_of(tmp_path, own), "newest")


def test_an_explicit_default_is_no_difference(tmp_path):
    place = checkpoint(tmp_path, 3)
    assert checkpoint_to_resume(recipe_of(tmp_path, "cache.sinks=4", "cache.period=1"), "newest") == place


@pytest.mark.parametrize(
    ("word", "warns"),
    [
        *[("run_name=b", False), ("report_to=[tensorboard]", False), ("logging_steps=5", False)],
        *[("save_steps=7", False), ("output_dir=elsewhere", False)],
        *[("save_total_limit=null", False), ("launch.main_process_ip=10.0.0.1", False), ("max_steps=50", False)],
        *[("num_train_epochs=9", False), ("replay_guard.enabled=false", False), ("rollout.progress=false", False)],
        ("attention_kernel=dense", True),
        *[("rollout.max_batch=8", True), ("gradient_checkpointing=false", True), ("rollout.sleep=true", True)],
    ],
)  # fmt: skip
def test_some_keys_may_change_on_resume(word, warns, tmp_path, caplog):
    place = checkpoint(tmp_path / "there", 3, recipe_of(tmp_path / "there"))
    assert checkpoint_to_resume(recipe_of(tmp_path / "here", word), str(place)) == place
    assert ["may differ in rounding" in message for message in caplog.messages] == [True] * warns


def test_attention_kernel_auto_may_change_to_the_chosen_kernel(tmp_path, caplog):
    """The recipe, read before the processes start, still says `auto`."""
    place = checkpoint(tmp_path / "there", 3, recipe_of(tmp_path / "there", "attention_kernel=sdpa"))
    assert checkpoint_to_resume(recipe_of(tmp_path / "here"), str(place)) == place
    assert not caplog.messages


def test_max_steps_may_change_if_the_learning_rate_does_not_depend_on_it(tmp_path):
    for scheduler, warmup, free in (
        *[("constant", 0, True), ("constant_with_warmup", 4, True), ("constant_with_warmup", 0.1, False)],
        *[("linear", 0, False), ("cosine", 4, False)],
    ):  # fmt: skip
        words = f"lr_scheduler_type={scheduler}", f"warmup_steps={warmup}"
        place = checkpoint(tmp_path / scheduler / str(warmup), 3, recipe_of(tmp_path, *words, "max_steps=10"))
        longer = recipe_of(tmp_path, *words, "max_steps=20")
        if free:
            assert checkpoint_to_resume(longer, str(place)) == place
        else:
            with pytest.raises(UserError, match="max_steps was 10 and is now 20"):
                checkpoint_to_resume(longer, str(place))
    with pytest.raises(UserError, match=r"max_steps: is 2, but .*checkpoint-3 is already at step 3"):
        checkpoint_to_resume(recipe_of(tmp_path, "max_steps=2"), str(place))


@pytest.mark.parametrize("moves", [{20: 40}, {20: 30, 30: 20}, {10: 99, 30: 1}, {10: 30, 20: 10, 30: 20}, {}])
def test_the_step_of_a_checkpoint_is_in_its_manifest(moves, tmp_path):
    names = {step: moves.get(step, step) for step in (10, 20, 30)}
    for step, name in names.items():
        checkpoint(tmp_path, step).rename(tmp_path / f"made-{name}")
    for name in names.values():
        (tmp_path / f"made-{name}").rename(tmp_path / f"checkpoint-{name}")
    assert checkpoint_to_resume(recipe_of(tmp_path), "newest").name == f"checkpoint-{names[30]}"
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{names[step]}" for step in (10, 20, 30)]
    keep_last(tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{names[step]}" for step in (20, 30)]
    assert [path.name for path in set_aside_later(tmp_path, 20)] == [f"later-checkpoint-{names[30]}"]


def test_a_checkpoint_of_another_run_is_refused_by_its_manifest(tmp_path):
    checkpoint(tmp_path / "a", 3)
    checkpoint(tmp_path / "b", 9, recipe_of(tmp_path / "b", "seed=5"))
    shutil.copytree(tmp_path / "b/checkpoint-9", tmp_path / "a/checkpoint-4")
    with pytest.raises(UserError, match="checkpoint-4 was written with another recipe: seed was 5 and is now 42"):
        checkpoint_to_resume(recipe_of(tmp_path / "a"), "newest")
    own = str(tmp_path / "a/checkpoint-3")
    assert str(checkpoint_to_resume(recipe_of(tmp_path / "a"), own)) == own


@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_that_lacks_a_part_is_not_complete(part, tmp_path):
    """transformers would resume without its optimizer, for example, in silence. The control has all parts."""
    two = recipe_of(tmp_path, launch={"processes": 1 if part == "rng_state.pth" else 2})
    place = checkpoint(tmp_path, 3, two)
    assert damage(place) is None
    (place / part).unlink()
    about = {name: value for name, value in read_manifest(place).items() if name not in ("format_version", "files")}
    (place / "manifest.json").unlink()
    write_manifest(place, file_digests(place), **about)
    assert damage(place) == f"{part} was never written"


def test_a_full_disk_is_found_by_writing(tmp_path, monkeypatch):
    """A library's error names no cause, and may contain any text. A disk is full if nothing more can be written."""

    def full(error: Exception) -> bool:
        return "the disk is full" in str(failure("it", tmp_path, error))

    for text in ("PytorchStreamWriter failed writing file", "No space left on device (os error 28)"):
        assert not full(RuntimeError(text))
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", refusing(errno.EDQUOT))
            assert full(RuntimeError(text))
    assert full(OSError(errno.ENOSPC, "no room, until a library removed its file"))
    assert not full(OSError(errno.EACCES, "not permitted"))


def refusing(code: int) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_resuming_from_another_runs_checkpoint_needs_a_new_directory(tmp_path):
    place = checkpoint(tmp_path / "there", 3, recipe_of(tmp_path / "there"))
    checkpoint(tmp_path / "here", 9, recipe_of(tmp_path / "here"))
    with pytest.raises(UserError, match=r"output_dir: .*here holds an earlier run"):
        checkpoint_to_resume(recipe_of(tmp_path / "here"), str(place))
    assert checkpoint_to_resume(recipe_of(tmp_path / "new"), str(place)) == place
    assert checkpoint_to_resume(recipe_of(tmp_path / "there"), str(place)) == place


def test_a_checkpoint_between_two_refreshes_is_refused(tmp_path):
    """Such checkpoints exist because transformers always saves at the end of a run."""
    mapping = {"kind": "distill", "model": "m", "output_dir": str(tmp_path), "data": {"path": "a.jsonl"}}
    mapping |= {"cache": {"policy": "streaming", "budget": 8}, "refresh_every": 4, "save_steps": 4}
    short, longer = (make_recipe(mapping, [f"max_steps={steps}"]) for steps in (6, 8))
    places = [checkpoint(tmp_path, step, short) for step in (4, 6)]
    with pytest.raises(UserError, match=r"refresh_every: .*checkpoint-6 is between two refreshes"):
        checkpoint_to_resume(longer, "newest")
    assert checkpoint_to_resume(longer, str(places[0])) == places[0]
    assert checkpoint_to_resume(short, "newest") == places[1]  # only the final model is missing


def test_other_versions_give_a_warning(tmp_path, caplog):
    place = checkpoint(tmp_path, 3, versions={**versions(), "torch": "1.0"})
    assert checkpoint_to_resume(recipe_of(tmp_path), "newest") == place
    assert re.search(r"torch was 1\.0 and is .*may differ in rounding", caplog.text)


def test_keep_last_counts_complete_checkpoints(tmp_path):
    written = [checkpoint(tmp_path, step) for step in (9, 10, 11, 12)]
    (written[2] / "progress_0.pt").unlink()
    keep_last(tmp_path, 2, best=str(written[0]))
    assert checkpoints(tmp_path) == written  # kept: two complete checkpoints, the best one, and a damaged one
    keep_last(tmp_path, 2)
    assert checkpoints(tmp_path) == written[1:]
    assert not (tmp_path / "_partial").exists()
    keep_last(tmp_path, None)
    assert checkpoints(tmp_path) == written[1:]


LINES = [{"step": step, "reward": step / 2, "note": "größer"} for step in range(3)]
JUNK = (b"\xff\xfe\x00", b"{", b"5", b"[]", b"null", b"{}", b'{"step": "1"}', b'{"step": true}', b'{"step": NaN}')
DEEP = (b"[" * 20_000, b'{"step": ' + b"7" * 5000 + b"}", b'{"step": 18446744073709551616}', b'{"a": "\xe9"}')


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from((*JUNK, *DEEP)) | st.binary(max_size=20), max_size=4), st.randoms(use_true_random=False)
)
def test_damaged_lines_of_metrics_are_skipped(junk, random):
    """hypothesis mixes damaged lines, and random bytes, with three valid lines. A folder without the file has none."""
    junk = [line.replace(b"\n", b"") for line in junk]
    mixed = [*junk, *(json.dumps(line).encode() for line in LINES)]
    random.shuffle(mixed)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / METRICS_FILE).write_bytes(b"\n".join(mixed))
        assert sorted(read_metrics(folder), key=lambda line: line["step"]) == LINES
        assert read_metrics(Path(folder) / "nowhere") == []
