"""A complete training script around parallelize.py: random tokens, a plain Llama-like model, llama3-8b's dimensions.

    ./launch.sh                                                      the plan on its GPUs
    torchrun --standalone --nproc-per-node 16 example_train.py --tiny    the same structure on CPUs, tiny model
    python example_train.py --tiny --reference                       one process, for comparing the losses

It shows where each call belongs; replace model, data and schedule by your own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import parallelize as plan

DIMENSIONS = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256}
TIED = False  # embedding and head share their weight
TINY = {"layers": 4, "hidden": 64, "ffn": 128, "heads": 8, "kv_heads": 4, "head_dim": 8, "vocab": 256}


class Attention(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.head_dim, self.repeats = size["head_dim"], size["heads"] // size["kv_heads"]
        self.q_proj = nn.Linear(size["hidden"], size["heads"] * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size["hidden"], size["kv_heads"] * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size["hidden"], size["kv_heads"] * self.head_dim, bias=False)
        self.o_proj = nn.Linear(size["heads"] * self.head_dim, size["hidden"], bias=False)

    def forward(self, hidden_states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads = [
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        query, key, value = rotate(heads[0], rotary), rotate(heads[1], rotary), heads[2]
        key, value = key.repeat_interleave(self.repeats, 1), value.repeat_interleave(self.repeats, 1)
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(output.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size["hidden"], size["ffn"], bias=False)
        self.up_proj = nn.Linear(size["hidden"], size["ffn"], bias=False)
        self.down_proj = nn.Linear(size["ffn"], size["hidden"], bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class Block(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size["hidden"], eps=1e-5)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = nn.RMSNorm(size["hidden"], eps=1e-5)
        self.mlp = Mlp(size)

    def forward(self, hidden_states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), rotary=rotary)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Decoder(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.head_dim = size["head_dim"]
        self.embed_tokens = nn.Embedding(size["vocab"], size["hidden"])
        self.layers = nn.ModuleList(Block(size) for _ in range(size["layers"]))
        self.norm = nn.RMSNorm(size["hidden"], eps=1e-5)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        rotary = rotary_angles(position_ids, self.head_dim)
        hidden_states = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotary=rotary)
        return self.norm(hidden_states)


class CausalModel(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        self.model = Decoder(size)
        self.lm_head = nn.Linear(size["hidden"], size["vocab"], bias=False)
        if TIED:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens, position_ids))


def rotary_angles(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, (batch, 1, sequence, head_dim)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = (positions[..., None].float() * frequency).repeat(1, 1, 2)[:, None]
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * rotary[0].to(heads.dtype) + turned * rotary[1].to(heads.dtype)


def build_model(size: dict[str, int], options: argparse.Namespace, device: str) -> tuple[nn.Module, object]:
    """The model, parallelised unless it is the reference, with its mesh."""
    if options.tiny:
        torch.manual_seed(0)
        model: nn.Module = CausalModel(size)
        if options.reference:
            return model, None
        mesh = plan.build_mesh(device)
        return plan.parallelize(model, mesh, precision="fp32"), mesh
    # A large model is never whole anywhere: it is built without storage, sharded, then given memory and values.
    with torch.device("meta"):
        model = CausalModel(size)
    mesh = plan.build_mesh(device)
    model = plan.parallelize(model, mesh)
    model.to_empty(device="cpu" if plan.CPU_OFFLOAD else device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    return model, mesh


def train(options: argparse.Namespace) -> list[float]:
    """Train for some steps and return the loss of each."""
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    size = TINY if options.tiny else DIMENSIONS
    if size is None:
        raise SystemExit("this example builds dense Llama-like models only: call parallelize() from your own training script")
    sequence, micro_batch, accumulate = (32, 1, 2) if options.tiny else (plan.SEQ_LEN, plan.MICRO_BATCH, plan.GRAD_ACCUM)
    replicas = plan.DP_REPLICATE * plan.DP_SHARD
    model, mesh = build_model(size, options, device)
    mine = [0] if mesh is None else [plan.data_rank(mesh)]
    if mesh is None:
        # The reference computes what all replicas compute together.
        mine = list(range(replicas))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(options.steps):
        started = time.perf_counter()
        total = torch.zeros((), device=device)
        for index in range(accumulate):
            for replica in mine:
                generator = torch.Generator().manual_seed((step * accumulate + index) * replicas + replica)
                data = torch.randint(size["vocab"], (micro_batch, sequence + 1), generator=generator).to(device)
                tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
                positions = torch.arange(sequence, device=device).repeat(micro_batch, 1)
                total += one_micro_batch(model, mesh, tokens, labels, positions, accumulate * len(mine))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mesh is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(round(total.item(), 5))
        if mesh is None or dist.get_rank() == 0:
            seconds = time.perf_counter() - started
            peak = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0
            print(f"step {step + 1}  loss {losses[-1]}  {seconds:.4f} s  peak {peak:.2f} GiB", flush=True)
    return losses

def one_micro_batch(model, mesh, tokens, labels, positions, parts):  # type: ignore[no-untyped-def]
    """Forward and backward of one micro-batch; returns its share of the step's loss."""
    if mesh is None:
        loss = plan.loss_function(model(tokens, positions), labels) / parts
        loss.backward()
        return loss.detach()
    with plan.shard_sequence(mesh, tokens, labels, positions), plan.loss_context():
        loss = plan.loss_function(model(tokens, positions), labels) / parts
        loss.backward()
    return loss.full_tensor().detach() if hasattr(loss, "full_tensor") else loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="tiny model in fp32 on CPUs")
    parser.add_argument("--reference", action="store_true", help="with --tiny: one process, nothing parallel")
    options = parser.parse_args()
    if options.reference and not options.tiny:
        parser.error("--reference needs --tiny")
    if options.reference:
        print("losses " + json.dumps(train(options)))
        return
    if options.tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Offloaded gradients lie in host memory, so their norm is reduced by gloo.
    dist.init_process_group("gloo" if options.tiny else "cpu:gloo,cuda:nccl")
    losses = train(options)
    if dist.get_rank() == 0:
        print("losses " + json.dumps(losses), flush=True)
    # No process may leave while another still talks to it.
    dist.barrier()
    dist.destroy_process_group()
    if options.tiny:
        # Threads of gloo can outlive the interpreter and abort a run that has finished.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
