r"""KV cache that shares full pages of common prefixes: `--prefix-cache trie`.

Each node of the trie is one page. Its key is the page's tokens, so the path from the root to a node holds all
tokens that the page's K/V was computed from; keys are compared exactly, never only by hash. The first page's
key also holds the request's `cache_salt`: requests with different salts share nothing.

Ownership: every lease has one pool reference to each page of its block table, and the trie has one to each
node's page. A lease's tip is the node of its last published page: the nodes on the path from the root to the
tip are the lease's published pages, in the order of its block table. If two requests compute the same tokens
at the same time, the one that publishes later keeps its own copy of each page, so block tables never change.
If a node is leased, at least one of its leases reads the node's own page:

    lease A  page_ids [4, 5, 8]                 root
    lease B  page_ids [6, 7, 9]                  |
                                         node: page 4, copies [6]    A reads 4, B reads 6
                                                 |
                                         node: page 5, copies [7]    when A leaves, 5 is freed
                                            /          \             and 7 takes its place
                                       page 8          page 9

In models with sliding-window layers, a node also has a window page until that page is evicted
(window_pages.py). A prefix matches up to the last node after which tokens attend only to window pages that
are still cached.

A listener is notified of added and removed nodes (events.py), but not of window pages.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.events import (
    AllPages,
    PageEvent,
    PageListener,
    PagesPublished,
    PagesWithdrawn,
)
from shortfin_apps.llm.components.kvcache.lease import SCRATCH_PAGE, CachedNode, Lease, PageKey, WindowOptions


@dataclass(slots=True, eq=False)
class _TrieLease(Lease):
    cache_salt: str | None = None
    tip: CachedNode = field(kw_only=True)  # the node of page `num_shared_pages - 1`, or the root


class TrieCache(KVCache):
    """A trie of published pages; pages without a lease are evicted when free pages run out.

    The page released longest ago is evicted first. A lease holds a full path and releases the nodes from the
    tip upwards. In `_unleased`, every node therefore comes after all of its descendants, and the first node
    is always a leaf: eviction needs no search and removes only leaves.
    """

    shares_prefixes = True

    def __init__(
        self,
        num_pages: int,
        stride: int,
        window: WindowOptions | None = None,
        listener: PageListener | None = None,
    ) -> None:
        super().__init__(num_pages, stride, window)
        self._listener = listener
        self._listener_missed_some = False
        self._serials = count()
        self._root = CachedNode(key=(None, ()), parent=None, page_id=SCRATCH_PAGE, serial=next(self._serials))
        self._unleased: OrderedDict[CachedNode, None] = OrderedDict()
        self._retracted: set[CachedNode] = set()  # removed from the trie, but still leased

    def acquire(self, token_ids: Sequence[int], cache_salt: str | None = None) -> Lease:
        lease = _TrieLease(cache_salt=cache_salt, tip=self._root)
        nodes = self._match(token_ids, cache_salt)
        for node in nodes:
            self._pool.retain(node.page_id)
            lease.page_ids.append(node.page_id)
            self._enter(lease, node)
        if self._windows is not None:
            lease.window_page_ids = []
            self._windows.share(lease, nodes)
        lease.num_cached_tokens = lease.num_shared_pages * self.stride
        self._leases.add(lease)
        return lease

    def match_length(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        return self.stride * len(self._match(token_ids, cache_salt))

    def publish(self, lease: Lease, token_ids: Sequence[int], num_computed: int | None = None) -> None:
        num_computed = len(token_ids) if num_computed is None else num_computed
        if num_computed // self.stride > lease.num_shared_pages:
            self._publish_pages(lease, token_ids, num_computed // self.stride)
        self.give_up(lease, num_computed)

    def retract(self, lease: Lease) -> None:
        if not lease.num_shared_pages:
            return
        *_, (first, _) = _path_up(lease)
        if first in self._retracted:
            return
        del self._root.children[first.key]
        withdrawn = list(_subtree([first]))
        self._tell_withdrawn(withdrawn)
        for node in withdrawn:
            if self._windows is not None:
                self._windows.drop(node)
            if node.num_leases:
                self._retracted.add(node)
            else:
                del self._unleased[node]
                self._pool.release(node.page_id)

    def cached_page_ids(self) -> list[int]:
        return [node.page_id for node in self._unleased]

    def flush(self) -> int:
        evicted = self._evict(len(self._unleased))
        if not self._root.children:
            self._tell(AllPages(()))
        elif evicted:
            self._tell_withdrawn(evicted)
        if self._windows is not None:
            self._windows.flush()
        return len(evicted)

    def check_integrity(self) -> None:
        super().check_integrity()
        leases: Counter[CachedNode] = Counter()
        copies: Counter[tuple[CachedNode, int]] = Counter()
        for lease in self._leases:
            for node, page_id in _path_up(lease):
                leases[node] += 1
                copies[node, page_id] += page_id != node.page_id
        for node in self._nodes():
            assert node.num_leases == leases.pop(node, 0), f"page {node.page_id} is miscounted"
            assert (node.num_leases == 0) == (node in self._unleased), f"page {node.page_id} is misfiled"
            assert all(copies[node, page_id] == 1 for page_id in node.copies), "a copy has no lease"
        assert not leases, "a lease's path includes a node that was evicted"
        assert copies.total() == sum(len(node.copies) for node in self._nodes()), "a copy is unknown"
        self._check_eviction_order()

    def _keys(self, token_ids: Sequence[int], start: int, stop: int, salt: str | None) -> Iterator[PageKey]:
        """Yield the keys of the pages `start .. stop - 1` of a sequence."""
        stride = self.stride
        for index in range(start, stop):
            page_token_ids = tuple(token_ids[index * stride : (index + 1) * stride])
            yield None if index else salt, page_token_ids

    def _match(self, token_ids: Sequence[int], salt: str | None) -> list[CachedNode]:
        """Return the longest reusable path of nodes that matches `token_ids` without the last token."""
        nodes: list[CachedNode] = []
        node: CachedNode | None = self._root
        for key in self._keys(token_ids, 0, (len(token_ids) - 1) // self.stride, salt):
            if node is None or (node := node.children.get(key)) is None:
                break
            nodes.append(node)
        return nodes if self._windows is None else nodes[: self._windows.num_usable(nodes)]

    def _publish_pages(self, lease: Lease, token_ids: Sequence[int], num_full: int) -> None:
        """Publish the unpublished pages among the lease's first `num_full`."""
        assert isinstance(lease, _TrieLease), "the lease is another cache's"
        assert num_full <= len(lease.page_ids), "no K/V can be computed outside the lease's pages"
        if lease.tip in self._retracted:
            return
        added: list[CachedNode] = []
        for key in self._keys(token_ids, lease.num_shared_pages, num_full, lease.cache_salt):
            node = self._publish_page(lease, key, added)
            if self._windows is not None:
                self._windows.keep(node, lease, lease.num_shared_pages)
            self._enter(lease, node)
        if added and self._listener is not None:
            self._tell(_published(added))

    def _publish_page(self, lease: _TrieLease, key: PageKey, added: list[CachedNode]) -> CachedNode:
        """Return the child of the lease's tip with this key, creating the node if it does not exist.

        The lease's next page becomes the node's page, or a copy if the node's page is leased. A new node is
        appended to `added`.
        """
        page_id = lease.page_ids[lease.num_shared_pages]
        node = lease.tip.children.get(key)
        if node is None:
            node = lease.tip.children[key] = CachedNode(key, lease.tip, page_id, next(self._serials))
            added.append(node)
            self._pool.retain(page_id)
        elif node.num_leases == 0:
            self._replace_page(node, page_id)
        else:
            node.copies.append(page_id)
        return node

    def _replace_page(self, node: CachedNode, page_id: int) -> None:
        """Replace the node's page, which no lease reads, with a lease's page that has the same K/V."""
        self._pool.release(node.page_id)
        self._pool.retain(page_id)
        node.page_id = page_id

    def _enter(self, lease: _TrieLease, node: CachedNode) -> None:
        """Move the lease's tip down to its child `node`."""
        if node.num_leases == 0:
            self._unleased.pop(node, None)  # a new node is not in `_unleased`
        node.num_leases += 1
        lease.tip = node
        lease.num_shared_pages += 1

    def _leave(self, node: CachedNode, page_id: int) -> None:
        """Undo `_enter` for a lease that holds `page_id` for this node, and release that page."""
        self._pool.release(page_id)
        node.num_leases -= 1
        if page_id != node.page_id:
            node.copies.remove(page_id)
        elif node.copies and self._pool.references(page_id) == 1:
            self._replace_page(node, node.copies.pop())
        if node.num_leases:
            return
        if node in self._retracted:
            self._retracted.remove(node)
            self._pool.release(node.page_id)
        else:
            self._unleased[node] = None

    def _free_pages(self, lease: Lease) -> None:
        for node, page_id in _path_up(lease):
            self._leave(node, page_id)
        for page_id in lease.page_ids[lease.num_shared_pages :]:
            self._pool.release(page_id)

    def _allocate(self, count: int) -> list[int] | None:
        shortage = count - self._pool.num_free
        if shortage > len(self._unleased):
            return None  # before anything is evicted
        if shortage > 0:
            self._tell_withdrawn(self._evict(shortage))
        return self._pool.allocate(count)

    def _evict(self, count: int) -> list[CachedNode]:
        evicted: list[CachedNode] = []
        for _ in range(count):
            node, _ = self._unleased.popitem(last=False)
            evicted.append(node)
            assert node.parent is not None
            assert not node.children, "a published page is evicted before its continuations"
            del node.parent.children[node.key]
            self._pool.release(node.page_id)
            if self._windows is not None:
                self._windows.drop(node)
        return evicted

    def _tell_withdrawn(self, nodes: Iterable[CachedNode]) -> None:
        if self._listener is not None:
            self._tell(PagesWithdrawn(tuple(node.serial for node in nodes)))

    def _tell(self, event: PageEvent) -> None:
        """Send an event, or AllPages if the listener missed an earlier one; nothing if it has no room."""
        if self._listener is None:
            return
        if not self._listener.has_room:
            self._listener_missed_some = True
        elif self._listener_missed_some:
            self._listener_missed_some = False
            self._listener.tell(self._all_pages())
        else:
            self._listener.tell(event)

    def _all_pages(self) -> AllPages:
        return AllPages(tuple(_published([node]) for node in _subtree(self._root.children.values())))

    def _num_evictable(self) -> int:
        return len(self._unleased)

    def _check_eviction_order(self) -> None:
        position = {node: index for index, node in enumerate(self._unleased)}
        for node, index in position.items():
            children = [position[child] for child in node.children.values()]
            assert all(child < index for child in children), f"page {node.page_id} is before its children"

    def _nodes(self) -> Iterator[CachedNode]:
        """Yield every node that still has a page: nodes in the trie, and retracted ones."""
        yield from _subtree(self._root.children.values())
        yield from self._retracted

    def _count_references(self) -> Counter[int]:
        return super()._count_references() + Counter(node.page_id for node in self._nodes())


def _published(chain: Sequence[CachedNode]) -> PagesPublished:
    """Create the event for new nodes; each must be the child of the one before."""
    first = chain[0]
    assert first.parent is not None
    begins_prompt = first.parent.parent is None
    return PagesPublished(
        serials=tuple(node.serial for node in chain),
        parent=None if begins_prompt else first.parent.serial,
        token_ids=tuple(node.key[1] for node in chain),
        cache_salt=first.key[0],
    )


def _subtree(nodes: Iterable[CachedNode]) -> Iterator[CachedNode]:
    """Yield the nodes and all their descendants."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def _path_up(lease: Lease) -> Iterator[tuple[CachedNode, int]]:
    """Yield the nodes from the lease's tip upwards, without the root, each with the lease's page for it."""
    assert isinstance(lease, _TrieLease), "the lease is another cache's"
    node = lease.tip
    for page_id in reversed(lease.page_ids[: lease.num_shared_pages]):
        yield node, page_id
        assert node.parent is not None
        node = node.parent
