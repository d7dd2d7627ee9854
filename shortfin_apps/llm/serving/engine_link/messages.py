"""Messages between an API process and the engine's process, as MessagePack.

    API process                                engine's process
    Prepared ─────────────────────────────────>
             <───────────────────────────────── Welcome
    Serving ──────────────────────────────────>
    Submit ───────────────────────────────────>
             <───────────────────────────────── Admitted, or Refused
             <───────────────────────────────── Deltas: one message a step, of all its requests
    Abort, FlushCache ────────────────────────>
    Look ─────────────────────────────────────>
             <───────────────────────────────── Seen
             <───────────────────────────────── EngineState, whenever it changes
    Ask ──────────────────────────────────────>
             <───────────────────────────────── Order, to every API process
    Counted ──────────────────────────────────>
             <───────────────────────────────── Counted, the sums
    WriteDump ────────────────────────────────>
             <───────────────────────────────── DumpWritten

Both processes run the same release, so messages are not versioned.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.contract import errors
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError, OverloadedError

# Commands: each runs in all API processes, whichever process received the request, and returns counts.


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Abort the requests with these IDs (only of `tenant`, if given). Counts aborted sequences."""

    request_ids: tuple[str, ...]
    tenant: str | None = None


class AbortAll(msgspec.Struct, frozen=True, tag=True):
    """Abort all requests. Counts aborted sequences."""


class SetLogLevel(msgspec.Struct, frozen=True, tag=True):
    """Set the minimum log level, as in Python's `logging`. Returns no counts."""

    level: str


class ReadMetrics(msgspec.Struct, frozen=True, tag=True):
    """Return `ServerMetrics.counts`."""


Command = AbortRequests | AbortAll | SetLogLevel | ReadMetrics


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Prepared(Message, frozen=True):
    """The API process can serve as soon as the engine is loaded."""


class EngineState(Message, frozen=True):
    """The values of `EngineClient.ready` and `EngineClient.problem`."""

    ready: bool
    problem: str | None


class Welcome(Message, frozen=True):
    """The engine is loaded. `number` identifies the link and is never reused."""

    number: int
    max_requests: int
    max_queue_tokens: int
    max_request_tokens: int
    returns_logits: bool
    state: EngineState
    stats: EngineStats


class Serving(Message, frozen=True):
    """The API process has received its welcome, and no longer refuses requests."""


class Submit(Message, frozen=True):
    """A call of `EngineClient.submit`. Of a grammar, only the source and its request field are sent."""

    call: GenerateCall
    grammar: GrammarSource | None = None
    grammar_param: str = ""


class Admitted(Message, frozen=True):
    request_id: str


class Refused(Message, frozen=True):
    request_id: str
    error: LlmError


class Deltas(Message, frozen=True):
    deltas: list[Delta]


class Abort(Message, frozen=True):
    request_id: str
    error: LlmError | None = None


class FlushCache(Message, frozen=True):
    pass


class Ask(Message, frozen=True):
    """Asks the engine's process to run a command in all processes; `number` identifies the answer."""

    number: int
    command: Command


class Order(Message, frozen=True):
    """Asks an API process to run a command; `number` identifies the answer."""

    number: int
    command: Command


class Counted(Message, frozen=True):
    """The answer to an Order: one process's counts; or to an Ask: the sums, and the engine's counters."""

    number: int
    counts: list[float]
    stats: EngineStats | None = None


class WriteDump(Message, frozen=True):
    """A call of `EngineClient.dump`; `number` identifies the answer."""

    number: int
    reason: str


class DumpWritten(Message, frozen=True):
    """The answer to a WriteDump: the dump's file, or the error."""

    number: int
    path: str = ""
    num_bytes: int = 0
    error: LlmError | None = None


class Look(Message, frozen=True):
    """A call of `EngineClient.snapshot`; `number` identifies the answer."""

    number: int
    after: int


class Seen(Message, frozen=True):
    """The answer to a Look: a snapshot, or the error."""

    number: int
    found: Snapshot | None = None
    error: LlmError | None = None


FromApi = Prepared | Serving | Submit | Abort | FlushCache | Ask | Counted | WriteDump | Look
FromEngine = Welcome | Admitted | Refused | Deltas | EngineState | Order | Counted | DumpWritten | Seen

_ERRORS: dict[str, type[LlmError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, LlmError)
}


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decoder_from_api() -> msgspec.msgpack.Decoder[FromApi]:
    return msgspec.msgpack.Decoder(FromApi, dec_hook=_from_plain)


def decoder_from_engine() -> msgspec.msgpack.Decoder[FromEngine]:
    return msgspec.msgpack.Decoder(FromEngine, dec_hook=_from_plain)


def _to_plain(error: object) -> list[object]:
    """Return an error as a list: the class's name and the arguments.

    Of a class that is not in `contract/errors.py`, the nearest base class in it is named.
    """
    if not isinstance(error, LlmError):
        raise NotImplementedError(f"{type(error).__name__} does not cross the border")
    name = next(kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    arguments: list[object] = [str(error)]
    if isinstance(error, InvalidRequestError):
        arguments += [error.param, error.extra]
    elif isinstance(error, OverloadedError):
        arguments.append(error.retry_after_s)
    return [name, *arguments]


def _from_plain(kind: type, plain: Any) -> LlmError:
    assert kind is LlmError, f"nothing else needs help to be decoded, but {kind} does"
    name, *arguments = plain
    return _ERRORS[name](*arguments)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
