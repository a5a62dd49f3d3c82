"""Problems in the words of the page: labels and units of the form, and links that ask again with one change."""

from __future__ import annotations

import asyncio
import html
import re
from pathlib import Path
from urllib.parse import urlencode

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra api")

from planner.errors import InfeasibleError
from planner_api.page.form import Form, as_form
from planner_api.page.telling import Told, told
from planner_api.problems import of_planner_error
from tests.api.conftest import in_process

BASE = {"model": "8b", "gpu": "h100", "gpus": "8"}
OF_THE_API = re.compile(r"/v1/|/(cluster|job)/|(cluster|job)\.|POST|Input should|openapi|--\w")


def asked(**changed: str) -> Form:
    return Form.of({**BASE, **changed})


def links(told: Told) -> dict[str, str]:
    """Words -> address of every link."""
    sentences = (told.allowed, told.hint, *told.changes)
    return {piece.text: piece.address for sentence in sentences for piece in sentence if piece.address}


def test_what_would_help_asks_again() -> None:
    """Each change that the form has a field for is a link that keeps the rest; others are said in plain words."""
    question = asked(model="405b", seq_len="4096", pins="tp=7, pp=2", base="a" * 64)
    relaxations = [
        "use more GPUs: a plan fits on 32 (4 nodes) with --gpus 32",
        "give every node more memory: a plan fits with --host-memory-gib 8192",
        "leave tp open: a plan fits without the pin tp=7",
        "use FSDP: a plan fits with --backend fsdp",
        "use shorter sequences: a plan fits with --seq-len 2048",
        "use more GPUs and a larger batch: a plan fits with --gpus 64 --global-batch 128",
    ]
    miss = {"where": "gpu", "needed_bytes": 8e10, "limit_bytes": 4e10, "strategy": {"tp": 8, "zero_stage": 1}}
    details = {
        "nearest": {"megatron": miss},
        "reasons": {"megatron": {"a": "not quoted"}, "fsdp": {"b": "FSDP needs more"}},
        "relaxations": relaxations,
    }
    shown = told(of_planner_error(InfeasibleError("nothing", details=details, hint=relaxations[0])), question)
    assert shown.hint == ()
    assert shown.near == (
        "megatron: nearest miss needs 74.5 GiB of 37.3 GiB on a GPU (tp=8 zero_stage=1)",
        "fsdp: FSDP needs more",
    )
    assert ["".join(piece.text for piece in change) for change in shown.changes] == [
        "use more GPUs: a plan fits with 32 GPUs (4 nodes)",
        "give every node more memory: a plan fits with 8,192 GiB of host memory a node",
        "leave tp open: a plan fits without the pin tp=7",
        "use FSDP: a plan fits with fsdp",
        "use shorter sequences: a plan fits with a sequence length of 2,048 tokens",
        "use more GPUs and a larger batch: a plan fits with 64 GPUs and a batch of 128",
    ]
    assert links(shown) == {
        "32 GPUs": question.address(gpus="32"),
        "leave tp open": question.address(pins="pp=2"),
        "fsdp": question.address(backend="fsdp"),
        "a sequence length of 2,048 tokens": question.address(seq_len="2048"),
        "64 GPUs and a batch of 128": question.address(gpus="64", global_batch="128"),
    }


WRONG = [
    ({"gpus": "12"}, "12 GPUs do not fill nodes of 8", "8 GPUs", {"gpus": "8"}),
    ({"gpus": "-3"}, "Number of GPUs: this must be greater than 0", "", {}),
    ({"memory_margin": "100"}, "GPU memory kept free: this must be at most 95 percent", "", {}),
    ({"memory_margin": "-1", "price": "-1"}, "(and 1 more)", "", {}),
    ({"global_batch": "0"}, "Global batch: this must be at least 1<", "", {}),
    ({"seq_len": "0"}, "Sequence length: this must be at least 1", "", {}),
    ({"model": "llama-3.1-70bb"}, "did you mean", "llama-3.1-70b", {"model": "llama-3.1-70b"}),
    ({"model": "nonsense"}, "the field “Model” lists all names", "", {}),
    ({"model": "qwen"}, "fits several models", "qwen3-8b", {"model": "qwen3-8b"}),
    ({"gpu": "h1000"}, "the field “GPU” lists all names", "h100-sxm-80gb", {"gpu": "h100-sxm-80gb"}),
    ({"precision": "nvfp4"}, "no nvfp4 matrix units", "bf16", {"precision": "bf16"}),
    ({"objective": "x"}, "allowed values for “Find the plan with”", "the shortest step", {"objective": ""}),
    ({"backend": "megatro"}, "did you mean", "megatron", {"backend": "megatron"}),
    ({"global_batch": "4x"}, "for example", "a batch of 1,024", {"global_batch": "1024"}),
    ({"pins": "pp=2, tpp=4"}, "did you mean", "tp", {"pins": "pp=2, tp=4"}),
    ({"pins": "tp=x, pp=2"}, "for example", "tp=8", {"pins": "pp=2, tp=8"}),
]


def test_what_is_wrong_speaks_of_the_form(tmp_path: Path) -> None:
    """Labels, units, and links that correct it and keep the rest."""

    async def check() -> None:
        async with in_process(tmp_path, workers=0) as (client, _):
            for changed, said, link, correction in WRONG:
                answer = await client.get("/?" + urlencode({**BASE, **changed}))
                assert answer.status_code == 422, changed
                section = answer.text.partition('<section class="problem"')[2].partition("</section>")[0]
                text = html.unescape(section)
                assert said in text, (changed, text)
                assert not OF_THE_API.search(re.sub('"[^"]*"', "", text)), text
                if link:
                    wanted = Form.of({**BASE, **changed, **correction}).address()
                    assert f'<a href="{wanted}">{link}</a>' in text, (changed, text)

    asyncio.run(check())


def test_first_use_is_no_error(tmp_path: Path) -> None:
    """While the question is not whole, the page says what it needs by the labels of its fields."""
    cases: list[tuple[dict[str, str], str]] = [
        ({"model": "8b"}, "Fill in “GPU” and “Number of GPUs” to get a plan."),
        ({"model": "8b", "gpu": "h100"}, "Fill in “Number of GPUs” to get a plan."),
        ({"config": "layers: 2", "gpus": "8"}, "Fill in “GPU” to get a plan."),
        ({}, ""),
    ]

    async def check() -> None:
        async with in_process(tmp_path, workers=0) as (client, _):
            for given, missing in cases:
                text = (await client.get("/?" + urlencode(given))).text
                assert "Begin with one of these" in text
                assert "problem" not in text
                assert re.findall('<p class="missing">(.*?)</p>', text) == ([missing] if missing else [])

    asyncio.run(check())


def test_machines_by_their_nodes_have_a_number_of_gpus() -> None:
    """A question of the API that names nodes is asked again with the GPUs that they hold."""
    body = {"model": "8b", "cluster": {"gpu": "h100", "nodes": 3}}
    assert as_form(body)["gpus"] == "24"
    assert as_form({**body, "cluster": {"gpu": "h100", "nodes": 3, "gpus_per_node": 4}})["gpus"] == "12"
    assert as_form({**body, "cluster": {"gpu": "nonsense", "nodes": 3}})["gpus"] == ""


def test_hostile_words_are_no_fault() -> None:
    """What somebody writes may look like a change."""
    for text in (
        "job.memory_margin = x",
        "cluster.gpus = ²³",
        "cluster.gpus = " + "9" * 5000,
        "pins.tp = 1, backend = y",
    ):
        shown = told(of_planner_error(InfeasibleError(text, hint=text)), asked())
        assert shown.detail
