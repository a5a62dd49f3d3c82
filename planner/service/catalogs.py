"""What the planner knows: models and accelerators, as records for tables and JSON."""

from __future__ import annotations

from typing import Any

from planner.catalog import accelerator_ids, default_system, load_accelerator, load_model, model_ids
from planner.cost.params import active_params, total_params
from planner.service.jobs import supported_precisions


def list_models(text: str = "") -> list[dict[str, Any]]:
    """Every model whose id, alias or family contains ``text``."""
    rows = []
    for name in model_ids():
        entry = load_model(name)
        if text and not any(text.lower() in word.lower() for word in (entry.id, entry.family, *entry.aliases)):
            continue
        spec = entry.spec
        rows.append(
            {
                "id": entry.id,
                "aliases": list(entry.aliases),
                "family": entry.family,
                "params": total_params(spec),
                "active_params": active_params(spec),
                "layers": spec.layers,
                "hidden": spec.hidden,
                "heads": spec.heads,
                "kv_heads": spec.kv_heads,
                "experts": spec.moe.experts if spec.moe else 0,
                "max_seq": spec.max_seq,
                "source": list(entry.source),
            }
        )
    return rows


def list_gpus(text: str = "") -> list[dict[str, Any]]:
    """Every accelerator whose id or architecture contains ``text``, with the node that is assumed for it."""
    rows = []
    for name in accelerator_ids():
        accelerator = load_accelerator(name)
        if text and not any(text.lower() in word.lower() for word in (accelerator.id, accelerator.architecture)):
            continue
        system = default_system(name)
        rows.append(
            {
                "id": accelerator.id,
                "vendor": accelerator.vendor,
                "architecture": accelerator.architecture,
                "memory_bytes": accelerator.memory.allocatable_bytes,
                "memory_bytes_per_s": accelerator.memory.bytes_per_s,
                "peak_16bit_flops_per_s": accelerator.peak.bf16 or accelerator.peak.fp16,
                "peak_fp8_flops_per_s": accelerator.peak.fp8,
                "precisions": list(supported_precisions(accelerator)),
                "fabric": accelerator.fabric.kind,
                "fabric_bytes_per_s": accelerator.fabric.bytes_per_s,
                "usd_per_gpu_hour": accelerator.price.mid_usd,
                "price_as_of": accelerator.price.as_of,
                "system": system.id,
                "gpus_per_node": system.gpus_per_node,
                "domain_gpus": system.domain_gpus,
                "nics_per_node": system.nics_per_node,
                "nic_bytes_per_s": system.nic_bytes_per_s,
                "confidence": accelerator.confidence,
            }
        )
    return rows
