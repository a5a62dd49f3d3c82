"""``planner cluster``: what was read, findings, a file that ``planner suggest --cluster`` takes, and clear refusals."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from planner.service.machine_facts import INSTANCES
from planner.specs.cluster_file import ClusterFile
from tests.cli.conftest import Cli
from tests.machines import SAMPLES, text

JOB = ("--model", "llama-3.1-8b", "--seq-len", "2048", "--global-batch", "480", "--backend", "fsdp", "--top", "1")


def sample(name: str) -> str:
    return str(SAMPLES / name)


CASES = [
    (
        ("from-topo", "topo_8xh100_10nic.txt", "--gpu", "h100", "--nodes", "4"),
        {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8},
    ),
    (("from-topo", "topo_4x4090_pcie.txt", "--gpu", "rtx-4090"), {"gpu": "rtx-4090", "nodes": 1, "gpus_per_node": 4}),
    (
        ("from-topo", "topo_8xv100_cube_mesh.txt", "--gpu", "v100", "--nics", "4"),
        {"gpu": "v100-sxm2-32gb", "nodes": 1, "gpus_per_node": 8, "nics_per_node": 4},
    ),
    (
        ("from-topo", "topo_4xh100nvl_crossed.txt", "--gpu", "h100-nvl"),
        {"gpu": "h100-nvl-94gb", "nodes": 1, "gpus_per_node": 4, "domain_gpus": 2},
    ),
    (
        ("from-topo", "topo_gb200_4gpu.txt", "--gpu", "gb200", "--nodes", "18"),
        {"gpu": "gb200-nvl72", "nodes": 18, "gpus_per_node": 4},
    ),
    (("from-smi", "smi_8xh100.csv", "--nodes", "2"), {"gpu": "h100-sxm-80gb", "nodes": 2, "gpus_per_node": 8}),
    (("from-smi", "smi_two_hosts.csv"), {"gpu": "h200-sxm-141gb", "nodes": 2, "gpus_per_node": 2}),
    (
        ("from-smi", "smi_4090_48gb.csv"),
        {"gpu": "rtx-4090", "nodes": 1, "gpus_per_node": 4, "memory_gib_per_gpu": 47.27},
    ),
    (("from-rocm", "rocm_8xmi300x_named.txt"), {"gpu": "mi300x", "nodes": 1, "gpus_per_node": 8}),
    (
        ("from-slurm", "slurm_env.txt"),
        {"gpu": "h100-sxm-80gb", "nodes": 15, "gpus_per_node": 8, "host_memory_gib": 1920.0},
    ),
    (
        ("from-slurm", "slurm_scontrol.txt"),
        {"gpu": "h100-sxm-80gb", "nodes": 3, "gpus_per_node": 8, "host_memory_gib": 2015.6, "host_cores": 112},
    ),
    (("from-hostfile", "hostfile", "--gpu", "a100"), {"gpu": "a100-sxm-80gb", "nodes": 3, "gpus_per_node": 8}),
    (
        ("from-kubernetes", "k8s_node.json"),
        {
            "gpu": "h100-sxm-80gb",
            "system": "aws-p5",
            "nodes": 1,
            "gpus_per_node": 7,
            "nics_per_node": 32,
            "host_memory_gib": 2000.0,
            "host_cores": 96,
        },
    ),
    (
        ("from-kubernetes", "k8s_gb200_two_racks.json"),
        {
            "gpu": "gb200-nvl72",
            "nodes": 18,
            "gpus_per_node": 4,
            "domain_gpus": 36,
            "host_memory_gib": 980.0,
            "host_cores": 144,
        },
    ),
    (
        ("from-kubernetes", "k8s_amd_and_shared.json", "--gpu", "l4"),
        {"gpu": "l4", "nodes": 1, "gpus_per_node": 1, "host_memory_gib": 62.0, "host_cores": 8},
    ),
    (("read", "skypilot.yaml", "--gpu", "h200"), {"gpu": "h200-sxm-141gb", "nodes": 4, "gpus_per_node": 8}),
    (("read", "ray.json"), {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8}),
    (("read", "kueue.yaml", "--nodes", "2"), {"gpu": "h100-sxm-80gb", "nodes": 2}),
]


@pytest.mark.parametrize(
    ("arguments", "expected"), CASES, ids=lambda value: value[1] if isinstance(value, tuple) else ""
)
def test_file_of_each_source(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], expected: dict[str, object]) -> None:
    """The file holds what was read and nothing else, and the planner takes it."""
    out = tmp_path / "cluster.yaml"
    command, name, *options = arguments
    result = cli("cluster", command, sample(name), *options, "--out", str(out), "--json")
    assert result.code == 0, result.out
    assert yaml.safe_load(out.read_text(encoding="utf-8")) == expected
    document = result.document
    assert document["cluster"] == expected
    assert document["written"] == str(out)
    assert set(document["origins"]) == set(expected)
    estimate = cli("estimate", "--cluster", str(out), "--model", "llama-3.1-8b", "--backend", "fsdp", "--json")
    assert estimate.code in (0, 3), estimate.out
    given = estimate.document["request"]["cluster"]
    assert given["gpus"] == expected["nodes"] * given["gpus_per_node"]
    assert given["accelerator"]["id"] == expected["gpu"]


def test_next_command_works(cli: Cli, tmp_path: Path) -> None:
    """The command after "Next:" is a question that the planner answers."""
    out = tmp_path / "my cluster.yaml"
    told = cli("cluster", "from-smi", sample("smi_8xh100.csv"), "--out", str(out))
    assert told.code == 0, told.err
    words = shlex.split(told.out.strip().splitlines()[-1].removeprefix("Next: "))
    assert words[:2] == ["planner", "suggest"]
    answer = cli(*[word if word != "MODEL" else "llama-3.1-8b" for word in words[1:]], "--global-batch", "64", "--json")
    assert answer.code == 0, answer.out
    assert answer.document["request"]["cluster"]["gpus"] == 8


def test_fifteen_nodes_can_be_planned(cli: Cli, tmp_path: Path) -> None:
    """120 GPUs: the plan found for the file of a job with a missing node uses all of them."""
    out = tmp_path / "cluster.yaml"
    assert cli("cluster", "from-slurm", sample("slurm_env.txt"), "--out", str(out)).code == 0
    answer = cli("suggest", "--cluster", str(out), *JOB, "--json")
    assert answer.code == 0, answer.out
    assert answer.document["request"]["cluster"]["gpus"] == 120


def test_everything_about_one_machine(cli: Cli) -> None:
    """Topology, GPUs, cards and the job's variables complete each other; cards as in the reference are left out."""
    files = ["smi_8xh100.csv", "ibstat_8xh100.txt", "slurm_env.txt"]
    others = [word for name in files for word in ("--with", sample(name))]
    result = cli("cluster", "from-topo", sample("topo_8xh100_10nic.txt"), *others, "--json")
    assert result.code == 0
    assert result.document["cluster"] == {
        "gpu": "h100-sxm-80gb",
        "nodes": 15,
        "gpus_per_node": 8,
        "host_memory_gib": 1920.0,
    }
    assert result.document["as_reference"] == ["8 network cards a node"]
    same = cli("cluster", "read", sample("topo_8xh100_10nic.txt"), *map(sample, files), "--json")
    assert same.document == result.document


