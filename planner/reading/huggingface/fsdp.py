"""How FSDP is set up by accelerate's fsdp_config or by the fsdp arguments of the Trainer: stage, groups, offload,
recomputation.

The two spell the same plugin (accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin) with other keys and
other defaults; version 1 and 2 of FSDP read different ones of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.reading.huggingface.values import Section, shown

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Version 1, numbered from 1 (accelerate/utils/constants.py, FSDP_SHARDING_STRATEGY)."""

STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """FSDP as far as it is stated."""

    version: int | None
    stage: int | None
    hybrid: bool = False
    """Shards over the GPUs of a node, copies on every node (version 1)."""
    offload: bool | None
    recompute: bool | None
    """FSDP's own activation checkpointing."""


def yaml_sharding(section: Section) -> Sharding:
    """``fsdp_config`` of accelerate's YAML file; the prefix may be missing there."""
    keys = {key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in section.values.items()}
    config = Section(keys, section.notes, section.path)
    version = config.count("fsdp_version", 1)
    if version not in (1, 2, None):
        config.add("fsdp-version", "error", f"fsdp_version is {version}", "fsdp_version", allowed="1, 2")
        version = None
    _loading(config)
    recompute = config.truth("fsdp_activation_checkpointing", False)
    _wrapping(config, "fsdp_auto_wrap_policy", "NO_WRAP", recompute)
    _host_activations(config, version, recompute)
    if version == 2:
        stage, hybrid = _reshard(config), False
        _ignored(config, ("fsdp_sharding_strategy", "fsdp_forward_prefetch"), 2)
    else:
        stage, hybrid = _strategy(config, config.values.get("fsdp_sharding_strategy"), "fsdp_sharding_strategy")
        _ignored(config, ("fsdp_reshard_after_forward",), 1)
    offload = config.truth("fsdp_offload_params", False)
    return Sharding(version=version, stage=stage, hybrid=hybrid, offload=offload, recompute=recompute)


def _loading(config: Section) -> None:
    """The launcher insists on module states being sent where only rank 0 loads (accelerate/utils/launch.py)."""
    if config.truth("fsdp_cpu_ram_efficient_loading", True) and config.truth("fsdp_sync_module_states", True) is False:
        config.add(
            "fsdp-loading",
            "error",
            "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: accelerate launch stops",
            "fsdp_sync_module_states",
            allowed="true",
        )


def _wrapping(config: Section, key: str, default: str, recompute: bool | None) -> None:
    policy = (config.word(key) or default).upper()
    if policy not in POLICIES:
        config.add("fsdp-wrap-policy", "error", f"{key} is {shown(policy)}", key, allowed=", ".join(POLICIES))
    elif policy == "NO_WRAP":
        config.add(
            "fsdp-no-wrap",
            "error" if recompute else "warning",
            "no block is a shard unit of its own, so every GPU gathers nearly the whole model at once"
            + ("; activation checkpointing finds no block either" if recompute else ""),
            key,
            allowed="TRANSFORMER_BASED_WRAP",
            hint=f"write {key}: TRANSFORMER_BASED_WRAP",
        )
    elif policy == "SIZE_BASED_WRAP":
        config.notes.skip(f"{key}: SIZE_BASED_WRAP (units by parameter count instead of blocks)")


def _host_activations(config: Section, version: int | None, recompute: bool | None) -> None:
    key = "fsdp_activation_checkpointing_offload"
    if not config.truth(key, False):
        return
    if version == 1 or not recompute:
        config.add(
            "fsdp-activation-offload",
            "error",
            f"{key} needs fsdp_activation_checkpointing and fsdp_version 2: accelerate stops",
            key,
        )
    config.notes.skip(f"{key}: checkpointed inputs wait in host memory")


def _reshard(config: Section) -> int | None:
    """Version 2: a boolean, true by default."""
    key = "fsdp_reshard_after_forward"
    value = config.values.get(key)
    if value is not None and str(value).upper() in STAGES:
        config.add(
            "fsdp-version-spelling",
            "error",
            f"{key} is {shown(value)}: version 2 takes a boolean, accelerate stops",
            key,
            allowed="true, false",
            hint="true for FULL_SHARD, false for SHARD_GRAD_OP; hybrid sharding is parallelism_config",
        )
        return {3: 3, 2: 2}.get(STAGES[str(value).upper()])
    reshard = config.truth(key, True)
    return None if reshard is None else 3 if reshard else 2


