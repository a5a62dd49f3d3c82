"""The base class of every input and result: frozen, closed, and documented by the sentence under each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A frozen record that refuses unknown fields; field docstrings become the descriptions of the JSON schema."""

    # Numbers are finite: JSON has no others, and a figure that overflowed is wrong.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
