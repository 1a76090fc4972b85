"""Saving a whole run and continuing it, to the bit: engines, algorithm, data position, dock, RNG, version."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from docklands.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    NonFinite,
    RewardError,
    RolloutError,
    TooManyDropped,
)
from docklands.models.hf_io import not_finite
from docklands.train import checkpoint, sharded_checkpoint

if TYPE_CHECKING:
    from docklands.run.session import Run

ENGINES = ("actor", "critic")
SPARED = (ConfigError, EnvError, RewardError, RolloutError, TooManyDropped)
"""Errors of data and user code: they end a run, but its weights are those of the last whole step."""

log = logging.getLogger("docklands.run")


async def save(run: Run, last: bool = False) -> Path | None:
    """Write a complete checkpoint of the run as it stands between two steps; atomic. -> its directory.

    The flow (prompts, algorithm, dock) is read here, on the event loop, in one piece: nothing is admitted or handed out
    in between (by a dock in processes of its own: before its copy is made). Only the engines, which nothing changes
    between two steps, are read on their device's thread. Engines in workers have been copied (`hold`), or are copied
    then, and are written beside the next steps: `settle` waits for that. One that cannot be begun is told and counted
    then, and the run goes on (None).

    last  no other will be written: CheckpointError, as always where the engines are in this process
    """
    await settle(run)
    flow = {
        "step": run.step,
        "prompts": run.prompts.state_dict(),
        "algorithm": run.algorithm.state_dict(),
        "rng": torch.get_rng_state(),
    }
    if (rollout := waiting_samples(run)) is not None:
        flow["rollout"] = rollout.state_dict()
    try:
        flow["dock"], files = await run.dock.save()  # last: a prompt may be in both, never in neither
        return await run.fleet["actor"].call("checkpoint", write, run, flow, files)
    except CheckpointError as error:
        if last or run.saver is None:
            raise
        log.warning("%s (%s); the run goes on", error.message, error.hint)
        await run.fleet["actor"].call("checkpoint", run.saver.drop)
        run.fleet["actor"].note({"checkpoint/failed": (1.0, 1.0)})
        return None


async def hold(run: Run, step: int) -> None:
    """Copy the engines in workers for the checkpoint of `step`, which `save` begins when the step is done. Before the
    weights are published: afterwards all of it would have to come back to its device (sync.swap), and the generators'
    weights would have to go and come once more.
    """
    if run.saver is not None:
        await settle(run)
        await run.fleet["actor"].call("checkpoint", run.saver.hold, step, roles_of(run))


def roles_of(run: Run) -> list[str]:
    """Whose state a checkpoint holds."""
    return [name for name in ENGINES if name in run.fleet]


async def settle(run: Run, last: bool = False) -> None:
    """Wait for the checkpoint that workers still write. One that cannot be written is told, and the run goes on.

    last  no other will be written: CheckpointError
    """
    if run.saver is None or run.saver.going is None:
        return
    try:
        await run.fleet["actor"].call("checkpoint", run.saver.settle)
    except CheckpointError as error:
        if last:
            raise
        log.warning("%s (%s); the run goes on", error.message, error.hint)


async def save_despite(run: Run, error: BaseException) -> None:
    """Keep what was trained when bad data or failing user code ends the run between two steps: `--resume` goes on."""
    if isinstance(error, BaseExceptionGroup) and error.split(SPARED)[1] is not None:
        return
    if not isinstance(error, (*SPARED, BaseExceptionGroup)) or run.updating or not run.step:
        return
    try:
        await settle(run)
        newest = checkpoint.latest(run.run_dir.checkpoints)
        if newest is not None and checkpoint.step_of(newest) >= run.step:
            return
        path = await save(run, last=True)
        await settle(run, last=True)
    except Exception as failure:  # the error that ended the run is the one to report
        log.warning("what was trained up to step %d could not be saved: %s", run.step, failure)
    else:
        log.warning("step %d is saved in %s: repair the cause and go on with --resume", run.step, path)


def write(run: Run, flow: dict[str, Any], files: Sequence[Path]) -> Path:
    """Engines, flow and the dock's files into a new checkpoint directory. NonFinite rather than weights with a NaN."""
    root, keep, roles = run.run_dir.checkpoints, run.config.checkpoint.keep, roles_of(run)
    if run.saver is not None:
        return run.saver.begin(checkpoint.begin(root.resolve(), run.step, {"flow": flow}, keep, files), roles)
    states = {name: run.fleet[name].resource.state_dict() for name in roles}
    for name, state in states.items():
        check_finite(state["model"], f"{name} after step {run.step}", "checkpoints from before are intact")
    return checkpoint.save(root, run.step, {**states, "flow": flow}, keep=keep, files=files)


