"""A cluster file in the making: which values are known, where each was read, and what there is to say about them.

The first value that is put stays, so that options go before texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from planner.specs.cluster_file import ClusterFile
from planner.specs.finding import Finding
from planner.specs.problems import input_error


@dataclass
class Facts:
    """A cluster file in the making."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Field -> what it was read from."""
    as_reference: list[str] = field(default_factory=list)
    """What was read and equals the reference system, which fills it in."""
    findings: list[Finding] = field(default_factory=list)

    def put(self, name: str, value: Any, origin: str) -> None:
        """Keep a value that is known; the first that is put stays."""
        if value is not None and name not in self.values:
            self.values[name] = value
            self.origins[name] = origin

    def file(self) -> ClusterFile:
        """The content, checked; InputError where a number is beyond what a cluster file takes."""
        try:
            return ClusterFile.model_validate(self.values, strict=True)
        except ValidationError as problem:
            raise input_error(problem, "cluster file", ClusterFile.model_fields) from problem
