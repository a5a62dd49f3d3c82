"""Whatever is killed, and whenever: every accepted plan ends, and none is tried more than twice."""

from __future__ import annotations

import os
import signal
import sqlite3
from functools import partial

from tests.service.processes import Place, Running, busiest, children, lives, long_question, quick_question, until

PLANS = 12


def _searching(service: Running, plan: str, attempt: int) -> bool:
    known = service.plan(plan)
    return known["attempts"] == attempt and known["progress"] is not None


def test_killed_service_loses_no_accepted_plan(place: Place) -> None:
    """A kill in the middle of the work: after a restart every plan that was accepted succeeds."""
    service = place.serve()
    accepted = [service.ask(quick_question(number)) for number in range(PLANS)]
    assert {answer.status_code for answer in accepted} <= {200, 202}
    plans = [answer.json()["id"] for answer in accepted]
    assert len(set(plans)) == PLANS
    until(lambda: any(service.plan(plan)["state"] == "running" for plan in plans), "nothing is being made")
    service.kill()
    service.start()
    ended = [service.ended(plan) for plan in plans]
    assert {plan["state"] for plan in ended} == {"succeeded"}
    assert all(1 <= plan["attempts"] <= 2 for plan in ended)
    assert max(place.started().values()) <= 2
    assert service.end() == 0


def test_killed_twice_in_one_plan_gives_it_up(sqlite: Place) -> None:
    """A plan that was being made when its service died twice is not tried a third time."""
    service = sqlite.serve()
    plan = service.ask(long_question()).json()["id"]
    for _ in range(2):
        service.in_state(plan, "running")
        service.kill()
        service.start()
    ended = service.ended(plan)
    assert (ended["state"], ended["attempts"]) == ("failed", 2)
    assert ended["problem"]["type"] == "urn:planner:problem:solver-failed"
    assert "lost" in ended["problem"]["detail"]


def test_killed_solver_is_tried_again_once(place: Place) -> None:
    """The process that searches is killed: another one does; a second time the plan fails, until it is asked again."""
    service = place.serve()
    plan = service.ask(long_question()).json()["id"]
    for attempt in (1, 2):
        until(partial(_searching, service, plan, attempt), "no search")
        os.kill(busiest(service.children()), signal.SIGKILL)
    ended = service.ended(plan)
    assert (ended["state"], ended["attempts"]) == ("failed", 2)
    assert "signal 9" in ended["problem"]["detail"]
    again = service.ask(long_question())
    assert (again.status_code, again.json()["id"], again.json()["problem"]) == (202, plan, None)
    assert service.ended(plan)["state"] == "succeeded"
    assert service.ask(quick_question(0), wait_s=60).json()["state"] == "succeeded"


def test_killed_idle_processes_are_replaced(sqlite: Place) -> None:
    """Every process of the pool, the helper that they are forked from included, may die while it has nothing to do."""
    service = sqlite.serve()
    assert service.ask(quick_question(0), wait_s=60).json()["state"] == "succeeded"
    for pid in service.children():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not service.children(), "they live")
    assert service.ask(quick_question(1), wait_s=60).json()["state"] == "succeeded"
    with service.client() as client:
        assert client.get("/readyz").status_code == 200


def test_plan_that_never_reached_the_queue_is_made(place: Place) -> None:
    """A process that died between storing a plan and putting it into the queue loses nothing."""
    # Without workers, and on PostgreSQL without a job: exactly what such a process leaves.
    service = place.serve(workers=0)
    plan = service.ask(quick_question(0)).json()["id"]
    assert service.plan(plan)["state"] == "queued"
    service.kill()
    if not place.is_sqlite:
        import psycopg

        with psycopg.connect(place.url, autocommit=True) as database:
            assert database.execute("DELETE FROM procrastinate_jobs").rowcount == 1
    assert place.serve().ended(plan)["state"] == "succeeded"


def test_end_gives_searches_time(place: Place) -> None:
    """Told to end, the service finishes what it has begun, and leaves the rest to the next one."""
    service = place.serve()
    first = service.ask(quick_question(0)).json()["id"]
    rest = [service.ask(quick_question(number)).json()["id"] for number in range(1, 5)]
    until(lambda: service.plan(first)["state"] != "queued", "nothing begins")
    left = service.children()
    if place.is_sqlite:
        os.killpg(service.process.pid, signal.SIGINT)  # as a terminal does, to all of its processes
    else:
        service.signal(signal.SIGTERM)
    assert service.process.wait(60) == 0
    until(lambda: not any(lives(pid) for pid in left), "processes are left")
    service.start()
    ended = [service.ended(plan) for plan in (first, *rest)]
    assert {(plan["state"], plan["attempts"]) for plan in ended} == {("succeeded", 1)}
    assert max(place.started().values()) == 1


def test_end_puts_back_what_takes_too_long(place: Place) -> None:
    """After the grace a search is ended, and it does not count as an attempt."""
    service = place.serve(shutdown_grace_s=0)
    plan = service.ask(long_question()).json()["id"]
    service.in_state(plan, "running")
    assert service.end() == 0
    again = place.serve(workers=0)
    known = again.plan(plan)
    assert (known["state"], known["attempts"]) == ("queued", 0)


def test_second_signal_ends_at_once(place: Place) -> None:
    """Ctrl-C twice: no grace, nothing left, and the plan is made by the next one."""
    service = place.serve(shutdown_grace_s=600)
    plan = service.ask(long_question()).json()["id"]
    service.in_state(plan, "running")
    left = service.children()
    service.signal(signal.SIGINT)
    until(lambda: service.events("ending"), "it does not hear")
    service.signal(signal.SIGINT)
    assert service.process.wait(60) == 130
    until(lambda: not any(lives(pid) for pid in left), "processes are left")
    service.start()
    until(lambda: service.plan(plan)["attempts"] == 2, "it is not taken up again")


def test_file_belongs_to_one_service(sqlite: Place) -> None:
    """A second service on the same SQLite file is refused, and the first goes on."""
    service = sqlite.serve()
    second = sqlite.refused("serve")
    assert second.returncode == 2
    assert "another service has this database open" in second.stderr
    assert "Traceback" not in second.stderr
    assert service.ask(quick_question(0), wait_s=60).json()["state"] == "succeeded"
    with sqlite3.connect(sqlite.url.removeprefix("sqlite:///")) as database:
        assert database.execute("SELECT count(*) FROM plans").fetchone() == (1,)


def test_no_child_of_a_child_is_left(sqlite: Place) -> None:
    """The count of processes does not grow with the plans."""
    service = sqlite.serve()
    for number in range(3):
        assert service.ask(quick_question(number), wait_s=60).json()["state"] == "succeeded"
    assert len(children(service.process.pid)) <= 6
