"""Known configuration fields, so that no field that changes the computation is silently ignored.

A field is either used by the reader, or harmless (no effect on the computation), or must have one of its
neutral values, which leave the computation unchanged. An unknown field may change the computation in code
that is not known here, so it is only accepted if it is null, false or empty; `build --accept-field` allows
it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from shortfin_apps.llm.contract.errors import BuildError


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFields:
    """The tables for one configuration object.

    `neutral` lists the accepted values of fields that are otherwise not supported; `harmless_prefixes` cover
    every field that starts with them.
    """

    used: frozenset[str]
    harmless: frozenset[str] = frozenset()
    harmless_prefixes: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def using(self, names: AbstractSet[str]) -> KnownFields:
        """Return the tables for a reader that also uses `names`."""
        return replace(self, used=self.used | names)

    def check(
        self, where: str, given: Mapping[str, object], accepted: Collection[str] = (), prefix: str = ""
    ) -> None:
        """Raise BuildError for the first field of `given` that would change the computation.

        `accepted` are unknown fields that the user declares harmless; `prefix` is put before names in errors.
        """
        for name, value in given.items():
            if name in self.used or name in self.harmless or name.startswith(self.harmless_prefixes):
                continue
            if _says_nothing(value) or _is_one_of(value, self.neutral.get(name, ())):
                continue
            if name in self.neutral:
                raise BuildError(f"{where}: `{prefix}{name}` is {_short(value)}, which is not supported")
            if prefix + name not in accepted:
                raise BuildError(
                    f"{where}: `{prefix}{name}` is {_short(value)}, and whether that changes the computation "
                    f"is not known here; if it does not, build with `--accept-field {prefix}{name}`"
                )


def _says_nothing(value: object) -> bool:
    """Whether the value is null, false or empty. Zero is not, as a factor of 0 has a meaning."""
    return value is None or value is False or value in ("", [], {})


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, float):  # GGUF stores f32
        return any(isinstance(n, float | int) and math.isclose(value, n, rel_tol=1e-6) for n in neutral)
    return value in neutral


def _short(value: object) -> str:
    text = str(value).partition("\n")[0]
    return text if len(text) <= 40 else f"{text[:37]}..."


OFF, ONE = (0, -1), (1,)  # the neutral values of a count or cap, and of a factor
