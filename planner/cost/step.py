"""Builds the ``StageModel`` of a batch: every term of time and memory gathered into per-layer and per-end
coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.backends.base import BufferContext, RecomputeKind, StateBytes, Tensor
from planner.cost import activations, pipeline
from planner.cost.context import Work
from planner.cost.ends import EndTime, embedding_time, head_time
from planner.cost.groups import Groups
from planner.cost.layers import LayerTime, layer_time, recompute_s
from planner.cost.optimizer import gpu_step_s, host_link_bytes_per_s, offload_extra_s
from planner.cost.sharding import LayerTraffic, Weights, traffic
from planner.cost.stage_model import StageModel
from planner.cost.weights import Ends, layer_weights
from planner.cost.workspace import WORKSPACES, workspace_bytes
from planner.specs.batch import BoolArray, FloatArray
from planner.units import GIB

_LAYER_WISE_WINDOW = (0.6, 0.6, 0.3, 0.0)
"""Share of a micro-batch behind which once-a-step traffic hides, by sharding stage, where gradients are reduced layer
by layer: backward only; only the forward gather at stage 2."""
_FORWARD_LAUNCHES = 1.0 / 3.0
"""Share of a layer's kernels that its forward pass launches, as in its FLOPs."""
_HOST_PROCESS_BYTES = 4.0 * GIB
"""Host memory of one training process: interpreter, libraries, pinned staging buffers, data loader workers."""
_CPU_PROCESS_BYTES = 0.4 * GIB
"""The same of a process that computes on the host: interpreter and libraries (torch 2.13, CPU build)."""


