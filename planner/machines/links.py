"""Islands of a machine: which of its GPUs are joined by NVLink, XGMI or a near PCIe bridge, and which groups fit them.

A tensor-parallel group inside an island is fast, one across islands is not; ranks are taken in order of GPU index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CLOSENESS = {"X": 0, "PIX": 2, "PSB": 3, "PXB": 3, "PHB": 4, "NODE": 5, "SOC": 6, "SYS": 6, "PCIE": 6}
"""Path between two GPUs, nearest first, as ``nvidia-smi topo -m`` explains them; SOC is what drivers before 387 print
for SYS.  NVLink and XGMI come before all of them."""

NVLINK_BYTES_PER_S = {"nvlink2": 25e9, "nvlink3": 25e9, "nvlink4": 25e9, "nvlink5": 50e9}
"""One link of a generation, one direction."""

Matrix = Sequence[Sequence[str]]


def is_fast(link: str) -> bool:
    """Whether a link is the accelerators' own (NVLink, XGMI) instead of PCIe."""
    return link.startswith(("NV", "XGMI"))


def closeness(link: str) -> int:
    """0 for the same GPU, larger for longer paths; unknown kinds are the farthest."""
    return 1 if is_fast(link) else _CLOSENESS.get(link, 9)


def _bonded(link: str) -> int:
    return int(link[2:]) if link.startswith("NV") and link[2:].isdigit() else 0


def nvlinks(matrix: Matrix) -> tuple[int, ...]:
    """The distinct numbers of bonded NVLinks between pairs, 0 for pairs without, sorted."""
    return tuple(sorted({_bonded(link) for row, links in enumerate(matrix) for link in links[row + 1 :]}))


def nvlinks_of_each(matrix: Matrix, built: int) -> tuple[int, ...]:
    """NVLinks that each GPU uses, of ``built`` ones.

    Behind a switch all of them lead to every other GPU; without one each leads to one GPU, and their sum counts."""
    rows = [[_bonded(link) for link in row] for row in matrix]
    return tuple(sum(row) if sum(row) <= built else max(row) for row in rows)


def components(matrix: Matrix, joined: Callable[[str], bool]) -> tuple[tuple[int, ...], ...]:
    """Groups of GPUs that links of this kind connect, directly or over others; every GPU is in one."""
    left = set(range(len(matrix)))
    groups = []
    while left:
        group, edge = set(), [min(left)]
        while edge:
            member = edge.pop()
            group.add(member)
            left.discard(member)
            edge += [other for other in left if joined(matrix[member][other])]
        groups.append(tuple(sorted(group)))
    return tuple(groups)


def islands(matrix: Matrix) -> tuple[tuple[int, ...], ...]:
    """Groups with the fast links, or without any, groups that are nearer than the longest path of the machine."""
    if any(is_fast(link) for row in matrix for link in row):
        return components(matrix, is_fast)
    farthest = max((closeness(link) for row in matrix for link in row), default=0)
    nearest = min((closeness(link) for row, links in enumerate(matrix) for link in links[row + 1 :]), default=0)
    if nearest == farthest:
        return (tuple(range(len(matrix))),)
    return components(matrix, lambda link: closeness(link) < farthest)


def full_groups(matrix: Matrix) -> tuple[tuple[int, ...], ...]:
    """The largest groups of neighbours, all of one size, whose members are all linked to each other; single GPUs at
    least."""
    count = len(matrix)
    for size in (size for size in range(count, 1, -1) if count % size == 0):
        blocks = [range(start, start + size) for start in range(0, count, size)]
        if all(is_fast(matrix[a][b]) for block in blocks for a in block for b in block if a != b):
            return tuple(tuple(block) for block in blocks)
    return tuple((index,) for index in range(count))
