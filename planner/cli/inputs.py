"""Options of the command line as the questions that the service takes.

Heavy modules are imported inside, so that ``planner --help`` stays fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.service import ClusterInput, JobInput


def cluster(
    gpu: str | None,
    gpus: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    nics: int | None,
    nic_gbps: float | None,
    oversubscription: float | None,
    host_memory_gib: float | None,
    price: float | None,
    file: Path | None,
) -> ClusterInput:
    """The machines as options give them."""
    from planner.service import ClusterInput

    return ClusterInput(
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        nics=nics,
        nic_gbps=nic_gbps,
        oversubscription=oversubscription,
        host_memory_gib=host_memory_gib,
        price=price,
        file=file,
    )


def job(
    seq_len: int | None,
    global_batch: str | None,
    precision: str | None,
    loss: str,
    no_flash_attention: bool,
    objective: str,
    memory_margin: float,
) -> JobInput:
    """The job as options give it."""
    from planner.service import JobInput

    return JobInput(
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        loss=loss,
        flash_attention=not no_flash_attention,
        objective=objective,
        memory_margin=memory_margin,
    )
