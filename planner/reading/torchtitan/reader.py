"""torchtitan's configurations: command lines and registry modules of 0.3, TOML files and flags of 0.1 and 0.2.

Degrees become the planner's, ``-1`` the ranks that are left, flavors the catalogue's names; what the framework refuses
or what has no counterpart in the cost model is said."""

from __future__ import annotations

import re
from typing import Any

from planner.backends.torchtitan import EAGER_HABITS, dealt_layers
from planner.backends.torchtitan_rules import SCHEDULE_NAMES
from planner.catalog import load_model
from planner.errors import InputError
from planner.reading.configuration import Configuration, Files, StatedStrategy
from planner.reading.torchtitan.fields import ATTENTION_SUFFIXES, MODELS
from planner.reading.torchtitan.sources import Gathered, gather, looks_like_command, looks_like_toml
from planner.reading.torchtitan.stated import Stated
from planner.reading.torchtitan.values import module_lists, planned_model, split_at, words
from planner.specs.job import Loss, Precision
from planner.specs.model import ModelSpec
from planner.specs.strategy import Offload, Recompute, Schedule
from planner.units import counted

_SINGLE: dict[str, Schedule] = {"1f1b": "1f1b", "gpipe": "gpipe"}
_SEVERAL = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
"""torch's schedules of one chunk and of several, in lower case (get_schedule_class ignores case)."""

_SELECTIVE = ("attention", "every-second-matmul")

_MESH_FIELDS = tuple(
    f"parallelism.{kind}_degree"
    for kind in (
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "data_parallel_replicate",
        "data_parallel_shard",
    )
)
_PIPELINE_FIELDS = ("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule")


class TorchtitanReader:
    """Reads every way in which torchtitan is configured."""

    name = "torchtitan"
    title = "torchtitan arguments, registry module or TOML file"

    def recognises(self, files: Files) -> bool:
        return any(looks_like_toml(name, text) or looks_like_command(text) for name, text in files.items())

    def read(self, files: Files) -> Configuration:
        return _Interpretation(gather(files)).run()


