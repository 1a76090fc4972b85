"""The dashboard in a real browser: a run that has ended, one that is killed while it is watched, and hostile text."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from docklands.dashboard.server import serve
from docklands.obs.rundir import RunDir
from tests.browser import Browser, chromium
from tests.dashboard_run import EVIL, build
from tests.e2e.runs import run_here, start, train_arguments

VIEWS = ("overview", "dataflow", "timeline", "samples", "memory", "compare", "details")
EVALUATE = ("eval.prompts=4", "eval.before=true", "eval.after=true")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no chromium here; `make test` installs Debian's where it may")
    with Browser(program, tmp_path_factory.mktemp("browser") / "profile") as found:
        found.size(1280, 900)
        yield found


@pytest.fixture
def browser(started: Browser) -> Browser:
    """Nothing open, no complaint."""
    started.goto("about:blank")
    started.problems.clear()
    return started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Three steps with the trainer's log-probs, and evaluations around them."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return run_here("mix6_grpo_tis.yaml", folder, "run.steps=3", "obs.tokens_per_sample=5", *EVALUATE)


@contextmanager
def served(*folders: Path, port: int = 0) -> Iterator[str]:
    """The address of a dashboard of these runs."""
    server = serve(folders, "127.0.0.1", port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        server.shutdown()
        thread.join(10)


def show(browser: Browser, address: str, view: str, run: int = 0) -> None:
    """Open a view and wait until it is there."""
    browser.goto(f"{address}#/{view}/{run}")
    browser.until(f"document.getElementById('view')?.dataset.ready === '{view}'")


def test_every_view_tells_of_the_run(browser: Browser, whole: RunDir, tmp_path: Path) -> None:
    other = Path(shutil.copytree(whole.path, tmp_path / "other"))
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("name: whole", "name: other").replace("steps: 3", "steps: 9", 1))
    with served(whole.path, other) as address:
        said = {}
        for view in VIEWS:
            show(browser, address, view)
            said[view] = browser.text()
    assert "done after step 3" in said["overview"] and "3 of 3" in said["overview"]
    for title in ("Reward", "Held-out score", "Entropy", "Gradient norm", "global gradient norm before clipping"):
        assert title in said["overview"], title
    for part in ("rollout_logprobs", "groups in flight", "new weights", "old_logprobs", "in the warehouses"):
        assert part in said["dataflow"], part
    assert "Who waits for whom" in said["timeline"] and "publish" in said["timeline"]
    assert "mean reward" in said["samples"] and "version 2" in said["samples"]
    assert "memory/rss_mib" in said["memory"] and "resident memory of the process" in said["memory"]
    assert "run.steps\t3\t9" in said["compare"]
    assert "algorithm.name" in said["details"] and "driver.0.log" in said["details"]
    assert browser.problems == []


def test_the_timeline_zooms_and_samples_show_their_tokens(browser: Browser, whole: RunDir) -> None:
    with served(whole.path) as address:
        show(browser, address, "timeline")
        browser.value("document.querySelector('canvas').focus()")
        for key in ("+", "+", "ArrowLeft"):
            browser.press(key)
        assert browser.value("document.querySelector('input[type=checkbox]').checked") is False, "it no longer follows"
        browser.move(*browser.middle("canvas"))
        show(browser, address, "samples")
        assert browser.value("document.querySelectorAll('.group').length") == 4
        browser.click("input[value=difference] + span")
        browser.until("document.querySelectorAll('.token').length > 0")
        assert browser.value("document.querySelectorAll('.sample')[0].querySelectorAll('.token').length") == 5
        browser.move(*browser.middle(".token"))
        told = browser.until("!document.getElementById('tip').hidden && document.getElementById('tip').innerText")
        assert "log p of the trainer" in told and "difference" in told and "weights of version 2" in told
        browser.click("button[aria-label='First step']")
        browser.until("document.querySelector('input[type=number]').value === '1'")
        browser.press("j")
        browser.until("document.querySelector('input[type=number]').value === '2'")
    assert browser.problems == []


def test_any_metric_is_chosen_with_the_keyboard(browser: Browser, whole: RunDir) -> None:
    """Tab and Enter reach everything; a chart's values are read with the arrow keys."""
    with served(whole.path) as address:
        show(browser, address, "overview")
        seen = []
        for _ in range(9):
            browser.press("Tab")
            seen.append(browser.value("document.activeElement.textContent || document.activeElement.id"))
        assert seen[0] == "Skip to the content" and "Overview" in seen and "Timeline" in seen
        before = browser.value("document.querySelectorAll('.chart').length")
        browser.value("document.querySelector('.metrics summary').focus()")
        browser.press("Enter")
        browser.press("Tab")
        for letter in "lr":
            browser.press(letter)
        browser.until("document.querySelector('tr:not([hidden]) input[aria-label=\"Show actor/lr\"]') !== null")
        browser.value("document.querySelector('input[aria-label=\"Show actor/lr\"]').focus()")
        browser.press(" ")
        browser.until(f"document.querySelectorAll('.chart').length === {before + 1}")
        assert "learning rate of the last update" in browser.text()
        browser.value("document.querySelector('[data-metric=Reward] .plot').focus()")
        browser.press("ArrowRight")
        assert browser.until("document.getElementById('tip').innerText").startswith("step 1: ")
        browser.scheme("dark")
        dark = browser.value("getComputedStyle(document.body).backgroundColor")
        browser.click("#theme")
        assert browser.value("getComputedStyle(document.body).backgroundColor") != dark
        browser.scheme("light")
        browser.value("localStorage.clear()")
    assert browser.problems == []