def test_rates_that_differ_from_the_reference_are_written(cli: Cli) -> None:
    """Two cards of 400 Gbit/s where the reference has eight."""
    result = cli("cluster", "read", sample("smi_8xh100.csv"), sample("ibstat_mixed.txt"), "--json")
    assert (result.document["cluster"]["nics_per_node"], result.document["cluster"]["nic_gbps"]) == (2, 400.0)


def test_people_see_what_was_read(cli: Cli) -> None:
    """Facts, findings with hints, the file, assumptions, in this order; plain ASCII in a pipe."""
    result = cli("cluster", "from-slurm", sample("slurm_env.txt"))
    assert result.out.isascii()
    parts = [
        "Read from",
        "Findings",
        "dgx-008",
        "Cluster file",
        "nodes: 15",
        "Assumed",
        "reference system dgx-h100",
        "Next:",
    ]
    positions = [result.out.index(part) for part in parts]
    assert positions == sorted(positions)


def test_reading_is_told_where_no_file_follows(cli: Cli, tmp_path: Path) -> None:
    """A machine with a GPU that the catalogue lacks: findings are printed, nothing is written, exit code 2."""
    out = tmp_path / "cluster.yaml"
    told = cli("cluster", "from-smi", sample("smi_mixed.csv"), "--out", str(out))
    assert told.code == 2
    assert "GPU 1 is in use" in told.out
    assert "RTX 2080 Ti" in told.err
    assert "hint: " in told.err
    assert not out.exists()
    document = cli("cluster", "from-smi", sample("smi_mixed.csv"), "--json").document
    assert document["cluster"] is None
    assert document["error"]["code"] == "bad-input"
    told_ids = {finding["id"] for finding in document["findings"]}
    assert {"gpu-in-use", "pcie-narrow", "mig-enabled", "gpus-mixed", "more-memory-less-compute"} <= told_ids


