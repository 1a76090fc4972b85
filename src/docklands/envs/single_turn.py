"""The plain environment: one turn, nothing said back."""

from __future__ import annotations

from typing import Any

from docklands.envs.base import ENVS, StepResult


@ENVS.add("single_turn")
class SingleTurn:
    """Ends every episode after the model's turn; rewards come from the reward stage alone."""

    def __init__(self, max_turns: int = 1) -> None:
        self.max_turns = max_turns

    async def reset(self, row: dict[str, Any]) -> None:
        """Nothing to prepare."""

    async def step(self, completion: str, finish: str) -> StepResult:
        """The end."""
        return StepResult(None, 0.0, True)
