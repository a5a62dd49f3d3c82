"""DeepSpeed itself takes every plan that is rendered for it, and refuses what the reader says that it refuses.

Needs an interpreter with torch, deepspeed and transformers in PLANNER_PARSERS_PYTHON (a CPU is enough)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.reading import read_configuration
from planner.render import render_plan, write_files
from planner.specs.plan import PlanDocument
from tests.golden.plans import CASES, LLAMA_8B, case_names
from tests.golden.plans import document as document_of
from tests.parsers.conftest import Counts
from tests.parsers.interpreter import PYTHON, lacking, parser
from tests.parsers.matrix import Row
from tests.random_plans import corner_plans, random_plans

RUNNER = Path(__file__).with_name("run_deepspeed.py")
NEEDS = ("torch", "deepspeed", "transformers")


pytestmark = [
    pytest.mark.parsers,
    pytest.mark.skipif(bool(lacking(*NEEDS)), reason=lacking(*NEEDS)),
]


def ask_deepspeed(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The verdict on every case, by name; all in one process, for the imports take seconds."""
    result = subprocess.run(
        [PYTHON, str(RUNNER)],
        input="\n".join(json.dumps(case) for case in cases),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert verdicts[0]["deepspeed"].startswith("0.19"), "the facts of the reader are those of DeepSpeed 0.19"
    return {verdict["name"]: verdict for verdict in verdicts[1:]}


def case_of(name: str, folder: Path, document: PlanDocument, *, engine: bool) -> dict[str, Any]:
    """The plan's files on disk, and what the stand-in model needs to know."""
    strategy, model = document.best.strategy, document.request.model
    write_files(folder, render_plan(document))
    return {
        "name": name,
        "folder": str(folder),
        "gpus": strategy.gpus,
        "pp": strategy.pp,
        "sp": strategy.cp,
        "tp": strategy.tp,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "layers": model.layers,
        "engine": engine,
    }


def swaps_to_disk(document: PlanDocument) -> bool:
    """The NVMe engine needs a compiled I/O library, so only its configuration can be checked here."""
    return "nvme" in (document.best.strategy.offload.device, document.best.strategy.offload.parameters)


def kind_of(document: PlanDocument) -> tuple[object, ...]:
    """What makes DeepSpeed build another engine, optimizer or process group."""
    s = document.best.strategy
    return (
        s.zero_stage,
        s.pp > 1,
        s.tp > 1,
        s.cp > 1,
        s.precision if s.cp == s.tp == 1 and s.offload.device == "none" else "any",
        s.offload.device,
        s.offload.parameters,
        s.secondary_shard_degree is not None,
    )


def test_deepspeed_reads_every_plan(tmp_path: Path, counts: Counts) -> None:
    """DeepSpeedConfig takes 100 random plans and the corners of every question, and derives their batch sizes."""
    corners = list(corner_plans("deepspeed"))[::5]
    documents = [*random_plans("deepspeed", 100, seed=11), *corners]
    cases = [case_of(str(i), tmp_path / str(i), document, engine=False) for i, document in enumerate(documents)]
    verdicts = ask_deepspeed(cases)
    refused = {name: verdict for name, verdict in verdicts.items() if not verdict["ok"]}
    counts(Row(target="deepspeed", parser=parser("deepspeed"), plans=len(documents), refused=len(refused)))
    assert not refused
    assert len(verdicts) == len(documents) > 150
    for i, document in enumerate(documents):
        s = document.best.strategy
        # With AutoTP alone DeepSpeed counts every rank as a replica.
        assert verdicts[str(i)]["batch"] == [s.global_batch * s.tp, s.micro_batch, s.grad_accum]


def test_deepspeed_starts_an_engine_of_every_kind(tmp_path: Path) -> None:
    """The rendered parallel_setup.py builds the engine, groups and stages that the plan means."""
    chosen: dict[tuple[object, ...], PlanDocument] = {}
    for name in case_names("deepspeed"):
        chosen.setdefault(kind_of(CASES[name].document), CASES[name].document)
    for document in corner_plans("deepspeed", seed=5):
        chosen.setdefault(kind_of(document), document)
    documents = [document for document in chosen.values() if not swaps_to_disk(document)]
    for precision, stage in (("fp16", 0), ("fp16", 2), ("fp32", 0), ("fp32", 3)):
        degrees = {"dp": 16, "zero_stage": stage, "shard_degree": 16 if stage else 1, "precision": precision}
        documents.append(document_of("deepspeed", degrees, model=LLAMA_8B))
    cases = [case_of(str(i), tmp_path / str(i), document, engine=True) for i, document in enumerate(documents)]
    verdicts = ask_deepspeed(cases)
    assert {name: verdict for name, verdict in verdicts.items() if not verdict["ok"]} == {}
    assert {document.best.strategy.zero_stage for document in documents} == {0, 1, 2, 3}
    for i, document in enumerate(documents):
        s, verdict = document.best.strategy, verdicts[str(i)]
        assert (verdict["replicas"], verdict["sharding"]) == (s.dp, s.dp * s.cp)
        assert (verdict["stage"], verdict["micro_batch"], verdict["grad_accum"]) == (
            s.zero_stage,
            s.micro_batch,
            s.grad_accum,
        )
        if s.pp > 1:
            parts = verdict["parts"]
            assert tuple(end - start for start, end in pairwise(parts)) == s.layers_per_stage


# --- What is broken

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3},
}
ZERO, GONE, NULL = "zero_optimization", "gone", None
TENSOR_8 = {"tensor_parallel": {"autotp_size": 8}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "total-batch": ({"train_batch_size": 1000}, "batch-mismatch"),
    "batch-of-zero": ({"train_micro_batch_size_per_gpu": 0}, "batch-mismatch"),
    "no-batch": ({"train_micro_batch_size_per_gpu": GONE}, "batch-missing"),
    "batch-as-text": ({"train_micro_batch_size_per_gpu": "2"}, "wrong-type"),
    "accumulation-as-text": ({"gradient_accumulation_steps": "2"}, "wrong-type"),
    "batch-auto": ({"train_micro_batch_size_per_gpu": "auto"}, "auto-needs-arguments"),
    "two-formats": ({"fp16": {"enabled": True}}, "two-formats"),
    "stage-4": ({ZERO: {"stage": 4}}, "zero-stage"),
    "unknown-key": ({ZERO: {"stage3_prefetch_bucket": 5}}, "unknown-key"),
    "foreign-key": ({ZERO: {"cpu_offload_params": True}}, "unknown-key"),
    "unknown-bf16-key": ({"bf16": {"enabled": True, "loss_scale": 0}}, "unknown-key"),
    "unknown-tensor-key": ({"tensor_parallel": {"autotp_sizes": 8}}, "unknown-key"),
    "old-and-new": (
        {ZERO: {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        "legacy-key",
    ),
    "partial-offload": (
        {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "offload-partial",
    ),
    "ratio-above-1": ({ZERO: {"offload_optimizer": {"device": "cpu", "ratio": 2}}}, "out-of-range"),
    "no-device": ({ZERO: {"offload_optimizer": {"device": "gpu"}}}, "offload-device"),
    "elasticity": ({"elasticity": {"enabled": True}}, "removed-key"),
    "mics": ({ZERO: {"mics_shard_size": 8}}, "removed-key"),
    "boolean-as-text": ({"wall_clock_breakdown": "false"}, "wrong-type"),
    "bf16-states-alone": ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16-states"),
    "bf16-master-without-zero": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, ZERO: {"stage": 0}},
        "bf16-states",
    ),
    "sum-at-stage-3": ({"gradient_allreduce_op": "sum"}, "allreduce-op"),
    "communication-in-fp8": ({"communication_data_type": "fp8"}, "wrong-type"),
    "bucket-as-text": ({ZERO: {"reduce_bucket_size": "5e8"}}, "wrong-type"),
    "half-an-element": ({ZERO: {"reduce_bucket_size": 0.5}}, "wrong-type"),
    "negative-bucket": ({ZERO: {"reduce_bucket_size": -5}}, "out-of-range"),
    "empty-bucket": ({ZERO: {"reduce_bucket_size": 0}}, "out-of-range"),
    "stage-of-no-number": ({ZERO: {"stage": "three"}}, "wrong-type"),
    "null-section": ({"activation_checkpointing": NULL}, "wrong-type"),
    "norm-at-stage-3": ({ZERO: {"compute_grad_norm": False}}, "gradient-norm"),
    "autotp-distinct-samples": ({**TENSOR_8, ZERO: {"stage": 1}, "train_batch_size": 16}, "batch-mismatch"),
}
"""Configurations that DeepSpeedConfig refuses for 16 GPUs, and the finding of the reader."""

REFUSED_BY_ENGINE: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation-without-zero": ({ZERO: {"stage": 0}}, "grad-accum-dtype"),
    "prescaled": ({"prescale_gradients": True, ZERO: {"stage": 2}}, "prescale-gradients"),
    "unmanaged-pipeline": ({"managed_gradient_accumulation": False, ZERO: {"stage": 1}}, "managed-accumulation"),
    "norm-in-optimizer": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}},
        "max-grad-norm",
    ),
    "autotp-zero3-total": ({**TENSOR_8, "train_batch_size": 128}, "tensor-zero-stage"),
    "pipeline-zero2": ({ZERO: {"stage": 2}}, "pipeline-zero-stage"),
}
"""Configurations that the engine refuses later."""

