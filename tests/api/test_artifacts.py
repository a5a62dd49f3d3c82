"""Files of a plan: the ones that the command line writes from the same document, each and all together."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.questions import SMALL, plan, problem_of

LAUNCHERS = "slurm,trainjob,skypilot"
FSDP = {**SMALL, "backend": "fsdp"}


def listed(api: httpx.Client, body: dict[str, Any], **params: str) -> dict[str, Any]:
    answer = api.get(f"/v1/plans/{plan(api, body)['id']}/artifacts", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(("body", "launcher"), [(SMALL, LAUNCHERS), (FSDP, "torchrun")])
def test_files_are_those_of_the_command_line(
    api: httpx.Client, tmp_path: Path, body: dict[str, Any], launcher: str
) -> None:
    document = tmp_path / "plan.json"
    document.write_bytes(api.get(plan(api, body)["links"]["result"]).content)
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-m", "planner", "render", document, "--launcher", launcher, "--out", out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
    )
    written = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    page = listed(api, body, launcher=launcher)
    assert {file["name"] for file in page["files"]} == set(written)
    for file in page["files"]:
        answer = api.get(file["href"])
        assert answer.content == written[file["name"]]
        assert (file["bytes"], file["sha256"]) == (len(answer.content), hashlib.sha256(answer.content).hexdigest())
        assert answer.headers["content-type"].partition(";")[0] == file["media_type"]
        assert answer.headers["content-disposition"].startswith("attachment")
        assert api.get(file["href"], headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert page["start"]


def test_the_archive_is_whole_and_the_same_again(api: httpx.Client) -> None:
    page = listed(api, SMALL, launcher=LAUNCHERS)
    answer = api.get(page["archive"])
    assert answer.headers["content-type"] == "application/gzip"
    # It is packed again each time: no times of day, no order of chance.
    assert api.get(page["archive"]).content == answer.content
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(answer.content))) as tar:
        entries = tar.getmembers()
        folders = {entry.name.partition("/")[0] for entry in entries}
        assert len(folders) == 1
        content = {entry.name.partition("/")[2]: tar.extractfile(entry).read() for entry in entries}  # type: ignore[union-attr]
        assert all(entry.isreg() and entry.mtime == entry.uid == entry.gid == 0 for entry in entries)
        assert [entry.mode for entry in entries if entry.name.endswith("/launch.sh")] == [0o755]
    assert content == {file["name"]: api.get(file["href"]).content for file in page["files"]}
    assert api.get(page["archive"], headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_alternatives_have_files_too(api: httpx.Client) -> None:
    found = plan(api, SMALL)
    assert len(found["result"]["alternatives"]) == 1
    texts = [api.get(f"{found['links']['artifacts']}/plan.json", params={"rank": rank}).json() for rank in (1, 2)]
    assert texts[0]["best"]["strategy"] == found["result"]["best"]["strategy"]
    assert texts[1]["best"]["strategy"] == found["result"]["alternatives"][0]["strategy"]
    told = problem_of(api.get(found["links"]["artifacts"], params={"rank": 3}), 422)
    assert told["errors"][0]["pointer"] == "rank"


def test_other_names_and_launchers_are_refused(api: httpx.Client) -> None:
    place = plan(api, SMALL)["links"]["artifacts"]
    assert "launch.sh" in problem_of(api.get(f"{place}/no.sh"), 404)["hint"]
    assert problem_of(api.get(f"{place}/job.sbatch"), 404)
    assert api.get(f"{place}/job.sbatch", params={"launcher": "slurm"}).status_code == 200
    told = problem_of(api.get(place, params={"launcher": "slurm,nothing"}), 422)
    assert told["errors"][0]["pointer"] == "launcher"
    assert "slurm" in told["allowed"]
