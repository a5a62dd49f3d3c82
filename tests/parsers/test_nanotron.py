"""nanotron's own loader and models on rendered configurations, and on broken ones that our side must refuse as well.

nanotron is not on PyPI in this version: PLANNER_NANOTRON_PATH names a checkout (2411b022 was read), and
PLANNER_PARSERS_PYTHON an interpreter with torch, dacite, datasets and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from planner.backends import BACKENDS
from planner.backends.base import RuleContext
from planner.cost.params import embedding_params, layer_params, padded_vocab
from planner.reading import read_configuration
from planner.render import render_plan
from planner.specs.convert import to_strategy
from planner.specs.model import ModelSpec
from planner.specs.plan import PlanDocument
from tests.helpers import h100_cluster, make_batch, make_job
from tests.parsers.conftest import Counts
from tests.parsers.interpreter import PYTHON, lacking
from tests.parsers.matrix import Row
from tests.random_plans import corner_plans, plan_document, random_plans
from tests.strategies import legal, machines, question, strategy

CHECKOUT = os.environ.get("PLANNER_NANOTRON_PATH", "")
RUNNER = Path(__file__).with_name("run_nanotron.py")
NEEDED = ("torch", "dacite", "datasets", "transformers")


def _missing() -> str:
    """Why the loader cannot be run here; empty if it can."""
    if not CHECKOUT:
        return "PLANNER_NANOTRON_PATH names no checkout (git clone https://github.com/huggingface/nanotron)"
    return lacking(*NEEDED)


WHY_NOT = _missing()
PARSER = "nanotron, a checkout"
pytestmark = [pytest.mark.parsers, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def run(**wanted: Any) -> list[dict[str, Any]]:
    """The runner's answers, in the order of the cases."""
    result = subprocess.run(
        [PYTHON, str(RUNNER)],
        input=json.dumps(wanted),
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def configuration(document: PlanDocument) -> str:
    return render_plan(document)["nanotron.yaml"]


@cache
def plans() -> tuple[PlanDocument, ...]:
    """Random and corner plans, and Qwen2.5-7B, whose biases need the other model class."""
    biased = question("qwen2.5-7b", machines("h100", 32), "nanotron", seq_len=4096, global_batch=64)
    rows = [strategy(biased, tp=2, zero_stage=1, sequence_parallel=True), strategy(biased, tp=4, recompute="full")]
    assert not any(legal(biased, row) for row in rows)
    return (
        *random_plans("nanotron", 150, seed=11),
        *islice(corner_plans("nanotron"), 0, None, 3),
        *(plan_document(biased, to_strategy(row, 0, biased.recompute_kinds, biased.job)) for row in rows),
    )


def test_every_plan_is_loaded_as_it_was_meant(counts: Counts) -> None:
    """No refusal, and the loader's degrees, batch and model class are the plan's."""
    answers = run(load={str(index): configuration(document) for index, document in enumerate(plans())})
    assert len(answers) == len(plans())
    for document, answer in zip(plans(), answers, strict=True):
        s, model = document.best.strategy, document.request.model
        assert answer["ok"], answer
        assert (answer["tp"], answer["pp"], answer["dp"], answer["cp"]) == (s.tp, s.pp, s.dp, s.cp)
        assert answer["global_batch"] == s.global_batch
        assert answer["tokens"] == s.global_batch * s.seq_len
        assert answer["mode"] == ("REDUCE_SCATTER" if s.sequence_parallel else "ALL_REDUCE")
        assert answer["engine"].startswith("AllForward" if s.pipeline_schedule == "gpipe" else "OneForward")
        assert answer["recompute"] == (s.recompute.mode == "full")
        assert answer["zero"] == s.zero_stage
        assert answer["model"] == ("Qwen2Config" if model.bias.qkv or s.cp > 1 else "LlamaConfig")
        assert answer["layers"] == model.layers
        assert answer["dtype"] == "torch.bfloat16"
    counts(Row(target="nanotron", parser=PARSER, plans=len(answers)))


def rank_parameters(model: ModelSpec, layers: int, tp: int, *, first: bool, last: bool) -> int:
    """Parameters of one rank as the cost model counts them; nanotron ties embedding and head after it built both."""
    block = layer_params(model, ("attention", "dense"))
    sharded, replicated = block.attention_sharded + block.mlp_sharded, block.attention_replicated + block.norms
    table = int(padded_vocab(model.vocab, np.array([tp]))[0]) * model.hidden // tp
    return layers * (sharded // tp + replicated) + table * (first + last) + model.hidden * last


def test_ranks_hold_the_parameters_and_layers_of_the_plan(counts: Counts) -> None:
    """First and last rank of every shape, built by nanotron's own models: split of the layers and exact parameters."""
    shapes: dict[tuple[Any, ...], PlanDocument] = {}
    for document in plans():
        s, model = document.best.strategy, document.request.model
        shapes.setdefault((model.name, s.tp, s.pp, s.cp > 1), document)
    chosen = list(shapes.values())
    cases = [[str(i), configuration(document), rank] for i, document in enumerate(chosen) for rank in (0, -1)]
    answers = run(build=cases)
    assert len(answers) == 2 * len(chosen)
    for answer in answers:
        document = chosen[int(answer["name"])]
        s, model = document.best.strategy, document.request.model
        assert tuple(answer["layers"]) == s.layers_per_stage
        first, last = answer["rank"] == 0 or s.pp == 1, answer["rank"] == -1 or s.pp == 1
        layers = s.layers_per_stage[answer["rank"]]
        assert answer["parameters"] == rank_parameters(model, layers, s.tp, first=first, last=last), document.best
    assert len(chosen) > 20
    counts(Row(target="nanotron", parser=PARSER, ranks=len(answers)))


Change = Callable[[dict[str, Any]], None]


def put(*path: Any) -> Change:
    """Sets the value at a path (the last element) of a configuration."""

    def change(config: dict[str, Any]) -> None:
        *keys, last, value = path
        for key in keys:
            config = config[key]
        config[last] = value

    return change


def drop(*path: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        *keys, last = path
        for key in keys:
            config = config[key]
        del config[last]

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "zero stage in the wrong section": (put("parallelism", "zero_stage", 3), "unknown-key"),
    "misspelt key": (put("tokens", "micro_batchsize", 2), "unknown-key"),
    "misspelt section": (put("parallelisme", {}), "unknown-key"),
    "unknown dataset stage key": (put("data_stages", 0, "weight", 1.0), "unknown-key"),
    "degree as text": (put("parallelism", "tp", "8"), "wrong-type"),
    "degree missing": (drop("parallelism", "dp"), "missing-key"),
    "section missing": (drop("general"), "missing-section"),
    "model missing": (drop("model"), "missing-section"),
    "tokens missing": (drop("tokens"), "missing-section"),
    "interleaved engine": (put("parallelism", "pp_engine", "interleaved"), "schedule"),
    "unknown tensor mode": (put("parallelism", "tp_mode", "SEQUENCE"), "tp-mode"),
    "unknown dtype": (put("model", "dtype", "bf16"), "precision-bf16"),
    "exponent without a dot": (put("optimizer", "optimizer_factory", "adam_eps", "1e-8"), "wrong-type"),
    "weight decay as text": (put("optimizer", "weight_decay", "a"), "wrong-type"),
    "no warm-up style": (drop("optimizer", "learning_rate_scheduler", "lr_warmup_style"), "missing-key"),
    "unknown warm-up style": (put("optimizer", "learning_rate_scheduler", "lr_warmup_style", "cosine"), "wrong-value"),
    "unknown decay style": (put("optimizer", "learning_rate_scheduler", "lr_decay_style", "wsd"), "wrong-value"),
    "unknown log level": (put("logging", "log_level", "loud"), "wrong-value"),
    "unknown attention": (put("model", "model_config", "_attn_implementation", "flash"), "wrong-value"),
    "zero stage as text": (put("optimizer", "zero_stage", "one"), "wrong-type"),
    "no accumulation choice": (drop("optimizer", "accumulate_grad_in_fp32"), "missing-key"),
    "unknown Llama key": (put("model", "model_config", "head_dim", 128), "unknown-key"),
    "Llama width as text": (put("model", "model_config", "hidden_size", "wide"), "wrong-type"),
    "no first data stage": (put("data_stages", 0, "start_training_step", 5), "first-stage"),
    "weights as a mapping": (put("data_stages", 0, "data", "dataset", {"dataset_folder": {"a": 0.8}}), "wrong-type"),
    "unknown kind of data": (put("data_stages", 0, "data", "dataset", {"path": "a"}), "dataset"),
    "data of another vocabulary": (
        put("data_stages", 0, "data", "dataset", {"dataset_folder": "/none", "vocab_size": 50257}),
        "dataset-tokenizer",
    ),
    "unknown initialisation": (put("model", "init_method", {"standard": 0.02}), "init-method"),
    "recomputation by name": (put("parallelism", "recompute_layer", "full"), "wrong-type"),
    "checkpoint interval missing": (drop("checkpoints", "checkpoint_interval"), "missing-key"),
}
"""Refused by the loader, and an error among our findings."""

ACCEPTED: dict[str, tuple[Change, str]] = {
    # An integer above 0 means 1 (nanotron/helpers.py, optimizer_args.zero_stage > 0).
    "zero stage 3": (put("optimizer", "zero_stage", 3), "zero-stage"),
    # The product of degrees leaves the expert axis out (nanotron/parallel/context.py).
    "expert parallelism": (put("parallelism", "expert_parallel_size", 2), "no-expert-parallel"),
    # _RowLinearAsyncCommunication asserts REDUCE_SCATTER in the first forward pass.
    "asynchronous all-reduce": (put("parallelism", "tp_mode", "ALL_REDUCE"), "tp-async-mode"),
    # A section with a default of None, read by the trainer.
    "no checkpoints": (drop("checkpoints"), "missing-section"),
    # Llama's attention never looks at the context-parallel group.
    "context parallelism of Llama": (put("parallelism", "context_parallel_size", 2), "context-parallel-attention"),
    # OneForwardOneBackwardPipelineEngine.train_batch_iter asserts it.
    "too few micro-batches": (put("tokens", "batch_accumulation_per_replica", 1), "micro-batches-fill-pipeline"),
    "a negative replica count": (put("parallelism", "dp", -4), "not-positive"),
    # basic_optimizer_builder raises on other names.
    "another optimizer": (put("optimizer", "optimizer_factory", "name", "lion"), "wrong-value"),
    "a stage of its own length": (put("data_stages", 0, "sequence_length", 4096), "stage-sequence-length"),
}
"""Accepted by the loader, stopped or misread later: our findings are the only early word."""


def base() -> dict[str, Any]:
    """A pipeline plan as plain values."""
    context = question("llama-3-70b", machines("h100", 128), "nanotron", seq_len=8192, global_batch=256)
    row = strategy(context, tp=8, pp=4, zero_stage=1, sequence_parallel=True)
    assert not legal(context, row)
    document = plan_document(context, to_strategy(row, 0, context.recompute_kinds, context.job))
    config: dict[str, Any] = yaml.safe_load(configuration(document))
    return config


def changed(change: Change) -> str:
    config = base()
    change(config)
    return yaml.safe_dump(config)


def test_broken_files_are_refused_by_both(counts: Counts) -> None:
    """Loader and findings agree; the finding is the one that names the fault."""
    answers = {answer["name"]: answer for answer in run(load={n: changed(c) for n, (c, _) in REFUSED.items()})}
    for name, (change, finding) in REFUSED.items():
        assert not answers[name]["ok"], name
        errors = {f.id for f in read_configuration({"c.yaml": changed(change)}).findings if f.severity == "error"}
        assert finding in errors, (name, errors)
    counts(Row(target="nanotron", parser=PARSER, broken=len(REFUSED), both=len(REFUSED)))


def test_what_the_loader_lets_pass_is_found_by_us(counts: Counts) -> None:
    """The loader takes these files; each is an error among our findings."""
    answers = {answer["name"]: answer for answer in run(load={n: changed(c) for n, (c, _) in ACCEPTED.items()})}
    for name, (change, finding) in ACCEPTED.items():
        assert answers[name]["ok"], answers[name]
        errors = {f.id for f in read_configuration({"c.yaml": changed(change)}).findings if f.severity == "error"}
        assert finding in errors, (name, errors)
    counts(Row(target="nanotron", parser=PARSER, broken=len(ACCEPTED), ours=len(ACCEPTED)))


def test_a_class_that_is_not_named_hides_wrong_types() -> None:
    """Without is_llama_config a wrong type turns the model into an unchecked Qwen2; we refuse the type."""

    def change(config: dict[str, Any]) -> None:
        del config["model"]["model_config"]["is_llama_config"]
        config["model"]["model_config"]["rms_norm_eps"] = "1e-5"

    (answer,) = run(load={"x": changed(change)})
    assert answer["ok"]
    assert answer["model"] == "Qwen2Config"
    found = {finding.id for finding in read_configuration({"c.yaml": changed(change)}).findings}
    assert {"wrong-type", "model-class-unnamed"} <= found


RULED = {
    "heads over tp": ({"tp": 24, "dp": 1, "pp": 1}, {"heads-over-tp", "kv-heads-cover-tp"}),
    "more tp than key/value heads": ({"tp": 16, "dp": 2, "pp": 4}, {"kv-heads-cover-tp"}),
}


@pytest.mark.parametrize("name", RULED)
def test_head_checks_of_the_configuration_are_rules(name: str) -> None:
    """Config.__post_init__ refuses the degrees, and so do the backend's rules."""
    degrees, rules = RULED[name]
    (answer,) = run(load={"x": changed(lambda config: config["parallelism"].update(degrees))})
    assert not answer["ok"]
    backend, job = BACKENDS["nanotron"], make_job()
    model = question("llama-3-70b", machines("h100", 128), "nanotron").model
    batch = make_batch(**degrees, stage_layers=[[20] * 4] if degrees["pp"] == 4 else [80])
    context = RuleContext(model, h100_cluster(128), job, batch, backend.recompute_kinds(model, job))
    assert rules <= {rule.id for rule, mask in backend.broken_rules(context) if mask[0]}


def test_embedding_rows_are_counted_alike() -> None:
    """Guards the comparison above: one table of the cost model is vocabulary times hidden."""
    model = question("llama-3-8b", machines("h100", 8), "nanotron").model
    assert embedding_params(model) == model.vocab * model.hidden


def test_the_qwen2_model_has_no_pipeline_that_works() -> None:
    """On a rank between two stages Llama passes pointers on, and Qwen2 asks a pointer for its elements; a rule refuses
    the plan, and the reader's strategy breaks that rule."""

    def three_stages(config: dict[str, Any]) -> None:
        config["parallelism"].update(tp=1, pp=3, dp=1)

    def qwen2(config: dict[str, Any]) -> None:
        three_stages(config)
        model = config["model"]["model_config"]
        del model["is_llama_config"]
        model.update(is_qwen2_config=True, attention_bias=True)

    llama, other = run(between={"llama": changed(three_stages), "qwen2": changed(qwen2)})
    assert llama["ok"], llama
    assert other["error"] == "AttributeError: 'TensorPointer' object has no attribute 'numel'"
    read = read_configuration({"c.yaml": changed(qwen2)})
    backend, job = BACKENDS["nanotron"], make_job()
    assert read.model is not None
    batch = make_batch(pp=3, schedule="1f1b", stage_layers=[27, 27, 26])
    context = RuleContext(read.model, h100_cluster(128), job, batch, backend.recompute_kinds(read.model, job))
    assert "qwen2-without-pipeline" in {rule.id for rule, mask in backend.broken_rules(context) if mask[0]}


def test_examples_of_the_checkout_are_judged_alike() -> None:
    """Its own configurations, old and new: what the loader refuses has an error among our findings, and what it takes
    has none but those that come true later."""
    examples = sorted(Path(CHECKOUT, "examples").rglob("*.yaml"))
    if not examples:
        pytest.skip("the checkout has no examples")
    texts = {str(path): path.read_text() for path in examples}
    later = {finding for _, finding in ACCEPTED.values()}
    for answer in run(load=texts):
        name = answer["name"]
        errors = {f.id for f in read_configuration({name: texts[name]}).findings if f.severity == "error"}
        assert not errors - later if answer["ok"] else errors, (answer, errors)