IGNORED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt-section": ({"zero_optimisation": {"stage": 2}}, "ignored-key"),
    "parameters-below-stage-3": ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload-parameters"),
    "optimizer-without-zero": (
        {ZERO: {"stage": 0, "offload_optimizer": {"device": "cpu"}}, "data_types": GONE},
        "offload-needs-zero",
    ),
    "nvme-below-stage-3": (
        {ZERO: {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}},
        "offload-nvme",
    ),
    "second-copy-below-stage-3": ({ZERO: {"stage": 2, "zero_hpz_partition_size": 8}}, "secondary-shard"),
    "super-offload-below-stage-3": (
        {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "super-offload",
    ),
    "stages-in-json": ({"pipeline": {"stages": 4}}, "pipeline-stages-ignored"),
    "rate-as-text": ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}, "wrong-type"),
}
"""Configurations that DeepSpeed takes without a word although they do not do what they say: the reader's to refuse."""

SETUP = """import json
from pathlib import Path

import deepspeed

RECOMPUTE = "none"
{constants}


def config():
    return json.loads(Path(__file__).with_name("ds_config.json").read_text(encoding="utf-8"))


def pipeline(layers, loss_function, block_class):
    from deepspeed.pipe import PipelineModule

    return PipelineModule(layers=layers, num_stages=PIPELINE_STAGES, loss_fn=loss_function)


def initialize(model):
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
    return engine
"""


