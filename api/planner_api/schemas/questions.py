"""What can be asked: bodies of requests, in the library's own terms.

Names, paths and files mean nothing on this machine's disk: a model is a name of the catalogue or data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from planner.service import CheckRequest, ClusterInput, JobInput, PlanRequest, StrategyInput
from planner.service.requests import StatedModel
from planner.specs.base import Spec
from planner.specs.cluster_file import MAX_GPUS, ClusterFile
from planner.specs.profile import Profile

Name = Annotated[str, Field(min_length=1, max_length=200)]
PinName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
PinValue = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^,=\s]*$")]
"""On the command line a comma begins another pin."""
Degree = Annotated[int, Field(ge=1, le=MAX_GPUS)]
LargestConfig = 20_000
"""Values in a model's configuration, at all depths."""


class ModelConfig(Spec):
    """A model as its Hugging Face config.json."""

    config: dict[str, JsonValue] = Field(min_length=1, max_length=2000)
    """The file's content."""


class ModelDimensions(Spec):
    """A model as the fields of a dimension file (docs/service.md: "Models of your own")."""

    dimensions: dict[str, JsonValue] = Field(min_length=1, max_length=200)
    """layers, hidden, ffn, heads, kv_heads, head_dim, vocab and max_seq are required; docs/service.md lists the rest
    under "Models of your own"."""


_NAME, _CONFIG, _DIMENSIONS = "a name", "a config.json", "own dimensions"
"""None of them can be taken for a field of the body."""


def _kind_of_model(value: object) -> str:
    """Which of the three is meant, so that nobody is told what the others lack."""
    if isinstance(value, ModelDimensions) or (isinstance(value, dict) and "dimensions" in value):
        return _DIMENSIONS
    return _CONFIG if isinstance(value, ModelConfig | dict) else _NAME


Model = Annotated[
    Annotated[Name, Tag(_NAME)] | Annotated[ModelConfig, Tag(_CONFIG)] | Annotated[ModelDimensions, Tag(_DIMENSIONS)],
    Discriminator(_kind_of_model),
    Field(description="A name of /v1/catalog/models, the content of a config.json, or dimensions.", examples=["70b"]),
]


class JobBody(Spec):
    """What is trained."""

    seq_len: int | None = Field(default=None, ge=1, le=100_000_000, examples=[8192])
    """Tokens of one sequence; null: the model's longest, at most 8192."""
    global_batch: Annotated[int, Field(ge=1, le=100_000_000)] | Annotated[str, Field(max_length=40)] | None = Field(
        default=None, description="Sequences of a step, or tokens with a suffix (`4M`).", examples=[512]
    )
    precision: str | None = Field(default=None, max_length=20, examples=["bf16"])
    """bf16, fp16, fp8, nvfp4 or fp32, as far as the accelerator has units for it; null: the usual choice."""
    loss: str = Field(default="auto", max_length=20)
    """How logits become a loss: auto (the framework's default), eager, fused or chunked."""
    flash_attention: bool = True
    """Attention never materialises the score matrix."""
    objective: str = Field(default="throughput", max_length=20, description="throughput, memory or cost.")
    memory_margin: float = Field(default=0.0, ge=0, le=0.95, description="Share of the GPU memory to keep free.")

    def asked(self) -> JobInput:
        return JobInput(**self.model_dump())


class Situation(Spec):
    """A model on machines."""

    model: Model
    cluster: ClusterFile = Field(examples=[{"gpu": "h100", "gpus": 128}])
    """The machines: gpu or system, and gpus or nodes; the rest comes from a reference system."""
    job: JobBody = JobBody()
    """What is trained; everything may be left out."""
    profile: Profile | Literal["measurements"] | None = Field(
        default=None,
        description="A machine profile, or `measurements`: one fitted to the measurements posted for this accelerator.",
    )

    def machines(self) -> ClusterInput:
        return ClusterInput(file=self.cluster)

    def stated_model(self) -> StatedModel:
        return stated(self.model)


class PlanBody(Situation):
    """A question to the search."""

    backend: str = Field(default="auto", max_length=40, description="auto, or one of /v1/catalog/backends.")
    pins: dict[PinName, int | bool | PinValue] = Field(
        default={}, max_length=40, description="Values of the strategy to keep.", examples=[{"tp": 8}]
    )
    rule_of_thumb: bool = Field(default=False, description="Also price what the usual size-based rule picks.")
    top: int = Field(default=5, ge=1, le=50, description="Plans in the answer.")
    time_limit_s: float | None = Field(default=None, gt=0, le=86_400)
    """Longest search, s; the service's own limit is the most. Null: that one."""

    def asked(self, profile: Profile | None, time_limit_s: float) -> PlanRequest:
        """The request to the library; no search is longer than the service allows."""
        limit = None if self.time_limit_s is None else min(self.time_limit_s, time_limit_s)
        return PlanRequest(
            model=self.stated_model(),
            cluster=self.machines(),
            job=self.job.asked(),
            backend=self.backend,
            pins=tuple(f"{name}={_pin(value)}" for name, value in self.pins.items()),
            profile=profile,
            rule_of_thumb=self.rule_of_thumb,
            top=self.top,
            time_limit_s=limit,
        )


