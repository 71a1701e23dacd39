"""The HTTP application: routes of the OpenAI API and of operation. Built around any engine, see `EngineLike`."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from specdec import __version__
from specdec.errors import RequestError, SpecdecError
from specdec.server import chat, completions
from specdec.server.engine_loop import AsyncEngine, EngineLike, Submission, Ticket
from specdec.server.errors import ApiError, from_exception
from specdec.server.generation import Header
from specdec.server.http import ClientGoneError, EventStream, read_body, unless_gone
from specdec.server.logprobs import TokenTexts
from specdec.server.options import ServerOptions
from specdec.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, parse_body
from specdec.server.response_format import constraint_field

logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=GenerationRequest)

_STATUS_WAIT_S = 5.0


class Service:
    """What the routes share: the engine, and one thread for tokenising so that long prompts do not stall streams."""

    def __init__(self, engine: EngineLike, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.texts = TokenTexts(engine.tokenizer)
        self.loop = AsyncEngine(engine, stall_s=options.stall_s)
        self.names = (
            [options.served_model_name] if options.served_model_name else list(dict.fromkeys([engine.model_name, engine.config.model]))
        )
        self.tokenizing = ThreadPoolExecutor(1, thread_name_prefix="specdec-tokenize")
        self.compiling = ThreadPoolExecutor(2, thread_name_prefix="specdec-compile")
        self.started = int(time.time())

    async def parse(self, request: Request, kind: type[Body]) -> Body:
        """Reads and checks a body. Raises ApiError."""
        body = parse_body(await read_body(request, self.options.max_body_bytes), kind)
        self.check_model(body.model)
        return body

    def check_model(self, name: str) -> None:
        if name not in self.names:
            raise ApiError(
                404, f"the model {name!r} does not exist here; this server has {self.names[0]!r}", param="model", code="model_not_found"
            )

    async def chat(self, request: Request) -> Response:
        body = await self.parse(request, ChatRequest)
        submission = await self.in_thread(chat.chat_submission, self.engine, body)
        header = Header("chatcmpl", body.model)
        ticket = await self.submit([submission], body)
        close = partial(self.loop.abort, ticket)
        if body.stream:
            return EventStream(chat.chat_chunks(header, ticket, submission, self.texts, include_usage=body.include_usage), close)
        try:
            return JSONResponse(await unless_gone(request.receive, chat.chat_response(header, ticket, submission, self.texts)))
        finally:
            close()

    async def complete(self, request: Request) -> Response:
        body = await self.parse(request, CompletionRequest)
        job = await self.in_thread(completions.completion_job, self.engine, body)
        header = Header("cmpl", body.model)
        ticket = None
        if job.runs:
            ticket = await self.submit(job.submissions, body)
        else:
            completions.check_echo(self.engine, job.submissions)
        close = partial(self.loop.abort, ticket) if ticket is not None else _nothing
        if body.stream:
            return EventStream(completions.completion_chunks(header, ticket, job, self.texts, include_usage=body.include_usage), close)
        try:
            return JSONResponse(await unless_gone(request.receive, completions.completion_response(header, ticket, job, self.texts)))
        finally:
            close()

    async def submit(self, submissions: Sequence[Submission], body: GenerationRequest) -> Ticket:
        """Hands a request to the engine; its errors name the fields of the engine, the client's those of `body`."""
        try:
            constraints = {constraint for item in submissions if (constraint := item.params.constraint) is not None}
            for constraint in constraints:  # here, so that no step waits for it
                await asyncio.get_running_loop().run_in_executor(self.compiling, self.engine.compile, constraint)
            return await self.loop.submit(submissions)
        except RequestError as error:
            prompt = "messages" if isinstance(body, ChatRequest) else "prompt"
            names = {
                "drafter": "speculative.drafter",
                "messages": prompt,
                "prompt": prompt,
                "constraint": constraint_field(body.response_format),
            }
            error.param = names.get(error.param or "", error.param)
            raise

    async def in_thread(self, function: Any, *args: Any) -> Any:  # any function; its own types say what it takes
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, function, *args)

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.names[0],
            "object": "model",
            "created": self.started,
            "owned_by": "specdec",
            "max_model_len": self.engine.max_model_len,
        }

    async def status(self) -> dict[str, Any]:
        """The engine's own status between two steps. Raises ApiError when it does not answer."""
        try:
            status = await asyncio.wait_for(self.loop.call(self.engine.status), _STATUS_WAIT_S)
        except TimeoutError:
            raise ApiError(503, f"the engine has been in one step for more than {_STATUS_WAIT_S:g} s", code="engine_busy") from None
        return {
            "version": __version__,
            "python": platform.python_version(),
            "model": self.names[0],
            "server": self.options.to_dict(),
            "config": self.engine.config.to_dict(),
            "running": self.loop.num_running,
            **status,
        }


def create_app(engine: EngineLike, options: ServerOptions | None = None) -> FastAPI:
    """The application around an engine. The engine belongs to it: the lifespan starts its thread, and ends by closing it.

    `app.state.service` holds the Service.
    """
    service = Service(engine, options or ServerOptions())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(engine.prepare_constraints)  # it holds the interpreter: better now than beside a stream
        service.loop.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.loop.close)
            service.tokenizing.shutdown(wait=False)
            service.compiling.shutdown(wait=False)

    app = FastAPI(title="specdec", version=__version__, lifespan=lifespan)
    app.state.service = service
    _add_error_handlers(app)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await service.chat(request)

    @app.post("/v1/completions", response_model=None)
    async def text_completions(request: Request) -> Response:
        return await service.complete(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card()

    @app.get("/v1/status")
    async def status() -> dict[str, Any]:
        return await service.status()

    @app.get("/health")
    async def health() -> JSONResponse:
        loop = service.loop
        state = "dead" if loop.dead else "ok" if loop.healthy else "stalled"
        return JSONResponse({"status": state, "running": loop.num_running}, status_code=200 if loop.healthy else 503)


def _add_error_handlers(app: FastAPI) -> None:
    async def explain(_request: Request, error: Exception) -> Response:
        api_error = from_exception(error)
        if api_error.code == "internal_error":
            logger.error("request failed", exc_info=error)
        return JSONResponse(api_error.body(), status_code=api_error.status, headers=api_error.headers)

    async def unknown_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(
            ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").body(),
            status_code=error.status_code,
            headers=error.headers,
        )

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the number is for the access log

    app.add_exception_handler(HTTPException, unknown_route)
    app.add_exception_handler(ClientGoneError, gone)
    for kind in (ApiError, SpecdecError, Exception):
        app.add_exception_handler(kind, explain)


def _nothing() -> None:
    """There is no request to abort."""
