"""A process that tries to compile grammars, each in a worker that cannot outlast its limits.

    python -m shortfin_apps.llm.components.grammar.trial_process FD LIMITS EOS_TOKEN_IDS < tokenizer.json

Grammars come from whoever can send a request, and the library cannot be interrupted. So this process reads
the tokenizer once and forks workers. The kernel ends a worker when a grammar has used up its time or memory,
or when the server hangs up on it, also by dying. FD is a socket of the server's: with each byte on it comes
one end of a connection, for a new worker. Over it the server sends a grammar as a line of JSON, and the
worker answers

    null          it has begun: if the connection ends before the next line, a limit was hit
    "reason"      why the grammar is not usable, empty if it is

and waits for the next. The process ends when the server closes FD, a worker when its connection is closed.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import sys
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

from llguidance import LLTokenizer

from shortfin_apps.llm.components.grammar.compiled import STACK_BYTES, UnusableGrammar, compiled
from shortfin_apps.llm.components.grammar.source import GrammarSource

MAX_REASON_CHARS = 1_000
NICENESS = 5  # requests that run come before a grammar that somebody wants


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Of a grammar: seconds of processor time, seconds on the clock, and bytes on top of the tokenizer's."""

    cpu_s: float = 2.0
    wall_s: float = 4.0
    memory_bytes: int = 512 << 20


def main() -> None:
    os.nice(NICENESS)
    control_fd, limits, eos_token_ids = map(json.loads, sys.argv[1:])
    tokenizer = LLTokenizer(sys.stdin.buffer.read().decode(), eos_token=eos_token_ids)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave no zombies
    with socket.socket(fileno=control_fd) as control:
        while connection := _next_connection(control):
            with connection:
                if os.fork() == 0:
                    control.close()
                    _work(connection, tokenizer, TrialLimits(*limits))


def _next_connection(control: socket.socket) -> socket.socket | None:
    message, fds, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=fds[0]) if message else None


def _work(connection: socket.socket, tokenizer: LLTokenizer, limits: TrialLimits) -> None:
    """The life of a worker, which never returns."""
    try:
        _limit_memory(limits.memory_bytes)
        threading.stack_size(STACK_BYTES)
        worker = threading.Thread(target=_try_each, args=(connection, tokenizer, limits))
        worker.start()
        worker.join()
    finally:
        os._exit(0)


def _try_each(connection: socket.socket, tokenizer: LLTokenizer, limits: TrialLimits) -> None:
    for line in connection.makefile("rb"):
        _limit_time(limits.cpu_s, limits.wall_s)
        _end_when_closed(connection, True)
        connection.sendall(b"null\n")
        reason = _problem(GrammarSource.from_json(line), tokenizer)
        _end_when_closed(connection, False)
        _limit_time(0, 0)
        connection.sendall(json.dumps(reason[:MAX_REASON_CHARS]).encode() + b"\n")


def _problem(source: GrammarSource, tokenizer: LLTokenizer) -> str:
    try:
        compiled(source, tokenizer)
    except UnusableGrammar as unusable:
        return str(unusable)
    except Exception as bug:  # of the library, which is not to be taken for a limit that was hit
        return f"the library failed on it ({type(bug).__name__})"
    return ""


def _limit_time(cpu_s: float, wall_s: float) -> None:
    """Both timers' signals end a process that does not handle them, also inside a library; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + STACK_BYTES + num_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or allowed < soft:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def _end_when_closed(connection: socket.socket, on: bool) -> None:
    """Has the kernel send SIGIO, which ends this process, when the other side closes `connection`."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC if on else flags & ~os.O_ASYNC)


def command(control_fd: int, limits: TrialLimits, eos_token_ids: list[int]) -> list[str]:
    """What starts this process."""
    arguments = [json.dumps(value) for value in (control_fd, astuple(limits), eos_token_ids)]
    return [sys.executable, "-m", __name__, *arguments]


if __name__ == "__main__":
    main()