def test_stated_gpu_with_the_smallest_memory(cli: Cli) -> None:
    """--gpu on a mixed machine: the option names the GPU, the smallest card bounds the memory."""
    document = cli("cluster", "from-smi", sample("smi_mixed.csv"), "--gpu", "h100", "--json").document
    assert document["cluster"]["gpus_per_node"] == 7
    assert document["cluster"]["memory_gib_per_gpu"] == pytest.approx(22528 / 1024 * 0.985, abs=0.01)
    assert "gpu-overridden" in {finding["id"] for finding in document["findings"]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("from-topo", "topo_8xh100_10nic.txt"), "does not name the GPU"),
        (("from-topo", "smi_8xh100.csv"), "this looks like nvidia-smi"),
        (("from-topo", "no-such-file"), "no such file"),
        (("from-smi", "k8s_node.json"), "planner cluster read"),
        (("from-kubernetes", "k8s_mig_single.yaml"), "no node can be given to a job"),
        (("from-slurm", "slurm_scontrol.txt", "--gpus-per-node", "16"), "no node with 16 GPUs"),
        (("from-hostfile", "hostfile"), "does not name the GPU"),
        (("read", "skypilot.yaml"), "choose the one to plan for with --gpu"),
        (("read", "kueue.yaml"), "add --nodes N"),
        (("read", "topo_p2p.txt"), "which GPUs may talk"),
        (("from-smi", "smi_8xh100.csv", "--nodes", "0"), "--nodes"),
        (("from-smi", "smi_8xh100.csv", "--gpu", "h1000"), "unknown accelerator"),
        (("from-smi", "smi_8xh100.csv", "--nic-gbps", "nan"), "--nic-gbps"),
        (("from-smi", "smi_8xh100.csv", "--nodes", "200000"), "--nodes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals(cli: Cli, arguments: tuple[str, ...], told: str) -> None:
    """Bad input ends with exit code 2 and says what to do, for people and as JSON."""
    command, name, *options = arguments
    result = cli("cluster", command, sample(name), *options)
    assert result.code == 2
    assert told in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert cli("cluster", command, sample(name), *options, "--json").document["error"]["code"] == "bad-input"


def test_files_are_not_overwritten_unasked(cli: Cli, tmp_path: Path) -> None:
    """An existing file needs --force; the text itself is never replaced."""
    out = tmp_path / "cluster.yaml"
    out.write_text("mine", encoding="utf-8")
    again = ("cluster", "from-smi", sample("smi_8xh100.csv"), "--out", str(out))
    refused = cli(*again)
    assert refused.code == 2
    assert "--force" in refused.err
    assert out.read_text(encoding="utf-8") == "mine"
    assert cli(*again, "--force").code == 0
    copy = tmp_path / "smi.csv"
    copy.write_text(text("smi_8xh100.csv"), encoding="utf-8")
    refused = cli("cluster", "from-smi", str(copy), "--out", str(copy), "--force")
    assert refused.code == 2
    assert copy.read_text(encoding="utf-8") == text("smi_8xh100.csv")


def test_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, named by - or by nothing; two of them, or a terminal, are refused."""

    def piped(*, terminal: bool = False) -> SimpleNamespace:
        raw = io.BytesIO(text("smi_8xh100.csv").encode())
        return SimpleNamespace(buffer=raw, isatty=lambda: terminal)

    for words in (("-",), ()):
        monkeypatch.setattr(sys, "stdin", piped())
        assert cli("cluster", "from-smi", *words, "--json").document["cluster"]["gpus_per_node"] == 8
    monkeypatch.setattr(sys, "stdin", piped())
    assert "once only" in cli("cluster", "from-smi", "-", "--with", "-").err
    monkeypatch.setattr(sys, "stdin", piped(terminal=True))
    assert "no text is given" in cli("cluster", "from-smi").err


def test_variables_of_this_job(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a job from-slurm needs no file; outside it says so."""
    assert cli("cluster", "from-slurm").code == 2
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "a100:4")
    result = cli("cluster", "from-slurm", "--json")
    assert result.document["cluster"] == {"gpu": "a100-sxm-80gb", "nodes": 4, "gpus_per_node": 4}


