"""The files of a plan, rendered when they are asked for: nothing is ever written to or read from disk for them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from planner.service import check_output, start_commands
from planner.service.document import ranked
from planner.specs.plan import PlanDocument
from planner.units import counted
from planner_api.openapi import answer, problems
from planner_api.problems import FieldProblem, Problem, ProblemError
from planner_api.routes.answers import etag_of, json_answer, unchanged
from planner_api.routes.dependencies import PlanId, Reader, Served
from planner_api.routes.jobs import document_of, known_plan
from planner_api.schemas.answers import Artifact, ArtifactList
from planner_api.services import Services
from planner_api.solving import tasks

router = APIRouter(prefix="/v1/plans/{plan}", tags=["artifacts"])

Launcher = Annotated[
    str,
    Query(
        max_length=100,
        description="What starts the job beside launch.sh: slurm, trainjob, pytorchjob, skypilot, mpirun.",
    ),
]
Rank = Annotated[int, Query(ge=1, le=51, description="1: the best plan; more: the alternatives in their order.")]
Name = Annotated[str, Path(max_length=200, pattern=r"^[\w.-]+(/[\w.-]+)*$", description="Of the list of artifacts.")]
_TEXTS = {".sh": "text/x-shellscript", ".sbatch": "text/x-shellscript", ".md": "text/markdown", ".py": "text/x-python"}
_TEXTS |= {".yaml": "application/yaml", ".yml": "application/yaml", ".txt": "text/plain", ".json": "application/json"}


@router.get(
    "/artifacts",
    response_model=None,
    responses={**problems(404, 409), 200: answer(ArtifactList, "The files and how to start the job.")},
)
async def listed(plan: PlanId, served: Served, _: Reader, launcher: Launcher = "torchrun", rank: Rank = 1) -> Response:
    """The files that start the job."""
    files = await files_of(plan, rank, launcher, served)
    query = urlencode({"launcher": launcher, "rank": rank})
    place = f"/v1/plans/{plan}/artifacts"
    page = ArtifactList(
        files=tuple(
            Artifact(
                name=name,
                bytes=len(text.encode()),
                sha256=hashlib.sha256(text.encode()).hexdigest(),
                media_type=media_type(name),
                href=f"{place}/{quote(name)}?{query}",
            )
            for name, text in files.items()
        ),
        archive=f"{place}.tar.gz?{query}",
        start=tuple(start_commands(files)),
    )
    return json_answer(page.model_dump_json())


@router.get(
    "/artifacts.tar.gz",
    response_model=None,
    responses={
        **problems(404, 409),
        200: {"description": "All files.", "content": {"application/gzip": {}}},
        304: {"description": "It is what the client has."},
    },
)
async def archive(
    plan: PlanId, request: Request, served: Served, _: Reader, launcher: Launcher = "torchrun", rank: Rank = 1
) -> Response:
    """All files in one folder, as a gzipped tar."""
    files = await files_of(plan, rank, launcher, served)
    etag = etag_of(plan, launcher, str(rank), "tar", *files.values())
    folder = file_stem(plan, rank)
    headers = {"ETag": etag, "Content-Disposition": f'attachment; filename="{folder}.tar.gz"'}
    return unchanged(request, etag) or Response(packed(files, folder), media_type="application/gzip", headers=headers)


@router.get(
    "/artifacts/{name:path}",
    response_model=None,
    responses={
        **problems(404, 409),
        200: {"description": "The file.", "content": {kind: {} for kind in sorted({*_TEXTS.values(), "text/plain"})}},
        304: {"description": "It is what the client has."},
    },
)
async def one(
    plan: PlanId,
    name: Name,
    request: Request,
    served: Served,
    _: Reader,
    launcher: Launcher = "torchrun",
    rank: Rank = 1,
) -> Response:
    """One file."""
    files = await files_of(plan, rank, launcher, served)
    if name not in files:
        raise ProblemError("not-found", "the plan has no such file", hint=f"it has {', '.join(files)}")
    etag = etag_of(plan, launcher, str(rank), name, files[name])
    # Without a name of its own: a link may say under which one it is kept.
    headers = {"ETag": etag, "Content-Disposition": "attachment"}
    return unchanged(request, etag) or Response(files[name], media_type=media_type(name), headers=headers)


async def files_of(plan: str, rank: int, launcher: str, served: Services) -> dict[str, str]:
    """Name -> text of the files of one plan of the document."""
    check_output(None, launcher)
    row = await known_plan(plan, served)
    known: dict[str, str] | None = served.rendered.get((plan, rank, launcher))
    if known is not None:
        return known
    text = await document_of(row, served)
    alone(PlanDocument.model_validate_json(text), rank)
    files = await served.quick.run(tasks.render, text, rank, launcher, limit_s=served.settings.quick_time_limit_s)
    if isinstance(files, Problem):
        raise ProblemError.of(files)
    served.rendered[plan, rank, launcher] = dict(files)
    return dict(files)


def alone(document: PlanDocument, rank: int) -> PlanDocument:
    """The document about one of its plans; ProblemError where it has not so many."""
    plans = 1 + len(document.alternatives)
    if rank > plans:
        told = FieldProblem(pointer="rank", detail=f"the document has {counted(plans, 'plan')}")
        raise ProblemError("bad-input", told.detail, errors=[told], hint=f"give a rank from 1 to {plans}")
    return ranked(document, rank)


def file_stem(plan: str, rank: int) -> str:
    """What files that are made of one plan of an answer are called."""
    return f"plan-{plan[:12]}" + (f"-{rank}" if rank > 1 else "")


def media_type(name: str) -> str:
    suffix = "." + name.rpartition(".")[2]
    return _TEXTS.get(suffix, "text/plain")


def packed(files: dict[str, str], folder: str) -> bytes:
    """The same bytes for the same files: no times, no owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, text in sorted(files.items()):
            content = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            entry.mode = 0o755 if text.startswith("#!") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)
