"""The page's server: bound to one address, with nothing from outside. The browser enforces the latter, too."""

import contextlib
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.cli.explorer.limits import UPLOAD_BYTES
from tightfit.cli.explorer.page import build_page, gradio_package, stylesheet, theme
from tightfit.cli.explorer.workers import Workers
from tightfit.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CLOSING_SECONDS = 2  # that open connections get at the end
# Gradio's own scripts make functions from text. Nothing can be sent to or loaded from another host.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
SETTINGS = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_SHARE": "False",
    "GRADIO_SSR_MODE": "False",
    "GRADIO_MCP_SERVER": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}
_FOREIGN_META = re.compile(rb'<meta\b[^>]*\bcontent="https?://[^>]*>', re.DOTALL)  # pictures for links in other places


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens on an address; port 0 is a free one. Raises `InputError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--host {host!r} is no address of this machine: give 127.0.0.1 or 0.0.0.0") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()
    except OSError as error:
        found.close()
        what = f"--port {port}" if port else f"--host {host}"
        raise InputError(
            f"{what}: {host} cannot be bound: {error.strerror}: choose another one, or --port 0"
        ) from error
    return found


def address_of(listening: socket.socket, host: str) -> str:
    """The page's address, for a browser on this machine."""
    port = listening.getsockname()[1]
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else host
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}/"


def serve(host: str, port: int, *, workers: int, ready: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted; `ready` is called with its address when it answers.

    Raises `InputError` where the address cannot be bound, or Gradio is not installed.
    """
    with settings(), contextlib.closing(bound(host, port)) as listening:
        gradio_package()
        with contextlib.closing(Workers(workers)) as answering, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Gradio and what it imports
            address = address_of(listening, host)
            _run(application(answering, host), listening, lambda: ready(address))


def application(workers: Workers, host: str) -> Any:
    """The page as an ASGI application. Raises `InputError` where Gradio is not installed."""
    gr = gradio_package()
    from fastapi import FastAPI

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    gr.mount_gradio_app(
        app,
        build_page(workers),
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        max_file_size=UPLOAD_BYTES,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        css=stylesheet(),
    )
    return Guard(app, host)


class Guard:
    """Adds the policy to every answer, takes hosts of others out of the page, and on a loopback address answers only
    requests for it: another site's page could otherwise ask through a name that it resolves to this machine.
    """

    def __init__(self, app: Any, host: str):
        self.app = app
        self.only_loopback = host in LOOPBACK

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.only_loopback and _host_of(scope) not in LOOPBACK:
            await send({"type": "http.response.start", "status": 421, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this page answers on its own address only\n"})
            return
        await self.app(scope, receive, _WithPolicy(send))


class _WithPolicy:
    """Passes an answer on, with the policy; an HTML page without addresses of other hosts in its `meta`."""

    def __init__(self, send: Any):
        self.send = send
        self.start: Any = None  # of an HTML page, until its length is known
        self.body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"content-security-policy", POLICY.encode())]
            headers += [(b"referrer-policy", b"no-referrer"), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": headers}
            if any(name.lower() == b"content-type" and value.startswith(b"text/html") for name, value in headers):
                self.start = message
                return
        elif self.start is not None:
            self.body += message.get("body", b"")
            if message.get("more_body"):
                return
            body = _FOREIGN_META.sub(b"", self.body)
            kept = [(name, value) for name, value in self.start["headers"] if name.lower() != b"content-length"]
            await self.send({**self.start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
            self.start, message = None, {"type": "http.response.body", "body": body}
        await self.send(message)


def _host_of(scope: Any) -> str:
    """The host that a request names, without its port."""
    named = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
    return named[1:].partition("]")[0] if named.startswith("[") else named.partition(":")[0]


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Gradio's switches that are read from the environment, and a folder for uploads that goes away at the end."""
    folder = tempfile.mkdtemp(prefix="tightfit-explore-")
    wanted = {**SETTINGS, "GRADIO_TEMP_DIR": folder}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _run(app: Any, listening: socket.socket, ready: Callable[[], None]) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSING_SECONDS, lifespan="on"
    )
    # uvicorn raises the signal again after a clean end, so Ctrl-C arrives as KeyboardInterrupt.
    Server(config).run(sockets=[listening])
