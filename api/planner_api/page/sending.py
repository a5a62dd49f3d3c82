"""How the page's files travel: kept by browsers for as long as their content stays, and packed.

The API's answers are left alone: their lengths and ETags are those of the bytes that were made."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.resources import files
from pathlib import Path

from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from planner.report.html import static_dir

PACKED_FROM_BYTES = 1024
LONG_S = 365 * 24 * 3600


def page_dir() -> Path:
    """The folder of the page's own script and style sheet."""
    return Path(str(files("planner_api.page"))) / "static"


@cache
def assets_version() -> str:
    """Names the content of all static files: an address with it never shows anything else."""
    digest = hashlib.sha256()
    for folder in (static_dir(), page_dir()):
        for file in sorted(folder.iterdir()):
            digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


class KeptFiles(StaticFiles):
    """Static files; those whose address has the version are kept, others are asked for again."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        answer = super().file_response(full_path, stat_result, scope, status_code)
        versioned = scope["query_string"] == f"v={assets_version()}".encode()
        answer.headers["Cache-Control"] = f"public, max-age={LONG_S}, immutable" if versioned else "no-cache"
        if isinstance(answer, FileResponse):
            # Weak: the same content travels packed and as it is.
            answer.headers["ETag"] = f"W/{answer.headers['etag']}"
        return answer


class PagePacker:
    """ASGI middleware: gzip for the page and its files only."""

    def __init__(self, app: ASGIApp) -> None:
        self.plain, self.packed = app, GZipMiddleware(app, minimum_size=PACKED_FROM_BYTES, compresslevel=6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and (scope["path"] == "/" or scope["path"].startswith(("/plans", "/static/")))
        await (self.packed if ours else self.plain)(scope, receive, send)
