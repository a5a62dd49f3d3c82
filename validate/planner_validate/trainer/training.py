"""Training steps of one rank of a plan: built from a run configuration, fed with synthetic tokens, timed.

``build`` makes everything a rank owns, on a real device or under fake tensors, for any rank whose process group exists;
``Trainer.step`` is one optimizer step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from planner.errors import InputError
from planner.specs.validation import RunConfig, StepMeasure
from planner_validate.trainer.context import Context, positions
from planner_validate.trainer.layers import Core
from planner_validate.trainer.layout import Layout, make_layout, unsupported
from planner_validate.trainer.model import Stage, initialise, named_parameters
from planner_validate.trainer.parallel import COMPUTE_TYPES, DataParallel, parallelize
from planner_validate.trainer.pipeline import make_schedule, own_stages, run_schedule, stage_layers

LEARNING_RATE = 1e-3
LARGEST_NORM = 1.0
PATTERN_TOKENS = 64
"""Tokens that occur in the synthetic data."""
PATTERN_STRIDE = 3
FIRST_LOSS_SCALE = 2.0**14


def synthetic_tokens(vocab: int, rows: int, tokens: int, seed: int, step: int) -> Tensor:
    """(rows, tokens + 1) token ids that a model can learn: from a random start each is the last plus a fixed stride,
    modulo the few tokens in use."""
    used = min(vocab, PATTERN_TOKENS)
    generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + step)
    start = torch.randint(used, (rows, 1), generator=generator, device="cpu")
    return (start + PATTERN_STRIDE * torch.arange(tokens + 1, device="cpu")) % used


class LossScale:
    """Dynamic loss scaling of fp16 (arXiv 1710.03740): halved on overflow, doubled after many good steps."""

    GOOD_STEPS = 2000

    def __init__(self, *, active: bool) -> None:
        self.value = FIRST_LOSS_SCALE if active else 1.0
        self._active, self._good = active, 0

    def update(self, *, finite: bool) -> None:
        """Learn from one step."""
        if not self._active:
            return
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2.0, 1.0)
        elif self._good == self.GOOD_STEPS:
            self.value, self._good = self.value * 2.0, 0


class Clock:
    """Seconds between marks: events on a GPU's stream, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the time here."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between neighbouring marks; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


