"""Our side: the real loop of docklands.run, one training step per turn.

The run is built from a config like any other. Two things are added from outside: a turn is waited for before a step's
first prompt is admitted, and in the ragged case every request carries its given length.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docklands.config.load import make_config, resolved_yaml  # noqa: E402
from docklands.config.schema import Config  # noqa: E402
from docklands.core.batch import Batch  # noqa: E402
from docklands.core.fields import GROUP_ID  # noqa: E402
from docklands.core.protocols import Generation, Request  # noqa: E402
from docklands.obs.rundir import RunDir  # noqa: E402
from docklands.obs.sinks import JsonlSink, Sinks  # noqa: E402
from docklands.run.build import build  # noqa: E402
from docklands.run.loop import train  # noqa: E402
from docklands.run.prompts import Prompts  # noqa: E402
from vs_trl_parts.cases import Case, Spec, read_spec  # noqa: E402
from vs_trl_parts.turns import Turns  # noqa: E402

STAGES = {
    "generate": "timing_s/gen",
    "logprobs": "timing_s/ref",
    "update": "timing_s/update_actor",
    "reward": "timing_s/reward",
    "reward_mean": "critic/rewards/mean",
    "prompt_tokens": "prompt_length/mean",
    "response_tokens": "response_length/mean",
}


class PromptsInTurn:
    """The run's prompts; before each step's first one, the turn is waited for."""

    def __init__(self, prompts: Prompts, per_step: int, turns: Turns) -> None:
        self._prompts, self._per_step, self._turns = prompts, per_step, turns
        self._given = 0

    def next_groups(self, most: int) -> Batch | None:
        within = self._given % self._per_step
        if within == 0:
            self._turns.next()
        groups = self._prompts.next_groups(min(most, self._per_step - within))
        if groups is not None:
            self._given += len(set(groups[GROUP_ID].tolist()))
        return groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prompts, name)


class GivenLengths:
    """An engine whose requests are as long as the table says, by row id."""

    def __init__(self, engine: Any, lengths: list[int]) -> None:
        self._engine, self._lengths = engine, lengths

    def generate(self, requests: list[Request]) -> list[Generation]:
        return self._engine.generate([self._with_length(request) for request in requests])

    def _with_length(self, request: Request) -> Request:
        length = self._lengths[request.request_id]
        return replace(request, sampling=replace(request.sampling, max_tokens=length, min_tokens=length))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def overrides(case: Case, spec: Spec) -> list[str]:
    """The case in our words."""
    dtype = "bfloat16" if case.bf16 else "float32"
    return [
        "run.name=ours",
        f"run.dir={spec.work}",
        f"run.steps={spec.steps}",
        f"run.threads={spec.threads}",
        f"run.seed={spec.seed}",
        "run.device=cpu",
        f"model.path={spec.model}",
        f"data.source={spec.prompts}",
        f"data.chat={json.dumps(case.chat)}",
        "data.shuffle=false",
        "data.max_prompt_tokens=64",
        f"rollout.prompts_per_step={case.prompts}",
        f"rollout.samples_per_prompt={case.group}",
        f"rollout.max_response_tokens={case.max_tokens}",
        f"reward.functions=[{{name: '{spec.rewards}:{case.reward}'}}]",
        "algorithm.name=grpo",
        f"algorithm.kl.coef={case.kl_coef}",
        f"train.dtype={dtype}",
        f"train.optim.lr={case.lr}",
        f"train.optim.betas={list(case.betas)}",
        f"train.optim.warmup_updates={case.warmup}",
        "checkpoint.at_end=false",
        "obs.console='off'",
        "obs.report=false",
        *case.ours,
    ]


async def run(config: Config, sources: Any, case: Case, spec: Spec) -> dict[str, Any]:
    """Train; -> what was measured, a row per step."""
    turns = Turns()
    run_dir = RunDir.create(config.run_dir)
    run_dir.write_config(resolved_yaml(config, sources))
    sinks = Sinks([JsonlSink(run_dir.metrics)], [])
    run = build(config, run_dir, sinks)
    run.prompts = PromptsInTurn(run.prompts, case.prompts, turns)  # type: ignore[assignment]
    if case.ragged:
        if config.has_workers:
            raise SystemExit("ours: given lengths need an engine in this process: the ragged case has no fleet")
        lengths = json.loads(Path(spec.lengths).read_text())
        worker = run.fleet["rollout"].resource
        worker._engines = [GivenLengths(engine, lengths) for engine in worker._engines]
    try:
        await run.dock.open()
        with run.watchdog:
            await train(run)
    finally:
        await run.dock.leave()
        run.close()
        sinks.close()
    lines = [json.loads(line)["metrics"] for line in Path(run_dir.metrics).read_text().splitlines()]
    stages = {ours: name for ours, name in STAGES.items() if case.kl_coef or ours != "logprobs"}
    result = {"steps": [{"logprobs": 0.0} | {ours: line[name] for ours, name in stages.items()} for line in lines]}
    turns.end(result)
    return result


def main() -> None:
    case, spec = read_spec(sys.argv[1])
    config, sources = make_config(None, overrides(case, spec))
    asyncio.run(run(config, sources, case, spec))


if __name__ == "__main__":
    main()
