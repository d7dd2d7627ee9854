"""Analyses JSON schemas of tool call arguments, and writes grammars of strings that match a schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any
from urllib.parse import unquote

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.dialects.lark import MAX_SOURCE_CHARS, Lark, one_of, too_long

MAX_DIGITS = 10  # exclusive bound on the digits of a list index in a JSON pointer
MAX_DEPTH = 32  # of nested references and alternatives in a schema
_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_DEFINITION_PATHS = ("#/$defs/", "#/definitions/")
_WHOLE = "arguments"
_WITHIN = {"number": frozenset({"number", "integer"})}


class SchemaTypes:
    """Finds the JSON types that subschemas of the schema `root` allow."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._known: dict[int, Set[str] | None] = {}  # by `id` of the subschema; None: it specifies no type

    def of(self, schema: object) -> Set[str]:
        """Return the types that `schema`, a subschema of the root, allows; string if it specifies none."""
        return self._types(schema, 0) or {"string"}

    def _types(self, schema: object, depth: int) -> Set[str] | None:
        if not isinstance(schema, Mapping):
            return None
        if depth > MAX_DEPTH:
            return _TYPES
        if id(schema) not in self._known:
            self._known[id(schema)] = _TYPES  # for references to `schema` within itself
            said = [types for types in self._said(schema, depth + 1) if types is not None]
            self._known[id(schema)] = (_TYPES.intersection(*said) or _TYPES) if said else None
        return self._known[id(schema)]

    def _said(self, schema: Mapping[str, Any], depth: int) -> Iterator[Set[str] | None]:
        """Yield the types that each keyword allows; None for a subschema that specifies none."""
        if "type" in schema:
            named = schema["type"]
            yield _named(named if isinstance(named, list) else [named])
        if "const" in schema:
            yield types_of_value(schema["const"])
        if isinstance(values := schema.get("enum"), list):
            yield set[str]().union(*map(types_of_value, values))
        if "$ref" in schema:
            target = resolved(schema["$ref"], self.root)
            yield _TYPES if target is None else self._types(target, depth)
        for key in ("anyOf", "oneOf"):
            if options := list_of(schema, key):
                yield set[str]().union(*(self._types(option, depth) or _TYPES for option in options))
        for part in list_of(schema, "allOf"):
            yield self._types(part, depth)


def types_of_value(value: object) -> Set[str]:
    """Return the JSON schema types of a value; an integer is also a number."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case _:
            return {"array" if isinstance(value, list) else "object"}


def resolved(reference: object, root: Mapping[str, Any]) -> object:
    """Return the subschema of `root` at a reference such as `#/$defs/name`; None if there is none."""
    part: object = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in _names_in(reference):
        if isinstance(part, list) and name.isdecimal() and len(name) < MAX_DIGITS and int(name) < len(part):
            part = part[int(name)]
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _names_in(reference: str) -> list[str]:
    """Return the names and indices of a JSON pointer in a URI fragment (RFC 6901)."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in reference[1:].split("/")[1:]]


