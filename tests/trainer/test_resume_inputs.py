"""A resume compares the rows and files that a recipe names, by content: each change is refused, and a move is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_rundir import checkpoint

from sparse_rl import files
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import LONGEST, UserError
from sparse_rl.files import HEADER, PIECE, fingerprint
from sparse_rl.recipe import make_recipe
from sparse_rl.recipe.run import TrainRecipe

KVPOP = {"policy": "kvpop", "budget": 16, "window": 4, "scorer": "linear"}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"rewards": ["boxed", "mine.py:reward"], "num_generations": 4, "max_completion_length": 20},
    "distill": {"keep": "mine.py:reward", "teacher": "teacher"},
    "kvpop": {"max_length": 70},
    "sft": {"chat_template_path": "chat.jinja", "data": {"path": "rows.jsonl", "chat": False}},
}
REWARD = "def reward(completions, **_):\n    import helper\n    return [helper.WEIGHT for _ in completions]\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """run(kind) writes all that a recipe of this kind names into the working directory, and a checkpoint of its run in
    `out`. It returns a function that makes the recipe, with some keys changed.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("model", "teacher"):
        shutil.copytree(tiny(), name)
    for name, seed in (("rows", 1), ("held_out", 2)):
        made = [{**row, "level": i} for i, row in enumerate(RunningSum().rows("train", 24, seed, True))]
        write(Path(f"{name}.jsonl"), made)
    Path("helper.py").write_text("WEIGHT = 1.0\n")
    Path("mine.py").write_text(REWARD)
    Path("chat.jinja").write_text(TEMPLATE)

    def start(kind: str) -> Callable[..., TrainRecipe]:
        def make(**changed: Any) -> TrainRecipe:
            keys = {"model": "model", "output_dir": "out", "data": {"path": "rows.jsonl"}, "dtype": "float32"}
            keys |= {"per_device_train_batch_size": 8} | KINDS[kind] | {"kind": kind}
            if kind != "sft":
                keys |= {"cache": KVPOP if kind == "kvpop" else {"policy": "streaming", "budget": 8}}
                keys |= {"validation": {"data": {"path": "held_out.jsonl"}}, "attention_kernel": "gather"}
            if kind in ("grpo", "distill"):
                keys |= {"rollout": {"engine": "hf"}}
            return make_recipe({**keys, **changed}).expect(TrainRecipe)

        run = make().prepare_training()
        checkpoint(Path("out"), 3, run.recipe, inputs=run.inputs())
        return make

    return start


def write(file: Path, content: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in content))


def rewrite(file: str, change: Callable[[list], list]) -> None:
    content = [json.loads(line) for line in Path(file).read_text().splitlines()]
    write(Path(file), change(content))


def set_key(file: str, **values: Any) -> None:
    Path(file).write_text(json.dumps({**json.loads(Path(file).read_text()), **values}))


def change_weight(folder: str) -> None:
    weights = load_file(f"{folder}/model.safetensors")
    weights["model.norm.weight"][-1] += 1
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})


def edit(file: str, old: str, new: str) -> None:
    assert old in Path(file).read_text()
    Path(file).write_text(Path(file).read_text().replace(old, new))


ALL = tuple(KINDS)
CHANGES: dict[str, tuple[tuple[str, ...], Callable[[], Any], str]] = {
    "reversed": (ALL, lambda: rewrite("rows.jsonl", lambda r: r[::-1]), "rows of data"),
    "two swapped": (("grpo",), lambda: rewrite("rows.jsonl", lambda r: [r[1], r[0], *r[2:]]), "rows of data"),
    "fewer": (ALL, lambda: rewrite("rows.jsonl", lambda r: r[:-1]), r'was "24 rows, \w+" and is now "23 rows'),
    "more": (("grpo",), lambda: rewrite("rows.jsonl", lambda r: [*r, r[0]]), 'is now "25 rows'),
    "answer": (("grpo",), lambda: rewrite("rows.jsonl", lambda r: [*r[:-1], {**r[-1], "answer": "9"}]), "rows of data"),
    "completion": (ALL[1:], lambda: rewrite("rows.jsonl", lambda r: [r[0] | {"completion": "1"}, *r[1:]]), "of data"),
    "column": (("grpo",), lambda: rewrite("rows.jsonl", lambda r: [{**row, "level": 1} for row in r]), "rows of data"),
    "held out": (ALL[:3], lambda: rewrite("held_out.jsonl", lambda r: r[::-1]), "rows of validation.data was"),
    "config": (ALL, lambda: set_key("model/config.json", rms_norm_eps=1e-3), "model/config.json was"),
    "stop tokens": (("grpo",), lambda: set_key("model/generation_config.json", eos_token_id=[1]), "model/generation"),
    "tokenizer": (ALL, lambda: set_key("model/tokenizer_config.json", model_max_length=99), "model/tokenizer_config"),
    "template": (("grpo",), lambda: Path("model/chat_template.jinja").write_text(TEMPLATE), "jinja was null and"),
    "weights": (ALL, lambda: change_weight("model"), "model/model.safetensors was"),
    "scorers": (("kvpop",), lambda: Path("model/cache_scorer.safetensors").write_bytes(b"1"), "model/cache_scorer"),
    "teacher": (("distill",), lambda: change_weight("teacher"), "teacher/model.safetensors was"),
    "no file": (("distill",), lambda: Path("teacher/generation_config.json").unlink(), '" and is now null'),
    "reward": (ALL[:2], lambda: edit("mine.py", "completions]", "completions][:]"), "module mine of mine.py:rewa"),
    "helper": (ALL[:2], lambda: edit("helper.py", "1.0", "0.5"), "module helper of mine.py:reward was"),
    "chat template": (("sft",), lambda: Path("chat.jinja").write_text("x" + TEMPLATE), "chat_template_path/content"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), [(kind, name) for name, case in CHANGES.items() for kind in case[0]])
