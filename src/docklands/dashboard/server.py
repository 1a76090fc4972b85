"""The dashboard's server: the page's own files and JSON about the runs it was started with. Reads only.

GET /                                   the page; /static/NAME its parts, a fixed list read at the start
GET /api/state                          every run: name, step, state; what the page polls
GET /api/runs/N/metrics                 names with unit, meaning and last value
GET /api/runs/N/series                  ?name=...&after=STEP for each metric, &epoch=E
GET /api/runs/N/{graph,memory,config,logs}
GET /api/runs/N/timeline                ?step=S, or ?from=T&to=T (Unix seconds)
GET /api/runs/N/samples                 ?step=S

A run is named by its number on the command line, so no request can name a path. Requests under a name that is not this
machine's are refused (a page elsewhere could otherwise read the runs through the visitor's browser by rebinding its own
name; an address cannot be rebound), and the page may load nothing but these files.
"""

from __future__ import annotations

import ipaddress
import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docklands.dashboard.runs import RunReader
from docklands.errors import ConfigError, DocklandsError
from docklands.obs.drawing import CURVES, THEMES
from docklands.obs.names import SECTIONS, find

try:
    from werkzeug.exceptions import BadRequest, Forbidden, HTTPException, NotFound
    from werkzeug.routing import Map, Rule
    from werkzeug.serving import WSGIRequestHandler, make_server
    from werkzeug.wrappers import Request, Response
except ImportError as error:
    raise ConfigError("the dashboard needs the package werkzeug", 'pip install "docklands[dashboard]"') from error

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST_SERIES = 100
POLL_S = 3.0
"""Seconds that a poll spends on reading."""
REQUEST_S = 30
"""Seconds that a client has to send its request and to take the answer."""

URLS = Map(
    [
        Rule("/", endpoint="page", methods=["GET"]),
        Rule("/static/<name>", endpoint="static", methods=["GET"]),
        Rule("/api/state", endpoint="state", methods=["GET"]),
        Rule("/api/runs/<int:run>/<view>", endpoint="view", methods=["GET"]),
    ],
    merge_slashes=False,
)


class Dashboard:
    """The WSGI application.

    hosts  names by which it may be asked, without the port; addresses are always fine
    """

    def __init__(self, runs: Sequence[RunReader], hosts: Iterable[str]) -> None:
        self.runs = list(runs)
        self._hosts = set(hosts)
        self._files = static_files()
        self._views: dict[str, Callable[[RunReader, Request], Any]] = {
            "metrics": lambda run, _: metrics_of(run),
            "series": series_of,
            "graph": lambda run, _: run.graph(),
            "timeline": timeline_of,
            "samples": lambda run, request: run.samples(integer(request, "step")),
            "memory": lambda run, _: run.memory(),
            "config": lambda run, _: run.config(),
            "logs": lambda run, _: run.logs(),
        }

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        try:
            response = self._answer(request)
        except HTTPException as error:
            response = as_json({"error": error.description or error.name}, error.code or 500)
            if error.code == 405:
                response.headers["Allow"] = "GET, HEAD"
        except ValueError as error:  # what JSON cannot say
            response = as_json({"error": f"no answer can be made: {error}"}, 500)
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        name = host_name(request.environ.get("HTTP_HOST", ""))
        if name not in self._hosts and address_of(name) is None:
            raise Forbidden("this dashboard is not asked by that name")
        endpoint, values = URLS.bind_to_environ(request.environ).match()
        if endpoint in ("page", "static"):
            name = values.get("name", "index.html")
            if name not in self._files:
                raise NotFound("no such file")
            return Response(self._files[name], content_type=f"{KINDS[Path(name).suffix]}; charset=utf-8")
        if endpoint == "state":
            return as_json({"runs": self._states(), "curves": CURVES})
        if values["run"] >= len(self.runs) or values["view"] not in self._views:
            raise NotFound("no such run or view")
        return as_json(self._views[values["view"]](self.runs[values["run"]], request))

    def _states(self) -> list[dict[str, Any]]:
        """Every run; of those that have much to read, as many as POLL_S allows, and the others in the next polls."""
        began = time.monotonic()
        return [run.state(look=time.monotonic() - began < POLL_S) for run in self.runs]


