"""Environments: what answers the model between its turns."""

from docklands.envs.base import Env, StepResult
from docklands.envs.build import build_env_factory

__all__ = ["Env", "StepResult", "build_env_factory"]
