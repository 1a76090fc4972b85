"""A stop is not forgotten when a process is lost in the save that follows it."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from docklands.errors import CheckpointError, ControlLost, WorkerLost
from docklands.run.main import stoppable


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (ControlLost("gone"), KeyboardInterrupt),
        (BaseExceptionGroup("tasks", [WorkerLost("gone")]), KeyboardInterrupt),
        (CheckpointError("no room"), CheckpointError),
    ],
)
def test_a_process_lost_after_a_stop_is_no_reason_to_start_again(error: Exception, ends: type[BaseException]) -> None:
    async def run(stopped: bool) -> None:
        made = SimpleNamespace(stop_asked=False, updating=True, fleet={})
        with stoppable(made):  # type: ignore[arg-type]
            if stopped:
                os.kill(os.getpid(), signal.SIGINT)
                while not made.stop_asked:
                    await asyncio.sleep(0.001)
            raise error

    with pytest.raises(ends):
        asyncio.run(run(stopped=True))
    with pytest.raises(type(error)):
        asyncio.run(run(stopped=False))
