"""A proxy that makes faults between a client of rollouts and a server, and a look at what a server's processes hold."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serving import Server

from rollout import Rollout
from rollout.wire import pack_rollouts, unpack_requests, unpack_rollouts
from sparse_rl.trace import EvictionTrace

SHAPE, VOCABULARY = (2, 2), 64  # of the tests' tiny model
ENDED_BY = {"abort": "abort", "believed": "stop"}  # fault -> finish reason of a sequence that is cut short


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server at a port. next_fault(proxy) names the fault of a request for rollouts, if any.

    given : number of times that the server was given weights
    """

    daemon_threads = True

    def __init__(self, port: int, next_fault: Callable[[Proxy], str]) -> None:
        self.port, self.next_fault, self.given = port, next_fault, 0
        super().__init__(("127.0.0.1", 0), Between)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that have left."""


class Between(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.next_fault(self.server) if (self.command, self.path) == ("POST", "/rollouts") else ""
        if fault == "500":
            return self.answer(500, b"a fault")
        try:
            assert fault != "reset"
            connection = HTTPConnection("127.0.0.1", self.server.port)
            connection.request(self.command, self.path, body)
            reply = connection.getresponse()
            answer = reply.read()
        except (AssertionError, OSError, HTTPException):
            return self.reset()
        self.server.given += self.path.startswith("/rollouts/weights") and reply.status == 200
        if reply.status == 200 and fault in ENDED_BY:
            answer = shortened(body, answer, ENDED_BY[fault])
        if fault == "damaged":
            answer = answer[: len(answer) // 2]
        self.close_connection |= fault == "cut"
        self.answer(reply.status, answer, sent=len(answer) // 2 if fault == "cut" else None)

    do_POST = do_GET

    def answer(self, status: int, body: bytes, sent: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:sent])

    def reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.close(self.connection.detach())


def shortened(asked: bytes, answer: bytes, finish_reason: Any) -> bytes:
    """Return an answer whose last sequence has only half of its tokens, as that of an aborted request has."""
    *others, last = unpack_rollouts(answer, unpack_requests(asked).requests, SHAPE, VOCABULARY)
    prompt, ids, *logprobs, trace, _, _ = vars(last.rollout).values()
    count = -(-len(ids) // 2)
    trace = EvictionTrace.recorded(trace.evict_at[..., : len(prompt) + count])
    half = Rollout(prompt, ids[:count], *(values[:count] for values in logprobs), trace, finish_reason)
    return pack_rollouts([*others, replace(last, rollout=half)])


# ---- what a server holds --------------------------------------------------------------------------------------------

PLACE = "COUNTS"  # environment variable with the folder to which a process writes what it holds, when it gets SIGUSR2
COUNTING = f"""
import collections, gc, json, os, signal

def count(*_):
    sizes = collections.Counter()
    gc.unfreeze()  # frozen objects are not listed, nor collected
    gc.collect()
    for owner in gc.get_objects():
        if str(type(owner).__module__).startswith(("rollout.", "vllm.")):
            for name, value in list(getattr(owner, "__dict__", {{}}).items()):
                if isinstance(value, (dict, list, set, collections.deque)):
                    sizes[f"{{type(owner).__qualname__}}.{{name}}"] += len(value)
    gc.freeze()
    place = f"{{os.environ['{PLACE}']}}/{{os.getpid()}}"
    with open(place + "_part", "w") as file:
        json.dump(sizes, file)
    os.rename(place + "_part", place)

signal.signal(signal.SIGUSR2, count)
"""


def counting(folder: Path) -> dict[str, str]:
    """Return variables with which the processes of a server can be asked for what they hold (`held`)."""
    (folder / "sitecustomize.py").write_text(COUNTING)
    return {PLACE: str(folder), "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def held(server: Server, folder: Path) -> dict[str, int]:
    """Return the sizes of all collections in attributes of our objects and vLLM's, summed over those of a class."""
    sizes: dict[str, int] = {}
    for number, process in enumerate(server.family()):
        if "resource_tracker" in "".join(process.cmdline()):
            continue
        (place := folder / str(process.pid)).unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR2)
        while not place.exists():
            time.sleep(0.05)
        sizes |= {f"{number}: {name}": size for name, size in json.loads(place.read_text()).items()}
    return sizes
