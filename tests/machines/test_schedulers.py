"""Slurm, hostfiles, Kubernetes, Kueue, SkyPilot and Ray: nodes that a job can be given, and what is in the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.errors import InputError
from planner.machines import domain_of, identify, read_machines, size_of
from planner.machines.hostlist import expand, holes
from planner.machines.kubernetes import quantity
from planner.machines.slurm import from_environment
from tests.machines import ids, message, read, text


@pytest.mark.parametrize(
    ("line", "count"), list(zip(text("slurm_hostlists.txt").split(), [1, 4, 7, 6, 7, 4, 3], strict=True))
)
def test_host_lists(line: str, count: int) -> None:
    """Ranges, zero padding, several brackets, suffixes and plain names."""
    hosts = expand(line)
    assert len(hosts) == len(set(hosts)) == count


def test_names_of_a_host_list() -> None:
    """Digits are kept as the first number of a range has them, and order is that of the list."""
    assert expand("a[9-11]") == ("a9", "a10", "a11")
    assert expand("cn-[08-10].hpc") == ("cn-08.hpc", "cn-09.hpc", "cn-10.hpc")
    assert expand("b2,a[1-2]x[3-4]") == ("b2", "a1x3", "a1x4", "a2x3", "a2x4")


@pytest.mark.parametrize(
    "broken", ["n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[]", "n[[1]]", "n[1-99999999]", "n[1-999]m[1-999]", "a b;c", " "]
)
def test_broken_host_lists_are_refused(broken: str) -> None:
    """Each is an error that shows what a list looks like, also where it would fill the memory."""
    with pytest.raises(InputError, match="a host list looks like"):
        expand(broken)


def test_holes() -> None:
    """A missing number between neighbours is a hole; a jump to another rack is not."""
    assert holes(expand("n[001-007,009-016]")) == ("n008",)
    assert holes(expand("n[1-4,101-104]")) == ()
    assert holes(["login", "n1", "n2"]) == ()
    assert holes(expand("cn-[1-3,5-6].hpc")) == ("cn-4.hpc",)


def test_fifteen_nodes_of_sixteen() -> None:
    """The variables of a job: 120 GPUs, the missing node and what follows, and two misleading variables."""
    inventory = read("slurm_env.txt")
    size = size_of(inventory)
    assert size.nodes is not None
    assert size.gpus_per_node is not None
    assert (size.nodes, size.nodes * size.gpus_per_node) == (15, 120)
    assert inventory.product == "h100"
    assert inventory.host_memory_mib == 1966080
    assert inventory.levels == ("block",)
    assert "dgx-008" in message(inventory, "node-missing")
    assert "SLURM_CPUS_ON_NODE=2 contradicts SLURM_CPUS_PER_TASK=24" in message(inventory, "cpus-contradict")
    assert "submit host" in message(inventory, "launch-node")
    assert "dgx-001" in message(inventory, "launch-node")
    assert "1, 3, 5, 15" in message(inventory, "nodes-odd")


def test_variables_that_disagree() -> None:
    """Exported in the shell's own form; the list wins over the count, the request over the step."""
    inventory = read("slurm_export.sh")
    assert [node.name for node in inventory.nodes][:4] == ["a1b01", "a1b02", "a1b03", "a2b01"]
    assert (size_of(inventory).nodes, size_of(inventory).gpus_per_node) == (6, 8)
    assert {"node-count-differs", "gpu-count-differs", "gpus-uneven"} <= ids(inventory)


@pytest.mark.parametrize(
    ("variables", "product", "count"),
    [
        ({"SLURM_GPUS_PER_NODE": "8"}, None, 8),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:4"}, "a100", 4),
        ({"SLURM_GPUS_ON_NODE": "4"}, None, 4),
        ({"SLURM_JOB_GPUS": "0-3"}, None, 4),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS": "h200:16"}, "h200", 8),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_TASK": "h100:2", "SLURM_NTASKS_PER_NODE": "4"}, "h100", 8),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}, None, 4),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TRES_PER_TASK": "cpu=6,gres/gpu:a100=1", "SLURM_NTASKS": "8"}, "a100", 4),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "4"}, None, 8),
    ],
    ids=lambda value: str(value)[:40],
)
def test_ways_to_ask_for_gpus(variables: dict[str, str], product: str | None, count: int) -> None:
    """Every variable that carries GPUs is understood."""
    inventory = from_environment(variables)
    assert (inventory.product, inventory.gpus_per_node) == (product, count)


