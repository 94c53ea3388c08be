"""Named tasks: a recipe says `tasks: [aime24, gsm8k]`, and each name stands for the block in recipes/tasks."""

from pathlib import Path

import pytest

from sparse_rl.data.problems import load_data
from sparse_rl.errors import UserError
from sparse_rl.recipe import load_recipe, make_recipe
from sparse_rl.recipe.load import named_tasks

DATA = Path(__file__).parents[3] / "shared" / "data"  # optional, outside the repository
FILES = {"amc23": 40, "aime24": 30, "aime25": 30, "math500": 500, "gsm8k": 1319}
EVAL = {"kind": "eval", "model": "some/model", "output_dir": "runs/x"}


def tasks_of(tasks, *overrides):
    return make_recipe({**EVAL, "tasks": tasks}, overrides).tasks


@pytest.mark.parametrize("name", named_tasks())
def test_the_name_of_a_task_stands_for_a_dataset_on_the_hub(name):
    data = tasks_of([name])[name]
    assert not data.local
    assert "{prompt}" in (data.prompt_template or "")
    assert tasks_of(name) == tasks_of([name]) == tasks_of({name: {}}) == tasks_of({name: None})


@pytest.mark.parametrize("name", [name for name in named_tasks() if "file" in named_tasks()[name]])
def test_a_local_file_replaces_the_source_and_keeps_the_prompt(name):
    hub, data = tasks_of([name])[name], tasks_of([name], f"tasks.{name}.path=mine.jsonl")[name]
    assert data.prompt_template == hub.prompt_template
    assert (data.split, data.subset, data.answer_after) == ("train", None, None)
    assert data.columns == {"prompt": "problem", "answer": "answer"}


def test_a_release_stands_for_files_on_the_hub():
    newest, older = tasks_of(["livecodebench"]), tasks_of({"livecodebench": {"release": "v2"}})
    assert newest["livecodebench"].files == ["test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))]
    assert older["livecodebench"].files == ["test.jsonl", "test2.jsonl"]
    assert tasks_of(["livecodebench"], "tasks.livecodebench.release=v1")["livecodebench"].files == ["test.jsonl"]
    local = tasks_of(["livecodebench"], "tasks.livecodebench.path=mine.jsonl")["livecodebench"]
    assert (local.files, local.release, local.columns["starter_code"]) == (None, None, "starter_code")
    with pytest.raises(UserError, match=r"release: unknown release 'v7'; the releases are v1, v2"):
        tasks_of({"livecodebench": {"release": "v7"}})
    with pytest.raises(UserError, match="release: is for a dataset on the hub"):
        tasks_of({"livecodebench": {"path": "mine.jsonl", "release": "v5"}})
    with pytest.raises(UserError, match="release: only datasets on the hub"):
        tasks_of({"aime24": {"release": "v5"}})


def test_keys_of_a_recipe_replace_those_of_its_named_task():
    data = tasks_of(["gsm8k"], "tasks.gsm8k.columns.prompt=text", "tasks.gsm8k.prompt_template='{prompt}'")["gsm8k"]
    assert data.columns == {"prompt": "text", "answer": "answer"}
    assert data.prompt_template == "{prompt}"
    assert data.answer_after == "####"
    assert tasks_of({"aime24": {"synthetic": {"task": "running_sum", "size": 2}}})["aime24"].path is None


def test_overrides_add_and_replace_tasks():
    assert list(tasks_of(["aime24"], "tasks=[aime25,gsm8k]", "tasks.gsm8k.limit=3", "tasks.mine.path=m.jsonl")) == [
        "aime25", "gsm8k", "mine",
    ]  # fmt: skip


def test_a_recipe_resolved_with_named_tasks_equals_the_recipe():
    recipe = load_recipe("eval/reasoning", ["tasks.aime24.path=mine.jsonl", "tasks.aime25.prompt_template=null"])
    assert make_recipe(recipe.resolved()) == recipe


@pytest.mark.parametrize("tasks", [["aime26"], [3], [["aime24"]], "aime26", [{"aime24": {}}]])
def test_an_unknown_task_is_one_line_that_names_the_known_tasks(tasks):
    with pytest.raises(UserError, match=r"tasks: unknown task .*; known: aime24, .*math500; for others give a block"):
        tasks_of(tasks)


@pytest.mark.skipif(not DATA.is_dir(), reason="the data folder is absent")
@pytest.mark.parametrize("name", FILES)
def test_local_files_of_named_tasks_are_read(name):
    file = DATA / ("gsm8k_test.jsonl" if name == "gsm8k" else f"{name}.jsonl")
    data = tasks_of([name], f"tasks.{name}.path={file}")[name]
    rows = load_data(data, None, require=("prompt", "answer"))
    assert len(rows) == FILES[name]
    assert all("\\boxed{}" in row["prompt"] for row in rows)
