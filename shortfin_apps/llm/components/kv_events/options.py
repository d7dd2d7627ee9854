"""Settings of KV events: where and how they are published."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.setting import setting

ENDPOINT = re.compile(r"tcp://\S+:(\d{1,5}|\*)|ipc://\S+")


class KVEventsError(LlmError):
    """KV events cannot be published as configured."""


def checked_endpoint(text: str) -> str:
    """Return `text` if it is an endpoint that ZeroMQ binds as written. Raises ValueError otherwise."""
    found = ENDPOINT.fullmatch(text)
    # ZeroMQ would bind a larger port modulo 65536.
    if found is None or not (found[1] in (None, "*") or int(found[1]) < 1 << 16):
        raise ValueError("it must be tcp://HOST:PORT, where * stands for every address, or ipc://PATH")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventSettings:
    """Endpoints and topic of KV events; without the respective endpoint, nothing is published or replayed."""

    kv_events_endpoint: str | None = setting(
        None,
        "ZeroMQ endpoint at which to publish the pages of the prefix cache that come and go, in vLLM's "
        "format, as tcp://*:5557; subscribers see the token ids of prompts (docs/routers.md)",
        read=checked_endpoint,
    )
    kv_events_replay_endpoint: str | None = setting(
        None,
        "ZeroMQ endpoint at which subscribers ask for KV events that they missed, as tcp://*:5558",
        read=checked_endpoint,
    )
    kv_events_topic: str | None = setting(
        None,
        "topic of KV events (default: kv@HOST:PORT@MODEL); HOST:PORT must be the address by which the router "
        "knows this server",
        min_length=1,
    )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can read the events, which contain token IDs of prompts."""
        endpoints = (self.kv_events_endpoint, self.kv_events_replay_endpoint)
        return all(_is_local(endpoint) for endpoint in endpoints if endpoint is not None)


def _is_local(endpoint: str) -> bool:
    address = urlsplit(endpoint)
    try:
        return address.scheme == "ipc" or ipaddress.ip_address(address.hostname or "").is_loopback
    except ValueError:
        return address.hostname == "localhost"
