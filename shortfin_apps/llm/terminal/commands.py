"""The commands of a chat: lines that start with a single slash."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_type_hints

from shortfin_apps.llm.client import Sampling
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError
from shortfin_apps.llm.terminal.conversation import Conversation

_TYPES: Mapping[str, Any] = get_type_hints(Sampling)


def changed(sampling: Sampling, text: str) -> Sampling:
    """Return `sampling` changed by the words of `text`: `name=value` sets a parameter, `name=` unsets it.

    A value is parsed as JSON; if it is not JSON of the parameter's type, it is taken as a string. Raises
    InvalidRequestError for an invalid name or value.
    """
    values = dict(sampling)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidRequestError(f"the parameters have an open quotation ({error})") from None
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise InvalidRequestError(f"{word!r} has no value; write {word}=VALUE", name)
        if name not in _TYPES:
            raise InvalidRequestError(f"there is no parameter {name}; there are {', '.join(_TYPES)}", name)
        if value:
            values[name] = _parsed(name, value)
        else:
            values.pop(name, None)
    return cast(Sampling, values)


def shown(sampling: Sampling) -> str:
    """Format parameters as text that `changed` accepts; without any, say so."""
    if not sampling:
        return "(no parameters are set; the server has defaults)"
    return " ".join(
        f"{name}={shlex.quote(json.dumps(value, ensure_ascii=False))}" for name, value in sampling.items()
    )


def _parsed(name: str, text: str) -> object:
    """Return `text` parsed as JSON if that has the parameter's type, else `text` if it may be a string.

    Raises InvalidRequestError if neither is valid.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # slow to import and rarely needed

    # Strict, as pydantic would otherwise accept JSON's `true` as a number.
    adapter = TypeAdapter(_TYPES[name], config=ConfigDict(strict=True, allow_inf_nan=False))
    reason = ""
    for value in (_json(text), text):
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reason = reason or error.errors()[0]["msg"]
    raise InvalidRequestError(f"{name} cannot be {text!r}: {reason}", name)


def _json(text: str) -> object:
    """Parse JSON; return text that is not JSON unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


COMMAND_HELP = """\
  /regen            ask the last question again, with another seed
  /undo             forget the last question and its answer
  /clear            forget the conversation, but not the system message
  /system [TEXT]    set the system message for what follows, or show it; `/system -` drops it
  /params [N=V ..]  set sampling parameters, as in `/params temperature=0.2 top_k=40`, or show them;
                    `temperature=` leaves it to the server
  /save FILE        write the conversation as JSON, the body of a chat request, or as Markdown if FILE ends in
                    .md; `/save! FILE` overwrites a file
  /load FILE        go on with a conversation that was saved as JSON
  /help             this list
  /quit             quit
  //TEXT            send /TEXT, which is no command"""
OTHER_NAMES = {"/exit": "/quit", "/reset": "/clear"}


def is_command(turn: str) -> bool:
    """Whether a turn is a command: it starts with a single slash.

    A turn of several lines is pasted text, not a command, except for `/system`.
    """
    if turn.startswith("//"):
        return False
    return turn.startswith("/") and ("\n" not in turn or turn.startswith("/system "))


def without_escape(turn: str) -> str:
    """Return the text to send for a turn that is not a command: `//` at its start becomes `/`."""
    return turn[1:] if turn.startswith("//") else turn


class Commands:
    """Executes commands on a conversation. `regenerate` must answer the last question again.

    `sampling` holds the current parameters, which `/params` changes. `done` is True after `/quit`.
    """

    def __init__(
        self,
        conversation: Conversation,
        sampling: Sampling,
        say: Callable[[str], None],
        regenerate: Callable[[], None],
    ) -> None:
        self.sampling = sampling
        self.done = False
        self._conversation = conversation
        self._say = say
        self._commands: dict[str, Callable[[str], None]] = {
            "/regen": self._without_argument(regenerate),
            "/undo": self._without_argument(self._undo),
            "/clear": self._without_argument(self._clear),
            "/system": self._system,
            "/params": self._params,
            "/save": lambda name: self._save(name, overwrite=False),
            "/save!": lambda name: self._save(name, overwrite=True),
            "/load": self._load,
            "/help": self._without_argument(lambda: say(COMMAND_HELP)),
            "/quit": self._without_argument(self._quit),
        }

    @property
    def names(self) -> list[str]:
        return list(self._commands)

    def run(self, line: str) -> None:
        """Execute a command line; if that fails, print the reason."""
        name, *rest = line.split(maxsplit=1)
        command = self._commands.get(OTHER_NAMES.get(name, name))
        try:
            if command is None:
                raise InvalidRequestError(
                    f"unknown command {name}; /help lists the commands, and `/{name}` sends it as text"
                )
            command(rest[0].strip() if rest else "")
        except LlmError as error:
            self._say(str(error))

    def _without_argument(self, action: Callable[[], None]) -> Callable[[str], None]:
        def run(argument: str) -> None:
            if argument:
                raise InvalidRequestError(f"the command has no arguments, but there is {argument!r}")
            action()

        return run

    def _undo(self) -> None:
        first_line = self._conversation.undo().partition("\n")[0]
        self._say(f"(forgotten: {first_line[:60]})")

    def _clear(self) -> None:
        self._conversation.reset()
        self._say("(forgotten)")

    def _system(self, text: str) -> None:
        if text == "-":
            self._conversation.system = None
        elif text:
            self._conversation.system = text
        system = self._conversation.system
        self._say("(no system message)" if system is None else f"(the system message is: {system})")

    def _params(self, text: str) -> None:
        self.sampling = changed(self.sampling, text)
        self._say(shown(self.sampling))

    def _save(self, name: str, overwrite: bool) -> None:
        if not name:
            raise InvalidRequestError("/save needs a file name")
        self._conversation.save(_path(name), overwrite)
        self._say(f"(saved to {name})")

    def _load(self, name: str) -> None:
        if not name:
            raise InvalidRequestError("/load needs a file name")
        self._conversation.load(_path(name))
        self._say(f"({len(self._conversation.messages)} messages loaded)")

    def _quit(self) -> None:
        self.done = True


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 (leaves unknown users)
