"""The command line of `serve`: a flag for each field of `ServerConfig`, in both spellings, and upstream's."""

from __future__ import annotations

import argparse
import logging
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr

from shortfin_apps.llm.serving.server.config import KEYS, ServerConfig, flag
from shortfin_apps.llm.serving.server.config_sources import load, read_yaml
from shortfin_apps.llm.serving.server.other_names import UPSTREAM_IGNORED, UPSTREAM_NAMES, Note, note_ignored
from shortfin_apps.llm.serving.server.settings.engine import EngineSettings
from shortfin_apps.llm.serving.server.settings.http import HttpSettings
from shortfin_apps.llm.serving.server.settings.model import ModelSettings
from shortfin_apps.llm.serving.server.settings.requests import RequestSettings

logger = logging.getLogger(__name__)

REPEATED = (*KEYS, "cors_origin")  # flags that take one value and may be repeated

GROUPS = {"model": ModelSettings, "HTTP": HttpSettings, "engine": EngineSettings, "requests": RequestSettings}
# The settings that most users need, which `--help` shows; `--help-all` shows every one.
COMMON = frozenset(
    {
        *("weights", "kv", "context_length", "served_model_name"),
        *("host", "port", "api_key", "ssl_keyfile", "ssl_certfile", "api_processes", "log_level"),
        *("device", "device_ids", "threads", "batch_mode", "token_budget", "max_running", "pages"),
        *("prefix_cache", "speculative", "speculative_model"),
        *("max_queue", "tool_parser", "reasoning_parser", "default_temperature", "receipts"),
    }
)


class _HelpAll(argparse.Action):
    """Prints the help with every setting, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        show_every_setting(parser)
        parser.print_help()
        parser.exit()


def show_every_setting(parser: argparse.ArgumentParser) -> None:
    """Gives the settings that are not COMMON, which the help leaves out, their help back."""
    for action in parser._actions:
        action.help = getattr(action, "full_help", action.help)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field, in both spellings, and upstream's."""
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument("artifact", nargs="?", metavar="MODEL", help=_help("artifact"))
    parser.add_argument("--artifact", dest="artifact_flag", help=argparse.SUPPRESS)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every setting and exit")
    yaml_help = "file with any of the settings by name"
    _add_flag(parser, "config", "config", type=Path, metavar="YAML", help=yaml_help)
    for title, settings in GROUPS.items():
        names = [name for name in settings.__annotations__ if name != "artifact"]
        group = parser.add_argument_group(title)
        add_settings(group, names)
        for added in group._group_actions:
            if added.dest not in COMMON and added.help != argparse.SUPPRESS:
                added.full_help = added.help  # type: ignore[attr-defined]
                added.help = argparse.SUPPRESS
    for other, ours in UPSTREAM_NAMES.items():
        _add_flag(parser, other, ours, help=argparse.SUPPRESS)
    for name, kind in UPSTREAM_IGNORED.items():
        action = "store_true" if kind == "flag" else "store"
        _add_flag(parser, name, name, action=action, help=argparse.SUPPRESS)


def add_settings(parser: argparse._ActionsContainer, names: Iterable[str]) -> None:
    """Add a flag for each field, in both spellings; an omitted flag sets no attribute."""
    for name in names:
        annotation = ServerConfig.model_fields[name].annotation
        _add_flag(parser, name, name, help=_help(name), **_arity(name, annotation))


def from_arguments(args: argparse.Namespace, note: Note = logger.warning) -> ServerConfig:
    """Return the effective configuration. Raises ServerConfigError, which names the invalid setting.

    `note` is called for settings without effect.
    """
    values = {k: v for k, v in vars(args).items() if k in ServerConfig.model_fields and v is not None}
    if args.artifact_flag is not None:
        values["artifact"] = args.artifact_flag
    for name in UPSTREAM_IGNORED.keys() & vars(args).keys():
        note_ignored(name, None, note)
    return load(values, read_yaml(Path(args.config), note) if "config" in args else {}, note)


def _add_flag(parser: argparse._ActionsContainer, name: str, dest: str, **options: Any) -> None:
    """Add a flag. The help shows the spelling with dashes; the one with underscores works, too."""
    dashed, plain = flag(name), f"--{name}"
    parser.add_argument(dashed, dest=dest, default=argparse.SUPPRESS, **options)
    if plain != dashed:
        hidden = {**options, "help": argparse.SUPPRESS}
        parser.add_argument(plain, dest=dest, default=argparse.SUPPRESS, **hidden)
        if options.get("action") is argparse.BooleanOptionalAction:  # adds `--no-` to either spelling
            off: dict[str, Any] = {
                "action": "store_false",
                "default": argparse.SUPPRESS,
                "help": argparse.SUPPRESS,
            }
            parser.add_argument(f"--no_{name}", dest=dest, **off)


def _arity(name: str, annotation: object) -> dict[str, Any]:
    """Return a flag's arity. Several values are given by repeating the flag or, as upstream, at once."""
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    options: dict[str, Any] = {"metavar": _metavar(annotation)}
    if get_origin(annotation) is not tuple:
        return options
    return options | ({"action": "append"} if name in REPEATED else {"nargs": "*"})


def _help(name: str) -> str:
    field = ServerConfig.model_fields[name]
    shown = "" if field.default in (None, (), "") else f" (default: {field.default})"
    return f"{field.description}{shown}".replace("%", "%%")


def _metavar(annotation: object) -> str:
    """Placeholder for the value in `--help`."""
    options = [a for a in get_args(annotation) if a is not types.NoneType]
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, options)) + "}"
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return _metavar(options[0])
    if get_origin(annotation) is tuple:
        return _metavar(options[0])
    return {Path: "PATH", int: "N", float: "X", SecretStr: "KEY"}.get(annotation, "NAME")  # type: ignore[call-overload,no-any-return]
