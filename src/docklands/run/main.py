"""Commands that run something: train, evaluate, export. Their errors travel up to the command line."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from docklands import models
from docklands.config.load import load_config, resolved_yaml
from docklands.config.paths import anchored, resolve_model_path
from docklands.config.schema import Config
from docklands.config.summary import without_effect
from docklands.errors import CheckpointError, ConfigError
from docklands.fleet.supervise import LOST, Restarts, lost_process
from docklands.models import lora_export
from docklands.models.adapters import with_lora
from docklands.models.hf_export import export_stream
from docklands.obs.console import ConsoleSink
from docklands.obs.log import setup_logging, teardown_logging
from docklands.obs.rundir import RunDir, writing
from docklands.obs.sinks import JsonlSink, Sink, Sinks, TensorBoardSink, WandbSink
from docklands.obs.spans import SpanRecorder, recording
from docklands.run import resume as resuming
from docklands.run.build import build, headline
from docklands.run.changes import tell_changes
from docklands.run.loop import train
from docklands.run.report import write_report
from docklands.run.session import Run
from docklands.run.summary import before_and_after, closing_lines
from docklands.train import checkpoint, sharded_checkpoint

INTERRUPTED = 130
ENDED = "ended_at"
"""In env.json: the step at which the prompts ended."""

log = logging.getLogger("docklands.run")


def train_run(config: Config, sources: Mapping[str, str], resume: bool) -> int:
    """Train from the start, or go on. 0 done, 130 interrupted after a clean checkpoint."""
    run_dir = RunDir.resume(config.run_dir) if resume else RunDir.create(config.run_dir)
    console = ConsoleSink(config.run.steps, title=f"docklands · {config.run.name}", mode=config.obs.console)
    setup_logging(run_dir.path, show=console.say)
    try:
        with recording(SpanRecorder(run_dir.spans)):
            return train_supervised(config, sources, run_dir, console, resume)
    except ConfigError:  # refused: the same command, corrected, must work
        run_dir.discard()
        raise
    finally:
        console.close()
        teardown_logging()
        run_dir.release()


def train_supervised(
    config: Config, sources: Mapping[str, str], run_dir: RunDir, console: ConsoleSink, resume: bool
) -> int:
    """Run to the end. A lost process sends the run back to its last checkpoint, see fleet.max_restarts."""
    restarts = Restarts(config.fleet.max_restarts)
    if resume:
        check_unfinished(run_dir)
    while True:
        try:
            return asyncio.run(run_training(config, sources, run_dir, console, resume))
        except (*LOST, BaseExceptionGroup) as error:
            lost = lost_process(error)
            step = max((number for number, _ in run_dir.read_metrics()), default=0)
            if lost is None or not restarts.allow(step):
                raise
            log.warning("%s", lost.message)
            log.warning("after step %d: all processes are started again from the last checkpoint", step)
            resume = True


async def run_training(
    config: Config, sources: Mapping[str, str], run_dir: RunDir, console: ConsoleSink, resume: bool
) -> int:
    """Build, resume if asked, train, say what came of it. Nothing of an earlier run changes until both have worked."""
    began = time.monotonic()
    run = build(config, run_dir, Sinks([]), console.stage)
    console.say(headline(config, run.graph))
    if idle := without_effect(config, "rollout" in run.graph.roles):
        console.say(idle)
    console.start()
    try:
        await run.dock.open()
        if resume:
            tell_changes(config, run_dir, console.say)
            step = await resuming.load_latest(run)
            run_dir.truncate_after(step)
            console.say(f"resumed at step {step}" if step else "no complete checkpoint yet: starting at step 0")
        run_dir.write_config(resolved_yaml(anchored(config), sources))
        run_dir.write_env()
        run_dir.write_graph(run.graph.to_dict())
        run.sinks, first = open_sinks(config, run_dir, console), run.step
        with run.watchdog, stoppable(run):
            interrupted = await train_until_done(run)
            await resuming.settle(run, last=True)
        console.close()
        before_and_after(run_dir, console.say)
    finally:
        await run.dock.leave()
        run.close()
        run.sinks.close()
    report = write_report(run_dir.path) if config.obs.report else None
    closing_lines(run_dir, report, (run.step - first, time.monotonic() - began), console.say)
    return INTERRUPTED if interrupted else 0


def check_unfinished(run_dir: RunDir) -> None:
    """CheckpointError for a run that ended without a checkpoint: starting anew would overwrite its records."""
    last = max((number for number, _ in run_dir.read_metrics()), default=0)
    if checkpoint.complete(run_dir.checkpoints) or names(run_dir.checkpoints) or not last:
        return
    steps = load_config(run_dir.config)[0].run.steps
    if last >= steps or ENDED in run_dir.read_env():
        raise CheckpointError(
            f"{run_dir.path} ended at step {last} without a checkpoint: there is nothing to go on from",
            "choose another run.name to start anew; checkpoint.at_end keeps the weights of a run",
        )


async def train_until_done(run: Run) -> bool:
    """True when a stop was asked for before the last step, or in the evaluation after it; then a checkpoint of the last
    whole step is written.
    """
    try:
        await train(run)
        if run.out_of_prompts:
            log.warning(
                "the prompts ended after %d of %d steps; data.epochs=0 repeats them", run.step, run.config.run.steps
            )
            await run.end_early()
    except asyncio.CancelledError:
        if not run.stop_asked:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
    except Exception as error:
        if not (run.stop_asked and lost_process(error)):
            await resuming.save_despite(run, error)
        raise
    run.updating = True  # what follows only saves: a stop lets it end
    if run.stop_asked and (run.step < run.config.run.steps or run.evaluation_due()):
        await resuming.save(run, last=True)
        return True
    if run.out_of_prompts:
        run.run_dir.write_env(**{ENDED: run.step})
    return False


@contextmanager
def stoppable(run: Run) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the run with a clean checkpoint; the second at once. A step in its updates is
    done first; rollouts are cut at once, also those beside it.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def stop() -> None:
        if run.stop_asked or task is None:
            os._exit(INTERRUPTED)
        run.stop_asked = True
        for role in run.fleet.values():
            abort = getattr(role.resource, "abort", None)
            if callable(abort):
                abort()
        if not run.updating:  # weights are those of the last whole step: nothing is lost by leaving now
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    except Exception as error:
        if run.stop_asked and lost_process(error):  # in the step or in the save after it: no reason to start again
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def open_sinks(config: Config, run_dir: RunDir, console: ConsoleSink) -> Sinks:
    """metrics.jsonl must work; the others may fail without ending the run."""
    optional: list[Sink] = [console]
    if config.obs.tensorboard:
        optional.append(TensorBoardSink(run_dir.path / "tensorboard"))
    if config.obs.wandb:
        optional.append(WandbSink(config.obs.wandb, config.run.name, run_dir.path, config.model_dump(mode="json")))
    with writing(run_dir.metrics):
        return Sinks([JsonlSink(run_dir.metrics)], optional)


def evaluate_run(
    config: Config, sources: Mapping[str, str], checkpoint_path: str | None, n: int, k: Sequence[int]
) -> dict[str, float]:
    """Evaluate a run's checkpoint (default: the last) on its held-out prompts; of a run that has not begun, the
    starting weights. CheckpointError when what a run trained was not kept.

    The run directory stays as it is: its evals.jsonl compares evaluations of one kind, those of the training.
    """
    if not config.eval.prompts:
        raise ConfigError("eval.prompts is 0: nothing to evaluate on", "add eval.prompts=200")
    chosen = config.eval.model_copy(
        update={"samples_per_prompt": n, "temperature": config.eval.temperature or (1.0 if n > 1 else 0.0)}
    )
    with tempfile.TemporaryDirectory(prefix="docklands-eval-") as folder:
        aside = RunDir(folder)  # for what processes print
        aside.log.mkdir()
        return asyncio.run(_evaluate(config.model_copy(update={"eval": chosen}), aside, checkpoint_path, k))


async def _evaluate(config: Config, aside: RunDir, path: str | None, ks: Sequence[int]) -> dict[str, float]:
    run_dir = RunDir(config.run_dir)
    run = build(config, aside, Sinks([]))
    try:
        if run.evaluation is None:
            raise ConfigError(f"algorithm {config.algorithm.name} generates nothing to evaluate")
        run.evaluation.ks = ks
        found = find_checkpoint(run_dir, path)
        if found is not None:
            resuming.load_engines(run, found, ["actor"])
            run.step = checkpoint.step_of(found)
        elif run_dir.read_metrics():
            raise CheckpointError(
                f"{run_dir.path} has no complete checkpoint: the weights that it trained are not there",
                "set checkpoint.at_end or checkpoint.every_steps when you train",
            )
        await run.weights.publish(version=run.step)
        return (await run.measure(run.evaluation, run.step))[0]
    finally:
        run.close()


def find_checkpoint(run_dir: RunDir, wanted: str | None) -> Path | None:
    """A checkpoint by step number or path; the newest complete one for None."""
    if wanted is None:
        return checkpoint.latest(run_dir.checkpoints)
    path = run_dir.checkpoints / f"step_{int(wanted):06d}" if wanted.isdigit() else Path(wanted)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint {path}", f"there are: {', '.join(names(run_dir.checkpoints)) or 'none'}")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*")) if folder.is_dir() else []


def export_run(run_dir: Path, out: Path, adapter: bool = False) -> None:
    """The actor of the last complete checkpoint as a Hugging Face directory, or its adapters as peft reads them."""
    directory = RunDir(run_dir)
    config, _ = load_config(directory.config)
    path = checkpoint.latest(directory.checkpoints)
    if path is None:
        raise CheckpointError(f"{run_dir} has no complete checkpoint", "set checkpoint.at_end or every_steps")
    source, trained = resolve_model_path(config.model.path), sharded_checkpoint.weights(path)
    shape = with_lora(models.read_config(source), config.lora)
    if adapter and shape.lora is None:
        raise ConfigError(f"{run_dir} trained all weights: there is no adapter", "leave --adapter out")
    if adapter:
        lora_export.export_adapters(shape, trained, out, str(source))
    elif shape.lora is None:
        export_stream(shape, trained, out, source)
    else:
        lora_export.export_merged(shape, starting_weights(config, source), trained, out, source)


def starting_weights(config: Config, source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """What a run with adapters began with, and has beneath them still."""
    if config.model.init == "random":
        return models.build(models.read_config(source), seed=config.run.seed).named_parameters()
    return lora_export.base_weights(source, models.read_config(source))
