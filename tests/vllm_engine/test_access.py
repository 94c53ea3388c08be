"""Access to the server is checked on vLLM's own app, built from the arguments of `sparse-rl serve`; no engine runs."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient, WebSocketDenialResponse

from rollout.vllm import serve
from rollout.vllm.compat import server
from sparse_rl.errors import UserError

KEY = {"Authorization": "Bearer secret"}
ALL_TASKS = ("generate", "transcription", "realtime", "embed", "classify", "score", "render")
WIDE = ["--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-fault-tolerance"]


def app_of(*after_dashes: str, host: str = "127.0.0.1", tasks: Any = ("generate",), **access: list[str]) -> Any:
    """Return the app that the server would run with these words after -- and these arguments that serve adds."""
    from vllm.entrypoints.launchers.api_server import entry

    access = {"allowed_hosts": [], "allowed_origins": [], **access}
    words = serve.command_line(model="model", host=host, port=8000, dtype="auto", **access)
    return entry.build_app(server.read_arguments(words, list(after_dashes)), tasks)


def client(app: Any, host: str = "127.0.0.1:8000") -> TestClient:
    return TestClient(app, f"http://{host}", raise_server_exceptions=False)


def routes(owner: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (method, path) of every route of an app, its routers and mounts. The method of a WebSocket is ""."""
    for route in owner.routes:
        path = prefix + getattr(route, "path", "")
        if getattr(route, "routes", None):
            yield from routes(route, path)
        yield from ((method, path) for method in getattr(route, "methods", None) or ("", "GET", "POST"))


def status_of(app: Any, method: str, path: str, headers: dict[str, str]) -> int:
    """Return the status code of the response. 101 means that a WebSocket was opened."""
    if method:
        return client(app).request(method, path, headers=headers).status_code
    try:
        with client(app).websocket_connect(f"ws://127.0.0.1:8000{path}", headers=headers):
            return 101
    except WebSocketDenialResponse as denied:
        return denied.status_code
    except Exception:
        return 500


