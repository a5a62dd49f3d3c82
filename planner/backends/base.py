"""What a framework has to tell the planner: rules, memory layout, recomputation choices and overlap habits.

A backend is data plus small array functions; it knows nothing of times or of the search.  Rules, with their ids and
reasons, are the single place where a framework's limits are stated: the search counts rejections by them and error
messages quote them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np

from planner.specs.batch import BoolArray, FloatArray, IntArray, StrategyBatch
from planner.specs.cluster import Cluster
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.specs.strategy import RecomputeMode, Schedule

Tensor = Literal[
    "norm_input",  # residual stream entering each norm
    "norm_output",  # normalised input of the attention and MLP matrices
    "qkv",  # query, key, value after rotary position
    "attention_scores",  # materialised only without flash attention
    "attention_output",
    "latent",  # compressed query and key/value of latent attention
    "mlp_up",  # of a dense block: output of the gate and up (or the first) matrix
    "mlp_act",  # of a dense block: activation function output, input of the down matrix
    "expert_up",  # the same of routed experts
    "expert_act",
    "shared_experts",  # both of shared experts
    "dropout_masks",
    "router",
    "mixer_state",  # everything a Mamba or delta-net mixer saves
]
"""The saved activations of one layer; the cost model gives each its size, a recompute kind names those it drops."""

EVERYTHING: frozenset[Tensor] = frozenset(get_args(Tensor))

AttentionKernel = Literal["vendor", "flash2", "flash1"]
ScoreKernel = Literal["fused", "operators"]

Work = Literal[
    "attention_core",
    "norms",
    "activation",
    "expert_activation",
    "mlp",
    "shared_experts",
    "qkv_up",
    "half_matmuls",
    "layer",
    "moe",
]
"""Forward work that recomputation repeats in the backward pass: "mlp" in dense blocks only, "expert_activation",
"shared_experts" and "moe" (the whole block) in mixtures only."""


NarrowRecipe = Literal["delayed", "tensor", "block"]
"""Scaling of 8-bit matrices: one factor a tensor from earlier steps or from this one, or one for each block of elements
(mxfp8, 128 x 128 blocks)."""


@dataclass(frozen=True)
class RecomputeKind:
    """One choice of activation recomputation that a framework can express."""

    id: str
    mode: RecomputeMode
    modules: tuple[str, ...] = ()
    """The framework's own names, as its configuration spells them."""
    drops: frozenset[Tensor] = frozenset()
    """Saved tensors that are no longer kept ("full" drops everything but the layer input)."""
    keeps: float = 0.0
    """Share of the dropped bytes that stays all the same (per-operator policies keep every second matmul output)."""
    kept: tuple[tuple[Tensor, float], ...] = ()
    """The same of single tensors, where it is known which part of each stays."""
    repeats: frozenset[Work] = frozenset()
    layer_count: bool = False
    """The number of recomputed layers of a stage can be chosen (otherwise every layer is treated alike)."""
    to_host: bool = False
    """The dropped tensors wait in host memory and come back, instead of being computed again."""
    whole_layer: bool = False
    """What was dropped of a layer comes back at once (policies over operators), not module by module."""
    regathers: bool = False
    """The repeated forward work includes its tensor-parallel (and expert) communication."""

    @property
    def brings_all_back(self) -> bool:
        """A running layer has all its saved tensors beside the input that was kept of it."""
        return self.mode == "full"

    @property
    def brings_dropped_back(self) -> bool:
        """A running layer has the dropped tensors beside the kept ones."""
        return self.mode == "selective" and self.whole_layer


NONE = RecomputeKind("none", "none")