@dataclass(frozen=True)
class Step:
    """All intermediate results for N candidates of one pipeline depth; ``model`` is what the search reads."""

    work: Work
    pp: int

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.work)

    @cached_property
    def ends(self) -> Ends:
        return Ends(self.work)

    @cached_property
    def layers(self) -> tuple[LayerTime, ...]:
        return tuple(layer_time(self.work, self.groups, kind) for kind in self.work.context.kinds)

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        return tuple(layer_weights(self.work, kind) for kind in self.work.context.kinds)

    @cached_property
    def layer_traffic(self) -> tuple[LayerTraffic, ...]:
        return tuple(traffic(self.work, self.groups, weights) for weights in self.weights)

    @cached_property
    def first_time(self) -> EndTime:
        return embedding_time(self.work, self.groups)

    @cached_property
    def last_time(self) -> EndTime:
        kinds = self.work.context.kinds
        block = [self.layers[kinds.index(kind)] for kind in self.work.context.model.prediction_kinds()]
        return head_time(self.work, self.groups, self.ends.vocab, block)

    @cached_property
    def first_traffic(self) -> LayerTraffic:
        """Data-parallel traffic of what the first rank holds beyond its layers."""
        return traffic(self.work, self.groups, self.ends.first)

    @cached_property
    def last_traffic(self) -> LayerTraffic:
        """The same of the last rank."""
        return traffic(self.work, self.groups, self.ends.last)

    @cached_property
    def dense_state(self) -> StateBytes:
        return self.work.context.backend.state_bytes(
            self.work.context.job, self.work.batch, self.work.batch.shard_degree
        )

    @cached_property
    def expert_state(self) -> StateBytes:
        return self.work.context.backend.state_bytes(
            self.work.context.job, self.work.batch, self.work.expert_shard_degree
        )

    @cached_property
    def straggler(self) -> float:
        """Factor on every time: a synchronous step waits for the slowest of all GPUs."""
        context = self.work.context
        return float(1.0 + context.constants.straggler_per_log2_gpu * np.log2(context.cluster.gpus))

    def exposed_layer(
        self, index: int, extra_backward: FloatArray | float = 0.0, issued_again: float = 0.0
    ) -> FloatArray:
        """Time of one layer with its every-micro-batch parameter and gradient traffic running beside it;
        ``issued_again`` is the share of its host time that recomputation repeats."""
        layer, moved = self.layers[index], self.layer_traffic[index]
        forward, backward = layer.forward(), layer.backward() + extra_backward
        total = self._with_traffic(forward, moved.forward) + self._with_traffic(backward, moved.backward)
        if layer.synchronous:
            return layer.issued(total, (1.0 + issued_again) * layer.host_floor)
        again = np.maximum(extra_backward, issued_again * layer.host_floor)
        return layer.issued(total, layer.host_floor + again)

    def _with_traffic(self, compute: FloatArray, moved: FloatArray) -> FloatArray:
        """One pass and the parameter or gradient traffic beside it, or behind it where the framework waits."""
        slow = self.work.context.constants.sharded_traffic_slowdown
        return np.where(self._traffic_overlaps, _beside(compute, moved, slow), compute + moved)

    @cached_property
    def _traffic_overlaps(self) -> BoolArray:
        return np.isin(self.work.traffic_stage, self.work.context.overlapped_stages)

    @cached_property
    def layer_time_s(self) -> FloatArray:
        return self._stack([self.exposed_layer(k) for k in range(len(self.layers))])

    @cached_property
    def layer_forward_s(self) -> FloatArray:
        """(N, K) of ``layer_time_s`` the forward pass: its kernels and traffic, and its launches of what the host
        adds."""
        columns = []
        for k, (layer, moved) in enumerate(zip(self.layers, self.layer_traffic, strict=True)):
            forward = self._with_traffic(layer.forward(), moved.forward)
            passes = forward + self._with_traffic(layer.backward(), moved.backward)
            columns.append(forward + _FORWARD_LAUNCHES * (self.layer_time_s[:, k] - passes))
        return self._stack(columns)

    @cached_property
    def recompute_time_s(self) -> FloatArray:
        """(N, K) added by recomputing one layer, by each candidate's recompute kind."""
        context = self.work.context
        columns = []
        for k, kind in enumerate(context.kinds):
            added = self.work.zeros()
            for code in np.unique(self.work.batch.recompute_kind):
                choice = context.recompute_kinds[int(code)]
                if choice.to_host:
                    waited = self._host_round_trip_s(k, choice)
                    added = np.where(self.work.batch.recompute_kind == code, waited, added)
                elif choice.mode != "none":
                    repeated = recompute_s(self.work, kind, self.layers[k], choice)
                    whole = "layer" in choice.repeats or ("moe" in choice.repeats and kind[1] == "moe")
                    issued_again = _FORWARD_LAUNCHES if whole else 0.0
                    longer = self.exposed_layer(k, repeated, issued_again) - self.layer_time_s[:, k]
                    added = np.where(self.work.batch.recompute_kind == code, longer, added)
            columns.append(added)
        return self._stack(columns)

    def _host_round_trip_s(self, index: int, choice: RecomputeKind) -> FloatArray:
        """Seconds that one layer waits for its saved tensors to leave for host memory and to come back.

        The copies of an offloaded layer run beside the compute of all layers up to the next offloaded one."""
        layer, work = self.layers[index], self.work
        moved = activations.recompute_saved_bytes(work, self.tensors[index], choice)
        seconds = moved / host_link_bytes_per_s(work.context.cluster)
        window = work.context.model.layers / self.pp / np.maximum(self._offloaded_layers, 1.0)
        return np.asarray(
            np.maximum(seconds - window * layer.forward(), 0.0) + np.maximum(seconds - window * layer.backward(), 0.0)
        )

    @cached_property
    def _offloaded_layers(self) -> FloatArray:
        """(N,) layers of a rank whose activations go to host memory."""
        to_host = np.array([choice.to_host for choice in self.work.context.recompute_kinds])
        layers = np.minimum(
            self.work.batch.recompute_layers * self.work.batch.vpp, self.work.context.model.layers / self.pp
        )
        return np.asarray(np.where(to_host[self.work.batch.recompute_kind], layers, 0.0))

    def _stack(self, columns: list[FloatArray]) -> FloatArray:
        return np.stack(columns, axis=1)

    def held(self, weights: Weights, part: str) -> FloatArray:
        """Bytes of ``weights`` held under one heading of the framework's memory layout."""
        dense: FloatArray = getattr(self.dense_state, part)
        expert: FloatArray = getattr(self.expert_state, part)
        trained = weights.trained
        held = dense * trained.dense + expert * trained.expert
        if part == "weights":
            if weights.adapters is not None:
                held = held + self.frozen_bytes * weights.dense + self.frozen_expert_bytes * weights.expert
            held = held - self.dense_state.narrow_copies * weights.tables
        return held

    def gathered(self, weights: Weights) -> FloatArray:
        """Of the bytes held as weights, copies gathered from the shards."""
        trained = weights.trained
        return np.asarray(self.dense_state.gathered * trained.dense + self.expert_state.gathered * trained.expert)

    @cached_property
    def frozen_bytes(self) -> FloatArray:
        return self.work.context.backend.frozen_bytes(
            self.work.context.job, self.work.batch, self.work.batch.shard_degree
        )

    @cached_property
    def frozen_expert_bytes(self) -> FloatArray:
        return self.work.context.backend.frozen_bytes(
            self.work.context.job, self.work.batch, self.work.expert_shard_degree
        )

    def resident(self, weights: Weights) -> FloatArray:
        """Weights, gradients and optimizer states of ``weights`` on the GPU, nothing offloaded."""
        return self.held(weights, "weights") + self.held(weights, "gradients") + self.held(weights, "optimizer")

    def updated(self, weights: Weights) -> FloatArray:
        """Parameters of ``weights`` whose optimizer step this rank computes."""
        sharded = self.work.batch.zero_stage > 0
        dense = np.where(sharded, self.work.batch.shard_degree, 1)
        expert = np.where(sharded, self.work.expert_shard_degree, 1)
        trained = weights.trained
        return trained.dense / dense + trained.expert / expert

    @cached_property
    def rank_params(self) -> FloatArray:
        """Parameters of the fullest rank of an even split."""
        per_rank = -(-self.work.context.model.layers // self.pp)
        largest: FloatArray = np.max(self._stack([w.dense + w.expert for w in self.weights]), axis=1)
        return per_rank * largest + np.maximum(self.ends.first.dense, self.ends.last.dense)

    @cached_property
    def buffers(self) -> dict[str, FloatArray]:
        """The framework's working buffers on every rank by name, bytes."""
        return self._buffers(self.work.zeros())

    @cached_property
    def last_buffers(self) -> dict[str, FloatArray]:
        """The same on the last rank, which also holds the head."""
        return self._buffers(self.ends.last.dense)

    def _buffers(self, head: FloatArray) -> dict[str, FloatArray]:
        context = self.work.context
        largest = np.max(self._stack([w.dense + w.expert for w in self.weights]), axis=1)
        one_expert = [
            weights.dense
            + weights.expert
            / np.maximum((context.model.moe.experts if context.model.moe else 1) / self.work.batch.ep, 1.0)
            for weights in self.weights
        ]
        distinct = np.max(self._stack(one_expert), axis=1) + head
        trained = np.max(self._stack([w.trained.dense + w.trained.expert for w in self.weights]), axis=1)
        buffers = context.backend.buffer_bytes(
            BufferContext(
                model=context.model,
                job=context.job,
                batch=self.work.batch,
                rank_params=self.rank_params,
                layer_params=largest,
                root_params=self.ends.first.dense + self.ends.last.dense,
                distinct_weight_params=distinct,
                trained_share=trained / largest,
            )
        )
        hidden = self.work.tokens * context.model.hidden * context.activation_bytes
        copies = context.backend.habits.overlap_buffers
        overlap = np.where((self.work.tp > 1) & (self.work.tensor_overlap > 0), copies * hidden, 0.0)
        return {
            **buffers,
            "tensor-parallel overlap buffers": overlap,
            WORKSPACES: workspace_bytes(self.work),
        }

    def standing(self, buffers: dict[str, FloatArray]) -> dict[str, FloatArray]:
        """Those of ``buffers`` that are there all step."""
        passing = self.work.context.backend.layer_buffers
        return {name: size for name, size in buffers.items() if name not in passing}

    @cached_property
    def tensors(self) -> tuple[dict[Tensor, FloatArray], ...]:
        return tuple(activations.saved_bytes(self.work, kind) for kind in self.work.context.kinds)

    @cached_property
    def activation_bytes(self) -> FloatArray:
        return self._stack([sum(t.values(), self.work.zeros()) for t in self.tensors])

    @cached_property
    def recompute_saved_bytes(self) -> FloatArray:
        """(N, K) bytes that one recomputed layer does not keep, by each candidate's recompute kind."""
        context = self.work.context
        columns = []
        for tensors in self.tensors:
            saved = self.work.zeros()
            for code in np.unique(self.work.batch.recompute_kind):
                choice = context.recompute_kinds[int(code)]
                spared = activations.recompute_saved_bytes(self.work, tensors, choice)
                saved = np.where(self.work.batch.recompute_kind == code, spared, saved)
            columns.append(saved)
        return self._stack(columns)

    @cached_property
    def layer_transient(self) -> FloatArray:
        """Backward of one layer with the buffers that it alone needs, and what recomputation brings back of it."""
        passing = (self.buffers[name] for name in sorted(self.work.context.backend.layer_buffers))
        backward, again = self._running_layer
        return backward + again + sum(passing, self.work.zeros())

    @property
    def recomputed_layer(self) -> FloatArray:
        """Of it, the saved tensors of one layer that recomputation brings back."""
        return self._running_layer[1]

    @cached_property
    def _running_layer(self) -> tuple[FloatArray, FloatArray]:
        """Gradients of activations and recomputed tensors of the layer that needs most of both."""
        context = self.work.context
        backward = self._stack([activations.layer_transient_bytes(self.work, kind) for kind in context.kinds])
        chosen = self.work.batch.recompute_kind[:, None]
        whole, dropped = (
            np.array([getattr(choice, name) for choice in context.recompute_kinds])[chosen]
            for name in ("brings_all_back", "brings_dropped_back")
        )
        again = np.where(whole, self.activation_bytes, np.where(dropped, self.recompute_saved_bytes, 0.0))
        worst = (backward + again).argmax(axis=1)[:, None]
        return np.take_along_axis(backward, worst, 1)[:, 0], np.take_along_axis(again, worst, 1)[:, 0]

    @cached_property
    def loss_transient(self) -> FloatArray:
        passes = 1.0 + self.work.context.model.mtp_layers
        return passes * activations.loss_transient_bytes(self.work, self.ends.vocab) + self._waiting_logits

    @property
    def _waiting_logits(self) -> FloatArray:
        """Logits that the last stage of a pipeline holds beyond those in work: its other schedules but GPipe start the
        backward pass of a micro-batch right behind its loss."""
        if self.pp == 1 or not self.work.context.backend.habits.keeps_logits:
            return self.work.zeros()
        gpipe = self.work.batch.schedule == pipeline.GPIPE
        alive = np.where(gpipe, self.work.micro_batches, 1.0)
        waits = pipeline.waiting_weight_gradients(self.work, self.pp)[:, -1]
        return activations.waiting_logits_bytes(self.work, self.ends.vocab, alive, np.maximum(waits - 1.0, 0.0))

    @cached_property
    def prediction_bytes(self) -> FloatArray:
        """Saved tensors of the multi-token-prediction blocks: one more layer each and its joint input (2h)."""
        context = self.work.context
        if not context.model.mtp_layers:
            return self.work.zeros()
        repeated = [context.kinds.index(kind) for kind in context.model.prediction_kinds()]
        block = self.activation_bytes[:, repeated].sum(axis=1)
        saved: FloatArray = context.model.mtp_layers * (block + 2.0 * activations.layer_input_bytes(self.work))
        return saved

    @cached_property
    def first_activation_bytes(self) -> FloatArray:
        """What the first rank saves of a micro-batch beyond its layers: token ids, the mask of the embedding's dropout,
        and the stage's output where the framework keeps it."""
        context, habits = self.work.context, self.work.context.backend.habits
        saved = 8.0 * self.work.tokens
        if habits.dropout:
            saved = saved + context.model.hidden * self.work.sp_tokens
        if habits.keeps_stage_outputs and self.pp > 1:
            saved = saved + activations.layer_input_bytes(self.work)
        return saved

    @cached_property
    def device_overhead(self) -> FloatArray:
        """Context, libraries and communication buffers: what the allocator does not see."""
        batch, constants = self.work.batch, self.work.context.constants
        groups = sum(
            ((degree > 1).astype(float) for degree in (batch.tp, batch.cp, batch.pp, batch.ep, batch.dp * batch.cp)),
            self.work.zeros(),
        )
        return constants.device_context_bytes + constants.communicator_bytes * groups

    @cached_property
    def window_share(self) -> FloatArray:
        """Micro-batch times behind which once-a-step traffic hides.

        The interleaved schedule ends with p micro-batches of every chunk, one chunk after another, so the gradients of
        the chunk that ends first have those of all others to hide behind: (p (v - 1) + 1) / v micro-batches in all."""
        if self.work.context.cluster.accelerator.synchronous:
            return self.work.zeros()
        if self.work.context.backend.habits.data_parallel_overlap == "last-micro-batch":
            last_group = np.minimum(self.work.micro_batches, self.pp)
            window: FloatArray = (
                self.work.context.constants.reduce_window_share
                * (last_group * (self.work.batch.vpp - 1.0) + 1.0)
                / self.work.batch.vpp
            )
            return window
        overlapped = self.work.context.overlapped_stages
        share = np.array([w if stage in overlapped else 0.0 for stage, w in enumerate(_LAYER_WISE_WINDOW)])
        return share[self.work.traffic_stage]

    @cached_property
    def constant_time(self) -> FloatArray:
        """Once a step: host work, and the all-reduce of a tied table's gradient between its two copies."""
        context = self.work.context
        constant = np.full(len(self.work.batch), context.constants.step_overhead_s)
        if context.model.tied and not context.job.frozen:
            tied = 2.0 * self.groups.pipeline.send_s(4.0 * self.ends.first.dense)
            constant = constant + np.where(self.work.batch.pp > 1, tied, 0.0)
        return constant

    @cached_property
    def fixed_host(self) -> FloatArray:
        """Host bytes of one rank's process and of its activations that wait there; offloaded parameters are among the
        states that the framework counts."""
        per_layer = self.recompute_saved_bytes.max(axis=1)
        alive = pipeline.in_flight(self.work, self.pp).max(axis=1)
        process = _CPU_PROCESS_BYTES if self.work.context.cluster.accelerator.synchronous else _HOST_PROCESS_BYTES
        return np.asarray(process + alive * self._offloaded_layers * per_layer)

    @cached_property
    def model(self) -> StageModel:
        """The coefficients; every time carries the straggler factor."""
        first, last, slow = self.ends.first, self.ends.last, self.straggler
        first_moved, last_moved = self.first_traffic, self.last_traffic
        optimizer = [gpu_step_s(self.work.context, self.updated(w)) for w in (*self.weights, first, last)]
        offload = [offload_extra_s(self.work, self.updated(w)) for w in (*self.weights, first, last)]
        bucket = np.minimum(1.0, self.work.context.backend.habits.bucket_params / np.maximum(self.rank_params, 1.0))
        even = self.work.context.model.layers / self.pp
        average = sum((t.once for t in self.layer_traffic), self.work.zeros()) / len(self.layer_traffic) * even
        slowest_weight, others_weight = pipeline.rank_weights(self.work)
        return StageModel(
            pp=self.pp,
            slowest_weight=slowest_weight,
            others_weight=others_weight,
            layer_time_s=slow * self.layer_time_s,
            recompute_time_s=slow * self.recompute_time_s,
            first_time_s=slow * (self.first_time.total() + first_moved.forward + first_moved.backward),
            last_time_s=slow * (self.last_time.total() + last_moved.forward + last_moved.backward),
            p2p_time_s=slow * pipeline.point_to_point_s(self.work, self.groups),
            constant_time_s=slow * self.constant_time,
            layer_reduce_time_s=slow * self._stack([t.once for t in self.layer_traffic]),
            first_reduce_time_s=slow * first_moved.once,
            last_reduce_time_s=slow * last_moved.once,
            reduce_window_share=self.window_share,
            reduce_floor_s=slow * bucket * average,
            layer_optimizer_time_s=slow * self._stack(optimizer[:-2]),
            first_optimizer_time_s=slow * optimizer[-2],
            last_optimizer_time_s=slow * optimizer[-1],
            layer_offload_time_s=slow * self._stack(offload[:-2]),
            first_offload_time_s=slow * offload[-2],
            last_offload_time_s=slow * offload[-1],
            **self._memory(first, last),
        )

    def _memory(self, first: Weights, last: Weights) -> dict[str, FloatArray]:
        """The memory half of the coefficients."""
        parts = (*self.weights, first, last)
        state = [self.resident(w) for w in parts]
        offloadable = [self.held(w, "offloadable") for w in parts]
        host = [self.held(w, "host") for w in parts]
        final_norm = activations.final_norm_bytes(self.work)
        standing = sum(self.standing(self.buffers).values(), self.work.zeros())
        return {
            "layer_state_bytes": self._stack(state[:-2]),
            "layer_offloadable_bytes": self._stack(offloadable[:-2]),
            "first_state_bytes": state[-2],
            "last_state_bytes": state[-1],
            "first_offloadable_bytes": offloadable[-2],
            "last_offloadable_bytes": offloadable[-1],
            "layer_activation_bytes": self.activation_bytes,
            "recompute_saved_bytes": self.recompute_saved_bytes,
            "first_activation_bytes": self.first_activation_bytes,
            "in_flight": pipeline.in_flight(self.work, self.pp),
            "fixed_bytes": standing + self.layer_transient,
            "last_fixed_bytes": np.maximum(self.loss_transient - self.layer_transient, 0.0)
            + final_norm
            + self.prediction_bytes
            + sum(self.standing(self.last_buffers).values(), self.work.zeros())
            - standing,
            "step_temporary_layer_bytes": self._stack([self.held(w, "step_temporary") for w in self.weights]),
            "layer_host_bytes": self._stack(host[:-2]),
            "first_host_bytes": host[-2],
            "last_host_bytes": host[-1],
            "fixed_host_bytes": self.fixed_host,
            "local_ranks": np.full(len(self.work.batch), float(self.work.context.cluster.local_gpus)),
            "memory_factor": np.full(len(self.work.batch), self.work.context.memory_factor),
            "device_overhead_bytes": self.device_overhead,
        }


def _beside(compute: FloatArray, communication: FloatArray, slow: float) -> FloatArray:
    """Compute with communication beside it: the longer of the two, plus the slow-down of the shared part."""
    return np.maximum(compute, communication) + slow * np.minimum(compute, communication)
