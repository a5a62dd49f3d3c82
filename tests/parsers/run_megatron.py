"""Megatron-LM's own parser, validators, process groups and model, over many argument lists, on a CPU.

usage: run_megatron.py < cases.jsonl > results.jsonl

A case: {"id", "arguments": [...], "world", "environment": {...}, "capability": 9, "ranks": [...]}.  A result says
whether every stage passed, or the stage, the message and Megatron's own file and line; with ranks, the parameters that
Megatron's GPTModel has there.  What a CPU machine lacks is stood in for: triton, Transformer Engine (its version and
the signature of its optimizer), the device's capability, and typing.override before Python 3.12."""

# The framework is not installed where types are checked.
# mypy: disable-error-code="import-not-found,import-untyped,possibly-undefined,unused-ignore"

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import traceback
import types
import typing
import warnings
from typing import Any


class _Anything:
    """Stands for every name of a package that is not there: callable, indexable, usable as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __mul__ = __add__ = __or__


class _Module(types.ModuleType):
    __version__ = "0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of the given names, after every real one."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


CAPABILITY = (9, 0)


def stand_in() -> None:
    """Puts everything in place that Megatron looks for when it is imported."""
    typing.override = getattr(typing, "override", lambda function: function)  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    import torch
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_compat  # settles that there is no triton before one is stood in

    sys.meta_path.append(StandIn("triton"))
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        major=CAPABILITY[0], minor=0, name="stand-in", total_memory=80 << 30, multi_processor_count=132
    )
    torch.cuda.get_device_name = lambda *_: "stand-in"
    torch.cuda.current_device = lambda: "meta"
    torch.cuda.Stream = lambda *args, **kwargs: None
    import megatron.core.utils as core_utils
    from packaging.version import Version

    core_utils.get_te_version = lambda: Version("2.12.0")
    # Configurations only ask whether Transformer Engine's fused kernels are there.
    import megatron.core.models.common.embeddings.rope_utils as rope
    import megatron.core.transformer.moe.moe_utils as experts

    for module, names in (
        (rope, ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")),
        (
            experts,
            (
                "fused_permute",
                "fused_permute_with_probs",
                "fused_sort_chunks_by_index",
                "fused_sort_chunks_by_index_with_probs",
                "fused_unpermute",
            ),
        ),
    ):
        for name in names:
            setattr(module, name, _Anything())


def transformer_engine_optimizer() -> None:
    """OptimizerConfig looks at the signature of Transformer Engine's FusedAdam only."""

    class FusedAdam:
        def __init__(
            self,
            params: Any,
            master_weight_dtype: Any = None,
            exp_avg_dtype: Any = None,
            exp_avg_sq_dtype: Any = None,
            use_decoupled_grad: bool = False,
        ) -> None: ...

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]


