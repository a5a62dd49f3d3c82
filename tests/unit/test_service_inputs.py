"""Options and files become specs: counts with suffixes, cluster files, defaults and what is said about them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.catalog import load_accelerator, load_model
from planner.errors import InputError
from planner.service import ClusterInput, JobInput, resolve_cluster, resolve_job, resolve_model
from planner.service.inputs import count_with_suffix, read_mapping
from planner.service.jobs import default_global_batch
from planner.service.layout import near_even
from planner.service.pins import parse_pins
from planner.service.searching import node_counts
from planner.units import GIB


@pytest.mark.parametrize(
    ("text", "count", "tokens"),
    [
        ("512", 512, False),
        ("4M", 4_000_000, True),
        ("4Mi", 4_194_304, True),
        ("1.5M", 1_500_000, True),
        ("16ki", 16_384, True),
        ("2G", 2_000_000_000, True),
        (" 8 ", 8, False),
    ],
)
def test_counts(text: str, count: int, tokens: bool) -> None:
    """k, M, G are decimal, Ki, Mi, Gi binary; only a suffix makes it tokens."""
    assert count_with_suffix(text, "x") == (count, tokens)


@pytest.mark.parametrize("text", ["", "M", "-1", "1e6", "0", "0.5", "4MB", "1,024", "\u0664", "4Bi", "9" * 30])
def test_bad_counts(text: str) -> None:
    """What is not a positive whole number with a known suffix is refused."""
    with pytest.raises(InputError) as caught:
        count_with_suffix(text, "x")
    assert caught.value.hint


def test_reference_system_fills_the_cluster() -> None:
    """A bare accelerator takes its reference node, and every value taken is an assumption."""
    resolved = resolve_cluster(ClusterInput(gpu="h100", gpus=64))
    cluster = resolved.cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.nics_per_node) == (8, 8, 8)
    assert cluster.nic_bytes_per_s == 50e9
    assert {a.field for a in resolved.assumptions} >= {"cluster.gpus_per_node", "cluster.nic_bytes_per_s"}


def test_options_win_over_the_file(tmp_path: Path) -> None:
    """The cluster file is read, options replace single values, and given values are no assumptions."""
    path = tmp_path / "cluster.yaml"
    path.write_text("gpu: h100\nnodes: 4\nnic_gbps: 200\nhost_memory_gib: 1000\nprice_usd_per_gpu_hour: 0\n")
    resolved = resolve_cluster(ClusterInput(file=path, nic_gbps=100.0))
    assert resolved.cluster.gpus == 32
    assert resolved.cluster.nic_bytes_per_s == 12.5e9
    assert resolved.cluster.host_memory_bytes_per_node == 1000 * GIB
    assert resolved.cluster.usd_per_gpu_hour == 0
    fields = {a.field for a in resolved.assumptions}
    assert not fields & {"cluster.nic_bytes_per_s", "cluster.host_memory_bytes_per_node", "cluster.usd_per_gpu_hour"}
    assert resolve_cluster(ClusterInput(file=path, gpus=8)).cluster.gpus == 8


def test_a_network_of_ones_own_is_not_the_measured_one() -> None:
    """The measured bus bandwidth of the reference system is dropped as soon as the NICs differ."""
    assert resolve_cluster(ClusterInput(gpu="h100", gpus=64, nics=4)).cluster.network_bus_bytes_per_s is None


def test_smaller_nodes_have_a_share_of_the_host() -> None:
    """Half a node has half of the NICs and half of the host memory."""
    whole = resolve_cluster(ClusterInput(gpu="h100", gpus=16)).cluster
    half = resolve_cluster(ClusterInput(gpu="h100", gpus=16, gpus_per_node=4)).cluster
    assert half.nics_per_node * 2 == whole.nics_per_node
    assert half.host_memory_bytes_per_node * 2 == whole.host_memory_bytes_per_node
    assert half.domain_gpus == 4


def test_precision_follows_the_accelerator() -> None:
    """bf16 where it exists, fp16 where it does not, and both are said."""
    model = load_model("llama-3.1-8b").spec
    for gpu, expected in (("h100", "bf16"), ("v100-sxm2-32gb", "fp16")):
        cluster = resolve_cluster(ClusterInput(gpu=gpu, gpus=8)).cluster
        resolved = resolve_job(JobInput(), model, cluster)
        assert resolved.job.precision == expected
        assert "job.precision" in {a.field for a in resolved.assumptions}


def test_long_sequences_are_warned_about() -> None:
    """A sequence longer than the release supports is allowed with a warning."""
    model = load_model("llama-2-7b").spec
    cluster = resolve_cluster(ClusterInput(gpu="h100", gpus=8)).cluster
    assert resolve_job(JobInput(seq_len=8192), model, cluster).warnings
    assert not resolve_job(JobInput(seq_len=4096), model, cluster).warnings


@pytest.mark.parametrize("gpus", [1, 2, 3, 6, 8, 12, 16, 24, 96, 128, 130, 512, 768, 1000, 1024, 4096, 16384])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b"])
def test_default_batch(name: str, gpus: int) -> None:
    """The default batch is near the usual token count and shares its factors with the number of GPUs."""
    model = load_model(name).spec
    batch = default_global_batch(model, gpus, 8192)
    assert batch >= 1
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    assert batch % odd == 0
    if gpus <= 256:
        assert batch % gpus == 0
    if odd <= 8:
        assert batch * 8192 <= 1.5 * max(4 * 2**20, gpus * 2**10)


def test_tokens_with_a_suffix_hold_whole_sequences() -> None:
    """4M tokens of 8192 are 512 sequences, and the assumption says so; of 8000 they are 500."""
    model, cluster = load_model("70b").spec, resolve_cluster(ClusterInput(gpu="h100", gpus=128)).cluster
    binary = resolve_job(JobInput(seq_len=8192, global_batch="4M"), model, cluster)
    assert binary.job.global_batch == 512
    assert any(a.field == "job.global_batch" and "4194304" in a.why for a in binary.assumptions)
    assert resolve_job(JobInput(seq_len=8000, global_batch="4M"), model, cluster).job.global_batch == 500
    with pytest.raises(InputError, match="whole sequences"):
        resolve_job(JobInput(seq_len=7777, global_batch="4M"), model, cluster)


def test_default_batch_of_the_usual_question() -> None:
    """70B on 128 GPUs: 512 sequences of 8192 tokens, 4 x 2**20 tokens."""
    assert default_global_batch(load_model("70b").spec, 128, 8192) == 512


@pytest.mark.parametrize("gpus", [1_000_000, 999_999, 600_001])
@pytest.mark.parametrize("seq_len", [1, 7])
def test_the_assumed_batch_is_one_that_a_job_can_have(gpus: int, seq_len: int) -> None:
    batch = default_global_batch(load_model("8b").spec, gpus, seq_len)
    assert 0 < batch <= 100_000_000
    assert batch % gpus == 0


def test_models_by_name_file_and_folder(tmp_path: Path) -> None:
    """A catalogue name, a dimension file and a missing file."""
    assert resolve_model("llama-3.1-8b")[0].layers == 32
    assert resolve_model("70b")[1], "a bare size says which model it means"
    path = tmp_path / "own.yaml"
    path.write_text(
        "layers: 4\nhidden: 256\nffn: 1024\nheads: 4\nkv_heads: 4\nhead_dim: 64\nvocab: 1000\nmax_seq: 512\n"
    )
    spec, _, _ = resolve_model(str(path))
    assert (spec.name, spec.layers) == ("own", 4)
    path.write_text("layers: 4\nhiden: 256\n")
    with pytest.raises(InputError, match=r"own\.yaml"):
        resolve_model(str(path))
    with pytest.raises(InputError, match="no such file"):
        resolve_model(str(tmp_path))


def test_pins() -> None:
    """Pins are typed, may be grouped, and a repeated equal pin is no contradiction."""
    pins = parse_pins(["tp=8, zero-stage=1", "sequence_parallel=no", "recompute=full", "tp=8"])
    assert pins == {"recompute": "full", "sequence_parallel": False, "tp": 8, "zero_stage": 1}
    assert pins["sequence_parallel"] is False


@pytest.mark.parametrize(("layers", "stages"), [(80, 4), (61, 8), (7, 7), (32, 3), (5, 8)])
def test_near_even(layers: int, stages: int) -> None:
    """The split holds every layer and no stage has more than one layer above another."""
    split = near_even(layers, stages)
    assert (len(split), sum(split)) == (stages, layers)
    assert max(split) - min(split) <= 1


def test_node_counts() -> None:
    """All counts of a small cluster, a bounded selection of a large one, always with the whole."""
    assert node_counts(3) == [3, 2, 1]
    many = node_counts(720)
    assert many[0] == 720
    assert len(many) <= 24
    assert many == sorted(set(many), reverse=True)


def test_accelerators_have_a_node() -> None:
    """Every accelerator of the catalogue makes a cluster of one node without further options."""
    from planner.catalog import accelerator_ids

    for name in accelerator_ids():
        per_node = resolve_cluster(ClusterInput(gpu=name, nodes=1)).cluster
        assert per_node.accelerator == load_accelerator(name)
        assert per_node.gpus == per_node.gpus_per_node


@pytest.mark.parametrize("gpus", [True, 8.0, "8", float("nan"), -1, 10**30, None])
def test_library_callers_are_checked_too(gpus: Any) -> None:
    """Booleans, floats and text are no GPU counts, also without the command line in front."""
    with pytest.raises(InputError) as caught:
        resolve_cluster(ClusterInput(gpu="h100", gpus=gpus))
    assert caught.value.hint


@pytest.mark.parametrize(
    "job", [{"seq_len": True}, {"global_batch": True}, {"global_batch": 1.5}, {"memory_margin": "0"}]
)
def test_library_jobs_are_checked_too(job: dict[str, Any]) -> None:
    """The same for the job."""
    cluster = resolve_cluster(ClusterInput(gpu="h100", gpus=8)).cluster
    with pytest.raises(InputError):
        resolve_job(JobInput(**job), load_model("llama-3.1-8b").spec, cluster)


@given(text=st.text(max_size=60))
def test_texts_never_crash(text: str) -> None:
    """Whatever is typed is read or refused."""
    for read in (lambda: count_with_suffix(text, "x"), lambda: parse_pins([text]), lambda: resolve_model(text)):
        with contextlib.suppress(InputError):
            read()


@given(content=st.binary(max_size=200) | st.text("{}[]&*!|>:,-?'\"\n \tabgpus0189.~", max_size=80).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_never_crash(content: bytes, tmp_path: Path) -> None:
    """Whatever a file holds, it is a mapping or refused, as YAML and as JSON."""
    for name in ("cluster.yaml", "plan.json"):
        path = tmp_path / name
        path.write_bytes(content)
        with contextlib.suppress(InputError):
            assert isinstance(read_mapping(path, name), dict)
        with contextlib.suppress(InputError):
            resolve_cluster(ClusterInput(file=path))