def test_text_of_a_run_never_becomes_markup(browser: Browser, tmp_path: Path) -> None:
    run = build(tmp_path / "evil")
    evil = EVIL.replace("alert(1)", "window.pwned=1")
    for path in (run.config, run.graph, run.metrics, run.spans, run.flow, run.env):
        text = path.read_text()
        for word in ("small", "rollout", "actor/entropy", "python", "group"):
            text = text.replace(word, evil)
        path.write_text(text)
    tokens = {"text": [evil, "</span><script>window.pwned=1</script>"], "mask": "11", "versions": [[1, 2]]}
    row = {"group_id": 1, "prompt": evil, "completion": evil, "finish": evil, "reward": 1.0, "tokens": tokens}
    run.write_samples(4, [row])
    (run.log / f"{'x' * 9}.log").write_text(evil)
    with served(run.path) as address:
        for view in VIEWS:
            show(browser, address, view)
            assert "window.pwned=1" in browser.value("document.body.textContent"), view
            if view == "samples":
                browser.click("input[value=version] + span")
            assert browser.value("[window.pwned ?? null, document.images.length, document.scripts.length]") == [
                None,
                0,
                1,
            ]
    assert browser.problems == []


def test_a_run_is_watched_until_it_is_killed(browser: Browser, tmp_path: Path) -> None:
    """The page follows without being loaded anew; a torn last line and a killed run are shown as they are."""
    folder = tmp_path / "live"
    process = start(*train_arguments("mix6_grpo.yaml", folder, ("run.steps=5000",)))
    try:
        end = time.monotonic() + 180
        while not (folder / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        with served(folder) as address:
            show(browser, address, "overview")
            assert "running" in browser.value("document.getElementById('badge').textContent")
            step = "Number(document.querySelector('.figure .value').textContent.split(' of ')[0].replace(',', ''))"
            first = browser.value(step)
            browser.until(f"{step} > {first} + 1")
            process.kill()
            process.wait(60)
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"metrics": {"actor/entr')
            for path in folder.iterdir():
                os.utime(path, (1, 1))
            browser.until("document.getElementById('badge').textContent.startsWith('stopped after step')")
            for view in VIEWS:
                show(browser, address, view)
        assert "No counts" not in browser.text()
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert browser.problems == []


def test_the_page_says_when_its_server_has_gone_and_goes_on_when_it_is_back(browser: Browser, whole: RunDir) -> None:
    with served(whole.path) as address:
        show(browser, address, "overview")
    browser.until("!document.getElementById('notice').hidden")
    assert "does not answer" in browser.text()
    with served(whole.path, port=int(address.rstrip("/").rpartition(":")[2])):
        browser.until("document.getElementById('notice').hidden")


def test_the_command_prints_its_address_and_ends_with_ctrl_c(whole: RunDir) -> None:
    process = start("dash", str(whole.path))
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"<title>Docklands</title>" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate(timeout=60)
