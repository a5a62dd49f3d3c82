"""Machine profiles: read from a file, checked against the cluster, and put into the surroundings of a cost question."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

from pydantic import ValidationError

from planner.accuracy.fits.profiled import profiled
from planner.backends import get_backend
from planner.cost.constants import Constants
from planner.cost.context import CostContext
from planner.errors import InputError
from planner.service.inputs import read_mapping
from planner.specs.cluster import Cluster
from planner.specs.plan import Assumption, Request
from planner.specs.problems import input_error, shown
from planner.specs.profile import PROFILE_SCHEMA_VERSION, Profile
from planner.units import counted

WHERE = "--profile"
MOST_FACTORS = 7
"""Factors that an answer lists; the profile has them all."""
_HINT = (
    "write one with `planner calibrate --from-records FILE --out PROFILE.yaml`, or with --on-this-machine in place of "
    "the records"
)


def load_profile(path: Path) -> Profile:
    """The profile of a YAML file."""
    content = read_mapping(path, WHERE)
    _check_version(content.get("schema_version"), str(path))
    try:
        profile = Profile.model_validate(content)
    except ValidationError as problem:
        raise input_error(problem, str(path), Profile.model_fields) from problem
    check_profile(profile, str(path))
    return profile


def check_profile(profile: Profile, where: str) -> None:
    """Refuse a profile that this cost model cannot apply, wherever it comes from."""
    _check_version(profile.schema_version, where)
    known = {field.name for field in fields(Constants)}
    for name in profile.factors:
        if name not in known:
            raise InputError(
                "the cost model has no such constant",
                where=f"{where}: factors",
                got=shown(name),
                allowed=", ".join(sorted(known)),
                hint="the profile is of another version: calibrate again",
            )


def _check_version(version: object, where: str) -> None:
    if version != PROFILE_SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            "this is not a machine profile of this version",
            where=f"{where}: schema_version",
            got=shown(version),
            allowed=str(PROFILE_SCHEMA_VERSION),
            hint=_HINT,
        )


def profile_for(given: Path | Profile, cluster: Cluster) -> Profile:
    """The profile (of a file), which must be of the cluster's accelerator."""
    profile = load_profile(given) if isinstance(given, Path) else given
    if isinstance(given, Profile):
        check_profile(given, "profile")
    if profile.accelerator != cluster.accelerator.id:
        raise InputError(
            "the profile is of another accelerator",
            where=WHERE,
            got=shown(profile.accelerator) if isinstance(given, Profile) else f"{given}: {shown(profile.accelerator)}",
            allowed=cluster.accelerator.id,
            hint="leave out --profile, or calibrate with runs on this accelerator",
        )
    return profile


def profile_assumption(profile: Profile) -> Assumption:
    """What the profile changes, in the words of the answer."""
    why = f"machine profile of {profile.created} from {counted(len(profile.runs), 'run')} of {profile.framework}"
    if profile.measurements:
        why = _measured(profile)
    if _describes(profile):
        changes = [(factor.name, factor.factor) for factor in profile.fitted]
        if profile.measurements:
            changes.sort(key=_size, reverse=True)
    else:
        why += ", edited by hand"
        named = [*profile.factors.items(), ("memory", profile.memory_factor)]
        changes = sorted(((name, factor) for name, factor in named if factor != 1.0), key=_size, reverse=True)
    value = ", ".join(f"{name} x {factor:.3g}" for name, factor in changes[:MOST_FACTORS])
    more = f", and {len(changes) - MOST_FACTORS} more" if len(changes) > MOST_FACTORS else ""
    return Assumption(field="constants.factors", value=value + more or "none", why=f"{why}, for every framework")


def _measured(profile: Profile) -> str:
    """How a machine was measured, in a few words."""
    processes = profile.processes or 1
    many = "1 process" if processes == 1 else f"{processes} processes"
    timed = counted(len(profile.measurements), "measurement")
    runs = f" and {counted(len(profile.runs), 'training run')}" if profile.runs else ""
    return f"machine profile of {profile.created}, measured on the machine with {many} ({timed}{runs})"


def _describes(profile: Profile) -> bool:
    """Whether what the profile says of its fit is what its factors do; not where somebody edited them."""
    if profile.measurements:
        return {factor.name: factor.factor for factor in profile.fitted} == profile.factors
    # Loaded here, for few plans have a profile and reading runs is a large part of the program.
    from planner.accuracy.fits.calibration import describes

    return describes(profile)


def _size(change: tuple[str, float]) -> float:
    """How far a factor is from none."""
    return abs(math.log(change[1]))


def context_of(request: Request, backend: str) -> CostContext:
    """The surroundings of a cost question for one framework, with the request's profile."""
    context = CostContext(request.model, request.cluster, request.job, get_backend(backend))
    return context if request.profile is None else profiled(context, request.profile)
