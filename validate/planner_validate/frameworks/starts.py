"""How training frameworks are started for a few steps on the files that the planner renders, with mock data.

One ``Framework`` each for Megatron-LM, DeepSpeed, torchtitan and the scripts of the ``fsdp`` backend; nothing is
started here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.errors import InputError, MissingExtraError
from planner.render import render_plan
from planner.specs.plan import PlanDocument
from planner.specs.strategy import Strategy
from planner_validate.frameworks.logs import DEEPSPEED, MEGATRON, OWN_SCRIPT, TORCHTITAN, Amounts, LogFormat
from planner_validate.runs.launching import surroundings

Files = dict[str, str]

MOCK_TOKENIZER, MOCK_DATA = "mock_tokenizer", "tests/assets/c4_test/data.json"
"""Where torchtitan finds them from the folder of the files: the path of its ``c4_test`` data set is relative."""

SCRIPT = "deepspeed_script.py"


@dataclass(frozen=True)
class Framework:
    """How one framework is started for a few steps."""

    log: LogFormat
    packages: tuple[str, ...]
    """Modules that the interpreter must find."""
    distributions: tuple[str, ...]
    """Installed packages whose versions are reported."""
    install: str
    """What to do where they are missing."""
    environment: Callable[[int], Mapping[str, str]]
    """Variables of the rendered launch script for so many steps."""
    arguments: Callable[[int], tuple[str, ...]]
    """What follows ``launch.sh``, for so many steps."""
    cleared: tuple[str, ...] = ()
    """Variables of a user's own job that would read his data or write his checkpoints."""
    adapt: Callable[[PlanDocument, Files], Files] = field(default=lambda _document, files: files)
    """Changes the rendered files and adds to them what a run without data needs."""


@dataclass(frozen=True)
class Launch:
    """A rendered plan, ready to be started."""

    files: Files
    arguments: tuple[str, ...]
    """Of launch.sh."""
    environment: dict[str, str]


def _no_arguments(steps: int) -> tuple[str, ...]:
    return ()


def _mock_corpus(document: PlanDocument, files: Files) -> Files:
    """Adds a word tokenizer no larger than the model's vocabulary, and text made of its words."""
    words = [f"w{index}" for index in range(1, min(document.request.model.vocab, 512))]
    end = "<end>"
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": end,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate([end, *words])},
            "unk_token": end,
        },
    }
    # Every data rank reads lines of its own, and more than one.
    count = max(64, 4 * document.best.strategy.dp)
    lines = [
        json.dumps({"text": " ".join(words[(31 * line + 7 * place) % len(words)] for place in range(1024))})
        for line in range(count)
    ]
    return files | {
        f"{MOCK_TOKENIZER}/tokenizer.json": json.dumps(tokenizer),
        f"{MOCK_TOKENIZER}/tokenizer_config.json": json.dumps({"bos_token": end, "eos_token": end}),
        MOCK_DATA: "\n".join(lines) + "\n",
    }


def _check_deepspeed(strategy: Strategy) -> None:
    """Refuse what DeepSpeed splits only for a script of the user's."""
    if os.environ.get("TRAIN_SCRIPT") or max(strategy.tp, strategy.cp, strategy.pp) == 1:
        return
    raise InputError(
        "DeepSpeed's tensor, sequence and pipeline parallelism need a training script with a model made for them",
        where="--with-framework",
        got=f"tp {strategy.tp}, cp {strategy.cp}, pp {strategy.pp}, and no TRAIN_SCRIPT",
        allowed="a plan with tp, cp and pp 1, or TRAIN_SCRIPT",
        hint="set TRAIN_SCRIPT to your script, which imports parallel_setup.py and takes --steps",
    )


def _deepspeed_files(document: PlanDocument, files: Files) -> Files:
    """Reports every step, and at a level that is shown (DeepSpeed 0.19 hides it by default); adds what the script
    builds."""
    _check_deepspeed(document.best.strategy)
    config = json.loads(files["ds_config.json"]) | {"steps_per_print": 1, "log_level": "info"}
    described = {"model": document.request.model, "job": document.request.job, "strategy": document.best.strategy}
    plan = {name: spec.model_dump(mode="json") for name, spec in described.items()}
    return files | {"ds_config.json": json.dumps(config, indent=2) + "\n", "plan_parts.json": json.dumps(plan) + "\n"}


def _deepspeed_environment(steps: int) -> Mapping[str, str]:
    own = Path(__file__).with_name(SCRIPT)
    return {"TRAIN_SCRIPT": os.environ.get("TRAIN_SCRIPT") or str(own)}


FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": Framework(
        log=MEGATRON,
        packages=("megatron", "transformer_engine"),
        distributions=("megatron-core", "transformer-engine"),
        install="install Megatron-LM with Transformer Engine (NVIDIA's PyTorch container has both) and set "
        "MEGATRON_PATH to a checkout of https://github.com/NVIDIA/Megatron-LM",
        environment=lambda steps: {"TRAIN_ITERS": str(steps), "WARMUP_ITERS": "1"},
        arguments=lambda steps: ("--exit-interval", str(steps)),
        cleared=("DATA_PATH", "TOKENIZER_MODEL", "CHECKPOINT_DIR", "SAVE_INTERVAL"),
    ),
    "deepspeed": Framework(
        log=DEEPSPEED,
        packages=("torch", "deepspeed"),
        distributions=("torch", "deepspeed"),
        install="pip install deepspeed",
        environment=_deepspeed_environment,
        arguments=lambda steps: ("--steps", str(steps)),
        adapt=_deepspeed_files,
    ),
    "torchtitan": Framework(
        log=TORCHTITAN,
        packages=("torch", "torchtitan"),
        distributions=("torch", "torchtitan"),
        install="pip install torchtitan==0.3.0",
        environment=lambda steps: {
            "TRAIN_STEPS": str(steps),
            "HF_ASSETS": f"./{MOCK_TOKENIZER}",
            "DATASET": "c4_test",
        },
        arguments=_no_arguments,
        adapt=_mock_corpus,
    ),
    "fsdp": Framework(
        log=OWN_SCRIPT,
        packages=("torch",),
        distributions=("torch",),
        install='pip install "parallel-planner[validate]"',
        environment=lambda steps: {},
        arguments=lambda steps: ("--steps", str(steps)),
        cleared=("TRAIN_SCRIPT",),
    ),
}
"""Backends whose program can be started from the rendered files alone."""


def framework_of(document: PlanDocument) -> Framework:
    """The framework of the plan; InputError where its files need a program that only the user has."""
    name = document.best.backend
    if name not in FRAMEWORKS:
        raise InputError(
            "the files of this framework cannot be started without a program and data of your own",
            where="--with-framework",
            got=name,
            allowed=", ".join(FRAMEWORKS),
            hint="leave --with-framework out: the plan then runs with PyTorch alone",
        )
    return FRAMEWORKS[name]


def check_installed(framework: Framework) -> None:
    """MissingExtraError where the framework is not there; nothing is imported."""
    missing = [name for name in framework.packages if not _found(name)]
    if framework is FRAMEWORKS["megatron"]:
        folder = os.environ.get("MEGATRON_PATH", "")
        if not folder:
            missing.append("MEGATRON_PATH")
        elif not Path(folder, "pretrain_gpt.py").is_file():
            raise MissingExtraError(
                "there is no pretrain_gpt.py in it", where="MEGATRON_PATH", got=folder, hint=framework.install
            )
        else:
            # The checkout brings the package itself.
            missing = [name for name in missing if name != "megatron"]
    if missing:
        raise MissingExtraError(
            f"{framework.log.title} is not installed here: {', '.join(missing)} not found",
            where="--with-framework",
            got=f"Python {sys.executable}",
            hint=framework.install,
        )


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed_versions(framework: Framework) -> dict[str, str]:
    """Of the packages that are distributions here; a checkout on the path has no version."""
    versions = {}
    for name in framework.distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def prepared(document: PlanDocument, framework: Framework, steps: int) -> Launch:
    """The files, the command and the environment of a run of ``steps`` optimizer steps on this machine."""
    nodes = document.request.cluster.nodes
    if nodes > 1:
        raise InputError(
            f"the plan is for {nodes} nodes, and this starts processes on one machine",
            where="--with-framework",
            hint="plan for one node (`planner suggest --gpus N`), or start the rendered files on the cluster yourself",
        )
    files = framework.adapt(document, render_plan(document))
    inherited = surroundings(threads=1, device="cuda")
    environment = {name: value for name, value in inherited.items() if name not in framework.cleared}
    environment |= framework.environment(steps)
    # launch.sh calls torchrun by name: that of this interpreter.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return Launch(files, framework.arguments(steps), environment)


def amounts(strategy: Strategy) -> Amounts:
    """What the printed rates count: torchtitan's tokens of a GPU, DeepSpeed's samples of a step.

    DeepSpeed counts every tensor-parallel rank as a replica of its own."""
    return {
        "tokens": strategy.global_batch * strategy.seq_len / strategy.gpus,
        "samples": strategy.global_batch * strategy.tp,
    }
