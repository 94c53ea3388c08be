"""docs/trl_options.md covers every option of TRL's GRPOConfig. The page is generated. The tests fail if a new version
of TRL changes the options.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sparse_rl.recipe import GRPORecipe
from sparse_rl.recipe.keys import all_keys
from sparse_rl.recipe.passed_through import PASSED_THROUGH
from sparse_rl.recipe.refused import refusal
from sparse_rl.recipe.trl_options import KEYS, OURS, THEIRS, page

PAGE = Path(__file__).parents[2] / "docs" / "trl_options.md"


def default_of(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "required" if field.default is dataclasses.MISSING else field.default


def test_the_page_equals_the_generated_text() -> None:
    how_to_update = "make it anew: python -m sparse_rl.recipe.trl_options > docs/trl_options.md"
    assert PAGE.read_text(encoding="utf-8") == page(), how_to_update


def test_every_option_of_trl_is_a_key_passed_through_or_refused() -> None:
    """Each option is exactly one of these: a key of our GRPO recipe, an option that is passed through, or refused.
    THEIRS lists TRL's defaults that differ from ours."""
    from trl import GRPOConfig

    theirs = {field.name: default_of(field) for field in dataclasses.fields(GRPOConfig)}
    ours = {key.name: "required" if key.required else key.default for key in all_keys(GRPORecipe)}
    assert set(KEYS) == ours.keys() & theirs.keys()
    assert {name: theirs[name] for name in KEYS if ours[name] != theirs[name]} == THEIRS

    for name in theirs:
        results = [name in KEYS, name in PASSED_THROUGH["grpo"], refusal(name, "grpo") is not None]
        assert results.count(True) == 1, name
    assert OURS.keys() <= {*KEYS} | PASSED_THROUGH["grpo"].keys()
