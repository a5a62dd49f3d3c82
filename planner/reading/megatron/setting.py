"""What the checks of Megatron-LM arguments look at: what is stated, the degrees that it gives, and the environment.

A switch that a source does not show is neither on nor off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.reading.megatron.flags import Stated
from planner.specs.finding import Finding, Severity

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Setting:
    """What the checks look at."""

    stated: Stated
    tp: int
    cp: int
    pp: int
    dp: int | None
    environment: Mapping[str, str] | None
    """None where the source (a log) does not show it."""

    def on(self, name: str) -> bool:
        return bool(self.stated.values.get(name))

    def off(self, name: str) -> bool:
        """Known to be off."""
        return self.stated.switch(name) is False

    def given(self, name: str) -> bool:
        return name in self.stated.values

    @property
    def full_precision(self) -> bool:
        """Known to train in fp32."""
        narrow = self.on("bf16") or self.on("fp16")
        return not narrow and self.off("bf16") and (self.off("fp16") or not self.stated.complete)

    @property
    def sharded_framework(self) -> str:
        """Which FSDP runs, if one does."""
        if self.on("use-megatron-fsdp"):
            return "--use-megatron-fsdp"
        return "--use-torch-fsdp2" if self.on("use-torch-fsdp2") else ""


Check = Callable[[Setting], Finding | None]


def found(
    setting: Setting, name: str, severity: Severity, message: str, flags: tuple[str, ...], hint: str = ""
) -> Finding:
    """A finding at the first of ``flags`` that is stated."""
    return Finding(id=name, severity=severity, message=message, where=setting.stated.place(*flags), hint=hint)