@pytest.mark.parametrize(
    ("variables", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "491520", "SLURM_MEM_PER_CPU": "1", "SLURM_CPUS_ON_NODE": "64"}, 491520),
        ({"SLURM_MEM_PER_CPU": "8000", "SLURM_CPUS_ON_NODE": "64"}, 512000),
        ({"SLURM_MEM_PER_GPU": "120000"}, 480000),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
    ],
    ids=str,
)
def test_ways_to_ask_for_memory(variables: dict[str, str], mib: int | None) -> None:
    """By node, core or GPU; 0 is all of the node, whose size is not said."""
    assert from_environment({"SLURM_GPUS_ON_NODE": "4", **variables}).host_memory_mib == mib


@pytest.mark.parametrize(
    "variables", [{}, {"HOME": "/"}, {"SLURM_JOB_ID": "7"}, {"SLURM_HET_SIZE": "2", "SLURM_GPUS_ON_NODE": "8"}], ids=str
)
def test_variables_that_say_nothing_are_refused(variables: dict[str, str]) -> None:
    """Outside a job, or in one of several components, there is nothing to plan for."""
    with pytest.raises(InputError):
        from_environment(variables)


def test_nodes_of_slurm() -> None:
    """Drained and silent nodes do not count, busy ones do; MIG instances are no GPUs; defaults are no memory."""
    inventory = read("slurm_scontrol.txt")
    nodes = {node.name: node for node in inventory.nodes}
    assert [name for name, node in nodes.items() if node.usable] == ["gpu-01", "gpu-03", "gpu-05", "gpu-07"]
    assert (nodes["gpu-01"].gpus, nodes["gpu-01"].product, nodes["gpu-01"].cores) == (8, "h100", 112)
    assert nodes["gpu-01"].host_memory_mib == 2063937
    assert nodes["gpu-02"].busy_gpus == 1
    assert (nodes["gpu-07"].gpus, nodes["gpu-07"].host_memory_mib) == (6, None)
    assert (size_of(inventory).nodes, size_of(inventory).gpus_per_node) == (3, 8)
    told = {finding.message for finding in inventory.findings if finding.id == "node-unusable"}
    assert any("gpu-02 is MIXED+DRAIN" in line and "NVLink errors on GPU 5" in line for line in told)
    assert any("gpu-06 is DOWN*" in line for line in told)
    assert "gpu-07 has 7 MIG instances" in message(inventory, "mig-enabled")
    assert "login-1" in message(inventory, "node-without-gpus")
    assert "gpu-04" in message(inventory, "node-missing")


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        *(
            (state, True)
            for state in ("IDLE", "ALLOCATED", "MIXED", "MIXED+PLANNED", "IDLE~", "IDLE+CLOUD", "COMPLETING")
        ),
        *((state, False) for state in ("IDLE+DRAIN", "IDLE*", "DOWN", "DOWN*+DRAIN", "DRAINED", "IDLE+MAINT+RESERVED")),
    ],
)
def test_states_of_slurm_nodes(state: str, usable: bool) -> None:
    """Flags behind the state decide whether jobs start."""
    block = f"NodeName=n1 Arch=x86_64\n   Gres=gpu:8\n   State={state} ThreadsPerCore=1\n"
    assert read_machines(block).nodes[0].usable is usable


def test_uneven_hostfile() -> None:
    """Slots differ, one line is in MPICH's spelling: 28 GPUs, of which 3 x 8 can be planned."""
    inventory = read("hostfile")
    assert [(node.name, node.gpus) for node in inventory.nodes] == [
        *(("worker-1", 8), ("worker-2", 8), ("worker-3", 4), ("worker-4", 8))
    ]
    assert "28 in all" in message(inventory, "slots-uneven")
    assert "mpich spelling worker-4:8" in message(inventory, "mpich-spelling")
    size = size_of(inventory)
    assert (size.nodes, size.gpus_per_node) == (3, 8)
    assert "without worker-3" in size.findings[0].message
    assert size_of(inventory, 4).nodes == 4