@dataclass
class Trainer:
    """Everything one rank owns of a run."""

    config: RunConfig
    layout: Layout
    device: torch.device
    stages: dict[int, Stage]
    """By virtual stage."""
    data: DataParallel
    optimizer: torch.optim.Optimizer
    schedule: Any = None
    scale: LossScale = field(default_factory=lambda: LossScale(active=False))
    aside: Literal["", "loss", "agreement"] = ""
    """What an observer counts apart from the layers' work: the loss is being computed, or all ranks are exchanging loss
    and norm (on a process group that may also serve as a group of the plan)."""

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return any(stage.last for stage in self.stages.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of this rank with their names in the whole model."""
        for stage in self.stages.values():
            yield from named_parameters(stage)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank, both (grad_accum * micro_batch, tokens of a context-parallel rank)."""
        s = self.config.strategy
        mine = s.micro_batch * s.grad_accum
        everything = synthetic_tokens(self.config.model.vocab, mine * s.dp, s.seq_len, self.config.seed, step)
        rows = everything[self.layout.coordinates["dp"] * mine :][:mine]
        own = positions(s.seq_len, self.layout.coordinates["cp"], s.cp)
        return rows[:, own].to(self.device), rows[:, own + 1].to(self.device)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Share of one micro-batch in the mean loss of the global batch, times the loss scale."""
        s = self.config.strategy
        self.aside = "loss"
        flat = logits.flatten(0, 1).float()
        if s.tp > 1:
            flat = DTensor.from_local(flat, self.layout.weights["tp"], [Shard(1)], run_check=False)
        loss = functional.cross_entropy(flat, targets.flatten())
        if isinstance(loss, DTensor):
            loss = loss.to_local()
        self.aside = ""
        return loss * (self.scale.value / (s.grad_accum * s.dp * s.cp))

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """All micro-batches; gradients are complete on return.  The sum of the scaled losses where they are known."""
        context = loss_parallel() if self.config.strategy.tp > 1 else contextlib.nullcontext()
        with context:
            if self.schedule is not None:
                losses = run_schedule(self.schedule, self.stages, tokens, targets)
            else:
                losses = list(self._micro_batches(tokens, targets))
            self.data.finish()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def _micro_batches(self, tokens: Tensor, targets: Tensor) -> Iterator[Tensor]:
        (stage,) = self.stages.values()
        size, number = self.config.strategy.micro_batch, self.config.strategy.grad_accum
        for index, (inputs, wanted) in enumerate(zip(tokens.split(size), targets.split(size), strict=True)):
            self.data.before_backward(last=index == number - 1)
            loss = self.loss(stage(inputs), wanted)
            loss.backward()
            yield loss.detach()

    def squared_norm(self) -> Tensor:
        """Sum of squares of this rank's gradients, each shared part counted once over all ranks; fp32, 0-dim."""
        total = torch.zeros((), device=self.device)
        for _, parameter in self.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                if local.numel():
                    norm = torch.linalg.vector_norm(local, dtype=torch.float32).to(self.device)
                    total += norm.square() / self.data.copies(parameter)
        return total

    def update(self, loss: Tensor | None) -> tuple[Tensor, Tensor]:
        """Norm over all ranks, clipping, optimizer step; returns the mean loss and the norm (0-dim tensors)."""
        s = self.config.strategy
        share = torch.zeros((), device=self.device) if loss is None else loss.float() / s.tp
        both = torch.stack([share, self.squared_norm()])
        self.aside = "agreement"
        dist.all_reduce(both)
        self.aside = ""
        mean, norm = both[0] / self.scale.value, both[1].sqrt() / self.scale.value
        factor = (LARGEST_NORM / (norm + 1e-6)).clamp(max=1.0) / self.scale.value
        if self.scale.value != 1.0 and not math.isfinite(norm.item()):
            self.optimizer.zero_grad(set_to_none=True)
            return mean, norm
        gradients = [_local(p.grad) for _, p in self.named_parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return mean, norm

    def step(self, index: int) -> StepMeasure:
        """One timed optimizer step on the global batch number ``index``; starts when all ranks are ready."""
        tokens, targets = self.batch(index)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()
        clock = Clock(self.device)
        clock.mark()
        share = self.forward_backward(tokens, targets)
        clock.mark()
        mean, norm = self.update(share)
        clock.mark()
        gradients_s, optimizer_s = clock.seconds()
        loss, size = mean.item(), norm.item()
        self.scale.update(finite=math.isfinite(size))
        return StepMeasure(
            seconds=gradients_s + optimizer_s,
            forward_backward_s=gradients_s,
            optimizer_s=optimizer_s,
            loss=loss if math.isfinite(loss) else None,
            gradient_norm=size if math.isfinite(size) else None,
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(
    config: RunConfig,
    *,
    values: Callable[[nn.Module, int], None] | None = initialise,
    allocating: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Trainer:
    """What this rank of the configuration owns; its process group must exist.

    Modules are made without memory, cut, then allocated on the device inside ``allocating()`` (a mode of fake tensors
    where they shall take none) and filled by ``values`` (None leaves them as they are)."""
    reason = unsupported(config)
    if reason is not None:
        raise InputError(
            reason, where="strategy", hint="`planner suggest --backend pytorch` proposes only what the runner has"
        )
    layout, strategy = make_layout(config), config.strategy
    precision = strategy.precision
    device = torch.device(config.device, torch.cuda.current_device() if config.device == "cuda" else None)
    layers = stage_layers(strategy, config.model)
    core = Core(fused=config.job.flash_attention, sample=_sample(config))
    if strategy.cp > 1:
        core.context = Context(layout.group("cp"), layout.coordinates["cp"], strategy.cp)
    stages: dict[int, Stage] = {}
    for index in own_stages(strategy, layout.coordinates["pp"]):
        with torch.device("meta"):
            stage = Stage(
                config.model,
                layers[index],
                first=index == 0,
                last=index == len(layers) - 1,
                core=core,
                expert_rank=layout.coordinates["ep"],
                expert_ranks=strategy.ep,
            )
        if stage.rotary is not None and strategy.cp > 1:
            stage.rotary.positions = positions(strategy.seq_len, layout.coordinates["cp"], strategy.cp)
        counts = strategy.recompute.layers_per_stage
        parallelize(stage, layout, precision, None if counts is None else counts[index])
        with allocating():
            stage.to_empty(device=torch.device("cpu") if strategy.offload.parameters == "cpu" else device)
        if values is not None:
            values(stage, config.seed)
        stages[index] = stage
    parameters = [p for stage in stages.values() for _, p in named_parameters(stage)]
    trainer = Trainer(
        config=config,
        layout=layout,
        device=device,
        stages=stages,
        data=DataParallel(stages.values(), layout, precision),
        optimizer=make_optimizer(parameters),
        scale=LossScale(active=precision == "fp16"),
    )
    if strategy.pp > 1:
        trainer.schedule = make_schedule(
            stages, layout, device=device, compute=COMPUTE_TYPES[precision], loss=trainer.loss
        )
    return trainer


def _sample(config: RunConfig) -> int | None:
    """Tokens of a packed sample, None where a sequence is one."""
    sample = config.job.sample_tokens
    return sample if sample is not None and sample < config.strategy.seq_len else None


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW; parameters of one device mesh and one placement are stepped together."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=LEARNING_RATE, fused=True)