def _strategy(config: Section, value: Any, key: str) -> tuple[int | None, bool]:
    """Version 1: one of five names or its number."""
    word = str(value if value is not None else "FULL_SHARD").strip().upper()
    if word.isdigit() and 1 <= int(word[:3]) <= len(STRATEGIES):
        word = STRATEGIES[int(word) - 1]
    if word not in STAGES:
        config.add("fsdp-strategy", "error", f"{key} is {shown(value)}", key, allowed=", ".join(STRATEGIES))
        return None, False
    return STAGES[word], word.startswith("HYBRID")


def _ignored(config: Section, keys: tuple[str, ...], version: int) -> None:
    """Keys of the other version, which the launcher exports and the plugin does not look at."""
    for key in keys:
        value = config.values.get(key)
        if value is None or str(value).lower() in ("false", "none"):
            continue
        config.add(
            "fsdp-version-key",
            "warning",
            f"{key} is ignored with fsdp_version {version}",
            key,
            hint="fsdp_reshard_after_forward: true or false"
            if version == 2
            else "fsdp_sharding_strategy, or version 2",
        )


def argument_sharding(arguments: Section) -> Sharding | None:
    """``fsdp`` and ``fsdp_config`` of TrainingArguments (training_args.py, _process_fsdp_args); None without FSDP."""
    asked = arguments.values.get("fsdp")
    if asked in (None, False, "", [], "false", "False"):
        return None
    raw = arguments.section("fsdp_config")
    keys = {key.removeprefix("fsdp_"): value for key, value in raw.values.items()}
    config = Section(keys, raw.notes, raw.path)
    version = config.count("version", 2)
    items = [] if asked is True else str(asked).split() if isinstance(asked, str) else list(map(str, asked))
    items = [item for item in items if item.lower() != "true"]
    _unknown_items(arguments, items)
    named = next((item for item in items if item.upper() in STAGES), None)
    value = config.values.get("reshard_after_forward", named)
    if version == 2:
        stage, hybrid = _argument_reshard(arguments, config, value)
    else:
        stage, hybrid = _strategy(config, value, "reshard_after_forward")
    if config.truth("xla", False):
        config.notes.skip("fsdp_config.xla: FSDP of PyTorch/XLA")
    _wrapping(config, "auto_wrap_policy", "TRANSFORMER_BASED_WRAP", False)
    offload = config.truth("cpu_offload", "offload" in items)
    if config.truth("offload_params", False) and not offload:
        config.add("ignored-key", "warning", "the Trainer reads cpu_offload here", "offload_params", hint="cpu_offload")
    recompute = config.truth("activation_checkpointing", False)
    return Sharding(version=version, stage=stage, hybrid=hybrid, offload=offload, recompute=recompute)


def _unknown_items(arguments: Section, items: list[str]) -> None:
    for item in items:
        if item.upper() not in STAGES and item not in ("offload", "auto_wrap"):
            arguments.add(
                "fsdp-option",
                "error",
                f"fsdp names {shown(item)}: the Trainer stops",
                "fsdp",
                allowed="true, full_shard, shard_grad_op, offload, auto_wrap",
            )


def _argument_reshard(arguments: Section, config: Section, value: Any) -> tuple[int | None, bool]:
    word = str(value).upper()
    if word in STAGES and not word.startswith("HYBRID") and word != "NO_SHARD":
        return STAGES[word], False
    if word in STAGES:
        arguments.add(
            "fsdp-version-spelling",
            "error",
            f"{value} exists in FSDP version 1 only: the Trainer stops",
            "fsdp",
            hint="shard inside nodes with accelerate's parallelism_config",
        )
        return STAGES[word], word.startswith("HYBRID")
    reshard = config.truth("reshard_after_forward", True)
    return (None if reshard is None else 3 if reshard else 2), False
