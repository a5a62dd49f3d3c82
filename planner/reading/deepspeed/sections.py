"""The sections of a DeepSpeed configuration, and the fate of keys that are gone or were spelt otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import InputError
from planner.reading.deepspeed import keys as known
from planner.reading.deepspeed.setup import Machines, Setup
from planner.reading.deepspeed.values import Notes, Section
from planner.reading.texts.lenient_json import Path


class Sections:
    """Every section, converted once; what the rest of the reader works on."""

    def __init__(
        self,
        config: Mapping[str, Any],
        arguments: Mapping[str, Any] | None,
        locate: Callable[[Path], str],
        setup: Setup,
        machines: Machines,
    ) -> None:
        if not isinstance(config, Mapping):
            raise InputError(
                "a DeepSpeed configuration is a JSON object",
                where=locate(()),
                got=type(config).__name__,
                hint="name the ds_config.json itself",
            )
        self.config, self.arguments, self.setup, self.machines = config, arguments, setup, machines
        self.notes = Notes(locate, _filled(arguments))
        self.notes.findings += [*setup.findings, *machines.findings]
        self.notes.unread += setup.unread
        removed = {key: value for key, value in config.items() if key not in known.REMOVED}
        self.top = Section(self.notes, removed, (), known.TOP, checked=False)
        self.zero = self._zero_section()
        self.optimizer_offload = self.section(self.zero, "offload_optimizer", known.OFFLOAD_OPTIMIZER, checked=True)
        self.parameter_offload = self.section(self.zero, "offload_param", known.OFFLOAD_PARAM, checked=True)
        self.tensor = self.section(self.top, "tensor_parallel", known.TENSOR_PARALLEL, checked=True)
        self.experts = self.section(self.top, "expert_parallel", known.EXPERT_PARALLEL, checked=False)
        self.pipeline = self.section(self.top, "pipeline", known.PIPELINE, checked=False)
        self.types = self.section(self.top, "data_types", known.DATA_TYPES, checked=False)
        self.fp16 = self.section(self.top, "fp16", known.FP16, checked=True)
        old = self.top.stated("bfloat16") and not self.top.stated("bf16")
        self.bf16 = self.section(self.top, "bfloat16" if old else "bf16", known.BF16, checked=True)

    def section(self, parent: Section, name: str, keys: Mapping[str, known.Key], *, checked: bool) -> Section:
        """The object under ``name``, empty where there is none."""
        raw = parent.values.get(name, {})
        return Section(self.notes, raw if isinstance(raw, Mapping) else {}, parent.at(name), keys, checked)

    def _zero_section(self) -> Section:
        """``zero_optimization``, also in the form of a bare boolean of the first versions."""
        raw = self.config.get("zero_optimization")
        if isinstance(raw, bool):
            # Section has called it no object; DeepSpeed still takes it for stage 1 or 0.
            here = self.notes.locate(("zero_optimization",))
            self.notes.findings = [finding for finding in self.notes.findings if finding.where != here]
            old_spelling(self.notes, ("zero_optimization",), f'{{"stage": {int(raw)}}}')
            raw = {"stage": int(raw)}
        raw = raw if isinstance(raw, Mapping) else {}
        keys = {**known.ZERO, **{name: known.ZERO[f"stage3_{name}"] for name in known.STAGE3_ALIASES}}
        hidden = (*known.REMOVED_ZERO, *known.LEGACY_UNKNOWN)
        return Section(
            self.notes, {k: v for k, v in raw.items() if k not in hidden}, ("zero_optimization",), keys, checked=True
        )


def check_keys(sections: Sections) -> None:
    """Findings for keys that are gone, old, or never were DeepSpeed's."""
    raw_zero = sections.config.get("zero_optimization")
    raw_zero = raw_zero if isinstance(raw_zero, Mapping) else {}
    for path, advice in [
        *(((key,), known.REMOVED[key]) for key in known.REMOVED if key in sections.config),
        *((("zero_optimization", key), known.REMOVED_ZERO[key]) for key in known.REMOVED_ZERO if key in raw_zero),
    ]:
        sections.notes.add(
            "removed-key",
            "error",
            f"{path[-1]} was removed from DeepSpeed; 0.19 stops with a DeepSpeedConfigError",
            path,
            hint=advice,
        )
    for key, today in known.LEGACY_UNKNOWN.items():
        if key in raw_zero:
            sections.notes.add(
                "unknown-key",
                "error",
                f"DeepSpeed refuses the unknown key {key!r} here, an old or foreign spelling",
                ("zero_optimization", key),
                hint=f"write {today}",
            )
    for key, today in known.LEGACY_ZERO.items():
        if key in raw_zero:
            old_spelling(sections.notes, ("zero_optimization", key), today)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old in raw_zero and raw_zero.get(new) is not None:
            sections.notes.add(
                "legacy-key",
                "error",
                f"{old} and {new} say the same thing; DeepSpeed refuses the two together",
                ("zero_optimization", old),
                hint=f"keep {new}",
            )
    if sections.top.stated("bfloat16"):
        old_spelling(sections.notes, ("bfloat16",), '"bf16"')


def old_spelling(notes: Notes, path: Path, today: str) -> None:
    """A spelling that still works, and the one that replaced it."""
    notes.add(
        "legacy-key",
        "warning",
        f"{path[-1]} is an old spelling that DeepSpeed 0.19 still takes, with a warning",
        path,
        hint=f"write {today}",
    )


def _filled(arguments: Mapping[str, Any] | None) -> dict[Path, Any]:
    """What each ``auto`` becomes; None where the model or the number of GPUs decides."""
    if arguments is None:
        return {}
    values = {**known.ARGUMENT_DEFAULTS, **{k: v for k, v in arguments.items() if v is not None}}
    filled: dict[Path, Any] = dict.fromkeys(known.AUTO_FILLED)
    for path, source in known.AUTO_FILLED.items():
        if source in values:
            filled[path] = values[source]
    return filled