@dataclass(frozen=True)
class RuleContext:
    """What a rule may look at."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    batch: StrategyBatch
    kinds: tuple[RecomputeKind, ...]

    @property
    def grad_accum(self) -> IntArray:
        return self.batch.grad_accum(self.job.global_batch)


Limit = Literal["framework", "files", "planner"]
"""Whose limit a rule is: the framework (or arithmetic) refuses the strategy; or the files written here do not hold it,
though the framework may run it; or no estimate covers it either."""


@dataclass(frozen=True)
class Rule:
    """A limit that every planned strategy must keep."""

    id: str
    """Stable, kebab-case, prefixed by nothing: the backend's name is known from the context."""
    reason: str
    """One sentence: what must hold and why the framework insists."""
    source: str
    """Where the framework enforces it (file, class or document)."""
    holds: Callable[[RuleContext], BoolArray]
    """True for the candidates that keep the rule."""
    equation: Callable[[RuleContext, int], str]
    """The rule with the values of candidate i filled in: ``heads(64) % tp(6) = 4, must be 0``."""
    allowed: Callable[[RuleContext, int], str] | None = None
    """What would be accepted instead, if that can be listed: ``tp in 1, 2, 4, 8``."""
    limit: Limit = "framework"
    """An existing configuration that breaks another kind of limit than the framework's is not wrong."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter resident on one GPU, for a shard degree each candidate has; arrays of length N."""

    weights: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    """Master weights and moments that are on the GPU when nothing is offloaded."""
    offloadable: FloatArray
    """Of these bytes, what a full optimizer offload (fraction 1) removes from the GPU."""
    host: FloatArray
    """Bytes that a full optimizer offload puts into host memory, buffers included."""
    step_temporary: FloatArray
    """Extra bytes alive only during the optimizer step."""
    gathered: FloatArray | float = 0.0
    """Of the weights' bytes, copies that are gathered from the shards and stay for the whole step."""
    narrow_copies: FloatArray | float = 0.0
    """Of the weights' bytes, cached copies in 8 or 4 bits, which embedding and head do not have."""


@dataclass(frozen=True)
class StateFormat:
    """Bytes per parameter of the three kinds of state, before any sharding."""

    weights: float
    gradients: float
    optimizer: float
    """Master weights and moments."""


@dataclass(frozen=True)
class BufferContext:
    """What the size of a framework's working buffers depends on; arrays of length N, counts of parameters per rank
    after tensor- and expert-parallel splitting, before data-parallel sharding."""

    model: ModelSpec
    job: Job
    batch: StrategyBatch
    rank_params: FloatArray
    """Parameters of the fullest pipeline rank."""
    layer_params: FloatArray
    """Parameters of the largest layer (all its local experts included)."""
    root_params: FloatArray
    """Embedding, head and final norm: what lies outside the layers."""
    distinct_weight_params: FloatArray
    """One copy of each distinct weight shape of a layer plus the head: what dummy gradients of fused accumulation
    cover."""
    trained_share: FloatArray | float = 1.0
    """Of a layer's parameters, those that get gradients: all, or the adapters beside frozen weights."""