def test_findings_of_many_nodes_are_shortened(cli: Cli, tmp_path: Path) -> None:
    """Ten nodes with the same fault: three are printed, all are in the JSON."""
    block = text("slurm_scontrol.txt").split("\n\n")[0].replace("State=IDLE", "State=IDLE+DRAIN")
    nodes = [block.replace("gpu-01", f"gpu-{number:02}") for number in range(10)]
    file = tmp_path / "nodes.txt"
    file.write_text("\n\n".join([*nodes, text("slurm_scontrol.txt").split("\n\n")[0].replace("gpu-01", "gpu-10")]))
    result = cli("cluster", "from-slurm", str(file))
    assert result.out.count("no job starts there") == 3
    assert "7 more like this" in result.out
    document = cli("cluster", "from-slurm", str(file), "--json").document
    assert sum(finding["id"] == "node-unusable" for finding in document["findings"]) == 10


def test_names_cannot_move_the_cursor(cli: Cli, tmp_path: Path) -> None:
    """Control characters of a name, also escaped ones of JSON, reach neither terminal nor file."""
    node = tmp_path / "node.json"
    node.write_text(text("k8s_node.json").replace("train-0", "a\\u001b[31mred\\n"), encoding="utf-8")
    out = tmp_path / "cluster.yaml"
    result = cli("cluster", "from-kubernetes", str(node), "--out", str(out))
    assert result.code == 0
    assert "\x1b" not in result.out
    assert ClusterFile.model_validate(yaml.safe_load(out.read_text(encoding="utf-8"))).nodes == 1


