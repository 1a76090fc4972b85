"""The section that says where processes run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from docklands.config.section import NonNegative, Positive, Section


class FleetSection(Section):
    """Processes and devices."""

    rollout_workers: Positive = Field(default=1, description="generation engines that share the work")
    backend: Literal["local", "ray"] = Field(
        default="local", description="worker processes: on this machine, or wherever Ray places them"
    )
    placement: Literal["colocated", "disaggregated"] = Field(
        default="colocated",
        description="generators are the trainers' processes, in turns; or have processes of their own",
    )
    publish: Literal["in_flight", "drain"] = Field(
        default="in_flight",
        description="disaggregated: samples under way go on under new weights, or end before these are published",
    )
    heartbeat_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds without a sign of life after which a worker process counts as dead; 0: never",
    )
    max_restarts: NonNegative = Field(
        default=1,
        description="times in any 100 steps that a lost generator is started again, and that another lost process "
        "sends the run back to its last checkpoint",
    )
    ray_address: str = Field(
        default="", description="running Ray to join; empty: RAY_ADDRESS, else this machine's, else a new one"
    )
    ray_resource: str = Field(
        default="", description="Ray resource that a worker takes one of; empty: GPU or NPU on those devices, else CPU"
    )
    ray_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="how Ray places workers on nodes"
    )
