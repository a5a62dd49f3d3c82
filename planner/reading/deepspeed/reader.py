"""DeepSpeed's ds_config.json in the planner's words, alone or with the Python constants and hosts that lie beside it.

Follows DeepSpeed 0.19.8: what it refuses, drops, ignores or converts becomes a finding.  Pipeline stages, Ulysses ranks
and recomputation have no key in JSON; they are read from a rendered ``parallel_setup.py`` where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, StatedStrategy
from planner.reading.deepspeed import keys as known
from planner.reading.deepspeed.batch import MICRO, Batch, read_batch
from planner.reading.deepspeed.checks import check_arguments, check_combinations, check_optimizer, read_habits
from planner.reading.deepspeed.degrees import Degrees, counted, implied, read_degrees, read_stage
from planner.reading.deepspeed.sections import Sections, check_keys
from planner.reading.deepspeed.setup import Machines, Setup, read_machines, read_setup
from planner.reading.deepspeed.states import read_offload, read_precision, read_recompute, read_secondary
from planner.reading.deepspeed.values import dotted, report_unfilled, shown
from planner.reading.texts.lenient_json import Departure, LenientDocument, Path, parse_lenient
from planner.specs.finding import Finding


def read_deepspeed(
    config: Mapping[str, Any], *, arguments: Mapping[str, Any] | None, where: str, gpus: int | None = None
) -> Configuration:
    """A DeepSpeed configuration that another file holds or names.

    ``arguments`` are the Hugging Face TrainingArguments that stand for ``auto`` (only those that are set; the others
    have their defaults), None where no Trainer is involved.  ``where`` leads every finding's place.  ``gpus`` is the
    number of processes, where it is known.
    """

    def locate(path: Path) -> str:
        return f"{where}: {dotted(path)}" if path else where

    return _configuration(Sections(config, arguments, locate, Setup(), Machines(gpus=gpus)))


class DeepSpeedReader:
    """``ds_config.json`` with what lies beside it."""

    name = "deepspeed-json"
    title = "DeepSpeed configuration (ds_config.json, with parallel_setup.py and hostfile where they are)"

    def recognises(self, files: Files) -> bool:
        return _configuration_file(files) is not None

    def read(self, files: Files) -> Configuration:
        name = _configuration_file(files)
        if name is None:
            name = next((name for name in sorted(files) if name.endswith((".json", ".jsonc", ".hjson"))), None)
        if name is None:
            raise InputError(
                "there is no JSON file among these",
                where=", ".join(sorted(files)),
                allowed="a ds_config.json",
                hint="name the ds_config.json, too",
            )
        document = parse_lenient(files[name], where=name)
        if not isinstance(document.value, Mapping):
            raise InputError(
                "a DeepSpeed configuration is a JSON object",
                where=name,
                got=type(document.value).__name__,
                allowed='{"train_micro_batch_size_per_gpu": 1, ...}',
                hint="name the ds_config.json itself",
            )

        def locate(path: Path) -> str:
            place = document.place(path)
            return f"{name}:{place.line if place else 1}" + (f": {dotted(path)}" if path else "")

        sections = Sections(document.value, None, locate, read_setup(files), read_machines(files))
        configuration = _configuration(sections)
        return replace(configuration, findings=(*_departures(name, document), *configuration.findings))


_MARKS = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
_MARK = re.compile(rf"""(?:^|[{{,])\s*["']?(?:{"|".join(_MARKS)})["']?\s*:""", re.M)
_WEAK_MARKS = frozenset(known.TOP) | frozenset(known.REMOVED)


def _configuration_file(files: Files) -> str | None:
    """The file that is a DeepSpeed configuration by its top-level keys, ds_config.json first."""
    for name in sorted(files, key=lambda name: (name.rsplit("/", 1)[-1] != "ds_config.json", name)):
        text = files[name].lstrip("\ufeff \t\r\n")
        if name.endswith((".py", ".sh", ".sbatch", ".md", ".yaml", ".yml", ".toml")) or text[:1] not in ("{", "/", "#"):
            continue
        try:
            value = parse_lenient(files[name], where=name).value
        except InputError:
            # A shell script may write such a file, but does not begin as one.
            if text[0] == "{" and _MARK.search(text):
                return name
            continue
        if isinstance(value, Mapping):
            keys = set(value)
            # A misspelt section still leaves the sizes and formats, which few other files combine.
            if keys & set(_MARKS) or len(keys & _WEAK_MARKS) >= max(2, len(keys) // 2 + 1):
                return name
    return None


_DEPARTURES: Mapping[str, tuple[str, str]] = {
    "comment": ("comments", "remove them"),
    "trailing-comma": ("a comma before a closing bracket", "remove the comma"),
    "missing-comma": ("a line that ends without its comma", "add the comma to the line before"),
    "single-quotes": ("single quotation marks", 'write "..."'),
    "bare-key": ("a key without quotation marks", 'write "key"'),
    "byte-order-mark": ("a byte order mark", "save the file as UTF-8 without it"),
    "python-literal": ("a Python literal", "write true, false or null"),
    "not-a-number": ("a number that is not finite", "write a finite number"),
    "repeated-key": ("a key that stands twice in one object", "keep one of them"),
}
_TAKEN_BY_HJSON = ("comment", "trailing-comma", "missing-comma", "single-quotes", "bare-key", "byte-order-mark")
"""DeepSpeed opens a path with hjson (runtime/config.py, DeepSpeedConfig), which takes these; json.load, with which
Hugging Face Trainer, accelerate and most scripts open it, takes none."""


def _departures(name: str, document: LenientDocument) -> list[Finding]:
    """One finding for each kind of departure from JSON, with the lines where it occurs."""
    kinds: dict[str, list[Departure]] = {}
    for departure in document.departures:
        kinds.setdefault(departure.kind, []).append(departure)
    findings = []
    for kind, places in kinds.items():
        what, hint = _DEPARTURES[kind]
        lines = list(dict.fromkeys(place.place.line for place in places))
        listed = ", ".join(map(str, lines[:10])) + (f" and {len(lines) - 10} more" if len(lines) > 10 else "")
        taken = kind in _TAKEN_BY_HJSON
        if taken:
            message = "DeepSpeed's own reader of a path takes it, json.load (HF Trainer, accelerate) refuses it"
        elif kind == "repeated-key":
            message = "DeepSpeed stops with a ValueError, json.load takes the last"
        else:
            message = "DeepSpeed's own reader takes the rest of the line for a text, or stops there"
        findings.append(
            Finding(
                id=f"json-{kind}",
                severity="warning" if taken else "error",
                message=f"not JSON: {what} ({shown(places[0].text)}) in line {listed}; {message}",
                where=f"{name}:{lines[0]}",
                allowed="standard JSON",
                hint=hint,
            )
        )
    return findings


def _configuration(sections: Sections) -> Configuration:
    notes = sections.notes
    check_keys(sections)
    stage = read_stage(sections)
    degrees = read_degrees(sections, stage)
    batch = read_batch(notes, sections.top, counted(degrees))
    degrees = implied(degrees, batch)
    precision = read_precision(sections, stage)
    strategy = _strategy(sections, stage, degrees, batch)
    check_combinations(sections, stage, degrees, precision)
    check_optimizer(sections)
    check_arguments(sections)
    habits = read_habits(sections, stage, degrees.pp, precision)
    report_unfilled(notes)
    tp, dp = strategy.tp, strategy.dp
    samples = batch.micro * batch.gas * dp if batch.micro and batch.gas and dp else None
    if samples is None and batch.train and (tp == 1 or (tp and batch.train % tp == 0)):
        samples = batch.train // tp
    attention = sections.setup.text("ATTENTION")
    return Configuration(
        format="DeepSpeed configuration" + (f" with {sections.setup.name}" if sections.setup.name else ""),
        backend="deepspeed",
        gpus=degrees.gpus,
        gpus_per_node=sections.machines.gpus_per_node,
        seq_len=sections.setup.number("SEQ_LEN"),
        global_batch=samples,
        precision=precision,
        flash_attention=None if attention in (None, "sdpa") else attention != "eager",
        strategy=strategy,
        habits=habits,
        findings=tuple(notes.findings),
        unread=tuple(dict.fromkeys(notes.unread)),
    )


def _strategy(sections: Sections, stage: int | None, degrees: Degrees, batch: Batch) -> StatedStrategy:
    pp, dp = degrees.pp, degrees.dp
    whole = dp * (degrees.cp or 1) if dp else None
    constant = sections.setup.number("MICRO_BATCH")
    if constant not in (None, batch.micro) and batch.micro is not None:
        sections.notes.add(
            "micro-batch-contradicts",
            "error",
            f"MICRO_BATCH({constant}) in {sections.setup.name} and {MICRO}({batch.micro}) differ",
            (MICRO,),
            hint="write the same number in both",
        )
    return StatedStrategy(
        tp=degrees.tp,
        sequence_parallel=False,
        cp=degrees.cp,
        pp=pp,
        vpp=1 if pp else None,
        pipeline_schedule=None if pp is None else "1f1b" if pp > 1 else "none",
        ep=degrees.ep,
        etp=degrees.etp,
        dp=dp,
        zero_stage=stage,
        shard_degree=1 if stage == 0 else whole if stage is not None else None,
        secondary_shard_degree=read_secondary(sections, stage),
        micro_batch=batch.micro,
        grad_accum=batch.gas,
        recompute=read_recompute(sections, pp),
        offload=read_offload(sections, stage),
    )
