"""The job_submit script inside a real slurmctld: it sizes jobs, refuses what no plan fits, and stops nobody else."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.clients.stand_in import Behaviour
from tests.clients.test_slurm_submit import SLURM_SCRIPT, STAND_IN
from tests.parsers.interpreter import INSTALL, PYTHON

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "slurm" / "job_submit.lua"
PLUGINS = tuple(Path("/usr/lib").glob("*/slurm-wlm/job_submit_lua.so"))

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "sbatch", "munge", "curl"))
    or os.geteuid() != 0
    or not PLUGINS,
    reason="needs root, curl and apt-get install slurm-wlm (with job_submit/lua)",
)

BESIDE = ("beside", "8", "4", "16", "64000")
"""A controller with nodes of 4 GPUs on which nobody runs."""
ASKS = "planner model=gpt2-124m gpu=l4 gpus=8 gpus_per_node=4 backend=fsdp"
SUBMIT = """
printf '#!/bin/bash\\ntrue\\n' > job.sh
for comment in "$@"; do
  # Options may stand before the comment.  No such job starts, but Slurm looks for nodes as it does not for held ones.
  more="" && [[ "$comment" == *"|"* ]] && more="${comment%%|*}"
  said="$(sbatch --begin=now+1hour --comment="${comment#*|}" $more job.sh 2>&1)" || true
  echo "SAID ${said//$'\\n'/ }"
done
scontrol show job --oneliner
"""


def asked(folder: Path, url: str, *comments: str, **settings: str) -> tuple[list[str], list[dict[str, str]]]:
    """What sbatch said to each comment, and the jobs that Slurm then had, by field."""
    variables = {"PLANNER_URL": url, "JOB_SUBMIT_LUA": str(EXAMPLE), "PLANNER_WAIT_S": "60", **settings}
    printed = inside_slurm(folder, variables, *BESIDE, "bash", "-c", SUBMIT, "submit", *comments)
    said = re.findall(r"^SAID (.*)$", printed, re.MULTILINE)
    assert len(said) == len(comments), printed
    jobs = [
        dict(re.findall(r"([A-Z]\w*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line))
        for line in printed.splitlines()
        if line.startswith("JobId=")
    ]
    return said, jobs


def inside_slurm(folder: Path, variables: dict[str, str], *words: str) -> str:
    """Output of a command that runs while a Slurm is up."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH", "PLANNER_")) and not name.lower().endswith("_proxy")
    }
    done = subprocess.run(
        [str(SLURM_SCRIPT), *words],
        cwd=folder,
        env={**clean, "PATH": f"{clean['PATH']}:/usr/sbin:/sbin", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_jobs_are_sized_and_refused(tmp_path: Path, service_url: str) -> None:
    """The plan's nodes and GPUs, the planner's reason, or nothing at all for comments that are not ours."""
    said, jobs = asked(
        tmp_path,
        service_url,
        ASKS,
        "planner model=405b gpu=h100 gpus=8",
        "planner model=no-such-model gpu=h100 gpus=8",
        "planner model=70b gpu=h100",
        "planner",
        "planner model=70b gpu=h100 gpus=0",
        "planner model=70b gpu=h100 gpus=8 gpus=16",
        "planner model=70b gpu=h100 gpus=8 colour=red",
        "planner model=$(touch${IFS}gone) gpu=h100 gpus=8",
        "planner model='; touch gone; ' gpu=h100 gpus=8",
        'planner model=70b","pins":{} gpu=h100 gpus=8',
        "planners are not meant",
        "",
    )
    assert "2 nodes x 4 GPUs" in said[0]
    assert "Submitted batch job 1" in said[0]
    for index, reason in enumerate(
        (
            "more GPUs",
            "no-such-model",
            "gpus=... or nodes",
            "model=... is missing",
            "whole number",
            "given twice",
            "no field 'colour'",
        ),
        start=1,
    ):
        assert reason in said[index]
    assert all("is not name=value" in text for text in said[8:11])
    assert all("Batch job submission failed" in text for text in said[1:11])
    assert not (tmp_path / "gone").exists()
    sized, *others = jobs
    assert (sized["NumNodes"], sized["NumTasks"], sized["TresPerNode"]) == ("2-2", "2", "gres:gpu:4")
    assert re.search(r"plan [0-9a-f]{12}: 2 nodes x 4 GPUs, tp=\d+", sized["AdminComment"])
    assert [job["NumNodes"] for job in others] == ["1", "1"]
    assert not any("AdminComment" in job for job in others)


def test_what_a_job_states_itself(tmp_path: Path, service_url: str) -> None:
    """Tasks become the plan's, however they are stated; another number of nodes or GPUs is refused."""
    other = ("--nodes=3", "--gres=gpu:2", "--gres=gpu", "--gpus-per-node=2", "--gpus=4", "--gpus-per-task=1 -n 8")
    same = ("-n 8", "-N 2 --ntasks-per-node=4", "-c 6 -n 8", "-n 8 --ntasks-per-socket=4", "--gres=gpu:4", "--gpus=8")
    said, jobs = asked(tmp_path, service_url, *(f"{words}|{ASKS}" for words in (*other, *same)))
    assert "the plan needs 2 nodes" in said[0]
    for words, text in zip(other[1:], said[1:], strict=False):
        assert re.search(rf"the plan needs 4 GPUs a node, .*leave out .*{words.split('=')[0]}", text), text
    assert all("Submitted" in text for text in said[len(other) :]), said
    sizes = ["{NumNodes} {NumTasks} {NumCPUs} {TresPerNode}".format(**job) for job in jobs]
    assert sizes == [f"2-2 2 {cores} gres:gpu:4" for cores in (2, 2, 12, 2, 2, 2)]


def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("fail_open", ["yes", "no"])
def test_without_the_service(tmp_path: Path, fail_open: str) -> None:
    """The site decides whether jobs go on when nobody answers; other jobs always do."""
    url = f"http://127.0.0.1:{closed_port()}"
    said, jobs = asked(tmp_path, url, ASKS, "planner model=70b", "mine", PLANNER_FAIL_OPEN=fail_open)
    assert "did not answer" in said[0]
    assert ("Submitted" in said[0]) == (fail_open == "yes")
    assert "failed" in said[1]
    assert "Submitted" in said[2]
    assert [job["NumNodes"] for job in jobs] == ["1"] * (2 if fail_open == "yes" else 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, {}, b"<html>welcome</html>"), "not understood"),
        ((200, {}, b'{"outcome": "plan", "id": "x\'; touch gone", "result": {}}'), "not understood"),
        ((200, {}, b"[" * 10_000), "not understood"),
        ((202, {"Retry-After": "5"}, b'{"state": "running"}'), "not ready yet"),
        ((500, {}, b'{"detail": "broken"}'), "refused to answer"),
    ],
    ids=["page", "odd-id", "nested", "not-ready", "broken"],
)
def test_odd_answers_stop_no_job(
    tmp_path: Path, stand_in: str, behaviour: Behaviour, answer: tuple[int, dict[str, str], bytes], reason: str
) -> None:
    """Whatever the service says, the controller lives and the job is accepted."""
    behaviour.answer = answer
    said, jobs = asked(tmp_path, stand_in, ASKS)
    assert reason in said[0]
    assert "Submitted" in said[0]
    assert jobs[0]["NumNodes"] == "1"


