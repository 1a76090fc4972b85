"""kill -9 of one process of a fleet at a random moment, whatever it is, and what became of the run.

    python -m tests.fleet_chaos --runs 20 --seed 0 [--backend ray]

The fleet: two trainers, two generators, two warehouses, a control process, a reward process, a driver; or, in a third
of the runs, four workers that take turns. Run i kills a process of kind i mod 6; when, who of several, how long samples
may wait (`dock.max_staleness`) and what becomes of a dead warehouse's rows (`dock.durability`) are drawn from the seed.
A driver that was killed is started again, with --resume; all else has to come back by itself. Then:

- the run ends well, within a deadline (no hang);
- no sample is trained twice and none is left out;
- at staleness 0, which promises it, samples and final weights are those of an undisturbed run, to the bit;
- no process, socket or shared memory is left.

One JSON line a run; exit code 1 when one is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from docklands.obs.rundir import RunDir
from docklands.train import checkpoint, sharded_checkpoint
from tests.fleet_outside import PLAIN, QUICK, Fleet, until

VICTIMS = ("rollout", "trainer", "warehouse", "control", "reward", "driver")
STEPS, PROMPTS, SAMPLES = 6, 4, 8
ISOLATED = 'reward.functions=[{"name": "sorted_digits", "isolate": true}]'
COMMON = (
    f"run.steps={STEPS}",
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.samples_per_prompt={SAMPLES}",
    f"obs.samples_per_step={PROMPTS * SAMPLES}",
    "checkpoint.every_steps=2",
    "dock.warehouses=2",
    ISOLATED,
)
MODES = {
    "apart": ("mix6_grpo.yaml", ("layout.dp=2", "fleet.placement=disaggregated", "rollout.layout.dp=2")),
    "in turns": ("tiny_moe_reshard.yaml", ()),
}
"""Placement -> recipe and overrides."""
RUN_S = 240.0
FIRST_S, STEP_S = 2.0, 0.6
"""About how long the first step, and another one, takes after a process has been seen: so late the blow may come."""


TRIES, MISSED = 4, "the run was over before the blow"


@dataclass(frozen=True)
class Blow:
    """What is drawn. after: steps that are done before; delay: seconds later; which: of several, in [0, 1)."""

    victim: str
    mode: str
    staleness: int
    durability: str
    after: int
    delay: float
    which: float

    @classmethod
    def drawn(cls, number: int, seed: int) -> Blow:
        chance = random.Random(f"{seed} {number}")
        victim = VICTIMS[number % len(VICTIMS)]
        mode = "in turns" if number % 4 == 1 or chance.random() < 0.2 else "apart"
        if victim == "rollout":
            mode = "apart"
        after = chance.randrange(STEPS)
        return cls(
            victim,
            mode,
            staleness=int(chance.random() < 0.25),
            durability=chance.choice(("none", "wal", "replica")),
            after=after,
            delay=chance.uniform(0.0, STEP_S if after else FIRST_S),
            which=chance.random(),
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        more = (f"dock.max_staleness={self.staleness}", f"dock.durability={self.durability}")
        return (*COMMON, *MODES[self.mode][1], *more)


@dataclass
class Outcome:
    """What became of a run. wrong: what is not as promised."""

    struck: str = ""
    seconds: float = 0.0
    again: int = 0
    wrong: list[str] = field(default_factory=list)


def samples(run: RunDir) -> list[list[tuple[Any, ...]]]:
    """What each step trained, in order."""
    steps = [run.read_samples(step) for step in range(1, STEPS + 1)]
    return [[(row["prompt_id"], row["completion"], row["reward"]) for row in rows] for rows in steps]


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run.checkpoints)
    return {} if path is None else dict(sharded_checkpoint.weights(path))


def same(left: RunDir, right: RunDir) -> list[str]:
    """In what two runs differ."""
    ours, theirs = weights(left), weights(right)
    wrong = [] if samples(left) == samples(right) else ["samples differ from the undisturbed run's"]
    if not ours or ours.keys() != theirs.keys() or any(not torch.equal(ours[name], theirs[name]) for name in ours):
        wrong.append("weights differ from the undisturbed run's")
    return wrong


def trained_once(run: RunDir) -> list[str]:
    """Each step is whole, and no prompt is in more than its group."""
    found = samples(run)
    counts = Counter(row[0] for rows in found for row in rows)
    wrong = [f"step {i} has {len(rows)} samples" for i, rows in enumerate(found, 1) if len(rows) != PROMPTS * SAMPLES]
    twice = sorted(prompt for prompt, count in counts.items() if count != SAMPLES)
    steps = [step for step, _ in run.read_metrics()]
    wrong += [f"prompts {twice} are not trained {SAMPLES} times"] if twice else []
    return wrong + ([f"steps {steps}"] if steps != list(range(1, STEPS + 1)) else [])


class Drill:
    """Runs in one folder, and the undisturbed ones that they are held against."""

    def __init__(self, folder: Path, program: Sequence[str] = PLAIN, more: Sequence[str] = ()) -> None:
        self.folder, self.program, self.more = folder, program, tuple(more)
        self.calms: dict[str, RunDir] = {}

    def fleet(self, name: str, blow: Blow) -> Fleet:
        run = RunDir(self.folder / name.replace(" ", "_"))
        return Fleet(MODES[blow.mode][0], run, (*blow.overrides, *self.more), self.program)

    def calm(self, blow: Blow) -> RunDir:
        """The run that nobody disturbs; durability and chance change nothing about it."""
        if blow.mode not in self.calms:
            fleet = self.fleet(f"calm {blow.mode}", Blow(blow.victim, blow.mode, 0, "none", 0, 0.0, 0.0))
            fleet.start()
            code = fleet.wait(RUN_S)
            if code != 0:
                fleet.kill()
                raise RuntimeError(f"the undisturbed run ended with {code}: {fleet.run.path}")
            self.calms[blow.mode] = fleet.run
        return self.calms[blow.mode]

    def strike(self, name: str, blow: Blow) -> Outcome:
        """A run, and a blow in its course: in another run, sooner, if the first one was over before."""
        for number in range(TRIES):
            outcome = self._run(f"{name}.{number}" if number else name, blow)
            if outcome.struck or outcome.wrong != [MISSED]:
                break
            blow = replace(blow, after=max(0, blow.after - 1) if number else blow.after, delay=blow.delay / 4)
        return outcome

    def _run(self, name: str, blow: Blow) -> Outcome:
        calm, fleet, outcome = self.calm(blow) if not blow.staleness else None, self.fleet(name, blow), Outcome()
        began = time.monotonic()
        try:
            fleet.start()
            outcome.struck = self._strike(fleet, blow)
            if blow.victim == "driver" and outcome.struck:
                fleet.wait(RUN_S)
                outcome.wrong += [f"left by the dead driver: {each}" for each in fleet.left()]
                fleet.start(resume=fleet.run.config.exists())
            until(lambda: fleet.note() or fleet.process.poll() is not None, RUN_S, 0.5)
            code = fleet.process.poll()
            outcome.wrong += [f"left: {each}" for each in fleet.left()] if code is not None else []
        finally:
            fleet.kill()
        outcome.seconds = round(time.monotonic() - began, 1)
        outcome.again = fleet.log.count("are started again from") + fleet.log.count("is started again")
        outcome.wrong += [] if outcome.struck else [MISSED]
        outcome.wrong += [] if code == 0 else ["it hangs" if code is None else f"exit code {code}"]
        outcome.wrong += trained_once(fleet.run) + ([] if calm is None else same(calm, fleet.run))
        return outcome

    def _strike(self, fleet: Fleet, blow: Blow) -> str:
        """Wait for the moment, and kill; -> who, and when."""

        def there() -> bool:
            over = fleet.process.poll() is not None
            return over or (fleet.steps >= blow.after and (blow.after > 0 or f"{blow.victim} 0" in fleet.members()))

        until(there, RUN_S)
        with fleet.still():
            fleet.note()
        time.sleep(blow.delay)
        with fleet.still():
            members = fleet.members()
            able = [name for name in members if name.startswith(f"{blow.victim} ")]
            if not able or fleet.process.poll() is not None:
                return ""
            name = able[int(blow.which * len(able))]
            steps = fleet.steps
            with contextlib.suppress(psutil.NoSuchProcess):
                members[name].kill()
                return f"{name} (pid {members[name].pid}) after step {steps}"
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--folder", type=Path, help="kept; default: one that is removed")
    parser.add_argument("--quick", action="store_true", help="the dock's processes are forked")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as aside:
        more = (f"fleet.backend={args.backend}",)
        drill = Drill(args.folder or Path(aside), QUICK if args.quick else PLAIN, more)
        drill.folder.mkdir(parents=True, exist_ok=True)
        for number in range(args.first, args.first + args.runs):
            blow = Blow.drawn(number, args.seed)
            outcome = drill.strike(f"run {number}", blow)
            bad += bool(outcome.wrong)
            print(json.dumps({"run": number, **vars(blow), **vars(outcome)}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
