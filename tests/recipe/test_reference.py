"""The page of keys is generated from the dataclasses of the settings, and lists every key. To add a key to a component,
one edit of its dataclass is enough.
"""

import dataclasses
from dataclasses import dataclass

import pytest

from docs.reference import keys_page
from sparse_rl.config import flat, flat_fields, own_fields, yaml_fields
from sparse_rl.errors import UserError
from sparse_rl.methods.config import CONFIGS as POLICIES
from sparse_rl.methods.kvpop.config import SCORER_CONFIGS as SCORERS
from sparse_rl.recipe import KINDS, GRPORecipe, make_recipe
from sparse_rl.recipe.keys import list_sections, read_docstring
from trainer.config import SparseGRPOConfig

GRPO = {
    "kind": "grpo",
    "model": "some/model",
    "output_dir": "runs/x",
    "data": {"path": "problems.jsonl"},
    "cache": {"policy": "full"},
    "rewards": ["math"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_kind_has_a_row(kind):
    """The reference of a kind has a table row for each key of the recipe's dataclass."""
    page = keys_page([kind])
    listed = {line.split("`")[1].removesuffix(".NAME") for line in page.splitlines() if line.startswith("| `")}
    assert not yaml_fields(KINDS[kind]).keys() - listed


def configurations(cls):
    """Yield a dataclass, the dataclasses whose keys it takes over, and the dataclasses of its blocks."""
    yield cls
    for held in flat_fields(cls).values():
        yield from configurations(held)
    for hint in own_fields(cls).values():
        for member in (hint, *getattr(hint, "__args__", ())):
            if dataclasses.is_dataclass(member):
                yield from configurations(member)


@pytest.mark.parametrize("cls", [*KINDS.values(), *POLICIES.values(), *SCORERS.values()], ids=lambda cls: cls.__name__)
def test_docstrings_document_only_existing_keys(cls):
    for configuration in configurations(cls):
        for base in configuration.__mro__[:-1]:
            names = read_docstring(base)[1].keys()
            assert names <= yaml_fields(base).keys(), base


def test_the_reference_shows_the_defaults_of_each_kind():
    rates = {"kvpop": "8e-05", "grpo": "1e-06", "sft": "2e-05"}
    for kind, rate in rates.items():
        assert f"| `learning_rate` | a number > 0 | `{rate}` |" in keys_page([kind])


def test_read_docstring_returns_the_prose_and_each_entry():
    @dataclass
    class Example:
        """A sentence about it.

        one : of these
            two lines
        two, three : together | apart
        Further prose.
        """

    together = "together | apart"
    assert read_docstring(Example) == (
        "A sentence about it. Further prose.",
        {"one": "of these two lines", "two": together, "three": together},
    )

    @dataclass
    class Silent:
        one: int

    assert read_docstring(Silent) == ("", {})


@dataclass(frozen=True, kw_only=True)
class LongerGRPOConfig(SparseGRPOConfig):
    """RL with an additional key.

    patience : how long it waits
    """

    patience: int = 3


@dataclass(frozen=True, kw_only=True)
class LongerGRPORecipe(GRPORecipe):
    grpo: LongerGRPOConfig = flat(LongerGRPOConfig)


def test_adding_a_key_to_a_component_needs_one_edit(monkeypatch):
    with pytest.raises(UserError, match="patience: unknown key"):  # control: without the key
        make_recipe(GRPO, ["patience=5"])
    monkeypatch.setitem(KINDS, "grpo", LongerGRPORecipe)

    recipe = make_recipe(GRPO, ["patience=5"])
    assert recipe.grpo.patience == 5
    assert recipe.resolved()["patience"] == 5
    assert make_recipe(recipe.resolved()) == recipe
    assert make_recipe(GRPO).resolved()["patience"] == 3
    with pytest.raises(UserError, match="command line: patience: expected a whole number, got 'long'"):
        make_recipe(GRPO, ["patience=long"])
    with pytest.raises(UserError, match=r"valid keys: .*\bpatience\b"):
        make_recipe(GRPO, ["pat=1"])  # only the nearest of many keys are listed
    with pytest.raises(UserError, match="did you mean patience"):
        make_recipe(GRPO, ["pateince=1"])
    assert "| `patience` | a whole number | `3` | how long it waits |" in keys_page()


def test_every_key_has_a_description():
    families = (*KINDS.values(), *POLICIES.values(), *SCORERS.values())
    rows = [row for cls in families for section in list_sections(cls) for row in section.rows]
    assert sorted({row.key for row in rows if not row.words}) == []
    assert len(rows) > 300

    @dataclass
    class Bare:
        seed: int = 0

    assert [row.words for section in list_sections(Bare) for row in section.rows] == [""]
