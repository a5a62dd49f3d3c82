"""What the catalogue stores of a model besides its dimensions: names, published counts, and where they come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.cluster import Sourced
from planner.specs.model import ModelSpec


class PublishedParams(Spec):
    """Parameter counts as the release prints them; the computed ones are compared with these."""

    total: int = Field(gt=0)
    """Unique parameters without multi-token-prediction blocks, other towers included."""
    kind: Literal["exact", "rounded", "label"]
    """exact: integer count of the checkpoint; rounded: three or four printed digits; label: a figure as in the name."""
    unit: int = Field(default=0, ge=0)
    """Worth of the last printed digit of a label."""
    active: int | None = Field(default=None, gt=0)
    """Parameters one token touches; releases differ in whether embeddings count."""


class ModelEntry(Sourced):
    """One model of the catalogue."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    aliases: tuple[str, ...] = ()
    family: str
    spec: ModelSpec
    published: PublishedParams
