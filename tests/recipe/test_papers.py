"""docs/papers/ says how to reproduce each table and figure of the papers, and where each constant is. These tests read
the pages: values equal the code's, commands pass a dry run, and no table or figure of a paper is missing.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_recipes import small_evaluation, small_training

from sparse_rl.commands.main import main, parse
from sparse_rl.config import as_mapping, default_of
from sparse_rl.methods.config import CONFIGS
from sparse_rl.recipe import TrainRecipe, load_recipe

ROOT = Path(__file__).parents[2]
PAPERS = ROOT.parent / "shared" / "papers"  # optional, outside the repository
PAGES = {
    "gkv": "gkv.md",
    "kvpop": "kvpop.md",
    "kvpop-workshop": "kvpop.md",
    "luka": "luka.md",
    "attention-matching": "attention_matching.md",
}
CONSTANTS = ["what, and where in the paper", "paper's value", "here", "our value", "difference and reason"]
Row = dict[str, str]


def tables(text: str) -> Iterator[list[Row]]:
    """Yield the tables of a Markdown page: rows of heading -> cell."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        lines = [
            [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
            for line in block.splitlines()
        ]
        yield [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def page(name: str) -> str:
    file = ROOT / "docs" / "papers" / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def rows_with(heading: str) -> list[Row]:
    """Return the rows of all tables that have this heading, on all pages."""
    return [
        row | {"page": name}
        for name in sorted(set(PAGES.values()))
        for table in tables(page(name))
        for row in table
        if heading in row
    ]


def constants() -> list[Row]:
    return rows_with("difference and reason")


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def value_in_code(place: str) -> Any:
    """Return the value at a place: `policy: parameter`, `recipe: dotted.key` or `file.py: Class.field`."""
    name, _, key = place.partition(": ")
    if name.endswith(".py"):
        cls, _, field = key.partition(".")
        module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
        (member,) = [f for f in dataclasses.fields(getattr(module, cls)) if f.name == field]
        value = default_of(member)
        return as_mapping(value) if dataclasses.is_dataclass(value) else value
    if name in CONFIGS:
        first, *rest = key.split(".")
        (member,) = [f for f in dataclasses.fields(CONFIGS[name]) if f.name == first]
        value = default_of(member)
        value = value.as_block() if hasattr(value, "as_block") else value
    else:
        value, rest = load_recipe(name).resolved(), key.split(".")
    for part in rest:
        if isinstance(value, list) and not part.isdigit():
            (value,) = value  # a list of one block
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def wrong_constant(row: Row) -> str | None:
    """Return the reason why a row of a table of constants is wrong; None if it is right."""
    places = quoted(row["here"])
    if len(places) != 1:
        return "it does not name one place"
    (place,) = places
    if ": " not in place:
        return None if (ROOT / place).exists() else f"{place} does not exist"
    ours = yaml.safe_load(row["our value"].replace("`", ""))
    if ours != value_in_code(place):
        return f"{place} is {value_in_code(place)!r}, not {ours!r}"
    theirs = yaml.safe_load(row["paper's value"].replace("`", "")) if row["paper's value"] else ours
    if theirs != ours and not row["difference and reason"]:
        return f"{theirs!r} became {ours!r} without a reason"
    return None


@pytest.mark.parametrize("row", constants(), ids=lambda row: f"{row['page']}-{row[CONSTANTS[0]]}")
def test_a_listed_constant_is_that_of_the_code(row):
    assert list(row)[:-1] == CONSTANTS
    assert wrong_constant(row) is None


def test_a_wrong_constant_is_found():
    row = dict.fromkeys(CONSTANTS, "")
    right = row | {"here": "`gkv: alpha`", "our value": "0.8", "paper's value": "0.8"}
    assert wrong_constant(right) is None
    assert "is 0.8" in (wrong_constant(right | {"our value": "0.7"}) or "")
    assert "without a reason" in (wrong_constant(right | {"paper's value": "0.7"}) or "")
    assert wrong_constant(right | {"paper's value": "0.7", "difference and reason": "the code's"}) is None
    assert "does not exist" in (wrong_constant(row | {"here": "`sparse_rl/no_such_file.py`"}) or "")
    assert "one place" in (wrong_constant(row) or "")


@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers are absent")
@pytest.mark.parametrize("paper", PAGES)
def test_every_table_and_figure_has_a_row(paper):
    text = (PAPERS / f"{paper}.txt").read_text(encoding="utf-8")
    captions = set(re.findall(r"^\s*((?:Figure|Table) \d+)[:.]", text, re.M))
    assert captions
    whole = page(PAGES[paper])
    if PAGES[paper] == "kvpop.md":  # the page of two papers
        first, second = whole[: whole.index("\n# ", 3)], whole[whole.index("\n# ", 3) :]
        whole = second if paper == "kvpop-workshop" else first
    listed = {
        name for table in tables(whole) for row in table for name in re.findall(r"\w+ \d+", row.get("number", ""))
    }
    assert not captions - listed


def commands() -> list[str]:
    """Return every command of the tables, once."""
    listed = [command for row in rows_with("command") for command in quoted(row["command"])]
    return list(dict.fromkeys(command for command in listed if re.match(r"(\w+=\S+ )*(sparse-rl|python) ", command)))


def words_of(command: str) -> list[str]:
    """Return the words of a command without leading variables."""
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    return words


@pytest.mark.parametrize("command", [c for c in commands() if words_of(c)[0] == "python"])
def test_a_python_command_names_a_file(command):
    _, *words = words_of(command)
    file = f"{words[1].replace('.', '/')}" if words[0] == "-m" else words[0]
    assert (ROOT / file).exists() or (ROOT / f"{file}.py").exists()


DRY = ("train", "eval", "rollout", "perplexity", "budgets", "bench")  # the commands that have a dry run


@pytest.mark.parametrize("command", [c for c in commands() if words_of(c)[0] == "sparse-rl"])
@pytest.mark.few(5)
def test_a_command_passes_its_dry_run(command, stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, *words = words_of(command)[1:]
    options = parse([name, *words])
    if name not in DRY:
        return
    overrides = stand_ins(options.recipe, options.overrides)
    status = main([name, options.recipe, *options.overrides, *overrides, "--dry-run"])
    output = capsys.readouterr()
    assert status == 0, output.err
    assert "not checked" in output.out


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if words_of(c)[:2] in [["sparse-rl", name] for name in DRY]])
def test_a_command_runs_at_a_small_size(command, stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr("sparse_rl.recipe.sft.CHECK_PROBLEMS", 8)
    name, *words = words_of(command)[1:]
    options = parse([name, *words])
    overrides = [*options.overrides, *stand_ins(options.recipe, options.overrides), "dtype=float32"]
    recipe = load_recipe(options.recipe, overrides)
    small = small_training(recipe) if isinstance(recipe, TrainRecipe) else small_evaluation(recipe)
    arguments = ["--problems", "2"] if name == "rollout" else []
    status = main([name, options.recipe, *overrides, *small, *arguments])
    assert status == 0, capsys.readouterr().err
