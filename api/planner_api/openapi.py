"""The description of the API: FastAPI's, with the bodies and problems that the routes read and write by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from planner.specs.check import CheckReport
from planner.specs.plan import PlanDocument
from planner_api.describing import DescribedSchema
from planner_api.problems import MEDIA_TYPE, TITLES, Problem
from planner_api.schemas.answers import (
    ArtifactList,
    CatalogPage,
    Health,
    MeasurementList,
    MeasurementsTaken,
    PlanJob,
    PlanList,
    Readiness,
)
from planner_api.schemas.questions import CheckBody, EstimateBody, MeasurementsBody, PlanBody

BODIES: tuple[type[BaseModel], ...] = (PlanBody, EstimateBody, CheckBody, MeasurementsBody)
ANSWERS: tuple[type[BaseModel], ...] = (
    *(PlanDocument, PlanJob, PlanList, CheckReport, ArtifactList, CatalogPage, MeasurementList, MeasurementsTaken),
    *(Health, Readiness, Problem),
)
_REFERENCE = "#/components/schemas/{model}"


def body(model: type[BaseModel], example: dict[str, Any] | None = None) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body by itself."""
    content: dict[str, Any] = {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}
    if example is not None:
        content["example"] = example
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def answer(model: type[BaseModel], description: str, **headers: str) -> dict[str, Any]:
    """A response with a body of this model."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
    told = {
        name.replace("_", "-"): {"description": text, "schema": {"type": "string"}} for name, text in headers.items()
    }
    return {"description": description, "content": content, **({"headers": told} if told else {})}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses for everything that can go wrong on every route, and for the given statuses."""
    always = (400, 401, 403, 405, 408, 413, 421, 422, 429, 500, 503)
    content = {MEDIA_TYPE: {"schema": {"$ref": _REFERENCE.format(model="Problem")}}}
    titles: dict[int, list[str]] = {}
    for status, title in TITLES.values():
        titles.setdefault(status, []).append(title)
    return {
        status: {"description": "; ".join(titles[status]), "content": content}
        for status in sorted({*always, *statuses})
    }


def document(app: FastAPI) -> dict[str, Any]:
    """The whole description; made once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version="1",
            openapi_version=app.openapi_version,
            summary="Parallel training strategies for large models on a cluster.",
            description=_DESCRIPTION,
            routes=app.routes,
        )
        components = schema.setdefault("components", {})
        modes = [*((model, "validation") for model in BODIES), *((model, "serialization") for model in ANSWERS)]
        _, definitions = models_json_schema(
            modes,  # type: ignore[arg-type]
            ref_template=_REFERENCE,
            schema_generator=DescribedSchema,
        )
        components.setdefault("schemas", {}).update(definitions["$defs"])
        for operation in (operation for path in schema["paths"].values() for operation in path.values()):
            if "security" in operation:
                operation["security"].append({})  # on loopback no token is needed
        app.openapi_schema = schema
    return app.openapi_schema


_DESCRIPTION = (
    "Ask for a plan with `POST /v1/plans`: it is answered at once when it is quick or known, else with 202 and a place "
    "to look. Whatever goes wrong is answered as `application/problem+json` with a hint. The same question has the "
    "same id, whoever asks."
)
