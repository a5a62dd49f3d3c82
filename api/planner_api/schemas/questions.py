"""What can be asked: bodies of requests, in the library's own terms.

Names, paths and files mean nothing on this machine's disk: a model is a name of the catalogue or data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from planner.service import CheckRequest, ClusterInput, JobInput, PlanRequest, StrategyInput
from planner.service.requests import StatedModel
from planner.specs.base import Spec
from planner.specs.cluster_file import MAX_GPUS, ClusterFile
from planner.specs.profile import Profile

Name = Annotated[str, Field(min_length=1, max_length=200)]
PinName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
PinValue = Annotated[str, Field(max_length=100, pattern=r"^[^,=\s]*$")]
"""On the command line a comma begins another pin."""
Degree = Annotated[int, Field(ge=1, le=MAX_GPUS)]
LargestConfig = 20_000
"""Values in a model's configuration, at all depths."""


class ModelConfig(Spec):
    """A model as its Hugging Face config.json."""

    config: dict[str, JsonValue] = Field(min_length=1, max_length=2000)


class ModelDimensions(Spec):
    """A model as the fields of a dimension file (docs: "Models of your own")."""

    dimensions: dict[str, JsonValue] = Field(min_length=1, max_length=200)


Model = Annotated[
    Name | ModelConfig | ModelDimensions,
    Field(description="A name of /v1/catalog/models, the content of a config.json, or dimensions.", examples=["70b"]),
]


class JobBody(Spec):
    """What is trained."""

    seq_len: int | None = Field(default=None, ge=1, le=100_000_000, examples=[8192])
    global_batch: Annotated[int, Field(ge=1, le=100_000_000)] | Annotated[str, Field(max_length=40)] | None = Field(
        default=None, description="Sequences of a step, or tokens with a suffix (`4M`).", examples=[512]
    )
    precision: str | None = Field(default=None, max_length=20, examples=["bf16"])
    loss: str = Field(default="auto", max_length=20)
    flash_attention: bool = True
    objective: str = Field(default="throughput", max_length=20, description="throughput, memory or cost.")
    memory_margin: float = Field(default=0.0, ge=0, le=0.95, description="Share of the GPU memory to keep free.")

    def asked(self) -> JobInput:
        return JobInput(**self.model_dump())


class Situation(Spec):
    """A model on machines."""

    model: Model
    cluster: ClusterFile = Field(examples=[{"gpu": "h100", "gpus": 128}])
    job: JobBody = JobBody()
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
    pp: Degree = 1
    vpp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    etp: Degree | None = None
    zero_stage: int | None = Field(default=None, ge=0, le=3)
    shard_degree: Degree | None = None
    secondary_shard_degree: int | None = Field(default=None, ge=0, le=MAX_GPUS)
    micro_batch: Degree = 1
    sequence_parallel: bool | None = None
    schedule: str | None = Field(default=None, max_length=40)
    recompute: str = Field(default="none", max_length=200)
    offload: str = Field(default="none", max_length=40)
    layers_per_stage: Annotated[list[Annotated[int, Field(ge=0, le=100_000)]], Field(max_length=10_000)] | None = None

    def asked(self) -> StrategyInput:
        values = self.model_dump()
        layers = values.pop("layers_per_stage")
        return StrategyInput(**values, layers_per_stage=None if layers is None else ",".join(map(str, layers)))


class EstimateBody(Situation):
    """A strategy to be priced."""

    backend: str = Field(default="megatron", max_length=40)
    strategy: StrategyBody = StrategyBody()


class CheckBody(Spec):
    """An existing configuration to be checked; what is given here wins over its files."""

    files: dict[Annotated[str, Field(min_length=1, max_length=200)], Annotated[str, Field(max_length=1_000_000)]] = (
        Field(min_length=1, max_length=64, description="Name -> text.", examples=[{"ds_config.json": "{}"}])
    )
    format: str | None = Field(default=None, max_length=60)
    model: Model | None = None
    cluster: ClusterFile = ClusterFile()
    job: JobBody = JobBody()
    recompute: str | None = Field(default=None, max_length=200)
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
