"""The library's errors speak of options and commands of the command line; here they are put into fields and routes.

What a framework calls its own options (``--sequence-parallel`` of Megatron-LM in a finding) stays as it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from planner.backends import BACKENDS

_FIELDS = {
    "model": "/model",
    "backend": "/backend",
    "pin": "/pins",
    "profile": "/profile",
    "top": "/top",
    "time-limit": "/time_limit_s",
    "cluster": "/cluster",
    "gpu": "/cluster/gpu",
    "gpus": "/cluster/gpus",
    "nodes": "/cluster/nodes",
    "gpus-per-node": "/cluster/gpus_per_node",
    "nics": "/cluster/nics_per_node",
    "nic-gbps": "/cluster/nic_gbps",
    "oversubscription": "/cluster/oversubscription",
    "host-memory-gib": "/cluster/host_memory_gib",
    "price": "/cluster/price_usd_per_gpu_hour",
    "seq-len": "/job/seq_len",
    "global-batch": "/job/global_batch",
    "precision": "/job/precision",
    "loss": "/job/loss",
    "memory-margin": "/job/memory_margin",
    "objective": "/job/objective",
    "launcher": "launcher",
    "format": "/format",
    "suggest": "/suggest",
    "to": "/backend",
    **{
        name: f"/strategy/{name.replace('-', '_')}"
        for name in (
            *("tp", "pp", "vpp", "cp", "ep", "etp", "zero-stage", "shard-degree", "secondary-shard-degree"),
            *("micro-batch", "sequence-parallel", "schedule", "recompute", "offload", "layers-per-stage"),
        )
    },
}
"""Option of the command line -> field of a body."""
ABOUT_MACHINES_AND_JOB = frozenset(name for name, place in _FIELDS.items() if not place.startswith("/strategy/"))
"""Options that no framework has under the same name."""
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?![\w-]|\.\w)(?:[ =](?!--)([\w:+=/,.-]*[\w+]))?")
_SEVERAL = re.compile(r"(--([a-z-]+) (?!and |or )[\w:+=/.-]+) (?=--)")
_COMMAND = re.compile(r"`planner ([a-z]+)([^`]*)`|\bplanner (estimate|suggest|check)\b([^;.,]*)")
_ROUTES = {
    "models": "/v1/catalog/models",
    "gpus": "/v1/catalog/gpus",
    "backends": "/v1/catalog/backends",
    "suggest": "POST /v1/plans",
    "estimate": "POST /v1/estimates",
    "check": "POST /v1/checks",
    "calibrate": "POST /v1/measurements",
    "validate": "`planner validate`",
}
_PHRASES = (
    ("a config.json or its folder can be given too", "the content of a config.json or dimensions can be given too"),
    ("or a config.json, or a YAML file of dimensions", "or give the content of its config.json, or its dimensions"),
    ("give the config.json of the checkpoint", "give the content of the checkpoint's config.json"),
    ("name a configuration file or its folder", "give the text of a configuration file"),
    ("name the format with format", "name it in the field format"),
    ("leave the option out", "leave the field out"),
    ("or check the file", "or check its name"),
    ("(or the machines with cluster)", "or cluster.system"),
)
_PLACES = {"model": "/model", "accelerator": "/cluster/gpu", "system": "/cluster/system", "pins": "/pins"}
_PLACES |= {"precision": "/job/precision", "backend": "/backend", **dict.fromkeys(BACKENDS, "/strategy")}
"""What the library calls a thing that is wrong -> field of a body; a framework's name is where its rules are told."""
_ROOTS = ("model.", "cluster.", "job.", "strategy.", "pins.", "measured.")


def pointers_of(where: str, files: Collection[str] = (), own: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The fields that an error of the library is about; ``own`` says where this body has a field."""
    for name in files:
        if where == name or where.startswith((f"{name}:", f"{name},")):
            return ("/files/" + name.replace("~", "~0").replace("/", "~1"),)
    if where in _PLACES:
        return (_PLACES[where],)
    if where.startswith(_ROOTS):
        inside, colon, names = where.rpartition(": ")
        return tuple("/" + (inside + colon + name).replace(": ", ".").replace(".", "/") for name in names.split(", "))
    found: list[str] = []
    for match in _OPTION.finditer(where):
        pointer = f"/pins/{match[2]}" if match[1] == "pin" and match[2] else _FIELDS.get(match[1])
        if pointer is not None:
            found.append((own or {}).get(pointer, pointer))
    return tuple(dict.fromkeys(found))


def in_fields(text: str, own: Mapping[str, str] | None = None, options: Collection[str] = _FIELDS.keys()) -> str:
    """A sentence about options as one about fields: ``--gpus 64`` becomes ``cluster.gpus = 64``; others than the given
    ``options`` stay."""

    def name_of(option: str) -> str:
        pointer = _FIELDS[option]
        return (own or {}).get(pointer, pointer).strip("/").replace("/", ".")

    def field(match: re.Match[str]) -> str:
        option, value = match[1], match[2]
        if option not in options:
            return match[0]
        if option == "pin" and value:
            return ", ".join(f"pins.{pin.replace('=', ' = ')}" for pin in value.split(","))
        # A word behind an option is its value, or goes on with the sentence.
        sign = " " if value and value.isalpha() and value not in BACKENDS else " = "
        return name_of(option) + (f"{sign}{value}" if value else "")

    def route(match: re.Match[str]) -> str:
        command, rest = (match[1], match[2]) if match[1] else (match[3], match[4])
        if command not in _ROUTES:
            return match[0]
        given = [
            f"{name_of(found[1])} = {found[2]}"
            for found in _OPTION.finditer(rest)
            if found[1] in _FIELDS and found[1] != "pin" and found[2]
        ]
        return _ROUTES[command] + (f" with {', '.join(given)}" if given else "")

    text = _COMMAND.sub(route, text)
    text = _SEVERAL.sub(lambda match: match[1] + (", " if match[2] in options else " "), text)
    text = _OPTION.sub(field, text)
    for said, meant in _PHRASES:
        text = text.replace(said, meant)
    return text


def told_in_fields(value: Any) -> Any:
    """The same for every text of a document."""
    if isinstance(value, str):
        return in_fields(value)
    if isinstance(value, dict):
        return {key: told_in_fields(item) for key, item in value.items()}
    return [told_in_fields(item) for item in value] if isinstance(value, (list, tuple)) else value
