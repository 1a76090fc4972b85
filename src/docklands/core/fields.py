"""Columns of the table: every name, dtype and shape that travels between stages.

Legend of `dims`:  ()  one value per sample
                   ("T",)  one value per token of TOKEN_IDS (the one alignment: entry t speaks of token t)
                   ("*",)  a ragged length of its own (a prompt before its response exists)
Trailing integers are fixed inner dimensions, e.g. ("T", 24, 8) for MoE router choices [T, layers, k].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

T = TypeVar("T")

DTYPES = frozenset(
    {
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "json",
    }
)


@dataclass(frozen=True)
class Field(Generic[T]):
    """A typed column. `dtype` is a torch dtype name, or "json" for one JSON value per sample."""

    name: str
    dtype: str
    dims: tuple[str | int, ...] = ()
    doc: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise TypeError(f"field {self.name}: dtype {self.dtype!r} is not one of {sorted(DTYPES)}")
        if self.dtype == "json" and self.dims:
            raise TypeError(f"field {self.name}: a json column has one value per sample, no dims")
        if self.dims and isinstance(self.dims[0], str) and self.dims[0] not in ("T", "*"):
            raise TypeError(f"field {self.name}: the first of dims is 'T', '*' or a size, not {self.dims[0]!r}")
        if any(not isinstance(dim, int) for dim in self.dims[1:]):
            raise TypeError(f"field {self.name}: only the first of dims may be 'T' or '*'")

    def __hash__(self) -> int:
        """Fields are keys everywhere, and a graph has one of a name."""
        return hash(self.name)

    @cached_property
    def is_token(self) -> bool:
        """One entry per token of TOKEN_IDS."""
        return bool(self.dims) and self.dims[0] == "T"

    @cached_property
    def is_ragged(self) -> bool:
        """Length differs from row to row."""
        return bool(self.dims) and self.dims[0] in ("T", "*")

    @cached_property
    def is_json(self) -> bool:
        return self.dtype == "json"

    @cached_property
    def inner_shape(self) -> tuple[int, ...]:
        """Fixed trailing dimensions."""
        rest = self.dims[1:] if self.is_ragged else self.dims
        return tuple(int(dim) for dim in rest)

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.dims))
        return f"{self.name}:{self.dtype}[{dims}]"


# Written at admission, one row per sample (the n samples of a prompt share GROUP_ID).
PROMPT_ID = Field("prompt_id", "int64", (), "stable id of the prompt in its data set, epoch included")
GROUP_ID = Field("group_id", "int64", (), "explicit id of the group; never derived from text")
SAMPLE_INDEX = Field("sample_index", "int32", (), "k: which of the n samples of its prompt")
PROMPT_TOKENS = Field("prompt_tokens", "int32", ("*",), "token ids of the rendered prompt")
PROMPT = Field("prompt", "json", (), "the data row: prompt (text or messages) and its other columns")

# Written by rollout.
TOKEN_IDS = Field("token_ids", "int32", ("T",), "prompt + response (+ observations), exactly as sampled")
LOSS_MASK = Field("loss_mask", "bool", ("T",), "True where the policy sampled the token")
ROLLOUT_LOGPROBS = Field("rollout_logprobs", "float32", ("T",), "mu: log-probs at sampling time, 0 off the mask")
WEIGHT_VERSIONS = Field("weight_versions", "int32", ("T",), "weight version that produced each token, -1 off the mask")
FINISH_REASON = Field("finish_reason", "int8", (), "FINISH_STOP, FINISH_LENGTH or FINISH_ABORT")
COMPLETION = Field("completion", "json", (), "the response as text (multi-turn: list of messages)")
ENV_REWARD = Field("env_reward", "float32", (), "what the environment itself paid over the episode")

# Written by the stages between rollout and update.
REWARD = Field("reward", "float32", (), "scalar reward of the sample")
REWARD_INFO = Field("reward_info", "json", (), "components and outcome of the reward, for people")
OLD_LOGPROBS = Field("old_logprobs", "float32", ("T",), "pi_old: the trainer's log-probs before the update")
REF_LOGPROBS = Field("ref_logprobs", "float32", ("T",), "pi_ref: the frozen reference's log-probs")
VALUES = Field("values", "float32", ("T",), "critic's value before token t is sampled")
SHAPED_REWARD = Field(
    "shaped_reward", "float32", (), "reward as trained on: after overlong penalty and KL in the reward"
)
ADVANTAGE = Field("advantage", "float32", (), "outcome advantage of the sample, the same for its tokens")
TOKEN_ADVANTAGES = Field("token_advantages", "float32", ("T",), "advantage per token (GAE)")
RETURNS = Field("returns", "float32", ("T",), "value target per token")

ROUTES = "routes"
"""Name of the column of router choices; its shape is the model's, see `routes_field`."""


def routes_field(layers: int, top_k: int) -> Field[Any]:
    """Experts that the generator chose, written by rollout: [T, layers with experts, experts of a token], -1 unknown.

    Entry t was chosen while token t was fed to the model, so a response's last token has none: it was never fed.
    """
    return Field(ROUTES, "int16", ("T", layers, top_k), "experts chosen when token t was fed; -1: not recorded")


def routes_in(fields: Iterable[Field[Any]]) -> Field[Any] | None:
    """The column of router choices among these; None: not recorded."""
    return next((field for field in fields if field.name == ROUTES), None)


FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = 0, 1, 2
FINISH_NAMES = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ABORT: "abort"}

ADMITTED: tuple[Field, ...] = (PROMPT_ID, GROUP_ID, SAMPLE_INDEX, PROMPT_TOKENS, PROMPT)
"""Columns every admitted row has from birth: the graph's sources."""
