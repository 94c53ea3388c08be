"""`sparse-rl keys` lists every key in a terminal's width and imports no heavy library; a mistake gives one line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from rewards import REWARDS
from sparse_rl.commands.keys import TOPICS
from sparse_rl.commands.main import main
from sparse_rl.config import yaml_fields
from sparse_rl.methods.config import CONFIGS as POLICIES
from sparse_rl.methods.kvpop.scorers.config import CONFIGS as SCORERS
from sparse_rl.recipe import KINDS
from sparse_rl.recipe.json_schema import recipe_schema
from sparse_rl.recipe.keys import list_sections
from sparse_rl.recipe.passed_through import PASSED_THROUGH


def said(capsys, *words: str) -> list[str]:
    """Return the output lines of `sparse-rl keys`."""
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out.splitlines()


def keys_in(lines: list[str]) -> list[str]:
    """Return the keys in those lines that begin with a key, a colon and the key's type."""
    return [line.split(":")[0] for line in lines if line and " " not in line.split(":")[0] and ":" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_kind_is_shown_once(kind, capsys):
    rows = [row.key for section in list_sections(KINDS[kind]) for row in section.rows]
    assert keys_in(said(capsys, kind)) == [*rows, *PASSED_THROUGH.get(kind, {})]
    assert not yaml_fields(KINDS[kind]).keys() - {row.removesuffix(".NAME") for row in rows}


def test_a_key_has_its_type_default_and_words(capsys):
    lines = said(capsys, "grpo", "save_steps")
    at = lines.index("save_steps: a whole number >= 0 (default 100)")
    assert lines[at + 1] == "    number of steps between checkpoints; 0 writes only the final model"
    assert "model: text that is not empty (required)" in said(capsys, "sft")


def test_a_part_of_the_keys(capsys):
    assert {key.partition(".")[0] for key in keys_in(said(capsys, "grpo", "rollout."))} == {"rollout"}
    assert keys_in(said(capsys, "grpo", "learning_rate")) == ["scorers.learning_rate", "learning_rate"]
    assert keys_in(said(capsys, "grpo", "adam_eps")) == ["adam_epsilon"]  # passed on to TRL
    assert said(capsys, "grpo", "cache")[-1].endswith("sparse-rl keys policies")
    assert not said(capsys, "sft", "cache")[-1].endswith("sparse-rl keys policies")  # the control: sft has no cache


def test_policies_scorers_and_rewards(capsys):
    lines = said(capsys, "policies")
    assert [line.split(":")[0].split()[1] for line in lines if line.startswith("policy ")] == [*POLICIES]
    assert keys_in(said(capsys, "policies", "tova")) == [f"cache.{key}" for key in yaml_fields(POLICIES["tova"])]
    assert len(keys_in(said(capsys, "policies", "budget"))) == sum(
        "budget" in yaml_fields(c) for c in POLICIES.values()
    )
    assert [line.split(":")[0] for line in said(capsys, "scorers") if line.startswith("scorer ")] == [
        f"scorer {name}" for name in SCORERS
    ]
    assert said(capsys, "policies", "full") == ["policy full: No entry is evicted. The policy has no parameters."]
    assert [line.split("(")[0] for line in said(capsys, "rewards") if line.startswith("reward ")] == [
        f"reward {name}" for name in REWARDS
    ]
    assert any(line.startswith("    timeout : seconds of processor time") for line in said(capsys, "rewards", "math"))


def test_without_a_kind_the_topics_are_listed(capsys):
    assert [line.split(":")[0] for line in said(capsys)] == [*TOPICS]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gropo"], "unknown 'gropo' (did you mean 'grpo'?); one of grpo, distill,"),
        (
            ["grpo", "leraning_rate"],
            "leraning_rate: no key or part of grpo has this name (did you mean 'learning_rate'?)",
        ),
        (["grpo", "rollout.enigne"], "(did you mean 'rollout.engine'?)"),
        (["grpo", "cache.budget"], "it is a key of cache policies: sparse-rl keys policies cache.budget"),
        (["sft", "zzz"], "zzz: no key or part of sft has this name; all: sparse-rl keys sft"),
        (["policies", "gvk"], "(did you mean 'gkv'?)"),
        (["policies", "budgt"], "(did you mean 'budget'?)"),
        (["rewards", "maths"], "(did you mean 'math'?)"),
        (["policies", "--json-schema"], "--json-schema: needs one kind of recipe, or none for all recipes: grpo,"),
        (["grpo", "seed", "--json-schema"], "--json-schema: needs one kind of recipe, or none for all recipes"),
        (["grpo", "seed", "more"], "unrecognised argument 'more' of keys"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(words, says, capsys):
    assert main(["keys", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1 and says in shown.err, shown.err


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_schema_is_printed_whole(kind, capsys):
    assert main(["keys", "--json-schema", *([kind] if kind else [])]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_schema(kind)


def test_no_heavy_library_is_imported():
    heavy = "[m for m in ('torch', 'trl', 'transformers', 'datasets', 'numpy') if m in sys.modules]"
    calls = [["keys"], ["keys", "--json-schema"], *(["keys", topic] for topic in TOPICS)]
    code = f"import sys; from sparse_rl.cli import main; [main(words) for words in {calls}]; print({heavy})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]" and done.stderr == ""


def test_lines_are_as_wide_as_the_terminal_and_whole_in_a_pipe(capsys):
    piped = said(capsys, "grpo", "rollout.exact")
    assert max(map(len, piped)) > 200
    code = "import sys; from sparse_rl.cli import main; sys.exit(main(['keys', 'grpo', 'rollout.exact']))"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "60"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, stdout=theirs).returncode == 0
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 1 << 16)
        except OSError:  # the end, on Linux
            break
        shown += read
        if not read:
            break
    lines = shown.decode().splitlines()
    assert 50 < max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(piped).split())