@dataclass(frozen=True)
class OffloadChoice:
    """A way to move states off the GPU that a framework can express."""

    device: Literal["cpu", "nvme"]
    """Where the optimizer states go."""
    parameters: Literal["none", "cpu", "nvme"]
    """Where the weights go, if they go too."""
    zero_stages: tuple[int, ...]
    """Stages at which the choice exists."""
    steps: int
    """The offloaded share is a multiple of 1/steps; 1 means all or nothing."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How the framework runs a step, as far as time and memory depend on it."""

    gradient_reduce_bytes: Callable[[Job], float]
    """Bytes per parameter of the gradient reduction."""
    data_parallel_overlap: Literal["last-micro-batch", "every-layer"]
    """Gradients are reduced once, behind the last backward pass (Megatron, ZeRO-1), or layer by layer in every
    micro-batch."""
    gathers_every_micro_batch: bool = False
    """Stage 2 frees the gathered weights after every backward pass instead of keeping them for the step."""
    pipelines_keep_weights: bool = False
    """With pipeline stages, fully sharded weights are gathered once a step and kept, and gradients wait unsharded for
    the last micro-batch (torchtitan's default reshard policy)."""
    accumulates_unsharded: bool = False
    """Between the micro-batches of a step the gradients of all parameters wait unsharded (no_sync with sharded states),
    instead of being reduced layer by layer."""
    accumulates_in_fp32: bool | None = None
    """Gradients of 16-bit weights are summed in fp32 rather than in the format of the weights, where that is a choice
    (DeepSpeed); None: as plans have it, in fp32 for bf16 only."""
    offloaded_parameter_bytes: float = 2.0
    """Bytes per parameter that cross the host link when offloaded weights are gathered."""
    overlapped_stages: tuple[int, ...] = (0, 1, 2, 3)
    """Sharding stages whose gradient and parameter traffic runs beside compute; at others compute waits for it."""
    tensor_parallel_overlap: bool
    """Tensor-parallel collectives run beside matrix multiplications."""
    fused_kernels: bool
    """Norm, rotary, activation and residual kernels are fused; otherwise eager elementwise kernels run."""
    loss_bytes_per_logit: Callable[[Job], float]
    """Bytes per logit alive at the peak of the loss."""
    activation_overhead: float
    """Saved activation bytes over the tensor-by-tensor count (eager stacks save more)."""
    gathered_inputs: bool = False
    """With sequence parallelism matrices keep their gathered input for the backward pass (DTensor), where Megatron-LM
    keeps a rank's part and gathers it again."""
    loss_vocab_parallel: bool
    """Logits stay split over the tp ranks in the loss."""
    embedding_vocab_parallel: bool
    """The embedding table and the head are split over the tp ranks."""
    context_parallel_comm: Literal["ring", "all-gather", "all-to-all"]
    context_parallel_balanced: bool = True
    """Context-parallel ranks share causal attention equally; otherwise each holds one run of the sequence, and the last
    one, which sees most keys, decides."""
    kernels_per_layer: int
    """Kernel launches of one layer, forward and backward, per micro-batch (dense)."""
    tensor_parallel_kernels: int = 0
    """Launches that tensor parallelism adds to them, or host work worth as many (DTensor dispatch)."""
    sharding_kernels: int = 0
    """The same of gathering and scattering sharded weights (stages 2 and 3)."""
    vocab_multiple: int
    """The vocabulary is padded to a multiple of this times tp (1: not padded)."""
    narrow_recipe: NarrowRecipe | None = None
    """Scaling of 8-bit matrices where a run states it; None: what the framework takes on the accelerator."""
    allocator_factor: float
    """Reserved over allocated bytes of a caching allocator."""
    memory_factor: float = 1.0
    """What a machine profile found a rank to need over the estimate, before context and buffers."""
    expert_dispatch: Literal["all-to-all", "flex-between-domains", "flex"] = "all-to-all"
    """Every copy of a token travels to its expert; or one copy to each domain and rank with some of its experts
    (DeepEP, HybridEP), everywhere or only where an expert group leaves the fast links."""
    expert_overlap: bool = False
    """Dispatch and combine of one micro-batch run beside another one's compute (combined 1F1B of expert traffic)."""
    padded_experts: bool = False
    """Every expert gets the same number of tokens (capacity factor, tokens dropped or padded), so the host issues the
    expert kernels without learning counts from the device; otherwise no token is dropped."""
    fused_expert_mlp: bool = False
    """The expert activation and the quantisation of its result run inside the grouped GEMM (narrow formats only)."""
    balanced_routing: bool = True
    """The router is forced (or has learned) to give every expert the same number of tokens, as benchmarks and the plan
    assume; otherwise the busiest rank decides."""
    cuda_graphs: Literal["none", "partial", "full"] = "none"
    """What is replayed as CUDA graphs instead of being launched kernel by kernel: nothing; attention, router and
    preprocessing, with the experts outside; the whole iteration."""
    rotary_sample_by_sample: bool = False
    """Rotary positions of packed sequences are applied to one sample after another, by kernels of their own."""
    attention_kernel: AttentionKernel = "flash2"
    """Attention tuned for the accelerator (cuDNN through Transformer Engine), the portable FlashAttention-2 that
    PyTorch and Hugging Face models call, which leaves part of newer hardware unused, or its first version."""
    score_kernel: ScoreKernel = "fused"
    """Where scores are materialised: scale, mask and softmax in one kernel (Megatron-LM), or an operator each."""
    norm_bytes: float | None = None
    """Memory traffic of one norm per hidden element, forward; None: one fused pass, times the eager factor of unfused
    kernels."""
    loss_traffic_bytes: float | None = None
    """Memory traffic of the loss per logit, forward and backward; None: by ``fused_kernels``."""
    bucket_params: float = 40e6
    """Parameters whose gradients are reduced together where that happens once a step (Megatron-LM: max(40M, 1M x dp);
    PyTorch and DeepSpeed similar)."""
    gradient_add_bytes: float = 0.0
    """Memory traffic per parameter and micro-batch of adding gradients outside the weight-gradient multiplication."""
    blocking_launches: bool = False
    """Every kernel is waited for before the next is issued (CUDA_LAUNCH_BLOCKING=1)."""
    overlap_buffers: float = 4.0
    """Permanent copies of a micro-batch's hidden states where tensor-parallel traffic is overlapped: Transformer
    Engine keeps one for each of the gathers and scatters in flight."""
    dropout: bool = False
    """Trained with dropout: every dropout keeps a one-byte mask, and attention that stores its scores a dropped copy
    of them."""
    fused_gradient_accumulation: bool = True
    """Weight-gradient matrix multiplications add into the fp32 buffer and leave a dummy gradient of each shape
    (Megatron)."""
    transformer_engine: bool = False
    """Matrix multiplications go through Transformer Engine, which holds workspaces of its own."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Attention kernel that Transformer Engine is told to use; auto: its own choice."""
    fused_activation: bool = True
    """The activation function of experts and its product with the router's probability are one kernel."""
    deterministic: bool = False
    """Kernels that give the same bits every time, which take larger workspaces."""
    interleaving_group: int | None = None
    """Micro-batches that pass one chunk before the next begins (interleaved schedule); None: as many as stages."""
    equal_rounds: bool = False
    """Micro-batches that the stages do not divide pass in equal rounds of more, not in a smaller last one."""
    eager_copies: bool = False
    """Unfused blocks save a tensor on both sides of an elementwise step: queries, keys and values of the rotary
    embedding, the attention output of its change of layout, the activation of its product with the gate."""
    eager_norms: bool = False
    """Norms run as plain tensor operations and save an fp32 copy and the normalised tensor."""
    score_bytes: float = 2.0
    """Saved bytes per attention score where scores are stored, without dropout."""
    tensor_parallel_logit_bytes: float = 0.0
    """More bytes per logit that the rank works on where tp ranks share the loss: gathering the vocabulary, or the
    unfused steps of a split softmax."""
    stores_scores: bool = False
    """Attention materialises its scores unless the job says otherwise."""
    keeps_stage_outputs: bool = False
    """Each pipeline stage holds its output of every micro-batch in flight (Megatron-LM frees it once it is sent)."""
    even_in_flight: bool = False
    """Under zero-bubble schedules every rank holds as many micro-batches as rank 0: they are searched for under one
    memory limit, or weight gradients wait on later ranks for as long as 1F1B would have left room."""
    weight_gradients_wait: bool = False
    """Under ZB-H1 rank r computes weight gradients r micro-batches later, and holds until then the gradients of its
    layers' outputs."""
    keeps_logits: bool = False
    """The last stage of a pipeline holds the logits of every micro-batch in flight, and what the loss saves of them."""
    state_format: StateFormat | None = None
    """Number formats of the states where the run states its own; None: what the framework does by default."""
    reduce_bucket: float | None = None
    """Elements of a gradient-reduction bucket where the run states its own (DeepSpeed); None: what plans write."""
    reduce_buckets: int = 1
    """Such buckets alive at once: two where one fills while the other is reduced."""
    gathered_parameters: float | None = None
    """Parameters that stay gathered at stage 3 where the run states its own limit (DeepSpeed); None: as plans write."""
    optimizer_temporary: float = 0.0
    """Bytes per updated parameter that an unfused optimizer step keeps beside the states (AdamW: its denominator)."""


