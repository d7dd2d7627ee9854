"""Where and how KV events are published."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from shortfin_apps.llm.contract.errors import LlmError

ENDPOINT = re.compile(r"tcp://\S+:(\d{1,5}|\*)|ipc://\S+")


class KVEventsError(LlmError):
    """KV events cannot be published as configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventOptions:
    """ZeroMQ endpoints to bind, such as `tcp://*:5557`, and message settings.

    With `replay_endpoint` None, nothing is replayed. `topic` is the first frame of each message. `hash_seed`
    is vLLM's PYTHONHASHSEED; with None, no other process has the same hashes.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    hash_seed: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can read the events, which contain the token IDs of prompts."""
        endpoints = (self.endpoint, self.replay_endpoint)
        return all(_is_local(endpoint) for endpoint in endpoints if endpoint is not None)


def is_endpoint(text: str) -> bool:
    """Whether ZeroMQ can bind the endpoint as intended."""
    found = ENDPOINT.fullmatch(text)
    # ZeroMQ would take a larger port modulo 65536.
    return found is not None and (found[1] in (None, "*") or int(found[1]) < 1 << 16)


def _is_local(endpoint: str) -> bool:
    address = urlsplit(endpoint)
    try:
        return address.scheme == "ipc" or ipaddress.ip_address(address.hostname or "").is_loopback
    except ValueError:
        return address.hostname == "localhost"
