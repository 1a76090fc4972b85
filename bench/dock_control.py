"""The dock's control plane alone, without bytes: takes, notices and acknowledgements of many readers on one process.

    python bench/dock_control.py [--quick] [--rows N] [--readers N] [--seconds S]

A flow of 8 stages with all of its groups in flight, and simulated readers that hold leases all the time: in random
order they acknowledge what they hold (their columns' notices first) and take the next rows. Trained groups are retired,
and new ones enter. Figures: latency of `take` and of a whole turn in milliseconds, resident bytes of a row and stage,
turns a second.
One thread, no socket: what a control process can serve at most. JSON lines on the standard output.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

GROUP, STEP = 8, 64


def graph() -> Any:
    """Rollout, then five stages on what it writes, an advantage per group, the update: 8 stages in all."""
    from docklands.core.fields import ADMITTED, PROMPT_TOKENS, TOKEN_IDS, Field
    from docklands.core.graph import Graph
    from docklands.core.stage import Learner, Stage

    def nothing(*_: Any) -> None:
        """The control plane calls no stage."""

    def stage(name: str, reads: tuple, writes: tuple, by: Any) -> Stage:
        return Stage(name, name, reads, writes, nothing, by)

    made = [Field(f"made_{i}", "float32", ("T",)) for i in range(5)]
    last = Field("advantage", "float32")
    middle = [stage(f"stage_{i}", (TOKEN_IDS,), (made[i],), "sample" if i % 2 else "group") for i in range(5)]
    stages = (
        stage("rollout", (PROMPT_TOKENS,), (TOKEN_IDS,), "group"),
        *middle,
        stage("advantage", (made[0], made[1]), (last,), "group"),
        stage("update", (TOKEN_IDS, *made[2:], last), (), "step"),
    )
    learner = Learner("actor", "actor", stages[-1].reads, nothing)  # type: ignore[arg-type]
    return Graph(stages, (learner,), ADMITTED)


class Flow:
    """A control and its simulated readers."""

    def __init__(self, rows: int, readers: int, deterministic: bool) -> None:
        from docklands.dock.rules.control import Control
        from docklands.dock.rules.options import DockOptions

        self.groups, self.next_group, self.now = rows // GROUP, 0, 0.0
        options = DockOptions(
            prompts_per_step=STEP,
            group_size=GROUP,
            max_staleness=self.groups // STEP - 1,
            groups_per_take=8,
            deterministic=deterministic,
            lease_s=1e9,
        )
        gc.collect()
        before = psutil.Process().memory_info().rss
        self.control = Control(graph(), options)
        self.stages = list(self.control.flow.stages)
        self.rng = np.random.default_rng(0)
        self.pick = random.Random(0)
        while self.control.has_slot:
            self.admit()
        gc.collect()
        self.nbytes = psutil.Process().memory_info().rss - before
        self.held: list[Any] = []
        self.readers = readers
        self.takes: list[float] = []
        self.turns: list[float] = []

    def admit(self) -> None:
        """The next group, with its source columns."""
        rows = np.arange(self.next_group * GROUP, self.next_group * GROUP + GROUP)
        self.control.admit(rows, self.next_group)
        self.ready(rows, self.control.flow.sources, np.zeros(GROUP, np.int64))
        self.next_group += 1

    def ready(self, rows: np.ndarray, columns: tuple[str, ...], lengths: np.ndarray) -> None:
        """Notices as a warehouse would send them: one per stage that is told."""
        from docklands.dock.rules.messages import Notice

        told = self.control.flow.told
        for stage in dict.fromkeys(stage for column in columns for stage in told[column]):
            names = tuple(column for column in columns if stage in told[column])
            self.control.notice([Notice(stage, rows, names, lengths)])

    def take(self) -> bool:
        """A reader asks the stages in random order until one has work; every asking is measured."""
        for stage in self.pick.sample(self.stages, len(self.stages)):
            want = self.control.want(stage, None, None)
            began = time.perf_counter()
            rows = self.control.look_take(stage, want, self.now)
            self.takes.append(time.perf_counter() - began)
            if rows is not None:
                self.held.append(rows)
                return True
        return False

    def acknowledge(self, rows: Any) -> None:
        """Columns become ready, the rows are done; a trained step is retired and new groups enter."""
        if rows.stage == "update":
            self.control.retire(rows)
        else:
            lengths = rows.lengths if rows.lengths.any() else self.rng.integers(64, 2048, len(rows))
            self.ready(rows.row_ids, self.control.flow.writes[rows.stage], lengths)
            self.control.finish(rows, {})
        self.control.settle()
        self.control.woken()
        while self.control.has_slot:
            self.admit()

    def run(self, seconds: float) -> None:
        """Turns of random readers for so long."""
        while len(self.held) < self.readers and self.take():
            pass
        self.takes.clear()
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            self.now += 1.0
            at = self.pick.randrange(len(self.held))
            self.held[at], self.held[-1] = self.held[-1], self.held[at]
            self.acknowledge(self.held.pop())
            while len(self.held) < self.readers and self.take():
                pass
            self.turns.append(time.perf_counter() - began)


def figures(flow: Flow, mode: str) -> dict[str, Any]:
    """One JSON line."""
    takes, turns = np.array(flow.takes) * 1e3, np.array(flow.turns) * 1e3
    return {
        "bench": f"dock_control/{mode}",
        "rows": flow.groups * GROUP,
        "stages": len(flow.stages),
        "readers": flow.readers,
        "held": len(flow.held),
        "takes": len(takes),
        "take_ms": {f"p{p}": round(float(np.percentile(takes, p)), 4) for p in (50, 99, 100)},
        "turn_ms": {f"p{p}": round(float(np.percentile(turns, p)), 4) for p in (50, 99, 100)},
        "turns_per_s": round(len(turns) / max(1e-9, float(turns.sum()) / 1e3)),
        "bytes_per_row_and_stage": round(flow.nbytes / (flow.groups * GROUP * len(flow.stages)), 1),
        "retired_groups": flow.control.ledger.retired,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,480 rows, 64 readers, 1 second")
    parser.add_argument("--rows", type=int, default=1_048_576)
    parser.add_argument("--readers", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each mode")
    given = parser.parse_args()
    rows, readers, seconds = (20_480, 64, 1.0) if given.quick else (given.rows, given.readers, given.seconds)
    if rows < GROUP * STEP or readers < 1 or seconds <= 0:
        parser.error(f"at least {GROUP * STEP} rows, 1 reader and a time above 0 are needed")
    for mode in ("eager", "exact"):
        flow = Flow(rows // (GROUP * STEP) * GROUP * STEP, readers, mode == "exact")
        flow.run(seconds)
        print(json.dumps(figures(flow, mode)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
