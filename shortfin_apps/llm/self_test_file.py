"""The artefact's `self_test.json`: what the model computes for a few prompts, by the reference.

The builder writes it (`builder/self_test/`), and whoever runs the program compares with it
(`components/self_test/`). All positions count from 0, and what is said of a position is said of the
model after the tokens up to it, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.errors import ArtifactError

FORMAT_VERSION = 1
NUM_BEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLogits:
    """The logits of one position: of the file's `sample_ids`, and the best ones, best first."""

    position: int
    sampled: tuple[float, ...]
    best_ids: tuple[int, ...]
    best: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSums:
    """Sums over K, and over V, of the positions `start .. stop - 1` of one layer, and of their squares.

    K is rotated. Sums do not depend on the order in which a page has its elements.
    """

    layer: int
    start: int
    stop: int
    keys: tuple[float, float]
    values: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPrompt:
    """A prompt and what is known of it."""

    token_ids: tuple[int, ...]
    logits: tuple[ExpectedLogits, ...]
    pages: tuple[PageSums, ...]

    __test__ = False  # no class of pytest's

    def at(self, position: int) -> ExpectedLogits | None:
        """The logits of that position, if it is one of those that are checked."""
        return next((each for each in self.logits if each.position == position), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestFile:
    """The whole file.

    An error is the root mean square of a row's differences at `sample_ids`, in standard deviations of what
    is expected there; `tolerance` is the largest that is allowed. `stride` is the tokens of a page, and
    `slabs` are the layers whose keys and values, or states, lie in each slab of the page table.
    """

    format_version: int
    stride: int
    slabs: tuple[tuple[int, ...], ...]
    tolerance: float
    sample_ids: tuple[int, ...]
    prompts: tuple[TestPrompt, ...]

    @classmethod
    def load(cls, path: Path) -> SelfTestFile:
        """Raises ArtifactError."""
        try:
            return cls.from_json(path.read_bytes())
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, text: bytes) -> SelfTestFile:
        """Raises ArtifactError."""
        try:
            version = _FORMAT.validate_json(text).get("format_version")
            if version != FORMAT_VERSION:
                raise ArtifactError(
                    f"self-tests of format {version} are not read by this version of shortfin-llm "
                    f"({FORMAT_VERSION}); rebuild the artefact, or use `--self-test off`"
                )
            return _FILE.validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"]) or "the whole"
            raise ArtifactError(
                f"`{name}`: {problem['msg']}; rebuild with `shortfin-llm build`, or use `--self-test off`"
            ) from None

    def to_json(self) -> bytes:
        return _FILE.dump_json(self) + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestLayout:
    """Which positions of a test prompt entries compute, in a model with pages of `stride` tokens.

    A prompt has two full pages and three tokens more, or as many as the context has. A decode starts at the
    end of a full page (`bases` are such positions), so that its rows share all pages but the last; it then
    decodes DECODE_STEPS tokens.
    """

    stride: int
    length: int

    __test__ = False

    @classmethod
    def of(cls, stride: int, context_length: int) -> TestLayout:
        return cls(stride=stride, length=min(2 * stride + 3, context_length))

    @property
    def bases(self) -> tuple[int, ...]:
        """Where decodes start: behind one page and behind two, as far as the prompt goes."""
        ends = (self.stride, 2 * self.stride)
        return tuple(end for end in ends if end + DECODE_STEPS <= self.length) or (0,)

    @property
    def checked(self) -> tuple[int, ...]:
        """Positions whose logits some entry returns."""
        ends = [self.stride, 2 * self.stride, self.length]
        last = {min(end, self.length) - 1 for end in ends}
        return tuple(sorted(last | {base + step for base in self.bases for step in range(DECODE_STEPS)}))

    @property
    def summed(self) -> tuple[tuple[int, int], ...]:
        """The positions of which there are sums: the first page, and the first token of each decode."""
        first = (0, min(self.stride, self.length))
        return tuple(dict.fromkeys([first, *((base, base + 1) for base in self.bases)]))


DECODE_STEPS = 2

_FORMAT = TypeAdapter(dict[str, object])
_FILE = TypeAdapter(SelfTestFile)
