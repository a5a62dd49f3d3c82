"""Slurm's own programs: what `scontrol` says of the machines, and `sbatch` with a plan's files.

Programs are started with argument lists, no shell reads anything of a job file but its ``setup`` lines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError, MissingExtraError
from planner.machines.hostlist import expand
from planner.render.launch_hosts import SLURM_FILE
from planner.service.machines import MachinesReading, read_text
from planner.specs.cluster_file import ClusterFile
from planner.specs.problems import shown
from planner.units import counted
from planner_api.clients.job_file import WHERE, JobFile, SlurmPart

SETUP_FILE = "setup.sh"
TIMEOUT_S = 120
"""A controller under load answers within a minute or not at all."""
_KEPT_BACK = ("PLANNER_TOKEN",)
"""Variables that the job has no use for: sbatch would hand the whole environment over."""
_OPTIONS = (
    *("partition", "account", "qos", "time", "nodelist", "exclude", "constraint", "reservation", "dependency"),
    "comment",
)
_JOB_ID = re.compile(r"^([0-9]{1,10})(?:;([A-Za-z0-9._-]+))?$", re.MULTILINE)
_NEEDED = re.compile(r"\$\{([A-Z_][A-Z0-9_]*):\?([^}]*)\}")
_SET_BY_JOB = ("HEAD_NODE", "HEAD_PORT", "NODE_RANK")
_JOB_NAME = re.compile(r"^#SBATCH --job-name=(\S+)$", re.MULTILINE)

_HINTS = (
    ("invalid partition", "`sinfo -s` lists the partitions: correct slurm.partition"),
    ("invalid account", "`sacctmgr show assoc user=$USER` lists your accounts: correct slurm.account or slurm.qos"),
    ("invalid qos", "`sacctmgr show qos` lists what there is: correct slurm.qos"),
    ("time limit", "`sinfo -o '%P %l'` shows the limits: lower slurm.time"),
    ("generic resource", "the nodes of this partition have no such GPUs: `sinfo -o '%P %G'` shows what they have"),
    ("node configuration is not available", "no node has what the plan asks for: `scontrol show node` against the "
     "#SBATCH lines of job.sbatch"),
    ("more processors", "no node has what the plan asks for: `sinfo -o '%P %D %c %m %G'` against the #SBATCH lines"),
    ("memory specification", "no node has that much memory: state host_memory_gib in cluster"),
    ("reservation", "`scontrol show reservation` lists what there is: correct slurm.reservation"),
    ("node name", "`sinfo -N` lists the nodes: correct slurm.nodelist or slurm.exclude"),
    ("feature specification", "`sinfo -o '%P %f'` lists the features: correct slurm.constraint"),
    ("unable to contact", "is the controller up? `scontrol ping` says so"),
    ("configuration source", "this is no login node of a Slurm cluster, or SLURM_CONF is not set"),
)  # fmt: skip


@dataclass(frozen=True)
class Submitted:
    """What sbatch answered."""

    job_id: int
    cluster: str | None = None
    """With several clusters, the one that took the job."""


def require(*programs: str) -> None:
    """Refuse to start where a program of Slurm is not there."""
    for name in programs:
        if shutil.which(name) is None:
            raise MissingExtraError(
                f"{name} is not here",
                where="slurm-submit",
                hint="run it on a login node of the cluster, or look at the job with --dry-run",
            )


def machines(job: JobFile) -> MachinesReading:
    """What Slurm says of the nodes that the job may get, with what the file states on top."""
    require("sinfo", "scontrol")
    stated = job.stated_machines
    hosts = job.slurm.nodelist or _partition_hosts(job.slurm.partition)
    if job.slurm.exclude is not None:
        left_out = set(expand(job.slurm.exclude, f"{WHERE}: slurm.exclude"))
        hosts = ",".join(host for host in expand(hosts, "sinfo") if host not in left_out)
    text = _said(["scontrol", "show", "node", hosts])
    # Nodes of the partition are counted unless the file says how many of them.
    reading = read_text(text, "slurm", stated.model_copy(update={"gpus": None}), "scontrol show node")
    if reading.problem is not None:
        raise reading.problem
    return reading


def stated_size(reading: MachinesReading, job: JobFile) -> ClusterFile:
    """The cluster of the reading, with the number of GPUs of the file in place of all nodes."""
    assert reading.cluster is not None  # noqa: S101 - machines() raises where there is none
    gpus = job.stated_machines.gpus
    return reading.cluster if gpus is None else reading.cluster.model_copy(update={"gpus": gpus, "nodes": None})


def _partition_hosts(partition: str | None) -> str:
    """The host list of a partition, the cluster's default one where none is named."""
    chosen = [f"--partition={partition}"] if partition else []
    lines = _said(["sinfo", "--noheader", "--format=%P %N", *chosen]).splitlines()
    rows = [words for words in (line.split() for line in lines) if len(words) == 2]
    default = [hosts for name, hosts in rows if name.endswith("*")]
    found = [hosts for _, hosts in rows] if partition or not default else default
    if not found:
        raise InputError(
            "Slurm knows no nodes there",
            where=f"{WHERE}: slurm.partition",
            got=shown(partition or "the default partition"),
            hint="`sinfo -s` lists the partitions",
        )
    return ",".join(found)


