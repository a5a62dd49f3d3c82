"""accelerate 1.15, transformers 5.23 and DeepSpeed take the rendered files, and refuse broken ones as our side does.

Run with PLANNER_PARSERS_PYTHON naming an interpreter that has them; skipped with the reason elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import InputError
from planner.reading import read_configuration
from planner.render import render_plan, write_files
from planner.render.accelerate import attention
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Recompute
from tests.golden.plans import LLAMA_8B, document
from tests.parsers.conftest import Counts
from tests.parsers.interpreter import PYTHON, lacking, parser
from tests.parsers.matrix import Row
from tests.random_plans import corner_plans, random_plans
from tests.strategies import legal, machines, question, strategy

pytestmark = pytest.mark.parsers

RUNNER = Path(__file__).with_name("run_accelerate.py")
NEEDED = ("accelerate", "transformers", "deepspeed", "torch")
PARSERS = ("accelerate", "transformers")
KINDS = ("accelerate-fsdp", "accelerate-deepspeed")
Files = dict[str, str]


@pytest.fixture(autouse=True)
def _framework() -> None:
    if absent := lacking(*NEEDED):
        pytest.skip(absent)


def launch_words(folder: Path) -> list[str]:
    """The arguments with which launch.sh calls ``accelerate launch``."""
    tools = folder.parent / "tools"
    tools.mkdir(exist_ok=True)
    stub = tools / "accelerate"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    stub.chmod(0o755)
    told = {"TRAIN_SCRIPT": "train.py", "NODE_RANK": "0", "HEAD_NODE": "127.0.0.1"}
    started = subprocess.run(
        ["bash", "launch.sh"],
        cwd=folder,
        env={**os.environ, **told, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = started.stdout.splitlines()
    assert words[0] == "launch"
    return words[1:]


def verdicts(folders: list[Path]) -> list[dict[str, Any]]:
    """What the frameworks say of each folder, all in one process."""
    cases = [{"id": folder.name, "folder": str(folder), "argv": launch_words(folder)} for folder in folders]
    ran = subprocess.run(
        [PYTHON, str(RUNNER)],
        input="\n".join(map(json.dumps, cases)) + "\n",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [one["id"] for one in said] == [folder.name for folder in folders], ran.stderr[-2000:]
    return said


def plans(kind: str) -> list[PlanDocument]:
    """A hundred random plans and every sixth corner."""
    return [*random_plans(kind, 100, seed=21), *list(corner_plans(kind))[::6]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_is_taken(kind: str, tmp_path: Path, counts: Counts) -> None:
    """No plan is refused, no key is ignored, and the Trainer counts the plan's global batch."""
    documents = plans(kind)
    folders = [tmp_path / f"{index:04d}" for index in range(len(documents))]
    for plan, folder in zip(documents, folders, strict=True):
        write_files(folder, render_plan(plan))
    said = verdicts(folders)
    refused = Counter(one.get("error", one["stage"]) for one in said if not one["ok"])
    counts(Row(target=kind, parser=parser(*PARSERS), plans=len(documents), refused=sum(refused.values())))
    assert not refused, f"{sum(refused.values())} of {len(documents)} plans refused: {refused.most_common(5)}"
    for plan, one in zip(documents, said, strict=True):
        check_verdict(kind, plan, one)


def check_verdict(kind: str, plan: PlanDocument, said: dict[str, Any]) -> None:
    """What the frameworks understood is the plan."""
    s = plan.best.strategy
    assert said["ignored"] == []
    assert (said["total_batch"], said["seq_len"]) == (s.global_batch, s.seq_len)
    assert said["checkpointing"] == (s.recompute.mode == "full")
    assert said["precision"] == {"fp32": "no"}.get(s.precision, s.precision)
    nodes = plan.request.cluster.nodes
    assert said["nproc_per_node"] == str(plan.request.cluster.local_gpus)
    if nodes > 1:
        assert (said["nnodes"], said["rdzv_backend"]) == (str(nodes), "static")
        assert said["rdzv_endpoint"] == "127.0.0.1:29500"
    if kind == "accelerate-fsdp":
        assert said["fsdp"]["reshard"] is (s.zero_stage == 3)
        assert said["fsdp"]["offload"] == ("CPUOffloadPolicy" if s.offload.device == "cpu" else "OffloadPolicy")
        assert said["sync_each_batch"] is True
        if said["sizes"]:
            assert said["sizes"]["dp_shard"] * said["sizes"]["cp"] == s.shard_degree
            assert said["sizes"]["cp"] == s.cp
    else:
        assert said["command"] is None, "torchrun, not pdsh"
        assert said["zero_stage"] == s.zero_stage
        # With AutoTP DeepSpeed counts tensor-parallel ranks as replicas.
        assert said["deepspeed_batch"] == s.global_batch * s.tp
    # Ulysses ranks read different samples and work on them one after the other, all together.
    several = s.cp if kind == "accelerate-deepspeed" else 1
    assert said.get("distinct") in (None, s.micro_batch * s.dp * several)


