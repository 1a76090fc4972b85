"""The dashboard's view of a run and its HTTP interface: hostile files, hostile requests, refused starts."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import socket
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from tests.dashboard_run import EVIL, build
from werkzeug.test import Client

from docklands.cli.main import run as cli
from docklands.dashboard import server
from docklands.dashboard.runs import RunReader, parsed_yaml
from docklands.dashboard.server import Dashboard, names_of, serve
from docklands.errors import ConfigError
from docklands.obs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return build(tmp_path / "run")


def reader(run: RunDir) -> RunReader:
    """A reader that looks at the files whenever it is asked."""
    return RunReader(run.path, again_s=0.0)


# --- a run as a whole ----------------------------------------------------------------------------------------------


def test_how_a_run_stands(run: RunDir, tmp_path: Path) -> None:
    watched = reader(run)
    state = watched.state()
    assert (state["name"], state["state"], state["step"], state["steps"]) == ("small", "stopped", 4, 10)
    assert state["not_finite"] == {"actor/entropy": {"times": 1, "step": 2}}
    with open(run.lock, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        locks = Path("/proc/locks")
        seen = locks.is_file() and str(os.fstat(held.fileno()).st_ino) in locks.read_text()
        assert watched.state()["state"] == ("running" if seen else "stopped")
    run.metrics.touch()
    assert watched.state()["state"] == "running", "a line that is seconds old"
    assert RunReader(build(tmp_path / "whole", 10).path).state()["state"] == "done"


def test_a_poll_of_many_runs_reads_what_it_has_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [RunReader(build(tmp_path / f"run{i}").path, again_s=0.0) for i in range(3)]
    client = Client(Dashboard(runs, {"localhost"}))
    monkeypatch.setattr(server, "POLL_S", 0.0)
    assert [(r["step"], r["unread_bytes"] > 0) for r in client.get("/api/state").json["runs"]] == [(0, True)] * 3
    monkeypatch.setattr(server, "POLL_S", 60.0)
    assert [(r["step"], r["unread_bytes"]) for r in client.get("/api/state").json["runs"]] == [(4, 0)] * 3


def test_a_reader_never_takes_the_lock(run: RunDir) -> None:
    """Else the dashboard could keep a run from going on."""
    watched = reader(run)
    for view in (watched.state, watched.graph, watched.memory, watched.config, watched.logs):
        view()
    RunDir.resume(run.path).release()


def test_a_run_that_crashed_before_anything_opens(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {steps: 3")
    watched = RunReader(tmp_path)
    assert watched.state()["step"] == 0 and watched.graph() == {"stages": [], "flow": []}
    assert watched.timeline(None, None, None)["spans"] == [] and watched.samples(None) == {"step": None}
    assert watched.memory() == {"tiers": [], "moves": []} and watched.logs() == {}
    assert watched.config()["config"] == {}
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none", tmp_path / "config.yaml"):
        with pytest.raises(ConfigError):
            RunReader(path)


def test_a_configuration_cannot_grow_without_bound() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in zip("abcdefghijklmnop", "bcdefghijklmnopq")
    )
    assert parsed_yaml(bomb) == {}
    assert parsed_yaml("a: {b: 1, c: [1, 2]}\nd: null") == {"a.b": 1, "a.c": "[1, 2]", "d": None}
    assert parsed_yaml("[" * 5000) == parsed_yaml("- 1") == parsed_yaml("\x00") == {}


STAGE = {"name": "a", "role": "r", "by": "group", "reads": [], "writes": ["x"]}


@pytest.mark.parametrize(
    "stages",
    [None, {}, [1], [{"name": "a"}], [{**STAGE, "reads": 3}], [STAGE, STAGE], [{**STAGE, "name": "prompts"}]],
)
def test_a_graph_that_is_none_counts_as_missing(stages: object, run: RunDir) -> None:
    run.graph.write_text(json.dumps({"stages": stages}))
    assert reader(run).graph()["stages"] == []
    run.graph.write_text(json.dumps({"stages": [STAGE, {**STAGE, "name": "b", "reads": ["x", "y"], "writes": ["y"]}]}))
    assert set(reader(run).graph()["boxes"]) == {"prompts", "a", "b"}


def test_every_file_may_be_garbage(run: RunDir) -> None:
    rng = random.Random(3)
    client = Client(Dashboard([reader(run)], {"localhost"}))
    names = (run.metrics, run.spans, run.flow, run.evals, run.graph, run.env, run.config, run.sample_file(4))
    junk = [
        b"\xff\xfe\x00",
        b"{}\n" * 9,
        b'{"step": 1, "metrics": {"a": {}}, "stages": {"a": 1}, "time": NaN}\n',
        b"[" * 9999,
    ]
    for path in names:
        whole = path.read_bytes() if path.exists() else b""
        for bad in (*junk, bytes(rng.randrange(256) for _ in range(500)), whole[: len(whole) // 2]):
            path.write_bytes(bad)
            for view in VIEWS:
                assert client.get(f"/api/runs/0/{view}").status_code == 200, (path.name, view, bad[:20])
            assert client.get("/api/state").status_code == 200
        path.write_bytes(whole)


# --- over HTTP -----------------------------------------------------------------------------------------------------

POLICY = "Content-Security-Policy"
VIEWS = ("metrics", "series?name=a", "graph", "timeline", "samples", "memory", "config", "logs")


@pytest.fixture
def client(run: RunDir) -> Client:
    return Client(Dashboard([reader(run)], {"127.0.0.1", "localhost"}))


def test_the_views_of_a_run(client: Client) -> None:
    state = client.get("/api/state").json
    assert [r["name"] for r in state["runs"]] == ["small"] and state["curves"][0][1] == "Reward"
    metrics = client.get("/api/runs/0/metrics").json
    assert metrics["critic/rewards/mean"]["value"] == 0.4 and metrics["timing_s/step"]["unit"] == "s"
    assert metrics["val-core/held/mean@1"]["section"] == "Evaluation"
    graph = client.get("/api/runs/0/graph").json
    assert graph["flow"][-1]["stages"]["rollout"]["leased"] == 4 and set(graph["boxes"]) == {
        "prompts",
        "rollout",
        "reward",
        "update",
    }
    line = client.get("/api/runs/0/timeline?step=3").json
    assert (line["start"], line["end"]) == (1006.0, 1008.0)
    assert [s["name"] for s in line["spans"] if s["step"] == 2] == ["step"]
    assert client.get("/api/runs/0/timeline?from=1004.5&to=1004.6").json["spans"][0]["step"] == 1
    assert client.get("/api/runs/0/samples?step=2").json["groups"][0]["rows"][0]["completion"] == EVIL
    assert client.get("/api/runs/0/config").json["config"]["run.steps"] == 10
    assert "text/html" in client.get("/").content_type and client.head("/").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/%2e%2e/server.py",
        "/static/....//x", "/static/",
        "/static//etc/passwd", "/etc/passwd", "//etc/passwd", "/static/index.html%00.js", "/api/runs/0/../../etc",
        "/api/runs/1/graph", "/api/runs/-1/graph", "/api/runs/0/__class__", "/api/runs/0/_refresh",
        "/api/runs/999999999999/graph",
        "/api/runs/..%2f..%2fetc/graph", "/api/runs/0/logs/driver.0.log",
    ],
)  # fmt: skip
def test_no_path_leads_out(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "root:" not in answer.text and "def " not in answer.text


@pytest.mark.parametrize(
    "query",
    [
        "timeline?step=x", "timeline?step=1e9", "timeline?step=" + "9" * 400, "timeline?from=1", "timeline?from=2&to=1",
        "timeline?from=nan&to=inf", "timeline?from=0&to=1e99", "samples?step=../1", "series?name=a&after=1&after=2",
        "series?" + "name=a&" * 101, "series?name=a&epoch=x", "samples?step=٣",
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(client: Client, query: str) -> None:
    answer = client.get(f"/api/runs/0/{query}")
    assert answer.status_code == 400 and answer.json["error"]


def test_nothing_can_be_written_and_nothing_else_loaded(client: Client, run: RunDir) -> None:
    before = sorted((str(p), p.stat().st_mtime_ns) for p in run.path.rglob("*"))
    for method in ("post", "put", "delete", "patch", "options"):
        for path in ("/", "/api/state", "/api/runs/0/config", "/static/app.js"):
            assert getattr(client, method)(path).status_code == 405
    for path in ("/", "/static/app.js", "/api/state", "/nowhere"):
        headers = client.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert (
            "default-src 'none'" in headers["Content-Security-Policy"]
            and "unsafe" not in headers["Content-Security-Policy"]
        )
    assert client.get("/api/runs/0/samples").content_type == "application/json"
    assert sorted((str(p), p.stat().st_mtime_ns) for p in run.path.rglob("*")) == before


def test_another_name_than_the_servers_is_refused(client: Client) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.", "[::1"):
        assert client.get("/api/state", headers={"Host": host}).status_code in (400, 403), host
    for host in ("127.0.0.1:1234", "LOCALHOST", "localhost:80"):
        assert client.get("/api/state", headers={"Host": host}).status_code == 200, host


def test_listening_everywhere_is_no_leave_for_every_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page elsewhere can make a name of its own lead here, but not an address, nor this machine's own name."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan")
    everywhere = Client(Dashboard([reader(run)], names_of("0.0.0.0")))
    for host in ("evil.example", "evil.example:80", "10.0.0.1.evil.example", "0x7f.1", "", "[evil.example]", "[::1"):
        assert everywhere.get("/api/state", headers={"Host": host}).status_code in (400, 403), host
    for host in ("10.0.0.1:80", "[fd00::1]:80", "[::1]", "localhost:1", "box.lan:80", "BOX"):
        assert everywhere.get("/api/state", headers={"Host": host}).status_code == 200, host
    assert "trainer.lan" in names_of("Trainer.lan") and "" not in names_of("")


def test_an_answer_that_cannot_be_made_has_the_headers_too(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunReader, "logs", lambda self: float("nan"))
    answer = client.get("/api/runs/0/logs")
    assert answer.status_code == 500 and answer.json["error"] and "default-src 'none'" in answer.headers[POLICY]


def test_the_page_never_makes_markup_of_text_and_fetches_nothing_from_elsewhere() -> None:
    folder = resources.files("docklands.dashboard") / "static"
    texts = {item.name: item.read_text() for item in folder.iterdir() if item.is_file()}
    assert {"index.html", "app.js", "style.css"} <= set(texts)
    for name, text in texts.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|DOMParser|srcdoc", text
        ), name
        outside = re.findall(r"https?://[^\"' )]+", text)
        assert set(outside) <= {"http://www.w3.org/2000/svg"}, (name, outside)


# --- starting ------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_server_that_cannot_start_says_why(run: RunDir, taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["dash", str(run.path / "none")]) == 2
    assert cli(["dash", str(run.path), "--port", str(taken)]) == 2
    assert cli(["dash", str(run.path), "--host", "203.0.113.7"]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == said.count("hint:") == 3 and f"127.0.0.1:{taken}" in said and "Traceback" not in said


def test_the_server_listens_on_this_machine_only(run: RunDir) -> None:
    listening = serve([run.path], "127.0.0.1", 0)
    try:
        assert listening.socket.getsockname() == ("127.0.0.1", listening.port) and listening.port > 0
    finally:
        listening.server_close()