class _Interpretation(Stated):
    """The settings as a strategy."""

    def __init__(self, gathered: Gathered) -> None:
        super().__init__(gathered)
        self.habits: dict[str, Any] = {}

    def run(self) -> Configuration:
        model, model_name = self._model()
        layers = model.layers if model is not None else None
        tp, cp, pp = (self.degree(name) for name in ("tensor", "context", "pipeline"))
        replicate, shard = self._data_parallel(tp * cp * pp)
        dp = None if shard is None else replicate * shard
        schedule, vpp, stages = self._pipeline(pp, layers)
        micro, accumulation, total = self._batch(pp, dp)
        precision = self._precision()
        self._compiled(pp)
        self._left_over()
        ep = self.degree("expert")
        offloaded = Offload(optimizer=1.0, parameters="cpu", device="cpu")
        strategy = StatedStrategy(
            tp=self.if_defined(tp, "parallelism.tensor_parallel_degree"),
            sequence_parallel=self.if_defined(
                bool(self.value("parallelism.enable_sequence_parallel", True)) and tp > 1,
                "parallelism.tensor_parallel_degree",
            ),
            cp=self.if_defined(cp, "parallelism.context_parallel_degree"),
            pp=self.if_defined(pp, "parallelism.pipeline_parallel_degree"),
            vpp=self.if_defined(vpp, *_PIPELINE_FIELDS),
            pipeline_schedule=self.if_defined(schedule, *_PIPELINE_FIELDS),
            layers_per_stage=self.if_defined(stages, *_PIPELINE_FIELDS),
            ep=self.if_defined(ep, "parallelism.expert_parallel_degree"),
            etp=self.if_defined(
                self._expert_tensor(model, ep, tp),
                "parallelism.expert_parallel_degree",
                "parallelism.tensor_parallel_degree",
            ),
            dp=dp,
            zero_stage=self.if_defined(
                self._zero_stage(pp, None if shard is None else shard * cp), "parallelism.fsdp_reshard_after_forward"
            ),
            shard_degree=self._shard_degree(shard, cp, pp),
            micro_batch=micro,
            grad_accum=accumulation,
            recompute=self._recompute(),
            offload=self.if_defined(
                offloaded if self.value("training.enable_cpu_offload") else Offload(), "training.enable_cpu_offload"
            ),
        )
        return Configuration(
            format="torchtitan 0.3 arguments" if self.era == "registry" else "torchtitan 0.1 or 0.2 configuration",
            backend="torchtitan",
            model=model,
            model_name=model_name,
            gpus=self.read.gpus,
            gpus_per_node=self.read.gpus_per_node,
            seq_len=self.if_defined(self.value("training.seq_len"), "training.seq_len"),
            global_batch=total,
            precision=self.if_defined(precision, "training.mixed_precision_param"),
            loss=self._loss(model),
            flash_attention=True,
            task="sft" if self.read.task == "sft" else None,
            strategy=strategy,
            habits=self.habits,
            findings=tuple(self.findings),
            unread=tuple(dict.fromkeys(self.unread)),
        )

    # --- Model

    def _model(self) -> tuple[ModelSpec | None, str | None]:
        """(dimensions, name); flavors of DeepSeek-V3 have no prediction blocks, the release has."""
        if self.read.plan:
            return self._planned_model(), None
        module, flavor = self.read.module, self.read.flavor
        if self.undefined.intersection(("model.name", "model.flavor")):
            return None, None
        if self.era == "toml":
            module, flavor = str(self.value("model.name")), str(self.value("model.flavor"))
        if module is None or flavor is None:
            return None, None
        for suffix in ATTENTION_SUFFIXES:
            flavor = flavor.removesuffix(suffix)
        name = MODELS.get((module, flavor))
        if name is None:
            self.unread.append(f"flavor {flavor} of {module}: its dimensions are not known")
            return None, None
        return load_model(name).spec.model_copy(update={"mtp_layers": 0}), name

    def _planned_model(self) -> ModelSpec:
        """From the constants of a module that the planner wrote."""
        try:
            return planned_model(dict(self.read.plan["MODEL"]))
        except (KeyError, TypeError, ValueError) as problem:
            raise InputError(
                "MODEL holds no dimensions of a model",
                where="plan_config.py: MODEL",
                got=str(problem)[:160],
                hint="correct MODEL, or name the model with --model",
            ) from problem

    def _expert_tensor(self, model: ModelSpec | None, ep: int, tp: int) -> int | None:
        if model is None:
            return None
        if model.moe is None:
            return 1
        return tp if ep == 1 else int(self.value("parallelism.expert_tensor_parallel_degree", 1))

    # --- Data parallelism

    def _data_parallel(self, others: int) -> tuple[int, int | None]:
        """(replicas of the shard group, data-parallel ranks in it); the second is None while it cannot be told."""
        if self.undefined.intersection(_MESH_FIELDS):
            return 1, None
        replicate = int(self.value("parallelism.data_parallel_replicate_degree"))
        shard = int(self.value("parallelism.data_parallel_shard_degree"))
        where = self.where("parallelism.data_parallel_shard_degree")
        if replicate < 1 or shard == 0 or shard < -1:
            self.say(
                "degree",
                f"data_parallel_replicate_degree({replicate}), data_parallel_shard_degree({shard})",
                where,
                allowed="1 or more; the shard degree alone can be -1, the ranks that are left",
            )
            return max(replicate, 1), None
        if shard > 0:
            return replicate, shard
        gpus = self.read.gpus
        if gpus is None:
            if replicate > 1:
                self.unread.append("parallelism.data_parallel_shard_degree = -1: the number of GPUs is not stated")
            return replicate, None
        product = replicate * others
        if gpus % product:
            self.say(
                "world-size",
                f"dp_replicate({replicate}) * cp * tp * pp = {product} does not divide the {counted(gpus, 'GPU')}",
                where,
                allowed=f"a product that divides {gpus}",
            )
            return replicate, None
        return replicate, gpus // product

    def _zero_stage(self, pp: int, group: int | None) -> int:
        """From the reshard policy and the size of the shard group."""
        policy = self.value("parallelism.fsdp_reshard_after_forward")
        if pp > 1 and policy == "always":
            self.unread.append(
                "parallelism.fsdp_reshard_after_forward = always with a pipeline gathers weights for every "
                "micro-batch; priced as the default, which keeps them"
            )
        if group == 1:
            # Until 0.2 a shard group of one meant plain replication; 0.3 wraps it in fully_shard all the same.
            return 0 if policy == "never" or self.era == "toml" else 3
        return 2 if policy == "never" and pp == 1 else 3

    def _shard_degree(self, shard: int | None, cp: int, pp: int) -> int | None:
        if shard is None:
            return None
        return 1 if self._zero_stage(pp, shard * cp) == 0 else shard * cp

    # --- Pipeline

    def _pipeline(self, pp: int, layers: int | None) -> tuple[Schedule | None, int | None, tuple[int, ...] | None]:
        """(schedule, chunks of a rank, layers of every virtual stage)."""
        if pp == 1:
            return "none", 1, None
        if self.value("parallelism.pipeline_parallel_schedule_csv"):
            self.unread.append("parallelism.pipeline_parallel_schedule_csv: schedules from files are not modelled")
        name = str(self.value("parallelism.pipeline_parallel_schedule"))
        where = self.where("parallelism.pipeline_parallel_schedule")
        key = name.lower()
        if key in _SINGLE:
            chunks: int | None = 1
            schedule = _SINGLE[key]
        elif key in _SEVERAL:
            chunks, schedule = None, "interleaved"
            if key != SCHEDULE_NAMES["interleaved"].lower():
                self.unread.append(f"pipeline_parallel_schedule {name}: priced as Interleaved1F1B")
        else:
            self.say(
                "pipeline-schedule",
                f"torch has no pipeline schedule {name}",
                where,
                allowed="1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV",
            )
            return None, None, None
        stages = self._stages(pp, layers, chunks)
        if stages is not None and len(stages) % pp == 0:
            chunks = len(stages) // pp
        return schedule, chunks or 2, stages

    def _stages(self, pp: int, layers: int | None, chunks: int | None) -> tuple[int, ...] | None:
        """Layers of the virtual stages where they are listed or follow from other than the default numbers."""
        planned = self.read.plan.get("LAYERS_PER_STAGE")
        if isinstance(planned, tuple | list) and planned and all(type(count) is int for count in planned):
            return tuple(planned)
        listed = module_lists(self.value("parallelism.module_fqns_per_model_part"))
        if listed is not None:
            return tuple(sum(bool(re.fullmatch(r"layers\.\d+", str(name))) for name in part) for part in listed)
        points = words(self.value("parallelism.pipeline_parallel_split_points"))
        if points and layers is not None:
            return split_at(points, layers)
        per_stage = self.value("parallelism.pipeline_parallel_layers_per_stage")
        first = int(self.value("parallelism.pipeline_parallel_first_stage_less_layers") or 0)
        last = int(self.value("parallelism.pipeline_parallel_last_stage_less_layers") or 0)
        if layers is None:
            if per_stage is not None:
                self.unread.append("parallelism.pipeline_parallel_layers_per_stage: the model's layers are not known")
            return None
        if per_stage is None and (first, last) == (1, 1):
            return None
        count = pp * (chunks or 2) if per_stage is None else -(-(layers + first + last) // int(per_stage))
        where = self.where("parallelism.pipeline_parallel_layers_per_stage")
        if count % pp or (chunks == 1 and count != pp) or (chunks is None and count < 2 * pp):
            self.say(
                "layer-split",
                f"ceil((layers({layers}) + {first + last}) / layers_per_stage({per_stage})) = {count} virtual stages "
                f"over pp({pp})",
                where,
                allowed="exactly pp stages with 1F1B and GPipe, else a multiple of pp from 2 * pp on",
            )
            return None
        return tuple(max(held, 0) for held in dealt_layers(layers, count, first, last))

    # --- Batch

    def _batch(self, pp: int, dp: int | None) -> tuple[int | None, int | None, int | None]:
        """(micro-batch, accumulation, global batch); a pipeline splits the local batch into its micro-batches."""
        pieces = ("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_microbatch_size")
        if self.undefined.intersection(("training.local_batch_size", *pieces)):
            known = "training.global_batch_size" in self.settings
            total = int(self.value("training.global_batch_size")) if known else 0
            return None, None, total if total > 0 else None
        local = int(self.value("training.local_batch_size"))
        piece = int(self.value("parallelism.pipeline_parallel_microbatch_size")) if pp > 1 else local
        if local % piece:
            self.say(
                "local-batch",
                f"local_batch_size({local}) % pipeline_parallel_microbatch_size({piece}) = {local % piece}, must be 0",
                self.where("parallelism.pipeline_parallel_microbatch_size"),
            )
            return piece, None, None
        if "training.global_batch_size" in self.undefined:
            return piece, None, None
        total = int(self.value("training.global_batch_size"))
        if total <= 0:
            return piece, local // piece, None if dp is None else local * dp
        if dp is not None and total % (local * dp):
            self.say(
                "batch-divisible",
                f"global_batch_size({total}) % (local_batch_size({local}) * dp({dp})) = {total % (local * dp)}, "
                "must be 0",
                self.where("training.global_batch_size"),
                allowed=f"multiples of {local * dp}",
            )
        return piece, None, total

    def _loss(self, model: ModelSpec | None) -> Loss | None:
        """In chunks from 0.3 on, unless a plan has one chunk; prediction blocks have a loss of their own."""
        if self.read.plan and model is not None and model.mtp_layers:
            return None
        return "eager" if self.era == "toml" or self.read.plan.get("LOSS_CHUNKS") == 1 else "chunked"

    # --- Precision, kernels, recomputation

    def _precision(self) -> Precision:
        converters = words(self.value("model.converters")) if self.era == "toml" else []
        experts = [word for word in converters if "grouped_mm" in word]
        self.unread += [f"model.converters: {word} (experts in 8 bits are not priced)" for word in experts]
        narrow = (
            self.read.fp8
            or bool(self.read.plan.get("FLOAT8"))
            or any(word in ("float8", "mx") or ".linear." in word for word in converters)
        )
        recipe = next((s.value for n, s in self.settings.items() if n.endswith("float8.recipe_name")), "tensorwise")
        if narrow and self.era == "toml" and recipe != "rowwise":
            self.unread.append(f"float8 recipe {recipe}: priced like rowwise scaling, whose kernels are slower")
        if self.value("training.dtype") == "bfloat16":
            self.unread.append("training.dtype = bfloat16: weights and optimizer in 16 bits are priced as fp32")
        if narrow:
            return "fp8"
        return "fp32" if self.value("training.mixed_precision_param") == "float32" else "bf16"

    def _compiled(self, pp: int) -> None:
        """What the file says of the compiler, overlap and CUDA graphs, as habits that differ from a plan's."""
        components = words(self.value("compile.components"))
        enabled = bool(self.value("compile.enable") or self.value("training.compile"))
        compiled = enabled and "model" in components
        if not compiled and "compile.enable" not in self.undefined:
            for name in ("fused_kernels", "activation_overhead", "kernels_per_layer"):
                self.habits[name] = getattr(EAGER_HABITS, name)
        for name in ("compile.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel"):
            if self.value(name):
                self._asynchronous(name, compiled)
        if self.era == "registry":
            self._graphs(pp)

    def _asynchronous(self, name: str, compiled: bool) -> None:
        if compiled:
            self.habits["tensor_parallel_overlap"] = True
            return
        self.say(
            "async-tensor-parallel",
            f"{name} needs the compiled model",
            self.where(name),
            hint="add --compile.enable, with model among --compile.components",
        )

    def _graphs(self, pp: int) -> None:
        """CUDA graphs are on unless a flag says no (torchtitan/trainer.py, _validate_cuda_graphs)."""
        if self.value("training.disable_cuda_graphs") or "training.disable_cuda_graphs" in self.undefined:
            return
        ep = self.degree("expert")
        if pp > 1 or (ep > 1 and not self.read.graphs_with_experts):
            what = f"pipeline_parallel_degree({pp})" if pp > 1 else f"expert_parallel_degree({ep})"
            self.say(
                "cuda-graphs",
                f"{what} with CUDA graphs, which are on by default: torchtitan 0.3 refuses to start",
                "training.disable_cuda_graphs",
                hint="add --training.disable_cuda_graphs",
            )
        else:
            self.habits["cuda_graphs"] = "full"

    def _recompute(self) -> Recompute | None:
        mode = self.read.plan.get("RECOMPUTE") if self.read.plan else None
        mode = self.read.recompute or mode or (self.value("activation_checkpoint.mode") if self.era == "toml" else None)
        option = str(self.value("activation_checkpoint.selective_ac_option", "op"))
        if mode is None and not self.read.base_known:
            return None
        mode = mode or "selective"
        if mode == "selective" and self.era == "toml" and option != "op":
            self.unread.append(
                f"activation_checkpoint.selective_ac_option = {option}: one block in {option} recomputes; priced as all"
            )
            mode = "full"
        if mode in ("memory_budget", "memory-budget"):
            self.unread.append("activation checkpointing by memory budget: the compiler decides, priced as none")
            return Recompute()
        if mode == "full":
            return Recompute(mode="full")
        if mode == "selective":
            return Recompute(mode="selective", modules=_SELECTIVE)
        if mode == "none":
            return Recompute()
        self.say(
            "recompute-choice",
            f"there is no activation checkpointing called {mode}",
            "activation-checkpoint",
            allowed="selective, full, memory-budget, none",
        )
        return None

    _NOT_MODELLED = (
        "override.",
        "fault_tolerance.enable",
        "optimizer.early_step_in_backward",
        "parallelism.enable_fsdp_symm_mem",
        "parallelism.enable_compiled_autograd",
        "parallelism.disable_loss_parallel",
        "parallelism.expert_parallel_comm_backend",
        "debug.deterministic",
    )

    def _left_over(self) -> None:
        """Settings that bear on speed or memory and have no counterpart."""
        for name, setting in self.settings.items():
            default = self.known[name].default if name in self.known else None
            if name.startswith(self._NOT_MODELLED) and setting.value not in (False, default, "false", "False"):
                self.unread.append(f"{name} = {setting.value} ({setting.where})"[:200])
        if self.value("compile.backend") != "inductor":
            self.unread.append(f"compile.backend = {self.value('compile.backend')}")
