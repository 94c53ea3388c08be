"""Completion of commands, options and recipes by the shell: `sparse-rl --print-completion bash`."""

from __future__ import annotations

import argparse

import shtab

from sparse_rl.recipe import list_recipes

RECIPE = {"bash": "_sparse_rl_recipes", "zsh": "_sparse_rl_recipes"}  # functions of the shell, below
PREAMBLE = {
    "bash": '_sparse_rl_recipes() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}\n',
    "zsh": "_sparse_rl_recipes() {{ compadd -- {names}; _files }}\n",
}


def add_completion(top: argparse.ArgumentParser) -> None:
    """--print-completion SHELL"""
    names = " ".join(list_recipes())
    preamble = {shell: text.format(names=names) for shell, text in PREAMBLE.items()}
    shtab.add_argument_to(
        top,
        "--print-completion",
        help="print the completion for a shell; bash: eval it in ~/.bashrc",
        preamble=preamble,
    )


def complete_recipes(option: argparse.Action) -> argparse.Action:
    """Let the shell offer shipped recipes and files for this option."""
    option.complete = RECIPE  # type: ignore[attr-defined]  # where shtab looks for it
    return option
