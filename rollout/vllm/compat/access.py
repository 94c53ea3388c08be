"""Access control of the server: a request must name an allowed host, come from no foreign page, and have the API key.

vLLM itself checks only the key, under some path prefixes. `Guard` wraps vLLM's whole app (`--middleware`), so that it
also covers routes that a new version of vLLM adds.
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
OPEN = "/health"  # this path needs no key, because it only shows that the server runs
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEEP = "the request is nested too deeply"
READS = "solve_dependencies"  # FastAPI's function that makes a route's arguments from a request


class Guard:
    """Refuses a request, or passes it to vLLM's app. `state.args` of the app has the keys, hosts and origins."""

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
        answered = False

        async def watched(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if answered or (reason := _unreadable(error)) is None:
                raise
            await _error(400, reason)(scope, receive, send)


def _unreadable(error: Exception) -> str | None:
    """Return the message for a request that vLLM fails to read, or None if the failure has another cause.

    vLLM's field validators assume some types, so that {"structured_outputs": true} raises AttributeError. Only the
    place where such an error is raised distinguishes it from other errors of vLLM.
    """
    if isinstance(error, RecursionError):
        return DEEP
    places = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return f"a field of the request has a wrong type ({error})"[:300] if READS in places else None


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def _refusal(scope: Scope, args: Namespace) -> tuple[int, str] | None:
    """Return the HTTP status and message of a refused request, or None for an accepted one."""
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_ours(_name(host), args):
        return 400, f"this server does not accept the host name {host!r}; add it with --allowed-hosts"
    if origin is not None and not {origin, "*"} & set(args.allowed_origins) and urlsplit(origin).netloc != host:
        return 403, f"pages of {origin!r} may not use this server; allow them with --allowed-origins"
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    preflight = scope.get("method") == "OPTIONS" and origin and "access-control-request-method" in headers
    if args.api_key and path != OPEN and not preflight and not _has_key(headers, args.api_key):
        return 401, "this server needs an API key; send the header Authorization: Bearer KEY"
    return None


def _name(host: str) -> str:
    """Return the host name in a Host header, without the port; "" if the header is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_ours(name: str, args: Namespace) -> bool:
    """Return True for an allowed host, and for the address that the server is bound to.

    A foreign page can make its own name resolve to this machine, but not an IP address. So a server that listens on all
    addresses accepts any IP address.
    """
    if {name, "*"} & set(args.allowed_hosts):
        return True
    bound = (args.host or "0.0.0.0").lower()
    accepted = {bound}
    if bound in LOOPBACK or _is_number(bound, "is_loopback"):
        accepted.update(LOOPBACK)
    if _is_number(bound, "is_unspecified"):
        accepted.update(LOOPBACK, {socket.gethostname().lower()})
        return name in accepted or _is_number(name)
    return name in accepted


def _is_number(name: str, attribute: str = "version") -> bool:
    """Return True if the name is an IP address for which this attribute of `ip_address` is true."""
    try:
        return bool(getattr(ip_address(name), attribute))
    except ValueError:
        return False


def _has_key(headers: Headers, keys: list[str]) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    matches = [secrets.compare_digest(token.encode(), key.encode()) for key in keys]  # all keys, for constant time
    return scheme.lower() == "bearer" and any(matches)
