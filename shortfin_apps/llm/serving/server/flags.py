"""The command line of `serve`: a flag for each setting, in both spellings, and upstream's."""

from __future__ import annotations

import argparse
import logging
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr

from shortfin_apps.llm.serving.server.config import EMPTY, KEYS, SUBJECTS, SWITCHES, ServerConfig, flag
from shortfin_apps.llm.serving.server.config_sources import (
    UPSTREAM_IGNORED,
    UPSTREAM_NAMES,
    Note,
    load,
    note_ignored,
    read_yaml,
)
from shortfin_apps.llm.setting import Setting, settings_of

logger = logging.getLogger(__name__)

REPEATED = (*KEYS, "cors_origin")  # flags that take one value and may be repeated

TITLES = {"model": "model", "http": "HTTP", "engine": "engine", "requests": "requests"}


class _HelpAll(argparse.Action):
    """Prints the help with every setting, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        show_every_setting(parser)
        parser.print_help()
        parser.exit()


def show_every_setting(parser: argparse.ArgumentParser) -> None:
    """Restore the help of settings that are not common, which `--help` leaves out."""
    for action in parser._actions:
        action.help = getattr(action, "full_help", action.help)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, in both spellings, and upstream's flags."""
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument("artifact", nargs="?", metavar="MODEL", help=_help("artifact"))
    parser.add_argument("--artifact", dest="artifact_flag", help=argparse.SUPPRESS)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every setting and exit")
    yaml_help = "file with any of the settings by name"
    _add_flag(parser, "config", "config", type=Path, metavar="YAML", help=yaml_help)
    for subject, kind in SUBJECTS.items():
        group = parser.add_argument_group(TITLES[subject])
        add_settings(group, [each.name for each in settings_of(kind) if each.name != "artifact"])
        for added in group._group_actions:
            if not ServerConfig.SETTINGS[added.dest].is_common and added.help != argparse.SUPPRESS:
                added.full_help = added.help  # type: ignore[attr-defined]
                added.help = argparse.SUPPRESS
    for other, ours in UPSTREAM_NAMES.items():
        _add_flag(parser, other, ours, help=argparse.SUPPRESS)
    for name, arity in UPSTREAM_IGNORED.items():
        action = "store_true" if arity == "flag" else "store"
        _add_flag(parser, name, name, action=action, help=argparse.SUPPRESS)


def add_settings(parser: argparse._ActionsContainer, names: Iterable[str]) -> None:
    """Add a flag for each named setting, in both spellings; an omitted flag sets no attribute.

    Switches are added with the setting that they stand for, which then excludes them.
    """
    for name in names:
        switches = {switch: value for switch, (setting, value) in SWITCHES.items() if setting == name}
        container = parser.add_mutually_exclusive_group() if switches else parser
        _add_flag(container, name, name, help=_help(name), **_arity(ServerConfig.SETTINGS[name]))
        for switch, value in switches.items():
            as_flag = f"the same as {flag(name)} {value}"
            _add_flag(container, switch, name, action="store_const", const=value, help=as_flag)


def from_arguments(args: argparse.Namespace, note: Note = logger.warning) -> ServerConfig:
    """Return the effective configuration. Raises ServerConfigError, which names the invalid setting.

    `note` is called for settings without effect.
    """
    values = {k: v for k, v in vars(args).items() if k in ServerConfig.SETTINGS and v is not None}
    if args.artifact_flag is not None:
        values["artifact"] = args.artifact_flag
    for name in UPSTREAM_IGNORED.keys() & vars(args).keys():
        note_ignored(name, None, note)
    return load(values, read_yaml(Path(args.config), note) if "config" in args else EMPTY, note)


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


def _arity(of: Setting) -> dict[str, Any]:
    """Return argparse's options for a flag's number of values.

    A setting with several values takes one value per flag if it is in REPEATED, else all after one flag.
    """
    if of.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    options: dict[str, Any] = {"metavar": _metavar(of.type)}
    if get_origin(of.type) not in (tuple, Mapping):
        return options
    return options | ({"action": "append"} if of.name in REPEATED else {"nargs": "*"})


def _help(name: str) -> str:
    of = ServerConfig.SETTINGS[name]
    shown = "" if of.default in (None, (), "", {}) else f" (default: {of.default})"
    return f"{of.help}{shown}".replace("%", "%%")


def _metavar(annotation: object) -> str:
    """Return the placeholder for the value in `--help`."""
    options = [a for a in get_args(annotation) if a is not types.NoneType]
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, options)) + "}"
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return _metavar(options[0])
    if get_origin(annotation) is tuple:
        return _metavar(options[0])
    if get_origin(annotation) is Mapping:
        return "NAME=WEIGHT"
    return {Path: "PATH", int: "N", float: "X", SecretStr: "KEY"}.get(annotation, "NAME")  # type: ignore[call-overload,no-any-return]
