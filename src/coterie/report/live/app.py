"""The addresses of the live page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from coterie.errors import CoterieError
from coterie.report import page
from coterie.report.html import report
from coterie.report.live import rows
from coterie.report.live.folders import Glance
from coterie.report.live.guarding import RequestGuard
from coterie.report.live.watching import Watching
from coterie.report.page import Block
from coterie.report.reading import Reading
from coterie.report.rendering import render
from coterie.report.what_was_run import what_was_run

_FOREVER = {"cache-control": "private, max-age=31536000, immutable"}
_AS_FILE = {
    "content-disposition": 'attachment; filename="report.html"',
    "cache-control": "no-store",
}
_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}


def live_app(watching: Watching, token: str, hosts: Collection[str], port: int) -> RequestGuard:
    """The application behind its guard; ``hosts`` are the names that it is served under."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(watching.follow())
        yield
        await watching.close()
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following

    routes = _Routes(watching)
    app = Starlette(
        lifespan=lifespan,
        routes=[
            Route("/", routes.list),
            Route("/run/{name:path}", routes.run),
            Route("/compare", routes.compare),
            Route("/report.html", routes.report),
            Route("/api/events", routes.list_events),
            Route("/api/runs/{name:path}/events", routes.run_events),
            Route("/api/runs/{name:path}/stop", routes.stop, methods=["POST"]),
            Route("/api/runs/{name:path}/resume", routes.resume, methods=["POST"]),
            Route("/api/login", routes.login, methods=["POST"]),
            Route("/assets/{digest}/{name}", asset_response),
            Route("/favicon.ico", icon),
        ],
    )
    guard = RequestGuard(app, token, hosts, port, policy(), welcome_page())
    routes.guard = guard
    return guard


class _Routes:
    """The handlers of all addresses. Names of runs are looked up, never turned into paths."""

    guard: RequestGuard

    def __init__(self, watching: Watching) -> None:
        self.watching = watching

    async def list(self, request: Request) -> Response:
        """The page with all runs."""
        await self.watching.look()
        return HTMLResponse(list_page(self.watching))

    async def run(self, request: Request) -> Response:
        """The page of one run."""
        name = request.path_params["name"]
        found = await self.watching.page(name)
        if found is None:
            return _no_such_run()
        blocks, feed = found
        return HTMLResponse(run_page(name, blocks, feed.present))

    async def compare(self, request: Request) -> Response:
        """The runs that were ticked, or those of a comparison, side by side as they are now."""
        readings, query = await self._chosen(request)
        if len(readings) < 2:
            return PlainTextResponse("choose two runs or more", 404)
        link = rows.address_of  # to the runs' pages, and not to parts of this one
        blocks = await asyncio.to_thread(page.compared_blocks, readings, link_of=link)
        return HTMLResponse(compare_page(readings, blocks, query))

    async def report(self, request: Request) -> Response:
        """The report about these runs, as a file to keep."""
        readings, _ = await self._chosen(request)
        if not readings:
            return _no_such_run()
        text = await asyncio.to_thread(report, readings)
        return HTMLResponse(text, headers=_AS_FILE)

    async def _chosen(self, request: Request) -> tuple[Sequence[Reading], str]:
        names, comparison = request.query_params.getlist("run"), request.query_params
        found = await self.watching.compared(names, comparison.get("comparison", ""))
        return found, request.url.query

    async def list_events(self, request: Request) -> Response:
        """The stream of changes of the list."""
        await self.watching.look()
        return _stream(self.watching.list.stream(_told(request)))

    async def run_events(self, request: Request) -> Response:
        """The stream of changes of a run."""
        found = await self.watching.page(request.path_params["name"])
        if found is None:
            return _no_such_run()
        return _stream(found[1].stream(_told(request)))

    async def stop(self, request: Request) -> Response:
        """Ask a run to stop after its present round."""
        return await self._act(request, lambda run, _: self.watching.controls.stop(run))

    async def resume(self, request: Request) -> Response:
        """Resume a stopped run."""
        return await self._act(request, self.watching.controls.resume)

    async def _act(self, request: Request, action: Callable[[Glance, Reading], None]) -> Response:
        try:
            exists = await self.watching.tell(request.path_params["name"], action)
        except CoterieError as error:
            return PlainTextResponse(str(error), 409)
        return Response(status_code=204) if exists else _no_such_run()

    async def login(self, request: Request) -> Response:
        """Set a cookie for a client that has shown the token, which the guard has checked."""
        answer = Response(status_code=204)
        answer.set_cookie(self.guard.cookie, self.guard.pass_word, httponly=True, samesite="strict")
        return answer


