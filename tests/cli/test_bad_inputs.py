"""Whatever a user types wrongly ends in exit code 2, one message with a hint, no traceback, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import SMALL_JOB, Cli

GOOD = ["suggest", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100"]

OPTIONS = {
    "zero gpus": ["--gpus", "0"],
    "negative gpus": ["--gpus", "-8"],
    "too many gpus": ["--gpus", "1000001"],
    "huge gpus": ["--gpus", "9" * 400],
    "gpus in words": ["--gpus", "eight"],
    "fractional gpus": ["--gpus", "8.5"],
    "boolean gpus": ["--gpus", "true"],
    "broken nodes": ["--gpus", "12"],
    "nodes contradict": ["--nodes", "3"],
    "unknown gpu": ["--gpu", "h1000x"],
    "empty gpu": ["--gpu", ""],
    "NUL in gpu": ["--gpu", "h100\0"],
    "newline in gpu": ["--gpu", "h100\nb200"],
    "unknown model": ["--model", "llama-3-71b"],
    "empty model": ["--model", ""],
    "NUL in model": ["--model", "70b\0"],
    "NUL in model path": ["--model", "./a\0b.json"],
    "very long model": ["--model", "m" * 5000],
    "missing config": ["--model", "./nowhere/config.json"],
    "zero sequence": ["--seq-len", "0"],
    "huge sequence": ["--seq-len", "1000000000000"],
    "zero batch": ["--global-batch", "0"],
    "negative batch": ["--global-batch", "-4"],
    "batch in words": ["--global-batch", "many"],
    "batch NaN": ["--global-batch", "nan"],
    "batch with unknown suffix": ["--global-batch", "4Z"],
    "batch not whole sequences": ["--global-batch", "100k"],
    "unknown precision": ["--precision", "int8"],
    "unknown loss": ["--loss", "liger"],
    "unknown objective": ["--objective", "speed"],
    "unknown backend": ["--backend", "megatronn"],
    "margin NaN": ["--memory-margin", "nan"],
    "margin 1": ["--memory-margin", "1"],
    "margin negative": ["--memory-margin", "-0.1"],
    "pin without value": ["--pin", "tp"],
    "pin of nothing": ["--pin", ""],
    "pin unknown": ["--pin", "tpp=8"],
    "pin zero": ["--pin", "tp=0"],
    "pin negative": ["--pin", "tp=-1"],
    "pin huge": ["--pin", "tp=" + "9" * 50],
    "pin twice": ["--pin", "tp=2,tp=4"],
    "pin stage 4": ["--pin", "zero_stage=4"],
    "pin not a number": ["--pin", "micro_batch=\u0663"],
    "top zero": ["--top", "0"],
    "time limit zero": ["--time-limit", "0"],
    "time limit infinite": ["--time-limit", "inf"],
    "price negative": ["--price", "-1"],
    "price NaN": ["--price", "nan"],
    "nic rate zero": ["--nic-gbps", "0"],
    "nics zero": ["--nics", "0"],
    "oversubscription below one": ["--oversubscription", "0.5"],
    "host memory zero": ["--host-memory-gib", "0"],
    "host memory of no byte": ["--host-memory-gib", "1e-300"],
    "nic rate of no byte": ["--nic-gbps", "1e-300"],
    "node of 0": ["--gpus-per-node", "0"],
    "unknown option": ["--gpuz", "8"],
    "missing cluster": ["--cluster", "nowhere.yaml"],
    "NUL in cluster": ["--cluster", "a\0b.yaml"],
    "option without value": ["--top"],
    "unknown launcher": ["--out", "new", "--launcher", "mpi"],
}

CLUSTERS = {
    "empty": b"",
    "a list": b"- 1\n- 2\n",
    "a word": b"h100\n",
    "not yaml": b"gpu: [h100\n",
    "unknown key": b"gpu: h100\ngpu_per_node: 8\n",
    "wrong type": b"gpu: h100\ngpus: many\n",
    "text for a number": b'gpu: h100\ngpus: "8"\n',
    "boolean for a number": b"gpu: h100\ngpus: true\n",
    "nan": b"gpu: h100\ngpus: 8\nnic_gbps: .nan\n",
    "infinite": b"gpu: h100\ngpus: 8\nnic_gbps: .inf\n",
    "negative": b"gpu: h100\ngpus: -8\n",
    "rate of no byte": b"gpu: h100\ngpus: 8\nnic_gbps: 1.0e-300\n",
    "memory of no byte": b"gpu: h100\ngpus: 8\nmemory_gib_per_gpu: 1.0e-300\n",
    "host memory of no byte": b"gpu: h100\ngpus: 8\nhost_memory_gib: 1.0e-300\n",
    "NVMe of no byte": b"gpu: h100\ngpus: 8\nnvme_gb_per_s: 1.0e-300\n",
    "null key": b"~: 1\n",
    "repeated key": b"gpu: h100\ngpu: b200\n",
    "tag": b"gpu: !!python/object/apply:os.system ['true']\n",
    "alias": b"a: &a [x, x]\nb: [*a, *a]\n",
    "date": b"gpus: 2024-99-99\n",
    "huge integer": b"gpus: " + b"9" * 5000 + b"\n",
    "deep": b"[" * 5000,
    "two documents": b"gpu: h100\n---\ngpu: b200\n",
    "not utf-8": b"gpu: h\xff100\n",
    "control characters": b"gpu: h\x01100\n",
    "nul": b"gpu: h100\x00\n",
    "too large": b"# " + b"x" * 1_100_000,
    "unknown system": b"system: dgx-z\ngpus: 8\n",
    "system of another gpu": b"system: dgx-h100\ngpu: b200\ngpus: 8\n",
}


def refused(cli: Cli, arguments: list[str], folder: Path) -> str:
    """The message of a refused command line; stdout is empty, nothing appears in ``folder``."""
    before = sorted(folder.rglob("*"))
    result = cli(*arguments)
    assert result.code == 2, (result.out, result.err)
    assert result.out == ""
    assert "Traceback" not in result.err
    assert result.err.startswith("error: ")
    assert "hint: " in result.err
    assert sorted(folder.rglob("*")) == before
    return result.err


@pytest.mark.parametrize("extra", OPTIONS.values(), ids=OPTIONS)
def test_options(cli: Cli, extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong option value is refused with a hint."""
    monkeypatch.chdir(tmp_path)
    refused(cli, [*GOOD, *extra], tmp_path)