ATTENTION_OF = """
import json
from transformers.models.bloom.modeling_bloom import BloomPreTrainedModel as Bloom
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssPreTrainedModel as GptOss
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel as Llama
from transformers.models.mpt.modeling_mpt import MptPreTrainedModel as Mpt

print(json.dumps({
    kind.__name__.removesuffix("PreTrainedModel").lower(): [
        name for name in ("sdpa", "flex_attn", "flash_attn") if getattr(kind, f"_supports_{name}", False)
    ]
    for kind in (Bloom, GptOss, Llama, Mpt)
}))
"""


def test_models_take_the_attention_that_is_written() -> None:
    """transformers refuses a model with an attention that its class does not support."""
    ran = subprocess.run([PYTHON, "-c", ATTENTION_OF], capture_output=True, text=True, check=True)
    takes = json.loads(ran.stdout.splitlines()[-1])
    assert takes["bloom"] == takes["mpt"] == [], "rule alibi-attention"
    for name, model in (("gptoss", "gpt-oss-20b"), ("llama", "llama-3-8b")):
        context = question(model, machines("h100", 16), "accelerate-fsdp", seq_len=4096, global_batch=64)
        written = attention(context.model, context.job)
        assert written.replace("attention", "attn") in takes[name], (name, written)


# --- Broken files


@dataclass(frozen=True)
class Broken:
    """A change to rendered files, and who notices."""

    name: str
    kind: str
    change: Callable[[Files], None]
    finding: str
    """Id of ours."""
    silent: bool = False
    """The frameworks accept it without a word."""


def edit(name: str, changed: Callable[[dict[str, Any]], None]) -> Callable[[Files], None]:
    """A change to the mapping that one file holds."""

    def change(files: Files) -> None:
        values = yaml.safe_load(files[name])
        changed(values)
        files[name] = json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values, sort_keys=False)

    return change


def config(changed: Callable[[dict[str, Any]], None]) -> Callable[[Files], None]:
    return edit("accelerate_config.yaml", changed)


def arguments(changed: Callable[[dict[str, Any]], None]) -> Callable[[Files], None]:
    return edit("training_arguments.json", changed)


def zero(changed: Callable[[dict[str, Any]], None]) -> Callable[[Files], None]:
    return edit("ds_config.json", changed)


def drop_file(files: Files) -> None:
    """accelerate's file names a DeepSpeed file that is not there."""
    del files["ds_config.json"]
    arguments(lambda a: a.pop("deepspeed"))(files)