@pytest.mark.parametrize("tasks", [("generate",), ALL_TASKS])
@pytest.mark.few(1)
def test_every_route_requires_the_api_key(tasks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The routes are read from the app, so that new routes of vLLM are tested too."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    app = app_of("--api-key", "other", "secret", *WIDE, tasks=tasks)
    app_routes = {(method, path) for method, path in routes(app) if path != "/health"}
    assert len(app_routes) > 40
    assert {("POST", "/invocations"), ("GET", "/metrics"), ("GET", "/docs")} <= app_routes
    for method, path in sorted(app_routes | {("GET", path) for path in ("/nothing", "/", "//health", "/health/")}):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert status_of(app, method, path, headers) == 401, (method, path, headers)
        assert status_of(app, method, path, KEY) != 401, (method, path)
    for headers in ({"Authorization": "secret"}, {"X-Api-Key": "secret"}):
        assert status_of(app, "GET", "/metrics", headers) == 401, headers
    assert status_of(app, "GET", "/health", {}) != 401
    app.user_middleware.pop(0)
    app.middleware_stack = None
    assert status_of(app, "GET", "/metrics", {}) == 200  # control: vLLM's app without our middleware


@pytest.mark.parametrize("words", [["--api-key", ""], []])
def test_the_key_may_come_from_the_environment(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, clients need none."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert status_of(app_of(), "GET", "/metrics", {}) == 401
    assert status_of(app_of(), "GET", "/metrics", KEY) == 200
    monkeypatch.delenv("VLLM_API_KEY")
    assert status_of(app_of(*words), "GET", "/metrics", {}) == 200  # without a configured key, clients need none


LOOPBACK = ["127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LocalHost", "[::1]:8000"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "[::1",
    "",
    "a b",
    "@",
]
HOSTNAME = socket.gethostname()


@pytest.mark.parametrize(
    ("host", "hosts", "ours", "foreign"),
    [
        ("127.0.0.1", [], LOOPBACK, [*FOREIGN, "192.0.2.7", HOSTNAME]),
        ("localhost", [], LOOPBACK, [*FOREIGN, "192.0.2.7"]),
        ("::1", [], LOOPBACK, [*FOREIGN, "[2001:db8::1]:8000"]),
        ("192.0.2.7", [], ["192.0.2.7:8000"], [*FOREIGN, "localhost", "192.0.2.8"]),
        ("0.0.0.0", [], [*LOOPBACK, "192.0.2.7:8000", "[2001:db8::1]", HOSTNAME], FOREIGN),
        ("::", [], [*LOOPBACK, "192.0.2.7", HOSTNAME], FOREIGN),
        ("127.0.0.1", ["my.example"], [*LOOPBACK, "my.example", "My.Example:8000"], [*FOREIGN, "not.my.example"]),
        ("127.0.0.1", ["*"], [*LOOPBACK, *FOREIGN], []),
    ],
)
@pytest.mark.few(3)
def test_requests_for_another_host_name_are_refused(
    host: str, hosts: list[str], ours: list[str], foreign: list[str]
) -> None:
    """Otherwise a foreign page could point its own host name to this address, and read the responses as its own."""
    app = app_of(host=host, allowed_hosts=hosts)
    for name in ours:
        assert status_of(app, "GET", "/metrics", {"Host": name}) == 200, name
    for name in foreign:
        for path in ("/metrics", "/health", "/v1/models"):
            assert status_of(app, "GET", path, {"Host": name}) == 400, name


def test_requests_of_pages_from_other_origins_are_refused() -> None:
    """A browser sends the page's origin. A preflight request carries no key; it is answered for allowed origins."""
    own_origins = ["http://127.0.0.1:8000", "https://127.0.0.1:8000"]
    foreign = ["https://evil.example", "http://127.0.0.1:3000", "http://localhost:8000", "null", "", "http://127.0.0.1"]
    page = "https://page.example"
    preflight_headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origins, allowed, refused in (
        ([], own_origins, [*foreign, page]),
        ([page], [*own_origins, page], foreign),
        (["*"], [*own_origins, *foreign, page], []),
    ):
        app = app_of("--api-key", "secret", allowed_origins=origins)
        for origin in allowed:
            assert status_of(app, "GET", "/metrics", {"Origin": origin}) == 401
            response = client(app).get("/metrics", headers={"Origin": origin, **KEY})
            assert response.status_code == 200, origin
            assert ("access-control-allow-origin" in response.headers) is (origin not in own_origins or "*" in origins)
        for origin in refused:
            for method, path in (("GET", "/metrics"), ("POST", "/v1/completions"), ("OPTIONS", "/v1/models")):
                assert status_of(app, method, path, {"Origin": origin, **preflight_headers, **KEY}) == 403, origin
    preflight = client(app_of("--api-key", "secret", allowed_origins=[page])).options(
        "/v1/models", headers={"Origin": page, **preflight_headers}
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == page
    assert status_of(app_of("--api-key", "secret"), "OPTIONS", "/v1/models", {}) == 401


def test_our_options_after_the_dashes_are_refused() -> None:
    options = {"--allowed-hosts": '["a"]', "--allowed-origins": '["https://a"]', "--model": "m", "--dtype": "bfloat16"}
    for option, value in options.items():
        with pytest.raises(UserError, match=f"{option} must be given before --"):
            app_of(option, value)


@pytest.mark.parametrize("depth", [90, 3_000, 300_000])
def test_a_deeply_nested_request_is_a_client_error(depth: int) -> None:
    app, paths = app_of(), ("/invocations", "/v1/completions", "/v1/chat/completions", "/tokenize")
    for value in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        request = f'{{"model": "m", "prompt": "1", "structured_outputs": {{"json": {value}}}}}'
        for path, body in itertools.product(paths, (value, request)):
            response = client(app).post(path, content=body, headers={"Content-Type": "application/json"})
            assert 400 <= response.status_code < 500 or depth == 90, (path, body[:40], response.text)


LONG = 2**17 + 1
BODIES = {
    "request": " " * 2**24 + "{}",
    "messages": {"messages": [{"role": 5}] * 9_000},
    "prompt": {"prompt": [1] * LONG + [-1]},
    "n": {"prompt": ["a"] * 100, "n": 100},
    "tools": {"messages": [], "tools": [{"type": "function", "function": {"name": "a"}}] * 5_000},
    "logit_bias": {"prompt": "1", "logit_bias": {str(i): "x" for i in range(LONG)}},
    "stop": {"prompt": "1", "stop": [[]] * 17_000},
    "tokens": {"tokens": ["x"] * LONG},
    "input": {"input": [{"type": "message", "role": "user", "content": [{"type": "x"}]}] * 5_000},
    "structured_outputs": {"prompt": "1", "structured_outputs": {"choice": [1] * LONG}},
}


@pytest.mark.parametrize("field", BODIES)
def test_a_request_beyond_a_limit_is_refused_by_every_route_before_vllm_reads_it(field: str) -> None:
    """vLLM would need up to a minute to list their errors, and answer nobody. With ten values it is left to vLLM."""
    app, content = app_of(*WIDE), BODIES[field]
    body = content if isinstance(content, str) else json.dumps({"model": "m", **content})
    for path in ("/v1/completions", "/v1/responses", "/detokenize", "/invocations"):
        response = client(app).post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, (path, response.text)
        assert response.json()["error"]["message"].startswith(f"{field}: the server accepts at most"), response.text
    if not isinstance(content, str):
        few = {name: value[:10] for name, value in content.items() if isinstance(value, list)}
        response = client(app).post("/v1/completions", json={"model": "m", **few})
        assert "the server accepts at most" not in response.text, response.text


@pytest.mark.parametrize("body", [{"prompt": [1] * 2**20}, {"prompt": [[2] * 2**19] * 2}, {"tokens": [0] * 2**20}])
def test_token_ids_are_limited_by_the_models_context_alone(body: dict[str, Any]) -> None:
    """Control: other fields may not have as many values, because vLLM would list an error for each."""
    assert server.over_body(body) is None
    assert server.over_body({"bad_words": list(body.values())}) is not None
    assert server.over_body({"prompt": [-1] * 2**18}) is not None


def test_only_requests_with_the_same_key_and_salt_share_conversations() -> None:
    """The key reaches the place where requests are made. Requests that are no plain tokens share nothing."""
    owners = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for salt in (None, "salt"):
            request = dict.fromkeys(("lora_request", "mm_features", "prompt_embeds"))
            owners.append(server.owner_of(SimpleNamespace(**request, cache_salt=salt)))
            for other in request:
                assert server.owner_of(SimpleNamespace(**{**request, other: ["x"]}, cache_salt=salt)) is None
        await Response()(scope, receive, send)

    state = SimpleNamespace(args=app_of("--api-key", "other", "secret").state.args)
    guarded = server.Guard(app)

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await guarded({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    for key in ("secret", "other", "secret"):
        assert client(with_state).get("/", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert owners[:2] == owners[4:]
    assert len({None, *owners}) == 1 + 4
    assert server.owner_of(SimpleNamespace(lora_request=None, mm_features=None, prompt_embeds=None)) is None  # no key
