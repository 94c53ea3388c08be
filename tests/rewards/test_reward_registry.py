"""`make_rewards` turns the rewards that a recipe names into functions with names and weights, and refuses mistakes with
one-line errors."""

import functools
import pickle
import subprocess
import sys
import textwrap

import pytest

from rewards import REWARDS, make_rewards
from rewards.math import MathReward


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """Write a user's module into the working directory, which is not on the path."""
    (tmp_path / "own_rewards.py").write_text(
        textwrap.dedent(
            """
            def length(completions, scale=1.0, **columns):
                return [scale * len(text) for text in completions]

            def strict(completions, *, scale=1.0):
                return [scale for _ in completions]

            def boxed(completions, **columns):
                return [0.0 for _ in completions]

            async def later(completions, scale=1.0, **columns):
                return [scale for _ in completions]

            class Constant:
                def __init__(self, value):
                    self.value = value
                def __call__(self, completions, **columns):
                    return [self.value for _ in completions]

            number = 7
            """
        )
    )
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    yield "own_rewards"
    sys.modules.pop("own_rewards", None)


def test_names_and_mappings_give_functions_and_weights():
    specs = ["boxed", {"name": "math", "timeout": 2.5, "weight": 2}, {"name": "format", "weight": -0.5}]
    functions, weights = make_rewards(specs)
    assert specs[1] == {"name": "math", "timeout": 2.5, "weight": 2}  # not changed
    assert weights == [1.0, 2.0, -0.5]
    assert [function.__name__ for function in functions] == ["boxed", "math", "format"]
    assert isinstance(functions[1], MathReward)
    assert functions[1].timeout == 2.5


def test_every_registered_class_has_its_registry_name():
    assert all(cls.__dict__["__name__"] == name for name, cls in REWARDS.items())


def test_a_reward_that_is_named_several_times_gets_different_names():
    functions, _ = make_rewards(["format", {"name": "format", "style": "think"}, "format"])
    assert [function.__name__ for function in functions] == ["format", "format_2", "format_3"]
    assert pickle.loads(pickle.dumps(functions[1])).__name__ == "format_2"
    assert make_rewards(["format"])[0][0].__name__ == "format"


@pytest.mark.parametrize("path", ["own_rewards:length", "own_rewards.py:length", "own_rewards.length"])
def test_a_users_function_or_class_is_named_by_its_path(users_module, path):
    (plain, scaled), weights = make_rewards([path, {"name": path.replace("length", "Constant"), "value": 3.0}])
    assert plain(["ab"]) == [2.0]
    assert plain.__name__ == "length"
    assert scaled(["ab"]) == [3.0]
    assert weights == [1.0, 1.0]


def test_parameters_of_a_users_function_are_bound_and_its_name_is_kept(users_module):
    (function,), weights = make_rewards([{"name": f"{users_module}:length", "scale": 0.5, "weight": 3}])
    assert function(["abcd"], answer=["1"]) == [2.0]
    assert function.__name__ == "length"
    assert weights == [3.0]
    assert pickle.loads(pickle.dumps(function))(["abcd"]) == [2.0]


