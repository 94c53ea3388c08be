"""A mistake in a recipe is reported immediately, before any heavy library is imported. A dry run does not need TRL.

The imported modules are checked in one new process for all recipes, since the test's own process has imported all
libraries.
"""

from __future__ import annotations

import json

import pytest
from processes import python

from sparse_rl.commands.keys import TOPICS
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.recipe import BudgetsRecipe, TrainRecipe, list_recipes, load_recipe
from sparse_rl.recipe.evaluation import SweptRecipe

HEAVY = ("torch", "transformers", "trl", "datasets", "numpy")
ANSWER = """
import contextlib, io, json, sys, time
from sparse_rl.commands.main import main
answers = []
for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    before = time.process_time() if answers else 0.0  # the first pays for the start of the process
    with contextlib.redirect_stderr(err):
        status = main(words)
    heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    answers.append([status, err.getvalue(), heavy, time.process_time() - before])
print(json.dumps(answers))
"""
DRY_RUNS = """
import json, sys
sys.modules["trl"] = None  # importing it fails
from sparse_rl.commands.main import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""
TRAINED = ("sft", "distill", "grpo", "kvpop")
OVERLONG = "{name: soft_overlong, max_completion_len: 152, soft_punish_cache: 16}"


def mistakes() -> list[tuple[list[str], str]]:
    """Return (command arguments, expected message) for a wrong key and for a wrong value in every shipped recipe."""
    cases = []
    for number, name in enumerate(list_recipes()):
        recipe = load_recipe(name)
        block = "launch" if isinstance(recipe, TrainRecipe) else "rollout"
        keys = [
            ("no_such_key=1", "no_such_key: unknown key"),
            (f"{block}.no_such_key=1", f"{block}.no_such_key: unknown key"),
        ]
        values = [
            ("seed=many", "seed: expected a whole number >= 0, got 'many'"),
            ("dtype=float31", "dtype: expected one of"),
            ("output_dir=' '", "output_dir: expected text that is not empty"),
        ]
        if recipe.prompt_caches():
            values.append(("prompt_cache={policy: am, ratio: 2}", "ratio: expected a number above 0, at most 1, got 2"))
        if isinstance(recipe, BudgetsRecipe):
            values.append(("base=2", "base: expected a number above 0, at most 1, got 2"))
        elif recipe.prompt_caches():
            override = "cache={policy: tova, budget: 8}" if isinstance(recipe, TrainRecipe) else "cache=full"
            values.append((override, "cache: nothing is evicted after a context"))
        elif recipe.caches() and recipe.caches()[0] is not None:
            values.append(("cache.policy=gvk", "unknown cache policy 'gvk'"))
            if not (isinstance(recipe, SweptRecipe) and recipe.sweep.policy):  # the sweep's policies apply
                values.append(("cache={policy: gkv, budget: 4, window: 4}", "budget: 4 must exceed window"))
        command = "train" if isinstance(recipe, TrainRecipe) else recipe.kind
        for override, message in (keys[number % len(keys)], values[number % len(values)]):
            cases.append(([command, name, override], message))
    return cases


def test_errors_and_help_import_no_heavy_library(tmp_path):
    """Control: a wrong model is found only after torch and transformers are imported."""
    cases = mistakes()
    (tmp_path / "used/model").mkdir(parents=True)
    used = ["train", "quickstart/sft", f"output_dir={tmp_path}/used"]
    cases.append((used, "used holds the model of an earlier run; choose another"))
    light = [["--help"], ["keys"], ["keys", "--json-schema"], *(["keys", topic] for topic in TOPICS)]
    control = ["train", "quickstart/grpo", "--dry-run", f"model={tmp_path}"]  # the recipe itself has no mistake
    process = python("-c", ANSWER, json.dumps([*(words for words, _ in cases), *light, control]), json.dumps(HEAVY))
    assert process.returncode == 0, process.stderr
    *answers, (status, err, heavy, _) = json.loads(process.stdout.splitlines()[-1])
    assert status == 2
    assert "is not a model directory" in err
    assert {"torch", "transformers"} <= {*heavy}
    assert len(cases) == 2 * len(list_recipes()) + 1
    assert [answer[:3] for answer in answers[len(cases) :]] == [[0, "", []]] * len(light)
    for (words, message), (status, err, heavy, seconds) in zip(cases, answers[: len(cases)], strict=True):
        assert status == 2, words
        assert err.startswith("sparse-rl: error: "), words
        assert message in err, words
        assert err.count("\n") == 1, words
        assert heavy == [], (words, heavy, seconds)
        assert seconds < 1, (words, heavy, seconds)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    RunningSum.save_untrained(folder, 0)
    return folder


@pytest.mark.slow
def test_a_dry_run_needs_no_trl(model, tmp_path):
    assert {recipe.kind for recipe in map(load_recipe, list_recipes())} == {
        *TRAINED,
        "eval",
        "perplexity",
        "budgets",
        "bench",
    }
    common = ["--dry-run", f"model={model}", f"output_dir={tmp_path / 'out'}", "data.synthetic.size=256"]
    runs = [["train", f"quickstart/{kind}", *common] for kind in TRAINED]
    runs.append([*runs[TRAINED.index("grpo")], "rewards=[repetition, {name: format, style: think}, " + OVERLONG + "]"])
    process = python("-c", DRY_RUNS, json.dumps(runs))
    assert process.returncode == 0, process.stderr
    assert [line.split()[1] for line in process.stdout.splitlines() if line.startswith("recipe ")] == [
        *(f"{kind}," for kind in (*TRAINED, "grpo"))
    ]
    blocked = python("-c", DRY_RUNS.replace("main(words)", "__import__(words)"), json.dumps(["trl"]))
    assert blocked.returncode
    assert "import of trl halted" in blocked.stderr  # control