def patched(patch: Mapping[str, Any]) -> dict[str, Any]:
    """BASE with sections merged and GONE taking a key away."""
    config = json.loads(json.dumps(BASE))
    for key, value in patch.items():
        if value == GONE:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] |= value
        else:
            config[key] = value
    return dict(config)


def lay_out(folder: Path, text: str, *, tp: int = 1, pp: int = 1) -> dict[str, str]:
    """The files of one case for 16 GPUs, on disk and as the reader takes them."""
    constants = [f"TENSOR_RANKS = {tp}"] * (tp > 1) + [f"PIPELINE_STAGES = {pp}"] * (pp > 1)
    files = {
        "ds_config.json": text,
        "parallel_setup.py": SETUP.format(constants="\n".join(constants)),
        "hostfile": "worker-0 slots=8\nworker-1 slots=8\n",
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return files


def broken_case(name: str, folder: Path, *, engine: bool, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    shape = {"gpus": 16, "pp": pp, "sp": 1, "tp": tp, "heads": 8, "kv_heads": 8, "layers": 8}
    return {"name": name, "folder": str(folder), "engine": engine, **shape}


def test_both_refuse_what_is_broken(tmp_path: Path, counts: Counts) -> None:
    """Each broken configuration is refused by DeepSpeed and found by the reader."""
    cases, found = [], {}
    for name, (patch, wanted) in {**REFUSED, **REFUSED_BY_ENGINE}.items():
        tp, pp = (8 if "tensor_parallel" in patch and wanted != "unknown-key" else 1), (4 if "pipeline" in name else 1)
        files = lay_out(tmp_path / name, json.dumps(patched(patch)), tp=tp, pp=pp)
        ids = {finding.id for finding in read_configuration(files).findings if finding.severity != "note"}
        found[name] = (wanted, ids)
        cases.append(broken_case(name, tmp_path / name, engine=name in REFUSED_BY_ENGINE, tp=tp, pp=pp))
    verdicts = ask_deepspeed(cases)
    assert [name for name, verdict in verdicts.items() if verdict["ok"]] == []
    assert {name: ids for name, (wanted, ids) in found.items() if wanted not in ids} == {}
    assert len(verdicts) == len(REFUSED) + len(REFUSED_BY_ENGINE)
    counts(Row(target="deepspeed", parser=parser("deepspeed"), broken=len(verdicts), both=len(verdicts)))


def test_the_reader_refuses_what_deepspeed_ignores(tmp_path: Path, counts: Counts) -> None:
    """DeepSpeed is known to take these; each is an error of the reader all the same."""
    cases = []
    for name, (patch, wanted) in IGNORED.items():
        files = lay_out(tmp_path / name, json.dumps(patched(patch)))
        errors = {finding.id for finding in read_configuration(files).findings if finding.severity == "error"}
        assert wanted in errors, name
        cases.append(broken_case(name, tmp_path / name, engine=False))
    refused = {name: verdict for name, verdict in ask_deepspeed(cases).items() if not verdict["ok"]}
    assert refused == {}
    counts(Row(target="deepspeed", parser=parser("deepspeed"), broken=len(IGNORED), ours=len(IGNORED)))


LENIENT: dict[str, tuple[str, str, str, bool]] = {
    "comment": ("{", "{ // sizes", "json-comment", True),
    "hash-comment": ("{", "{ # sizes\n", "json-comment", True),
    "trailing-comma": ("}}", "},}", "json-trailing-comma", True),
    "missing-comma": ("1, ", "1\n", "json-missing-comma", True),
    "single-quotes": ('"gradient_accumulation_steps"', "'gradient_accumulation_steps'", "json-single-quotes", True),
    "bare-key": ('"gradient_accumulation_steps"', "gradient_accumulation_steps", "json-bare-key", True),
    "byte-order-mark": ("{", "\ufeff{", "json-byte-order-mark", True),
    "not-a-number": ("0.0001", "NaN", "json-not-a-number", False),
    "python-literal": ("true", "True", "json-python-literal", False),
    "repeated-key": ('"bf16"', '"data_types": {}, "bf16"', "json-repeated-key", False),
}
"""What to replace, by what, the finding, and whether DeepSpeed's own reader (Hjson) takes it."""


def test_departures_from_json(tmp_path: Path) -> None:
    """DeepSpeed opens a path with Hjson; what that forgives is a warning, what it does not is an error."""
    cases = []
    for name, (old, new, wanted, taken) in LENIENT.items():
        base = json.dumps(BASE)
        text = base.replace(old, new + "\n" if new.startswith("{ //") else new, 1)
        assert text != base
        files = lay_out(tmp_path / name, text)
        severities = {f.id: f.severity for f in read_configuration(files, reader="deepspeed-json").findings}
        assert severities[wanted] == ("warning" if taken else "error"), name
        cases.append(broken_case(name, tmp_path / name, engine=False))
    verdicts = ask_deepspeed(cases)
    assert {name: verdict["ok"] for name, verdict in verdicts.items()} == {n: row[3] for n, row in LENIENT.items()}


def test_both_refuse_what_is_no_object(tmp_path: Path) -> None:
    """Cut, a list, a missing colon: an error with its place here, and no engine there."""
    texts = {"cut": '{"zero_optimization": {"stage": 1}', "list": "[1]", "no-colon": '{"zero_optimization" 1}'}
    for name, text in texts.items():
        files = lay_out(tmp_path / name, text)
        with pytest.raises(InputError, match=r"ds_config\.json"):
            read_configuration(files, reader="deepspeed-json")
    verdicts = ask_deepspeed([broken_case(name, tmp_path / name, engine=False) for name in texts])
    assert [verdict["ok"] for verdict in verdicts.values()] == [False, False, False]
