"""The page's static files. They need no build step and load nothing from other origins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

PREFIX = "/page"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Allows scripts, styles and requests of this origin only, nothing inline, and no framing by other pages.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file with its HTTP headers; the ETag is a hash of the content."""

    content: bytes
    headers: Mapping[str, str]

    @classmethod
    def of(cls, content: bytes, media_type: str) -> Asset:
        headers = {
            "Content-Type": media_type,
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
            "Cache-Control": "no-cache",  # browsers revalidate each time, as releases have different files
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return cls(content, headers)

    async def answer(self, request: Request) -> Response:
        """Return the file, or status 304 if the browser's cached copy is current."""
        known = request.headers.get("if-none-match", "")
        if any(tag.strip().removeprefix("W/") in (self.headers["ETag"], "*") for tag in known.split(",")):
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def _read() -> dict[str, Asset]:
    folder = files("shortfin_apps.llm.serving.api.page") / "static"
    return {
        file.name: Asset.of(file.read_bytes(), MEDIA_TYPES[file.name.rpartition(".")[2]])
        for file in folder.iterdir()
    }


ASSETS: Mapping[str, Asset] = _read()
INDEX = "index.html"
# Paths that need no API key: the files hold no data of a server. The loaded page asks the user for a key.
PATHS = frozenset({"/", *(f"{PREFIX}/{name}" for name in ASSETS if name != INDEX)})
