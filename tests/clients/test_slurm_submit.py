"""``planner slurm-submit``: what it hands to sbatch, what it refuses, and a job that a real Slurm runs."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import service
from planner.cli.main import run
from planner.errors import InputError
from planner_api.clients import slurm
from planner_api.clients.job_file import SlurmPart, asked, load_job
from tests.cli.conftest import Cli
from tests.parsers.interpreter import INSTALL, PYTHON
from tests.parsers.test_launch_starts import stated_groups

SLURM_SCRIPT = Path(__file__).parent.parent / "parsers" / "run_slurm.sh"
STAND_IN = SLURM_SCRIPT.with_name("stand_in_training.py")
TINY = {
    "layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 256, "max_seq": 128,
}  # fmt: skip
JOB: dict[str, Any] = {
    "model": "tiny.yaml",
    "cluster": {"gpu": "cpu", "gpus": 2, "gpus_per_node": 2, "host_memory_gib": 1, "host_cores": 2},
    "job": {"seq_len": 64, "global_batch": 4},
    "backend": "pytorch",
}
FAKE_SBATCH = """#!/usr/bin/env bash
printf '%s\\n' "$PWD" "$@" > "$RECORD"
env > "$RECORD.env"
[[ -z "${REFUSE:-}" ]] || { echo "sbatch: error: $REFUSE" >&2; exit 1; }
echo "${ANSWER:-4711}"
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job file with a tiny model beside it, which a test may change."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return written(tmp_path, {})


def written(folder: Path, changes: dict[str, Any]) -> Path:
    """job.yaml in ``folder``."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, **changes}), encoding="utf-8")
    return path


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that writes down how it was called; the file of its words, a line each, the folder first."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text(FAKE_SBATCH, encoding="utf-8")
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def test_submits_the_plan(
    job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are in the folder, sbatch is called there with one word an option, and the answer says what follows."""
    monkeypatch.setenv("PLANNER_TOKEN", "plnr_secret")
    part = {"partition": "gpu", "account": "a&b", "time": "1-00:00:00", "comment": "it's; $(x)", "arguments": ["--a b"]}
    result = cli("slurm-submit", str(written(tmp_path, {"slurm": part})), "--out", str(tmp_path / "run"), "--json")
    assert result.code == 0, result.out
    document = result.document
    assert sbatch.read_text(encoding="utf-8").splitlines() == [
        *(str(tmp_path / "run"), "--parsable", "--export=ALL", "--partition=gpu", "--account=a&b"),
        *("--time=1-00:00:00", "--comment=it's; $(x)", "job.sbatch", "--a b"),
    ]
    assert "plnr_secret" not in Path(f"{sbatch}.env").read_text(encoding="utf-8")
    assert document["job_id"] == 4711
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == document["files"]
    assert document["log"] == str(tmp_path / "run" / f"plan-{document['plan_id'][:12]}-4711.log")
    assert document["groups"][0]["size"] == 2


def test_people_read_what_happens_next(job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli) -> None:
    """Job number, verdict, groups, log and the next command are printed."""
    result = cli("slurm-submit", str(job_file), "--out", str(tmp_path / "run"))
    assert result.code == 0, result.err
    for text in (
        "Submitted batch job 4711",
        "fits",
        "Groups",
        "first group ranks 0, 1",
        "squeue --job 4711",
        "-4711.log",
    ):
        assert text in result.out


def test_dry_run_writes_nothing(job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli) -> None:
    """--dry-run shows the command and neither writes nor calls sbatch."""
    before = sorted(tmp_path.iterdir())
    result = cli("slurm-submit", str(job_file), "--out", str(tmp_path / "run"), "--dry-run")
    assert result.code == 0
    assert "sbatch --parsable --export=ALL job.sbatch" in result.out
    assert sorted(tmp_path.iterdir()) == before


