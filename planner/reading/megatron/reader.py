"""Megatron-LM's arguments, in a launch script, on a command line or in the dump of a log, as a configuration.

Nothing is run; what the arguments leave out has that framework's own default, except in a log, which may be cut."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.backends import megatron_arguments
from planner.backends.megatron import Megatron, te_loss_bytes
from planner.backends.stacks import reduced_in_16_bits
from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, StatedStrategy
from planner.reading.megatron import fork
from planner.reading.megatron.findings import findings
from planner.reading.megatron.flags import Stated, flag_of_argument, from_log, from_words
from planner.reading.megatron.layout import Dealt, dealt
from planner.reading.megatron.model import model_of
from planner.reading.megatron.setting import Setting
from planner.reading.texts.shell import Launch, Script, entry_scripts, launches, read_script
from planner.specs.finding import Finding
from planner.specs.job import Precision
from planner.specs.strategy import Offload, Recompute

_MARKS = re.compile(
    r"--(?:(?:tensor|pipeline)[-_]model[-_]parallel[-_](?:size|layout)|micro[-_]batch[-_]size[\s=]|num[-_]attention[-_]heads)"
    r"|pretrain_gpt\.py"
)
_DUMP_LINE = re.compile(r"(?:^|[\s\]:])([a-z][A-Za-z0-9_]*) \.{2,} ?(.*?)\s*$")
_BLOCK = re.compile(r"-+ (end of )?arguments -+")
_WORLD = {
    "world": "world_size",
    "data-parallel": "data_parallel_size",
    "context-parallel": "context_parallel_size",
    "tensor-model-parallel": "tensor_model_parallel_size",
    "pipeline-model-parallel": "pipeline_model_parallel_size",
}
_WORLD_LINE = re.compile(r"(?<![\w-])(" + "|".join(_WORLD) + r")[ -]size: (\d{1,7})\b")
"""Sizes in the line that is printed before the arguments."""
_OTHER_MODELS = re.compile(r"pretrain_(?:t5|retro|ict|biencoder|vision\w*|vlm|mimo)\.py$")
"""Training scripts whose models have a second stack of layers, or no text."""
_FULL_DUMP = 110
"""Arguments of a dump from which on it counts as whole; the releases of 2021 print some 130, later ones hundreds."""

_NOT_MODELLED: dict[str, str] = {
    "cpu-offloading-num-layers": "layers whose activations wait in host memory",
    "fine-grained-activation-offloading": "modules whose inputs wait in host memory",
    "distribute-saved-activations": "saved layer inputs spread over tp",
    "hierarchical-context-parallel-sizes": "context parallelism in two levels",
    "hybrid-context-parallel": "context parallelism by sample length",
    "rampup-batch-size": "a batch that grows; the final one was read",
    "step-batch-size-schedule": "a batch that grows",
    "tensor-parallel-num-weight-shards": "a second shard axis of tensor-parallel weights",
    "delay-wgrad-compute": "weight gradients computed later",
    "moe-router-padding-for-fp8": "padding of tokens for fp8",
    "use-nccl-ub": "registered communication buffers",
    "nccl-ub": "registered communication buffers",
    "use-torch-fsdp2": "PyTorch's FSDP inside Megatron-LM",
    "use-megatron-fsdp": "Megatron-FSDP",
    "reuse-grad-buf-for-mxfp8-param-ag": "gradient buffer used for gathering weights",
    "moe-layer-recompute": "recomputation of whole mixtures in an old spelling",
    "encoder-num-layers": "a second stack of layers",
    "use-tp-pp-dp-mapping": "pipeline neighbours nearer than data-parallel ones",
}
"""Arguments that bear on speed or memory and are not read into a field."""


@dataclass(frozen=True)
class Source:
    """Where arguments came from."""

    stated: Stated
    name: str
    gpus: int | None = None
    gpus_per_node: int | None = None
    environment: Mapping[str, str] | None = None
    unread: tuple[str, ...] = ()


class MegatronArguments:
    """A launch script (with the files that it sources) or a bare command line."""

    name = "megatron-arguments"
    title = "Megatron-LM arguments in a shell script or on a command line"

    def recognises(self, files: Files) -> bool:
        return any(_MARKS.search(text) and "\x00" not in text for text in files.values()) and not _dumped(files)

    def read(self, files: Files) -> Configuration:
        return configuration_of(_from_script(files), self.title)


class MegatronDump:
    """The list of arguments that Megatron-LM prints when it starts."""

    name = "megatron-dump"
    title = "Megatron-LM's arguments as its log prints them"

    def recognises(self, files: Files) -> bool:
        return _dumped(files)

    def read(self, files: Files) -> Configuration:
        return configuration_of(_from_dump(files), self.title)


# --- Where the arguments stand


def _from_script(files: Files) -> Source:
    """The first command that starts a training script with Megatron's arguments."""
    for name, text in files.items():
        if "\x00" in text:
            raise InputError(
                "this is no text file",
                where=name,
                got="a zero byte",
                allowed="a shell script",
                hint="name the script that starts the training",
            )
    best: tuple[int, str, Script, Launch] | None = None
    for name in entry_scripts(files):
        script = read_script(files, name)
        for launch in [*launches(script), *_without_launcher(script)]:
            size = sum(word.text.startswith("--") for word in launch.arguments)
            if best is None or size > best[0]:
                best = (size, name, script, launch)
    if best is None or best[0] == 0:
        raise InputError(
            "no command with Megatron-LM's arguments was found",
            where=", ".join(sorted(files)),
            got="no word that begins with --",
            allowed="torchrun ... pretrain_gpt.py --num-layers ..., or arrays of such arguments",
            hint="give all files that the script sources, too",
        )
    _, name, script, launch = best
    own = launch.script is not None and not launch.script.text.endswith("pretrain_gpt.py")
    arguments = list(launch.arguments)
    stated = from_words(arguments, own_script=own, doubtful=script.doubtful, part=not launch.launcher)
    if not launch.launcher and script.missing:
        stated.part, stated.complete = stated.part or stated.complete, False
    if launch.script is not None and not own and stated.complete and "tokenizer-type" not in stated.places:
        stated.values["tokenizer-type"] = "GPT2BPETokenizer"  # pretrain_gpt.py, args_defaults
    if launch.script is not None and _OTHER_MODELS.search(launch.script.text):
        stated.described_by = launch.script.text
    forked = fork.translated(stated) if fork.is_fork(stated) else ()
    started = launch.launcher not in ("", "python")
    return Source(
        stated,
        name,
        launch.gpus,
        launch.per_node,
        launch.environment if launch.launcher and not fork.is_fork(stated) else None,
        (*forked, *script.missing, *(() if not started or launch.gpus else (_unknown_size(launch),))),
    )


