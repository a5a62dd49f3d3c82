"""Checks of recomputation: options that contradict each other, are refused, or do nothing.

Sources are those of ``findings``."""

from __future__ import annotations

from planner.reading.megatron.setting import Setting, found
from planner.specs.finding import Finding

_MODULES = frozenset(
    {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"}
)
"""What --recompute-modules takes."""


def recompute_twice(s: Setting) -> Finding | None:
    granularity = s.stated.text("recompute-granularity")
    if not s.on("recompute-activations") or granularity is None:
        return None
    return found(
        s,
        "recompute-stated-twice",
        "warning" if granularity == "full" else "note",
        f"--recompute-activations means --recompute-granularity selective and wins over {granularity}",
        ("recompute-activations",),
        "leave --recompute-activations out",
    )


def recompute_parts(s: Setting) -> Finding | None:
    granularity = s.stated.text("recompute-granularity")
    parts = [name for name in ("recompute-method", "recompute-num-layers") if s.given(name)]
    flags = ("recompute-granularity", *parts)
    if granularity == "full" and not s.on("recompute-activations") and s.stated.complete and len(parts) < 2:
        return found(
            s,
            "recompute-needs-method",
            "error",
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
            flags,
            "add --recompute-method uniform --recompute-num-layers 1 for every layer",
        )
    if granularity == "selective" and parts and s.stated.complete:
        return found(
            s, "recompute-method-refused", "error", f"selective recomputation takes no --{parts[0]}", (parts[0],)
        )
    if granularity is None and s.stated.complete and parts and not s.on("recompute-activations"):
        return found(
            s,
            "recompute-without-granularity",
            "warning",
            f"--{parts[0]} does nothing without --recompute-granularity",
            (parts[0],),
            "add --recompute-granularity full",
        )
    return None


def recompute_modules(s: Setting) -> Finding | None:
    modules = s.stated.items("recompute-modules")
    unknown = sorted(set(modules) - _MODULES)
    if unknown:
        return Finding(
            id="recompute-modules-unknown",
            severity="error",
            message=f"--recompute-modules does not know {', '.join(unknown)}",
            where=s.stated.place("recompute-modules"),
            allowed=", ".join(sorted(_MODULES)),
        )
    granularity = s.stated.text("recompute-granularity")
    if modules and granularity != "selective" and s.stated.complete and not s.on("recompute-activations"):
        return found(
            s,
            "recompute-modules-ignored",
            "warning",
            "--recompute-modules counts with --recompute-granularity selective only",
            ("recompute-modules",),
        )
    if "moe_act" in modules and s.off("moe-grouped-gemm"):
        return found(
            s,
            "moe-act-needs-grouped-gemm",
            "error",
            "recomputing moe_act needs --moe-grouped-gemm",
            ("recompute-modules",),
        )
    return None
