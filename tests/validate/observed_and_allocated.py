"""Steps seen by the runner's observer and by PyTorch's own allocator: ``observed_and_allocated.py OUT CASE ...``."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path


def rise(case: str, trace: Path) -> dict[str, int]:
    """Bytes by which live memory rises in a step, observed and allocated."""
    from torch.profiler import ProfilerActivity, profile

    from planner_validate.trainer.observe import Observer
    from planner_validate.trainer.training import build
    from tests.validate.runner_cases import configuration

    trainer = build(configuration(case))
    for index in range(2):
        trainer.step(index)
    with Observer(trainer) as observer:
        before = observer.live
        trainer.step(2)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.step(3)
    profiled.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text("utf-8"))["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in events]
    start = totals[0] - events[0]["args"]["Bytes"]
    return {"observed": observer.peak - before, "allocated": max(totals) - start}


def main(out: Path, cases: list[str]) -> None:
    """Leave ``OUT/rise.json``, by case."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {case: rise(case, out / "trace.json") for case in cases}
    (out / "rise.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
