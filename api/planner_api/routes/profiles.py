"""The machine profile that a question means: the one in its body, or one fitted to measurements that jobs posted."""

from __future__ import annotations

import hashlib
from collections import Counter

from cachetools import LRUCache

from planner.service.questions import resolve
from planner.specs.profile import Profile
from planner_api.problems import FieldProblem, Problem, ProblemError
from planner_api.schemas.questions import Situation
from planner_api.services import Services
from planner_api.solving import tasks

_fitted: LRUCache[str, Profile] = LRUCache(maxsize=64)
"""By the records that they are fitted to."""


async def profile_of(body: Situation, backend: str, served: Services) -> Profile | None:
    """The profile, or None where none is asked for; ProblemError where there is nothing to fit one to."""
    if body.profile != "measurements":
        return body.profile
    # What is wrong with the question is told before what is missing for its profile.
    question = resolve(body.stated_model(), body.machines(), body.job.asked(), None, backend, {})
    accelerator = question.request.cluster.accelerator.id
    records = await served.measurements.of(accelerator)
    frameworks = Counter(framework for _, framework, _ in records)
    if not frameworks:
        told = FieldProblem(pointer="/profile", detail=f"no measurement of {accelerator} was posted")
        raise ProblemError("bad-input", told.detail, errors=[told], hint="post runs to /v1/measurements first")
    # One fit is of one framework: that of the question, else the one with the most runs.
    chosen = backend if backend in frameworks else frameworks.most_common(1)[0][0]
    used = [(identifier, record) for identifier, framework, record in records if framework == chosen]
    digest = hashlib.sha256("".join(identifier for identifier, _ in used).encode()).hexdigest()
    if digest not in _fitted:
        found = await served.quick.run(tasks.fit, dict(used), limit_s=served.settings.quick_time_limit_s)
        _fitted[digest] = _profile(found)
    return _fitted[digest]


def _profile(found: str | Problem) -> Profile:
    if isinstance(found, Problem):
        told = FieldProblem(pointer="/profile", detail=found.detail)
        raise ProblemError("bad-input", found.detail, errors=[told], hint=found.hint)
    return Profile.model_validate_json(found)


def profile_text(profile: Profile | None) -> str | None:
    return None if profile is None else profile.model_dump_json()