def test_the_service_plans(job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli, service_url: str) -> None:
    """With --server the same plan and the same files come from the service; the model travels as data."""
    documents = []
    for name, more in (("here", ()), ("there", ("--server", service_url))):
        result = cli("slurm-submit", str(job_file), "--out", str(tmp_path / name), "--json", *more)
        assert result.code == 0, result.out
        documents.append(result.document)
    assert documents[0]["plan_id"] == documents[1]["plan_id"]
    for name in documents[0]["files"]:
        if name not in ("plan.json", "README.md"):  # these tell how long the search took
            assert (tmp_path / "here" / name).read_text() == (tmp_path / "there" / name).read_text()


@pytest.mark.parametrize("server", [False, True], ids=["here", "service"])
def test_nothing_fits(job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli, service_url: str, server: bool) -> None:
    """A question without a plan ends with exit code 3 and submits nothing."""
    path = written(tmp_path, {"model": "405b", "cluster": {"gpu": "h100", "gpus": 8}, "backend": "auto"})
    result = cli("slurm-submit", str(path), *(("--server", service_url) if server else ()))
    assert result.code == 3
    assert "nearest miss" in result.err
    assert not sbatch.exists()


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ("Batch job submission failed: Invalid partition name specified", "sinfo -s"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "sacctmgr"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "slurm.time"),
        ("Batch job submission failed: Invalid generic resource (gres) specification", "%G"),
        ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("something new", "man sbatch"),
    ],
    ids=["partition", "account", "time", "gres", "controller", "other"],
)
def test_refusals_of_sbatch(
    job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, refusal: str, hint: str
) -> None:
    """Slurm's own words with a hint; the files stay, and how to submit them is said."""
    monkeypatch.setenv("REFUSE", refusal)
    result = cli("slurm-submit", str(job_file), "--out", str(tmp_path / "run"))
    assert result.code == 2
    assert refusal in result.err
    assert hint in result.err
    assert str(tmp_path / "run") in result.err
    assert (tmp_path / "run" / "job.sbatch").exists()


