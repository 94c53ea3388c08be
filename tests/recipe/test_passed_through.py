"""Recipes pass some options through to the trainers of TRL and transformers. The checked-in list of these options
(PASSED_THROUGH) matches the installed versions of the libraries.
"""

import dataclasses
import re
import types
import typing
from enum import Enum

import pytest

from sparse_rl.config import yaml_fields
from sparse_rl.recipe.kinds import KINDS
from sparse_rl.recipe.kinds.base import TrainRecipe
from sparse_rl.recipe.passed_through import PASSED_THROUGH
from sparse_rl.recipe.refused import PREFIXES, REFUSED, refusal
from trainer import options

TRAINING_KINDS = [kind for kind, recipe in KINDS.items() if issubclass(recipe, TrainRecipe)]
# choices of the libraries that our list leaves out, with the reason
LEFT_OUT = {
    "train_sampling_strategy": {"group_by_length", "batch_rebalance"},  # passed_through.py; needs rows of token ids
    "debug": {"tpu_metrics_debug"},  # there is no TPU
}


def members(hint):
    """Return the alternatives of a type in the form of the checked-in list: an enum becomes its values, and a text type
    beside the enum is dropped."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return members(arguments[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if any(isinstance(member, type) and issubclass(member, Enum) for member in arguments):
            arguments = tuple(member for member in arguments if member is not str)
        return frozenset().union(*map(members, arguments))
    if typing.get_origin(hint) is list and arguments:
        return frozenset([(list, members(arguments[0]))])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return frozenset([typing.Literal[tuple(member.value for member in hint)]])
    return frozenset([hint])


def choices(kinds):
    """Return the choices among some alternatives, and a flag that is True if no other text is accepted."""
    literal = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
    return {value for kind in literal for value in typing.get_args(kind)}, str not in kinds


def fits(ours, theirs):
    """Return True if our type equals the library's type, or lists choices for a key for which the library accepts any
    text."""
    ours, theirs = members(ours), members(theirs)
    our_choices, closed = choices(ours)
    their_choices, free = choices(theirs)[0], str in theirs
    rest, others = (
        {member for member in kinds if typing.get_origin(member) is not typing.Literal} for kinds in (ours, theirs)
    )
    if closed and our_choices and free:  # of all texts only the choices are accepted
        others = others - {str}
    lists = [next((member[1] for member in kinds if isinstance(member, tuple)), None) for kinds in (rest, others)]
    if None not in lists and all(choices(elements)[0] for elements in lists):
        return choices(lists[0])[0] <= choices(lists[1])[0]
    return rest == others and (our_choices == their_choices or (free and our_choices >= their_choices))


def configuration(kind):
    """Return the library's class of options for a kind."""
    from transformers import TrainingArguments
    from trl import GRPOConfig, SFTConfig

    return {"grpo": GRPOConfig, "sft": SFTConfig}.get(kind, TrainingArguments)


@pytest.mark.parametrize("kind", TRAINING_KINDS)
def test_the_listed_options_match_the_installed_versions(kind):
    """The list has exactly the options of the library's class that are neither our own keys nor refused, each with a
    type that fits the library's type."""
    our_keys = yaml_fields(KINDS[kind])
    fields = dataclasses.fields(configuration(kind))
    theirs = {f.name: f.type for f in fields if f.name not in our_keys and not refusal(f.name, kind)}
    assert PASSED_THROUGH[kind].keys() == theirs.keys()
    assert not {key: hint for key, hint in PASSED_THROUGH[kind].items() if not fits(hint, theirs[key])}


def test_control_of_fits_with_types_that_fit_and_types_that_do_not():
    """`fits` decides in the test above if our type of an option fits the library's. It accepts equal types, and a list
    of choices where the library accepts any text. It refuses all other pairs.
    """
    text = typing.Literal["a", "b"]
    assert fits(int, int)
    assert fits(text | None, str | None)
    assert fits(text | bool, str | bool)
    assert not fits(int | None, float | None)
    assert not fits(text, str | None)
    assert not fits(str, text)
    assert not fits(int, int | str)
    assert not fits(text, typing.Literal["a", "b", "c"])


@pytest.mark.parametrize("kind", TRAINING_KINDS)
def test_the_library_names_the_choices_that_we_list(kind):
    """For some options our list has choices and the library's type is any text. The library's help or metadata must
    name these choices."""
    for f in dataclasses.fields(configuration(kind)):
        our_choices = choices(members(PASSED_THROUGH[kind].get(f.name, int)))[0] - {"", False}
        if not our_choices or str not in members(f.type):
            continue
        listed_choices = f.metadata.get("choices")
        words = set(listed_choices or re.findall(r"[`'\"](\w+)[`'\"]", f.metadata["help"]))
        assert our_choices <= words, (f.name, our_choices, words)
        if listed_choices:
            assert words - our_choices <= LEFT_OUT.get(f.name, set()), f.name


def test_options_that_break_replay_are_refused_by_kind():
    """Each kind refuses the options that would break its replay (docs/grpo.md). sft has no evictions, and accepts some
    of these options.
    """
    for option in ("neftune_noise_alpha", "label_smoothing_factor", "use_cache"):
        assert [kind for kind in TRAINING_KINDS if option in PASSED_THROUGH[kind]] == ["sft"]
        assert refusal(option, "grpo")
    for option in ("train_sampling_strategy", "data_seed"):
        assert [kind for kind in TRAINING_KINDS if option in PASSED_THROUGH[kind]] == ["distill", "kvpop", "sft"]
    assert "group_by_length" not in str(PASSED_THROUGH["sft"]["train_sampling_strategy"])
    for option in (
        *("length_column_name", "label_names", "prediction_loss_only", "batch_eval_metrics", "include_for_metrics"),
        *("do_predict", "logging_nan_inf_filter", "enable_jit_checkpoint", "accelerator_config", "trust_remote_code"),
    ):
        assert all(option not in PASSED_THROUGH[kind] and refusal(option, kind) for kind in TRAINING_KINDS), option


def test_keys_that_a_refusal_recommends_exist():
    """Each key in the text of a refusal is a key of a recipe or a passed-through option. The refusal of
    `attn_implementation` recommends `attention_kernel`. No key is both accepted and refused.
    """
    keys = {key for kind in KINDS.values() for key in yaml_fields(kind)}
    theirs = {key for passed in PASSED_THROUGH.values() for key in passed}
    refused = {
        **REFUSED,
        **PREFIXES,
        **options.PREFIXES,
        **{k: v for of in options.REFUSED.values() for k, v in of.items()},
    }
    words = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+", " ".join(refused.values())))
    keys_in_blocks = {"zero_stage", "target_modules", "system_prompt", "max_prompt_tokens"}  # keys inside blocks
    assert words - keys_in_blocks <= keys | theirs | {"make_engine"}
    assert "train_attention" not in words
    assert "attention_kernel" in refusal("attn_implementation", "grpo")
    assert not keys & REFUSED.keys()
    assert not REFUSED.keys() & options.ANY.keys()
    assert all(not yaml_fields(KINDS[kind]).keys() & refused.keys() for kind, refused in options.REFUSED.items())
