"""Stands in for a training script: joins the group it was started in, builds the plan's groups, and reduces in each.

Reads the groups as JSON (axis -> lists of ranks) from PLAN_GROUPS and prints one line of JSON a rank.  PLAN_IMPORTS
names a module that must be found as a training script would find it, without being run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import torch
import torch.distributed as dist

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CUDA_DEVICE_MAX_CONNECTIONS")


def reduced(groups: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """For every axis the members of this rank's group, as gathered in it; their sum must agree by all-reduce."""
    found = {}
    for axis, members in groups.items():
        for ranks in members:
            group = dist.new_group(ranks)
            if dist.get_rank() not in ranks:
                continue
            total = torch.tensor([dist.get_rank()])
            dist.all_reduce(total, group=group)
            gathered = [torch.zeros_like(total) for _ in ranks]
            dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=group)
            found[axis] = [int(rank) for rank in gathered]
            if int(total) != sum(found[axis]):
                raise SystemExit(f"{axis}: the sum of {found[axis]} is not {int(total)}")
    return found


def main() -> None:
    dist.init_process_group("gloo")
    module = os.environ.get("PLAN_IMPORTS", "")
    report = {
        **{name: os.environ.get(name) for name in NAMES},
        "cores": len(os.sched_getaffinity(0)),
        "groups": reduced(json.loads(os.environ["PLAN_GROUPS"])),
        "imports": bool(module) and importlib.util.find_spec(module) is not None,
        # Long lines of several ranks would be mixed on their way through srun.
        "last_arguments": sys.argv[-2:],
    }
    dist.barrier()
    # One write a line: the ranks share a pipe.
    sys.stdout.write("STARTED " + json.dumps(report) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    # Threads of gloo can outlive the interpreter and abort a run that has finished.
    os._exit(0)


if __name__ == "__main__":
    main()
