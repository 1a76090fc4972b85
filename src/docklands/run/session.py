"""The Run: everything that the loop in loop.py speaks to, and what happens around a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from docklands.algorithms.base import Algorithm
from docklands.config.schema import Config
from docklands.core.batch import Batch
from docklands.core.graph import UPDATE, Graph
from docklands.core.protocols import Dock, Outcome, Rows, Sampling, WeightSync
from docklands.core.stage import Learner
from docklands.errors import DockClosed, WarehouseLost
from docklands.fleet.local_backend import Device, LocalRole
from docklands.fleet.saving import RemoteCheckpoint
from docklands.obs.flow import FlowLog
from docklands.obs.metrics import Metrics
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import Sinks
from docklands.obs.spans import span
from docklands.obs.watchdog import Watchdog
from docklands.run import resume
from docklands.run.describe import SampleRecorder, describe_stage
from docklands.run.evaluate import roll_out, sample_records, score, summarise
from docklands.run.fleet import close
from docklands.run.measure import memory, rates
from docklands.run.prompts import Prompts


@dataclass
class Evaluation:
    """Held-out prompts, ready as rows, and how to sample them."""

    source: str
    batch: Batch
    sampling: Sampling
    ks: Sequence[int] = ()


@dataclass
class Run:
    """One run, built. `step` is the number of steps done, and the weight version that is current.

    saver  of engines in worker processes; None: they are in this one
    """

    config: Config
    algorithm: Algorithm
    graph: Graph
    dock: Dock
    fleet: dict[str, LocalRole]
    weights: WeightSync
    prompts: Prompts
    run_dir: RunDir
    sinks: Sinks
    watchdog: Watchdog
    saver: RemoteCheckpoint | None = None
    evaluation: Evaluation | None = None
    recorder: SampleRecorder = field(default_factory=lambda: SampleRecorder(0))
    step: int = 0
    stop_asked: bool = False
    updating: bool = False
    out_of_prompts: bool = False
    host: Device = field(default_factory=lambda: Device("host"))
    flow: FlowLog = field(init=False)
    _began: float = 0.0
    _cpu: float = 0.0

    def __post_init__(self) -> None:
        self.flow = FlowLog(self.run_dir.flow)

    def steps_left(self) -> Iterator[int]:
        """Steps still to do; ends early when a stop was asked for, or with the prompts."""
        while self.step < self.config.run.steps and not self.stop_asked and not self.out_of_prompts:
            yield self.step

    @contextmanager
    def step_scope(self, step: int) -> Iterator[Metrics]:
        """Time and trace a step. One that finds the flow at its end, because the prompts were, is none."""
        self._began, self._cpu = time.perf_counter(), time.process_time()
        try:
            with span("step", step=step), self.flow.watching(step, self.dock.counts):
                yield Metrics()
        except DockClosed:
            if self.updating or step == 0:  # in mid-step, or nothing was ever trained
                raise
            self.out_of_prompts = True
        self.updating = False

    async def take_step(self, metrics: Metrics) -> Rows:
        """The rows of the next step, with what is measured of them. Rows lost before an update are taken again."""
        while True:
            rows = await self.dock.take(self.graph[UPDATE])
            try:
                metrics.merge(await self.describe(rows))
            except WarehouseLost:
                self.updating = False
                await self.dock.give_back(rows)
            else:
                return rows

    async def describe(self, rows: Rows) -> Metrics:
        """Metrics of the step's rows, and of what the stages did since the last step."""
        self.updating = True
        self.recorder.version = self.step
        metrics = Metrics()
        described = LocalRole("describe", self.recorder, self.dock, self.host)
        outcome: Outcome = await described.run(describe_stage(self.graph, "describe"), rows)
        metrics.merge({k: v for k, v in outcome.metrics.items() if not k.startswith("timing_s/")})
        self.drain(metrics)
        metrics.add_values({f"dock/{key}": value for key, value in (await self.flow_state()).items()})
        metrics.add_values(self.prompts.overlong)
        return metrics

    async def flow_state(self) -> dict[str, float]:
        """The dock when a step's rows have been taken: equal runs agree (in `bytes` synchronous ones only)."""
        counts = await self.dock.counts()
        self.flow.write(self.step, counts)
        stats = {key.removeprefix("dock/"): value for key, value in counts.items()}
        kept = {k: v for k, v in stats.items() if k in ("in_flight", "bytes") or k.startswith("dropped/")}
        if generated := stats.get("rollout/bytes_in"):
            kept["generated_near"] = stats["rollout/bytes_near"] / generated
        return kept

    def drain(self, metrics: Metrics) -> None:
        """What the roles measured since the last call."""
        for role in self.fleet.values():
            for pairs in role.drain():
                metrics.merge(pairs)

    def minibatches(self, rows: Rows) -> Iterator[Rows]:
        """Rows of each optimizer update of the step, in order; whole passes when there are several epochs."""
        for _ in range(self.config.algorithm.epochs_per_step):
            yield from rows.minibatches(self.config.samples_per_update)

    def learners(self, step: int) -> Sequence[Learner]:
        """Who learns in this step: all, or all but the actor while the critic warms up."""
        if step < self.config.algorithm.critic_warmup_steps:
            return [learner for learner in self.graph.learners if learner.name != "actor"]
        return self.graph.learners

    async def before_training(self) -> None:
        """First evaluation; after a resume, one that was cut by what ended the run before."""
        if self.evaluation_due():
            await self.evaluate()

    async def before_publish(self, step: int) -> None:
        """What a checkpoint of this step needs of the trainers' devices is copied while it is on them."""
        if self.checkpoint_due(step + 1):
            await resume.hold(self, step + 1)

    async def after_step(self, step: int, metrics: Metrics) -> None:
        """Everything that looks at a finished step: counts, sinks, samples, checkpoint, evaluation."""
        self.step = step + 1
        self.drain(metrics)
        seconds = time.perf_counter() - self._began
        cpu_s = time.process_time() - self._cpu
        known = metrics.result()
        metrics.add_values({**rates(known, seconds, cpu_s), **memory(self.config.run.device)})
        metrics.add_values({"training/global_step": self.step, "training/weight_version": self.step})
        metrics.add("training/epoch", self.prompts.epoch)
        self.sinks.write(self.step, metrics.result())
        self.run_dir.write_samples(self.step, self.recorder.take())
        last = self.step == self.config.run.steps
        if "checkpoint/failed" in known:
            await resume.settle(self)
        if self.checkpoint_due(self.step):
            await resume.save(self, last)
        if self.evaluation_due():
            await self.evaluate()
        self.watchdog.beat("step")

    async def end_early(self) -> None:
        """What the last step would have done: the prompts ended before it."""
        if self.checkpoint_due(self.step, last=True):
            await resume.save(self, last=True)
        if self.evaluation_due(last=True):
            await self.evaluate()

    def checkpoint_due(self, step: int, last: bool = False) -> bool:
        """Whether one is saved when `step` steps are done; the last is the last that was asked for, or is told."""
        every, at_end = self.config.checkpoint.every_steps, self.config.checkpoint.at_end
        return bool(every and step % every == 0) or (at_end and (last or step == self.config.run.steps))

    def evaluation_due(self, last: bool = False) -> bool:
        """Whether there is to be an evaluation of the weights of this step, and has been none yet."""
        wanted = self.config.eval
        if last or self.step == self.config.run.steps:
            due = wanted.after
        else:
            due = bool(wanted.every_steps) and self.step % wanted.every_steps == 0 if self.step else wanted.before
        return (
            due and self.evaluation is not None and all(row["step"] != self.step for row in self.run_dir.read_evals())
        )

    async def evaluate(self) -> None:
        """Generate and score the held-out prompts; one record in evals.jsonl, unless a stop has cut their samples."""
        if self.evaluation is not None and not self.stop_asked:
            metrics, scored = await self.measure(self.evaluation, self.step)
            if not self.stop_asked:
                self.run_dir.append_eval(self.step, self.evaluation.source, metrics, sample_records(scored))

    async def measure(self, evaluation: Evaluation, step: int) -> tuple[dict[str, float], Batch]:
        """Generate and score held-out prompts: -> metrics, and the rows with what was said. Nothing is written."""
        worker = self.fleet["rollout"]
        asked = evaluation.batch
        with span("evaluate", step=step):
            rolled = await worker.call("eval", roll_out, worker.resource, asked, evaluation.sampling)
            scored = await score(self.fleet["reward"].resource, rolled)
        return summarise(scored, evaluation.source, evaluation.ks, asked=len(asked)), scored

    def close(self) -> None:
        """Stop threads and processes."""
        close(self.fleet)
        for device in {role.device for role in self.fleet.values()} | {self.host}:
            device.close()
        self.flow.close()
