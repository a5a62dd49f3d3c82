"""The hardware a job runs on: accelerator, node, network, and what each of them can do at best.

Peak rates are dense figures and link bandwidths are one direction; measured plateaus stand beside them with their
source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from planner.specs.base import Spec


class Sourced(Spec):
    """A group of figures with where they come from."""

    source: tuple[str, ...] = Field(min_length=1)
    """Documents or measurements the figures were taken from."""
    as_of: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    """Month or day at which the figures were read."""
    note: str = ""
    """What else a reader should know of these figures."""


class DeviceMemory(Sourced):
    advertised_bytes: int = Field(gt=0)
    """Vendor figure (decimal GB)."""
    allocatable_bytes: int = Field(gt=0)
    """Total that PyTorch can reach, before the CUDA context (its out-of-memory messages print it)."""
    bytes_per_s: float = Field(gt=0)
    """Peak HBM or GDDR bandwidth."""


class ComputeRates(Sourced):
    """Dense FLOP/s by number format; null means unsupported or unpublished."""

    fp32: float | None = None
    """FLOP/s in 32-bit floating point."""
    tf32: float | None = None
    """FLOP/s of fp32 matrices in 19-bit TensorFloat-32."""
    fp16: float | None = None
    """FLOP/s in 16-bit floating point."""
    bf16: float | None = None
    """FLOP/s in bfloat16."""
    fp8: float | None = None
    """FLOP/s in 8-bit floating point."""
    fp6: float | None = None
    """FLOP/s in 6-bit floating point."""
    fp4: float | None = None
    """FLOP/s in 4-bit floating point."""


class Fabric(Sourced):
    """The fast links inside one domain (NVLink, Infinity Fabric, PCIe)."""

    kind: str
    """Link type, such as nvlink4, infinity-fabric or pcie4."""
    topology: Literal["switch", "mesh", "pcie", "pair", "torus", "none"]
    """How the links join the GPUs; none: a single GPU."""
    domain_gpus: int = Field(gt=0)
    """GPUs that the fast links join."""
    bytes_per_s: float = Field(gt=0)
    """One direction, per GPU, all its links together."""
    pair_bytes_per_s: float | None = None
    """One pair, one direction, where a pair cannot use every link (meshes)."""
    all_reduce_bus_bytes_per_s: float | None = None
    """Measured ring all-reduce bus bandwidth of a full domain at large messages; null: not measured."""
    switch_reduce_bus_bytes_per_s: float | None = None
    """The same with in-switch reduction (NVLS); all-reduce only."""
    all_gather_bus_bytes_per_s: float | None = None
    """Measured all-gather bus bandwidth of a full domain at large messages; null: not measured."""
    all_to_all_bytes_per_s: float | None = None
    """Measured all-to-all bytes/s per GPU within the domain."""


class HostLink(Sourced):
    kind: str
    """Link type, such as pcie5 or nvlink-c2c."""
    bytes_per_s: float = Field(gt=0)
    """Nominal, one direction."""
    measured_bytes_per_s: float | None = None
    """What copies reach, one direction, bytes/s; null: not measured."""


class Price(Sourced):
    """US dollars per GPU-hour on demand; null where no quotation was found."""

    low_usd: float | None = None
    """Lowest quotation, US dollars per GPU-hour."""
    mid_usd: float | None = None
    """The price that a plan assumes, US dollars per GPU-hour."""
    high_usd: float | None = None
    """Highest quotation, US dollars per GPU-hour."""


class Accelerator(Spec):
    """One accelerator model: what the catalogue knows of it."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Name in the catalogue."""
    vendor: str
    """Who makes it."""
    architecture: str
    """Volta, Ampere, Ada, Hopper, Blackwell, CDNA3 ...: decides number formats and kernel generations."""
    sms: int | None = Field(default=None, gt=0)
    """Streaming multiprocessors (or compute units)."""
    synchronous: bool = False
    """Kernels run on the thread that issues them (a processor core in the place of a GPU): nothing runs beside anything
    else, host time adds to the kernels', and ranks of one machine share its cores.  Rates are those of one core."""
    power_w: float | None = None
    """Board power, W; null: not known."""
    memory: DeviceMemory
    """Size and bandwidth of its memory."""
    peak: ComputeRates
    """Vendor's rates."""
    achieved: ComputeRates
    """Best large-GEMM rate found in public sweeps."""
    fabric: Fabric
    """Links to its neighbours."""
    host_link: HostLink
    """Link to its host."""
    network_bytes_per_s: float = Field(gt=0)
    """Usual NIC line rate per GPU, one direction."""
    network_note: str = ""
    """Where the usual line rate comes from."""
    price: Price
    """What it costs on demand."""
    confidence: Literal["a", "b", "c"]
    """a: vendor figure confirmed by a public measurement; b: vendor figure; c: secondary source."""
    note: str = ""
    """What else a reader should know of it."""


