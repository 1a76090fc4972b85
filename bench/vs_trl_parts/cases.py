"""What both sides train: model directory, prompts, lengths and settings, written once and read by each.

Legend: P prompts of a step, G samples of a prompt.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One comparison.

    lr, betas, warmup   AdamW; weight decay 0.01 and gradient norm 1.0 on both sides
    kl_coef             coefficient of the k3 term to a frozen copy of the starting weights; 0: no reference
    ragged              every sample's length is given, and the end-of-sequence token is held back until then
    bf16                autocast of both trainers, over float32 master weights
    peer, ours          further settings of each side: the fastest found, see docs/benchmarks.md
    """

    name: str
    prompts: int
    group: int
    max_tokens: int
    lr: float
    reward: str
    betas: tuple[float, float] = (0.9, 0.99)
    warmup: int = 2
    kl_coef: float = 0.0
    ragged: bool = False
    bf16: bool = False
    chat: bool = False
    peer: dict[str, Any] = field(default_factory=dict)
    ours: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts * self.group


CASES = {
    "quickstart": Case("quickstart", 8, 8, 12, 2e-5, "first_number_right", bf16=True, chat=True),
    "ragged": Case(
        "ragged",
        16,
        8,
        256,
        2e-4,
        "digit_share",
        kl_coef=0.001,
        ragged=True,
        bf16=True,
        ours=("rollout.dtype=float32",),
    ),
}
MEAN_TOKENS, SIGMA = 48.0, 0.8


@dataclass(frozen=True)
class Spec:
    """A case made concrete: what a side's process is told, as a JSON file."""

    case: dict[str, Any]
    model: str
    prompts: str
    lengths: str
    rewards: str
    work: str
    steps: int
    threads: int
    seed: int

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


def read_spec(path: str) -> tuple[Case, Spec]:
    """The file that `Spec.write` made."""
    spec = Spec(**json.loads(Path(path).read_text()))
    lists = {name: tuple(value) for name, value in spec.case.items() if isinstance(value, list)}
    return Case(**{**spec.case, **lists}), spec


def prepare(case: Case, work: Path, steps: int, threads: int, seed: int) -> Spec:
    """Write prompts, lengths and, for the tiny model, weights and tokenizer under `work`."""
    work.mkdir(parents=True, exist_ok=True)
    count = case.prompts * steps
    if case.ragged:
        model, rows = write_tiny_model(work / "model", seed), tiny_prompts(count, seed)
    else:
        model, rows = quickstart_model(), quickstart_prompts(count)
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = work / "lengths.json"
    lengths.write_text(json.dumps(ragged_lengths(case.samples * steps, case.max_tokens, seed).tolist()))
    rewards = str(Path(__file__).with_name("rewards.py"))
    return Spec(asdict(case), str(model), str(prompts), str(lengths), rewards, str(work), steps, threads, seed)


def ragged_lengths(count: int, most: int, seed: int) -> np.ndarray:
    """Log-normal response lengths with a mean near 48 tokens, from 2 to `most`."""
    mu = np.log(MEAN_TOKENS) - SIGMA**2 / 2
    drawn = np.random.Generator(np.random.PCG64(seed)).lognormal(mu, SIGMA, count)
    return np.clip(drawn.round(), 2, most).astype(int)


def quickstart_model() -> Path:
    """The imported SmolLM2-135M-Instruct."""
    from docklands.config.paths import resolve_model_path

    return resolve_model_path("cache:SmolLM2-135M-Instruct").resolve()


def quickstart_prompts(count: int) -> list[dict[str, str]]:
    """The quick start's task, its first `count` training rows."""
    from docklands.data.tasks import larger_number

    rows = larger_number()[0][:count]
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]


def tiny_prompts(count: int, seed: int) -> list[dict[str, str]]:
    """Six digits to sort, as in mix6."""
    digits = np.random.Generator(np.random.PCG64(seed + 1)).integers(0, 10, (count, 6))
    return [{"prompt": "".join(map(str, row)) + "=", "answer": ""} for row in digits.tolist()]


def write_tiny_model(path: Path, seed: int) -> Path:
    """Qwen2, hidden 128 x 3 layers, 32 tokens of one character each, random weights; as a Hugging Face directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = "0123456789=+,<>abcdefghijklmno"
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path