@pytest.mark.few(6)
def test_a_changed_input_is_refused_by_its_name(kind, change, run):
    recipe, (_, make_change, named) = run(kind), CHANGES[change]
    assert recipe().prepare_training("newest").checkpoint == Path("out/checkpoint-3")
    make_change()
    with pytest.raises(
        UserError, match=rf"--resume: out/checkpoint-3 was written with other rows or files: .*{named}"
    ) as error:
        recipe().prepare_training("newest")
    assert ("; " in str(error.value)) == (change == "template")  # a template changes the rows, too
    assert str(error.value).endswith(". Restore them, or start a new run")
    assert len(str(error.value)) < LONGEST


MOVES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "model": (lambda: Path("model").rename("other"), {"model": "other"}),
    "data": (lambda: Path("rows.jsonl").rename("b.jsonl"), {"data": {"path": "b.jsonl"}}),
    "held out": (lambda: Path("held_out.jsonl").rename("b.jsonl"), {"validation": {"data": {"path": "b.jsonl"}}}),
    "run": (lambda: Path("out").rename("there"), {"output_dir": "there"}),
    "teacher": (lambda: Path("teacher").rename("other"), {"teacher": "other"}),
    "files beside the model's": (lambda: Path("model/README.md").write_text("new"), {}),
    "order of keys": (lambda: rewrite("rows.jsonl", lambda r: [dict(sorted(row.items())) for row in r]), {}),
    "a module that is not imported": (lambda: Path("third.py").write_text("W = 2"), {}),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.few(3)
def test_a_moved_input_is_the_same_input(move, run):
    recipe, (make_move, changed) = run("distill"), MOVES[move]
    make_move()
    folder = Path(changed.get("output_dir", "out"))
    assert recipe(**changed).prepare_training("newest").checkpoint == folder / "checkpoint-3"


def test_a_checkpoint_without_fingerprints_is_resumed_with_a_word(run, caplog):
    """Then paths are compared instead, as any other key of the recipe."""
    recipe = run("grpo")
    shutil.rmtree("out")
    place = checkpoint(Path("out"), 3, recipe().prepare_training().recipe)
    assert recipe().prepare_training("newest").checkpoint == place
    assert "out/checkpoint-3 has no fingerprints: changes of data, models and rewards are not found" in caplog.text
    Path("rows.jsonl").rename("b.jsonl")
    with pytest.raises(UserError, match=r"another recipe: data.path was \"rows.jsonl\" and is now \"b.jsonl\""):
        recipe(data={"path": "b.jsonl"}).prepare_training("newest")


@pytest.mark.parametrize("drops", [False, True])
def test_a_checkpoint_from_before_validation_inherited_its_bound_is_resumed_or_refused(drops, run, caplog):
    """With the same rows, the resume says that lengths are planned otherwise. If the bound now drops rows, the resume
    is refused, until the recipe sets a bound that drops none."""
    make, data = run("distill"), {"path": "rows.jsonl", "max_prompt_tokens": 18}  # as long as all prompts
    shutil.rmtree("out")
    if drops:
        rewrite("held_out.jsonl", lambda rows: [{**rows[0], "prompt": "1 1" + rows[0]["prompt"]}, *rows[1:]])
    high = {"data": {"path": "held_out.jsonl", "max_prompt_tokens": 500}}
    old = make(data=data, validation=high).prepare_training()
    object.__setattr__(old.recipe.validation.data, "max_prompt_tokens", None)
    place = checkpoint(Path("out"), 3, old.recipe, inputs=old.inputs())
    if drops:
        with pytest.raises(
            UserError, match=r"other rows .*rows of validation.data was .* was null and is now 18\. Res"
        ):
            make(data=data).prepare_training("newest")
    assert make(data=data, **({"validation": high} if drops else {})).prepare_training("newest").checkpoint == place
    assert "validation.data.max_prompt_tokens changed: the resumed run may differ in rounding" in caplog.text


def test_weights_that_are_not_read_whole_have_a_fingerprint_of_pieces(tmp_path, monkeypatch):
    """Up to PIECES pieces, every byte counts. Of a larger file, its start and evenly spread pieces count."""
    monkeypatch.setattr(files, "PIECES", 64)
    file, size = tmp_path / "weights", 128 * PIECE
    with file.open("wb") as opened:
        opened.truncate(size)

    def changed(place: int) -> bool:
        before = fingerprint(file)
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"1")
        return fingerprint(file) != before

    assert all(map(changed, (0, HEADER - 1, 20 * PIECE, size - 2 * PIECE)))
    assert not changed(21 * PIECE)
    file.write_bytes(bytes(PIECE * 20))
    assert all(map(changed, (0, HEADER - 1, 17 * PIECE + 5, 20 * PIECE - 1)))
    assert len({fingerprint(file), file.write_bytes(b"") or fingerprint(file)}) == 2