@pytest.mark.parametrize("content", CLUSTERS.values(), ids=CLUSTERS)
def test_cluster_files(cli: Cli, content: bytes, tmp_path: Path) -> None:
    """A cluster file that cannot be used is refused with a hint and its name."""
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    message = refused(cli, ["suggest", "--model", "llama-3.1-8b", "--cluster", str(path)], tmp_path)
    assert len(message) < 2000


def test_cluster_is_a_folder(cli: Cli, tmp_path: Path) -> None:
    """A folder given for a file is called that."""
    assert "this is a folder" in refused(cli, [*GOOD, "--cluster", str(tmp_path)], tmp_path)


@pytest.mark.parametrize("name", ["plan.json", "folder"])
def test_render_of_nothing(cli: Cli, name: str, tmp_path: Path) -> None:
    """A missing plan and a folder for a plan are refused."""
    (tmp_path / "folder").mkdir()
    refused(cli, ["render", str(tmp_path / name)], tmp_path)


PLANS = {
    "empty object": "{}",
    "wrong version": '{"schema_version": 2}',
    "version is true": '{"schema_version": true}',
    "a list": "[]",
    "not json": "{",
    "NaN": '{"schema_version": NaN}',
    "missing parts": '{"schema_version": 1}',
    "unknown part": '{"schema_version": 1, "nonsense": 2}',
    "deep": "[" * 100_000,
    "huge number": '{"schema_version": ' + "1" * 6000 + "}",
}


@pytest.mark.parametrize("content", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("command", ["render", "estimate"])
def test_plan_files(cli: Cli, command: str, content: str, tmp_path: Path) -> None:
    """A file that is not a plan document is refused by both commands that read one."""
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="utf-8")
    refused(cli, [command, str(path)], tmp_path)