def part_alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema`, a subschema of `root`, as a self-contained schema with the targets of its references.

    If all references are to definitions, only these definitions are added. Otherwise all of `root` is.
    """
    references = list(_references(schema, root))
    if all(reference.startswith(_DEFINITION_PATHS) for reference in references):
        return {
            **_definitions(root, dict.fromkeys(tuple(_names_in(each)[:2]) for each in references)),
            **schema,
        }
    moved: dict[str, Any] = _with_moved_references(schema)
    return {**moved, "$defs": {_WHOLE: _with_moved_references(root)}}


def _definitions(root: Mapping[str, Any], paths: Iterable[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Return the definitions of `root` at paths such as ("$defs", "name")."""
    used: dict[str, dict[str, Any]] = {}
    for key, name in paths:
        if isinstance(table := root.get(key), Mapping) and name in table:
            used.setdefault(key, {})[name] = table[name]
    return used


def _references(schema: object, root: Mapping[str, Any]) -> Iterator[str]:
    """Yield each distinct reference in `schema`, and in the targets of these references, recursively."""
    left, seen = [schema], set[str | int]()  # seen: references, and ids of subschemas
    while left:
        part = left.pop()
        if not isinstance(part, list | Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list):
            left += part
            continue
        left += part.values()
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            if reference.startswith("#"):
                yield reference
                left.append(resolved(reference, root))


def _with_moved_references(schema: Any) -> Any:
    """Rewrite the references in a schema for its root's new place in the `$defs` of another root."""
    if isinstance(schema, list):
        return [_with_moved_references(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _with_moved_references(each) for key, each in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{_WHOLE}{reference[1:]}"
    return moved


def parts_of(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the schemas that its `$ref` and `allOf` add, recursively."""
    return _parts(parameters, parameters, set())


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the schemas of an object's properties by name, also from `$ref`, `allOf`, `anyOf`, `oneOf`."""
    seen: set[int] = set()
    own = list(_parts(parameters, parameters, seen))
    options = [each for part in own for key in ("anyOf", "oneOf") for each in list_of(part, key)]
    others = [part for option in options for part in _parts(option, parameters, seen)]
    return _properties(others, "anyOf") | _properties(own, "allOf")


def required_of(parameters: Mapping[str, Any]) -> Set[str]:
    """Return the names of the properties that an object must have."""
    names = [name for part in parts_of(parameters) for name in list_of(part, "required")]
    return {name for name in names if isinstance(name, str)}


def list_of(schema: Mapping[str, Any], key: str) -> list[object]:
    """Return the list at `key`, or an empty list."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _parts(schema: object, root: Mapping[str, Any], seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that a value must all match, except those whose `id` is in `seen`; update `seen`."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            target = [resolved(part["$ref"], root)] if "$ref" in part else []
            left += reversed([*target, *list_of(part, "allOf")])


def _properties(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, object]:
    """Return the schemas of properties by name; `key`: keyword to combine several schemas of one name."""
    found: dict[str, list[object]] = {}
    for part in parts:
        if isinstance(properties := part.get("properties"), Mapping):
            for name, schema in properties.items():
                found.setdefault(name, []).append(schema)
    return {name: schemas[0] if len(schemas) == 1 else {key: schemas} for name, schemas in found.items()}


def _named(names: list[object]) -> Set[str]:
    """Return the types with these names, or all types if a name is not a JSON schema type."""
    known = [_WITHIN.get(name, {name}) for name in names if isinstance(name, str) and name in _TYPES]
    return set[str]().union(*known) if len(known) == len(names) else _TYPES


ANY = "/(?s:.*)/"
MAX_PARTS = 200  # subschemas of a schema, each counted once per reference to it
PART_CHARS = 8  # reading a subschema counts as reading so many characters
NO_BOUND = 1 << 31  # lengths are capped here: no answer has so many characters
_UNKEPT = ("if", "then", "else", "$dynamicRef", "$recursiveRef")
_MONTH_AND_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
)
_DATE = f"[0-9]{{4}}-{_MONTH_AND_DAY}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_CLOCK = "([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_URI_CHAR = r"([a-zA-Z0-9._~:/?@!$&'()*+,;=\[\]-]|%[0-9a-fA-F]{2})"
# RFC 3339, 5321 (without quoted names), 1123, 4291 (without embedded IPv4), 4122, 3986 (only its characters).
# Other formats have no effect, as in JSON schema.
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})[tT]({_TIME})",
    "duration": f"P({_DAYS}(T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": rf"[a-zA-Z0-9!#$%&'*+/=?^_`{{|}}~-]+(\.[a-zA-Z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "|".join(
        [
            f"({_GROUP}:){{7}}{_GROUP}",
            f"({_GROUP}:){{1,7}}:",
            f":(:{_GROUP}){{1,7}}",
            "::",
            *(f"({_GROUP}:){{1,{n}}}(:{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)),
        ]
    ),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:{_URI_CHAR}*(#{_URI_CHAR}*)?",
}


def fitting_text(lark: Lark, schema: object, types: SchemaTypes, *, strict: bool) -> str | None:
    """Return a Lark expression of the strings that match `schema`, a subschema of `types.root`.

    Returns None if all strings match. If strict, raises InvalidRequestError for an unenforceable keyword;
    otherwise `pattern`, `not` and such keywords are ignored. Always raises it for an oversized schema.
    """
    return " & ".join(_Texts(lark, types, strict=strict).parts(schema, 0)) or None


class _Texts:
    """Writes Lark expressions of strings that match subschemas of `types.root`."""

    def __init__(self, lark: Lark, types: SchemaTypes, *, strict: bool) -> None:
        self._lark = lark
        self._strict = strict
        self._types = types
        self._num_left = MAX_PARTS
        self._chars_left = MAX_SOURCE_CHARS

    def parts(self, schema: object, depth: int) -> Iterator[str]:
        """Yield expressions that a string must all match. Raises InvalidRequestError if they are too long."""
        for text in self._parts(schema, depth):
            self._count(len(text))
            yield text

    def _count(self, num_chars: int) -> None:
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise too_long()

    def _parts(self, schema: object, depth: int) -> Iterator[str]:
        self._lark.read(PART_CHARS)
        if not isinstance(schema, Mapping):
            return
        self._num_left -= 1
        if depth > MAX_DEPTH or self._num_left < 0:
            if self._strict:
                raise refused("$ref", "refers to itself, or to too many parts")
            return
        yield from self._values(schema)
        yield from _lengths(schema, strict=self._strict)
        if isinstance(form := schema.get("format"), str) and form in FORMATS:
            yield f"/{_escaped_slashes(FORMATS[form])}/"
        if "$ref" in schema:
            yield from self.parts(self._target(schema["$ref"]), depth + 1)
        for part in list_of(schema, "allOf"):
            yield from self.parts(part, depth + 1)
        if options := list_of(schema, "anyOf"):
            yield one_of([self._all(option, depth) for option in options])
        if options := list_of(schema, "oneOf"):
            yield self._one_of([self._all(option, depth) for option in options])
        if self._strict:
            yield from self._strictly(schema, depth)

    def _strictly(self, schema: Mapping[str, Any], depth: int) -> Iterator[str]:
        if "pattern" in schema:
            self._lark.read(len(str(schema["pattern"])))
            yield searched(schema["pattern"])
        if "not" in schema and "string" in self._types_or_all(schema["not"]):
            yield f"({ANY} & ~{self._all(schema['not'], depth)})"
        for keyword in _UNKEPT:
            if keyword in schema:
                raise refused(keyword, "cannot be kept in this model's form of calls")

    def _all(self, schema: object, depth: int) -> str:
        """Return one expression of the strings that match `schema`."""
        if schema is False or "string" not in self._types_or_all(schema):
            return f"({ANY} & ~{ANY})"
        return "(" + (" & ".join(self.parts(schema, depth + 1)) or ANY) + ")"

    def _one_of(self, options: list[str]) -> str:
        if not self._strict:
            return one_of(options)
        self._count(len(options) * sum(map(len, options)))
        others = [options[:place] + options[place + 1 :] for place in range(len(options))]
        alone = [
            f"({option} & ~{one_of(rest)})" if rest else option
            for option, rest in zip(options, others, strict=True)
        ]
        return one_of(alone)

    def _types_or_all(self, schema: object) -> Set[str]:
        return {"string"} if isinstance(schema, bool) else self._types.of(schema)

    def _values(self, schema: Mapping[str, Any]) -> Iterator[str]:
        if "const" in schema:
            yield self._one_text([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            yield self._one_text(values)

    def _one_text(self, values: Sequence[object]) -> str:
        texts = [value for value in values if isinstance(value, str)]
        self._lark.read(len(values) + sum(map(len, texts)))
        return one_of([json.dumps(text, ensure_ascii=False) for text in texts] or [f"({ANY} & ~{ANY})"])

    def _target(self, reference: object) -> object:
        self._lark.read(len(str(reference)))
        target = resolved(reference, self._types.root)
        if target is None and self._strict:
            raise refused("$ref", f"refers to {json.dumps(reference)}, which is not there")
        return target


def searched(pattern: object) -> str:
    """Return an expression of the strings that contain a match of a JSON schema's `pattern`.

    Raises InvalidRequestError if the pattern is not a string.
    """
    if not isinstance(pattern, str):
        raise refused("pattern", "must be a string")
    return "/" + "|".join(_anchored(_escaped_slashes(part)) for part in _alternatives(pattern)) + "/"


def _anchored(pattern: str) -> str:
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    pattern = pattern.removeprefix("^")
    has_end = pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1
    return f"{begin}({pattern[:-1]})" if has_end else f"{begin}({pattern})(?s:.*)"


def _alternatives(pattern: str) -> list[str]:
    """Split the regular expression at each `|` outside of groups and character classes."""
    parts, begin, depth, in_class, is_escaped = [], 0, 0, False, False
    for place, char in enumerate(pattern):
        is_plain = not is_escaped and not in_class
        if is_plain and char in "()":
            depth += 1 if char == "(" else -1
        elif not is_escaped and char in "[]":
            in_class = char == "["
        is_escaped = char == "\\" and not is_escaped
        if is_plain and char == "|" and depth == 0:
            parts.append(pattern[begin:place])
            begin = place + 1
    return [*parts, pattern[begin:]]


def _escaped_slashes(pattern: str) -> str:
    """Escape slashes and line ends in a regular expression for use between slashes in Lark."""
    result, is_escaped = [], False
    for char in pattern:
        result.append("\\/" if char == "/" and not is_escaped else "\\n" if char == "\n" else char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(result)


def _lengths(schema: Mapping[str, Any], *, strict: bool) -> Iterator[str]:
    least = _length(schema, "minLength", strict=strict) or 0
    most = _length(schema, "maxLength", strict=strict)
    if most is not None and most < least:
        if strict:
            raise refused("minLength", "is more than its `maxLength`")
    elif least or most not in (None, NO_BOUND):
        yield f"/(?s:.{{{least},{'' if most in (None, NO_BOUND) else most}}})/"


def _length(schema: Mapping[str, Any], keyword: str, *, strict: bool) -> int | None:
    """Return the length that a keyword gives, at most NO_BOUND; None if absent or invalid.

    If strict, raises InvalidRequestError for an invalid value.
    """
    value = schema.get(keyword)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return min(value, NO_BOUND)
    if keyword in schema and strict:
        raise refused(keyword, "must be a whole number")
    return None


def refused(keyword: str, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"`tools`: `{keyword}` of a strict function {fault}; leave it out", "tools")