def _unknown_size(launch: Launch) -> str:
    named = [f"--{key} {word.text}" for key, word in launch.options.items() if "node" in key or "proc" in key]
    return "number of GPUs" + (f" ({', '.join(named)})" if named else "")


def _without_launcher(script: Script) -> list[Launch]:
    """Commands without Python (a bare list of flags), and the arrays of a file that only defines them."""
    if launches(script):
        return []
    bare = [
        Launch(None, command.words if command.words[0].text.startswith("--") else command.words[1:], {}, {}, "")
        for command in script.commands
        if any(word.text.startswith("--") for word in command.words[:2])
    ]
    arrays = [words for words in script.arrays.values() if words and words[0].text.startswith("--")]
    joined = [word for words in arrays for word in words]
    return [*bare, *([Launch(None, tuple(joined), {}, {}, "")] if joined else [])]


def _dumped(files: Files) -> bool:
    """Whether a log holds a dump: its frame, or a handful of its dotted lines."""
    for text in files.values():
        if _BLOCK.search(text):
            return True
        known = flag_of_argument()
        found = (match for line in text.splitlines()[:5000] if (match := _DUMP_LINE.search(line)))
        if sum(match[1] in known for match in found) >= 5:
            return True
    return False


def _from_dump(files: Files) -> Source:
    pairs: list[tuple[str, str, str]] = []
    world: list[tuple[str, str, str]] = []
    frames: set[bool] = set()
    name = ""
    for name, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            place = f"{name}:{number}"
            frame, found = _BLOCK.search(line), _DUMP_LINE.search(line)
            if frame:
                frames.add(bool(frame[1]))
            if found:
                pairs.append((found[1], found[2], place))
            world += [(_WORLD[words], size, place) for words, size in _WORLD_LINE.findall(line)]
        if pairs:
            break
    if not pairs:
        raise InputError(
            "the frame of Megatron-LM's argument list is there, but no argument",
            where=name,
            allowed="lines like: num_layers ........ 80",
            hint="copy the lines between 'arguments' and 'end of arguments'",
        )
    complete = frames == {False, True} and len(pairs) >= _FULL_DUMP
    stated = from_log([*pairs, *world], complete=complete)
    if complete and "transformer-impl" not in stated.places:
        stated.values["transformer-impl"] = "local"  # releases before Transformer Engine
    forked = fork.translated(stated) if fork.is_fork(stated) else ()
    unread = () if complete else ("arguments that the excerpt does not show",)
    gpus = stated.integer("world-size")
    _context_from_world(stated, gpus)
    return Source(stated, name, gpus, unread=(*forked, *unread))