ESTIMATES = {
    "no model": ["estimate", "--gpus", "8", "--gpu", "h100"],
    "product too large": ["--tp", "16"],
    "product does not divide": ["--tp", "3"],
    "tp zero": ["--tp", "0"],
    "stage 5": ["--zero-stage", "5"],
    "unknown recompute": ["--recompute", "some"],
    "unknown module": ["--recompute", "selective:everything"],
    "layers in words": ["--recompute", "full:most"],
    "unknown offload": ["--offload", "disk"],
    "offload share above 1": ["--offload", "cpu:1.5"],
    "unknown schedule": ["--pp", "2", "--schedule", "zigzag"],
    "stages do not add up": ["--pp", "2", "--layers-per-stage", "16,15"],
    "stages of words": ["--pp", "2", "--layers-per-stage", "a,b"],
    "too many stages": ["--pp", "8", "--vpp", "100000"],
    "batch not divisible": ["--global-batch", "7"],
    "experts without experts": ["--ep", "2"],
    "plan and options": ["plan.json", "--model", "llama-3.1-8b"],
}


@pytest.mark.parametrize("extra", ESTIMATES.values(), ids=ESTIMATES)
def test_estimates(cli: Cli, extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that cannot exist is refused before anything is estimated."""
    monkeypatch.chdir(tmp_path)
    base = ["estimate", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100"]
    refused(cli, extra if extra[0] == "estimate" else [*base, *extra], tmp_path)


def test_precision_of_the_accelerator(cli: Cli, tmp_path: Path) -> None:
    """A number format that the accelerator lacks is refused with the ones it has."""
    message = refused(cli, [*GOOD, "--gpu", "v100-sxm2-32gb", "--precision", "bf16"], tmp_path)
    assert "fp16" in message


def test_near_names(cli: Cli, tmp_path: Path) -> None:
    """Typing errors are answered with the nearest name."""
    assert "did you mean megatron?" in refused(cli, [*GOOD, "--backend", "megatronn"], tmp_path)
    assert "did you mean gpus_per_node?" in refused_cluster(cli, tmp_path, "gpus_per_nod: 8\n")


def refused_cluster(cli: Cli, folder: Path, content: str) -> str:
    """The message about a cluster file."""
    path = folder / "cluster.yaml"
    path.write_text(content, encoding="utf-8")
    return refused(cli, ["suggest", "--model", "llama-3.1-8b", "--cluster", str(path)], folder)


def test_nearest_batch(cli: Cli, tmp_path: Path) -> None:
    """A token batch that is no whole number of sequences names the nearest that is, and that hint works."""
    message = refused(cli, [*GOOD, "--seq-len", "8192", "--global-batch", "196k"], tmp_path)
    assert "--global-batch 24 (196608 tokens)" in message
    result = cli("estimate", *GOOD[1:], "--seq-len", "8192", "--global-batch", "24", "--json")
    assert result.code in (0, 3)
    assert result.document["request"]["job"]["global_batch"] == 24


def test_errors_in_json(cli: Cli) -> None:
    """With --json the error is a document on stdout and stderr stays empty."""
    for extra in (["--gpu", "h1000x"], ["--gpuz"], ["--gpus", "eight"]):
        result = cli(*GOOD, *extra, "--json")
        assert result.code == 2
        assert result.document["error"]["code"] == "bad-input"
        assert result.document["error"]["hint"]
        assert result.err == ""


def test_internal_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything unexpected is exit code 1 and asks for a report; the traceback comes only with --debug."""
    from planner import service

    def broken(text: str) -> list[dict[str, object]]:
        raise RuntimeError("boom")

    monkeypatch.setattr(service, "list_models", broken)
    result = cli("models")
    assert result.code == 1
    assert "internal error" in result.err
    assert "report" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in cli("models", "--debug").err
    assert cli("models", "--json").document["error"]["code"] == "planner-error"


def test_interrupt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before anything was found is exit code 130."""
    from planner import service

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "suggest", stopped)
    result = cli(*GOOD)
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_a_folder_without_a_name(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty --out, of a variable that is not set, is not the folder one stands in."""
    monkeypatch.chdir(tmp_path)
    for command in (("suggest", *SMALL_JOB), ("slurm-submit", "job.yaml")):
        result = cli(*command, "--out", "")
        assert result.code == 2
        assert "--out: this is not a folder" in result.err
    assert not list(tmp_path.iterdir())


def test_tokens_of_no_database(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path is told, and no database is made of it."""
    monkeypatch.setenv("PLANNER_DATABASE_URL", f"sqlite:///{tmp_path}/absent/plans.db")
    for words in (("list",), ("revoke", "0")):
        result = cli("tokens", *words)
        assert result.code == 2
        assert "there is no such database" in result.err
    assert not list(tmp_path.iterdir())
