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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


@pytest.mark.parametrize("netrc", [".netrc", "_netrc", "elsewhere"])
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
@pytest.mark.few(6)
def test_only_a_login_to_the_configured_server_counts(
    netrc: str, variable: str | None, settings: str | None, saved: str | None,
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """A login made by `wandb login` counts if it is for the configured server; the run is then online. With a login to
    another server only, the run is offline, and one line says so.
    """
    if variable is not None:
        monkeypatch.setenv("WANDB_BASE_URL", variable)
    if settings is not None:
        save(home / settings, f"base_url = {saved}")
    if netrc == "elsewhere":
        monkeypatch.setenv("NETRC", str(home / netrc))
    server = variable or saved or wandb.Settings().base_url
    log_in(home / netrc, str(server))
    assert wandb_offline_without_key(home)
    assert "WANDB_MODE" not in os.environ
    assert not messages(caplog)
    log_in(home / netrc, "http://other.example")
    assert wandb_offline_without_key(home)
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
def test_an_environment_variable_decides_if_the_run_is_offline(
    name: str, value: str, mode: str | None, home: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv(name, value)
    assert wandb_offline_without_key(home)
    assert os.environ.get("WANDB_MODE") == mode
    assert len(messages(caplog)) == (mode == "offline")
    assert os.environ["WANDB_DIR"] == str(home)


@pytest.mark.parametrize("line", [f"api_key = {KEY}", "mode = disabled", "mode = offline"])
@pytest.mark.parametrize("settings", [USER, WORKSPACE])
def test_settings_of_wandb_are_respected(settings: str, line: str, home: Path, caplog) -> None:
    save(home / settings, line)
    assert wandb_offline_without_key(home)
    assert "WANDB_MODE" not in os.environ
    assert not messages(caplog)


def test_the_key_is_not_checked_over_the_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the login uses no network: it looks up neither the validity of the key nor the key's owner."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        log_in(home / ".netrc", url)
        assert wandb_offline_without_key(home)
        assert "WANDB_MODE" not in os.environ
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_run_that_starts_after_the_check_is_offline(home: Path, caplog) -> None:
    """A W&B run that starts after the check uses the new mode, even if W&B has read its settings before. A W&B run that
    is already active does not change.
    """
    wandb_offline_without_key(home)
    with wandb.init(project="test", settings=wandb.Settings(silent=True)) as run:
        assert run.offline
        assert Path(run.dir).is_relative_to(home / "wandb")
        del os.environ["WANDB_MODE"]
        assert wandb_offline_without_key(home)
        assert wandb.run is run
        assert "WANDB_MODE" not in os.environ
    wandb.teardown()
    assert len(messages(caplog)) == 1


@pytest.mark.parametrize(
    ("lines", "starts"),
    [
        (["base_url = https://a%b.example"], False),
        (["base_url = https://\xff.example"], False),
        (["base_url = https://a.example", "base_url = https://b.example"], True),
        (["base_url = a.example"], True),
    ],
    ids=["percent", "not UTF-8", "twice", "no scheme"],
)
def test_malformed_settings_do_not_stop_training(lines: list[str], starts: bool, home: Path, caplog) -> None:
    """With malformed W&B settings, training continues. If W&B can start with them, the run is logged offline; otherwise
    it is not logged. A message of one line names the case.
    """
    save(home / USER, *lines)
    assert wandb_offline_without_key(home) == starts
    assert ("this run is logged offline" if starts else "this run is not logged to") in messages(caplog)[0]
    assert len(messages(caplog)) == 1
    assert "\n" not in messages(caplog)[0]


@pytest.mark.parametrize("url", ["http://[::1", "a.example", ""])
def test_malformed_server_urls_do_not_stop_training(
    url: str, home: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", url)
    assert not wandb_offline_without_key(home)
    assert len(messages(caplog)) == 1
    assert "\n" not in messages(caplog)[0]


def test_without_a_home_directory_the_run_is_not_logged(home: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert not wandb_offline_without_key(home)
    reason = "Could not determine home directory."
    assert messages(caplog) == [f"this run is not logged to Weights & Biases, which cannot start: {reason}"]
