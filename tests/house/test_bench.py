"""The benchmark scripts answer --help and refuse bad input in a line; docs/benchmarks.md has the agreed form."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from house import ROOT

SCRIPTS = sorted((ROOT / "bench").glob("*.py"))
KEYS = ["bench", "metric", "ours", "peer", "ratio", "n", "spread"]
sys.path.insert(0, str(ROOT / "bench"))

import vs_trl  # noqa: E402
from vs_trl_parts.cases import CASES, prepare, ragged_lengths, read_spec  # noqa: E402
from vs_trl_parts.rewards import digit_share, first_number_right  # noqa: E402
from vs_trl_parts.turns import Side  # noqa: E402


def run_script(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "DOCKLANDS_PEER_PYTHON"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script: Path) -> None:
    found = run_script(script, "--help")
    assert found.returncode == 0, found.stderr
    assert "--quick" in found.stdout


def committed() -> list[dict[str, Any]]:
    """The JSON lines in docs/benchmarks.md."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_committed_results_have_the_agreed_form() -> None:
    found = committed()
    assert {line["bench"] for line in found} >= {"vs_trl/quickstart", "vs_trl/ragged"}
    for line in found:
        assert list(line) == KEYS
        assert line["n"] >= 1
        low, high = line["spread"]
        assert low <= high
        numbers = [line["ours"], line["peer"], line["ratio"], low, high]
        assert all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)


def test_committed_ratios_follow_from_their_figures() -> None:
    for line in committed():
        rate = line["metric"].endswith("_per_s") or line["metric"].startswith("reward_")
        expected = line["ours"] / line["peer"] if rate else line["peer"] / line["ours"]
        assert line["ratio"] == pytest.approx(expected, rel=0.01), line


def test_a_rate_and_a_time_give_the_same_ratio() -> None:
    ours, peer = [1.0, 2.0, 3.0], [8.0, 6.0, 9.0]
    case = CASES["quickstart"]
    rate = vs_trl.compared(case, "samples_per_s", ours, peer, samples=64)
    time = vs_trl.compared(case, "step_s", ours, peer)
    assert (rate["ours"], rate["peer"]) == (32.0, 8.0)
    assert (time["ours"], time["peer"]) == (2.0, 8.0)
    assert rate["ratio"] == time["ratio"] == 4.0
    assert rate["spread"] == time["spread"] == statistics.quantiles([8.0, 3.0, 3.0], n=4)[::2]


def test_ragged_lengths_are_what_the_case_says() -> None:
    lengths = ragged_lengths(20_000, 256, seed=1)
    assert lengths.min() >= 2 and lengths.max() == 256
    assert 45 < lengths.mean() < 50
    assert (lengths == ragged_lengths(20_000, 256, seed=1)).all()


def test_both_sides_read_the_same_case(tmp_path: Path) -> None:
    spec = prepare(CASES["ragged"], tmp_path, steps=2, threads=1, seed=3)
    case, found = read_spec(str(spec.write(tmp_path / "spec.json")))
    assert case == CASES["ragged"] and case.samples == 128
    assert (found.model, found.prompts, found.lengths, found.steps) == (spec.model, spec.prompts, spec.lengths, 2)
    rows = [json.loads(line) for line in Path(spec.prompts).read_text().splitlines()]
    assert len(rows) == 32 and {len(row["prompt"]) for row in rows} == {7}
    assert len(json.loads(Path(spec.lengths).read_text())) == 256


def test_rewards_take_text_and_chat() -> None:
    chat = [[{"role": "assistant", "content": "It is 82."}]]
    assert first_number_right(["?"] * 3, ["47 or 82", "82", ""], answer=["82"] * 3) == [0.0, 1.0, 0.0]
    assert first_number_right(["?"], chat, answer=["82"]) == [1.0]
    assert digit_share(["?"] * 3, ["1a2b", "12", ""]) == [0.5, 1.0, 0.0]


def test_a_side_that_dies_ends_the_bench_with_its_log(tmp_path: Path) -> None:
    code = "print('no such model'); raise SystemExit(3)"
    side = Side("peer", [sys.executable, "-c", code], tmp_path / "peer.log", os.environ)
    try:
        with pytest.raises(SystemExit, match=r"peer side ended early[\s\S]*no such model"):
            side.ready(30.0)
    finally:
        side.stop()


def test_a_side_that_hangs_ends_the_bench_in_time(tmp_path: Path) -> None:
    side = Side("ours", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "ours.log", os.environ)
    try:
        with pytest.raises(SystemExit, match="ours side did not answer within 0.5 s"):
            side.ready(0.5)
    finally:
        side.stop()


def test_without_the_peer_it_says_how_to_get_it() -> None:
    found = run_script(ROOT / "bench" / "vs_trl.py", "--peer-python", "/no/such/python")
    assert found.returncode == 1
    assert "cannot start /no/such/python" in found.stderr and "Traceback" not in found.stderr
