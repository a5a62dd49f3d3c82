"""Numbers for Prometheus, in a registry of the app's own; no ids in labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_ANSWERS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """What one app counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._plans = Counter("planner_plans", "Plans that ended here.", ["outcome"], registry=self.registry)
        self._plan_s = Histogram(
            "planner_plan_duration_seconds",
            "From taking a plan up to its end.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._requests = Counter(
            "planner_http_requests", "Answered requests.", ["method", "route", "status"], registry=self.registry
        )
        self._request_s = Histogram(
            "planner_http_request_duration_seconds",
            "Time to answer.",
            ["route"],
            buckets=_ANSWERS,
            registry=self.registry,
        )
        self._refused = Counter(
            "planner_connections_refused",
            "Connections that ended without a request that could be answered.",
            ["reason"],
            registry=self.registry,
        )
        self._queue = Gauge("planner_queue_depth", "Plans that wait.", registry=self.registry)
        self._running = Gauge("planner_plans_running", "Plans that are worked on.", registry=self.registry)
        self._ended = Gauge(
            "planner_plans_ended", "Plans of the database that have ended.", ["outcome"], registry=self.registry
        )

    def planned(self, outcome: str, seconds: float) -> None:
        self._plans.labels(outcome).inc()
        self._plan_s.observe(seconds)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def text(self, counts: dict[str, int], ended: dict[str, int]) -> bytes:
        """The exposition, with the queue and the plans as they are now, whichever process made them."""
        self._queue.set(counts.get("queued", 0))
        self._running.set(counts.get("running", 0))
        self._ended.clear()
        for outcome, number in ended.items():
            self._ended.labels(outcome).set(number)
        return generate_latest(self.registry)
