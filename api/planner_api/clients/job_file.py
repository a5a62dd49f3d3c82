"""``job.yaml``: what is trained on which machines, and what Slurm is told about the job.

Every field is checked before anything is planned or submitted; only ``slurm.setup`` is meant to be shell."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from planner.errors import InfeasibleError, InputError, PlannerError
from planner.service.inputs import read_mapping
from planner.service.models import FILE_SUFFIXES
from planner.service.profiles import load_profile
from planner.service.requests import ClusterInput, JobInput, PlanRequest, StatedModel
from planner.specs.base import Spec
from planner.specs.cluster_file import ClusterFile
from planner.specs.problems import input_error, shown
from planner.specs.profile import Profile
from planner_api.wording import in_fields, pointers_of

FROM_SLURM = "from-slurm"
WHERE = "job.yaml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:/@%+=&|!*()\[\]-]{0,1023}")
_TIME = re.compile(r"(?:[0-9]{1,5}-)?[0-9]{1,7}(?::[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OWN = ("HEAD_NODE", "HEAD_PORT", "NODE_RANK", "JOB_ID")
"""Variables that job.sbatch sets on every node."""


def _matching(pattern: re.Pattern[str], allowed: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"this cannot be handed to Slurm: {allowed} are")
        return value

    return AfterValidator(check)


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("this must be one line of printable text")
    return value


Name = Annotated[str, _matching(_NAME, "up to 64 letters, digits, dots, hyphens and underscores")]
Word = Annotated[str, _matching(_WORD, "a letter or digit first, no spaces, no quotes")]
Time = Annotated[str, _matching(_TIME, 'a time as "30" (minutes), "HH:MM:SS" or "D-HH:MM:SS", in quotes,')]
Line = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_one_line)]


class SlurmPart(Spec):
    """What Slurm is told beside what the plan decides (nodes, tasks, GPUs, cores, memory)."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time: Time | None = None
    """Time limit: minutes, HH:MM:SS or D-HH:MM:SS; in quotes, for YAML reads 12:00:00 as a number."""
    nodelist: Word | None = None
    exclude: Word | None = None
    constraint: Word | None = None
    """Features that nodes must have."""
    reservation: Word | None = None
    dependency: Word | None = None
    """For example ``afterok:1234``."""
    name: Name | None = None
    """Name of the job, and of its log; the plan's otherwise."""
    comment: Line | None = None
    script: Line | None = None
    """Training script of frameworks that have none of their own, from the folder of this file (TRAIN_SCRIPT)."""
    arguments: tuple[Line, ...] = ()
    """Further arguments of the training script."""
    environment: dict[str, Line] = Field(default_factory=dict)
    """Variables of the job, such as MEGATRON_PATH or DATA_PATH; no secrets: they are written beside the job."""
    setup: tuple[Line, ...] = ()
    """Shell lines that run first on the leading node: ``module load cuda/12.4``, ``source venv/bin/activate``."""

    @model_validator(mode="after")
    def _variables(self) -> SlurmPart:
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"environment: {name!r} is no name of a variable")
            if name in _OWN or name.startswith(("SLURM_", "SBATCH_")):
                raise ValueError(f"environment: {name} is set by the job itself")
        return self


class JobPart(Spec):
    """What is trained: the options of ``planner suggest``."""

    seq_len: int | None = None
    global_batch: int | str | None = None
    """Sequences of a step (512), or tokens with a suffix (4Mi)."""
    precision: str | None = None
    loss: str = "auto"
    flash_attention: bool = True
    objective: str = "throughput"
    memory_margin: float = 0.0


class ModelPart(Spec):
    """A model as data; one of the two is given."""

    config: dict[str, Any] | None = None
    dimensions: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one(self) -> ModelPart:
        if (self.config is None) == (self.dimensions is None):
            raise ValueError("a model has either config or dimensions")
        return self


class SlurmMachines(ClusterFile):
    """A cluster file, or with ``from: slurm`` what Slurm says of the partition; given fields win over it."""

    source: Literal["slurm"] | None = Field(default=None, alias="from")


class JobFile(Spec):
    """The content of a job.yaml."""

    model: str | ModelPart
    """Name of the catalogue, path to a config.json (or its folder) or a YAML of dimensions, or the same as data."""
    cluster: Literal["from-slurm"] | SlurmMachines
    job: JobPart = JobPart()
    backend: str = "auto"
    pins: dict[str, int | bool | str] = Field(default_factory=dict)
    profile: str | None = None
    """Machine profile that ``planner calibrate`` wrote, from the folder of this file."""
    rule_of_thumb: bool = False
    top: int = 5
    time_limit_s: float | None = None
    slurm: SlurmPart = SlurmPart()

    @property
    def reads_slurm(self) -> bool:
        """Whether the machines are what Slurm says."""
        return isinstance(self.cluster, str) or self.cluster.source == "slurm"

    @property
    def stated_machines(self) -> ClusterFile:
        """What the file itself says of the machines."""
        if isinstance(self.cluster, str):
            return ClusterFile()
        return ClusterFile(**self.cluster.model_dump(exclude={"source"}, exclude_none=True))


def load_job(path: Path) -> JobFile:
    """The content of a job.yaml; InputError names the field that cannot be used."""
    content = read_mapping(path, str(path))
    try:
        # Strict, for true is no number; as JSON, in which lists become tuples and YAML's dates are texts.
        return JobFile.model_validate_json(json.dumps(content, default=str), strict=True, by_alias=True, by_name=False)
    except ValidationError as problem:
        raise _told(problem, str(path)) from problem