def test_an_odd_answer_of_sbatch(
    job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is an error that says where the files are; a cluster behind the number is told, a site's greeting in
    any encoding is passed over."""
    monkeypatch.setenv("ANSWER", "welcome")
    refused = cli("slurm-submit", str(job_file), "--out", str(tmp_path / "one"))
    assert refused.code == 2
    assert "squeue --me" in refused.err
    assert str(tmp_path / "one") in refused.err
    monkeypatch.setenv("ANSWER", os.fsdecode(b"Universit\xe4t\n12;east"))
    result = cli("slurm-submit", str(job_file), "--out", str(tmp_path / "two"), "--json")
    assert (result.document["job_id"], result.document["cluster"]) == (12, "east")


def test_stopped_while_sbatch_hangs(
    job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C then: sbatch may have handed the job over, so the end says how to look and where the files are."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", stopped)
    result = cli("slurm-submit", str(job_file), "--out", str(tmp_path / "run"))
    assert result.code == 130
    assert "squeue --me" in result.err
    assert str(tmp_path / "run") in result.err


def test_existing_files_stay(job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli) -> None:
    """A second submission into the same folder needs --force."""
    arguments = ("slurm-submit", str(job_file), "--out", str(tmp_path / "run"))
    assert cli(*arguments).code == 0
    sbatch.unlink()
    refused = cli(*arguments)
    assert refused.code == 2
    assert "--force" in refused.err
    assert not sbatch.exists()
    assert cli(*arguments, "--force").code == 0


def test_without_slurm(job_file: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sbatch nothing is planned, and --dry-run is the hint."""
    monkeypatch.setenv("PATH", str(tmp_path))
    result = cli("slurm-submit", str(job_file))
    assert result.code == 6
    assert "--dry-run" in result.err
    assert cli("slurm-submit", str(job_file), "--dry-run").code == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"slurm": {"partition": "gpu\n#SBATCH --uid=0"}},
        {"slurm": {"partition": "--uid=0"}},
        {"slurm": {"account": "a b"}},
        {"slurm": {"qos": "'; rm -rf /; '"}},
        {"slurm": {"name": "../../x"}},
        {"slurm": {"time": "1 day"}},
        {"slurm": {"time": 43200}},
        {"slurm": {"comment": "a\nb"}},
        {"slurm": {"setup": ["true\n#SBATCH --uid=0"]}},
        {"slurm": {"arguments": ["a\0b"]}},
        {"slurm": {"environment": {"A B": "x"}}},
        {"slurm": {"environment": {"A=B;C": "x"}}},
        {"slurm": {"environment": {"SLURM_NODEID": "x"}}},
        {"slurm": {"environment": {"HEAD_NODE": "x"}}},
        {"slurm": {"environment": {"A": "x\ny"}}},
        {"slurm": {"uid": "0"}},
        {"slurm": "gpu"},
        {"model": {"config": {}, "dimensions": {}}},
        {"model": {"dimensions": {**TINY, "layers": True}}},
        {"model": "../no-such-file.yaml"},
        {"cluster": "from-somewhere"},
        {"cluster": {"gpuu": "h100"}},
        {"cluster": {"gpu": "h100", "nodes": -1}},
        {"cluster": {"gpu": "h100", "from": "pbs"}},
        {"cluster": {"gpu": "h100", "gpus": True}},
        {"cluster": {"gpu": "h100", "gpus": "16"}},
        {"job": {"seq_len": True}},
        {"job": {"global_batch": True}},
        {"top": True},
        {"time_limit_s": True},
        {"rule_of_thumb": 1},
        {"top": datetime.date(2026, 1, 1)},
        {"pins": {"tp": 8.5}},
        {"pins": {"tp=1,pp": 8}},
        {"colour": "red"},
    ],
    ids=str,
)
def test_fields_that_are_refused(
    sbatch: Path, tmp_path: Path, cli: Cli, changes: dict[str, Any], job_file: Path
) -> None:
    """Nothing that could become another option, line or command reaches Slurm; the error says where and what to do."""
    before = sorted(tmp_path.iterdir())
    result = cli("slurm-submit", str(written(tmp_path, changes)), "--out", str(tmp_path / "run"))
    assert result.code == 2, result.out
    assert "hint:" in result.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"model": 7}, "model", "a name of the catalogue, a path, or a mapping"),
        ({"model": {"config": 7}}, "model.config", "an object with named values"),
        ({"model": "no-such.yaml"}, "model", "there is no such file"),
        ({"cluster": {"gpu": "h100", "gpus": True}}, "cluster.gpus", "a whole number"),
        ({"cluster": {"gpu": "h100", "gpus": 12}}, "cluster.gpus", "use cluster.gpus = 8 or"),
        ({"cluster": {"gpu": "nope", "gpus": 8}}, "cluster.gpu", "`planner gpus` lists"),
        ({"job": {"global_batch": True}}, "job.global_batch", "a number of sequences"),
        ({"job": {"seq_len": -1}}, "job.seq_len", "give job.seq_len a value"),
        ({"pins": {"tp": 1.5}}, "pins.tp", "a whole number, a word"),
        ({"pins": {"tp": True}}, "pins.tp", "for example pins.tp = 8"),
        ({"pins": {"colour": 1}}, "pins.colour", "for pins.colour"),
        ({"backend": "nope"}, "backend", "for backend"),
        ({"profile": "absent.json"}, "profile", "there is no such file"),
        ({"slurm": {"setup": "x"}}, "slurm.setup", "a list"),
    ],
    ids=str,
)
def test_errors_name_the_fields(tmp_path: Path, cli: Cli, changes: dict[str, Any], where: str, says: str) -> None:
    """The file by its name, the field as it is written there, and no option that this command does not have."""
    path = written(tmp_path, changes).rename(tmp_path / "mine.yaml")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY), encoding="utf-8")
    result = cli("slurm-submit", str(path), "--dry-run")
    assert result.code == 2
    assert result.err.startswith(f"error: {path}: {where}: ")
    assert says in " ".join(result.err.split())
    assert "--" not in result.err


