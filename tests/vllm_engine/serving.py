"""Start a server in a separate process, for the tests of `sparse-rl serve`."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI
from tiny import HEADS_OF_32, new_model

from sparse_rl.commands.console import Session, guarded
from sparse_rl.commands.main import parse
from sparse_rl.data.synthetic import EOS_ID, RunningSum
from sparse_rl.temporary import FOLDER

START = 600  # seconds; a start takes half a minute alone, and minutes while other tests run


def served_directory(folder: Path, template: str | None = None, poison: int | None = None) -> Path:
    """Write a tiny model and its tokenizer, with a chat template, or with a NaN embedding for a token that greedy
    sampling never chooses."""
    model, tokenizer = new_model("qwen3", **HEADS_OF_32, eos_token_id=EOS_ID), RunningSum.tokenizer()
    if poison is not None:
        model.model.embed_tokens.weight.data[poison], model.lm_head.weight.data[poison] = math.nan, 0.0
    model.save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def run(*words: Any) -> int:
    """Return the exit status of `sparse-rl serve`."""
    try:
        options = parse(["serve", *map(str, words)])
    except SystemExit as stop:
        return int(stop.code or 0)
    return guarded(lambda: options.run(options, Session()), Session())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`sparse-rl serve` in a separate process that writes its log to a file."""

    def __init__(self, model: Path, folder: Path, *words: str, port: int | None = None) -> None:
        self.model, self.port, self.log = str(model), port or free_port(), folder / "server.log"
        command = [sys.executable, "-m", "sparse_rl.cli", "serve", self.model, "--port", str(self.port), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        environment = {k: v for k, v in environment.items() if not k.startswith(("VLLM_", FOLDER))}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers: dict[str, str] = {}  # of `metrics`
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300)

    def wait(self) -> None:
        until = time.monotonic() + START
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise TimeoutError(self.log.read_text())

    def family(self) -> list[psutil.Process]:
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def end(self, stop_signal: signal.Signals, seconds: float = 30) -> int:
        """Stop the server by a signal and return its exit status. All processes that it started must end too."""
        family = self.family()
        # Ctrl-C goes to the whole group
        (os.killpg if stop_signal is signal.SIGINT else os.kill)(self.process.pid, stop_signal)
        try:
            status = self.process.wait(seconds)
            until = time.monotonic() + seconds
            while left := [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
                assert time.monotonic() < until, left
                time.sleep(0.1)
        finally:
            for process in family:
                if process.is_running():
                    process.kill()
        return status

    def complete(self, prompt: list[int], tokens: int, **options: Any) -> Any:
        extra = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=tokens, **{"temperature": 0, **options}, extra_body=extra
        )

    def metrics(self) -> dict[str, float]:
        """Return vLLM's metrics without their labels; `blocks` is the number of blocks in the pool."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers).text
        result = {name: float(value) for name, value in re.findall(r"^vllm:(\w+)\{.*\} (\S+)$", text, re.MULTILINE)}
        match = re.search(r'num_gpu_blocks="(\d+)"', text)
        assert match
        return {**result, "blocks": int(match[1])}

    def idle(self) -> None:
        until = time.monotonic() + 60
        while (metrics := self.metrics())["num_requests_running"] or metrics["kv_cache_usage_perc"]:
            assert time.monotonic() < until, metrics
            time.sleep(0.1)


@contextmanager
def running(model: Path, folder: Path, *words: str) -> Iterator[Server]:
    """Run a server that answers requests. It is stopped at the end if the test has not stopped it."""
    server = Server(model, folder, *words)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGTERM)