async def load_latest(run: Run) -> int:
    """Put the run back to its newest complete checkpoint; the step it stands at, 0 if none was ever written.

    CheckpointError when there are checkpoints, but none that is complete: starting anew would remove them.
    """
    root = run.run_dir.checkpoints
    path = checkpoint.latest(root)
    if path is None:
        broken = ", ".join(sorted(found.name for found in root.glob("step_*")))
        if broken:
            raise CheckpointError(
                f"no checkpoint in {root} is complete: {broken}", "copy one back, or remove them to start at step 0"
            )
        return 0
    await load(run, path)
    return run.step


async def load(run: Run, path: Path) -> None:
    """Raises CheckpointError when a part is missing or damaged, ConfigError when it does not fit this run."""
    roles = roles_of(run)
    if "critic" in roles and "critic" not in sharded_checkpoint.roles_in(path):
        raise ConfigError(
            f"{path} has no critic: another algorithm than {run.config.algorithm.name} saved it",
            "resume with the algorithm that the run was started with",
        )
    load_engines(run, path, roles)
    flow = checkpoint.load(path, "flow")
    engines = {file for role in roles for file in sharded_checkpoint.files_of(path, role)}
    checkpoint.verify(path, [name for name in checkpoint.read_stamps(path) if name not in engines])  # the dock's
    try:
        with fitting():
            run.prompts.load_state_dict(flow["prompts"])
            await run.dock.load(flow["dock"], path)
            await run.prompts.rejoin(run.dock)
            run.algorithm.load_state_dict(flow["algorithm"])
        if (rollout := waiting_samples(run)) is not None and "rollout" in flow:
            rollout.load_state_dict(flow["rollout"])
        torch.set_rng_state(flow["rng"])
        run.step = int(flow["step"])
    except KeyError as error:
        raise CheckpointError(
            f"{path}: the flow's state lacks {error}", "was it written by another version?"
        ) from error


def load_engines(run: Run, path: Path, roles: Sequence[str]) -> None:
    """Weights, optimizer, schedule and version of these engines, from a checkpoint of any layout.

    CheckpointError, NonFinite, ConfigError as `load`.
    """
    if run.saver is not None:
        with fitting():
            for note in run.saver.load(path, roles):
                log.warning("resumed with a changed setting: optim.%s", note)
        return
    for role in roles:
        engine = run.fleet[role].resource
        if sharded_checkpoint.is_whole(path, role):
            state = checkpoint.load(path, role)
            check_finite(state.get("model") or {}, str(path / f"{role}.pt"), checkpoint.REMOVE)
            with fitting():
                engine.load_state_dict(state)
        else:
            with fitting():
                sharded_checkpoint.load(path, {role: engine})
            check_finite(engine.masters(), f"{role} of {path}", checkpoint.REMOVE)


def waiting_samples(run: Run) -> Any:
    """The rollout worker, where samples may wait in it for another visit; None: nothing of it is to be kept."""
    if not run.config.rollout.partial_tokens or "rollout" not in run.fleet:
        return None
    resource = getattr(run.fleet["rollout"], "resource", None)
    return resource if hasattr(resource, "load_state_dict") else None


@contextmanager
def fitting() -> Iterator[None]:
    """The checkpoint is whole: what does not fit is the config that it is resumed with."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(error.message, error.hint) from error


def check_finite(weights: Mapping[str, torch.Tensor], what: str, hint: str) -> None:
    """NonFinite names the first weight that holds a NaN or an infinity."""
    for name, weight in weights.items():
        if bad := not_finite(weight):
            raise NonFinite(f"{what}: {bad} of {weight.numel()} elements of weight {name} are not finite", hint)
