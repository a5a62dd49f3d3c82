"""The rendered FSDP2 module ``parallelize.py``, as it was written or with its constants edited; it is never executed.

Its capitalised constants hold the plan; the example script beside it holds the model's dimensions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, StatedStrategy, product
from planner.reading.texts.launch_scripts import processes_per_node, wrong_world_size
from planner.reading.texts.python_module import assignment, literals, parse_python
from planner.specs.finding import Finding, Severity
from planner.specs.job import Precision
from planner.specs.model import ModelSpec
from planner.specs.strategy import Offload, Recompute

DEGREES = ("DP_REPLICATE", "DP_SHARD", "CP", "TP")
COUNTS = (*DEGREES, "SEQ_LEN", "MICRO_BATCH", "GRAD_ACCUM")
SWITCHES = ("SEQUENCE_PARALLEL", "LOSS_PARALLEL", "RESHARD_AFTER_FORWARD", "CPU_OFFLOAD")
NAMES = (*COUNTS, *SWITCHES, "PRECISION", "RECOMPUTE", "RECOMPUTE_LAYERS")
"""Every constant of the module."""

PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp8": "fp8", "fp16": "fp16", "fp32": "fp32"}
SELECTIVE = Recompute(mode="selective", modules=("attention", "every-second-matmul"))
"""What the module's policy keeps, in the names of the backend."""

MAX_NUMBER = 10**12
"""Larger constants are no counts of anything here."""


class UnknownValueError(Exception):
    """An expression whose value cannot be told without running it."""


@dataclass
class Module:
    """The constants of a module and what is wrong with them."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def find(
        self, finding: str, severity: Severity, message: str, constant: str, *, allowed: str = "", hint: str = ""
    ) -> None:
        self.findings.append(
            Finding(
                id=finding,
                severity=severity,
                message=message,
                where=self.where(constant),
                allowed=allowed,
                hint=hint,
            )
        )

    def where(self, constant: str) -> str:
        """``file:line`` of its assignment."""
        line = self.lines.get(constant)
        return f"{self.name}:{line}" if line else self.name

    def count(self, name: str) -> int | None:
        """A whole number from 1 on; None with a finding where it is something else."""
        value = self.values.get(name)
        if value is None:
            if name in self.values:
                self.find("wrong-type", "error", f"{name} is None", name, allowed="a whole number from 1 on")
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
            self.find("wrong-type", "error", f"{name} is {_shown(value)}", name, allowed="a whole number from 1 on")
            return None
        return value

    def switch(self, name: str) -> bool | None:
        """True or False; None with a finding where it is something else."""
        value = self.values.get(name)
        if isinstance(value, bool) or name not in self.values:
            return value
        self.find("wrong-type", "error", f"{name} is {_shown(value)}", name, allowed="True or False")
        return None


def _shown(value: Any) -> str:
    return repr(value)[:60]


class FsdpModuleReader:
    """``parallelize.py`` as this planner writes it."""

    name = "fsdp-module"
    title = "FSDP2 module (parallelize.py as written by this planner)"

    def recognises(self, files: Files) -> bool:
        return _chosen(files) is not None

    def read(self, files: Files) -> Configuration:
        name = _chosen(files) or next((name for name in files if name.endswith(".py")), None)
        if name is None:
            raise InputError("there is no Python module to read", where="files", hint="give parallelize.py")
        module = read_constants(name, files[name])
        missing = [constant for constant in NAMES if constant not in module.lines]
        if len(missing) == len(NAMES):
            raise InputError(
                "none of the constants of a written parallelize.py is here",
                where=name,
                allowed=", ".join(NAMES),
                hint="render a plan for fsdp to see the module",
            )
        for constant in missing:
            module.find("missing-constant", "error", f"{constant} is not assigned; the module needs it", constant)
        return _configuration(module, files)


def _chosen(files: Files) -> str | None:
    """The first module that assigns the degrees and calls fully_shard."""
    for name, text in files.items():
        if not name.endswith(".py") or "fully_shard" not in text:
            continue
        if all(re.search(rf"^{degree}\b[^=\n]*=", text, re.MULTILINE) for degree in DEGREES):
            return name
    return None


def read_constants(name: str, text: str) -> Module:
    """The module's constants; InputError with the line where it is no Python."""
    module = Module(name)
    tree = parse_python(name, text)
    for statement in tree.body:
        target, value = assignment(statement)
        if target not in NAMES:
            _changed_elsewhere(module, statement)
            continue
        if target in module.lines:
            module.find("assigned-twice", "warning", f"{target} is assigned twice; the last value counts", target)
        module.lines[target] = statement.lineno
        module.values.pop(target, None)
        if target in module.unread:
            module.unread.remove(target)
        try:
            module.values[target] = _value(value, module.values)
        except UnknownValueError:
            module.unread.append(target)
    return module