def test_trl_recognises_bound_functions(users_module):
    """TRL finds the name of a user's function whose parameters are bound, and recognises if it is asynchronous."""
    utils = pytest.importorskip("trl.trainer.utils")
    (plain, asynchronous), _ = make_rewards(
        [{"name": f"{users_module}:length", "scale": 2.0}, {"name": f"{users_module}:later", "scale": 2.0}]
    )
    assert isinstance(asynchronous, functools.partial)
    assert [utils.get_callable_name(function) for function in (plain, asynchronous)] == ["length", "later"]
    assert [utils.is_async_callable(function) for function in (plain, asynchronous)] == [False, True]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "rewards is empty"),
        ("math", "must be a list"),
        ({"name": "math"}, "must be a list"),
        (None, "must be a list"),
        (["mth"], "unknown reward 'mth': did you mean 'math'?"),
        (["soft_overlongg"], "did you mean 'soft_overlong'?"),
        (["zzz"], "known are math, boxed, format, soft_overlong, repetition, short_answer"),
        ([7], "a name or a mapping"),
        ([{"weight": 1.0}], "a name or a mapping"),
        (
            [{"name": "math", "timeot": 3}],
            "'math': got an unexpected keyword argument 'timeot'; its parameters are (*, timeout",
        ),
        ([{"name": "boxed", "style": 3}], "'boxed': got an unexpected keyword argument 'style'; its parameters are ()"),
        ([{"name": "math", "timeout": 0}], "reward 'math': timeout must be"),
        ([{"name": "math", "timeout": "5"}], "reward 'math': timeout must be"),
        ([{"name": "math", "workers": 0}], "workers must be"),
        ([{"name": "math", "require_boxed": "yes"}], "require_boxed must be"),
        ([{"name": "format", "style": "nice"}], "style must be one of boxed, think"),
        (["soft_overlong"], "'soft_overlong': missing a required argument: 'max_completion_len'"),
        ([{"name": "soft_overlong", "max_completion_len": 10, "soft_punish_cache": 11}], "soft_punish_cache must"),
        ([{"name": "repetition", "max_penalty": 1.0}], "max_penalty must be"),
        ([{"name": "repetition", "ngram_size": 0}], "ngram_size must be"),
        ([{"name": "math", "weight": "2"}], "weight of reward 'math' must be a finite number"),
        ([{"name": "math", "weight": float("nan")}], "weight of reward 'math' must be a finite number"),
        ([{"name": "math", "weight": True}], "weight of reward 'math' must be a finite number"),
        (["no_such_module:fn"], "'no_such_module:fn' cannot be imported: ModuleNotFoundError"),
        (["own_rewards:nothing"], "cannot be imported: AttributeError"),
        (["own_rewards:number"], "is not callable: it is of type int"),
        (["broken_rewards:fn"], "cannot be imported: ZeroDivisionError"),
        (["own_rewards:"], "cannot be imported"),
        (["."], "cannot be imported"),
        (
            [{"name": "own_rewards:strict", "scael": 2.0}],
            "got an unexpected keyword argument 'scael'; its parameters are (completions, *, scale",
        ),
        ([{"name": "own_rewards:Constant"}], "missing a required argument: 'value'"),
        (["boxed", "own_rewards:boxed"], "two rewards are called 'boxed'"),
    ],
)
def test_invalid_specs_give_a_one_line_error(users_module, specs, message):
    with pytest.raises(ValueError) as caught:
        make_rewards(specs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_package_rewards_imports_no_heavy_library_and_no_other_package():
    """Building rewards and raising their errors loads neither torch nor the other packages."""
    check = (
        "import sys; from rewards import make_rewards; make_rewards(['math', 'boxed', 'format'])\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert 'rewards' in loaded\n"
        "assert not loaded & {'torch', 'trl', 'sympy', 'sparse_rl', 'rollout', 'trainer'}, loaded"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


def test_a_path_loads_the_users_file_even_if_a_module_has_its_name(users_module, tmp_path):
    """The user's json.py is loaded, not the standard library's module `json`, a folder `json` or our package `rewards`.
    The file runs once, and sys.path does not change."""
    for name in ("sub", "json", "rewards"):
        (tmp_path / name).mkdir()
    (tmp_path / "json/__init__.py").write_text("1 / 0")
    for name in ("json.py", "sub/json.py", "rewards/own.py"):
        (tmp_path / name).write_text(f"def here(completions, **_):\n    return [{name!r} for _ in completions]\n")
    ((function,), _), ((in_subfolder,), _) = (make_rewards([f"{file}:here"]) for file in ("json.py", "./sub/json.py"))
    assert function(["x"]) == ["json.py"]
    assert in_subfolder(["x"]) == ["sub/json.py"]
    ((beside_ours,), _) = make_rewards(["rewards.own:here"])
    assert beside_ours(["x"]) == ["rewards/own.py"]
    ((absolute,), _), ((by_dotted_path,), _) = (
        make_rewards([f"{tmp_path}/json.py:here"]),
        make_rewards(["json.py.here"]),
    )
    assert absolute is function is by_dotted_path
    assert "json" in sys.modules
    assert sys.modules["json"].__name__ == "json"
    assert str(tmp_path) not in sys.path
    with pytest.raises(ValueError, match=r"reward 'no\.py:here' cannot be imported: .*there is no file no\.py"):
        make_rewards(["no.py:here"])


def test_a_module_of_a_package_may_import_its_neighbours(users_module, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/scale.py").write_text("SCALE = 2.0")
    body = "from .scale import SCALE\nfrom own_rewards import length\n"
    (tmp_path / "package/mine.py").write_text(body + "def scaled(c, **_):\n    return [SCALE * x for x in length(c)]\n")
    ((function,), _), ((same,), _) = make_rewards(["package.mine:scaled"]), make_rewards(["package.mine.scaled"])
    assert function(["abc"]) == [6.0]
    assert function is same
