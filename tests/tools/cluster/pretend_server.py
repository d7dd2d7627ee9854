"""A process of a cluster for tests: answers 200 to every GET, and notes when it ends.

On standard input: `port`, `name`, `diary` (a file that it appends `NAME started` and `NAME ended` to), and
`fail`, for one that says so and exits with 3, or `stubborn`, for one that SIGTERM does not end. With
arguments it listens on a port that was handed down.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from shortfin_apps.llm.tools.cluster.ports import HandedDown


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    settings = json.load(sys.stdin)

    def note(what: str) -> None:
        with Path(settings["diary"]).open("a") as file:
            file.write(f"{settings['name']} {what}\n")

    def end(*_: object) -> None:
        note("ended")
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if settings.get("stubborn") else end)
    if settings.get("fail"):
        print("no model here", file=sys.stderr)
        sys.exit(3)
    server = HTTPServer(("127.0.0.1", settings["port"]), Answer, bind_and_activate=len(sys.argv) == 1)
    if len(sys.argv) > 1:
        server.socket.close()
        server.socket = HandedDown(*map(int, sys.argv[1:]))
        server.server_activate()
    note("started")
    server.serve_forever()


if __name__ == "__main__":
    main()