PC = "parallelism_config"
FSDP, DEEPSPEED = KINDS
BROKEN = [
    Broken("product", FSDP, config(lambda c: c[PC].update({f"{PC}_dp_shard_size": 4})), "world-size"),
    Broken("top-key", FSDP, config(lambda c: c.update(tensor_parallel=8)), "unknown-key"),
    Broken(
        "nested-key", FSDP, config(lambda c: c["fsdp_config"].update(fsdp_reshard=False)), "ignored-key", silent=True
    ),
    Broken("rendezvous", FSDP, config(lambda c: c.update(rdzv_backend="c10d")), "ignored-key", silent=True),
    Broken(
        "version-1-spelling",
        FSDP,
        config(lambda c: c["fsdp_config"].update(fsdp_reshard_after_forward="FULL_SHARD")),
        "fsdp-version-spelling",
    ),
    Broken(
        "version-1-key",
        FSDP,
        config(lambda c: c["fsdp_config"].update(fsdp_sharding_strategy="SHARD_GRAD_OP")),
        "fsdp-version-key",
        silent=True,
    ),
    Broken(
        "prefetch",
        FSDP,
        config(lambda c: c["fsdp_config"].update(fsdp_forward_prefetch=True)),
        "fsdp-version-key",
        silent=True,
    ),
    Broken(
        "policy", FSDP, config(lambda c: c["fsdp_config"].update(fsdp_auto_wrap_policy="BLOCK")), "fsdp-wrap-policy"
    ),
    Broken(
        "no-policy",
        FSDP,
        config(lambda c: c["fsdp_config"].pop("fsdp_auto_wrap_policy")),
        "fsdp-no-wrap",
        silent=True,
    ),
    Broken("unquoted-no", FSDP, config(lambda c: c.update(mixed_precision=False)), "mixed-precision-word"),
    Broken("precision", FSDP, config(lambda c: c.update(mixed_precision="bf17")), "mixed-precision"),
    Broken("loading", FSDP, config(lambda c: c["fsdp_config"].update(fsdp_sync_module_states=False)), "fsdp-loading"),
    Broken(
        "host-activations",
        FSDP,
        config(lambda c: c["fsdp_config"].update(fsdp_activation_checkpointing_offload=True)),
        "fsdp-activation-offload",
    ),
    Broken(
        "cp-and-sp",
        FSDP,
        config(lambda c: c[PC].update({f"{PC}_sp_size": 2, f"{PC}_dp_replicate_size": 1})),
        "context-twice",
    ),
    Broken(
        "replicas-alone",
        FSDP,
        config(lambda c: c[PC].update({f"{PC}_dp_replicate_size": 4, f"{PC}_dp_shard_size": 1})),
        "replicas-with-context",
    ),
    Broken("distributed-type", FSDP, config(lambda c: c.update(distributed_type="FSDP2")), "InputError"),
    Broken("twice", FSDP, arguments(lambda a: a.update(fp16=True)), "precision-twice"),
    Broken("argument", FSDP, arguments(lambda a: a.update(tensor_parallel_size=8)), "unknown-argument"),
    Broken("old-argument", FSDP, arguments(lambda a: a.update(per_gpu_train_batch_size=1)), "removed-argument"),
    Broken("fsdp-option", FSDP, arguments(lambda a: a.update(fsdp="zero3")), "fsdp-option"),
    Broken("fsdp-hybrid", FSDP, arguments(lambda a: a.update(fsdp="hybrid_shard")), "fsdp-version-spelling"),
    Broken(
        "unsharded-gradients",
        FSDP,
        arguments(lambda a: a.pop("accelerator_config")),
        "unsharded-gradients",
        silent=True,
    ),
    Broken(
        "precision-beside-file", DEEPSPEED, config(lambda c: c.update(mixed_precision="bf16")), "beside-deepspeed-file"
    ),
    Broken(
        "stage-beside-file",
        DEEPSPEED,
        config(lambda c: c["deepspeed_config"].update(zero_stage=2)),
        "beside-deepspeed-file",
    ),
    Broken(
        "sequence-ranks",
        DEEPSPEED,
        config(lambda c: c[PC].update({f"{PC}_dp_shard_size": 1})),
        "sequence-parallel-product",
    ),
    Broken("no-zero", DEEPSPEED, zero(lambda z: z.pop("zero_optimization")), "zero-section"),
    Broken("learning-rate", DEEPSPEED, arguments(lambda a: a.update(learning_rate=3e-4)), "arguments-mismatch"),
    Broken(
        "accumulation", DEEPSPEED, arguments(lambda a: a.update(gradient_accumulation_steps=3)), "arguments-mismatch"
    ),
    Broken("no-file", DEEPSPEED, drop_file, "deepspeed-file-missing"),
]


def whole_plan(kind: str) -> PlanDocument:
    """Two copies of four context ranks, or two replicas of eight Ulysses ranks."""
    if kind == FSDP:
        return document(FSDP, {"dp": 4, "cp": 4, "zero_stage": 3, "shard_degree": 8}, model=LLAMA_8B)
    columns = {"dp": 2, "cp": 8, "zero_stage": 3, "shard_degree": 16}
    return document(DEEPSPEED, columns, model=LLAMA_8B, recompute=Recompute(mode="full"))


def told(files: Files) -> list[str]:
    """Ids of what our reader finds; ``InputError`` where it cannot read at all."""
    try:
        read = read_configuration(
            {name: text for name, text in files.items() if name not in ("plan.json", "README.md")}
        )
    except InputError:
        return ["InputError"]
    return [finding.id for finding in read.findings]


