"""Handles body fields that no route reads: refuses or ignores them, and reports the ignored ones.

An answer names the ignored fields in the header `X-Ignored-Fields`; the log names each one once. As clients
choose these names, they are escaped to printable ASCII, and their length and number are limited.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.schema import Body

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Fields"
MAX_NAMED = 16  # names in one header
MAX_NAME_CHARS = 64
MAX_LOGGED = 256  # names logged by one process
REST = "..."  # marks a name or list that was cut


class FieldCheck:
    """Checks bodies for unread fields and remembers the logged names. `strict` refuses unknown fields."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def ignored(self, body: Body) -> list[str]:
        """Return the names of ignored fields, each once; log new ones.

        Raises InvalidRequestError for an unsupported field and, if strict, for an unknown one.
        """
        names: dict[str, None] = {}
        for prefix, each in _bodies_in(body):
            if not each.model_extra:  # no further fields: a fast path for long conversations
                continue
            each.refuse_unserved(prefix)
            unread = each.unread_fields()
            if self._strict:
                _refuse_unknown(prefix, each, unread)
            names.update(dict.fromkeys(prefix + name for name in unread))
        self.log(list(names))
        return list(names)

    def log(self, names: Sequence[str]) -> None:
        """Log names that were not logged before."""
        for name in names:
            if len(self._logged) >= MAX_LOGGED:
                return
            if (shown := printable(name)) not in self._logged:
                self._logged.add(shown)
                logger.warning("requests have the field `%s`, which is ignored", shown)
                if len(self._logged) == MAX_LOGGED:
                    logger.warning("%d ignored fields were logged; further ones are not", MAX_LOGGED)


def header_value(names: Sequence[str]) -> str:
    """The value of `HEADER`: the names, separated by commas."""
    rest = [REST] if len(names) > MAX_NAMED else []
    return ", ".join([*map(printable, names[:MAX_NAMED]), *rest])


def printable(name: str) -> str:
    """Shorten and escape `name`: line ends, commas and other characters special in headers or logs."""
    if len(name) <= MAX_NAME_CHARS and len(shown := quote(name, safe="[]@!$")) <= MAX_NAME_CHARS:
        return shown
    return quote(name[:MAX_NAME_CHARS], safe="[]@!$")[: MAX_NAME_CHARS - len(REST)] + REST


def _bodies_in(body: Body, prefix: str = "") -> Iterator[tuple[str, Body]]:
    """Yield the body and its nested bodies, each with the prefix of its field names."""
    yield prefix, body
    for name, value in vars(body).items():
        if value is None or isinstance(value, str):  # fast path: pydantic's `isinstance` is slow
            continue
        several = value if isinstance(value, list) else [value]
        if several and isinstance(several[0], Body):  # the schema keeps lists uniform
            for each in several:
                yield from _bodies_in(each, f"{prefix}{name}.")


def _refuse_unknown(prefix: str, body: Body, unread: Sequence[str]) -> None:
    for name in unread:
        if name not in body.INERT:
            shown = printable(prefix + name)
            raise InvalidRequestError(
                f"`{shown}` is an unknown field; leave it out (the server has --strict-fields)",
                shown,
            )
