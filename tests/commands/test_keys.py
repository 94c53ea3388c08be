"""`sparse-rl keys` lists every key in a terminal's width and imports no heavy library; a mistake gives one line."""

from __future__ import annotations

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
from sparse_rl.methods.kvpop.config import SCORER_CONFIGS as SCORERS
from sparse_rl.recipe import KINDS
from sparse_rl.recipe.keys import list_sections
from sparse_rl.recipe.options import PASSED_THROUGH


def output_of(capsys, *words: str) -> list[str]:
    """Return the output lines of `sparse-rl keys`."""
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out.splitlines()


def keys_in(lines: list[str]) -> list[str]:
    """Return the keys in those lines that begin with a key, a colon and the key's type."""
    return [line.split(":")[0] for line in lines if line and " " not in line.split(":")[0] and ":" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_kind_is_shown_once(kind, capsys):
    rows = [row.key for section in list_sections(KINDS[kind]) for row in section.rows]
    assert keys_in(output_of(capsys, kind)) == [*rows, *PASSED_THROUGH.get(kind, {})]
    assert not yaml_fields(KINDS[kind]).keys() - {row.removesuffix(".NAME") for row in rows}


def test_a_key_is_shown_with_its_type_default_and_description(capsys):
    lines = output_of(capsys, "grpo", "save_steps")
    index = lines.index("save_steps: a whole number >= 0 (default 100)")
    assert lines[index + 1] == "    number of steps between checkpoints; 0 writes only the final model"
    assert "model: text that is not empty (required)" in output_of(capsys, "sft")


def test_keys_can_be_selected_by_a_part_of_their_name(capsys):
    assert {key.partition(".")[0] for key in keys_in(output_of(capsys, "grpo", "rollout."))} == {"rollout"}
    assert keys_in(output_of(capsys, "grpo", "learning_rate")) == ["scorers.learning_rate", "learning_rate"]
    assert keys_in(output_of(capsys, "grpo", "adam_eps")) == ["adam_epsilon"]  # passed on to TRL
    assert output_of(capsys, "grpo", "cache")[-1].endswith("sparse-rl keys policies")
    assert not output_of(capsys, "sft", "cache")[-1].endswith("sparse-rl keys policies")  # control: sft has no cache


def test_the_keys_of_policies_scorers_and_rewards_are_listed(capsys):
    lines = output_of(capsys, "policies")
    assert [line.split(":")[0].split()[1] for line in lines if line.startswith("policy ")] == [*POLICIES]
    keys = [key for key in keys_in(output_of(capsys, "policies", "tova")) if not key.startswith("cache.budget.")]
    assert keys == [f"cache.{key}" for key in yaml_fields(POLICIES["tova"])]
    assert keys_in(output_of(capsys, "policies", "budget")).count("cache.budget") == sum(
        "budget" in yaml_fields(c) for c in POLICIES.values()
    )
    assert [line.split(":")[0] for line in output_of(capsys, "scorers") if line.startswith("scorer ")] == [
        f"scorer {name}" for name in SCORERS
    ]
    words, *keys = output_of(capsys, "policies", "full")
    assert words == "policy full: No entry is evicted. The policy has no parameters of its own."
    assert keys_in(keys) == ["cache.turns"]
    assert [line.split("(")[0] for line in output_of(capsys, "rewards") if line.startswith("reward ")] == [
        f"reward {name}" for name in REWARDS
    ]
    assert any(
        line.startswith("    timeout : seconds of processor time") for line in output_of(capsys, "rewards", "math")
    )


def test_without_a_kind_the_topics_are_listed(capsys):
    assert [line.split(":")[0] for line in output_of(capsys)] == [*TOPICS]


def test_lines_are_wrapped_on_a_terminal_and_not_in_a_pipe(capsys):
    piped = output_of(capsys, "grpo", "rollout.exact")
    assert max(map(len, piped)) > 200
    code = "import sys; from sparse_rl.cli import main; sys.exit(main(['keys', 'grpo', 'rollout.exact']))"
    reading_end, terminal_end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "60"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, stdout=terminal_end).returncode == 0
    os.close(terminal_end)
    shown = b""
    while True:
        try:
            chunk = os.read(reading_end, 1 << 16)
        except OSError:  # the end, on Linux
            break
        shown += chunk
        if not chunk:
            break
    lines = shown.decode().splitlines()
    assert 50 < max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(piped).split())