def _context_from_world(stated: Stated, world: int | None) -> None:
    """The context-parallel size that a release without it, or an excerpt, leaves to be worked out."""
    others = [stated.integer(f"{name}-parallel-size") for name in ("data", "tensor-model", "pipeline-model")]
    ranks = math.prod(other or 0 for other in others)
    if world and ranks and world % ranks == 0 and "context-parallel-size" not in stated.places:
        stated.values["context-parallel-size"] = str(world // ranks)


# --- What they say


def configuration_of(source: Source, title: str) -> Configuration:
    stated = source.stated
    tp = stated.integer("tensor-model-parallel-size", 1)
    cp = stated.integer("context-parallel-size", 1 if stated.complete else None)
    pp = stated.integer("pipeline-model-parallel-size", 1)
    layers = stated.integer("num-layers")
    stages = dealt(stated, layers, pp)
    ranks = (tp or 1) * (cp or 1) * (pp or 1)
    known = tp is not None and pp is not None
    dp = source.gpus // ranks if source.gpus and known and source.gpus % ranks == 0 else None
    if source.gpus and known and source.gpus % ranks:
        stated.note(
            Finding(
                id="world-size",
                severity="error",
                message=f"{source.gpus} GPUs % (tp({tp}) * cp({cp or 1}) * pp({pp})) = {source.gpus % ranks}, "
                "must be 0",
                where=stated.place("tensor-model-parallel-size", "pipeline-model-parallel-size"),
            )
        )
    dp = dp or stated.integer("data-parallel-size")
    precision = _precision(stated)
    setting = Setting(stated, tp or 1, cp or 1, pp or 1, dp, source.environment)
    model = model_of(replace(stated, complete=stated.complete or stated.part), f"model of {source.name}")
    strategy = _strategy(stated, stages, setting)
    found = tuple(findings(setting, whole=not fork.is_fork(stated)))
    unresolved = tuple(
        f"--{name} {value}" if name in stated.used else name
        for name, value in stated.unresolved.items()
        if name in stated.used or name.startswith("words of")
    )
    return Configuration(
        format=title,
        backend="megatron",
        model=model,
        model_name=model.name if model is not None and not model.name.startswith("model of") else None,
        gpus=source.gpus,
        gpus_per_node=source.gpus_per_node,
        seq_len=stated.integer("seq-length"),
        global_batch=_global_batch(stated, dp),
        precision=precision,
        loss=_loss(stated),
        flash_attention=_flash(stated),
        task="pretrain",
        strategy=strategy,
        habits=_habits(stated, precision, setting),
        findings=tuple(dict.fromkeys((*stated.findings, *found))),
        unread=(*source.unread, *unresolved, *_not_modelled(stated)),
    )


def _precision(stated: Stated) -> Precision | None:
    if stated.values.get("fp4-format"):
        return "nvfp4"
    if stated.values.get("fp8-format"):
        return "fp8"
    if stated.values.get("bf16"):
        return "bf16"
    if stated.values.get("fp16"):
        return "fp16"
    parameters = megatron_arguments.dtype(stated.text("params-dtype"))
    if parameters in ("fp32", "bf16", "fp16"):
        return {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}[parameters]  # type: ignore[return-value]
    return "fp32" if stated.switch("bf16") is False else None


def _global_batch(stated: Stated, dp: int | None) -> int | None:
    """--global-batch-size; Megatron's default is one micro-batch a replica."""
    given = stated.integer("global-batch-size")
    micro = stated.integer("micro-batch-size")
    if given is not None or not stated.complete or "global-batch-size" in stated.unresolved:
        return given
    return micro * dp if micro is not None and dp is not None else None


def _loss(stated: Stated) -> Literal["eager", "fused"] | None:
    fused = stated.switch("cross-entropy-loss-fusion")
    return None if fused is None else "fused" if fused else "eager"


def _flash(stated: Stated) -> bool | None:
    """Scores are stored with unfused attention only; the local implementation is unfused unless told otherwise."""
    backend = stated.text("attention-backend", "auto")
    if backend is None:
        return None
    local = stated.text("transformer-impl") == "local" and not stated.switch("use-flash-attn")
    return backend not in ("unfused", "local") and not (local and backend == "auto")


def _strategy(stated: Stated, stages: Dealt, setting: Setting) -> StatedStrategy:
    tp, cp, pp = setting.tp, setting.cp, setting.pp
    micro, whole = stated.integer("micro-batch-size"), _global_batch(stated, setting.dp)
    step = micro * setting.dp if micro and setting.dp else None
    zero, shard = _sharding(stated, setting)
    experts = stated.values.get("num-experts") is not None
    vpp = stages.vpp
    tp_known = stated.known("tensor-model-parallel-size")
    return StatedStrategy(
        tp=tp if tp_known else None,
        # Megatron-LM switches it off by itself where there is nothing to split over.
        sequence_parallel=False if tp == 1 and tp_known else stated.switch("sequence-parallel"),
        cp=cp if stated.known("context-parallel-size") else None,
        pp=pp if stated.known("pipeline-model-parallel-size") else None,
        vpp=vpp,
        pipeline_schedule=None if vpp is None else "interleaved" if vpp > 1 else "1f1b" if pp > 1 else "none",
        layers_per_stage=stages.layers,
        ep=stated.integer("expert-model-parallel-size", 1),
        etp=stated.integer("expert-tensor-parallel-size", tp if tp_known else None) if experts else 1,
        dp=setting.dp,
        zero_stage=zero,
        shard_degree=shard,
        micro_batch=micro,
        grad_accum=whole // step if step and whole and whole % step == 0 else None,
        recompute=_recompute(stated, stages.layers),
        offload=_offload(stated),
    )


_FSDP_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _sharding(stated: Stated, setting: Setting) -> tuple[int | None, int | None]:
    """Sharding stage, and the ranks over which it spreads."""
    if stated.switch("use-torch-fsdp2"):
        stage: int | None = 3
    elif stated.switch("use-megatron-fsdp"):
        stage = _FSDP_STAGES.get(stated.text("data-parallel-sharding-strategy") or "optim_grads_params")
    else:
        sharded = stated.switch("use-distributed-optimizer")
        stage = None if sharded is None else int(sharded)
    if stage == 0:
        return 0, 1
    instances = stated.integer("num-distributed-optimizer-instances", 1) or 1
    ranks = setting.dp * setting.cp if setting.dp else None
    if ranks is not None and ranks % instances:
        stated.note(
            Finding(
                id="shard-degree-divides",
                severity="error",
                message=f"dp({setting.dp}) * cp({setting.cp}) % instances({instances}) = {ranks % instances}, "
                "must be 0",
                where=stated.place("num-distributed-optimizer-instances"),
            )
        )
        return stage, None
    return stage, None if ranks is None or stage is None else ranks // instances


def _recompute(stated: Stated, layers: tuple[int, ...] | None) -> Recompute | None:
    """Granularity, modules and layers; --recompute-activations wins over the granularity (validate_args)."""
    granularity = "selective" if stated.switch("recompute-activations") else stated.text("recompute-granularity")
    if granularity is None:
        absent = stated.complete or "recompute-granularity" in stated.cleared
        return Recompute() if absent and "recompute-granularity" not in stated.unresolved else None
    if granularity == "selective":
        return Recompute(mode="selective", modules=stated.items("recompute-modules") or ("core_attn",))
    if granularity != "full":
        stated.bad_value("recompute-granularity", granularity, "full or selective")
        return None
    number = stated.integer("recompute-num-layers")
    if stated.text("recompute-method") != "block" or number is None:
        if number is not None and number > 1:
            stated.note(
                Finding(
                    id="recompute-in-groups",
                    severity="note",
                    message=f"{number} layers share one stored input: less memory at rest, more while a group is "
                    "computed again; estimated as one layer each",
                    where=stated.place("recompute-num-layers"),
                )
            )
        return Recompute(mode="full")
    if layers is None:
        return None
    counts = tuple(min(number, count) for count in layers)
    return Recompute(mode="full", layers_per_stage=None if counts == layers else counts)


def _offload(stated: Stated) -> Offload | None:
    offloaded = stated.switch("optimizer-cpu-offload")
    if not offloaded:
        return None if offloaded is None else Offload()
    share = stated.share("optimizer-offload-fraction", 1.0)
    if share is None:
        return None
    return Offload(optimizer=share, device="cpu") if share else Offload()


def _habits(stated: Stated, precision: Precision | None, setting: Setting) -> dict[str, Any]:
    """Habits that differ from those of a plan."""
    if not stated.complete or precision is None:
        return {}
    arguments = stated.values
    habits = {
        **megatron_arguments.kernel_habits(arguments),
        "cuda_graphs": megatron_arguments.graphs_of(arguments),
        "state_format": megatron_arguments.state_format(
            precision,
            gradients_in_16_bits=megatron_arguments.narrow_gradients(arguments),
            moments=arguments.get("exp-avg-dtype"),
            gathers_8_bits=arguments.get("fp8-param-gather"),
        ),
        "narrow_recipe": megatron_arguments.narrow_recipe(arguments),
        "vocab_multiple": _vocabulary_multiple(stated),
    }
    if arguments.get("num-experts") is not None:
        habits |= megatron_arguments.expert_habits(arguments)
    if setting.tp > 1 and arguments.get("sequence-parallel"):
        habits["tensor_parallel_overlap"] = bool(arguments.get("tp-comm-overlap"))
    reduces = setting.dp is None or setting.dp * setting.cp > 1
    if reduces and not arguments.get("overlap-grad-reduce") and not setting.sharded_framework:
        habits["overlapped_stages"] = ()
    if megatron_arguments.narrow_gradients(arguments):
        habits["gradient_reduce_bytes"] = reduced_in_16_bits
    fused = megatron_arguments.loss_function(arguments)
    if fused is te_loss_bytes:
        habits["loss_bytes_per_logit"] = fused
    return {name: value for name, value in habits.items() if value != getattr(Megatron.habits, name)}


def _vocabulary_multiple(stated: Stated) -> int:
    """The embedding's rows are a multiple of this times tp; a padded size that is stated is not padded again."""
    if stated.integer("padded-vocab-size") and not stated.integer("vocab-size"):
        return 1
    return stated.integer("make-vocab-size-divisible-by", 128) or 128


def _not_modelled(stated: Stated) -> tuple[str, ...]:
    found = [f"--{name}: {why}" for name, why in _NOT_MODELLED.items() if stated.values.get(name) not in (None, "0")]
    ring = stated.items("cp-comm-type")
    if any(kind != "p2p" for kind in ring) and stated.values.get("context-parallel-size", "1") != "1":
        found.append(f"--cp-comm-type {' '.join(ring)}: context parallelism is estimated as a ring")
    optimizer = stated.text("optimizer", "adam")
    if optimizer not in ("adam", None):
        found.append(f"--optimizer {optimizer}: its states are estimated as Adam's")
    return tuple(found)
