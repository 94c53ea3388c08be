"""Recipes pass some options through to the trainers of TRL and transformers. The checked-in list of these options
(PASSED_THROUGH) matches the installed versions of the libraries. No option of TRL is left without a word.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from enum import Enum
from typing import Any

import pytest

from docs.reference import KEYS, OURS, THEIRS, defaults, trl_page
from sparse_rl.config import yaml_fields
from sparse_rl.errors import UserError
from sparse_rl.recipe import KINDS, GRPORecipe, make_recipe
from sparse_rl.recipe.options import PASSED_THROUGH, PREFIXES, REFUSED, refusal
from sparse_rl.recipe.run import TrainRecipe
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
    our_keys = yaml_fields(KINDS[kind])
    fields = dataclasses.fields(configuration(kind))
    theirs = {f.name: f.type for f in fields if f.name not in our_keys and not refusal(f.name, kind)}
    assert PASSED_THROUGH[kind].keys() == theirs.keys()
    assert not {key: hint for key, hint in PASSED_THROUGH[kind].items() if not fits(hint, theirs[key])}


def test_control_of_fits_with_types_that_fit_and_types_that_do_not():
    """Equal types fit, and a list of choices where the library accepts any text."""
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
    """For some options our list has choices, and the library's type is any text."""
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
    """sft has no evictions, and accepts some of these options."""
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


def default_of(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "required" if field.default is dataclasses.MISSING else field.default


def test_the_page_has_a_row_for_every_option():
    listed = {line.split("`")[1] for line in trl_page().splitlines() if line.startswith("| `")}
    assert {*KEYS, *PASSED_THROUGH["grpo"], *REFUSED} <= listed


def test_every_option_of_trl_is_a_key_passed_through_or_refused():
    """THEIRS lists TRL's defaults that differ from ours."""
    from trl import GRPOConfig

    theirs = {field.name: default_of(field) for field in dataclasses.fields(GRPOConfig)}
    ours = {k: "required" if v is dataclasses.MISSING else v for k, v in defaults(GRPORecipe).items()}
    assert set(KEYS) == ours.keys() & theirs.keys()
    assert {name: theirs[name] for name in KEYS if ours[name] != theirs[name]} == THEIRS

    for name in theirs:
        results = [name in KEYS, name in PASSED_THROUGH["grpo"], refusal(name, "grpo") is not None]
        assert results.count(True) == 1, name
    assert OURS.keys() <= {*KEYS} | PASSED_THROUGH["grpo"].keys()


def test_all_keys_of_a_trl_recipe_are_refused_in_one_error():
    for kind in ("grpo", "sft", "distill", None):
        mapping = dict.fromkeys(REFUSED, 1) | {"learning_rat": 1e-5}
        with pytest.raises(UserError) as caught:
            make_recipe(mapping if kind is None else {"kind": kind, **mapping})
        for key, hint in REFUSED.items():
            assert f"{key}: {hint}" in str(caught.value) or kind == "sft"
        assert f"recipe: {len(REFUSED) + 1} keys to mend: " in str(caught.value)
        assert ("learning_rat: unknown key; did you mean learning_rate?" in str(caught.value)) is (kind is not None)
    with pytest.raises(UserError, match=r"^recipe: bf16: not a key here: use dtype: bfloat16$"):
        make_recipe({"kind": "grpo", "bf16": True})


def test_an_error_about_very_many_keys_is_short():
    with pytest.raises(UserError) as caught:
        make_recipe({"kind": "grpo"} | {f"key{number}": 1 for number in range(3000)})
    assert len(str(caught.value)) < 5000
