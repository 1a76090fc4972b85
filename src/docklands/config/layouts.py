"""Sections that say how training and generation are spread, and how weights go from the one to the other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from docklands.config.section import NonNegative, Positive, Section


class LayoutSection(Section):
    """How training is spread over processes: one for each rank; their number is the product of all but vpp, ep, etp."""

    dp: Positive = Field(default=1, description="replicas that see other rows")
    fsdp: Positive = Field(default=1, description="replicas that also share parameters and optimizer state (ZeRO-3)")
    tp: Positive = Field(default=1, description="ranks that split heads, feed-forward columns and vocabulary")
    sp: bool = Field(default=True, description="sequence parallel: tensor ranks hold other tokens between products")
    pp: Positive = Field(default=1, description="pipeline stages")
    vpp: Positive = Field(default=1, description="model chunks per stage, interleaved")
    cp: Positive = Field(default=1, description="ranks that split the tokens of a row")
    schedule: Literal["1f1b", "zero_bubble"] = Field(
        default="1f1b", description="of a pipeline; zero_bubble: weight gradients fill its gaps (not with fsdp)"
    )
    context: Literal["ulysses", "ring"] = Field(default="ulysses", description="how cp attends: heads or keys travel")
    ep: Positive = Field(default=1, description="ranks that hold different experts, out of a stage's")
    etp: Positive = Field(default=1, description="ranks that split one expert: 1 or tp")


class GenerationLayoutSection(Section):
    """How generation is spread over worker processes (tp x dp): by default whole models, one on each rank of training.
    Where there are no worker processes and nothing is set here, engines are in the driver.
    """

    dp: NonNegative = Field(default=0, description="replicas that generate other rows; 0: as many as there is room for")
    tp: Positive = Field(default=1, description="ranks that split heads, feed-forward columns and vocabulary")
    ep: Positive = Field(default=1, description="ranks that hold different experts, out of all replicas'")
    etp: Positive = Field(default=1, description="ranks that split one expert: 1 or tp")

    @property
    def spread(self) -> bool:
        """Whether anything is asked for."""
        return self != type(self)()


class SyncSection(Section):
    """Resharding flow: how weights get from the training layout to the generation layout."""

    method: Literal["auto", "minimal", "allgather_swap", "broadcast"] = Field(
        default="auto", description="auto: minimal; broadcast where generators have devices of their own"
    )
    transfer_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="of matrices on their way: auto, the generators' own; fp8, e4m3 with a scale for each 128 x 128 "
        "block, about half of the bytes (generators hold the rounded values: needs algorithm.correction)",
    )
    bucket_mib: float = Field(default=256.0, gt=0, description="most that a device sends or receives at once, in MiB")
    node_devices: Positive = Field(
        default=8, description="devices of a node: of several that hold a part, one on the receiver's node sends it"
    )
    swap: Literal["none", "host", "disk"] = Field(
        default="none",
        description="where training state waits while its device generates: pinned memory, or (CPU only) a file in "
        "TMPDIR",
    )
    gate: bool = Field(default=True, description="compare versions and checksums of all generators after each publish")
    probe_every: NonNegative = Field(
        default=0,
        description="versions between two comparisons of trainer and generator log-probs, which the first publish to a "
        "generator has too; 0: none, but that first one where an engine keeps weights of its own (vLLM)",
    )
    probe_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="largest difference in nats; null: 1e-4 in float32, 0.5 in bfloat16, 2 after a transfer in fp8",
    )

    @property
    def quantized(self) -> bool:
        """Whether weights change on their way."""
        return self.transfer_dtype == "fp8"
