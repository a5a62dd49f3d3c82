"""``planner serve``, ``planner worker`` and ``planner tokens``: the service on this machine, and who may use it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import options as o
from planner.errors import InputError, MissingExtraError
from planner.specs.problems import shown

if TYPE_CHECKING:
    from planner_api.settings import Settings
    from planner_api.storage.tokens import Token

tokens = typer.Typer(help="Make, list and revoke tokens for the service.", no_args_is_help=True)

_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0}


def _need_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise MissingExtraError(
            f"the service needs a package that is not installed: {problem.name}",
            where="planner serve",
            hint="pip install 'parallel-planner[api]'",
        ) from problem


def settings(**given: Any) -> Settings:
    """Settings from the environment, with the options on top."""
    _need_extra()
    from pydantic import ValidationError

    from planner_api.settings import Settings, misspelt

    slip = misspelt(os.environ)
    if slip is not None:
        raise InputError(
            "there is no such setting",
            where=slip[0],
            allowed="the settings of docs/service.md",
            hint=f"did you mean {slip[1]}?",
        )
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        name = f"PLANNER_{str(first['loc'][0]).upper()}"
        # The value of a database URL holds a password.
        got = None if "DATABASE" in name else shown(first.get("input"))
        raise InputError(
            first["msg"].removeprefix("Value error, "), where=name, got=got, hint="docs/service.md lists the settings"
        ) from problem


def serve(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (PLANNER_HOST).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port (PLANNER_PORT).", min=0, max=65535)] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Plans solved at once; 0: only answer (PLANNER_WORKERS).")
    ] = None,
    debug: o.Debug = False,
) -> None:
    """Serve the REST API and the page; all settings come from PLANNER_* variables (docs/service.md)."""
    chosen = settings(host=host, port=port, workers=workers)
    from planner_api import logs
    from planner_api.serving import run

    logs.configure(chosen.log_format)
    run(chosen)


def worker(
    workers: Annotated[
        int | None, typer.Option("--workers", help="Plans solved at once (PLANNER_WORKERS).", min=1)
    ] = None,
    debug: o.Debug = False,
) -> None:
    """Solve plans of a service on PostgreSQL, without answering requests."""
    chosen = settings(workers=workers)
    if chosen.database.get_backend_name() == "sqlite":
        raise InputError(
            "a worker of its own needs a database that several processes can share",
            where="PLANNER_DATABASE_URL",
            allowed="postgresql://USER:PASSWORD@HOST/DATABASE",
            hint="with SQLite `planner serve --workers N` solves by itself",
        )
    from planner_api import logs

    logs.configure(chosen.log_format)
    asyncio.run(_work(chosen))


async def _work(chosen: Settings) -> None:
    from planner_api.metrics import Metrics
    from planner_api.services import running
    from planner_api.serving import EXIT_HURRIED

    ended = asyncio.Event()

    def told() -> None:
        if ended.is_set():
            os._exit(EXIT_HURRIED)
        ended.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told)
    async with running(chosen, Metrics()):
        await ended.wait()


@tokens.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Who or what it is for.")],
    scope: Annotated[
        str, typer.Option("--scope", help="read, plan (includes read) or admin (includes both).")
    ] = "plan",
    expires: Annotated[str, typer.Option("--expires", help="Lifetime: 30d, 12h, 90m, or never.")] = "90d",
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Make a token; it is shown once."""
    chosen = settings()
    from planner_api.storage.tokens import SCOPES

    if scope not in SCOPES:
        raise InputError(
            "there is no such scope", where="--scope", got=shown(scope), allowed=", ".join(SCOPES), hint="plan is usual"
        )
    if not name.isprintable() or not 1 <= len(name) <= 100:
        raise InputError(
            "this is no name",
            where="NAME",
            got=shown(name),
            allowed="up to 100 printable characters",
            hint="for example scheduler",
        )
    token, text = asyncio.run(_with_store(chosen, "create", name, scope, _lifetime_s(expires)))
    from planner.cli import problems

    if as_json:
        problems.print_json({**_told(token), "token": text})
        return
    sys.stdout.write(f"{text}\n")
    sys.stderr.write("This is the only time that the token is shown. Send it as `Authorization: Bearer TOKEN`.\n")


@tokens.command("list")
def listed(as_json: o.AsJson = False, debug: o.Debug = False) -> None:
    """List the tokens; their texts are kept nowhere."""
    rows = [_told(token) for token in asyncio.run(_with_store(settings(), "all"))]
    from planner.cli import console, problems

    if as_json:
        problems.print_json(rows)
        return
    names = ("id", "name", "scope", "state", "created", "expires")
    console.stdout().print(
        console.table([(name, "left") for name in names], [[str(row[name] or "-") for name in names] for row in rows])
    )


@tokens.command("revoke")
def revoke(
    identifier: Annotated[
        str, typer.Argument(help="Id of the token, or its name; see `planner tokens list`.", metavar="ID")
    ],
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Revoke a token: it is refused from a few seconds later on."""
    meant: list[str] = asyncio.run(_with_store(settings(), "revoke", identifier))
    if not meant:
        raise InputError(
            "there is no such token that is valid", where="ID", got=shown(identifier), hint="see `planner tokens list`"
        )
    if len(meant) > 1:
        raise InputError(
            f"{len(meant)} valid tokens have this name", where="ID", got=shown(identifier), allowed=", ".join(meant),
            hint="give the id of the one that is meant: `planner tokens list` says when each was made",
        )  # fmt: skip
    if as_json:
        from planner.cli import problems

        problems.print_json({"revoked": meant[0]})
    else:
        sys.stderr.write("revoked\n")


async def _with_store(chosen: Settings, method: str, *arguments: Any) -> Any:
    from planner_api.storage.database import Database
    from planner_api.storage.tokens import TokenStore

    if method != "create" and chosen.database.get_backend_name() == "sqlite":
        file = Path(chosen.database.database or "")
        if not file.is_file():
            raise InputError(
                "there is no such database, so it has no tokens",
                where="PLANNER_DATABASE_URL",
                got=shown(str(file)),
                hint="name the database of the service, or make the first token with `planner tokens create`",
            )
    # Without the lock of a service: a service may run on the same SQLite file.
    database = Database(chosen.database)
    try:
        await database.migrate()
        return await getattr(TokenStore(database), method)(*arguments)
    finally:
        await database.close()


def _told(token: Token) -> dict[str, Any]:
    import datetime

    def date(seconds: float | None) -> str | None:
        if seconds is None:
            return None
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")

    state = "revoked" if token.revoked_at else "valid" if token.valid else "expired"
    return {
        "id": token.id,
        "name": token.name,
        "scope": token.scope,
        "state": state,
        "created": date(token.created_at),
        "expires": date(token.expires_at),
    }


def _lifetime_s(text: str) -> float | None:
    if text == "never":
        return None
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if found is None or int(found[1]) == 0:
        raise InputError(
            "this is no lifetime", where="--expires", got=shown(text), allowed="a number and m, h or d; or never",
            hint="for example --expires 30d",
        )  # fmt: skip
    return int(found[1]) * _UNITS_S[found[2]]
