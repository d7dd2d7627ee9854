"""Free pages of a cache, and reference counts of the pages in use."""

from __future__ import annotations

from shortfin_apps.llm.components.kvcache.lease import SCRATCH_PAGE


class PagePool:
    """Reference counts of the pages `1 .. num_pages - 1`. The scratch page is never handed out.

    Each `release` drops one reference; the last one frees the page.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(
                f"A page table of {num_pages} pages has none in addition to the scratch page; use 2 or more."
            )
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free = list(
            range(num_pages - 1, SCRATCH_PAGE, -1)
        )  # a stack: the page freed last is used first

    @property
    def total(self) -> int:
        """Number of pages that can be handed out."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page_id: int) -> int:
        return self._references[page_id]

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages with one reference each; None, without any change, if fewer are free."""
        if count > len(self._free):
            return None
        page_ids = [self._free.pop() for _ in range(count)]
        for page_id in page_ids:
            self._references[page_id] = 1
        return page_ids

    def retain(self, page_id: int) -> None:
        """Add a reference to a page, which must already have one."""
        assert self._references[page_id] > 0, f"page {page_id} is free and cannot be retained"
        self._references[page_id] += 1

    def release(self, page_id: int) -> None:
        """Drop one reference."""
        assert self._references[page_id] > 0, f"page {page_id} is released more often than it was retained"
        self._references[page_id] -= 1
        if self._references[page_id] == 0:
            self._free.append(page_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is both free and referenced, or neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert SCRATCH_PAGE not in free, "the scratch page is free to be handed out"
        assert self._references[SCRATCH_PAGE] == 0, "the scratch page has an owner"
        for page_id in range(1, self.num_pages):
            count = self._references[page_id]
            assert (count == 0) == (page_id in free), f"page {page_id} with {count} references is misplaced"
