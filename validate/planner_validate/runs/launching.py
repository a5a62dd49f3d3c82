"""Starts the processes of a run through torchrun, watches them, and ends every one of them whatever happens.

What went wrong is told rank by rank with the first cause first: a rank that was killed, ran out of memory or hangs
makes all others fail in their next collective, and these failures say nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from pydantic import ValidationError

import planner
import planner_validate
from planner.errors import InputError
from planner.specs.validation import FailureKind, RankFailure, RankResult, RunConfig
from planner_validate.runs import keeper
from planner_validate.runs.options import Progress

POLL_S = 0.25
START_S = 180.0
"""Least patience until every rank has said something: importing torch takes its time on a cold disk."""
BEYOND_S = 5.0
"""What the watchdog waits longer than a collective, so that the ranks can tell themselves what they waited for."""
GATHER_S = 8.0
"""From the first failure of a rank to the end of the others, which may have something to say, too."""
END_S = 30.0
"""From the last result to the end of the program."""
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end."""
TAIL_BYTES = 20_000
TAIL_LINES = 30
SUMMARY_LINES = 2_000
"""Of torchrun's output, which has some ten lines for every rank that failed."""
_START = "start"

End = Literal["finished", "failed", "stalled", "interrupted"]


@dataclass(frozen=True)
class Ended:
    """How a watched program ended."""

    how: End
    code: int
    """Its exit code, 128 + number after a signal."""
    output: str
    """Last lines of what it printed."""
    states: Mapping[int, str] = field(default_factory=dict)
    """Process state (R, S, D, T) of the ranks that were alive when the program was given up."""
    pids: Mapping[int, int] = field(default_factory=dict)
    """Of the ranks that were seen to start."""
    out_of_host_memory: bool = False
    """The kernel killed processes of this machine for want of memory meanwhile."""


@dataclass(frozen=True)
class Launched:
    """What a run left behind."""

    results: tuple[RankResult, ...]
    """Of the ranks that finished, by rank."""
    failures: tuple[RankFailure, ...]
    """The first cause first."""
    how: End
    partial: tuple[RankResult, ...] = ()
    """What the other ranks had measured until the end."""
    output: str = ""


@dataclass(frozen=True)
class Folder:
    """The files of one run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "run.json"

    @property
    def results(self) -> Path:
        """``rank-R.json``, ``rank-R.failure.json`` and ``rank-R.phase``."""
        return self.root / "results"

    @property
    def logs(self) -> Path:
        """What each rank printed, as torchrun lays it out."""
        return self.root / "logs"

    @property
    def scratch(self) -> Path:
        """Temporary folder of the processes."""
        return self.root / "tmp"

    @property
    def output(self) -> Path:
        """What the launcher printed."""
        return self.root / "output.log"


Command = Callable[[Folder, int], Sequence[str]]
"""The program that starts so many processes for a folder."""


WORKER = ("-m", "planner_validate.trainer.worker")


def torchrun(folder: Folder, processes: int, program: Sequence[str] = WORKER) -> list[str]:
    """torchrun on this machine alone, meeting on the loopback at a free port."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
        *(f"--nproc-per-node={processes}", "--local-addr=127.0.0.1", "--max-restarts=0"),
        *("--log-dir", str(folder.logs), "--redirects=3"),
        *program,
        *("--config", str(folder.config), "--out", str(folder.results)),
    ]


@contextlib.contextmanager
def private_folder() -> Iterator[Folder]:
    """A folder of this run alone, removed afterwards."""
    with contextlib.ExitStack() as stack:
        try:
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="planner-validate-", ignore_cleanup_errors=True)
            )
            folder = Folder(Path(name))
            folder.results.mkdir()
            folder.logs.mkdir()
            folder.scratch.mkdir()
        except OSError as problem:
            raise _no_folder(problem) from problem
        yield folder


def _no_folder(problem: OSError) -> InputError:
    return InputError(
        f"the files of the run cannot be written: {problem.strerror or problem}",
        where="temporary folder",
        got=tempfile.gettempdir() if tempfile.tempdir or os.environ.get("TMPDIR") else None,
        hint="free some space, or name another folder with TMPDIR",
    )