@pytest.mark.parametrize(
    "broken", ["a slots=eight\n", "a slots=0\n", "a b c\n", "# nothing\n", "a:99999\n", "a slots\n"]
)
def test_broken_hostfiles_are_refused(broken: str) -> None:
    """The line is named."""
    with pytest.raises(InputError, match="host"):
        read_machines(broken, source="hostfile")


def test_hostfile_with_ranges_and_repeats() -> None:
    """Ranges are expanded, repeated hosts add up as in Open MPI and are told."""
    inventory = read_machines("me@n[1-2] slots=4 max_slots=8\nn1 slots=4\n", source="hostfile")
    assert [(node.name, node.gpus) for node in inventory.nodes] == [("n1", 8), ("n2", 4)]
    assert "host-repeated" in ids(inventory)


def test_kubernetes_node() -> None:
    """Seven of eight GPUs are whole, two slices beside them; memory is the smaller of two that contradict."""
    inventory = read("k8s_node.json")
    (node,) = inventory.nodes
    assert (node.gpus, node.usable_gpus, node.slices) == (8, 7, 2)
    assert node.host_memory_mib == 2000 * 1024
    assert (node.memory_mib, node.product) == (81559, "NVIDIA-H100-80GB-HBM3")
    assert (node.cores, node.nics, node.domain) == (96, 32, None)
    assert "counts physical GPUs and ignores MIG" in message(inventory, "mig-enabled")
    assert "memory-contradicts" in ids(inventory)
    assert inventory.levels == ("cloud.example/topology-block", "cloud.example/topology-rack")


def test_kubernetes_list() -> None:
    """AMD nodes, a GPU shared four times that is one, cordoned and silent nodes, a control plane."""
    inventory = read("k8s_amd_and_shared.json")
    nodes = {node.name: node for node in inventory.nodes}
    assert (nodes["amd-0"].gpus, nodes["amd-0"].product) == (8, "AMD_Instinct_MI300X_OAM")
    assert (nodes["shared-0"].gpus, nodes["shared-0"].product) == (1, "NVIDIA-L4")
    assert [name for name, node in nodes.items() if not node.usable] == ["amd-2", "amd-3"]
    assert "control-0" in message(inventory, "node-without-gpus")
    assert "4 shares of 1 GPU" in message(inventory, "gpu-shared")
    assert (size_of(inventory).nodes, size_of(inventory).gpus_per_node) == (2, 8)


def test_nodes_without_kind_and_name_of_the_gpu() -> None:
    """Items of a list may lack their kind; AMD's device id stands in for the name."""
    node = json.loads(text("k8s_amd_and_shared.json"))["items"][0]
    del node["kind"]
    node["metadata"]["labels"] = {"amd.com/gpu.device-id": "74a1"}
    inventory = read_machines(json.dumps({"items": [node]}))
    assert inventory.nodes[0].product == "74a1"
    assert identify("74a1").accelerator.id == identify("0x74a1").accelerator.id == "mi300x"


def test_host_list_is_recognised() -> None:
    """A line with a bracket and nothing else needs no name of its kind."""
    assert size_of(read_machines("gpu-[001-004],login\n")).nodes == 5


def test_domain_from_cliques() -> None:
    """Eighteen nodes of two racks with nine each: a domain is 36 GPUs."""
    inventory = read("k8s_gb200_two_racks.json")
    domain, told = domain_of(inventory.nodes, 4)
    assert domain == 36
    assert told is not None
    assert inventory.nodes[0].cores == 144


