"""Check configuration fields, so that no field that changes the computation is silently ignored.

A known field is either used by the reader, or harmless (without effect on the computation), or must have one
of its neutral values, which leave the computation unchanged. An unknown field might change the computation.
It is only accepted if it is null, false or empty, or named by `build --accept-field`. False says nothing
unless true is neutral.
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
    """The known fields of one configuration object, such as `config.json`.

    `used`: fields that the reader reads; `harmless`: fields without effect; `harmless_prefixes`: prefixes of
    further fields without effect; `neutral`: unsupported fields -> the values that are accepted nevertheless;
    `advice`: unsupported fields -> what the user can do.
    """

    used: frozenset[str]
    harmless: frozenset[str] = frozenset()
    harmless_prefixes: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)

    def using(self, names: AbstractSet[str]) -> KnownFields:
        """Return the known fields for a reader that also uses the fields `names`."""
        return replace(self, used=self.used | names)

    def check(
        self, where: str, given: Mapping[str, object], accepted: Collection[str] = (), prefix: str = ""
    ) -> None:
        """Raise BuildError for the first field of `given` that would or might change the computation.

        `accepted`: unknown fields that the user declares harmless, with `prefix`; `prefix`: put before the
        names of fields, as in `rope_scaling.`.
        """
        for name, value in given.items():
            if name in self.used or name in self.harmless or name.startswith(self.harmless_prefixes):
                continue
            neutral = self.neutral.get(name, ())
            if _says_nothing(value, neutral) or _is_one_of(value, neutral):
                continue
            if name in self.neutral:
                advice = f"; {self.advice[name]}" if name in self.advice else ""
                raise BuildError(
                    f"{where}: `{prefix}{name}` is {_short(value)}, which is not supported{advice}"
                )
            if prefix + name not in accepted:
                raise BuildError(
                    f"{where}: `{prefix}{name}` is {_short(value)}, and whether that changes the computation "
                    f"is not known here; if it does not, build with `--accept-field {prefix}{name}`"
                )


def _says_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether the value is null, empty, or false, unless true is a neutral value.

    0 is none of these, as a factor of 0 has a meaning.
    """
    is_off = value is False and not any(each is True for each in neutral)
    return value is None or is_off or value in ("", [], {})


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, float):  # GGUF stores f32
        return any(isinstance(n, float | int) and math.isclose(value, n, rel_tol=1e-6) for n in neutral)
    return value in neutral


def _short(value: object) -> str:
    text = str(value).partition("\n")[0]
    return text if len(text) <= 40 else f"{text[:37]}..."


OFF, ONE = (0, -1), (1,)  # neutral values: OFF of a count or a cap, ONE of a factor