def _no_such_run() -> Response:
    return PlainTextResponse("there is no such run", 404)


def _told(request: Request) -> str:
    """The version that a page has: of its last event, or else of its HTML."""
    return request.headers.get("last-event-id") or request.query_params.get("since", "")


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers=_STREAM)


# --- pages ----------------------------------------------------------------------------------------


def list_page(watching: Watching) -> str:
    """The list of runs as HTML."""
    runs = list(watching.following.glances().values())
    summary = rows.summary(runs, watching.title)
    blocks = [
        Block("summary", render("live/summary.html", text=summary)),
        Block("runs", render("live/list.html", rows=[html for _, html in rows.in_order(runs)])),
    ]
    about = {"events": "/api/events", "since": watching.list.present}
    return _document("Runs", blocks, about, plotly=False)


def run_page(name: str, blocks: Sequence[Block], version: str) -> str:
    """A run's page as HTML."""
    api = f"/api/runs/{rows.address_of(name).removeprefix('/run/')}"
    about = {"events": f"{api}/events", "since": version, "api": api}
    return _document(name, blocks, about)


def compare_page(readings: Sequence[Reading], blocks: Sequence[Block], query: str) -> str:
    """Several runs side by side as HTML; the page does not follow them."""
    links = render("live/compare.html", report=f"/report.html?{query}")
    names = [reading.name for reading in readings]
    title = f"{len(names)} runs side by side"
    return _document(title, [Block("links", links), *blocks], {}, about_runs=what_was_run(readings))


def welcome_page() -> str:
    """The page that asks for the token, as HTML."""
    return _document("Coterie", [Block("welcome", render("live/welcome.html"))], {}, plotly=False)


def _document(
    title: str,
    blocks: Sequence[Block],
    about: dict[str, str],
    plotly: bool = True,
    about_runs: str = "",
) -> str:
    header = render(
        "live/header.html",
        style=address("live.css"),
        is_run="api" in about or bool(about_runs),
        about=json.dumps(about, separators=(",", ":")),
    )
    return page.document(
        title,
        blocks,
        scripts=[live_asset("live.js")],
        plotly=address("plotly.js") if plotly else "",
        policy=None,
        header=header,
        about=about_runs,
    )


# --- assets ---------------------------------------------------------------------------------------


@cache
def live_asset(name: str) -> str:
    """The text of a script or style of the live page."""
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs())
    return (files("coterie.report.live") / "assets" / name).read_text(encoding="utf-8")


@cache
def address(name: str) -> str:
    """An asset's address, which changes with its content."""
    return f"/assets/{hashlib.sha256(live_asset(name).encode()).hexdigest()[:16]}/{name}"


_ICON = (  # the brand's circle of three parts
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 16 16">'
    '<path fill="#0072B2" d="M0 0V-8A8 8 0 0 1 6.93 4Z"/>'
    '<path fill="#E69F00" d="M0 0L6.93 4A8 8 0 0 1 -6.93 4Z"/>'
    '<path fill="#009E73" d="M0 0L-6.93 4A8 8 0 0 1 0 -8Z"/></svg>'
)
_TYPES = {"plotly.js": "text/javascript", "live.css": "text/css"}


async def asset_response(request: Request) -> Response:
    """An asset, which browsers may keep forever."""
    name = request.path_params["name"]
    if name not in _TYPES or request.url.path != address(name):
        return PlainTextResponse("there is no such file", 404)
    return Response(live_asset(name), media_type=_TYPES[name], headers=_FOREVER)


async def icon(request: Request) -> Response:
    """The icon in the browser's tab."""
    return Response(_ICON, media_type="image/svg+xml", headers=_FOREVER)


@cache
def policy() -> str:
    """The Content-Security-Policy: a page may load from this server, and run its own scripts."""
    inline = (page.asset("theme.js"), page.asset("page.js"), live_asset("live.js"))
    digests = " ".join(f"'sha256-{_digest(text)}'" for text in inline)
    return (
        f"default-src 'none'; script-src 'self' {digests}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
