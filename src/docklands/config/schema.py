"""Every configuration key, with its default, its unit in its name or description, and its check.

No torch here: `docklands --help` and `docklands config` answer at once. Defaults follow what users of the field know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from docklands.config.fleet import FleetSection
from docklands.config.layouts import GenerationLayoutSection, LayoutSection, SyncSection
from docklands.config.limits import check_values
from docklands.config.lora import LoraSection
from docklands.config.section import Beta, Fraction, NonNegative, Positive, Section

Recompute = Annotated[
    Literal["none", "selective", "full"],
    BeforeValidator(lambda value: {True: "full", False: "none"}[value] if isinstance(value, bool) else value),
]


class RunSection(Section):
    """What a run is: its directory, its length, its seed."""

    name: str = Field(default="run", description="name of the run; part of the run directory's path")
    dir: str = Field(default="runs", description="parent of run directories; the run is written to <dir>/<name>")
    steps: Positive = Field(default=100, description="optimizer-visible steps: each trains prompts_per_step prompts")
    seed: int = Field(default=42, ge=0, lt=2**63, description="seed of data order, sampling and initialisation")
    threads: NonNegative = Field(default=0, description="CPU threads for torch; 0 keeps torch's own choice")
    device: Literal["auto", "cpu", "cuda", "npu"] = Field(default="auto", description="where engines run")
    watchdog_s: float = Field(
        default=1800.0, gt=0, description="seconds without progress after which the run stops itself"
    )


class ModelSection(Section):
    """The actor's starting weights."""

    path: str = Field(default="", description="Hugging Face directory (config.json, *.safetensors, tokenizer)")
    init: Literal["load", "random"] = Field(
        default="load", description="load: read the weights; random: config.json only"
    )
    tokenizer: str = Field(default="", description="tokenizer directory; empty: the model's")