def remove_transformer_engine() -> None:
    """The next case imports without it again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def _empty_module(self: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    torch.nn.Module.__init__(self)


def _whole_linear(self: Any, inputs: int, outputs: int, **kwargs: Any) -> None:
    import torch

    torch.nn.Module.__init__(self)
    self.weight = torch.nn.Parameter(torch.empty(outputs, inputs))


class Check:
    """One case on its way through Megatron's own stages."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.stage = "parse"

    def run(self) -> dict[str, Any]:
        args = self._arguments()
        self.stage = "model configuration"
        from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

        configuration = gpt_config_from_args(args)
        transformer_engine_optimizer()
        self.stage = "optimizer and data-parallel configuration"
        pretrain_cfg_container_from_args(args, configuration)
        transformer = configuration.transformer
        result: dict[str, Any] = {"parameters": {}}
        for rank in self.case.get("ranks") or [0]:
            self.stage = "process groups"
            self._groups(args, rank)
            self.stage = "layer split"
            result["layers"] = self._split(args, transformer)
            if self.case.get("ranks"):
                self.stage = "model"
                result["parameters"][str(rank)] = self._parameters(args, transformer)
        self.stage = "micro-batches"
        result["micro_batches"] = self._micro_batches(args, transformer)
        return {
            **result,
            "dp": args.data_parallel_size,
            "vpp": args.virtual_pipeline_model_parallel_size or 1,
            "sequence_parallel": args.sequence_parallel,
            "padded_vocab": args.padded_vocab_size,
        }

    def _arguments(self) -> Any:
        from megatron.training.arguments import parse_args, validate_args
        from megatron.training.vocab_utils import calculate_padded_vocab_size

        sys.argv = ["pretrain_gpt.py", *self.case["arguments"]]
        args = parse_args()
        self.stage = "validation of arguments"
        validate_args(args, {})
        if args.vocab_size:
            args.padded_vocab_size = calculate_padded_vocab_size(
                args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
            )
        return args

    def _groups(self, args: Any, rank: int) -> None:
        import torch
        from megatron.core import parallel_state
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.case["world"])
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )

    def _split(self, args: Any, transformer: Any) -> list[int]:
        """Layers of every virtual stage, by Megatron's own count."""
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        layout, chunks = transformer.pipeline_model_parallel_layout, transformer.virtual_pipeline_model_parallel_size
        counts = []
        for chunk in range(chunks or 1):
            for rank in range(transformer.pipeline_model_parallel_size):
                if layout is not None:
                    counts.append(layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=rank))
                else:
                    stage = chunk if chunks else None
                    counts.append(get_num_layers_to_build(transformer, vp_stage=stage, pp_rank=rank))
        if sum(counts) != args.num_layers:
            raise AssertionError(f"{sum(counts)} layers are built of {args.num_layers}")
        return counts

    def _parameters(self, args: Any, transformer: Any) -> int:
        """Parameters of Megatron's model on this rank, on meta tensors.

        The local layers stand for Transformer Engine's, which have the same parameters; what only those support is
        switched off."""
        import torch
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

        plain = copy.deepcopy(transformer)
        plain.use_cpu_initialization = plain.init_model_with_meta_device = True
        for name in (
            "sequence_parallel",
            "perform_initialization",
            "gradient_accumulation_fusion",
            "persist_layer_norm",
            "moe_grouped_gemm",
            "moe_permute_fusion",
            "tp_comm_overlap",
            "bias_activation_fusion",
            "masked_softmax_fusion",
        ):
            setattr(plain, name, False)
        plain.context_parallel_size = 1
        plain.moe_token_dispatcher_type = "alltoall"
        plain.fp8 = plain.fp4 = None
        if args.multi_latent_attention:
            # The local attention core takes no widths of latent attention; like every core it holds no parameters.
            import megatron.core.models.backends as specs
            import megatron.core.transformer.multi_latent_attention as latent

            specs.DotProductAttention = type("Core", (torch.nn.Module,), {"__init__": _empty_module})
            # Down-projections: Transformer Engine's are whole on every tp rank, the local ones would be split.
            latent.TELinear = type("Whole", (torch.nn.Module,), {"__init__": _whole_linear})
        chunks, count = plain.virtual_pipeline_model_parallel_size, 0
        with torch.device("meta"):
            for chunk in range(chunks or 1):
                stage = chunk if chunks else None
                spec = get_gpt_decoder_block_spec(
                    plain, use_transformer_engine=False, normalization=args.normalization, vp_stage=stage
                )
                if args.multi_latent_attention:
                    for layer in spec.layer_specs:
                        projections = layer.submodules.self_attention.submodules
                        projections.linear_q_down_proj = projections.linear_kv_down_proj = latent.TELinear
                prediction = None
                if args.mtp_num_layers:
                    prediction = get_gpt_mtp_block_spec(plain, spec, use_transformer_engine=False, vp_stage=stage)
                model = GPTModel(
                    plain,
                    spec,
                    vocab_size=args.padded_vocab_size,
                    max_sequence_length=args.max_position_embeddings,
                    pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                    post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                    share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                    position_embedding_type=args.position_embedding_type,
                    mtp_block_spec=prediction,
                    vp_stage=stage,
                )
                count += sum(parameter.numel() for parameter in model.parameters())
        return count

    def _micro_batches(self, args: Any, transformer: Any) -> int:
        """Micro-batches of a step; two rules that Megatron raises in the first step only are asked here: experts under
        tp without sequence parallelism (moe_layer.py), and groups of the interleaved schedule (schedules.py)."""
        from megatron.core import num_microbatches_calculator as calculator

        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(
            0, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
        )
        number = calculator.get_num_microbatches()
        if args.num_experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
            raise ValueError("first step: experts under tensor parallelism need sequence parallelism")
        stages = args.pipeline_model_parallel_size
        if args.virtual_pipeline_model_parallel_size:
            group = transformer.microbatch_group_size_per_vp_stage
            if not stages <= group <= number or (number % group and number % group < stages):
                raise ValueError(f"first step: {number} micro-batches in groups of {group} over {stages} stages")
        return int(number)


def checked(case: dict[str, Any]) -> dict[str, Any]:
    """The result of one case."""
    global CAPABILITY
    CAPABILITY = (case.get("capability", 9), 0)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(case["world"]), **case.get("environment", {})}
    check = Check(case)
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            return {"id": case["id"], "accepted": True, **check.run()}
    except (Exception, SystemExit) as problem:
        frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if "/megatron/" in frame.filename]
        message = quiet.getvalue().strip().splitlines()[-1:] if isinstance(problem, SystemExit) else [str(problem)]
        return {
            "id": case["id"],
            "accepted": False,
            "stage": check.stage,
            "message": f"{type(problem).__name__}: {' '.join(message)}"[:400],
            "where": f"{frames[-1].filename.split('/megatron/')[-1]}:{frames[-1].lineno}" if frames else "",
        }
    finally:
        remove_transformer_engine()


def main() -> None:
    stand_in()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(checked(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
