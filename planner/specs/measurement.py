"""One training run that somebody measured and published: model, machines, configuration, and what was observed.

A field that the source does not state is null, never a guess.  docs/accuracy.md describes every field; unknown fields
are ignored, so that records may carry more than the planner reads.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_RANKS = 1_000_000
Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]
"""GPUs, or a degree that splits them."""
Sequences = Annotated[int, Field(gt=0, le=100_000_000)]
Size = Annotated[int, Field(gt=0, le=10_000_000)]
"""A dimension of the model."""
OptionalSize = Annotated[int, Field(ge=0, le=10_000_000)]


class Fact(BaseModel):
    """A group of stated facts: frozen, finite, tolerant of fields that the planner does not read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, str_max_length=20_000)


class Words(Fact):
    """A group whose texts are looked up; blanks around them mean nothing."""

    model_config = ConfigDict(str_strip_whitespace=True)


class MeasuredMoe(Fact):
    experts: int | None = Field(default=None, gt=1, le=100_000)
    top_k: Size | None = None
    expert_ffn: Size | None = None
    shared_ffn: OptionalSize | None = None
    """Total width of the shared experts."""
    moe_layers: int | None = Field(default=None, ge=0, le=10_000)
    """Layers with experts; the others keep a dense MLP and come first."""


class MeasuredMla(Fact):
    q_lora: OptionalSize | None = None
    kv_lora: Size
    qk_nope: Size
    qk_rope: Size
    v_head: Size


class MeasuredModel(Words):
    name: str = ""
    layers: int | None = Field(default=None, gt=0, le=10_000)
    hidden: Size | None = None
    ffn: OptionalSize | None = None
    heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    vocab: Sequences | None = None
    seq_len: Sequences | None = None
    tied_embeddings: bool | None = None
    gated_mlp: bool | None = None
    attention: str | None = None
    position: str | None = None
    """rope, learned, alibi, none."""
    qk_norm: bool | None = None
    mtp_layers: int | None = Field(default=None, ge=0, le=1_000)
    moe: MeasuredMoe | None = None
    mla: MeasuredMla | None = None
    hybrid: str | None = Field(default=None, max_length=2_000)
    """Pattern and dimensions of state-space or linear-attention layers, in words."""


class MeasuredHardware(Words):
    gpu: str | None = None
    gpus: Ranks | None = None
    gpus_per_node: Ranks | None = None
    host_cores_per_node: Ranks | None = None
    """Processor cores of a node, which matter to ranks that compute on them."""
    intra: str | None = None
    inter: str | None = None


class MeasuredOverlap(Fact):
    tp_comm: bool | None = None
    dp_comm: bool | None = None
    p2p: bool | None = None


class MeasuredConfiguration(Words):
    """How the run was configured."""

    framework: str | None = None
    version: str | None = None
    precision: str | None = None
    tp: Ranks | None = None
    sequence_parallel: bool | None = None
    pp: Ranks | None = None
    vpp: Ranks | None = None
    cp: Ranks | None = None
    ep: Ranks | None = None
    etp: Ranks | None = None
    dp: Ranks | None = None
    zero: int | None = Field(default=None, ge=0, le=3)
    """0 plain data parallelism, 1 sharded optimizer, 2 gradients too, 3 parameters too (FSDP)."""
    micro_batch: Sequences | None = None
    """Sequences of one micro-batch on one data-parallel rank."""
    global_batch: Sequences | None = None
    """Sequences of one step."""
    recompute: str | None = None
    """none, selective, full, full:N-layers, or modules:a,b."""
    offload: str | None = None
    flash_attention: bool | None = None
    overlap: MeasuredOverlap = MeasuredOverlap()
    cuda_graphs: str | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    """Everything else that the source says of the run."""

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, data: Any) -> Any:
        """Null groups count as absent; a graph switch given as true or false is put into words."""
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if not (key in ("overlap", "extra") and value is None)}
        if isinstance(data.get("cuda_graphs"), bool):
            data["cuda_graphs"] = "on" if data["cuda_graphs"] else "none"
        return data


class Measured(Fact):
    """What was observed; step time and memory are compared, the rest is kept for the reader."""

    step_time_s: float | None = Field(default=None, gt=0, le=1e9)
    tokens_per_s_per_gpu: float | None = Field(default=None, gt=0)
    model_tflops_per_gpu: float | None = None
    peak_mem_gib: float | None = Field(default=None, gt=0, le=1e9)
    peak_mem_kind: str | None = None
    """Which figure it is, in the source's words: allocated, reserved, or what the driver shows; and of which rank."""
    oom: bool | None = None
    """True: ended out of memory; false: ran; null: not known."""


class MeasuredSource(Fact):
    title: str | None = None
    repo: str | None = None
    path: str | None = None
    commit: str | None = None
    url: str | None = None
    where: str | None = None
    date: str | None = None


class MeasuredRun(Fact):
    """One line of a record file."""

    id: str = Field(min_length=1, max_length=400)
    source: MeasuredSource = MeasuredSource()
    model: MeasuredModel
    hardware: MeasuredHardware
    run: MeasuredConfiguration
    measured: Measured = Measured()
    notes: str | None = None

    @property
    def source_name(self) -> str:
        """What stands before the first slash of the id."""
        return self.id.split("/", 1)[0]

    @property
    def task(self) -> str:
        return str(self.run.extra.get("task") or "pretrain")


MemoryKind = Literal["allocated", "reserved", "device"]
"""max_memory_allocated, max_memory_reserved, or what the driver reports (context and NCCL buffers included)."""
