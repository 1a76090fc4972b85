"""GRPO in one file: torch and transformers, no framework, no batching tricks. Read it top to bottom.

    python examples/grpo_single_file.py

trains a tiny random model, in under a minute on one CPU, to repeat the digit of its prompt. The arithmetic is plain
on purpose: one forward pass per response, Python loops, no padding. `train_on` trains on samples that were recorded
beforehand; Docklands is tested against it: same model, samples and settings must give the same losses.

Legend: S response tokens of one sample, V vocabulary.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM


@dataclass
class Sample:
    """One response to a prompt. logprobs: log p of each response token when it was sampled (not trained on)."""

    prompt: list[int]
    response: list[int]
    reward: float
    logprobs: list[float] | None = None


Group = list[Sample]
"""All samples of one prompt."""


@dataclass
class Settings:
    """Everything that changes the numbers."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    temperature: float = 1.0
    samples_per_update: int = 0  # 0: all samples of a step


# --- the two formulas ---------------------------------------------------------------------------------------------


def advantages(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / std over one group; all equal, or only one: 0."""
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) ** 0.5
    return [(r - mean) / std if std > 1e-6 else 0.0 for r in rewards]


def token_losses(now_S: Tensor, old_S: Tensor, ref_S: Tensor | None, advantage: float, settings: Settings) -> Tensor:
    """Clipped policy loss of each token, plus the KL term. now, old, ref: log-probs under the three policies."""
    ratio_S = (now_S - old_S).exp()
    clipped_S = ratio_S.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_S = -torch.minimum(ratio_S * advantage, clipped_S * advantage)
    if ref_S is not None:
        d_S = now_S - ref_S
        value_S = (-d_S).exp() - 1 + d_S  # k3: an estimate of KL(policy || reference) that is never negative
        gradient_S = d_S**2 / 2  # k2: the one whose gradient is, on average, that of the KL
        loss_S = loss_S + settings.kl_coef * (value_S.detach() + gradient_S - gradient_S.detach())
    return loss_S


def logprobs(model: torch.nn.Module, sample: Sample, temperature: float) -> Tensor:
    """log p of each response token given everything before it, [S]."""
    ids = torch.tensor([sample.prompt + sample.response])
    logits_SV = model(ids).logits[0, len(sample.prompt) - 1 : -1].float() / temperature
    chosen_S = torch.tensor(sample.response)
    return logits_SV.log_softmax(-1).gather(1, chosen_S[:, None])[:, 0]


# --- one step of training -----------------------------------------------------------------------------------------


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def train_step(
    groups: Sequence[Group],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    reference: torch.nn.Module | None = None,
) -> list[float]:
    """Train on one step's groups; the loss of each optimizer update."""
    samples = [sample for group in groups for sample in group]
    advantage = [a for group in groups for a in advantages([sample.reward for sample in group])]
    with torch.no_grad():  # the policies before the first update, and the reference
        old = [logprobs(model, sample, settings.temperature) for sample in samples]
        ref = [logprobs(reference, sample, settings.temperature) for sample in samples] if reference else None
    losses = []
    size = settings.samples_per_update or len(samples)
    for start in range(0, len(samples), size):
        update = range(start, min(start + size, len(samples)))
        tokens = sum(len(samples[i].response) for i in update)
        optimizer.zero_grad()
        total = 0.0
        for i in update:
            if not samples[i].response:
                continue
            now_S = logprobs(model, samples[i], settings.temperature)
            loss_S = token_losses(now_S, old[i], ref[i] if ref else None, advantage[i], settings)
            loss = loss_S.sum() / tokens  # one denominator for the whole update
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        losses.append(total)
    return losses


def train_on(steps: Sequence[Sequence[Group]], model: torch.nn.Module, settings: Settings) -> list[float]:
    """Train `model` in place on recorded samples, one list of groups a step; the loss of every update."""
    reference = copy.deepcopy(model).eval() if settings.kl_coef else None
    optimizer = make_optimizer(model, settings)
    return [loss for groups in steps for loss in train_step(groups, model, optimizer, settings, reference)]


# --- a task, a model, a loop --------------------------------------------------------------------------------------


@torch.no_grad()
def sample_group(
    model: torch.nn.Module, prompt: list[int], n: int, max_tokens: int, stop: int, temperature: float = 1.0
) -> list[Sample]:
    """n responses of at most max_tokens tokens; `stop` ends a response and is part of it. Rewards are still 0."""
    ids = torch.tensor([prompt] * n)
    chosen = torch.zeros(n, 0)
    for _ in range(max_tokens):
        log_p = (model(ids).logits[:, -1].float() / temperature).log_softmax(-1)
        token = torch.multinomial(log_p.exp(), 1)
        ids = torch.cat([ids, token], 1)
        chosen = torch.cat([chosen, log_p.gather(1, token)], 1)
    samples = []
    for row, log_p in zip(ids[:, len(prompt) :].tolist(), chosen.tolist()):
        length = row.index(stop) + 1 if stop in row else max_tokens
        samples.append(Sample(prompt, row[:length], 0.0, log_p[:length]))
    return samples


def tiny_model(seed: int = 0, vocabulary: int = 12, hidden: int = 48) -> Qwen2ForCausalLM:
    """A random Qwen2 with two layers, float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).float()


START, STOP = 10, 11


def repeat_reward(prompt: list[int], response: list[int], length: int = 4) -> float:
    """The share of `length` places that hold the prompt's digit; a stop token ends the answer."""
    return sum(token == prompt[0] for token in response[:length]) / length


def record(
    model: torch.nn.Module,
    prompts: Sequence[list[int]],
    n: int,
    reward: Callable[[list[int], list[int]], float],
    temperature: float = 1.0,
) -> list[Group]:
    """Sample and score one step's groups."""
    groups = [sample_group(model, prompt, n, 4, STOP, temperature) for prompt in prompts]
    for group in groups:
        for sample in group:
            sample.reward = reward(sample.prompt, sample.response)
    return groups


def main(steps: int = 40, prompts_per_step: int = 8, samples_per_prompt: int = 8, seed: int = 42) -> list[float]:
    """Train and print; the mean reward of each step."""
    model = tiny_model(seed)
    settings = Settings(lr=3e-3, samples_per_update=prompts_per_step * samples_per_prompt // 2)
    optimizer = make_optimizer(model, settings)
    digits = random.Random(seed)
    history = []
    for step in range(steps):
        prompts = [[digits.randrange(10), START] for _ in range(prompts_per_step)]
        groups = record(model, prompts, samples_per_prompt, repeat_reward, settings.temperature)
        rewards = [sample.reward for group in groups for sample in group]
        losses = train_step(groups, model, optimizer, settings)
        history.append(sum(rewards) / len(rewards))
        if step % 5 == 4 or step == 0:
            recent = history[-5:]
            print(f"step {step + 1:3d}/{steps}  reward {sum(recent) / len(recent):.2f}  loss {losses[0]:+.4f}")
    return history


if __name__ == "__main__":
    main()
