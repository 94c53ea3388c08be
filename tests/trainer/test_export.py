"""Files that a training run writes: the model card, permissions by the user's umask, and the upload to a hub."""

from __future__ import annotations

import base64
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from huggingface_hub import ModelCard, constants

from sparse_rl.commands.train import train
from sparse_rl.data.synthetic import EOS_ID, RunningSum
from sparse_rl.errors import StoppedError
from sparse_rl.models.directory import saved_policy
from sparse_rl.policies import make_policy
from sparse_rl.recipe import TrainRecipe, list_recipes, load_recipe, make_recipe
from trainer.checkpoint import versions
from trainer.export import model_card

REPOSITORY = "somebody/small"


class Hub(BaseHTTPRequestHandler):
    """A server that answers the requests by which huggingface_hub creates a repository and uploads small files."""

    files: dict[str, bytes] = {}
    refuses = ""
    hangs_up = False  # instead of answering what it refuses

    def do_POST(self) -> None:
        url = f"http://{self.headers['Host']}/{REPOSITORY}"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refuses and self.refuses in self.path:
            return None if self.hangs_up else self.answer({"error": "no"}, 403)
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
def hub(monkeypatch):
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
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def recipe_of(folder: Path, **keys: Any) -> Any:
    RunningSum.save_untrained(folder / "base", 0)
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


def test_a_run_writes_a_model_card_and_pushes_the_model(tmp_path, hub, umask):
    recipe = recipe_of(tmp_path, push_to_hub=True, hub_model_id=REPOSITORY)
    generation = {"eos_token_id": [EOS_ID, 5], "temperature": 0.9}  # transformers refuses to save it without do_sample
    (tmp_path / "base/generation_config.json").write_text(json.dumps(generation))
    assert "the trained model's has do_sample=True" in recipe.prepare_training().findings["generation config"]
    model = train(recipe)
    for folder in (model, tmp_path / "run/checkpoint-1"):
        written = json.loads((folder / "generation_config.json").read_text())
        assert written.items() >= {**generation, "do_sample": True}.items()
    card = ModelCard.load(model / "README.md")
    assert {"sparse-rl", "grpo", "streaming"} <= set(card.data.tags)  # a local path
    assert card.data.base_model is None
    for fact in (
        f"| `{recipe.model}` |",
        "budget=16",
        "at most 20 entries",
        "1 steps",
        f"--local-dir {Path(REPOSITORY).name}",
    ):
        assert fact in card.text, fact
    written = yaml.safe_load(card.text.partition("````yaml\n")[2].partition("````")[0])
    assert make_recipe(written) == recipe.with_attention_kernel(written["attention_kernel"])

    modes = {file: file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
    assert {file.name for file in modes} >= {"model.safetensors", "manifest.json", "metrics.jsonl", "recipe.yaml"}
    assert not {str(file): oct(mode) for file, mode in modes.items() if mode != 0o666 & ~umask}

    assert hub.files == {str(file.relative_to(model)): file.read_bytes() for file in model.rglob("*") if file.is_file()}
    assert hub.files.keys() >= {"README.md", "cache_policy.json", "model.safetensors", "tokenizer.json"}
    assert saved_policy(model).config == recipe.cache


@pytest.mark.parametrize("lora", [{}, {"lora": {"r": 2}}])
def test_a_trained_model_keeps_the_files_and_settings_that_training_does_not_learn(tmp_path, lora):
    recipe = recipe_of(tmp_path, gradient_checkpointing=True, **lora)
    base = tmp_path / "base"
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "use_cache": True, "bos_token_id": 1}))
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Qwen2TokenizerFast", "bos_token": None, "note": "ours"}
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    model = train(recipe)
    written = json.loads((model / "config.json").read_text())
    assert {name: written.get(name) for name in ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")} == {
        name: {**config, "use_cache": True, "bos_token_id": 1}.get(name)
        for name in ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    of_tokenizer = {file.name for folder in (base, model) for file in folder.glob("*token*.json")}
    assert of_tokenizer == {"tokenizer.json", "tokenizer_config.json"}
    for name in of_tokenizer:
        assert (model / name).read_bytes() == (base / name).read_bytes(), name


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_refusal_of_the_hub_is_an_error_of_one_line(hangs_up, tmp_path, hub, monkeypatch):
    monkeypatch.setattr(hub, "hangs_up", hangs_up)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its attempts
    recipe = recipe_of(tmp_path, push_to_hub=True, hub_model_id=REPOSITORY)
    monkeypatch.setattr(hub, "refuses", "/commit/")
    with pytest.raises(StoppedError, match=rf"run/model is complete, but was not pushed to {REPOSITORY} .*`hf upload"):
        train(recipe)
    assert (tmp_path / "run/model/model.safetensors").is_file()
    assert not hub.files


@pytest.mark.parametrize("name", [name for name in list_recipes() if isinstance(load_recipe(name), TrainRecipe)])
def test_the_model_card_of_each_shipped_recipe_describes_the_recipe(name, tmp_path):
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
    if cache is not None and policy.schedule.peak is not None:
        assert f"which holds at most {policy.schedule.peak} entries per kv head" in card.text
    assert make_recipe(yaml.safe_load(card.text.partition("````yaml\n")[2].partition("````")[0])) == recipe