class DataSection(Section):
    """Where prompts come from."""

    source: str = Field(
        default="",
        description="jsonl/json/parquet file, `datasets` directory, 'task:NAME', 'reasoning_gym:NAME', "
        "'demonstrations:NAME' (sft) or 'preferences:NAME' (dpo)",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of a task source (size, difficulty)")
    prompt_key: str = Field(default="prompt", description="key of the prompt in a row: text or a list of messages")
    system_prompt: str = Field(default="", description="system message put before every text prompt")
    chat: bool = Field(default=True, description="render prompts with the tokenizer's chat template")
    max_prompt_tokens: Positive = Field(default=1024, description="longest prompt, in tokens")
    overlong: Literal["error", "drop", "truncate_left"] = Field(
        default="error", description="what to do with a longer one"
    )
    shuffle: bool = Field(default=True, description="shuffle each epoch, keyed by (seed, epoch)")
    epochs: NonNegative = Field(default=0, description="passes over the data; 0: as many as the steps need")


class RolloutSection(Section):
    """How samples are generated."""

    prompts_per_step: Positive = Field(default=16, description="prompts (groups) trained per step")
    samples_per_prompt: Positive = Field(default=8, description="group size n")
    max_response_tokens: Positive = Field(default=512, description="longest response, in tokens, over all turns")
    min_response_tokens: NonNegative = Field(
        default=0, description="end-of-sequence is not sampled before this many tokens; for evaluation only"
    )
    temperature: float = Field(
        default=1.0, ge=0, description="sampling temperature; the trainer divides its logits by it too"
    )
    top_k: NonNegative = Field(default=0, description="0: off; other values are for evaluation only")
    top_p: float = Field(default=1.0, gt=0, le=1, description="1: off; other values are for evaluation only")
    stop: list[str] = Field(default_factory=list, description="extra stop strings that are single tokens")
    engine: Literal["native", "vllm"] = Field(
        default="native", description="generation engine; for vllm see docs/howto/vllm.md"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto: train.dtype")
    record_routes: bool | None = Field(
        default=None, description="keep which experts each token went to; null: when the trainer replays them"
    )
    max_batch: Positive = Field(default=256, description="sequences decoded at once (continuous batching refills)")
    kv_block_tokens: Positive = Field(default=32, description="tokens per KV-cache page")
    kv_cache_tokens: NonNegative = Field(default=0, description="KV-cache capacity in tokens; 0: sized for max_batch")
    partial_tokens: NonNegative = Field(
        default=0,
        description="tokens that one visit samples of a response; longer ones go on in a later visit, under newer "
        "weights (partial rollout; needs dock.max_staleness); 0: whole responses",
    )
    partial_kv: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="samples that go on in a later visit: computed again with the weights of then, or (one process and "
        "native engine, no environment) on the keys and values that they have, as in an update in flight",
    )
    sample_deadline_s: float = Field(default=600.0, gt=0, description="deadline of one rollout batch, in seconds")
    layout: GenerationLayoutSection = Field(
        default_factory=GenerationLayoutSection, description="processes of generation"
    )


class EnvSection(Section):
    """The environment of an episode."""

    name: str = Field(default="single_turn", description="single_turn, calculator, or module:attr")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment")
    max_turns: Positive = Field(default=1, description="model turns per episode at most")
    deadline_s: float = Field(default=60.0, gt=0, description="deadline of one reset or step, in seconds")
    max_error_fraction: Fraction = Field(
        default=0.5, description="run fails when more than this share of a window of episodes fails"
    )
    error_window: Positive = Field(default=256, description="episodes in that window")


class RewardItem(Section):
    """One reward function of the weighted sum."""

    name: str = Field(description="built-in name, module:attr, or path/to/file.py:attr")
    weight: float = Field(default=1.0, description="factor in the sum")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the reward")
    isolate: bool | None = Field(default=None, description="run in a killable process; null: as the reward itself says")


class RewardSection(Section):
    """How samples are scored."""

    functions: list[RewardItem] = Field(default_factory=list, description="weighted sum of these")
    deadline_s: float = Field(default=30.0, gt=0, description="hard deadline of one sample's reward, in seconds")
    max_error_fraction: Fraction = Field(
        default=0.5, description="run fails when more than this share of a window errs"
    )
    error_window: Positive = Field(default=256, description="samples in that window")
    workers: Positive = Field(default=1, description="processes for isolated rewards")


class KLSection(Section):
    """Distance to the reference policy. Off unless coef > 0."""

    coef: float = Field(default=0.0, ge=0, description="factor of the KL term")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimator of KL(pi || pi_ref)")
    where: Literal["loss", "reward"] = Field(
        default="loss", description="in the loss, or subtracted from token rewards"
    )
    target: float = Field(default=0.0, ge=0, description="adaptive KL controller's target; 0: fixed coefficient")
    horizon: Positive = Field(default=10000, description="adaptive controller's horizon, in samples")


class CorrectionSection(Section):
    """Off-policy correction for the rollout/trainer mismatch (pi_old / mu)."""

    mode: Literal["off", "token_tis", "sequence_tis", "token_mask", "sequence_mask"] = Field(
        default="off", description="truncated importance sampling, or masking, per token or per sequence"
    )
    max_ratio: float = Field(default=2.0, gt=0, description="truncation or upper mask bound")
    min_ratio: float = Field(default=0.0, ge=0, description="lower mask bound")


class AlgorithmSection(Section):
    """Which algorithm, and its numbers. Keys that the algorithm does not read must keep their defaults."""

    name: str = Field(
        default="grpo",
        description="grpo, dapo, ppo, dr_grpo, rloo, reinforce_pp, gspo, cispo, sft, dpo, distill or module:attr",
    )
    samples_per_update: NonNegative = Field(default=0, description="samples per optimizer update; 0: all of the step's")
    epochs_per_step: Positive = Field(default=1, description="passes over the step's samples")
    old_logprobs: Literal["auto", "recompute", "rollout", "current"] = Field(
        default="auto",
        description="pi_old: recomputed by the trainer, mu itself, or (one update per step) the current policy",
    )
    clip_low: float | None = Field(
        default=None, ge=0, le=1, description="1 - lower clip bound; null: the algorithm's own"
    )
    clip_high: float | None = Field(default=None, ge=0, description="upper clip bound - 1; null: the algorithm's own")
    dual_clip: float = Field(default=0.0, ge=0, description="lower bound of the loss for negative advantages; 0: off")
    aggregation: Literal["auto", "token_mean", "sequence_mean", "sequence_sum", "constant"] = Field(
        default="auto", description="how token losses become one number; auto: the algorithm's own"
    )
    normalize_std: bool | None = Field(
        default=None, description="divide group advantages by their std; null: algorithm's own"
    )
    entropy_coef: float = Field(default=0.0, description="entropy bonus")
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount")
    lam: float = Field(default=1.0, ge=0, le=1, description="GAE lambda")
    value_clip: float = Field(default=0.2, ge=0, description="PPO value clip range; 0: off")
    critic_warmup_steps: NonNegative = Field(default=0, description="first steps that train only the critic")
    filter_groups: bool | None = Field(
        default=None, description="drop groups whose rewards are all equal; null: algorithm's"
    )
    max_dropped_groups: Positive = Field(default=256, description="dropped groups per step after which the run stops")
    dpo_beta: float = Field(default=0.1, gt=0, description="DPO: how much a policy far from the reference is worth")
    overlong_buffer_tokens: NonNegative = Field(
        default=0, description="DAPO soft penalty: last tokens before the limit; 0: off"
    )
    overlong_penalty: float = Field(default=1.0, ge=0, description="DAPO soft penalty at the limit")
    kl: KLSection = Field(default_factory=KLSection, description="distance to the reference policy")
    correction: CorrectionSection = Field(default_factory=CorrectionSection, description="off-policy correction")


class OptimSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-6, ge=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW betas, each >= 0 and < 1")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled weight decay on matrices")
    grad_clip: float = Field(default=1.0, ge=0, description="global gradient norm; 0: off")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="after warm-up")
    warmup_updates: NonNegative = Field(default=0, description="optimizer updates of linear warm-up")
    min_lr_fraction: Fraction = Field(default=0.0, description="final lr / peak lr")
    offload: bool = Field(default=False, description="Adam's moments wait on the host between steps (CPU: in a file)")


