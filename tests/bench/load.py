"""A load generator for the service: requests at a fixed rate over a few connections, timed from when each was due.

``python -m tests.bench.load URL RATE SECONDS [BODY]`` prints one JSON line; it shares nothing with the service."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

CONNECTIONS = 32


async def load(url: str, rate: float, seconds: float, body: str | None) -> dict[str, float]:
    """GET, or POST with a body; latencies in milliseconds."""
    place = urlsplit(url)
    content = (body or "").encode()
    method = "GET" if body is None else "POST"
    path = place.path + (f"?{place.query}" if place.query else "")
    head = f"{method} {path} HTTP/1.1\r\nHost: {place.netloc}\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    request = head.encode() + b"\r\n" + content
    due: asyncio.Queue[float | None] = asyncio.Queue()
    taken: list[float] = []
    failed = 0

    async def connection() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
        while (at := await due.get()) is not None:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in answer.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            )
            await reader.readexactly(length)
            taken.append(1000 * (time.perf_counter() - at))
            failed += not answer.startswith(b"HTTP/1.1 200")
        writer.close()

    workers = [asyncio.create_task(connection()) for _ in range(CONNECTIONS)]
    started = time.perf_counter()
    for number in range(int(rate * seconds)):
        at = started + number / rate
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        due.put_nowait(at)
    for _ in workers:
        due.put_nowait(None)
    await asyncio.gather(*workers)
    ended = time.perf_counter()
    taken.sort()
    return {
        "requests": len(taken),
        "failed": failed,
        "requests_per_s": len(taken) / (ended - started),
        "p50_ms": taken[len(taken) // 2],
        "p99_ms": taken[int(0.99 * len(taken))],
        "max_ms": taken[-1],
    }


def main() -> None:
    url, rate, seconds, *body = sys.argv[1:]
    print(json.dumps(asyncio.run(load(url, float(rate), float(seconds), body[0] if body else None))))


if __name__ == "__main__":
    main()
