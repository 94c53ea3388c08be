"""Servers of rollouts that a launch starts: they answer, share a key, and end with the launch, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from processes import without_launch

from rollout.config import KEY, SERVERS
from sparse_rl.errors import StoppedError, UserError
from trainer.launch import rollout_servers

SERVER = """
import http.server, os, sys, time
print(f"cards {os.environ.get('CUDA_VISIBLE_DEVICES')}, process {os.getpid()}", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}" else 401)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
WORDS = ["-c", SERVER]


def processes(folder: Path) -> list[int]:
    """Return the numbers of the processes that have printed theirs in the folder's logs."""
    logs = sorted(folder.glob("rollout-server-*.log"))
    return [int(line.rpartition(" ")[2]) for log in logs for line in log.read_text().splitlines() if "process" in line]


def alive(number: int) -> bool:
    state = Path(f"/proc/{number}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_servers_answer_and_end_with_the_block(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "of-another-server")
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), rollout_servers(2, WORDS, tmp_path):
        urls = os.environ[SERVERS].split()
        assert len(set(urls)) == 2
        assert len(os.environ[KEY]) == 32
        for url in urls:
            assert httpx.get(f"{url}/rollouts", headers={"Authorization": f"Bearer {os.environ[KEY]}"}).is_success
            assert httpx.get(f"{url}/rollouts", headers={"Authorization": "Bearer of-another-server"}).is_error
        started = processes(tmp_path)
        assert len(started) == 2
        assert all(map(alive, started))
        raise ZeroDivisionError
    assert not any(map(alive, started))
    assert dict(os.environ) == before


def test_servers_get_the_last_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    with rollout_servers(2, WORDS, tmp_path):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    logs = [(tmp_path / f"rollout-server-{i}.log").read_text() for i in (0, 1)]
    assert [log.split(",")[0] for log in logs] == ["cards 5", "cards 7"]
    with pytest.raises(UserError, match="leave none for training"), rollout_servers(3, WORDS, tmp_path):
        pass


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path):
    words = ["-c", "print('first'); raise SystemExit('no model there')"]
    why = "ended before it answered: no model there"
    with pytest.raises(StoppedError, match=why), rollout_servers(1, words, tmp_path):
        pass


def test_every_server_is_watched_while_another_one_starts(tmp_path):
    words = "import os, time\nif os.readlink('/proc/self/fd/1').endswith('-1.log'): raise SystemExit('no room there')\n"
    why = r"ended before it answered: no room there \(see .*rollout-server-1\.log"
    with pytest.raises(StoppedError, match=why), rollout_servers(2, ["-c", f"{words}time.sleep(60)"], tmp_path):
        pass


LAUNCHER = """
import sys, time
from pathlib import Path
from trainer.launch import rollout_servers
with rollout_servers(1, ["-c", sys.argv[1]], Path(sys.argv[2])):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminate", "kill"])
def test_servers_end_with_a_launcher_that_is_ended(tmp_path, number):
    words = [sys.executable, "-c", LAUNCHER, SERVER, str(tmp_path)]
    with subprocess.Popen(words, env=without_launch(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        (server,) = processes(tmp_path)
        assert alive(server)
        launcher.send_signal(number)
        launcher.wait()
        for _ in range(200):
            if not alive(server):
                break
            time.sleep(0.05)
        assert not alive(server)
