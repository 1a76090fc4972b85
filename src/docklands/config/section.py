"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Strict and frozen: an unknown key is an error, a loaded config never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
