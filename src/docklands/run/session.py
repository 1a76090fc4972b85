"""The Run: everything that the loop in loop.py speaks to, and what happens around a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from docklands import device as devices
from docklands.algorithms.base import Algorithm
from docklands.config.schema import Config
from docklands.core.batch import Batch
from docklands.core.graph import Graph
from docklands.core.protocols import Outcome, Rows, Sampling, WeightSync
from docklands.core.stage import Learner
from docklands.dock import Dock
from docklands.fleet.local_backend import Device, LocalRole
from docklands.obs.metrics import Metrics
from docklands.obs.rundir import RunDir
from docklands.obs.sinks import Sinks
from docklands.obs.spans import span
from docklands.obs.watchdog import Watchdog
from docklands.run import resume
from docklands.run.describe import SampleRecorder, describe_stage
from docklands.run.evaluate import roll_out, sample_records, score, summarise
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
    """One run, built. `step` is the number of steps done, and the weight version that is current."""

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
    evaluation: Evaluation | None = None
    recorder: SampleRecorder = field(default_factory=lambda: SampleRecorder(0))
    step: int = 0
    stop_asked: bool = False
    updating: bool = False
    host: Device = field(default_factory=lambda: Device("host"))
    _began: float = 0.0
    _cpu: float = 0.0

    def steps_left(self) -> Iterator[int]:
        """Steps still to do; ends early when a stop was asked for."""
        while self.step < self.config.run.steps and not self.stop_asked:
            yield self.step

    @contextmanager
    def step_scope(self, step: int) -> Iterator[Metrics]:
        """Time and trace a step."""
        self._began, self._cpu = time.perf_counter(), time.process_time()
        with span("step", step=step):
            yield Metrics()
        self.updating = False

    async def describe(self, rows: Rows) -> Metrics:
        """Metrics of the step's rows, and of the stages that made them."""
        self.updating = True
        metrics = Metrics()
        described = LocalRole("describe", self.recorder, self.dock, self.host)
        outcome: Outcome = await described.run(describe_stage(self.graph, "describe"), rows)
        metrics.merge({k: v for k, v in outcome.metrics.items() if not k.startswith("timing_s/")})
        self.drain(metrics)
        metrics.add_values({f"dock/{key}": value for key, value in self.flow_state().items()})
        return metrics

    def flow_state(self) -> dict[str, float]:
        """The dock when a step's rows have been taken: nothing moves then, so equal runs agree."""
        stats = self.dock.stats()
        return {key: stats[f"dock/{key}"] for key in ("in_flight", "bytes") if f"dock/{key}" in stats}

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
        """First evaluation, once: not after a resume."""
        if self.config.eval.before and self.step == 0:
            await self.evaluate(0)

    async def after_step(self, step: int, metrics: Metrics) -> None:
        """Everything that looks at a finished step: counts, sinks, samples, checkpoint, evaluation."""
        self.step = step + 1
        self.drain(metrics)
        seconds = time.perf_counter() - self._began
        cpu_s = time.process_time() - self._cpu
        known = metrics.result()
        metrics.add_values({"timing_s/step": seconds, "perf/time_per_step": seconds, "perf/cpu_s": cpu_s})
        metrics.add("perf/throughput", known.get("perf/total_num_tokens", 0.0) / seconds)
        metrics.add("perf/samples_per_s", self.config.samples_per_step / seconds)
        metrics.add("memory/rss_mib", devices.rss() / 2**20)
        metrics.add_values({"training/global_step": self.step, "training/epoch": self.prompts.epoch})
        self.sinks.write(self.step, metrics.result())
        self.run_dir.write_samples(self.step, self.recorder.take())
        last = self.step == self.config.run.steps
        await self.checkpoint_if_due(last)
        every = self.config.eval.every_steps
        if (every and self.step % every == 0 and not last) or (last and self.config.eval.after):
            await self.evaluate(self.step)
        self.watchdog.beat("step")

    async def checkpoint_if_due(self, last: bool) -> None:
        every, at_end = self.config.checkpoint.every_steps, self.config.checkpoint.at_end
        if (every and self.step % every == 0) or (last and at_end):
            await resume.save(self)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Generate and score the held-out prompts; one record in evals.jsonl."""
        if self.evaluation is None or "rollout" not in self.fleet:
            return {}
        worker = self.fleet["rollout"]
        asked = self.evaluation.batch
        with span("evaluate", step=step):
            rolled = await worker.call("eval", roll_out, worker.resource, asked, self.evaluation.sampling)
            scored = await score(self.fleet["reward"].resource, rolled)
        metrics = summarise(scored, self.evaluation.source, self.evaluation.ks, asked=len(asked))
        self.run_dir.append_eval(step, self.evaluation.source, metrics, sample_records(scored))
        return metrics

    def close(self) -> None:
        """Stop threads and processes."""
        for role in self.fleet.values():
            close = getattr(role.resource, "close", None)
            if callable(close):
                close()
        for device in {role.device for role in self.fleet.values()} | {self.host}:
            device.close()
