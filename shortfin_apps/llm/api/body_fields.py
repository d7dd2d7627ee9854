"""Fields of a body that no route reads: refused by name, or ignored and named as ignored.

The answer names them in the header `X-Ignored-Fields`, and the log each name once. Both are made of what
strangers send, so names are written in visible ASCII, cut, and no more than so many.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from shortfin_apps.llm.api.schema import Body
from shortfin_apps.llm.errors import InvalidRequestError

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Fields"
MAX_NAMED = 16  # in one header
MAX_NAME_CHARS = 64
MAX_LOGGED = 256  # names in the log of one process
REST = "..."  # of a name or of a list that was cut


class FieldCheck:
    """Remembers which names the log has had. `strict` refuses the fields that nobody here knows."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def ignored(self, body: Body) -> list[str]:
        """The fields of a body that are ignored, each name once; new ones are logged.

        Raises InvalidRequestError for a field that is not served, and for an unknown one if strict.
        """
        names: dict[str, None] = {}
        for prefix, each in _bodies_in(body):
            each.refuse_unserved(prefix)
            unread = each.unread_fields()
            if self._strict:
                _refuse_unknown(prefix, each, unread)
            names.update(dict.fromkeys(prefix + name for name in unread))
        self._log(list(names))
        return list(names)

    def _log(self, names: Sequence[str]) -> None:
        for name in names:
            if len(self._logged) >= MAX_LOGGED:
                return
            if (shown := visible(name)) not in self._logged:
                self._logged.add(shown)
                logger.warning("requests give the field `%s`, which is ignored", shown)
                if len(self._logged) == MAX_LOGGED:
                    logger.warning("ignored fields beyond these %d are named in no log line", MAX_LOGGED)


def header_value(names: Sequence[str]) -> str:
    """A list with commas, for `HEADER`."""
    rest = [REST] if len(names) > MAX_NAMED else []
    return ", ".join([*map(visible, names[:MAX_NAMED]), *rest])


def visible(name: str) -> str:
    """A name without line ends, commas or anything else that headers and logs give a meaning to."""
    if len(name) <= MAX_NAME_CHARS and len(shown := quote(name, safe="[]@!$")) <= MAX_NAME_CHARS:
        return shown
    return quote(name[:MAX_NAME_CHARS], safe="[]@!$")[: MAX_NAME_CHARS - len(REST)] + REST


def _bodies_in(body: Body, prefix: str = "") -> Iterator[tuple[str, Body]]:
    """The body and those inside it, each with what the names of its fields begin with."""
    yield prefix, body
    for name in type(body).model_fields:
        value = getattr(body, name)
        several = value if isinstance(value, list) else [value]
        if several and isinstance(several[0], Body):  # the schema keeps lists uniform
            for each in several:
                yield from _bodies_in(each, f"{prefix}{name}.")


def _refuse_unknown(prefix: str, body: Body, unread: Sequence[str]) -> None:
    for name in unread:
        if name not in body.INERT:
            shown = visible(prefix + name)
            raise InvalidRequestError(
                f"`{shown}` is no field of this request; leave it out (the server has --strict-fields)",
                shown,
            )