def test_nodes_of_slices_only() -> None:
    """The single MIG strategy offers slices under the name of GPUs: none is whole."""
    inventory = read("k8s_mig_single.yaml")
    assert inventory.nodes[0].gpus == 0
    assert "56 MIG slices" in message(inventory, "mig-enabled")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("191450m", 191.45),
        ("2097152000Ki", 2097152000 * 1024),
        ("2029Gi", 2029 * 2**30),
        ("1Ti", 2**40),
        ("1e3", 1000),
        ("1.5G", 1.5e9),
        (8, 8),
        ("eight", None),
        ("-1", None),
        (None, None),
        (True, None),
        ("1e99", 1e99),
    ],
)
def test_quantities(written: object, value: float | None) -> None:
    """Kubernetes' suffixes; anything else is no number."""
    assert quantity(written) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    "broken",
    [
        '{"kind": "Node"',
        '{"kind": "Pod"}',
        '{"kind": "List", "items": []}',
        '{"kind": "Node", "status": 5, "metadata": []}',
        "kind: Node\n  bad: [",
        "[" * 5000,
    ],
    ids=["cut", "pod", "empty", "odd types", "broken yaml", "deep"],
)
def test_broken_nodes_are_refused(broken: str) -> None:
    """Never a traceback."""
    with pytest.raises(InputError):
        read_machines(broken, source="kubernetes")


def test_several_json_documents() -> None:
    """Documents one after the other, as two commands print them."""
    one: dict[str, Any] = json.loads(text("k8s_node.json"))
    two = {**one, "metadata": {**one["metadata"], "name": "train-1"}}
    inventory = read_machines(json.dumps(one) + "\n" + json.dumps(two), source="kubernetes")
    assert [node.name for node in inventory.nodes] == ["train-0", "train-1"]


def test_kueue() -> None:
    """Levels, widest first, and the flavor's GPU."""
    inventory = read("kueue.yaml")
    assert inventory.levels[0] == "cloud.example/topology-block"
    assert inventory.product == "NVIDIA-H100-80GB-HBM3"
    assert "topology-rack" in message(inventory, "network-levels")


def test_skypilot() -> None:
    """Three accelerators would do; ``H100:8`` in braces is one key of YAML."""
    inventory = read("skypilot.yaml")
    assert inventory.alternatives == (("H100", 8), ("H200", 8), ("A100-80GB", 8))
    assert (inventory.node_count, inventory.gpus_per_node) == (4, 8)


@pytest.mark.parametrize(
    ("stated", "product", "count"),
    [("H100:8", "H100", 8), ("{A100: 4}", "A100-40GB", 4), ("[V100:8]", "V100-16GB", 8), ("L4", "L4", 1)],
)
def test_spellings_of_skypilot(stated: str, product: str, count: int) -> None:
    """Text, mapping and list; SkyPilot's bare A100 and V100 are the small ones."""
    inventory = read_machines(f"resources:\n  accelerators: {stated}\n")
    assert (inventory.product, inventory.gpus_per_node) == (product, count)


def test_ray() -> None:
    """Thirty-two GPUs on four nodes; sums of memory are no host memory."""
    inventory = read("ray.json")
    assert (inventory.node_count, inventory.gpus_per_node, inventory.product) == (4, 8, "H100")
    assert "nvlink_domain_7f" in message(inventory, "nvlink-domains")
    assert "memory" in inventory.unread


def test_sinfo() -> None:
    """A node comes once for each partition; short states and marks count as their long forms."""
    inventory = read("slurm_sinfo.txt", "slurm")
    assert [node.name for node in inventory.nodes if node.usable] == ["gpu01", "gpu02", "gpu06"]
    assert {(node.gpus, node.product, node.host_memory_mib) for node in inventory.nodes} == {(8, "h100", 2063000)}
    assert "gpu06 is resv" in message(inventory, "node-reserved")
    shell = "[me@login ~]$ sinfo -N\nNODELIST GRES STATE\nn1 gpu:a100:8 idle\n[me@login ~]$\n"
    assert [node.name for node in read_machines(shell).nodes] == ["n1"]
    assert "states-not-shown" in ids(read_machines("NODELIST GRES\ngpu[01-04] gpu:a100:8\n"))
    with pytest.raises(InputError, match="which nodes have GPUs") as problem:
        read_machines("PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\ngpu* up infinite 2 idle n[1-2]\n")
    assert "sinfo -N -o" in str(problem.value)
    with pytest.raises(InputError, match="columns of the header"):
        read_machines("NODELIST GRES STATE\ngpu01 gpu:8\n")