def _changed_elsewhere(module: Module, statement: ast.stmt) -> None:
    """A constant that is set in a branch, a loop, a tuple, by ``*=`` or by ``global`` has no value that can be read."""
    local = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    shared = {name for node in ast.walk(statement) if isinstance(node, ast.Global) for name in node.names}
    for node in ast.walk(statement):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del) and node.id in NAMES
        if isinstance(node, ast.Name) and stored and (not local or node.id in shared):
            module.lines[node.id] = node.lineno
            module.values.pop(node.id, None)
            if node.id not in module.unread:
                module.unread.append(node.id)


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """The value of a literal, of arithmetic on whole numbers, or of an earlier constant."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.UnaryOp):
        return _unary(node, known)
    if isinstance(node, ast.BinOp):
        return _binary(_value(node.left, known), node.op, _value(node.right, known))
    raise UnknownValueError


def _unary(node: ast.UnaryOp, known: Mapping[str, Any]) -> Any:
    value = _value(node.operand, known)
    if isinstance(node.op, ast.Not):
        return not value
    if isinstance(node.op, ast.USub) and isinstance(value, int):
        return -value
    raise UnknownValueError


def _binary(left: Any, operator: ast.operator, right: Any) -> int:
    """Sums, products, quotients and powers of two numbers of a sensible size."""
    if not all(isinstance(side, int) and abs(side) <= MAX_NUMBER for side in (left, right)):
        raise UnknownValueError
    if isinstance(operator, ast.Add):
        return int(left + right)
    if isinstance(operator, ast.Sub):
        return int(left - right)
    if isinstance(operator, ast.Mult):
        return int(left * right)
    if isinstance(operator, ast.FloorDiv) and right:
        return int(left // right)
    if isinstance(operator, ast.Pow) and 0 <= right <= 40 and abs(left) <= 2**10:
        return int(left**right)
    raise UnknownValueError


def _configuration(module: Module, files: Files) -> Configuration:
    counts = {name: module.count(name) for name in COUNTS}
    switches = {name: module.switch(name) for name in SWITCHES}
    replicate, shard, cp, tp = (counts[name] for name in DEGREES)
    dp = product(replicate, shard)
    stage, degree = _sharding(switches, shard, cp)
    model = _model(module, files)
    gpus = product(dp, cp, tp)
    return Configuration(
        format=FsdpModuleReader.title,
        backend="fsdp",
        model=model,
        gpus=gpus,
        gpus_per_node=processes_per_node(files),
        seq_len=counts["SEQ_LEN"],
        global_batch=product(dp, counts["MICRO_BATCH"], counts["GRAD_ACCUM"]),
        precision=_precision(module),
        loss="eager",
        flash_attention=True,
        strategy=StatedStrategy(
            tp=tp,
            sequence_parallel=_sequence_parallel(module, switches, tp),
            cp=cp,
            pp=1,
            vpp=1,
            pipeline_schedule="none",
            layers_per_stage=None if model is None else (model.layers,),
            ep=1,
            etp=1,
            dp=dp,
            zero_stage=stage,
            shard_degree=degree,
            micro_batch=counts["MICRO_BATCH"],
            grad_accum=counts["GRAD_ACCUM"],
            recompute=_recompute(module, model),
            offload=_offload(switches),
        ),
        habits=_habits(module, switches, tp),
        findings=(*module.findings, *wrong_world_size(files, " * ".join(DEGREES), gpus, module.where("TP"))),
        unread=tuple(module.unread),
    )


def _sharding(switches: Mapping[str, bool | None], shard: int | None, cp: int | None) -> tuple[int | None, int | None]:
    """(ZeRO stage, shard degree): freed weights are stage 3, kept ones stage 2, a group of one GPU is replication."""
    degree = product(shard, cp)
    freed = switches["RESHARD_AFTER_FORWARD"]
    if freed is None or degree is None:
        return None, degree
    if freed:
        return 3, degree
    if degree == 1 and switches["CPU_OFFLOAD"] is not True:
        return 0, 1
    return 2, degree


def _sequence_parallel(module: Module, switches: Mapping[str, bool | None], tp: int | None) -> bool | None:
    stated = switches["SEQUENCE_PARALLEL"]
    if tp == 1 and stated:
        module.find(
            "sequence-parallel-needs-tp",
            "note",
            "SEQUENCE_PARALLEL does nothing with TP = 1",
            "SEQUENCE_PARALLEL",
            allowed="False, or TP above 1",
        )
        return False
    return stated


def _habits(module: Module, switches: Mapping[str, bool | None], tp: int | None) -> dict[str, Any]:
    """A whole loss where a plan would split it."""
    stated = switches["LOSS_PARALLEL"]
    if tp == 1 and stated:
        module.find(
            "loss-parallel-needs-tp",
            "note",
            "LOSS_PARALLEL does nothing with TP = 1: the logits are whole on every rank",
            "LOSS_PARALLEL",
            allowed="False, or TP above 1",
        )
    return {"loss_vocab_parallel": False} if tp is not None and tp > 1 and stated is False else {}


def _precision(module: Module) -> Precision | None:
    value = module.values.get("PRECISION")
    if isinstance(value, str) and value in PRECISIONS:
        return PRECISIONS[value]
    if "PRECISION" in module.values:
        module.find(
            "precision", "error", f"PRECISION is {_shown(value)}", "PRECISION", allowed=", ".join(sorted(PRECISIONS))
        )
    return None


def _recompute(module: Module, model: ModelSpec | None) -> Recompute | None:
    mode = module.values.get("RECOMPUTE")
    if "RECOMPUTE" not in module.values:
        return None
    if mode not in ("none", "selective", "full"):
        module.find(
            "recompute-mode",
            "error",
            f"RECOMPUTE is {_shown(mode)}, which the module takes for full",
            "RECOMPUTE",
            allowed="none, selective, full",
        )
        return None
    layers = _recomputed_layers(module, model)
    if mode == "none":
        return Recompute()
    if mode == "selective":
        if layers is not None:
            module.unread.append("RECOMPUTE_LAYERS (selective recomputation is modelled for all blocks)")
        return SELECTIVE
    if "RECOMPUTE_LAYERS" in module.unread:
        return None
    return Recompute(mode="full", layers_per_stage=None if layers is None else (layers,))


def _recomputed_layers(module: Module, model: ModelSpec | None) -> int | None:
    """Blocks that recompute; None: all."""
    if module.values.get("RECOMPUTE_LAYERS") is None:
        return None
    layers = module.count("RECOMPUTE_LAYERS")
    if layers is not None and model is not None and layers > model.layers:
        module.find(
            "recompute-layers",
            "error",
            f"RECOMPUTE_LAYERS is {layers}, but the model has {model.layers} blocks",
            "RECOMPUTE_LAYERS",
            allowed=f"1 to {model.layers}, or None for all",
        )
        return None
    return layers


def _offload(switches: Mapping[str, bool | None]) -> Offload | None:
    stated = switches["CPU_OFFLOAD"]
    if stated is None:
        return None
    return Offload(optimizer=1.0, parameters="cpu", device="cpu") if stated else Offload()


def _model(module: Module, files: Files) -> ModelSpec | None:
    """The dimensions that the example script beside the module builds."""
    for name, text in files.items():
        if not name.endswith(".py") or name == module.name or "DIMENSIONS" not in text:
            continue
        try:
            found = literals(parse_python(name, text))
        except InputError:
            continue
        size = found.get("DIMENSIONS")
        if not isinstance(size, dict):
            continue
        try:
            return ModelSpec(
                name="example model",
                max_seq=max(module.values.get("SEQ_LEN") or 1, 1),
                tied=found.get("TIED") is True,
                **size,
            )
        except (ValidationError, TypeError):
            module.unread.append(f"{name}: DIMENSIONS")
    return None
