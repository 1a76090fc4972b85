"""A run over two Ray nodes: network namespaces with addresses, shared memory and Ray folders of their own; one dies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from docklands.obs.rundir import RunDir
from tests.dock_processes import Nodes, NoNodes
from tests.e2e.runs import ROOT, command, environment, run_here, train_arguments
from tests.e2e.test_dock_in_processes import lines, same_run, until
from tests.e2e.test_fleet_runs import RECIPE, SPREAD, forked

__all__ = ["forked"]
FOLDER, PORT = "/tmp/dkray", 26379
RAY = str(Path(sys.executable).parent / "ray")
OWN = f"mount -t tmpfs none /dev/shm && mkdir -p {FOLDER} && mount -t tmpfs none {FOLDER} && exec "


class Machines:
    """Ray nodes of one processor each: node 0 is the head, where the driver runs too."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.address = f"{nodes.address(0)}:{PORT}"
        self.processes: dict[int, Any] = {}

    def start(self, node: int) -> None:
        """`ray start` there."""
        mine = f"--node-ip-address={self.nodes.address(node)}"
        head = f"--head --port={PORT} --temp-dir={FOLDER} --include-dashboard=false"
        where = head if node == 0 else f"--address={self.address}"
        words = f"{RAY} start {where} {mine} --num-cpus=1 --block"
        inside = ["nsenter", f"--net={self.nodes.path(node)}", "unshare", "--mount", "sh", "-c", OWN + words]
        self.processes[node] = subprocess.Popen(
            inside, env=quiet(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def on_head(self, words: Sequence[str]) -> Any:
        """A command on node 0."""
        inside = ["nsenter", f"--target={self.processes[0].pid}", "--mount", "--net", f"--wd={ROOT}", *words]
        return subprocess.Popen(inside, env=quiet(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def stands(self, count: int) -> bool:
        """Whether Ray counts so many nodes."""
        code = "import ray, sys; ray.init(address=sys.argv[1]); print(sum(node['Alive'] for node in ray.nodes()))"
        asked = self.on_head([sys.executable, "-c", code, self.address])
        said = asked.communicate(timeout=120)[0]
        return asked.returncode == 0 and int(said.split()[-1]) == count

    def kill(self, node: int) -> None:
        """The power fails."""
        process = self.processes[node]
        if process.poll() is None:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait(20)


def quiet() -> dict[str, str]:
    return {**environment(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


@pytest.fixture
def machines() -> Iterator[Machines]:
    try:
        with Nodes(2) as nodes:
            made = Machines(nodes)
            try:
                for node in (0, 1):
                    made.start(node)
                    until(f"{node + 1} Ray nodes", partial(made.stands, node + 1))
                yield made
            finally:
                for node in list(made.processes):
                    made.kill(node)
    except NoNodes as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.timeout(400)
def test_a_run_over_two_nodes_of_which_one_dies_and_comes_back(machines: Machines, tmp_path: Path) -> None:
    """And the next step on one node, without Ray."""
    alone = run_here(RECIPE, tmp_path / "alone", "run.steps=13", *SPREAD)
    run = RunDir(tmp_path / "spread")
    fleet = ("fleet.backend=ray", f"fleet.ray_address={machines.address}", "checkpoint.every_steps=1", "run.steps=12")
    process = machines.on_head(command(*train_arguments(RECIPE, run.path, [*SPREAD, *fleet])))
    try:
        until("two steps", lambda: lines(run) >= 2 or process.poll() is not None)
        machines.kill(1)
        machines.start(1)
        said = process.communicate(timeout=200)[0]
    finally:
        process.kill()
    assert process.returncode == 0, said
    log = (run.log / "driver.0.log").read_text()
    placed = [line for line in log.splitlines() if "workers by rank" in line]
    assert len(placed) == 2 and "started again from the last checkpoint" in log
    for line in placed:
        assert all(f"on {machines.nodes.address(node)}" in line for node in (0, 1))
    stood = [line for line in log.splitlines() if "warehouses stand at" in line]
    assert len(stood) == 2
    for line in stood:
        assert all(f"{place} {machines.nodes.address(place)}:" in line for place in (0, 1))
    assert [row["dock/generated_near"] >= 0.9 for _, row in run.read_metrics()] == [True] * 12
    run_here(RECIPE, run.path, "run.steps=13", *SPREAD, resume=True)
    same_run(alone, run)