def test_the_token_comes_from_a_file(tmp_path: Path, stand_in: str, behaviour: Behaviour) -> None:
    """The header of the file reaches the service."""
    behaviour.token = "plnr_of-the-controller"
    # The controller runs as the user slurm, who does not see the folders of tests.
    with tempfile.NamedTemporaryFile("w", suffix=".header") as header:
        header.write(f"Authorization: Bearer {behaviour.token}\n")
        header.flush()
        os.chmod(header.name, 0o644)
        said, _ = asked(tmp_path, stand_in, ASKS, PLANNER_HEADER_FILE=header.name)
    assert "2 nodes x 4 GPUs" in said[0]
    said, _ = asked(tmp_path, stand_in, ASKS)
    assert "refused to answer (401)" in said[0]


def documented() -> str:
    """The job script that README.md shows."""
    text = EXAMPLE.with_name("README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"(?:^    .*\n)+", text[text.index("    #!/bin/bash") :], re.MULTILINE)[:1]
    return textwrap.dedent(script)


def test_the_job_s_script_sends_a_token(tmp_path: Path, stand_in: str, behaviour: Behaviour) -> None:
    """What README.md shows fetches the files with the token of the user's file, and stops where it is refused."""
    behaviour.token = "plnr_of-the-user"
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PLANNER_URL": stand_in,
        "PLANNER_PLAN_ID": "0" * 64,
    }
    for token, status in ((behaviour.token, "404"), ("plnr_other", "401")):
        (tmp_path / "planner.header").write_text(f"Authorization: Bearer {token}\n", encoding="utf-8")
        done = subprocess.run(
            ["bash", "-c", documented()], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        # The stand-in packs no archives.
        assert done.returncode != 0
        assert f"error: {status}" in done.stderr


RUN = """
{ echo "$2"; echo 'echo "PLAN $PLANNER_PLAN_ID $PLANNER_DP gpus $SLURM_GPUS_ON_NODE"'; } > job.sh
echo 'Authorization: Bearer plnr_not-asked-for' > planner.header
HOME="$PWD" sbatch --wait --output=log --time=2 --cpus-per-task=2 --comment="$1" job.sh || { cat log; exit 1; }
cat log
"""


@pytest.mark.torch
@pytest.mark.skipif(not Path(PYTHON).with_name("torchrun").exists(), reason=f"no torchrun beside {PYTHON}: {INSTALL}")
def test_a_sized_job_starts_its_plan(tmp_path: Path, service_url: str) -> None:
    """On the nodes that the plugin asked for, the job fetches the plan's files and its ranks form the plan's groups."""
    question = "planner model=gpt2-124m gpu=l4 gpus=4 gpus_per_node=2 backend=fsdp tp=1 dp=4 zero_stage=3"
    groups = {"dp_shard": [[0, 1, 2, 3]]}
    variables = {
        "PLANNER_URL": service_url,
        "JOB_SUBMIT_LUA": str(EXAMPLE),
        "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TRAIN_SCRIPT": str(STAND_IN),
        "PLAN_GROUPS": json.dumps(groups),
        "PLAN_IMPORTS": "parallelize",
    }
    printed = inside_slurm(tmp_path, variables, "nodes", "2", "bash", "-c", RUN, "run", question, documented())
    assert re.search(r"PLAN [0-9a-f]{64} 4 gpus 2$", printed, re.MULTILINE), printed
    reports = [json.loads(found) for found in re.findall(r"STARTED (\{.*\})$", printed, re.MULTILINE)]
    assert sorted(report["RANK"] for report in reports) == ["0", "1", "2", "3"], printed
    assert all(report["groups"] == {"dp_shard": [0, 1, 2, 3]} and report["imports"] for report in reports)
