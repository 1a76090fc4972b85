"""Environments of a rollout: what they did, as metrics, and how many of their failures a run bears."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from docklands.core.failures import FailureWindow
from docklands.errors import ConfigError, DocklandsError, EnvError, EnvTimeout, TooManyEnvErrors
from docklands.rollout.trajectory import Episode

log = logging.getLogger("docklands.rollout")

ERROR, TIMEOUT = "env_error", "env_timeout"
"""What a failed episode's drop reason begins with."""


def fail(episode: Episode, error: Exception) -> None:
    """End the episode: an environment is user code, its failure is this sample's and not the run's.

    A wrong configuration that an observation brings to light (no chat template) is the run's, with the environment
    named. Other errors of Docklands pass.
    """
    name = getattr(episode.env, "name", type(episode.env).__name__)
    if isinstance(error, ConfigError) and type(error) is ConfigError:
        raise ConfigError(f"environment {name!r}: {error.message}", error.hint) from error
    if isinstance(error, DocklandsError) and not isinstance(error, EnvError | ConfigError):
        raise error
    said = error.message if isinstance(error, DocklandsError) else f"{type(error).__name__}: {error}"
    if not isinstance(error, EnvError):
        said = f"environment {name!r}: {said}"
    episode.error = f"{TIMEOUT if isinstance(error, EnvTimeout) else ERROR}: {' '.join(said.split())[:300]}"
    episode.done = True


class EnvFailures:
    """Counts the episodes that their environments lost.

    window  None: the usual limit
    """

    def __init__(self, window: FailureWindow | None = None) -> None:
        self._window = window or FailureWindow()
        self._told = False

    def count(self, episodes: Sequence[Episode], training: bool) -> dict[str, tuple[float, float]]:
        """env/* metrics; logs the first failure. TooManyEnvErrors past the limit; evaluation does not count to it."""
        errors = [e.error for e in episodes]
        first = next(filter(None, errors), "")
        if first and not self._told:
            self._told = True
            log.warning("%s; its sample is dropped, env/errors and env/timeouts count the others", first)
        said = self._window.add(errors, "episodes") if training else ""
        if said:
            raise TooManyEnvErrors(said, "repair the environment, or raise env.deadline_s or env.max_error_fraction")
        return env_metrics(episodes)


def env_metrics(episodes: Sequence[Episode]) -> dict[str, tuple[float, float]]:
    """Failures, turns and observations of episodes with an environment."""
    late = sum(e.error.startswith(TIMEOUT) for e in episodes)
    found = {
        "env/errors": (float(sum(bool(e.error) for e in episodes) - late), 1.0),
        "env/timeouts": (float(late), 1.0),
    }
    played = [e for e in episodes if not e.error]
    if played:
        turns = [e.turns for e in played]
        observed = sum(e.response_length - sum(e.mask) for e in played)
        found |= {
            "env/turns/mean": (float(sum(turns)), float(len(turns))),
            "env/turns/max": (float(max(turns)), 1.0),
            "env/turns/min": (float(min(turns)), 1.0),
            "env/observation_tokens": (float(observed), 1.0),
        }
    return found