def test_what_would_fit_is_told_in_fields(tmp_path: Path, cli: Cli) -> None:
    """The change that makes a plan fit is one of the job file."""
    path = written(tmp_path, {"model": "405b", "cluster": {"gpu": "h100", "gpus": 8}, "backend": "auto"})
    result = cli("slurm-submit", str(path), "--dry-run")
    assert result.code == 3
    assert "with cluster.gpus = " in " ".join(result.err.split())
    assert "--gpus" not in result.err


def test_values_are_quoted_for_the_shell(job_file: Path, tmp_path: Path) -> None:
    """What setup.sh exports is read back by a shell as it was given, whatever it holds."""
    nasty = "a'b\"c $(touch x) `touch y` \\ #SBATCH --uid=0 é"
    part = SlurmPart(environment={"NASTY": nasty}, setup=("export LAST=1",))
    files = slurm.with_setup({"launch.sh": "", "job.sbatch": "source ./setup.sh"}, part, tmp_path)
    (tmp_path / "setup.sh").write_text(files["setup.sh"], encoding="utf-8")
    said = subprocess.run(
        ["bash", "-c", 'source ./setup.sh; printf "%s|%s" "$NASTY" "$LAST"'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said == f"{nasty}|1"
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


def test_needed_variables_are_asked_for(
    tmp_path: Path, sbatch: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What launch.sh cannot start without is refused before the submission, unless somebody sets it."""
    monkeypatch.delenv("MEGATRON_PATH", raising=False)
    question = {"model": "llama3-8b", "cluster": {"gpu": "h100", "gpus": 8}, "backend": "megatron", "job": {}}
    result = cli("slurm-submit", str(written(tmp_path, question)), "--dry-run")
    assert result.code == 2
    assert "MEGATRON_PATH" in result.err
    setup = {"slurm": {"setup": ["source env.sh  # MEGATRON_PATH"], "environment": {"DATA_PATH": "/d"}}}
    assert cli("slurm-submit", str(written(tmp_path, {**question, **setup})), "--dry-run").code == 0
    script = {"slurm": {"script": "train.py", "environment": {"MEGATRON_PATH": "/m"}}}
    result = cli("slurm-submit", str(written(tmp_path, {**question, **script})), "--dry-run")
    assert "script of its own" in result.err


NODES = """NodeName=g[1-2] Arch=x86_64
   Gres=gpu:h100:8
   RealMemory=2000000 Sockets=2 CoresPerSocket=48
   State=IDLE
"""
FAKE_SINFO = """#!/usr/bin/env bash
for word in "$@"; do [[ $word == --partition=* ]] && chosen="${word#*=}"; done
[[ "${chosen:-gpu}" == gpu ]] && echo "gpu* g[1-2]"
[[ "${chosen:-cpu}" == cpu ]] && echo "cpu c[1-9]"
exit 0
"""


def test_machines_from_slurm(tmp_path: Path, sbatch: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from-slurm` counts the nodes of the default or named partition; the file's own figures win."""
    tools = sbatch.parent / "tools"
    first, second = (NODES.replace("g[1-2]", name) for name in ("g1", "g2"))
    scontrol = "#!/usr/bin/env bash\n[[ $1 == show && $2 == node ]] || exit 1\ncat <<'X'\n" + first + "X\n"
    scontrol += "[[ $3 == 'g[1-2]' ]] || exit 0\ncat <<'X'\n\n" + second + "X\n"
    for name, text in (("sinfo", FAKE_SINFO), ("scontrol", scontrol)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("MEGATRON_PATH", "/m")
    question = {"model": "llama3-8b", "backend": "megatron", "job": {}}
    for cluster, part, nodes_wanted in (
        ("from-slurm", {}, 2),
        ("from-slurm", {"partition": "gpu"}, 2),
        ("from-slurm", {"exclude": "g[2-3]"}, 1),
        ("from-slurm", {"nodelist": "g1"}, 1),
        ({"from": "slurm", "nodes": 1}, {}, 1),
        ({"from": "slurm", "gpus": 8}, {}, 1),
    ):
        path = written(tmp_path, {**question, "cluster": cluster, "slurm": part})
        result = cli("slurm-submit", str(path), "--dry-run", "--json")
        assert result.code == 0, result.out
        assert result.document["nodes"] == nodes_wanted
        assert result.document["gpus"] == 8 * nodes_wanted
    refused = cli(
        "slurm-submit", str(written(tmp_path, {**question, "cluster": "from-slurm", "slurm": {"partition": "x"}}))
    )
    assert refused.code == 2
    assert "partitions" in refused.err


def test_the_example(cli: Cli) -> None:
    """The job file of the examples is planned as it is."""
    example = SLURM_SCRIPT.parents[2] / "docs" / "examples" / "slurm" / "job.yaml"
    result = cli("slurm-submit", str(example), "--dry-run", "--json")
    assert result.code == 0, result.out
    assert (result.document["nodes"], result.document["fits"]) == (2, True)


@pytest.mark.parametrize(
    ("question", "groups"),
    [
        ({"model": "llama3-8b", "cluster": {"gpu": "h200", "gpus": 1}, "backend": "fsdp"}, {}),
        (
            {
                "model": "405b",
                "cluster": {"gpu": "h100", "gpus": 16384},
                "backend": "megatron",
                "pins": {"tp": 8, "cp": 1, "pp": 16, "vpp": 1},
                "job": {"global_batch": 4096},
            },
            {"tp": 1, "pp": 16, "dp": 128},
        ),
        (
            {
                "model": "mixtral-8x7b",
                "cluster": {"gpu": "h200", "gpus": 32},
                "backend": "megatron",
                "pins": {"tp": 2, "pp": 1, "cp": 1, "ep": 4, "etp": 1},
            },
            {"tp": 1, "dp": 4, "ep": 1, "edp": 4},
        ),
    ],
    ids=["one-gpu", "16384-gpus", "experts"],
)
def test_groups_of_large_and_small_plans(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, question: dict[str, Any], groups: dict[str, int]
) -> None:
    """The groups that are printed, and the nodes that the first of each spans; one GPU has none."""
    monkeypatch.setenv("MEGATRON_PATH", "/m")
    path = written(tmp_path, {"job": {}, **question})
    result = cli("slurm-submit", str(path), "--dry-run", "--json")
    assert result.code == 0, result.out
    assert {group["name"]: group["nodes"] for group in result.document["groups"]} == groups
    text = cli("slurm-submit", str(path), "--dry-run").out
    assert ("Groups" in text) == bool(groups)


def test_a_search_that_is_stopped_submits_nothing(
    job_file: Path, sbatch: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the search ends the command although a plan was found by then."""
    document = service.suggest(asked(load_job(job_file), tmp_path, load_job(job_file).stated_machines).request())

    def stopped(*_: object) -> None:
        raise service.Interrupted(document)

    monkeypatch.setattr(service, "suggest", stopped)
    assert cli("slurm-submit", str(job_file), "--out", str(tmp_path / "run")).code == 130
    assert not sbatch.exists()
    assert not (tmp_path / "run").exists()


def test_times_in_every_form() -> None:
    """The forms of Slurm's time limits, and near misses."""
    for text in ("30", "10:00", "12:00:00", "2-0", "2-12:30", "2-00:00:00", "UNLIMITED"):
        assert SlurmPart(time=text).time == text
    for text in ("-1", "1:2:3:4", "12h", "1-", ""):
        with pytest.raises(ValueError, match="time"):
            SlurmPart(time=text)


def test_a_missing_job_file(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(InputError, match="no such file"):
        load_job(tmp_path / "absent.yaml")
    assert run(["slurm-submit", str(tmp_path)]) == 2


# -- a real Slurm ------------------------------------------------------------------------------------------------------

REAL = [
    pytest.mark.torch,
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "sbatch", "munge")) or os.geteuid() != 0,
        reason="needs root and apt-get install slurm-wlm",
    ),
    pytest.mark.skipif(
        not Path(PYTHON).with_name("torchrun").exists(), reason=f"no torchrun beside {PYTHON}: {INSTALL}"
    ),
]
AND_WAIT = """
set -euo pipefail
"$1" -m planner slurm-submit job.yaml --out run --json > answer.json || { cat answer.json >&2; exit 1; }
for (( turn = 0; turn < 480; turn++ )); do
  [[ -z "$(squeue --noheader)" ]] && break
  sleep 0.25
done
scontrol show job > state.txt
"""


def submitted(folder: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What the command said of a job that a real Slurm ran to its end, and the log of its ranks."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY), encoding="utf-8")
    written(folder, changes)
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PLANNER_URL"))},
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [str(SLURM_SCRIPT), "nodes", "2", "bash", "-c", AND_WAIT, "submit", sys.executable]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    log = (folder / answer["log"]).read_text(encoding="utf-8")
    assert "JobState=COMPLETED" in (folder / "state.txt").read_text(encoding="utf-8"), log[-4000:]
    return answer, log


@pytest.mark.parametrize("_", [pytest.param(None, marks=REAL, id="slurm")])
def test_real_slurm_starts_the_groups_of_the_plan(tmp_path: Path, _: None) -> None:
    """sbatch takes the job; its two ranks form the groups that the command printed, over gloo, in the job's log."""
    part = {
        "time": "2",
        "script": str(STAND_IN),
        "name": "two-ranks",
        "arguments": ["--note", "two words"],
        "environment": {"PLAN_GROUPS": json.dumps({"dp_shard": [[0, 1]]}), "PLAN_IMPORTS": "parallelize"},
        "setup": [f'export PATH="{Path(PYTHON).parent}:$PATH"'],
    }
    cluster = {**JOB["cluster"], "gpu": "l4", "host_memory_gib": 16}
    answer, log = submitted(
        tmp_path, {"backend": "fsdp", "cluster": cluster, "pins": {"dp": 2, "zero_stage": 3}, "slurm": part}
    )
    reports = [json.loads(found) for found in re.findall(r"STARTED (\{.*\})$", log, re.MULTILINE)]
    assert sorted(report["RANK"] for report in reports) == ["0", "1"]
    assert {group["name"]: group["size"] for group in answer["groups"]} == {"dp_shard": 2}
    assert stated_groups((tmp_path / "run" / "README.md").read_text(encoding="utf-8"), 2) == {"dp_shard": [[0, 1]]}
    assert all(report["groups"] == {"dp_shard": [0, 1]} and report["imports"] for report in reports)
    assert all(report["last_arguments"] == ["--note", "two words"] for report in reports)
    assert Path(answer["log"]).name == f"two-ranks-{answer['job_id']}.log"


@pytest.mark.parametrize("_", [pytest.param(None, marks=REAL, id="slurm")])
def test_real_slurm_trains(tmp_path: Path, _: None) -> None:
    """Slurm's own words are the machines, and the job trains the plan for its steps on two processes."""
    part = {"time": "3", "setup": [f'export PATH="{Path(PYTHON).parent}:$PATH"']}
    cluster = {"from": "slurm", "gpu": "cpu", "nodes": 1}
    answer, log = submitted(tmp_path, {"cluster": cluster, "pins": {"dp": 2, "zero_stage": 3}, "slurm": part})
    assert (answer["nodes"], answer["gpus"]) == (1, 2)
    ranks = sorted(path.name for path in (tmp_path / "run" / "results").glob("rank-?.json"))
    assert ranks == ["rank-0.json", "rank-1.json"]
    # The log says what the command said: the groups; then each step, and where the results are.
    assert {group["name"]: group["size"] for group in answer["groups"]} == {"dp_shard": 2}
    assert re.search(r"^\[planner\] groups dp_shard 2 \(.*\): \[0, 1\]$", log, re.MULTILINE), log
    assert re.findall(r"^\[planner\] step (\d) of 5: .* loss [\d.]+$", log, re.MULTILINE) == list("12345"), log
    assert f"[planner] every rank writes its results to {tmp_path / 'run' / 'results'}" in log
