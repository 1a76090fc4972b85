"""When a run goes back to its last checkpoint by itself: a process was lost, and that has not happened too often."""

from __future__ import annotations

from docklands.errors import ControlLost, DocklandsError, WarehouseLost, WorkerLost

WINDOW = 100
"""Steps within which restarts are counted: a fault that comes back soon is not an accident."""


class Restarts:
    """Counts restarts. most: allowed in any WINDOW steps, see fleet.max_restarts."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.steps: list[int] = []

    def allow(self, step: int) -> bool:
        """Whether the run may go on after a loss at this step; it is counted if so."""
        self.steps = [at for at in self.steps if step - at < WINDOW]
        if len(self.steps) >= self.most:
            return False
        self.steps.append(step)
        return True


LOST = (WorkerLost, WarehouseLost, ControlLost)
"""What ends a run that may go on: a process has died, and with it what only it knew."""


def lost_process(error: BaseException) -> DocklandsError | None:
    """The lost process, when that and nothing else is what ended the run."""
    if isinstance(error, LOST):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [lost_process(each) for each in error.exceptions]
        return found[0] if all(found) else None
    return None
