"""The form of the page: what stands in its address, as a question, and as values to show again.

An address holds the whole question, so that a link to the page reproduces what was seen."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import urlencode

from pydantic import ValidationError

from planner.backends import BACKENDS
from planner.catalog import default_system
from planner.errors import InputError, PlannerError
from planner.service.inputs import parse_mapping
from planner.specs.job import Precision
from planner_api.problems import FieldProblem, ProblemError, of_validation
from planner_api.schemas.questions import PlanBody

FIELDS = (
    *("model", "config", "gpu", "gpus", "gpus_per_node", "nic_gbps", "price", "seq_len", "global_batch", "precision"),
    *("objective", "backend", "memory_margin", "pins", "base"),
)
"""In the order of the form; ``base`` is the plan that the answer is compared with."""
LONGEST = 20_000
"""Characters of a field: a pasted configuration is the longest."""
_PLACES = {
    "model": "/model",
    "config": "/model",
    "gpu": "/cluster/gpu",
    "gpus": "/cluster/gpus",
    "gpus_per_node": "/cluster/gpus_per_node",
    "nic_gbps": "/cluster/nic_gbps",
    "price": "/cluster/price_usd_per_gpu_hour",
    "seq_len": "/job/seq_len",
    "global_batch": "/job/global_batch",
    "precision": "/job/precision",
    "objective": "/job/objective",
    "memory_margin": "/job/memory_margin",
    "backend": "/backend",
    "pins": "/pins",
}
LABELS = {
    "model": "Model", "config": "A model of your own", "gpu": "GPU", "gpus": "Number of GPUs",
    "gpus_per_node": "GPUs of a node", "nic_gbps": "Rate of a NIC", "price": "Price of a GPU-hour",
    "seq_len": "Sequence length", "global_batch": "Global batch", "precision": "Precision",
    "objective": "Find the plan with", "memory_margin": "GPU memory kept free", "backend": "Framework", "pins": "Keep",
}  # fmt: skip
UNITS = {"nic_gbps": " Gbit/s", "price": " US dollars", "memory_margin": " %"}
"""What stands behind a value of a field."""
USUAL = {"objective": "throughput", "backend": "auto"}
"""What the empty choice of a field means to the API."""
CHOICES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "backend": (("", "compare the usual ones"), *((name, name) for name in BACKENDS)),
    "precision": (("", "usual"), *((name, name) for name in get_args(Precision))),
    "objective": (("", "the shortest step"), ("memory", "the least memory"), ("cost", "the lowest cost per token")),
}
"""Field -> its values and how they are called."""
_HUGGING_FACE = ("model_type", "architectures", "num_hidden_layers", "n_layer", "dim")
"""One of these stands in every config.json; dimensions have ``layers``."""


def _short(text: str) -> str:
    """A pasted JSON without its blanks, so that links stay short; never much more than a field may have."""
    if text.startswith("{"):
        try:
            text = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        except (ValueError, RecursionError):
            return text[: LONGEST + 1]
    return text[: LONGEST + 1]


@dataclass(frozen=True)
class Form:
    """Values as they stand in the address, without the empty ones."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Form:
        given = {name: _short(query[name].strip()) for name in FIELDS if query.get(name, "").strip()}
        return cls(given)

    @property
    def asks(self) -> bool:
        """Whether there is enough to ask."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """Labels of the fields that every question needs and that are empty."""
        needed = ("gpu", "gpus") if self["config"] else ("model", "gpu", "gpus")
        return [LABELS[name] for name in needed if not self[name]]

    @property
    def too_long(self) -> bool:
        return len(self["config"]) > LONGEST

    def __getitem__(self, name: str) -> str:
        return self.values.get(name, "")

    def address(self, **changed: str) -> str:
        """A link to the page with these values."""
        return "/?" + urlencode({name: value for name, value in {**self.values, **changed}.items() if value})

    @property
    def pinned(self) -> dict[str, str]:
        """The values to keep, as far as they can be read: name -> value."""
        parts = [part.partition("=") for part in self["pins"].split(",")]
        return {name.strip().replace("-", "_"): value.strip() for name, equals, value in parts if equals}

    def pins_with(self, name: str, value: str | None) -> str:
        """The field ``pins`` with this value of one of them, or without it."""
        kept = {pin: held for pin, held in self.pinned.items() if pin != name}
        return ", ".join(f"{pin}={held}" for pin, held in (kept if value is None else {**kept, name: value}).items())

    def pins_renamed(self, name: str, known: Collection[str]) -> str:
        """The field ``pins`` with this name in place of one that is not ``known``."""
        renamed = {pin if pin in known else name: held for pin, held in self.pinned.items()}
        return ", ".join(f"{pin}={held}" for pin, held in renamed.items())

    def question(self) -> PlanBody:
        """The question; ProblemError names fields."""
        body: dict[str, Any] = {"model": self._model(), "cluster": self._cluster(), "job": self._job()}
        if self["backend"]:
            body["backend"] = self["backend"]
        if self["pins"]:
            body["pins"] = self._pins()
        try:
            return PlanBody.model_validate_json(json.dumps(body), strict=True)
        except ValidationError as error:
            told = of_validation(error.errors(include_url=False, include_context=False, include_input=False), body)
            raise ProblemError("bad-input", told.detail, errors=told.errors, hint=told.hint) from None

    def _model(self) -> str | dict[str, Any]:
        text = self["config"]
        if not text:
            return self["model"]
        try:
            content = parse_mapping(text, "model", as_json=text.startswith("{"))
        except InputError as error:
            raise _refused("/model", f"the pasted model: {error.message}") from None
        kind = "config" if any(name in content for name in _HUGGING_FACE) else "dimensions"
        return {kind: content}

    def _cluster(self) -> dict[str, Any]:
        cluster: dict[str, Any] = {"gpu": self["gpu"]}
        for field, name, kind in (
            ("gpus", "gpus", int),
            ("gpus_per_node", "gpus_per_node", int),
            ("nic_gbps", "nic_gbps", float),
            ("price", "price_usd_per_gpu_hour", float),
        ):
            if self[field]:
                cluster[name] = _number(self[field], kind, _PLACES[field])
        return cluster

    def _job(self) -> dict[str, Any]:
        job: dict[str, Any] = {name: self[name] for name in ("precision", "objective") if self[name]}
        if self["seq_len"]:
            job["seq_len"] = _number(self["seq_len"], int, "/job/seq_len")
        if self["global_batch"]:
            batch = self["global_batch"]
            job["global_batch"] = int(batch) if re.fullmatch("[0-9]{1,9}", batch) else batch
        if self["memory_margin"]:
            job["memory_margin"] = _number(self["memory_margin"], float, "/job/memory_margin") / 100
        return job

    def _pins(self) -> dict[str, str]:
        pins: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in self["pins"].split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not name or not value:
                raise _refused("/pins", f"{part[:40]!r} is not NAME=VALUE, like tp=8")
            pins[name] = value
        return pins


def _number(text: str, kind: type[int] | type[float], place: str) -> float:
    try:
        return kind(text.replace(",", ""))
    except ValueError:
        raise _refused(place, f"{text[:40]!r} is no {'whole ' if kind is int else ''}number") from None


def _refused(place: str, detail: str) -> ProblemError:
    # The page shows it beside the field.
    return ProblemError("bad-input", detail, errors=[FieldProblem(pointer=place, detail=detail)], hint=None)


def field_of(pointer: str) -> str | None:
    """The field of the form that a pointer into the question is about."""
    found = [name for name, place in _PLACES.items() if pointer == place or pointer.startswith(place + "/")]
    return found[0] if found else None


def as_form(body: Mapping[str, Any]) -> Form:
    """The form that asks a question of the API again, as far as it has fields for it."""
    model, cluster, job = body["model"], body.get("cluster", {}), body.get("job", {})
    values: dict[str, Any] = {"backend": body.get("backend"), "base": None}
    if isinstance(model, str):
        values["model"] = model
    else:
        values["config"] = json.dumps(model.get("config") or model.get("dimensions"))
    values |= {name: cluster.get(name) for name in ("gpu", "gpus", "gpus_per_node", "nic_gbps")}
    values["gpus"] = values["gpus"] or _gpus_of_nodes(cluster)
    values["price"] = cluster.get("price_usd_per_gpu_hour")
    values |= {name: job.get(name) for name in ("seq_len", "global_batch", "precision")}
    values["objective"] = job.get("objective")
    margin = job.get("memory_margin")
    values["memory_margin"] = f"{100 * margin:g}" if margin else None
    values["pins"] = ", ".join(f"{name}={value}" for name, value in body.get("pins", {}).items())
    return Form.of({name: str(value) for name, value in values.items() if value not in (None, "", USUAL.get(name))})


def _gpus_of_nodes(cluster: Mapping[str, Any]) -> int | None:
    """GPUs of machines that were asked for by the number of their nodes."""
    nodes, per_node = cluster.get("nodes"), cluster.get("gpus_per_node")
    if nodes and not per_node and cluster.get("gpu"):
        try:
            per_node = default_system(cluster["gpu"]).gpus_per_node
        except PlannerError:
            return None
    return nodes * per_node if nodes and per_node else None
