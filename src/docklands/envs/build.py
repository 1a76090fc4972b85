"""From the config to environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from docklands.config.schema import EnvSection
from docklands.core.failures import FailureWindow
from docklands.envs.base import ENVS, GuardedEnv
from docklands.errors import ConfigError


class EnvFactory:
    """Makes a fresh environment for each episode.

    failures  how many episodes may fail before the run ends
    """

    def __init__(self, section: EnvSection, make: Callable[[], Any]) -> None:
        self._section, self._make = section, make
        self.failures = FailureWindow(section.max_error_fraction, section.error_window)

    def __call__(self) -> GuardedEnv:
        return GuardedEnv(self._make(), self._section.name, self._section.deadline_s)


def build_env_factory(section: EnvSection) -> EnvFactory | None:
    """A maker of fresh environments, one per episode; None for `single_turn`, which needs none.

    Made once here, so that a wrong name or argument is a ConfigError at the start.
    """
    if section.name == "single_turn":
        if section.max_turns != 1 or section.args:
            raise ConfigError(
                f"env.max_turns {section.max_turns} and env.args {section.args} mean nothing to single_turn",
                "set env.name, e.g. calculator",
            )
        return None
    kind: Any = ENVS.get(section.name)
    if not callable(kind):
        raise ConfigError(f"environment {section.name!r} is a {type(kind).__name__}, not a class")
    arguments = dict(section.args)
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError as error:
        raise ConfigError(f"environment {section.name!r}: {error}", "see docklands.envs.base.Env") from error
    if "max_turns" in parameters:
        arguments.setdefault("max_turns", section.max_turns)

    try:
        probe: Any = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {section.name!r}: {error}", "env.args must fit its __init__") from error
    if not isinstance(getattr(probe, "max_turns", None), int):
        raise ConfigError(
            f"environment {section.name!r} has no whole number `max_turns`", "see docklands.envs.base.Env"
        )
    for method in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(probe, method, None)):
            raise ConfigError(
                f"environment {section.name!r} has no `async def {method}`", "see docklands.envs.base.Env"
            )
    return EnvFactory(section, lambda: kind(**arguments))
