"""The checked-in list of the trainers' options is that of the versions that are installed."""

import dataclasses
import re
import types
import typing
from enum import Enum

import pytest

from sparse_rl.config import yaml_fields
from sparse_rl.recipe.kinds import KINDS
from sparse_rl.recipe.passed_through import PASSED_THROUGH
from sparse_rl.recipe.refused import PREFIXES, REFUSED, refusal


def members(hint):
    """The alternatives of a type as the list has them: an enum is its values, and text beside it says nothing more."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if any(isinstance(member, type) and issubclass(member, Enum) for member in arguments):
            arguments = tuple(member for member in arguments if member is not str)
        return frozenset().union(*map(members, arguments))
    if typing.get_origin(hint) is list and arguments:
        return frozenset([(list, members(arguments[0]))])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return frozenset([typing.Literal[tuple(member.value for member in hint)]])
    return frozenset([hint])


@pytest.mark.parametrize("kind", [kind for kind, recipe in KINDS.items() if recipe.trained])
def test_the_list_is_that_of_the_installed_versions(kind):
    from transformers import TrainingArguments
    from trl import GRPOConfig, SFTConfig

    config = {"grpo": GRPOConfig, "sft": SFTConfig}.get(kind, TrainingArguments)
    own = yaml_fields(KINDS[kind])
    theirs = {f.name: f.type for f in dataclasses.fields(config) if f.name not in own and not refusal(f.name)}
    assert PASSED_THROUGH[kind].keys() == theirs.keys()
    wrong = {key: hint for key, hint in PASSED_THROUGH[kind].items() if members(hint) != members(theirs[key])}
    assert not wrong
    assert members(int | None) != members(float | None)  # the control


def test_what_is_written_instead_is_a_key():
    """Each key that a refusal names exists; of attention, the one that says how it is computed."""
    keys = {key for kind in KINDS.values() for key in yaml_fields(kind)}
    theirs = {key for options in PASSED_THROUGH.values() for key in options}
    mends = " ".join([*REFUSED.values(), *PREFIXES.values()])
    words = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+", mends))
    inner = {"zero_stage", "target_modules", "system_prompt", "max_prompt_tokens"}  # of blocks
    assert words - inner <= keys | theirs and "train_attention" not in words
    assert "attention_kernel" in refusal("attn_implementation")
    assert not keys & REFUSED.keys()
