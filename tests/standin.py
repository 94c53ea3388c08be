"""A server of rollouts for tests of its client: the real routes over HTTP, with the hf engine behind them, and faults.

As a program (`standin.py MODEL POLICY --port PORT`) it is a process that can be killed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from safetensors.torch import load, load_file

from rollout import wire
from rollout.config import KEY
from rollout.hf import HFEngine
from sparse_rl.attention import compute_exactly
from sparse_rl.attention.families import cache_shape
from sparse_rl.models.load import load_config, model_fingerprint
from sparse_rl.models.weights import identify
from sparse_rl.policies import make_policy
from sparse_rl.policies.make import fingerprint
from sparse_rl.trace import EvictionTrace


class StandIn(ThreadingHTTPServer):
    """A running server. faults : names of faults of the next requests for rollouts, the first one first ("" is none)

    asked : number of sequences that it has been asked for
    pushes : number of times that it was given weights
    bodies : number of times that they came in a body, as they must if it is not `near`
    deaf : number of the next GET requests that it does not answer
    """

    daemon_threads = True
    requests = deaf = bodies = 0
    near = True

    def __init__(self, model: str, policy: Any, port: int = 0, faults: Iterable[str] = (), max_batch: int = 16) -> None:
        self.engine, self.faults, self.lock = HFEngine(model, make_policy(policy)), list(faults), threading.Lock()
        self.asked = self.pushes = 0
        self.connections: list[socket.socket] = []
        config = load_config(model)
        layers, kv_heads, _ = cache_shape(config)
        self.about = {
            "policy": fingerprint(self.engine.policy),
            "model": model_fingerprint(config),
            "weights": identify(model).fingerprint,
            "vocabulary": config.vocab_size,
            "layers": layers,
            "kv_heads": kv_heads,
            "dtype": "float32",
            "exact": True,
            "version": 0,
            "max_batch": max_batch,
            "max_model_len": 256,
        }
        super().__init__(("127.0.0.1", port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that have left."""

    def sample(self, asked: wire.Asked) -> list[wire.Answered]:
        rollouts = [rollout for rollout, _ in self.engine._run(asked.requests, asked.sampling)]
        version = self.about["version"]
        return [wire.Answered(rollout, (version, version)) for rollout in rollouts]


class Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def answer(self, body: bytes, status: int = 200, sent: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:sent])

    def refuse(self, status: int, text: str) -> None:
        self.answer(json.dumps({"error": {"message": text, "type": "Error", "code": status}}).encode(), status)

    def admitted(self) -> bool:
        key = os.environ.get(KEY)
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.refuse(401, "Unauthorized")
            return False
        return True

    def do_GET(self) -> None:
        if self.server.deaf:
            self.server.deaf -= 1
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.admitted():
            digests = self.server.engine.scorer_digests()
            self.answer(
                json.dumps({**self.server.about, "requests": self.server.requests, "scorers": digests}).encode()
            )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.admitted():
            return
        self.server.requests += 1
        try:
            self.respond(body)
        finally:
            self.server.requests -= 1

    def respond(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        with self.server.lock:
            if path == "/rollouts/weights":
                given = {name: values[0] for name, values in parse_qs(query).items()}
                version = int(given["version"])
                self.server.bodies += bool(body)
                if "file" in given and not self.server.near:
                    version = self.server.about["version"]
                if version != self.server.about["version"]:
                    weights = load_file(given["file"]) if "file" in given else load(body)
                    self.server.engine.load_weights(weights.items())
                    self.server.about["version"] = version
                    self.server.pushes += 1
                return self.answer(json.dumps({"version": version}).encode())
            asked = wire.unpack_requests(body)
            self.server.asked += len(asked.requests)
            fault = self.server.faults.pop(0) if self.server.faults else ""
            if fault in ("500", "409"):
                return self.refuse(int(fault), "a fault")
            if fault == "reset":
                return self.connection.shutdown(socket.SHUT_RDWR)
            if fault == "lost":
                self.close_connection = False
                return None
            if asked.version != self.server.about["version"]:
                return self.refuse(409, f"version {asked.version} was asked for")
            answered = self.server.sample(asked)
        if fault == "abort":
            answered[-1].rollout.finish_reason = "abort"  # type: ignore[assignment]
        if fault == "shape":
            layers, heads, length = answered[0].rollout.trace.evict_at.shape
            answered[0].rollout.trace = EvictionTrace.dense(layers, heads + 1, length)
        if fault == "version":
            answered = [wire.Answered(one.rollout, (0, one.versions[1] + 1)) for one in answered]
        packed = wire.pack_rollouts(answered)
        if fault == "slow":
            time.sleep(0.6)
        if fault == "damaged":
            packed = packed[: len(packed) // 2]
        self.answer(packed, sent=len(packed) // 2 if fault == "cut" else None)
        if fault == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(*servers: Any) -> Iterator[list[str]]:
    """Let servers answer in this block. Yields their URLs."""
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    compute_exactly(True)
    StandIn(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[4])).serve_forever()
