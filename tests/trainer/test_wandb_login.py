"""Weights & Biases is online if it finds a login, and offline otherwise. The check needs no network, and no failure of
W&B stops the training."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
import wandb

from trainer.rundir import wandb_offline_without_key

KEY = "0123456789" * 4


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Provide a home directory and a working directory without any login."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["WANDB_DIR", "WANDB_MODE", "NETRC"]:
        monkeypatch.setenv(name, "")  # monkeypatch then restores the variable at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(logging.getLogger("sparse_rl"), "handlers", [])  # drops handlers of other tests
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def log_in(file: Path, server: str) -> None:
    file.write_text(f"machine {server.partition('://')[2]}\n  login user\n  password {KEY}\n")


def save(file: Path, *lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("\n".join(["[default]", *lines, ""]).encode("latin-1"))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sparse_rl"]


USER, WORKSPACE = ".config/wandb/settings", "wandb/settings"


@pytest.mark.parametrize(
    ("variable", "settings", "saved"),
    [
        (None, None, None),
        ("http://a.example:8080", None, None),
        (None, USER, "http://b.example"),
        (None, WORKSPACE, "http://c.example"),
        ("http://a.example", USER, "http://b.example"),
    ],
    ids=["its own server", "named", "of the user", "of the workspace", "named and saved"],
)
def test_only_a_login_to_the_configured_server_counts(variable, settings, saved, home, monkeypatch, caplog, capfd):
    if variable is not None:
        monkeypatch.setenv("WANDB_BASE_URL", variable)
    if settings is not None:
        save(home / settings, f"base_url = {saved}")
    server = variable or saved or wandb.Settings().base_url
    log_in(home / ".netrc", str(server))
    wandb_offline_without_key(home)
    assert "WANDB_MODE" not in os.environ
    assert not messages(caplog)
    log_in(home / ".netrc", "http://other.example")
    wandb_offline_without_key(home)
    assert os.environ["WANDB_MODE"] == "offline"
    (line,) = messages(caplog)
    assert line.startswith(f"nobody is logged in to Weights & Biases at {server}: this run is logged offline. ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "value", "mode"),
    [
        ("WANDB_MODE", "online", "online"),
        ("WANDB_MODE", "disabled", "disabled"),
        ("WANDB_API_KEY", KEY, None),
        ("WANDB_IDENTITY_TOKEN_FILE", "token", None),
        ("WANDB_MODE", "", "offline"),
        ("WANDB_API_KEY", "", "offline"),
        ("WANDB_API_KEY", "no key", "offline"),
        ("WANDB_IDENTITY_TOKEN_FILE", "", "offline"),
    ],
)
def test_an_environment_variable_decides_if_the_run_is_offline(name, value, mode, home, monkeypatch, caplog):
    monkeypatch.setenv(name, value)
    wandb_offline_without_key(home)
    assert os.environ.get("WANDB_MODE") == mode
    assert len(messages(caplog)) == (mode == "offline")
    assert os.environ["WANDB_DIR"] == str(home)


@pytest.mark.parametrize("line", [f"api_key = {KEY}", "mode = disabled", "mode = offline"])
@pytest.mark.parametrize("settings", [USER, WORKSPACE])
def test_settings_of_wandb_are_respected(settings, line, home, caplog):
    save(home / settings, line)
    wandb_offline_without_key(home)
    assert "WANDB_MODE" not in os.environ
    assert not messages(caplog)


def test_the_key_is_not_checked_over_the_network(home, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        log_in(home / ".netrc", url)
        wandb_offline_without_key(home)
        assert "WANDB_MODE" not in os.environ
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_run_that_starts_after_the_check_is_offline(home, caplog):
    wandb_offline_without_key(home)
    with wandb.init(project="test", settings=wandb.Settings(silent=True)) as run:
        assert run.offline
        assert Path(run.dir).is_relative_to(home / "wandb")
        del os.environ["WANDB_MODE"]
        wandb_offline_without_key(home)
        assert wandb.run is run
        assert "WANDB_MODE" not in os.environ
    wandb.teardown()
    assert len(messages(caplog)) == 1


@pytest.mark.parametrize("line", ["base_url = a.example", "base_url = https://b.example\nbase_url = https://c.example"])
def test_malformed_settings_do_not_stop_training(line, home, caplog):
    save(home / USER, line)
    wandb_offline_without_key(home)
    (message,) = messages(caplog)
    assert "this run is logged offline" in message
    assert "\n" not in message