def test_broken_files_are_refused_by_both(tmp_path: Path, counts: Counts) -> None:
    """Each change is found by our reader, and refused by the frameworks unless they are known to say nothing."""
    folders, found = [], []
    for case in [*BROKEN, *(Broken(f"whole-{kind}", kind, lambda _files: None, "") for kind in KINDS)]:
        files = render_plan(whole_plan(case.kind))
        case.change(files)
        folders.append(tmp_path / case.name)
        write_files(folders[-1], files)
        found.append(told(files))
    said = {one["id"]: one for one in verdicts(folders)}
    for kind in KINDS:
        assert said[f"whole-{kind}"]["ok"], said[f"whole-{kind}"]
    assert found[-2:] == [[], []]
    for case, ids in zip(BROKEN, found[:-2], strict=True):
        assert case.finding in ids, f"{case.name}: our reader says {ids}"
        assert said[case.name]["ok"] is case.silent, f"{case.name}: {said[case.name]}"
    for kind in KINDS:
        cases = [case for case in BROKEN if case.kind == kind]
        ours = sum(case.silent for case in cases)
        row = {"broken": len(cases), "both": len(cases) - ours, "ours": ours}
        counts(Row(target=kind, parser=parser(*PARSERS), **row))


def test_tensor_ranks_are_refused_by_both(tmp_path: Path) -> None:
    """accelerate builds the mesh and then imports what transformers 5.23 does not have; our rule says so before."""
    files = render_plan(whole_plan(FSDP))
    config(lambda c: c[PC].update({f"{PC}_tp_size": 4, f"{PC}_cp_size": 1}))(files)
    write_files(tmp_path / "tensor", files)
    (said,) = verdicts([tmp_path / "tensor"])
    assert (said["ok"], said["stage"]) == (False, "tensor")
    assert "ReplicateParallel" in said["error"]
    asked = question("llama-3-8b", machines("h100", 16), FSDP, global_batch=64)
    assert "no-tensor-parallel" in legal(asked, strategy(asked, tp=4, zero_stage=3))


LOAD = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import plan_setup
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained("tiny")
model = plan_setup.load_model("tiny")
plan_setup.SEQ_LEN = 8
loss = model(**plan_setup.collate([{"input_ids": [1] * 8}, {"input_ids": [2] * 8}])).loss
print(model.dtype, model.config._attn_implementation, model.config.use_cache, bool(loss.isfinite()))
try:
    plan_setup.collate([{"input_ids": [1] * 7}])
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("precision", "weights"), [("bf16", "torch.bfloat16"), ("fp32", "torch.float32")])
def test_setup_module_loads_a_model(tmp_path: Path, precision: str, weights: str) -> None:
    """plan_setup.py gives transformers what it takes, and a batch that the model takes."""
    columns = {"dp": 8, "zero_stage": 3, "shard_degree": 8, "precision": precision}
    write_files(tmp_path / "job", render_plan(document(FSDP, columns, model=LLAMA_8B)))
    ran = subprocess.run(
        [PYTHON, "-c", LOAD], cwd=tmp_path / "job", capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = [line for line in ran.stdout.splitlines() if line]
    assert said[-2:] == [
        f"{weights} sdpa False True",
        "samples of [7] tokens, but the plan is for packed sequences of 8",
    ]


SAY = """import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FSDP_VERSION", "FSDP_RESHARD_AFTER_FORWARD", "ACCELERATE_MIXED_PRECISION")
open(f"said-{os.environ['RANK']}.json", "w").write(json.dumps({n: os.environ.get(n) for n in names}))
"""


@pytest.mark.parametrize("numbered", [True, False], ids=["static", "c10d"])
def test_launch_script_starts_two_nodes(tmp_path: Path, numbered: bool) -> None:
    """launch.sh really starts every process, on two nodes that are both this machine, with node numbers and without."""
    plan = document(FSDP, {"dp": 2, "zero_stage": 3, "shard_degree": 2}, model=LLAMA_8B)
    machine = plan.request.cluster.model_copy(update={"gpus_per_node": 1, "domain_gpus": 1})
    plan = plan.model_copy(update={"request": plan.request.model_copy(update={"cluster": machine})})
    folder = tmp_path / "job"
    write_files(folder, render_plan(plan))
    (folder / "say.py").write_text(SAY, encoding="utf-8")
    scripts = Path(PYTHON).parent
    nodes = [
        subprocess.Popen(
            ["bash", "launch.sh"],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{scripts}:{os.environ['PATH']}",
                "TRAIN_SCRIPT": "say.py",
                "HEAD_NODE": "127.0.0.1",
                "HEAD_PORT": "29731" if numbered else "29741",
                **({"NODE_RANK": str(rank)} if numbered else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = [node.communicate(timeout=180)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], output
    for rank in range(2):
        said = json.loads((folder / f"said-{rank}.json").read_text(encoding="utf-8"))
        assert said == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "ACCELERATE_MIXED_PRECISION": "bf16",
        }
