"""Files that a training run writes: the model card, permissions by the user's umask, and the upload to a hub."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from huggingface_hub import ModelCard, constants

from sparse_rl.commands.train import train
from sparse_rl.data.running_sum import save_untrained
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.models.directory import saved_policy
from sparse_rl.policies import make_policy
from sparse_rl.recipe import TrainRecipe, list_recipes, load_recipe, make_recipe
from trainer.card import model_card
from trainer.resume import versions

REPOSITORY = "somebody/small"


class Hub(BaseHTTPRequestHandler):
    """A server that answers the requests by which huggingface_hub creates a repository and uploads small files."""

    files: dict[str, bytes] = {}
    refuses = ""

    def do_POST(self) -> None:
        url = f"http://{self.headers['Host']}/{REPOSITORY}"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refuses and self.refuses in self.path:
            return self.answer({"error": "no"}, 403)
        if self.path == "/api/repos/create":
            return self.answer({"url": url, "id": REPOSITORY})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path.startswith(f"/api/models/{REPOSITORY}/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            answers = [{"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for path in files]
            return self.answer({"files": answers})
        if self.path.startswith(f"/api/models/{REPOSITORY}/commit/main"):
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer({"commitUrl": f"{url}/commit/{'0' * 40}", "commitOid": "0" * 40})
        return self.answer({"error": f"unknown: {self.path}"}, 404)

    def do_GET(self) -> None:
        self.answer({"id": REPOSITORY, "sha": "0" * 40, "siblings": []}, 404 if "create" in self.refuses else 200)

    do_HEAD = do_GET

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # it is created again with this address
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    monkeypatch.setattr(Hub, "files", {})
    monkeypatch.setattr(Hub, "refuses", "")
    yield Hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def recipe_of(folder: Path, **keys: Any) -> Any:
    save_untrained(folder / "base", 0)
    return make_recipe(
        {
            "kind": "grpo",
            "model": str(folder / "base"),
            "output_dir": str(folder / "run"),
            "dtype": "float32",
            "data": {"synthetic": {"task": "running_sum", "size": 8}},
            "cache": {"policy": "streaming", "budget": 16, "period": 4},
            "rewards": ["boxed"],
            "rollout": {"engine": "hf"},
            "max_steps": 1,
            "save_steps": 1,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 12,
            "gradient_checkpointing": False,
            **keys,
        }
    )


def test_a_run_writes_a_model_card_and_pushes_the_model(tmp_path: Path, hub: Any, umask: int) -> None:
    recipe = recipe_of(tmp_path, push_to_hub=True, hub_model_id=REPOSITORY)
    model = train(recipe)
    card = ModelCard.load(model / "README.md")
    assert {"sparse-rl", "grpo", "streaming"} <= set(card.data.tags)  # a local path
    assert card.data.base_model is None
    for fact in (f"| `{recipe.model}` |", "budget=16", "16 entries", "1 steps", f"--local-dir {Path(REPOSITORY).name}"):
        assert fact in card.text, fact
    written = yaml.safe_load(card.text.partition("````yaml\n")[2].partition("````")[0])
    assert make_recipe(written) == recipe.with_attention_kernel(written["attention_kernel"])

    modes = {file: file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
    assert {file.name for file in modes} >= {"model.safetensors", "manifest.json", "metrics.jsonl", "recipe.yaml"}
    assert not {str(file): oct(mode) for file, mode in modes.items() if mode != 0o666 & ~umask}

    assert hub.files == {str(file.relative_to(model)): file.read_bytes() for file in model.rglob("*") if file.is_file()}
    assert hub.files.keys() >= {"README.md", "cache_policy.json", "model.safetensors", "tokenizer.json"}
    assert saved_policy(model).config == recipe.cache


def test_a_refusal_of_the_hub_is_an_error_of_one_line(
    tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the hub refuses to create the repository, the run fails before training. If the hub refuses the upload, the
    run fails after training, and the model on disk is complete. Both errors have one line.
    """
    recipe = recipe_of(tmp_path, push_to_hub=True, hub_model_id=REPOSITORY)
    monkeypatch.setattr(hub, "refuses", "/repos/create")
    with pytest.raises(UserError, match=r"^push_to_hub: the Hub did not create the repository \(.*hf auth login"):
        train(recipe)
    monkeypatch.setattr(hub, "refuses", "/commit/")
    with pytest.raises(StoppedError, match=rf"run/model is complete, but was not pushed to {REPOSITORY} .*`hf upload"):
        train(recipe)
    assert (tmp_path / "run/model/model.safetensors").is_file()
    assert not hub.files


def test_a_card_shows_how_to_prompt_the_model() -> None:
    recipe, policy = load_recipe("quickstart/grpo"), make_policy("streaming", budget=40)
    texts = {}
    for chat in (True, False):
        for place in ("runs/a model", "/a/b/model"):
            texts[chat, place] = model_card(recipe.resolved(), policy, {}, steps=7, place=place, chat=chat)
    no_chat = "has no chat template: a server answers `/v1/completions` only, and a chat request gets status 400"
    assert all((no_chat in text) is not chat for (chat, _), text in texts.items())
    for (_, place), text in texts.items():
        absolute = place.startswith("/")
        model = "." if absolute else "'runs/a model'"
        assert f"sparse-rl serve {model}  #" in text
        assert f"sparse-rl eval quickstart/eval model={model} cache=null" in text
        assert 'tokenizer("Qa1b4c0d2e0f3g3h3?")' in text
        assert ("in this directory" in text) is absolute
        assert "/a/b" not in text


@pytest.mark.parametrize("name", [name for name in list_recipes() if isinstance(load_recipe(name), TrainRecipe)])
def test_the_model_card_of_each_shipped_recipe_describes_the_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    cache = getattr(recipe, "cache", None)
    policy = None if cache is None else make_policy(cache)
    text = model_card(recipe.resolved(), policy, versions(), steps=7, place="runs/a/model", hub_name="me/mine")
    card = ModelCard(text)
    assert card.data.base_model == (recipe.model if not recipe.model.startswith("runs/") else None)
    assert card.data.tags[:2] == ["sparse-rl", recipe.kind]
    assert "# mine\n" in card.text
    assert "hf download me/mine --local-dir mine\nsparse-rl " in card.text
    assert ("sparse-rl serve mine" in card.text) is (policy is None or policy.config.only_hf is None)
    assert (f"`{policy!r}`" in card.text and policy.name in card.data.tags) if policy else "full cache" in card.text
    evicts = policy is not None and policy.name not in ("full", "clustered")
    assert ("kv-cache-eviction" in card.data.tags) is evicts
    assert ("each token reads only a part" in card.text) is (policy is not None and policy.name == "clustered")
    if cache is not None and policy.schedule.peak is not None:
        assert f"| Budget | {cache.budget} entries per kv head" in card.text
        assert f"; at most {policy.schedule.peak} are held" in card.text
    assert make_recipe(yaml.safe_load(card.text.partition("````yaml\n")[2].partition("````")[0])) == recipe
