"""The peer's side: TRL's GRPOTrainer on the CPU, one training step per turn. Runs under the peer's interpreter.

Its own code path throughout; the subclass only times it, and in the ragged case tells `generate` where each row ends.

Legend: B samples of a step, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from vs_trl_parts.cases import Case, Spec, read_spec  # noqa: E402
from vs_trl_parts.turns import Turns  # noqa: E402


class GivenLengths(LogitsProcessor):
    """Ends row i of step k after the given number of tokens: EOS is impossible before, and certain there."""

    def __init__(self, lengths: list[int], eos: int) -> None:
        self.lengths, self.eos = torch.tensor(lengths), eos
        self.passed = 0

    def begin(self, rows: int, prompt_length: int) -> None:
        """The next `rows` lengths are those of the batch about to be generated."""
        self._last_B = self.lengths[self.passed : self.passed + rows] - 1
        self._prompt_length = prompt_length
        self.passed += rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends_B = self._last_B == input_ids.shape[1] - self._prompt_length
        scores[:, self.eos] = torch.where(ends_B, torch.tensor(1e9), torch.tensor(float("-inf")))
        return scores


class TimedTrainer(GRPOTrainer):
    """Adds clocks around the stages."""

    seconds: dict[str, float]
    steps: list[dict[str, float]]
    given: GivenLengths | None = None

    def begin_step(self) -> None:
        """A new row of measurements."""
        self.seconds = {"generate": 0.0, "logprobs": 0.0, "update": 0.0, "reward": 0.0}
        self.steps.append(self.seconds)

    def _timed(self, what: str, began: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if self.given is not None:
            self.given.begin(len(prompt_ids), max(map(len, prompt_ids)))
        began = time.perf_counter()
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._timed("generate", began)
        self.seconds["prompt_tokens"] = sum(map(len, prompt_ids)) / len(prompt_ids)
        self.seconds["response_tokens"] = sum(map(len, completion_ids)) / len(completion_ids)
        return completion_ids, logprobs

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._timed("logprobs", began)
        return found

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._timed("reward", began)
        self.seconds["reward_mean"] = float(rewards.mean())
        return rewards

    def _prepare_inputs(self, batch: Any) -> Any:
        inputs = super()._prepare_inputs(batch)
        self._update_began = time.perf_counter()
        return inputs

    def end_micro_batch(self) -> None:
        """Forward, backward and, with the last micro-batch, the optimizer are done."""
        self._timed("update", self._update_began)


class StepByStep(TrainerCallback):
    """A turn per optimizer step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.trainer: TimedTrainer | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.turns.next()
        self.trainer.begin_step()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.trainer.end_micro_batch()

    on_step_end = on_substep_end


def trainer_config(case: Case, spec: Spec) -> GRPOConfig:
    """The case in the peer's words."""
    peer = dict(case.peer)
    micro = peer.pop("rows_per_microbatch", case.samples)
    settings: dict[str, Any] = {
        "output_dir": str(Path(spec.work) / "peer"),
        "use_cpu": True,
        "bf16": case.bf16,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": spec.seed,
        "max_steps": spec.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": case.samples // micro,
        "num_generations": case.group,
        "num_iterations": 1,
        "max_completion_length": case.max_tokens,
        "shuffle_dataset": False,
        "temperature": 1.0,
        "learning_rate": case.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": case.warmup,
        "adam_beta1": case.betas[0],
        "adam_beta2": case.betas[1],
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "beta": case.kl_coef,
        "loss_type": "dapo",
        "use_bias_correction_kl": False,
        "model_init_kwargs": {"dtype": "float32"},
    }
    return GRPOConfig(**{**settings, **peer})


def load_reward(case: Case, spec: Spec) -> Any:
    """The shared reward function, from its file."""
    found = importlib.util.spec_from_file_location("shared_rewards", spec.rewards)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, case.reward)


def main() -> None:
    case, spec = read_spec(sys.argv[1])
    torch.set_num_threads(spec.threads)
    rows = [json.loads(line) for line in Path(spec.prompts).read_text().splitlines()]
    if case.chat:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    step_by_step = StepByStep(Turns())
    trainer = TimedTrainer(
        model=spec.model,
        reward_funcs=load_reward(case, spec),
        args=trainer_config(case, spec),
        train_dataset=Dataset.from_list(rows),
        callbacks=[step_by_step],
    )
    trainer.steps = []
    step_by_step.trainer = trainer
    if case.ragged:
        generate = trainer.model.generate
        given = trainer.given = GivenLengths(
            json.loads(Path(spec.lengths).read_text()), int(trainer.processing_class.eos_token_id)
        )
        trainer.model.generate = lambda *args, **kwargs: generate(
            *args, logits_processor=LogitsProcessorList([given]), **kwargs
        )
    trainer.train()
    step_by_step.turns.end({"steps": trainer.steps})


if __name__ == "__main__":
    main()
