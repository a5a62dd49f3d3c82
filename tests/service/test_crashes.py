"""Nothing that was accepted is lost and nothing is made twice, whatever happens to the processes; on both databases."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra api")

from tests.postgres import postgres_server, postgres_url  # noqa: F401 - fixtures
from tests.service.processes import Member, all_ended, questions, until


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/plans.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """What a test started; ended with it, and nothing is left."""
    started: list[Member] = []
    yield started
    for member in started:
        if member.process.poll() is None:
            member.process.send_signal(signal.SIGCONT)
            member.end()
    for member in started:
        until("its processes have ended", lambda member=member: not member.left())  # type: ignore[misc]


def test_killed_and_started_again(database: str, tmp_path: Path, members: list[Member]) -> None:
    """Every accepted plan ends, tried at most twice; solvers and temporary files do not outlive the service."""
    first = Member(tmp_path, "first", database)
    members.append(first)
    plans = [first.ask(body).json()["id"] for body in questions(12)]
    until("a plan is being made", lambda: len(first.events("plan started")) > 1)
    first.kill()
    until("solvers have ended", lambda: not first.left())
    again = Member(tmp_path, "again", database)
    members.append(again)
    ended = all_ended(again, plans)
    assert Counter(job["state"] for job in ended.values()) == {"succeeded": 12}
    assert max(job["attempts"] for job in ended.values()) <= 2
    made = Counter(event["plan"] for member in members for event in member.events("plan ended"))
    assert set(made.values()) == {1}
    assert len(made) == 12


def test_a_killed_solver_is_replaced(database: str, tmp_path: Path, members: list[Member]) -> None:
    """The plan that it worked on fails and says so; asked for again it is made."""
    member = Member(tmp_path, "one", database)
    members.append(member)
    body = {"model": "deepseek-v3", "cluster": {"gpu": "h100", "gpus": 2048}, "backend": "megatron"}
    plan = member.ask(body).json()["id"]
    until("it is searched", lambda: member.client.get(f"/v1/plans/{plan}").json()["progress"] is not None)
    busiest = max((pid for pid in member.left() if pid != member.process.pid), key=_cpu_ticks)
    subprocess.run(["kill", "-KILL", str(busiest)], check=True)
    job = all_ended(member, [plan])[plan]
    assert job["state"] == "failed"
    assert "process ended" in job["problem"]["detail"]
    small = questions(1)[0]
    assert member.ask(small, wait_s=60).json()["state"] == "succeeded"
    assert member.ask(body, wait_s=60).json()["state"] in ("queued", "running", "succeeded")


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_cancelled(database: str, tmp_path: Path, members: list[Member]) -> None:
    """One that waits ends at once, one that is being made soon; asked for again both are made."""
    member = Member(tmp_path, "one", database)
    members.append(member)
    long = {"model": "deepseek-v3", "cluster": {"gpu": "h100", "gpus": 2048}, "backend": "megatron"}
    running, waiting = member.ask(long).json()["id"], member.ask(questions(1)[0]).json()["id"]
    until("it runs", lambda: member.client.get(f"/v1/plans/{running}").json()["state"] == "running")
    assert member.client.delete(f"/v1/plans/{waiting}").json()["state"] == "cancelled"
    member.client.delete(f"/v1/plans/{running}")
    assert all_ended(member, [running])[running]["state"] == "cancelled"
    assert member.ask(questions(1)[0], wait_s=60).json()["state"] == "succeeded"


def test_told_to_end(database: str, tmp_path: Path, members: list[Member]) -> None:
    """Whoever waits is answered, what runs is finished within the grace or put back, and the next start goes on."""
    first = Member(tmp_path, "first", database)
    members.append(first)
    plans = [first.ask(body).json()["id"] for body in questions(4)]
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(first.ask, questions(1, offset=10)[0], 60)
        until("it is asked", lambda: len(first.client.get("/v1/plans").json()["plans"]) == 5)
        assert first.end() == 0
        assert held.result().status_code in (200, 202)
        plans.append(held.result().json()["id"])
    again = Member(tmp_path, "again", database)
    members.append(again)
    ended = all_ended(again, plans)
    assert {job["state"] for job in ended.values()} == {"succeeded"}
    assert {job["attempts"] for job in ended.values()} == {1}


def test_one_service_a_file(tmp_path: Path, members: list[Member]) -> None:
    """A second service on the same SQLite file is refused."""
    database = f"sqlite:///{tmp_path}/plans.db"
    members.append(Member(tmp_path, "first", database))
    with pytest.raises(AssertionError, match="another service has this database open"):
        Member(tmp_path, "second", database)


def test_shared_without_double_work(postgres_url: str, tmp_path: Path, members: list[Member]) -> None:  # noqa: F811
    """Two processes that answer and two that work: each of 24 plans is made once, though both were asked for some."""
    members += [Member(tmp_path, f"api{k}", postgres_url, PLANNER_WORKERS="0") for k in range(2)]
    members += [Member(tmp_path, f"worker{k}", postgres_url, "worker", PLANNER_WORKERS="1") for k in range(2)]
    asked = [(members[k % 2], body) for k, body in enumerate(questions(24))]
    asked += [(members[(k + 1) % 2], body) for k, body in enumerate(questions(12))]
    with ThreadPoolExecutor(8) as pool:
        plans = set(pool.map(lambda one: one[0].ask(one[1]).json()["id"], asked))
    assert len(plans) == 24
    ended = all_ended(members[0], plans)
    assert {job["state"] for job in ended.values()} == {"succeeded"}
    assert {job["attempts"] for job in ended.values()} == {1}
    made = [Counter(event["plan"] for event in worker.events("plan started")) for worker in members[2:]]
    assert all(made)
    assert set((made[0] + made[1]).values()) == {1}


def test_a_lost_worker_is_replaced(postgres_url: str, tmp_path: Path, members: list[Member]) -> None:  # noqa: F811
    """Plans of a worker that sleeps are made by the other, and it changes nothing when it wakes up."""
    members += [Member(tmp_path, "api", postgres_url, PLANNER_WORKERS="0", PLANNER_LOST_AFTER_S="4")]
    lost = Member(tmp_path, "lost", postgres_url, "worker", PLANNER_WORKERS="2", PLANNER_LOST_AFTER_S="4")
    members.append(lost)
    plans = [members[0].ask(body).json()["id"] for body in questions(6)]
    until("it works", lambda: len(lost.events("plan started")) >= 2)
    lost.process.send_signal(signal.SIGSTOP)
    members.append(Member(tmp_path, "other", postgres_url, "worker", PLANNER_WORKERS="1", PLANNER_LOST_AFTER_S="4"))
    ended = all_ended(members[0], plans)
    assert {job["state"] for job in ended.values()} == {"succeeded"}
    assert max(job["attempts"] for job in ended.values()) <= 2
    lost.process.send_signal(signal.SIGCONT)
    before = {plan: members[0].client.get(f"/v1/plans/{plan}/result").content for plan in plans}
    until(
        "the sleeper has ended what it had", lambda: len(lost.events("plan ended")) >= len(lost.events("plan started"))
    )
    assert before == {plan: members[0].client.get(f"/v1/plans/{plan}/result").content for plan in plans}
    lost.kill()


def test_a_worker_of_its_own_needs_postgresql(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planner", "worker"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "PLANNER_DATABASE_URL": f"sqlite:///{tmp_path}/x.db"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "planner serve --workers N" in done.stderr
