"""Parallelisation of llama3-8b on 4 GPUs with PyTorch FSDP2: the plan as a module for your training script.

    mesh = build_mesh()
    model = parallelize(model, mesh)                   # after building it, before the optimizer
    for each of the GRAD_ACCUM micro-batches of a step:
        with shard_sequence(mesh, tokens, labels, positions), loss_context():
            loss = loss_function(model(tokens, position_ids=positions), labels) / GRAD_ACCUM
            loss.backward()

Works on modules with the names that Hugging Face gives Llama-like models (model.embed_tokens, model.layers, self_attn.q_proj, ...).
Gradients are reduced and sharded in every micro-batch, which is what the memory estimate assumes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# The plan.  A changed degree must keep DP_REPLICATE * DP_SHARD * CP * TP equal to the number of processes.
DP_REPLICATE = 1  # copies of the sharded model
DP_SHARD = 4  # data-parallel ranks that share one copy
CP = 1  # ranks that share one sequence
TP = 1  # ranks that share each matrix
SEQUENCE_PARALLEL = False  # norms and residuals split over the TP ranks too
LOSS_PARALLEL = False  # logits stay split over the TP ranks
RESHARD_AFTER_FORWARD = True  # free gathered weights between forward and backward
PRECISION = "bf16"  # of the matrix multiplications; gradients are reduced in fp32
RECOMPUTE = "full"  # none, selective or full
RECOMPUTE_LAYERS = None  # leading blocks that recompute; None: all
CPU_OFFLOAD = False  # weights, gradients and optimizer live in host memory
SEQ_LEN = 8192
MICRO_BATCH = 1  # sequences of one micro-batch of a replica
GRAD_ACCUM = 128  # micro-batches of a step; 512 sequences in all


def build_mesh(device_type: str | None = None) -> DeviceMesh:
    """The device mesh, slowest axis first; tensor-parallel ranks are neighbours."""
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, (DP_REPLICATE, DP_SHARD, CP, TP), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP shards over; a first axis of copies turns it into hybrid sharding."""
    if CP == 1:
        return mesh["dp_replicate", "dp_shard"] if DP_REPLICATE > 1 else mesh["dp_shard"]
    # Context-parallel ranks hold the same weights, so the shards are spread over them as well.
    shard = mesh["dp_shard", "cp"]._flatten("shard")
    return mesh["dp_replicate", "shard"] if DP_REPLICATE > 1 else shard


def data_rank(mesh: DeviceMesh) -> int:
    """Which of the DP replicas this process belongs to; ranks of one replica must read the same samples."""
    return mesh["dp_replicate"].get_local_rank() * DP_SHARD + mesh["dp_shard"].get_local_rank()


def parallelize(model: nn.Module, mesh: DeviceMesh, *, precision: str = PRECISION) -> nn.Module:
    """Apply the plan to ``model`` in the only order that works: fp8, tensor parallelism, checkpointing, FSDP."""
    if precision == "fp8":
        _use_fp8(model)
    if TP > 1:
        _tensor_parallel(model, mesh["tp"])
    _checkpoint(model)
    _shard(model, mesh, precision)
    return model


