"""A fault schedule whose clients are in other processes, as far as the engine can tell; links die, too."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.contract.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from shortfin_apps.llm.serving.engine_link.api_links import ApiLinks
from shortfin_apps.llm.serving.engine_link.connection import LENGTH, Connection
from shortfin_apps.llm.serving.engine_link.messages import (
    FromApi,
    Prepared,
    Welcome,
    decoder_from_engine,
    encode,
)
from shortfin_apps.llm.serving.engine_link.remote_engine import RemoteEngine
from tests.components.fault_schedule import Answer, Client, Schedule, random_arrival
from tests.serving.engine_link.linked import NoGrammars, counts_nothing

NUM_LINKS = 2


class RemoteClient(Client):
    """A client of one link. `remote` is cut when its process has died."""

    def __init__(self, remote: RemoteEngine, asked: GenerateCall, expected: Answer, is_slow: bool) -> None:
        self.request_id = asked.request_id
        self.expected = expected
        self.deltas = []
        self.has_left = False
        self.was_refused = False
        self.remote = remote
        self._reads = asyncio.Event()
        self._is_slow = is_slow
        self.task = asyncio.ensure_future(self._submit_and_read(asked))

    async def _submit_and_read(self, asked: GenerateCall) -> None:
        try:
            self._stream = await self.remote.submit(asked)
        except (OverloadedError, UnavailableError, RequestAbortedError, InvalidRequestError):
            self.was_refused = True
            return
        await self._read()

    async def _close(self, reading: asyncio.Task[None]) -> None:
        await asyncio.gather(reading, return_exceptions=True)
        if hasattr(self, "_stream"):
            self._stream.close()


class BorderSchedule(Schedule):
    """The same acts and faults; each arrival is at one of NUM_LINKS links, and now and then a link is cut."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._cut_rate = self._rng.choice([0, 0.02, 0.1])
        self._links = ApiLinks()
        self._remotes: list[RemoteEngine] = []
        self._cut: list[RemoteEngine] = []
        self._engine_ends: list[Connection[FromApi]] = []
        self._connecting: list[asyncio.Task[None]] = []

    def _start(self) -> None:
        super()._start()
        self._connecting.append(asyncio.ensure_future(self._connect_all()))

    async def _connect_all(self) -> None:
        await self._links.serve(self.engine, NoGrammars())  # those to come
        for _ in range(NUM_LINKS):
            await self._connect()

    async def _connect(self) -> None:
        ours, theirs = socket.socketpair()
        link = await self._links.open(ours)
        self._engine_ends.append(link._connection)
        text = encode(Prepared())
        theirs.sendall(LENGTH.pack(len(text)) + text)
        while not link.is_welcome:
            await asyncio.sleep(0)
        [size] = LENGTH.unpack(theirs.recv(LENGTH.size))
        welcome = decoder_from_engine().decode(theirs.recv(size))  # and leave what may follow it
        assert isinstance(welcome, Welcome)
        max_unread = self._rng.choice([3, 512, 512])
        remote = RemoteEngine(theirs, welcome, execute=counts_nothing, max_unread_tokens=max_unread)
        remote.start()
        self._remotes.append(remote)

    def _act(self) -> None:
        if self._remotes and self._rng.random() < self._cut_rate:
            self._on_loop(self._cut_one)
        super()._act()

    def _cut_one(self) -> None:
        """Its process is killed; another takes its place."""
        remote = self._remotes.pop(self._rng.randrange(len(self._remotes)))
        transport = remote._connection._transport
        if transport is None:  # it was just started
            self._remotes.append(remote)
            return
        transport.abort()
        self._cut.append(remote)
        self._connecting.append(asyncio.ensure_future(self._connect()))

    def _turns(self) -> None:
        for _ in range(self._rng.randint(1, 4)):
            self.engine.turn()
            self._check_pages()
            if self._rng.random() < 0.8:
                self._loop.run()

    def _arrive_once(self) -> None:
        if not self._remotes:
            return
        asked, expected = random_arrival(self._rng, str(len(self.clients)))
        if asked.params.output_grammar is None:  # those are sources, over the border
            remote, is_slow = self._rng.choice(self._remotes), self._rng.random() < 0.2
            self.clients.append(RemoteClient(remote, asked, expected, is_slow))

    def _abort(self) -> None:
        if self.clients:
            client = self._rng.choice(self.clients)
            assert isinstance(client, RemoteClient)
            client.remote.abort(client.request_id)

    def _drain(self) -> None:
        """One process drains, as at a signal of its own."""
        if self._remotes:
            remote = self._rng.choice(self._remotes)
            self._drains.append(asyncio.ensure_future(remote.drain(self._rng.choice([0.0, 5.0]))))

    def _settle(self) -> None:
        super()._settle()
        for remote in self._remotes:
            self._drains.append(self._loop.create_task(remote.drain(0)))
        super()._settle()

    def _check(self) -> None:
        answered: list[Client] = []
        for client in self.clients:
            assert isinstance(client, RemoteClient)
            if client.was_refused:
                assert not client.deltas
            elif client.remote in self._cut:
                client.check(was_hit=True, was_away=True)
            else:
                answered.append(client)
        self.clients = answered
        super()._check()

    def _end(self) -> None:
        self._loop.run_until_complete(self._close())
        super()._end()

    async def _close(self) -> None:
        self._links.close()
        for remote in self._remotes:
            await remote.close()
        ends: list[Connection[Any]] = [*self._engine_ends]
        ends += [remote._connection for remote in (*self._remotes, *self._cut)]
        while not all(end.is_lost for end in ends):
            await asyncio.sleep(0)


def run(seed: int) -> None:
    BorderSchedule(seed).run()
