"""The artefact's `self_test.json`: the reference's results for a few prompts.

The builder writes this file (`builder/self_test/`), and the self-test compares a program's results with it
(`components/self_test/`). Positions count from 0. The logits at a position are computed from the tokens
up to and including this position.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.contract.config import Pool
from shortfin_apps.llm.contract.errors import ArtifactError

FORMAT_VERSION = 2
NUM_BEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLogits:
    """Logits of one position: `sampled` of the file's `sample_ids`, and the best ones, best first."""

    position: int
    sampled: tuple[float, ...]
    best_ids: tuple[int, ...]
    best: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSums:
    """Sums over the keys and values of the positions `start .. stop - 1` in one layer.

    `keys` and `values` are each the sum of all elements and the sum of their squares, which do not depend on
    the order of a page's elements. RoPE has been applied to the keys.
    """

    layer: int
    start: int
    stop: int
    keys: tuple[float, float]
    values: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPrompt:
    """A prompt and its expected results.

    `drafts` are the logits of a draft layer at the positions where decodes start, without the hidden state
    before.
    """

    token_ids: tuple[int, ...]
    logits: tuple[ExpectedLogits, ...]
    pages: tuple[PageSums, ...]
    drafts: tuple[ExpectedLogits, ...] = ()

    __test__ = False  # not a pytest class

    def at(self, position: int) -> ExpectedLogits | None:
        """Return the expected logits at `position`, or None if the file has none for it."""
        return next((each for each in self.logits if each.position == position), None)

    def draft_at(self, position: int) -> ExpectedLogits | None:
        """Return the draft layer's expected logits at `position`, or None if the file has none for it."""
        return next((each for each in self.drafts if each.position == position), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestFile:
    """The content of the file.

    `tolerance` is the maximum error of a row of logits. The error is the root mean square of the differences
    at `sample_ids`, in standard deviations of the expected logits. `stride` is the number of tokens per page.
    `pools` lists, for each pool of pages, the layers that store keys and values, or states, in the pool.
    """

    format_version: int
    stride: int
    pools: dict[Pool, tuple[int, ...]]
    tolerance: float
    sample_ids: tuple[int, ...]
    prompts: tuple[TestPrompt, ...]

    @classmethod
    def load(cls, path: Path) -> SelfTestFile:
        """Read a file. Raises ArtifactError."""
        try:
            return cls.from_json(path.read_bytes())
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, text: bytes) -> SelfTestFile:
        """Parse a file's content. Raises ArtifactError."""
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
    """The positions of a test prompt that entries compute, in a model with pages of `stride` tokens.

    A prompt has two full pages and three more tokens, truncated to the context length. A decode starts after
    one or two full pages, at the positions `bases`, and decodes DECODE_STEPS tokens. All rows of a prompt
    that decode therefore share these full pages.
    """

    stride: int
    length: int

    __test__ = False

    @classmethod
    def of(cls, stride: int, context_length: int) -> TestLayout:
        return cls(stride=stride, length=min(2 * stride + 3, context_length))

    @property
    def bases(self) -> tuple[int, ...]:
        """Positions where decodes start: after one page and after two; only 0 if the prompt is too short."""
        ends = (self.stride, 2 * self.stride)
        return tuple(end for end in ends if end + DECODE_STEPS <= self.length) or (0,)

    @property
    def checked(self) -> tuple[int, ...]:
        """Positions for which at least one entry returns logits."""
        ends = [self.stride, 2 * self.stride, self.length]
        last = {min(end, self.length) - 1 for end in ends}
        return tuple(sorted(last | {base + step for base in self.bases for step in range(DECODE_STEPS)}))

    @property
    def summed(self) -> tuple[tuple[int, int], ...]:
        """Position ranges (start, stop) with PageSums: the first page, and the first token of each decode."""
        first = (0, min(self.stride, self.length))
        return tuple(dict.fromkeys([first, *((base, base + 1) for base in self.bases)]))


DECODE_STEPS = 2

_FORMAT = TypeAdapter(dict[str, object])
_FILE = TypeAdapter(SelfTestFile)