def _use_fp8(model: nn.Module) -> None:
    """Run the matrix multiplications of the blocks in fp8 with dynamic scales; weights stay in 16 and 32 bits."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "layers." in name)


def _tensor_parallel(model: nn.Module, tp: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_module
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    class ReplicatedNorm(ParallelStyle):
        """Same norm on every rank; its weight becomes a DTensor so that the optimizer sees one mesh only."""

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            from torch.distributed.tensor import DTensor

            def enter(_module, inputs, mesh):  # type: ignore[no-untyped-def]
                return (DTensor.from_local(inputs[0], mesh, [Replicate()]), *inputs[1:])

            def leave(_module, output, _mesh):  # type: ignore[no-untyped-def]
                return output.to_local()

            return distribute_module(module, device_mesh, None, enter, leave)

    colwise, rowwise = ColwiseParallel, RowwiseParallel
    if PRECISION == "fp8":
        from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

        colwise, rowwise = Float8ColwiseParallel, Float8RowwiseParallel
    between = Shard(1) if SEQUENCE_PARALLEL else Replicate()
    norm = SequenceParallel() if SEQUENCE_PARALLEL else ReplicatedNorm()
    logits = {"output_layouts": Shard(-1), "use_local_output": False} if LOSS_PARALLEL else {"output_layouts": Replicate()}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "model.norm": norm,
            "lm_head": ColwiseParallel(input_layouts=between, **logits),
        },
    )
    if tied:
        # Both are split over the vocabulary, so one parameter still serves embedding and head.
        model.lm_head.weight = model.model.embed_tokens.weight
    for index, block in enumerate(_blocks(model)):
        plan = {
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
            "self_attn.q_proj": colwise(),
            "self_attn.k_proj": colwise(),
            "self_attn.v_proj": colwise(),
            "self_attn.o_proj": rowwise(output_layouts=between),
            "mlp.up_proj": colwise(),
            "mlp.gate_proj": colwise(),
            "mlp.down_proj": rowwise(output_layouts=between),
        }
        if hasattr(block.self_attn, "q_norm"):
            # One norm per head: each rank holds some heads (dimension 2), and the weight's gradient is summed over the ranks.
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {"self_attn.q_norm": heads, "self_attn.k_norm": heads}
        if SEQUENCE_PARALLEL:
            whole = Replicate()
            plan["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": whole}
            )
            plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,))
            if index == 0:
                # The embedding stays whole so that the model derives positions from its full length; split it here.
                plan[""] = PrepareModuleInput(
                    input_layouts=(whole,), desired_input_layouts=(Shard(1),), use_local_output=True
                )
        parallelize_module(block, tp, {name: style for name, style in plan.items() if not name or _has(block, name)})


def _checkpoint(model: nn.Module) -> None:
    """Throw activations of the first RECOMPUTE_LAYERS blocks away and compute them again in the backward pass."""
    if RECOMPUTE == "none":
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    options = {"context_fn": _selective_contexts} if RECOMPUTE == "selective" else {}
    layers = model.model.layers
    for index in range(len(layers) if RECOMPUTE_LAYERS is None else RECOMPUTE_LAYERS):
        layers[index] = checkpoint_wrapper(layers[index], preserve_rng_state=False, **options)


def _selective_contexts():  # type: ignore[no-untyped-def]
    """Keep attention outputs and every second matrix multiplication; the rest of the block is computed again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten, kept = torch.ops.aten, CheckpointPolicy.MUST_SAVE
    attention = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    matmuls = {aten.mm.default, aten.addmm.default}
    seen = {False: 0, True: 0}

    def policy(context, function, *_arguments, **_keywords):  # type: ignore[no-untyped-def]
        if function in attention:
            return kept
        if function in matmuls:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2:
                return kept
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]
    offload: OffloadPolicy = CPUOffloadPolicy() if CPU_OFFLOAD else OffloadPolicy()
    options = {
        "mesh": shard_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": offload,
    }
    for block in _blocks(model):
        fully_shard(block, reshard_after_forward=RESHARD_AFTER_FORWARD, **options)
    # The root holds embedding and head; they are needed again at once, so they are not resharded in between.
    fully_shard(model, reshard_after_forward=False, **options)


@contextlib.contextmanager
def shard_sequence(mesh: DeviceMesh, *tensors: torch.Tensor) -> Iterator[None]:
    """Inside, each (batch, sequence) tensor is this context-parallel rank's part and attention runs over all parts (GPU only)."""
    if CP == 1:
        yield
        return
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(
        mesh["cp"], buffers=list(tensors), buffer_seq_dims=[1] * len(tensors), no_restore_buffers=set(tensors)
    ):
        yield


def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32; call it and backward() inside loss_context()."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def loss_context() -> contextlib.AbstractContextManager[None]:
    """Keeps logits split over the tensor-parallel ranks in the loss and its backward pass when the plan says so."""
    if not LOSS_PARALLEL:
        return contextlib.nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers)


def _has(module: nn.Module, path: str) -> bool:
    """Whether ``module`` has the submodule ``path`` (a plain MLP has no gate, for example)."""
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
