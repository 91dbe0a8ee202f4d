"""The server: one address, nothing from outside, and one line for what is wrong with where it is to listen."""

import asyncio
import gc
import os
import re
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from command_line import tightfit
from tightfit.cli.explorer.page import upload_of
from tightfit.cli.explorer.serving import address_of, application, bound, settings
from tightfit.cli.explorer.uploads import Upload
from tightfit.errors import InputError

ADDRESS = re.compile(rb"https?:(?:\\?/){2}([\w.-]+)")


class NoWorkers:
    """In the place of workers, for a page that nobody asks."""

    count = 2


def get(app, path, host="127.0.0.1:8000"):
    """Status, headers and body of a GET request."""
    sent = []

    async def run():
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"host", host.encode())], "scheme": "http", "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1), "http_version": "1.1", "asgi": {"version": "3.0"}, "root_path": "",
        }  # fmt: skip

        asked = []

        async def receive():
            if asked:
                await asyncio.Event().wait()  # the browser stays
            asked.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)

    asyncio.run(run())
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(part.get("body", b"") for part in sent[1:])


@pytest.mark.keeps("page-tightfit-explore-names")
@pytest.mark.slow  # a server of its own
@pytest.mark.skipif(find_spec("gradio") is None, reason="gradio is not installed")
@pytest.mark.filterwarnings("ignore")  # of Gradio and of what it imports
def test_the_page_names_no_other_host_and_forbids_the_browser_to_ask_one():
    with settings():
        app = application(NoWorkers(), "127.0.0.1")
        status, headers, page = get(app, "/")
        assert status == 200
        # Gradio's own texts link to its pages. Nothing loads these.
        assert set(ADDRESS.findall(page)) <= {b"127.0.0.1", b"gradio.app", b"github.com"}
        assert b"What fits this card?" in page
        assert b"fonts.googleapis" not in page + get(app, "/theme.css")[2]
        policy = headers[b"content-security-policy"].decode()
        assert "connect-src 'self'" in policy
        assert "http" not in policy
        assert int(headers[b"content-length"]) == len(page)
        # Another site's page that resolves its own name to this machine gets nothing.
        assert get(app, "/", host="evil.example:8000")[0] == 421
        assert get(application(NoWorkers(), "0.0.0.0"), "/", host="space.example")[0] == 200
    del app
    gc.collect()  # Gradio leaves event loops open, which another test would be blamed for


def test_no_path_is_opened_but_of_the_folder_of_uploads(tmp_path):
    secret = tmp_path / "secret.yaml"
    secret.write_text("model: {}")
    with settings():
        stored = Path(os.environ["GRADIO_TEMP_DIR"], "run.yaml")
        stored.write_text("model: {}")
        assert upload_of(str(stored)) == Upload("run.yaml", "model: {}")
        assert not stored.exists()
        for file in (str(secret), f"{stored.parent}/../{tmp_path.name}/secret.yaml", None, 7):
            with pytest.raises(InputError, match="no file came"):
                upload_of(file)
    assert secret.exists()
    assert not stored.parent.exists()


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tightfit("explore", "--port", str(port), "--no-browser")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith(f"error: --port {port}: 127.0.0.1 cannot be bound: ")
    assert done.err.endswith("choose another one, or --port 0\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--port", "70000"), "--port 70000 is no port: give 0 to 65535"),
        (("--host", "no such host"), "--host 'no such host' is no address of this machine"),
        (("--host", "192.0.2.1"), "--host 192.0.2.1: 192.0.2.1 cannot be bound"),
    ],
)
def test_an_address_that_cannot_be_is_one_line(arguments, line):
    done = tightfit("explore", "--no-browser", *arguments)
    assert (done.code, done.out) == (2, "")
    assert line in done.err
    assert done.err.count("\n") == 1


def test_without_gradio_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = tightfit("explore", "--no-browser")
    assert done.code == 2
    assert done.err == "error: the page needs the package gradio: pip install 'tightfit[explore]'\n"


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")])
def test_the_address_is_one_that_a_browser_here_can_open(host, shown):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    with bound(host, 0) as listening:
        port = listening.getsockname()[1]
        assert port > 0
        assert address_of(listening, host) == f"http://{shown}:{port}/"