class Backend(ABC):
    """A training framework in a stated version range."""

    name: ClassVar[str]
    family: ClassVar[str]
    """Frameworks that run a step alike and share their measured error."""
    title: ClassVar[str]
    versions: ClassVar[str]
    """Version range whose rules and flags are meant."""
    rules: ClassVar[tuple[Rule, ...]]
    habits: ClassVar[Habits]
    habit_settings: ClassVar[Mapping[str, str]] = {}
    """What a configuration has to say for a habit to be as plans have it: field of ``Habits`` -> setting."""
    expert_degrees: ClassVar[bool]
    """ep and etp can exceed 1."""
    layer_buffers: ClassVar[frozenset[str]] = frozenset()
    """Of the buffers that ``buffer_bytes`` names, those alive only while a layer runs, not beside the loss."""
    zero_stages: ClassVar[tuple[int, ...]]
    sequence_parallel_choices: ClassVar[tuple[bool, ...]]
    """Values of sequence_parallel that tp > 1 allows."""
    offloads: ClassVar[tuple[OffloadChoice, ...]]
    bare_last_stage: ClassVar[bool] = False
    """Of several chunks a rank the last may hold the head alone."""

    @abstractmethod
    def recompute_kinds(self, model: ModelSpec, job: Job) -> tuple[RecomputeKind, ...]:
        """Recompute choices that exist for this model, "none" first."""

    def named_recompute(self, modules: tuple[str, ...], model: ModelSpec) -> RecomputeKind | None:
        """Selective recomputation of any modules by the framework's names, where it can be asked for more combinations
        than plans choose from."""
        return None

    @abstractmethod
    def schedules(self, pp: int, vpp: int) -> tuple[Schedule, ...]:
        """Pipeline schedules for that many stages and chunks; ("none",) for pp = 1."""

    @abstractmethod
    def shard_degrees(self, cluster: Cluster, tp: int, cp: int, dp: int, zero_stage: int) -> tuple[int, ...]:
        """Shard degrees worth trying for dense weights, dp * cp first; (1,) at stage 0."""

    def secondary_shard_degrees(self, cluster: Cluster, shard_degree: int, zero_stage: int) -> tuple[int, ...]:
        """Sizes of a second, nearer parameter shard; (0,) where there is none."""
        return (0,)

    @abstractmethod
    def layouts(self, model: ModelSpec, pp: int, vpp: int) -> Literal["free", "fixed"]:
        """Whether the layers of each virtual stage can be chosen freely or follow from the framework's own split."""

    @abstractmethod
    def default_layout(self, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...] | None:
        """Layers of the pp * vpp virtual stages when nobody says otherwise; None when there is no legal split."""

    @abstractmethod
    def state_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> StateBytes:
        """Bytes per parameter when sharded states are spread over ``shard`` GPUs (dense and expert weights differ in
        it)."""

    def frozen_bytes(self, job: Job, batch: StrategyBatch, shard: IntArray) -> FloatArray:
        """(N,) bytes per parameter of weights that are not trained: their 16-bit form alone, spread only where
        parameters are."""
        return np.asarray(job.compute_bytes / np.where(batch.zero_stage == 3, np.maximum(shard, 1), 1))

    @abstractmethod
    def buffer_bytes(self, context: BufferContext) -> dict[str, FloatArray]:
        """Named working buffers of one GPU (gather windows, buckets, dummy gradients), bytes, arrays of length N."""

    def scaling_recipe(self, cluster: Cluster) -> NarrowRecipe:
        """How 8-bit matrices are scaled on these accelerators."""
        return self.habits.narrow_recipe or "tensor"

    def flexible_dispatch(self, cluster: Cluster) -> bool:
        """Whether experts can be reached by a dispatcher of one copy a domain on these accelerators."""
        return True

    def overlaps_tensor_parallel(self, cluster: Cluster, batch: StrategyBatch) -> BoolArray:
        """(N,) where the plan hides tensor-parallel collectives behind matrix multiplications."""
        return np.asarray(self.habits.tensor_parallel_overlap & (cluster.ranks_per_domain % batch.tp == 0))

    def with_habits(self, **changes: Any) -> Self:
        """The same framework run differently (for example with tensor-parallel overlap switched on)."""
        other = copy.copy(self)
        other.__dict__["habits"] = replace(self.habits, **changes)
        return other

    def with_recompute(self, *kinds: RecomputeKind) -> Self:
        """The same framework offering exactly these recompute kinds (a published run names its own combination)."""
        other = copy.copy(self)
        other.__dict__["recompute_kinds"] = lambda model, job: kinds
        return other

    def with_offloads(self, *choices: OffloadChoice) -> Self:
        """The same framework offering exactly these ways to offload."""
        other = copy.copy(self)
        other.__dict__["offloads"] = choices
        return other

    def with_stages(self, pp: int, vpp: int, layers: tuple[int, ...]) -> Self:
        """The same framework with the layers of the virtual stages settled for ``pp`` stages of ``vpp`` chunks."""
        other = copy.copy(self)
        asked = (pp, vpp)
        other.__dict__["layouts"] = lambda model, p, v: "fixed" if (p, v) == asked else self.layouts(model, p, v)
        other.__dict__["default_layout"] = lambda model, p, v: (
            layers if (p, v) == asked else self.default_layout(model, p, v)
        )
        return other

    def broken_rules(self, context: RuleContext) -> list[tuple[Rule, BoolArray]]:
        """Each rule with the mask of candidates that break it, in the order of ``rules``."""
        return [(rule, np.logical_not(rule.holds(context))) for rule in self.rules]