def static_files() -> dict[str, bytes]:
    """The page's files by name, and the colours that it shares with report.html."""
    folder = resources.files("docklands.dashboard") / "static"
    found = {item.name: item.read_bytes() for item in folder.iterdir() if Path(item.name).suffix in KINDS}
    return {**found, "theme.css": THEMES.encode()}


def as_json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, content_type="application/json")


def host_name(header: str) -> str:
    """The Host header without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[: name.find("]") + 1]
    return name.partition(":")[0]


# --- arguments ---------------------------------------------------------------------------------------------------


def integer(request: Request, name: str) -> int | None:
    """An argument as a whole number; None when it is not given. BadRequest when it is something else."""
    text = request.args.get(name)
    return None if text is None else whole(text, name)


def whole(text: str, name: str) -> int:
    """Text as a whole number. BadRequest."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 15):
        raise BadRequest(f"{name} must be a whole number")
    return int(text)


def seconds(request: Request, name: str) -> float | None:
    """An argument as Unix seconds; None when it is not given."""
    text = request.args.get(name)
    if text is None:
        return None
    try:
        value = float(text[:40])
    except ValueError:
        value = math.nan
    if not abs(value) < 1e11:
        raise BadRequest(f"{name} must be a time in seconds")
    return value


def series_of(run: RunReader, request: Request) -> dict[str, Any]:
    """Points of the metrics asked for, each from its own place on. BadRequest."""
    names, after = request.args.getlist("name"), request.args.getlist("after")
    if len(names) > MOST_SERIES or len(after) not in (0, len(names)):
        raise BadRequest(f"at most {MOST_SERIES} names, and one `after` for each or none")
    wanted = dict(zip(names, [whole(text, "after") for text in after] or [-1] * len(names)))
    return run.series(wanted, integer(request, "epoch"))


def timeline_of(run: RunReader, request: Request) -> dict[str, Any]:
    """Spans of a step, or between two times. BadRequest."""
    start, end, step = seconds(request, "from"), seconds(request, "to"), integer(request, "step")
    if (start is None) != (end is None) or (start is not None and end is not None and not start < end):
        raise BadRequest("from and to belong together, from before to")
    return run.timeline(start, end, step)


def metrics_of(run: RunReader) -> dict[str, Any]:
    """name -> what it means, where it is declared, and its last value."""
    section_of = {metric.name: title for title, metrics in SECTIONS.items() for metric in metrics}
    found = {}
    for name, (step, value) in sorted(run.latest().items()):
        try:
            metric = find(name)
        except DocklandsError:
            told = {"unit": "", "doc": "not a metric that Docklands declares", "section": "Other"}
        else:
            told = {"unit": metric.unit, "doc": metric.doc, "section": section_of.get(metric.name, "Other")}
        found[name] = {**told, "step": step, "value": value}
    return found


# --- serving -----------------------------------------------------------------------------------------------------


class Handler(WSGIRequestHandler):
    """A request handler that logs nothing and waits for nobody longer than REQUEST_S."""

    timeout = REQUEST_S
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        """Requests are not news."""


def serve(folders: Sequence[Path], host: str, port: int) -> BaseWSGIServer:
    """A server that listens; call its `serve_forever`. Port 0: any free one (`server.port`).

    Raises ConfigError for a folder that holds no run, and for an address that cannot be had.
    """
    runs = [RunReader(folder) for folder in folders]
    application = Dashboard(runs, names_of(host))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        hint = "choose another --port or --host"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", hint) from error
    with listening:  # the server makes a handle of its own
        return make_server(host, port, application, True, request_handler=Handler, fd=listening.fileno())


def names_of(host: str) -> set[str]:
    """Names by which a server on `host` may be asked: that one and this machine's own. An unasked-for search in the
    DNS could take long."""
    own = socket.gethostname()
    return {name.lower() for name in (host, "localhost", own, own.partition(".")[0]) if name}


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is given as, in brackets or without; None for a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback
