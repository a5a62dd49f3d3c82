"""Several processes on one PostgreSQL database: each plan is made once, and whoever drops out is replaced."""

from __future__ import annotations

import datetime
import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.service.processes import Place, Running, long_question, quick_question, until

PLANS = 20


def test_two_services_and_two_workers_make_each_plan_once(postgres: Place) -> None:
    """Questions put to both services at once are one plan each."""
    services = [postgres.serve(workers=0) for _ in range(2)]
    workers = [postgres.worker() for _ in range(2)]
    asked = list(itertools.product(range(PLANS), services))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: one[1].ask(quick_question(one[0])), asked))
    assert {answer.status_code for answer in answers} <= {200, 202}
    plans = {answer.json()["id"] for answer in answers}
    assert len(plans) == PLANS
    ended = [service.ended(plan) for plan, service in zip(plans, itertools.cycle(services), strict=False)]
    assert {(plan["state"], plan["attempts"]) for plan in ended} == {("succeeded", 1)}
    assert postgres.started() == dict.fromkeys(plans, 1)
    assert all(worker.events("plan ended") for worker in workers)
    assert not any(service.events("plan started") for service in services)
    assert [member.end() for member in (*workers, *services)] == [0, 0, 0, 0]


def test_services_that_start_at_once_make_the_tables_once(postgres: Place) -> None:
    """Migrations of several processes wait for each other."""
    with ThreadPoolExecutor(4) as pool:
        services = list(pool.map(lambda _: postgres.serve(workers=0), range(4)))
    for service in services:
        with service.client() as client:
            assert client.get("/readyz").json()["checks"]["database"] == "ok"


def test_killed_worker_is_replaced(postgres: Place) -> None:
    """Its plans are made by the other one, though it never comes back."""
    service = postgres.serve(workers=0)
    workers = [postgres.worker(), postgres.worker()]
    plans = [service.ask(long_question(number)).json()["id"] for number in range(2)]
    plans += [service.ask(quick_question(number)).json()["id"] for number in range(4)]
    service.in_state(plans[1], "running")
    lost, other = sorted(workers, key=lambda worker: _began(worker, plans[1]), reverse=True)
    lost.kill()
    ended = [service.ended(plan) for plan in plans]
    assert {plan["state"] for plan in ended} == {"succeeded"}
    assert ended[1]["attempts"] == 2
    until(lambda: plans[1] in {event["plan"] for event in other.events("plan ended")}, "the other one did not make it")
    assert max(postgres.started().values()) <= 2


def _began(worker: Running, plan: str) -> bool:
    return plan in {event["plan"] for event in worker.events("plan started")}


def test_sleeping_worker_changes_nothing_when_it_wakes(postgres: Place) -> None:
    """A process that was stopped for longer than it may be silent has lost its plan, and does not overwrite it."""
    service = postgres.serve(workers=0)
    sleeper = postgres.worker()
    plan = service.ask(quick_question(0) | {"model": "70b", "cluster": {"gpu": "h100-sxm", "gpus": 512}}).json()["id"]
    service.in_state(plan, "running")
    sleeper.signal(signal.SIGSTOP)
    known = service.plan(plan)
    assert known["state"] == "running", "it was made before its worker was stopped"
    postgres.worker()
    service.ended(plan)
    before = service.plan(plan)
    sleeper.signal(signal.SIGCONT)
    until(
        lambda: sleeper.events("plan was given to another worker meanwhile") or _gave_up(sleeper),
        "the sleeper does not notice",
    )
    assert service.plan(plan) == before
    assert before["attempts"] == 2
    assert service.ask(quick_question(1), wait_s=60).json()["state"] == "succeeded"


def _gave_up(worker: Running) -> bool:
    """Told by the table that the plan is another's, it ends its search without an event of its own."""
    return not worker.events("plan ended") and not worker.searching()


def test_cancelled_from_the_other_service(postgres: Place) -> None:
    """Plans that wait and plans that run, wherever; whoever waits for them is told."""
    services = [postgres.serve(workers=0), postgres.serve()]
    with ThreadPoolExecutor(1) as pool, services[0].client() as client:
        held = pool.submit(services[0].ask, long_question(), 60)
        running = until(lambda: client.get("/v1/plans").json()["plans"], "it is not asked")[0]["id"]
        services[0].in_state(running, "running")
        waiting = services[1].ask(quick_question(0)).json()["id"]
        assert client.delete(f"/v1/plans/{waiting}").json()["state"] == "cancelled"
        client.delete(f"/v1/plans/{running}")
        assert held.result().json()["state"] == "cancelled"
    assert services[1].plan(waiting)["state"] == services[1].plan(running)["state"] == "cancelled"
    assert services[1].ask(quick_question(1), wait_s=60).json()["state"] == "succeeded"
    assert waiting not in postgres.started()


def test_idle_worker_is_told(postgres: Place) -> None:
    """A worker hears of a plan when it is put; it does not find it at its next look, seconds later."""
    service, worker = postgres.serve(workers=0), postgres.worker()
    assert service.ask(quick_question(0), wait_s=60).json()["state"] == "succeeded"
    pauses = []
    for number in range(1, 4):
        plan = service.ask(quick_question(number), wait_s=60).json()
        assert plan["state"] == "succeeded"
        pauses.append(_seconds(plan["started_at"]) - _seconds(plan["created_at"]))
    # The worker looks by itself every five seconds: three plans in a row in its last second are no accident.
    assert max(pauses) < 2.5, pauses
    assert len(worker.events("plan started")) == 4


def _seconds(time: str) -> float:
    return datetime.datetime.fromisoformat(time).timestamp()


def test_worker_needs_a_database_for_several(sqlite: Place) -> None:
    refused = sqlite.refused("worker")
    assert refused.returncode == 2
    assert "planner serve --workers N" in refused.stderr