def test_nodes_in_maintenance_and_of_slices() -> None:
    """Both spellings of a maintenance state; a node of MIG slices is no hole in the numbering."""
    block = "NodeName=n{} Gres={} State={} \n"
    kinds = [("gpu:h100:8", "IDLE"), ("gpu:h100:8", "IDLE+MAINTENANCE+RESERVED"), ("gpu:1g.10gb:56", "IDLE")]
    inventory = read_machines("".join(block.format(i, *kind) for i, kind in enumerate([*kinds, kinds[0]], start=1)))
    assert [(node.name, node.usable) for node in inventory.nodes] == [("n1", True), ("n2", False), ("n4", True)]
    assert "n3 has 56 MIG instances" in message(inventory, "mig-enabled")
    assert "node-missing" not in ids(inventory)
    unnamed = read_machines("NodeName=n1 Gres=gpu:(null):4 State=IDLE\n")
    assert (unnamed.nodes[0].gpus, unnamed.nodes[0].product) == (4, None)


@pytest.mark.parametrize(
    ("labels", "product"),
    [
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "A100-SXM4-40GB"),
        ({"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"}, "H100-SXM5-80GB"),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, "nvidia-l4"),
        ({"k8s.amazonaws.com/accelerator": "nvidia-tesla-v100"}, "nvidia-tesla-v100"),
        ({"gpu.nvidia.com/model": "H100_NVLINK_80GB"}, "H100_NVLINK_80GB"),
        ({"beta.amd.com/gpu.device-id.74b5": "8"}, "74b5"),
    ],
)
def test_labels_that_name_the_gpu(labels: dict[str, str], product: str) -> None:
    """Google's names stand for one variant each; AMD's older labeller has the device id in the label's name."""
    node = {
        "kind": "Node",
        "metadata": {"name": "n", "labels": labels},
        "status": {"capacity": {"nvidia.com/gpu": "8"}},
    }
    assert read_machines(json.dumps(node)).nodes[0].product == product


def test_slurm_as_json() -> None:
    """``scontrol show node --json``: states are lists, cores are those of a socket."""
    node: dict[str, Any] = {
        "name": "g1",
        "gres": "gpu:h100:4(S:0-1)",
        "gres_used": "gpu:h100:1(IDX:0)",
        "state": ["MIXED"],
    }
    node |= {"real_memory": 524288, "sockets": 2, "cores": 16, "cpus": 32, "tres": "cpu=32,gres/gpu=4", "reason": ""}
    down = {**node, "name": "g2", "state": ["IDLE", "DRAIN"], "reason": "ECC errors"}
    plain = {"name": "c1", "gres": "", "state": ["IDLE"], "real_memory": 1}
    inventory = read_machines(json.dumps({"nodes": [node, down, plain], "meta": {}, "errors": []}))
    assert inventory.source == "scontrol show node --json"
    (first, second) = inventory.nodes
    assert (first.gpus, first.busy_gpus, first.product) == (4, 1, "h100")
    assert (first.host_memory_mib, first.cores) == (524288, 32)
    assert not second.usable
    assert "IDLE+DRAIN: no job starts there (ECC errors)" in message(inventory, "node-unusable")


def test_host_lists_of_several_lines_are_recognised() -> None:
    """One list a line, as files of them have it."""
    assert len(read_machines("node001\nnode[002-004]\nlogin,gpu[1-2]\n").nodes) == 7


def test_slots_that_are_cores() -> None:
    """Open MPI's files count processes: 96 of them on a host are no 96 GPUs."""
    inventory = read_machines("n1 slots=96\nn2 slots=96\n")
    assert [node.gpus for node in inventory.nodes] == [None, None]
    assert "--gpus-per-node" in message(inventory, "slots-not-gpus")
