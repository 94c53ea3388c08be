"""Who may use the server: a request that names a host which is ours, comes from no foreign page, and brings a key.

vLLM asks for the key under some prefixes only, and answers every web page and every name that leads to its address.
`Guard` stands around its whole app (`--middleware`), so that a route which is new there is behind it, too.
"""

from __future__ import annotations

import secrets
import socket
import traceback
from argparse import Namespace
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

GUARD = f"{__name__}.Guard"
OPEN = "/health"  # needs no key: it says that the server runs, and no more
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEEP = "the request is nested too deeply"
READS = "solve_dependencies"  # the function of FastAPI that makes the arguments of a route from a request


class Guard:
    """Refuses a request, or hands it to vLLM's app, whose `state.args` hold the keys, the hosts and the origins."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = _refusal(scope, scope["app"].state.args)
        if refusal is not None:
            await _error(*refusal)(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if begun or (wrong := _unreadable(error)) is None:
                raise
            await _error(400, wrong)(scope, receive, send)


def _unreadable(error: Exception) -> str | None:
    """What is wrong with a request that vLLM fails to read; None where it fails at something else.

    Its validators of fields take some types for granted: {"structured_outputs": true} is an AttributeError, which only
    the place where it was raised tells from vLLM's own.
    """
    if isinstance(error, RecursionError):
        return DEEP
    places = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return f"a field of the request has a wrong type ({error})"[:300] if READS in places else None


def _error(status: int, message: str) -> JSONResponse:
    """In OpenAI's form."""
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def _refusal(scope: Scope, args: Namespace) -> tuple[int, str] | None:
    """Status and message; None for a request that is let in."""
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_ours(_name(host), args):
        return 400, f"this server is not called {host!r}; its --allowed-hosts can add that name"
    if origin is not None and not {origin, "*"} & set(args.allowed_origins) and urlsplit(origin).netloc != host:
        return 403, f"pages of {origin!r} may not use this server; its --allowed-origins can let them"
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    preflight = scope.get("method") == "OPTIONS" and origin and "access-control-request-method" in headers
    if args.api_key and path != OPEN and not preflight and not _has_key(headers, args.api_key):
        return 401, "this server asks for a key: Authorization: Bearer KEY"
    return None


def _name(host: str) -> str:
    """The host of a Host header, without its port; "" for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_ours(name: str, args: Namespace) -> bool:
    """Whether the server goes by this name: that of the address it is bound to, or one that it was told.

    A name is what a foreign page can make lead here, a number is not: so a server on every address takes any number.
    """
    if {name, "*"} & set(args.allowed_hosts):
        return True
    bound = (args.host or "0.0.0.0").lower()
    own = {bound}
    if bound in LOOPBACK or _is_number(bound, "is_loopback"):
        own.update(LOOPBACK)
    if _is_number(bound, "is_unspecified"):
        own.update(LOOPBACK, {socket.gethostname().lower()})
        return name in own or _is_number(name)
    return name in own


def _is_number(name: str, what: str = "version") -> bool:
    try:
        return bool(getattr(ip_address(name), what))
    except ValueError:
        return False


def _has_key(headers: Headers, keys: list[str]) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    matches = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]  # all: in the same time
    return scheme.lower() == "bearer" and any(matches)