class RouterSection(Section):
    """How experts are kept in use; both are off by default."""

    aux_loss_coef: float = Field(default=0.0, ge=0, description="factor of the load-balancing loss (0.001 is usual)")
    bias_update_rate: float = Field(
        default=0.0, ge=0, description="step of the balancing bias after each update; sigmoid routers only"
    )


class TrainSection(Section):
    """The train engine."""

    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="compute dtype; masters stay float32")
    tokens_per_microbatch: Positive = Field(default=8192, description="hard token budget of one forward/backward")
    share_prefix: bool = Field(default=True, description="compute the common prompt of a group once")
    recompute: Recompute = Field(
        default="none", description="in backward; selective: norms and activations; full: each block from its input"
    )
    activation_offload: bool = Field(
        default=False, description="what blocks keep for backward waits on the host (CPU: in a file)"
    )
    logprob_chunk_tokens: Positive = Field(default=1024, description="tokens whose logits exist at once")
    replay_routes: bool = Field(
        default=True, description="models with experts: the trainer uses the experts that the generator chose"
    )
    router: RouterSection = Field(default_factory=RouterSection, description="balance of experts")
    optim: OptimSection = Field(default_factory=OptimSection, description="optimizer")


class CriticSection(Section):
    """PPO's value model."""

    path: str = Field(default="", description="Hugging Face directory to start from; empty: the actor's")
    optim: OptimSection = Field(default_factory=lambda: OptimSection(lr=1e-5), description="optimizer")


class ReferenceSection(Section):
    """The frozen reference policy."""

    path: str = Field(default="", description="Hugging Face directory; empty: the actor's starting weights")


class DockSection(Section):
    """Sample flow."""

    max_staleness: NonNegative = Field(default=0, description="versions a sample may lag behind; 0: synchronous")
    transport: Literal["auto", "local", "processes"] = Field(
        default="auto",
        description="local: in the driver's process; processes: warehouses and control of their own; auto: processes "
        "when trainers or generators have worker processes",
    )
    durability: Literal["none", "wal", "replica"] = Field(
        default="none", description="when a warehouse process dies: make its rows anew, replay its log, or use its copy"
    )
    warehouses: NonNegative = Field(default=0, description="holders of the bytes, dealt round nodes; 0: one per node")
    capacity_mib: NonNegative = Field(default=0, description="capacity of one warehouse in MiB; 0: unbounded")
    spill_mib: NonNegative = Field(
        default=0, description="MiB on disk for what does not fit into capacity_mib, before producers wait; 0: none"
    )
    fsync: Literal["never", "interval", "always"] = Field(
        default="never", description="when logs are brought to disk: by the kernel, once a second, before each answer"
    )
    groups_per_take: NonNegative = Field(default=0, description="groups handed to a stage at once; 0: a whole step's")
    deterministic: bool = Field(default=True, description="hand rows out in admission order, not completion order")
    overtake: NonNegative = Field(
        default=0,
        description="updates in which younger whole groups may pass an unfinished one; 0: first in, first out",
    )
    lease_s: float = Field(
        default=600.0, gt=0, description="seconds after which an unacknowledged lease returns its rows"
    )
    wait_s: float = Field(default=1800.0, gt=0, description="deadline of every wait, in seconds")


