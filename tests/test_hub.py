"""Before a model is loaded by its name on a hub, one request checks that the hub can be reached. Without a network the
cached model is used, or a one-line error follows. A local socket plays the hub.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from sparse_rl.errors import UserError
from sparse_rl.models import hub

NAME = "somebody/some-model"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
ANSWER = """
import json, sys, time
from sparse_rl.cli import main
before = time.process_time()
status = main(json.loads(sys.argv[1]))
heavy = [name for name in ("torch", "transformers", "datasets", "trl") if name in sys.modules]
print(json.dumps([status, heavy, time.process_time() - before]))
"""


@pytest.fixture
def listen():
    """listen(answer) -> (its address, the first line of each request so far). With b"" the socket hangs up; with None
    it never answers.
    """
    servers, held = [], []

    def start(answer: bytes | None) -> tuple[str, list[str]]:
        server, requests = socket.create_server(("127.0.0.1", 0)), []

        def work() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                requests.append(connection.recv(4096).decode().partition("\r\n")[0])
                if answer is None:
                    held.append(connection)
                    continue
                connection.sendall(answer)
                connection.close()

        threading.Thread(target=work, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.getsockname()[1]}", requests

    yield start
    for server in (*servers, *held):
        server.close()


@pytest.fixture
def at(monkeypatch, tmp_path):
    """at(address) sets the hub to this address with an empty cache; both are restored afterwards."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.5)

    def set_address(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        hub._unreachable.cache_clear()
        close_session()

    yield set_address
    hub._unreachable.cache_clear()
    close_session()


def fill_cache(folder: Path) -> None:
    """Put the model NAME into the cache of the hub's library."""
    place = folder / "cache/models--somebody--some-model"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("0" * 40)
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (place / "snapshots" / ("0" * 40) / "config.json").write_text("{}")


@pytest.mark.parametrize("answer", [NOT_FOUND, None])
def test_with_a_reachable_hub_the_check_makes_one_request_and_no_error(answer, listen, at):
    """Even if the hub accepts the connection and never answers."""
    address, requests = listen(answer)
    at(address)
    for _ in range(2):
        hub.check_available(NAME)
    assert requests == ["HEAD / HTTP/1.1"]
    assert not constants.HF_HUB_OFFLINE
    assert not os.environ["HF_HUB_OFFLINE"]


def test_without_a_hub_the_cached_model_is_used(listen, at, tmp_path, caplog):
    """All of this takes one request."""
    address, requests = listen(b"")
    at(address)
    for _ in range(2):
        with pytest.raises(UserError, match=f"no directory {NAME}, .*{address} cannot be reached.*HF_HUB_OFFLINE=1"):
            hub.check_available(NAME)
    assert len(requests) == 1
    assert not constants.HF_HUB_OFFLINE
    hub.check_available(str(tmp_path))  # a local directory needs neither hub nor cache
    fill_cache(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            hub.check_available(NAME)
    assert len(caplog.records) == 1
    assert "loaded from the cache" in caplog.text
    assert constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert len(requests) == 1


def test_offline_mode_makes_no_request(listen, at, monkeypatch, tmp_path):
    address, requests = listen(NOT_FOUND)
    at(address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="does not hold it, and HF_HUB_OFFLINE is set"):
        hub.check_available(NAME)
    fill_cache(tmp_path)
    hub.check_available(NAME)
    assert not requests


def test_an_invalid_hub_name_is_refused():
    with pytest.raises(UserError, match="runs/a/model is neither a model directory nor a hub name"):
        hub.check_available("runs/a/model")


@pytest.mark.parametrize("words", [["train", "quickstart/grpo", "--dry-run"], ["rollout", "quickstart/grpo"]])
def test_a_command_fails_after_one_request_to_the_hub(words, listen, tmp_path):
    """Instead of six with waits; and no heavy library is imported."""
    address, requests = listen(b"")
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", ANSWER, json.dumps([*words, f"model={NAME}"])]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    status, heavy, seconds = json.loads(process.stdout.splitlines()[-1])
    assert status == 2, (process, requests)
    assert heavy == [], (process, requests)
    assert seconds < 2, (process, requests)
    assert len(requests) == 1, (process, requests)
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"sparse-rl: error: model: there is no directory {NAME}")
    assert "local copy" in line