class NetworkSpan(Spec):
    """Large-message bus bandwidth of a group that takes all GPUs of that many nodes."""

    nodes: int = Field(gt=1)
    """Nodes that the group takes."""
    bus_bytes_per_s: float = Field(ge=1_000)
    """Bus bandwidth of a whole node, bytes/s."""


class System(Sourced):
    """A reference node type; fills what the user does not give."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    accelerator: str
    gpus_per_node: int = Field(gt=0)
    """GPUs of one operating-system image (what a launcher calls a node)."""
    domain_gpus: int = Field(gt=0)
    """GPUs of one fast-link domain (72 for NVL72 although a node has 4)."""
    nics_per_node: int = Field(gt=0)
    nic_bytes_per_s: float = Field(gt=0)
    network: str
    network_bus_bytes_per_s: float | None = None
    """Measured large-message all-reduce bus bandwidth over several nodes, whole node; null: not measured."""
    network_spans: tuple[NetworkSpan, ...] = ()
    """Measured bandwidth by the number of nodes, where it falls with them; fewest nodes first."""
    ring_step_s: float | None = None
    """Time that one rank adds to a ring which leaves the node, small messages; null: the cost model's constant."""
    host_cores_per_node: int = Field(gt=0)
    host_memory_bytes_per_node: int = Field(gt=0)


class Cluster(Spec):
    """The machines given to one job."""

    accelerator: Accelerator
    """What each of the GPUs is."""
    gpus: int = Field(gt=0, le=1_000_000)
    """GPUs of the job."""
    gpus_per_node: int = Field(gt=0, le=1024)
    """GPUs of one node."""
    domain_gpus: int = Field(gt=0, le=100_000)
    """GPUs that share the fast links; groups of contiguous ranks no larger than this stay on them."""
    nics_per_node: int = Field(gt=0, le=1024)
    """NICs of one node."""
    nic_bytes_per_s: float = Field(ge=1_000)
    """Line rate of one NIC, one direction, bytes/s."""
    network_bus_bytes_per_s: float | None = Field(default=None, ge=1_000)
    """Measured large-message all-reduce bus bandwidth of a whole node over several nodes, bytes/s; null: not
    measured."""
    network_spans: tuple[NetworkSpan, ...] = ()
    """Measured bus bandwidth of a whole node by the number of nodes; empty: the same over any number."""
    ring_step_s: float | None = Field(default=None, gt=0)
    """Time that one rank adds to a ring which leaves the node."""
    oversubscription: float = Field(default=1.0, ge=1.0, le=1_000_000)
    """How much the network above the node is oversubscribed (2 halves what leaves it)."""
    memory_bytes_per_gpu: int = Field(gt=0)
    """What an allocator can reach on one GPU."""
    host_memory_bytes_per_node: int = Field(gt=0)
    """Memory of a node's host."""
    host_cores_per_node: int = Field(gt=0)
    """Cores of a node's host."""
    nvme_bytes_per_s: float | None = Field(default=None, ge=1_000)
    """Sustained NVMe write bandwidth of a node; null: no NVMe offload."""
    usd_per_gpu_hour: float | None = Field(default=None, ge=0)
    """Price, US dollars per GPU-hour; null: not known."""

    @model_validator(mode="after")
    def _whole_nodes(self) -> Cluster:
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus({self.gpus}) % gpus_per_node({self.gpus_per_node}) = {self.gpus % self.gpus_per_node}: "
                "the GPUs do not fill whole nodes"
            )
        return self

    @property
    def nodes(self) -> int:
        """Nodes in use."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def local_gpus(self) -> int:
        """GPUs used on one node (fewer than the node has when the job is smaller than a node)."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def cores_per_rank(self) -> float:
        """Cores that one rank computes on, below 1 where ranks outnumber them; 1 where a rank has a GPU."""
        if not self.accelerator.synchronous:
            return 1.0
        cores = self.host_cores_per_node
        return float(cores // self.local_gpus) if cores >= self.local_gpus else cores / self.local_gpus

    @property
    def ranks_per_core(self) -> float:
        """Ranks that take turns on one core, at least 1; an idle one leaves the core to the others."""
        return max(1.0, 1.0 / self.cores_per_rank)

    @property
    def ranks_per_domain(self) -> int:
        """Ranks of one fast-link domain as jobs fill it: 64 of 72 GPUs of an NVL72 rack when a job takes several."""
        if self.gpus <= self.domain_gpus:
            return self.gpus
        return 64 if self.domain_gpus == 72 else self.domain_gpus