def launch(
    config: RunConfig, processes: int, progress: Progress | None = None, *, command: Command = torchrun
) -> Launched:
    """Run the plan in ``processes`` processes of this machine and gather what they measured and why they failed."""
    with private_folder() as folder:
        try:
            folder.config.write_text(config.model_dump_json(), encoding="utf-8")
        except OSError as problem:
            raise _no_folder(problem) from problem
        steps = {"warm-up step": config.warmup_steps, "step": config.measured_steps}
        ended = supervise(
            command(folder, processes),
            folder,
            ranks=processes,
            timeout_s=config.timeout_s,
            environment=surroundings(config.threads, config.device),
            progress=progress,
            steps=steps,
        )
        results, told = read_results(folder.results)
        failures = explained(folder, processes, ended, results, told, config.timeout_s)
        partial = read_partial(folder.results, {result.rank for result in results})
        return Launched(tuple(results), failures, ended.how, partial, ended.output)


_INHERITED = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_.*|ROLE_.*|PET_.*)"
)
"""What an outer launcher (a job, another torchrun) says about its own processes."""


def surroundings(threads: int, device: str) -> dict[str, str]:
    """The environment of a run on this machine."""
    kept = {name: value for name, value in os.environ.items() if not _INHERITED.fullmatch(name)}
    kept |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    kept["PYTHONPATH"] = os.pathsep.join([*_import_folders(), *filter(None, [kept.get("PYTHONPATH", "")])])
    if device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:
            # A host name that resolves to nothing reachable would end the run before it begins.
            kept.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return kept


def _import_folders() -> list[str]:
    """Where the processes find the planner, if it is not installed."""
    packages = (planner.__file__, planner_validate.__file__)
    folders = dict.fromkeys(str(Path(str(file)).resolve().parents[1]) for file in packages)
    # Installed packages are found anyway, and would hide the standard library from there.
    return [folder for folder in folders if Path(folder).name not in ("site-packages", "dist-packages")]


