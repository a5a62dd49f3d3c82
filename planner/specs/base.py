"""The base class of every input and result: frozen, closed, and finite."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A frozen record that refuses unknown fields and numbers that JSON does not have."""

    # Numbers are finite: JSON has no others, and a figure that overflowed is wrong.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