class EvalSection(Section):
    """Held-out evaluation."""

    source: str = Field(default="", description="like data.source; empty: data.source's held-out split")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the source")
    prompts: NonNegative = Field(default=0, description="held-out prompts; 0: no evaluation")
    samples_per_prompt: Positive = Field(default=1, description="samples per prompt: mean@N, best@N, maj@N")
    temperature: float = Field(default=0.0, ge=0, description="0: greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus truncation in evaluation")
    every_steps: NonNegative = Field(default=0, description="evaluate every so many steps; 0: never in between")
    before: bool = Field(default=False, description="evaluate before the first step")
    after: bool = Field(default=False, description="evaluate after the last step")


class CheckpointSection(Section):
    """Saving and resuming."""

    every_steps: NonNegative = Field(
        default=0, description="save every so many steps; 0: only at the end and on Ctrl-C"
    )
    keep: Positive = Field(default=2, description="complete checkpoints kept")
    at_end: bool = Field(default=True, description="save after the last step")


class ObsSection(Section):
    """What is recorded."""

    tensorboard: bool = Field(default=False, description="write TensorBoard events")
    wandb: str = Field(default="", description="Weights & Biases project; empty: off")
    console: Literal["auto", "live", "plain", "off"] = Field(default="auto", description="live: redraws in a terminal")
    samples_per_step: NonNegative = Field(default=16, description="samples written to samples/step_*.jsonl")
    tokens_per_sample: NonNegative = Field(default=128, description="tokens of these told one by one (some 40 B each)")
    report: bool = Field(default=True, description="write report.html at the end")


class Config(Section):
    """The whole run."""

    run: RunSection = Field(default_factory=RunSection, description="directory, length, seed")
    model: ModelSection = Field(default_factory=ModelSection, description="the actor's starting weights")
    lora: LoraSection = Field(default_factory=LoraSection, description="low-rank adapters")
    data: DataSection = Field(default_factory=DataSection, description="prompts")
    env: EnvSection = Field(default_factory=EnvSection, description="environment")
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="generation")
    reward: RewardSection = Field(default_factory=RewardSection, description="scoring")
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection, description="algorithm")
    train: TrainSection = Field(default_factory=TrainSection, description="train engine")
    layout: LayoutSection = Field(default_factory=LayoutSection, description="processes of training")
    sync: SyncSection = Field(default_factory=SyncSection, description="from training to generation weights")
    critic: CriticSection = Field(default_factory=CriticSection, description="value model")
    reference: ReferenceSection = Field(default_factory=ReferenceSection, description="reference policy")
    dock: DockSection = Field(default_factory=DockSection, description="sample flow")
    fleet: FleetSection = Field(default_factory=FleetSection, description="processes and devices")
    eval: EvalSection = Field(default_factory=EvalSection, description="held-out evaluation")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="saving and resuming")
    obs: ObsSection = Field(default_factory=ObsSection, description="what is recorded")

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.algorithm.samples_per_update or self.samples_per_step

    @property
    def updates_per_step(self) -> int:
        return self.algorithm.epochs_per_step * -(-self.samples_per_step // self.samples_per_update)

    @property
    def training_ranks(self) -> int:
        """Ranks of the training layout."""
        x = self.layout
        return x.dp * x.fsdp * x.tp * x.pp * x.cp

    @property
    def has_workers(self) -> bool:
        """Engines live in worker processes, not in the driver."""
        return self.training_ranks > 1 or self.rollout.layout.spread or self.fleet.backend == "ray"

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @model_validator(mode="after")
    def check_arithmetic(self) -> Config:
        """Sizes that do not divide are refused here, with the sum shown (pitfall 32)."""
        check_values(self)
        n, u = self.samples_per_step, self.samples_per_update
        if n % u:
            p, g = self.rollout.prompts_per_step, self.rollout.samples_per_prompt
            raise ValueError(
                f"algorithm.samples_per_update: {p} prompts x {g} = {n} samples do not divide into updates of {u}"
            )
        if self.has_workers and self.dock.transport == "local":
            raise ValueError("dock.transport: local is out of reach of worker processes; leave it at auto")
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if longest > self.train.tokens_per_microbatch:
            raise ValueError(
                f"train.tokens_per_microbatch: {self.data.max_prompt_tokens} prompt + "
                f"{self.rollout.max_response_tokens} response = {longest} tokens do not fit into "
                f"{self.train.tokens_per_microbatch}"
            )
        return self