@pytest.mark.parametrize("system", INSTANCES.values())
def test_machine_types_of_clouds_are_systems(cli: Cli, system: str, tmp_path: Path) -> None:
    """Every machine type leads to a reference system that the planner has."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"system: {system}\nnodes: 1\n", encoding="utf-8")
    result = cli("estimate", "--cluster", str(file), "--model", "llama-3.1-8b", "--json")
    assert result.code in (0, 3), result.out


@pytest.mark.parametrize(
    ("name", "gpu", "cluster", "told"),
    [
        ("topo_16xv100_dgx2.txt", "v100", {"gpus_per_node": 16, "domain_gpus": 16}, None),
        ("topo_8xh800.txt", "h800", {"gpus_per_node": 8}, None),
        ("topo_8xh800.txt", "h100", {"gpus_per_node": 8}, "8 NVLinks here, h100-sxm-80gb has 18: links are up to 2.2"),
        ("topo_4xh100_links_down.txt", "h100", {"gpus_per_node": 4}, "15 NVLinks here, h100-sxm-80gb has 18"),
        ("topo_4xh100_links_down.txt", "a100", {"gpus_per_node": 4}, "18 NVLinks here, a100-sxm-80gb has 12"),
        ("topo_4xa100_mesh.txt", "a100", {"gpus_per_node": 4}, None),
        ("topo_8xv100_cube_mesh.txt", "v100", {"gpus_per_node": 8}, None),
        ("smi_nvlink_down.txt", "h100", {"gpus_per_node": 4}, "15 NVLinks here, h100-sxm-80gb has 18"),
    ],
)
def test_links_are_those_of_the_gpu(cli: Cli, name: str, gpu: str, cluster: dict[str, int], told: str | None) -> None:
    """All 16 GPUs of a DGX-2 are one domain; a GPU with other links than its kind has is told."""
    document = cli("cluster", "read", sample(name), "--gpu", gpu, "--json").document
    assert {key: document["cluster"].get(key) for key in ("gpus_per_node", "domain_gpus")} == {
        "domain_gpus": None,
        **cluster,
    }
    found = [finding["message"] for finding in document["findings"] if finding["id"] == "nvlink-count"]
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


def test_makers_are_not_mixed(cli: Cli, tmp_path: Path) -> None:
    """NVIDIA and AMD GPUs share no job; --gpu plans with the nodes of one; a node that names none is told."""
    block = "NodeName=n{} Gres=gpu:{}8 State=IDLE\n"
    nodes = tmp_path / "nodes.txt"
    nodes.write_text("".join(block.format(i, kind) for i, kind in enumerate(("h100:", "mi300x:", ""), start=1)))
    refused = cli("cluster", "read", str(nodes))
    assert refused.code == 2
    assert "no job spans GPUs of amd and nvidia" in refused.err
    document = cli("cluster", "read", str(nodes), "--gpu", "mi300x", "--json").document
    assert (document["cluster"]["gpu"], document["cluster"]["nodes"]) == ("mi300x", 2)
    (silent,) = [finding for finding in document["findings"] if finding["id"] == "gpu-not-named"]
    assert silent["where"] == "n3"


@pytest.mark.parametrize(
    ("labels", "gpu"),
    [
        ({"node.kubernetes.io/instance-type": "Standard_ND96isr_H100_v5"}, "h100-sxm-80gb"),
        (
            {"node.kubernetes.io/instance-type": "p4d.24xlarge", "k8s.amazonaws.com/accelerator": "nvidia-tesla-a100"},
            "a100-sxm-40gb",
        ),
    ],
)
def test_machine_types_name_the_gpu(cli: Cli, tmp_path: Path, labels: dict[str, str], gpu: str) -> None:
    """Where no label does, or it leaves the variant open."""
    status = {"capacity": {"nvidia.com/gpu": "8"}}
    node = tmp_path / "node.json"
    node.write_text(json.dumps({"kind": "Node", "metadata": {"name": "n", "labels": labels}, "status": status}))
    document = cli("cluster", "read", str(node), "--json").document
    assert document["cluster"]["gpu"] == gpu
    assert "variant-assumed" not in {finding["id"] for finding in document["findings"]}


def test_a_network_that_is_down(cli: Cli, tmp_path: Path) -> None:
    """No port is up: the reference's network is planned, and it is said that it is not there."""
    ports = tmp_path / "ibstat.txt"
    ports.write_text(text("ibstat_8xh100.txt").replace("State: Active", "State: Initializing"))
    document = cli("cluster", "read", sample("smi_8xh100.csv"), str(ports), "--json").document
    assert "nics_per_node" not in document["cluster"]
    assert "no-network" in {finding["id"] for finding in document["findings"]}


def test_nodes_with_several_kinds_are_not_taken_for_one(cli: Cli, tmp_path: Path) -> None:
    """A node with two kinds of GPU is refused, or left out where --gpu names one."""
    nodes = tmp_path / "nodes.txt"
    nodes.write_text("NodeName=n1 Gres=gpu:h100:4 State=IDLE\nNodeName=n2 Gres=gpu:h100:2,gpu:a100:2 State=IDLE\n")
    refused = cli("cluster", "from-slurm", str(nodes))
    assert refused.code == 2
    assert "h100 + a100" in refused.err
    document = cli("cluster", "from-slurm", str(nodes), "--gpu", "h100", "--json").document
    assert (document["cluster"]["nodes"], document["cluster"]["gpus_per_node"]) == (1, 4)
