"""Plans are cancelled, asked for again, refused while too many wait, and forgotten after their time."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor

from tests.service.processes import Place, long_question, quick_question, until


def test_cancelled(place: Place) -> None:
    """A plan that waits ends at once, one that runs soon; its process is free, and both are made when asked again."""
    service = place.serve()
    running = service.ask(long_question()).json()["id"]
    service.in_state(running, "running")
    waiting = service.ask(quick_question(0)).json()["id"]
    with service.client() as client:
        assert client.delete(f"/v1/plans/{waiting}").json()["state"] == "cancelled"
        assert client.delete(f"/v1/plans/{running}").status_code == 200
        assert service.ended(running)["state"] == "cancelled"
        assert client.get(f"/v1/plans/{running}/result").status_code == 409
        # What has ended stays as it is.
        assert client.delete(f"/v1/plans/{running}").json()["state"] == "cancelled"
    assert service.ask(quick_question(0), wait_s=60).json()["state"] == "succeeded"
    again = service.ask(long_question()).json()
    assert (again["id"], again["state"]) == (running, "queued")
    assert service.ended(running)["state"] == "succeeded"


def test_wanted_again_before_it_has_stopped(place: Place) -> None:
    """Cancelled by one and asked for by another at the same time: the one who asked gets it."""
    service = place.serve()
    plan = service.ask(long_question()).json()["id"]
    service.in_state(plan, "running")
    with service.client() as client:
        client.delete(f"/v1/plans/{plan}")
    asked = service.ask(long_question()).json()
    assert asked["state"] in ("queued", "running", "cancelled")
    ended = service.ended(plan)
    assert ended["state"] == "succeeded"
    assert ended["attempts"] == 1


def test_whoever_waits_hears_of_the_end(place: Place) -> None:
    """A request that is held is answered when its plan is cancelled."""
    service = place.serve()
    with ThreadPoolExecutor(1) as pool, service.client() as client:
        held = pool.submit(service.ask, long_question(), 60)
        plan = until(lambda: client.get("/v1/plans").json()["plans"], "it is not asked")[0]["id"]
        service.in_state(plan, "running")
        client.delete(f"/v1/plans/{plan}")
        answer = held.result()
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")


def test_too_many_wait(place: Place) -> None:
    """More than may wait are refused with when to come back; known plans and health are answered all the same."""
    service = place.serve(queue_limit=3)
    known = service.ask(quick_question(99), wait_s=60)
    assert known.json()["state"] == "succeeded"
    first = service.ask(long_question()).json()["id"]
    service.in_state(first, "running")
    answers = [service.ask(quick_question(number)) for number in range(5)]
    assert [answer.status_code for answer in answers] == [202, 202, 202, 503, 503]
    told = answers[-1].json()
    assert told["type"] == "urn:planner:problem:queue-full"
    assert int(answers[-1].headers["Retry-After"]) > 0
    assert service.ask(quick_question(99)).status_code == 200
    assert service.ask(quick_question(0)).status_code == 202  # one of those that wait
    with service.client() as client:
        assert client.get("/healthz").status_code == 200
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["queue"]) == (503, "full: 3 plans wait, 3 may")
        client.delete(f"/v1/plans/{first}")
    for number in range(3):
        assert service.ended(answers[number].json()["id"])["state"] == "succeeded"
    assert service.ask(quick_question(4), wait_s=60).json()["state"] == "succeeded"


def test_results_are_kept_for_their_time(sqlite: Place) -> None:
    """A plan that is too old is removed at the next start, and made when it is asked for again."""
    service = sqlite.serve()
    old, young = (service.ask(quick_question(number), wait_s=60).json()["id"] for number in range(2))
    assert service.end() == 0
    with sqlite3.connect(sqlite.url.removeprefix("sqlite:///")) as database:
        changed = database.execute("UPDATE plans SET finished_at = finished_at - 1000 WHERE id = ?", (old,))
        assert changed.rowcount == 1
    service = sqlite.serve(result_lifetime_s=900)
    until(lambda: service.events("old plans removed"), "nothing is removed")
    with service.client() as client:
        assert client.get(f"/v1/plans/{old}").status_code == 404
        assert client.get(f"/v1/plans/{young}").status_code == 200
    assert service.ask(quick_question(0), wait_s=60).json()["id"] == old
