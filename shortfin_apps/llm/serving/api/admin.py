"""Admin routes: they affect all callers and require an admin key."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.serving.api import answers
from shortfin_apps.llm.serving.api.json_body import JsonRoute
from shortfin_apps.llm.serving.api.schema import Body
from shortfin_apps.llm.serving.api.service import carry_out_everywhere, count_everywhere, service_of
from shortfin_apps.llm.serving.engine_link.messages import AbortAll, SetLogLevel
from shortfin_apps.llm.serving.http.auth import require_admin
from shortfin_apps.llm.serving.http.json_response import JsonResponse

PIECE_BYTES = 1 << 18
GZIP = "application/gzip"
DUMP = {GZIP: {"schema": {"type": "string", "format": "binary"}}}  # the answer's content with `download`

logger = logging.getLogger(__name__)
router = APIRouter(
    route_class=JsonRoute, tags=["admin"], dependencies=[Depends(require_admin)], responses=answers.errors()
)


class LogLevelBody(Body):
    """Body of `POST /log_level`."""

    level: Literal["debug", "info", "warning", "error"]


@router.post("/flush_cache", responses={200: {"model": answers.State}})
async def flush_cache(request: Request) -> Response:
    """Evicts all pages of the prefix cache that no running request uses."""
    service_of(request).model.generator.engine.flush_cache()
    return JsonResponse({"status": "flushed"})


@router.post("/abort_all", responses={200: {"model": answers.AbortedAnswer}})
async def abort_all(request: Request) -> Response:
    """Aborts all requests of all callers; returns the number of aborted sequences."""
    count = await count_everywhere(AbortAll(), service_of(request))
    logger.warning("an admin aborted all %d sequences", count)
    return JsonResponse({"aborted": count})


@router.post("/debug/dump", responses={200: {"model": answers.DumpAnswer, "content": DUMP}})
async def debug_dump(request: Request, download: bool = False) -> Response:
    """Writes a dump of the flight recorder to a file on the server.

    With `download`, the answer is the file itself, otherwise its path and size. The dump contains the token
    ids of all callers' requests.
    """
    written = await service_of(request).model.generator.engine.dump("POST /debug/dump")
    if download:
        return _sent(written.path)
    return JsonResponse({"file": str(written.path), "bytes": written.num_bytes})


def _sent(path: Path) -> StreamingResponse:
    """Return a response that streams the dump file. Raises UnavailableError if the file is gone.

    The file is opened before the response starts, because newer dumps may replace it at any time.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UnavailableError(f"the dump {path} is gone ({error.strerror}); ask again") from error
    return StreamingResponse(
        _pieces(file),
        media_type=GZIP,
        headers={
            "content-length": str(os.fstat(file.fileno()).st_size),
            "content-disposition": f'attachment; filename="{path.name}"',
        },
    )


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


@router.post("/log_level", responses={200: {"model": answers.LogLevelAnswer}})
async def log_level(body: LogLevelBody, request: Request) -> Response:
    """Sets the server's log level; at `debug`, the log may include prompts."""
    await carry_out_everywhere(SetLogLevel(body.level.upper()), service_of(request))
    return JsonResponse({"level": body.level})