def options(part: SlurmPart) -> list[str]:
    """The options of sbatch that a job file adds to those of job.sbatch, each one word."""
    given = {name: getattr(part, name) for name in _OPTIONS}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return words + ([f"--job-name={part.name}"] if part.name is not None else [])


def command(part: SlurmPart) -> list[str]:
    """The whole command, to be run in the folder of the files."""
    return ["sbatch", "--parsable", "--export=ALL", *options(part), SLURM_FILE, *part.arguments]


def with_setup(files: Mapping[str, str], part: SlurmPart, folder: Path) -> dict[str, str]:
    """The files with ``setup.sh``, which job.sbatch reads first: variables and the lines of ``slurm.setup``.

    ``folder`` is that of the job file.  InputError where launch.sh needs a variable that nobody sets.
    """
    launch = files.get("launch.sh", "")
    exported = dict(part.environment)
    if part.script is not None:
        exported["TRAIN_SCRIPT"] = _script(part.script, folder, launch)
    _check_variables(launch, exported, part.setup)
    if not exported and not part.setup:
        return dict(files)
    if SETUP_FILE not in files.get(SLURM_FILE, ""):
        raise InputError(
            f"job.sbatch of this service does not read {SETUP_FILE}",
            where=f"{WHERE}: slurm",
            hint="plan without --server, or with a service of this version",
        )
    lines = [
        "# What slurm.environment and slurm.setup of the job file say; job.sbatch reads it before it starts the ranks.",
        *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
        *part.setup,
    ]
    return {**files, SETUP_FILE: "\n".join(lines) + "\n"}


def _script(given: str, folder: Path, launch: str) -> str:
    path = (folder / Path(given).expanduser()).absolute()
    where = f"{WHERE}: slurm.script"
    if "TRAIN_SCRIPT" not in launch:
        raise InputError(
            "this framework starts a training script of its own", where=where, got=shown(given), hint="leave it out"
        )
    if not path.is_file():
        raise InputError("there is no such file", where=where, got=shown(str(path)), hint="check the path")
    return str(path)


def _check_variables(launch: str, exported: Mapping[str, str], setup: Sequence[str]) -> None:
    for name, why in dict(_NEEDED.findall(launch)).items():
        known = name in exported or name in os.environ or any(name in line for line in setup)
        if not known and name not in _SET_BY_JOB:
            field = "script: train.py" if name == "TRAIN_SCRIPT" else f"environment: {{{name}: ...}}"
            raise InputError(f"launch.sh needs {name}: {why}", where=f"{WHERE}: slurm", hint=f"add to slurm: {field}")


def log_name(job_script: str, part: SlurmPart, job_id: int | str) -> str:
    """The file in the job's folder to which all ranks print."""
    found = _JOB_NAME.search(job_script)
    return f"{part.name or (found[1] if found else SLURM_FILE)}-{job_id}.log"


def submit(folder: Path, part: SlurmPart) -> Submitted:
    """Hand the files in ``folder`` to Slurm; InputError with its words and a hint where it refuses."""
    said = _said(command(part), folder=folder, after=by_hand(folder, part))
    found = _JOB_ID.search(said)
    if found is None:
        raise InputError(
            "sbatch did not print the number of a job", where="sbatch", got=shown(said), hint=unclear(folder, part)
        )
    return Submitted(int(found[1]), found[2])


def by_hand(folder: Path, part: SlurmPart) -> str:
    """Where the files are, and the command that submits them."""
    return f"the files are in {shlex.quote(str(folder))}: `{shlex.join(command(part))}` there submits them, too"


def unclear(folder: Path, part: SlurmPart) -> str:
    """What to do where nobody knows whether sbatch has handed the job over."""
    return f"`squeue --me` lists the job if there is one, otherwise {by_hand(folder, part)}"


def _said(words: Sequence[str], *, folder: Path | None = None, after: str = "") -> str:
    """What a program of Slurm prints; InputError where it fails, ``after`` is added to the hint."""
    left = {name: value for name, value in os.environ.items() if name not in _KEPT_BACK}
    try:
        done = subprocess.run(  # noqa: S603 - an argument list, every word of it checked by the job file
            list(words),
            cwd=folder,
            env=left,
            capture_output=True,
            # Sites print greetings in encodings of their own.
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as problem:
        raise InputError(
            f"{words[0]} did not answer within {counted(TIMEOUT_S, 'second')}",
            where=words[0],
            hint=_joined("is the controller up? `scontrol ping` says so", "`squeue --me` lists your jobs", after),
        ) from problem
    except OSError as problem:
        raise InputError(
            f"{words[0]} cannot be started: {problem.strerror}", where=words[0], hint=_joined("check its file", after)
        ) from problem
    if done.returncode:
        said = " ".join(done.stderr.split())[:400] or f"exit code {done.returncode}"
        hint = next((hint for mark, hint in _HINTS if mark in said.lower()), f"`man {words[0]}` explains the options")
        raise InputError(f"{words[0]} refused: {said}", where=words[0], hint=_joined(hint, after))
    return done.stdout


def _joined(*hints: str) -> str:
    return "; ".join(hint for hint in hints if hint)