_DATA = {"function-after[_one(), ModelPart]", "SlurmMachines"}
_BRANCHES = {*_DATA, "str", "int", "bool", f"literal['{FROM_SLURM}']"}
"""Names of a union's branches, which stand in the places of pydantic's complaints."""
_ALLOWED = {
    "model": "a name of the catalogue, a path, or a mapping with config or dimensions",
    "cluster": f"{FROM_SLURM}, or a mapping: gpu, gpus or nodes, ... (as a cluster file)",
    "pins": "a whole number, a word, true or false",
    "job": "a number of sequences (512), or of tokens with a suffix (4Mi)",
}
"""By part of the file, what a field of several kinds can be."""


def _told(problem: ValidationError, path: str) -> InputError:
    """The complaint about the branch that was meant: unions name every branch, and a mapping is never the word."""
    errors = problem.errors(include_url=False)
    first = errors[0]
    part = first["loc"][0] if first["loc"] else ""
    data = (error for error in errors if error["loc"][:1] == (part,) and _DATA & set(error["loc"]))
    meant = next(data, first) if isinstance(first.get("input"), dict) else first
    place = [step for step in meant["loc"] if step not in _BRANCHES]
    where = ".".join(map(str, place))
    if meant["loc"] and meant["loc"][-1] in _BRANCHES - _DATA:
        return InputError(
            "this is none of the things that can stand here",
            where=f"{path}: {where}",
            got=shown(first.get("input")),
            allowed=_ALLOWED[str(part)],
            hint=f"give {where} another value",
        )
    if part == "cluster" and meant["type"] == "extra_forbidden":
        return InputError(
            "this field does not exist",
            where=f"{path}: {where}",
            got=shown(meant.get("input")),
            allowed=", ".join(["from", *ClusterFile.model_fields]),
            hint=f"remove {where}",
        )
    again = InitErrorDetails(type=meant["type"], loc=tuple(place), input=meant["input"], ctx=meant.get("ctx", {}))
    return input_error(ValidationError.from_exception_data(problem.title, [again]), path, JobFile.model_fields)


def in_its_words(error: PlannerError, path: Path) -> PlannerError:
    """An error of the library, which speaks of options, in the fields of a job file; commands stay commands."""
    told = copy.copy(error)
    where = error.where or ""
    if where.startswith(f"{WHERE}:"):
        told.where = f"{path}{where.removeprefix(WHERE)}"
    elif fields := pointers_of(where):
        told.where = f"{path}: {', '.join(field.strip('/').replace('/', '.') for field in fields)}"
    told.message = _in_fields(error.message)
    told.hint = None if error.hint is None else _in_fields(error.hint)
    if isinstance(told, InfeasibleError):
        changes = told.details.get("relaxations", ())
        told.details = {**told.details, "relaxations": [_in_fields(text) for text in changes]}
    return told


def _in_fields(text: str) -> str:
    parts = re.split(r"(`planner [^`]*`)", text)
    return "".join(part if part.startswith("`planner ") else in_fields(part) for part in parts)


class Asked(Spec):
    """A job file with everything that it names read: the question, as the service and as the library take it."""

    file: JobFile
    model: str | ModelPart
    machines: ClusterFile
    profile: Profile | None

    def request(self) -> PlanRequest:
        """The question for a search on this machine."""
        part = self.model
        model = (
            StatedModel(name=part)
            if isinstance(part, str)
            else StatedModel(config=part.config, dimensions=part.dimensions)
        )
        return PlanRequest(
            model=model,
            cluster=ClusterInput(file=self.machines),
            job=JobInput(**self.file.job.model_dump()),
            backend=self.file.backend,
            pins=tuple(f"{name}={_pin(value)}" for name, value in self.file.pins.items()),
            profile=self.profile,
            rule_of_thumb=self.file.rule_of_thumb,
            top=self.file.top,
            time_limit_s=self.file.time_limit_s,
        )

    def body(self) -> dict[str, Any]:
        """The question as the body of ``POST /v1/plans``."""
        model = self.model if isinstance(self.model, str) else self.model.model_dump(exclude_none=True)
        return {
            "model": model,
            "cluster": self.machines.model_dump(exclude_none=True),
            "job": self.file.job.model_dump(exclude_none=True),
            "backend": self.file.backend,
            "pins": dict(self.file.pins),
            "top": self.file.top,
            "time_limit_s": self.file.time_limit_s,
            "rule_of_thumb": self.file.rule_of_thumb,
            "profile": None if self.profile is None else self.profile.model_dump(mode="json"),
        }


def asked(file: JobFile, folder: Path, machines: ClusterFile) -> Asked:
    """Reads model and profile that the file names, from ``folder``; ``machines`` is what is known of the cluster."""
    profile = None if file.profile is None else load_profile(folder / Path(file.profile).expanduser())
    return Asked(file=file, model=_model(file.model, folder), machines=machines, profile=profile)


def _model(given: str | ModelPart, folder: Path) -> str | ModelPart:
    """The model as data where the file names a path; names of the catalogue stay."""
    if not isinstance(given, str):
        return given
    if not given.lower().endswith(FILE_SUFFIXES) and not given.startswith((".", "/", "~")):
        return given
    path = folder / Path(given).expanduser()
    if path.suffix.lower() in (".yaml", ".yml"):
        return ModelPart(dimensions={"name": path.stem, **read_mapping(path, f"{WHERE}: model")})
    return ModelPart(config=read_mapping(path / "config.json" if path.is_dir() else path, f"{WHERE}: model"))


def _pin(value: int | bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