def supervise(
    command: Sequence[str],
    folder: Folder,
    *,
    ranks: int,
    timeout_s: float,
    environment: Mapping[str, str],
    progress: Progress | None = None,
    steps: Mapping[str, int] | None = None,
    phases: bool = True,
) -> Ended:
    """Run a program and everything it starts until it ends, fails, stalls for ``timeout_s`` or somebody interrupts.

    Progress is a new phase in ``rank-R.phase``, or (without ``phases``) new output.  No process of it is left when this
    returns; where this process is killed instead, the keeper ends the program."""
    mark = uuid.uuid4().hex
    killed_before = _kernel_kills()
    with requests_to_end() as asked, _output(folder.output) as output:
        process = subprocess.Popen(  # noqa: S603 - our own script and the launcher
            [sys.executable, "-I", str(keeper.__file__), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder.root,
            # torch leaves caches in the temporary folder; here they go with the run.
            env={**environment, keeper.MARK: mark, keeper.FOLDER: str(folder.root), "TMPDIR": str(folder.scratch)},
            # Ctrl-C in the terminal reaches this process only, which ends the others in order.
            start_new_session=True,
        )
        watch = _Watch(folder, mark, ranks, timeout_s, progress, steps or {}, phases=phases)
        try:
            how = _wait(process, watch, asked)
            alive = process.poll() is None
            states = {rank: worker.state for rank, worker in _workers(mark).items()} if alive else {}
        finally:
            code = _end(process, mark)
    how = "interrupted" if asked else how
    more_kills = killed_before is not None and (_kernel_kills() or 0) > killed_before
    return Ended(how, code, tail(folder.output), states, watch.pids, more_kills)


def _workers(mark: str) -> dict[int, keeper.Marked]:
    """Living workers by rank: the oldest process of each, for it may have started others."""
    found: dict[int, keeper.Marked] = {}
    for process in keeper.marked(mark):
        if process.rank is not None and process.pid < found.get(process.rank, process).pid + 1:
            found[process.rank] = process
    return found


@contextlib.contextmanager
def _output(path: Path) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as problem:
        raise _no_folder(problem) from problem
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def requests_to_end() -> Iterator[list[int]]:
    """Collects requests to end instead of dying of them; only the main thread is asked."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # What is ignored stays ignored: nohup and shells in the background want it so.
    heard = [number for number in REQUESTS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], watch: _Watch, asked: Sequence[int]) -> End:
    while process.poll() is None:
        if asked:
            return "interrupted"
        given_up = watch.look()
        if given_up is not None:
            return given_up
        time.sleep(POLL_S)
    return "finished" if process.returncode == 0 else "failed"


def _end(process: subprocess.Popen[bytes], mark: str) -> int:
    """Ask the keeper to end, wait for it, and look again for what it may have missed (if it was killed itself)."""
    ended_already = process.poll()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(keeper.GRACE_S + 15.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    keeper.end_all(mark, grace_s=0.0)
    code = process.returncode if ended_already is None else ended_already
    return code if code >= 0 else 128 - code


def _kernel_kills() -> int | None:
    """Processes that the kernel has killed for want of memory so far; None where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


class _Watch:
    """Looks at the files of a run: has anything moved, has a rank failed, are all done?"""

    def __init__(
        self,
        folder: Folder,
        mark: str,
        ranks: int,
        timeout_s: float,
        progress: Progress | None,
        steps: Mapping[str, int],
        *,
        phases: bool,
    ) -> None:
        self.pids: dict[int, int] = {}
        self._mark = mark
        self._folder, self._ranks, self._progress, self._steps = folder, ranks, progress, steps
        self._timeout_s, self._phases = timeout_s, phases
        self._seen: dict[int, str] = {}
        self._size = 0
        self._moved = time.monotonic()
        self._failed: float | None = None
        self._done: float | None = None

    def look(self) -> End | None:
        """Why the run is to be given up now, if it is."""
        now = time.monotonic()
        if len(self.pids) < self._ranks and not self._seen.get(0, "").startswith("step"):
            # Only while the run starts: looking at every process would disturb what is measured.
            self.pids |= {rank: worker.pid for rank, worker in _workers(self._mark).items()}
        if self._news():
            self._moved = now
        if self._failed is None and self._some_failed():
            self._failed = now
        if self._failed is not None and now - self._failed > GATHER_S:
            return "failed"
        if self._phases and self._done is None and self._all_done():
            self._done = now
        if self._done is not None:
            return "finished" if now - self._done > END_S else None
        started = len(self._seen) >= self._ranks or not self._phases
        patience = self._timeout_s + BEYOND_S if started else max(START_S, self._timeout_s)
        return "stalled" if now - self._moved > patience else None

    def _some_failed(self) -> bool:
        """A rank has said so, or the launcher ends the others (and would wait half a minute for a deaf one)."""
        return any(self._folder.results.glob("rank-*.failure.json")) or bool(closed_pids(tail(self._folder.output)))

    def _all_done(self) -> bool:
        return all((self._folder.results / f"rank-{rank}.json").exists() for rank in range(self._ranks))

    def _news(self) -> bool:
        if not self._phases:
            return self._grown()
        fresh = {rank: phase for rank, phase in read_phases(self._folder.results).items() if rank < self._ranks}
        if fresh == self._seen:
            return False
        first = fresh.get(0)
        if self._progress is not None and first is not None and first != self._seen.get(0):
            self._progress(self._with_total(first))
        self._seen = fresh
        return True

    def _with_total(self, phase: str) -> str:
        """``step 4 of 5``."""
        words, _, number = phase.rpartition(" ")
        return f"{phase} of {self._steps[words]}" if words in self._steps and number.isdecimal() else phase

    def _grown(self) -> bool:
        size = 0
        for path in (self._folder.output, *self._folder.logs.rglob("*.log")):
            with contextlib.suppress(OSError):
                size += path.stat().st_size
        grown = size != self._size
        self._size = size
        return grown


def read_phases(folder: Path) -> dict[int, str]:
    """What every rank last said it was doing."""
    phases = {}
    for path in folder.glob("rank-*.phase"):
        with contextlib.suppress(OSError, ValueError):
            phases[int(path.stem.removeprefix("rank-"))] = path.read_text(encoding="utf-8").strip()[:200]
    # An empty file is one that is being written.
    return {rank: phase for rank, phase in phases.items() if phase}


def read_results(folder: Path) -> tuple[list[RankResult], list[RankFailure]]:
    """What the ranks wrote, by rank; a file that cannot be read is a failure of its rank."""
    results: list[RankResult] = []
    failures: list[tuple[float, RankFailure]] = []
    for path in folder.glob("rank-*.json"):
        number = path.name.removeprefix("rank-").split(".")[0]
        rank = int(number) if number.isdecimal() else None
        try:
            text, written = path.read_text(encoding="utf-8"), path.stat().st_mtime
            if path.name.endswith(".failure.json"):
                failures.append((written, RankFailure.model_validate_json(text)))
            else:
                results.append(RankResult.model_validate_json(text))
        except (OSError, ValueError) as problem:
            failures.append((time.time(), _unreadable(path, rank, problem)))
    failed = [failure for _, failure in sorted(failures, key=lambda pair: pair[0])]
    failed += [result.failure for result in results if result.failure is not None and result.failure not in failed]
    return sorted((each for each in results if each.failure is None), key=lambda each: each.rank), failed


def read_partial(folder: Path, finished: Container[int]) -> tuple[RankResult, ...]:
    """What ranks that did not finish had measured; files that were not written whole say nothing."""
    found = []
    for path in folder.glob("rank-*.partial"):
        with contextlib.suppress(OSError, ValueError):
            found.append(RankResult.model_validate_json(path.read_text(encoding="utf-8")))
    return tuple(sorted((each for each in found if each.rank not in finished), key=lambda each: each.rank))


def _unreadable(path: Path, rank: int | None, problem: Exception) -> RankFailure:
    what = "is not what this version writes" if isinstance(problem, ValidationError) else "cannot be read"
    first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
    return RankFailure(rank=rank, kind="error", phase="end", message=f"{path.name} {what}: {first}"[:500])


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Last lines of a file; empty where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def explained(
    folder: Folder,
    ranks: int,
    ended: Ended,
    results: Sequence[RankResult],
    told: Sequence[RankFailure],
    timeout_s: float,
) -> tuple[RankFailure, ...]:
    """Why ranks did not finish: what they told themselves, and what can be said of those that told nothing."""
    finished = {result.rank for result in results}
    if not told and len(finished) == ranks:
        return ()
    phases = read_phases(folder.results)
    if ended.how == "interrupted":
        return tuple(_interrupted(rank, phases) for rank in range(ranks) if rank not in finished)
    alone = _ended_by_themselves(folder, ranks, ended)
    # Ranks that only waited point at those that did not come.
    waited = ended.how == "stalled" or (bool(told) and all(failure.kind == "timeout" for failure in told))
    blank = []
    for rank in sorted(set(range(ranks)) - {failure.rank for failure in told} - finished):
        phase = phases.get(rank, _START)
        if rank in alone:
            blank.append(_ended_alone(folder, rank, phase, ended, alone[rank]))
        elif waited:
            blank.append(_did_not_come(folder, rank, phase, ended, timeout_s))
    if not blank and not told:
        blank = [_nothing_said(ended)]
    return tuple(sorted((*told, *blank), key=_precedence))


def _interrupted(rank: int, phases: Mapping[int, str]) -> RankFailure:
    return RankFailure(
        rank=rank, kind="interrupted", phase=phases.get(rank, _START), message="ended because the run was interrupted"
    )


def _nothing_said(ended: Ended) -> RankFailure:
    return RankFailure(
        kind=kind_of_text(ended.output) or "error",
        phase=_START,
        message=f"the run ended with exit code {ended.code} and no process told why",
        details=ended.output,
    )


_CODES = re.compile(r"^\s*rank\s*:\s*(\d+)\b[^\n]*\n\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)", re.MULTILINE)
_CLOSED = re.compile(r"Sending process (\d+) closing signal")


def closed_pids(output: str) -> frozenset[int]:
    """Processes that torchrun ended because of another one."""
    return frozenset(int(pid) for pid in _CLOSED.findall(output))


def exit_codes(output: str) -> dict[int, int]:
    """Exit codes by rank of the processes that ended by themselves, from torchrun's summary; -9: by signal 9."""
    closed = closed_pids(output)
    return {int(rank): int(code) for rank, code, pid in _CODES.findall(output) if int(pid) not in closed}


def _ended_by_themselves(folder: Folder, ranks: int, ended: Ended) -> dict[int, int | None]:
    """Exit codes of the ranks that ended without the launcher's doing; None where it had no time to say."""
    output = tail(folder.output, lines=SUMMARY_LINES)
    codes: dict[int, int | None] = dict(exit_codes(output))
    closed = closed_pids(output)
    if closed and not codes:
        gone = [rank for rank in range(ranks) if rank not in ended.states and ended.pids.get(rank) not in closed]
        # A process that was never seen may be one that the launcher closed: only so many were not.
        seen = [rank for rank in gone if rank in ended.pids]
        codes = dict.fromkeys(gone if len(gone) <= ranks - len(closed) else seen)
    return codes


GONE = "its process is gone"
_STATES = {
    "T": "it was stopped by a signal",
    "t": "it was stopped by a debugger",
    "D": "it waits for a disk or a device",
    "R": "it computes (a step that takes longer needs a larger --timeout)",
    "S": "it waits",
}


def _did_not_come(folder: Folder, rank: int, phase: str, ended: Ended, timeout_s: float) -> RankFailure:
    """A rank that moved no more, or that the others waited for."""
    state = ended.states.get(rank)
    doing = GONE if state is None else _STATES.get(state, f"its process is in state {state}")
    message = f"no progress for {timeout_s:.0f} s: {doing}"
    return RankFailure(rank=rank, kind="timeout", phase=phase, message=message, details=rank_log(folder, rank))


def _ended_alone(folder: Folder, rank: int, phase: str, ended: Ended, code: int | None) -> RankFailure:
    """A rank whose process ended without a word."""
    log = rank_log(folder, rank)
    kind, message = _of_code(code, ended, log)
    return RankFailure(rank=rank, kind=kind, phase=phase, message=message, details=log)


def _of_code(code: int | None, ended: Ended, log: str) -> tuple[FailureKind, str]:
    found = kind_of_text(log)
    if code is None:
        return found or "killed", "its process ended without a word" + _last_word(log)
    if code >= 0:
        return found or "error", f"ended with exit code {code}" + _last_word(log)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if code == -signal.SIGKILL and ended.out_of_host_memory:
        return "out-of-memory", f"the kernel ended it ({name}): the machine ran out of host memory"
    if found is not None:
        return found, f"ended by {name}" + _last_word(log)
    if code == -signal.SIGBUS:
        return "out-of-memory", f"ended by {name}: shared memory (/dev/shm) or the disk behind a mapped file is full"
    if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return "killed", f"killed from outside ({name})"
    return "error", f"crashed ({name})" + _last_word(log)


def _last_word(log: str) -> str:
    """The last line of a log behind a colon: of a traceback that is the error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|cannot allocate memory|bad_alloc|\bMemoryError\b", re.IGNORECASE
)


def kind_of_text(text: str) -> FailureKind | None:
    """What printed text says about the cause, where it is plain."""
    return "out-of-memory" if _OUT_OF_MEMORY.search(text) else None


def rank_log(folder: Folder, rank: int) -> str:
    """Last lines that a rank printed, errors before results."""
    for name in ("stderr.log", "stdout.log"):
        for path in sorted(folder.logs.glob(f"**/{rank}/{name}")):
            text = tail(path)
            if text.strip():
                return text
    return ""


_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|connection was likely closed|"
    r"remote process exited|network error|socket (closed|timeout)|failed to recv|NCCL communicator was aborted|"
    r"Connection reset|no such process|store .*(closed|timed out)",
    re.IGNORECASE,
)
_ORDER: tuple[FailureKind, ...] = ("out-of-memory", "mismatch", "killed", "error", "timeout", "interrupted")


def _precedence(failure: RankFailure) -> tuple[bool, int, int]:
    """Causes before consequences; stopped and vanished ranks before those that waited for them."""
    lost = failure.kind == "error" and _CONSEQUENCE.search(f"{failure.message}\n{failure.details}") is not None
    guilty = any(words in failure.message for words in (_STATES["T"], _STATES["t"], GONE))
    waits = 0 if guilty else 1 if any(words in failure.message for words in (_STATES["D"], _STATES["R"])) else 2
    return lost, _ORDER.index(failure.kind), waits


def config_of(path: Path) -> RunConfig | None:
    """The run.json of a folder, if it has one of this version."""
    try:
        return RunConfig.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