class StrategyBody(Spec):
    """A strategy; what is left out follows from the rest or is the framework's usual choice."""

    tp: Degree = 1
    """Tensor-parallel ranks."""
    pp: Degree = 1
    """Pipeline stages."""
    vpp: Degree = 1
    """Virtual stages (model chunks) of one pipeline rank."""
    cp: Degree = 1
    """Ranks that share one sequence."""
    ep: Degree = 1
    """Ranks over which the experts of one layer are spread."""
    etp: Degree | None = None
    """Tensor-parallel ranks of one expert; null: 1."""
    zero_stage: int | None = Field(default=None, ge=0, le=3)
    """0 nothing sharded, 1 optimizer states, 2 and gradients, 3 and parameters; null: the framework's usual one."""
    shard_degree: Degree | None = None
    """GPUs over which the sharded states are spread; null: as many as the framework takes by itself."""
    secondary_shard_degree: int | None = Field(default=None, ge=0, le=MAX_GPUS)
    """GPUs that hold a second, nearer copy of the parameters (DeepSpeed hpZ), from 2; null: none."""
    micro_batch: Degree = 1
    """Sequences of one micro-batch on one replica."""
    sequence_parallel: bool | None = None
    """Activations outside the tensor-parallel matrices are split over the tp ranks, too; null: usual for tp above 1."""
    schedule: str | None = Field(default=None, max_length=40)
    """Pipeline schedule: none, gpipe, 1f1b, interleaved, zb-h1 or zb-h2; null: the framework's first."""
    recompute: str = Field(default="none", max_length=200)
    """none, selective, selective:MODULE,MODULE, full, or full:LAYERS of each stage."""
    offload: str = Field(default="none", max_length=40)
    """none, cpu, nvme or cpu:SHARE with SHARE from 0 to 1, and +parameters behind it to move the weights, too."""
    layers_per_stage: (
        Annotated[list[Annotated[int, Field(ge=0, le=99_999)]], Field(min_length=1, max_length=10_000)] | None
    ) = None
    """Layers of each of the pp * vpp virtual stages in model order; null: the framework's own split."""

    def asked(self) -> StrategyInput:
        values = self.model_dump()
        layers = values.pop("layers_per_stage")
        return StrategyInput(**values, layers_per_stage=None if layers is None else ",".join(map(str, layers)))


class EstimateBody(Situation):
    """A strategy to be priced."""

    backend: str = Field(default="megatron", max_length=40)
    """One of /v1/catalog/backends."""
    strategy: StrategyBody = StrategyBody()
    """How the job is split."""


class CheckBody(Spec):
    """An existing configuration to be checked; what is given here wins over its files."""

    files: dict[Annotated[str, Field(min_length=1, max_length=200)], Annotated[str, Field(max_length=1_000_000)]] = (
        Field(min_length=1, max_length=64, description="Name -> text.", examples=[{"ds_config.json": "{}"}])
    )
    format: str | None = Field(default=None, max_length=60)
    """What the files are, where they do not show it: an id such as deepspeed-json or megatron-arguments; an unknown one
    is answered with all of them."""
    model: Model | None = None
    """What the files train, where they do not say it."""
    cluster: ClusterFile = ClusterFile()
    """The machines; what is left out comes from the files."""
    job: JobBody = JobBody()
    """What is trained; what is left out comes from the files."""
    recompute: str | None = Field(default=None, max_length=200)
    """Recomputation, where the files do not say it: none, selective, selective:MODULE,MODULE, full, or full:LAYERS."""
    suggest: bool = Field(default=False, description="Search for the best plan of the same framework, too.")
    advise: bool = Field(default=True, description="Try single changes.")

    def asked(self) -> CheckRequest:
        cluster = self.cluster
        rest = cluster.model_copy(update={"gpu": None, "gpus": None, "nodes": None, "gpus_per_node": None})
        return CheckRequest(
            texts=self.files,
            reader=self.format,
            model=None if self.model is None else stated(self.model),
            cluster=ClusterInput(
                gpu=cluster.gpu,
                gpus=cluster.gpus,
                nodes=cluster.nodes,
                gpus_per_node=cluster.gpus_per_node,
                file=rest if rest != ClusterFile() else None,
            ),
            job=self.job.asked(),
            recompute=self.recompute,
            suggest=self.suggest,
            advise=self.advise,
        )


class MeasurementsBody(Spec):
    """Measured runs, as ``planner validate`` records them (docs/accuracy.md describes a record)."""

    records: list[dict[str, JsonValue]] = Field(min_length=1, max_length=200)
    """The records; each needs a step time and an accelerator."""

    @model_validator(mode="after")
    def _flat_enough(self) -> MeasurementsBody:
        if any(_size(record) > LargestConfig for record in self.records):
            raise ValueError(f"a record holds more than {LargestConfig} values")
        return self


def stated(model: str | ModelConfig | ModelDimensions) -> StatedModel:
    if isinstance(model, str):
        return StatedModel(name=model)
    if isinstance(model, ModelConfig):
        return StatedModel(config=model.config)
    return StatedModel(dimensions=model.dimensions)


def _pin(value: int | bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1
