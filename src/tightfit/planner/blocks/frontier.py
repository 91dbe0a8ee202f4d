"""Chooses which operators' outputs a block keeps for backward: bytes kept against seconds replayed.

For a keep set K, every operation whose output autograd saves is either in K or replayed in backward. The same holds for
every operation that a replayed one reads. Write r_i = 1 where operation i is replayed and a_i = 1 where its output is
available in backward (replayed or kept). Then a keep set is a solution of

    minimise    p * sum seconds_i r_i + q * sum bytes_i (a_i - r_i)
    subject to  a_i = 1 for saved i,  r_i <= a_i,  r_i <= a_j for every input j of i,  a and r 0 or 1.

Each constraint compares two variables, so the matrix is totally unimodular and the programme is a minimum cut:
project selection (Picard 1976, "Maximal closure of a graph"), the cut of AOTAutograd's partitioner
(`torch/_functorch/partitioners.py`), but with replay priced in seconds. The network has these edges:

- from `in` to `out` of each operation, capacity q * bytes. Cutting it means: kept.
- from the source to each `in`, capacity p * seconds. Cutting it means: replayed.
- from the `out` of an input to the `in` of its readers, without limit.
- from the `out` of a saved operation to the sink, without limit.

Every cut is optimal for one exchange rate p : q. A cut at the rate at which two neighbours tie finds any set below the
line between them. Repeated, this finds all corners of the lower convex hull (Eisner and Severance 1976, "Mathematical
techniques for efficient record segmentation"). The best sets above the hull would need the 0/1 programme with a limit
on the bytes, as in Checkmate (Jain et al. 2020). It is not solved, because a chain mixes the sets of many blocks, and
for such mixtures the hull is what counts. Where corners are far apart, gaps are filled with sets that follow one corner
up to some place and the other corner after it. These are good enough, because few values cross a place. All cuts are
in whole nanoseconds and bytes: exact, no tolerance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

NANOSECONDS = 1e9


@dataclass(frozen=True)
class BlockOperator:
    """One operator call of a block's forward, in execution order.

    `seconds` is the time of replaying it. `bytes` is the memory that its output occupies until backward (0 for memory
    that is held anyway). `saved` says whether autograd saves its output for backward. `inputs` are the places of the
    operations whose outputs it reads; tensors from outside the block are held anyway and left out. A `pinned` operation
    is never replayed: if backward needs its output, the output is kept.
    """

    seconds: float
    bytes: int
    saved: bool
    inputs: tuple[int, ...]
    pinned: bool = False


@dataclass(frozen=True)
class KeepSet:
    """The operations of a block whose outputs are kept until backward, by place. Pinned operations are always included.

    `kept_bytes` counts the kept outputs that backward or a replay reads. `replay_seconds` is the time of the replay.
    """

    kept: frozenset[int]
    kept_bytes: int
    replay_seconds: float


def replay_cost(operations: Sequence[BlockOperator], kept: frozenset[int]) -> tuple[int, float, tuple[int, ...]]:
    """(bytes kept, seconds of replay, places replayed in order) of any keep set.

    Kept outputs that nothing reads in backward cost nothing. Pinned operations count as kept.
    """
    needed, replayed = _needed(operations, kept)
    kept_bytes = sum(operations[place].bytes for place in needed - replayed)
    seconds = math.fsum(operations[place].seconds for place in replayed)
    return kept_bytes, seconds, tuple(sorted(replayed))


def frontier(operations: Sequence[BlockOperator], *, limit: int = 12) -> tuple[KeepSet, ...]:
    """At most `limit` keep sets (at least 2), from the fastest one to the one of fewest bytes.

    The first set replays nothing, in the fewest bytes. The last has the fewest bytes, in the least seconds. Bytes fall
    and seconds rise strictly (to the nanosecond) from one to the next. Every set is on the lower convex hull, optimal
    for an exchange rate of seconds for bytes, except those that fill wide gaps between corners. If there are more than
    `limit` sets, an even spread of them is returned, with both ends.
    """
    assert limit >= 2, "a frontier has two ends"
    points = _thin(_filled(operations, _corners(_Graph(operations)), limit), limit)
    return tuple(_keep_set(operations, point.kept) for point in points)


def keep_set(operations: Sequence[BlockOperator], kept: frozenset[int]) -> KeepSet:
    """A keep set with its cost, without the outputs that nothing reads in backward."""
    return _keep_set(operations, _point(operations, kept).kept)


def _needed(operations: Sequence[BlockOperator], kept: frozenset[int]) -> tuple[set[int], set[int]]:
    """Places whose outputs backward needs, and those of them that must be replayed."""
    needed = {place for place, operation in enumerate(operations) if operation.saved}
    replayed = set()
    # Inputs come before their readers, so one pass from the last operation to the first sees every reader in time.
    for place in range(len(operations) - 1, -1, -1):
        operation = operations[place]
        if place in needed and place not in kept and not operation.pinned:
            replayed.add(place)
            needed.update(operation.inputs)
    return needed, replayed


@dataclass(frozen=True)
class _Point:
    """A keep set by its exact cost; `kept` holds only what backward or a replay reads."""

    bytes: int
    nanoseconds: int
    kept: frozenset[int]


def _nanoseconds(operation: BlockOperator) -> int:
    return round(operation.seconds * NANOSECONDS)


def _point(operations: Sequence[BlockOperator], kept: frozenset[int]) -> _Point:
    needed, replayed = _needed(operations, kept)
    useful = frozenset(needed - replayed)
    kept_bytes = sum(operations[place].bytes for place in useful)
    return _Point(kept_bytes, sum(_nanoseconds(operations[place]) for place in replayed), useful)


def _keep_set(operations: Sequence[BlockOperator], useful: frozenset[int]) -> KeepSet:
    kept_bytes, seconds, _ = replay_cost(operations, useful)
    pinned = frozenset(place for place, operation in enumerate(operations) if operation.pinned)
    return KeepSet(useful | pinned, kept_bytes, seconds)


class _Graph:
    """The cut network of a block, built once. `cut` sets the capacities for one exchange rate and cuts it.

    Nodes: the source, the sink, and `in` and `out` of every operation that backward can need. Edges are stored in
    pairs: edge e and its reverse e ^ 1.
    """

    SOURCE, SINK = 0, 1

    def __init__(self, operations: Sequence[BlockOperator]):
        self.operations = operations
        self.places = sorted(_needed(operations, frozenset())[0])
        self.node = {place: 2 + 2 * order for order, place in enumerate(self.places)}
        self.edges: list[list[int]] = [[] for _ in range(2 + 2 * len(self.places))]
        self.target: list[int] = []
        self.priced: list[tuple[int, int, int]] = []  # edge, nanoseconds, bytes
        self.unlimited: list[int] = []
        for place in self.places:
            self._add(place, operations[place])

    def _add(self, place: int, operation: BlockOperator) -> None:
        entry, out = self.node[place], self.node[place] + 1
        self.priced.append((self._edge(entry, out), 0, operation.bytes))
        if operation.saved:
            self.unlimited.append(self._edge(out, self.SINK))
        source = self._edge(self.SOURCE, entry)
        if operation.pinned:
            # Replay at an infinite price: if backward needs the output, the cut runs through `in` to `out`. The inputs
            # are then not needed for it.
            self.unlimited.append(source)
            return
        self.priced.append((source, _nanoseconds(operation), 0))
        self.unlimited.extend(self._edge(self.node[j] + 1, entry) for j in dict.fromkeys(operation.inputs))

    def _edge(self, tail: int, head: int) -> int:
        edge = len(self.target)
        self.target += [head, tail]
        self.edges[tail].append(edge)
        self.edges[head].append(edge + 1)
        return edge

    def cut(self, nanosecond_price: int, byte_price: int) -> _Point:
        """The keep set of least price * nanoseconds + price * bytes."""
        capacity = [0] * len(self.target)
        for edge, nanoseconds, size in self.priced:
            capacity[edge] = nanosecond_price * nanoseconds + byte_price * size
        endless = sum(capacity) + 1  # more than all priced edges together, so that no minimum cut contains it
        for edge in self.unlimited:
            capacity[edge] = endless
        reached = _source_side(self.edges, self.target, capacity)
        kept = frozenset(p for p in self.places if reached[self.node[p]] and not reached[self.node[p] + 1])
        return _point(self.operations, kept)


def _source_side(edges: list[list[int]], target: list[int], capacity: list[int]) -> list[bool]:
    """Nodes on the source side of a minimum cut, by Dinic's algorithm. Overwrites `capacity`."""
    while True:
        level = _levels(edges, target, capacity)
        if level[_Graph.SINK] < 0:
            return [at >= 0 for at in level]
        _block_flow(edges, target, capacity, level)


def _levels(edges: list[list[int]], target: list[int], capacity: list[int]) -> list[int]:
    """Distance of every node from the source over edges with capacity left; -1 for nodes out of reach."""
    level = [-1] * len(edges)
    level[_Graph.SOURCE] = 0
    queue = [_Graph.SOURCE]
    for node in queue:
        for edge in edges[node]:
            head = target[edge]
            if capacity[edge] and level[head] < 0:
                level[head] = level[node] + 1
                queue.append(head)
    return level


def _block_flow(edges: list[list[int]], target: list[int], capacity: list[int], level: list[int]) -> None:
    """Augment along shortest paths until each has a full edge."""
    following = [0] * len(edges)
    path: list[int] = []
    node = _Graph.SOURCE
    while True:
        if node == _Graph.SINK:
            room = min(capacity[edge] for edge in path)
            for edge in path:
                capacity[edge] -= room
                capacity[edge ^ 1] += room
            full = next(order for order, edge in enumerate(path) if not capacity[edge])
            node = target[path[full] ^ 1]
            del path[full:]
        outgoing = edges[node]
        while following[node] < len(outgoing):
            edge = outgoing[following[node]]
            if capacity[edge] and level[target[edge]] == level[node] + 1:
                path.append(edge)
                node = target[edge]
                break
            following[node] += 1
        else:
            if not path:
                return
            node = target[path.pop() ^ 1]
            following[node] += 1


def _corners(graph: _Graph) -> list[_Point]:
    """All corners of the lower convex hull of (bytes, nanoseconds), from the fewest nanoseconds to the fewest
    bytes.
    """
    all_bytes = sum(graph.operations[place].bytes for place in graph.places)
    all_nanoseconds = sum(_nanoseconds(graph.operations[place]) for place in graph.places)
    # A price above all bytes (or nanoseconds) together makes the other quantity decide between ties only.
    fastest, smallest = graph.cut(all_bytes + 1, 1), graph.cut(1, all_nanoseconds + 1)
    corners, waiting = [fastest], [smallest]
    while waiting:
        left, right = corners[-1], waiting[-1]
        middle = _below(graph.cut, left, right)
        if middle is not None:
            waiting.append(middle)
            continue
        waiting.pop()
        if right.bytes < left.bytes:
            corners.append(right)
    return corners


def _below(cut: Callable[[int, int], _Point], left: _Point, right: _Point) -> _Point | None:
    """A point strictly below the line between two, found at the exchange rate at which they tie."""
    nanosecond_price, byte_price = left.bytes - right.bytes, right.nanoseconds - left.nanoseconds
    if not nanosecond_price or not byte_price:
        return None  # equal in bytes or in seconds: there is no rate at which the two tie
    point = cut(nanosecond_price, byte_price)
    tie = nanosecond_price * left.nanoseconds + byte_price * left.bytes
    return point if nanosecond_price * point.nanoseconds + byte_price * point.bytes < tie else None


def _positions(points: Sequence[_Point]) -> list[float]:
    """The position of each point between the first (0) and the last (1), half by its bytes, half by its seconds."""
    first, last = points[0], points[-1]
    all_bytes, all_nanoseconds = max(1, first.bytes - last.bytes), max(1, last.nanoseconds - first.nanoseconds)
    return [
        (first.bytes - point.bytes) / (2 * all_bytes) + (point.nanoseconds - first.nanoseconds) / (2 * all_nanoseconds)
        for point in points
    ]


def _filled(operations: Sequence[BlockOperator], points: list[_Point], limit: int) -> list[_Point]:
    """The points, with more between neighbours that are further apart than `limit` even steps."""
    filled = points[:1]
    for (left, right), (start, end) in zip(pairwise(points), pairwise(_positions(points)), strict=True):
        if end - start > 1 / (limit - 1):
            filled += _between(operations, left, right)
        filled.append(right)
    return filled


def _between(operations: Sequence[BlockOperator], left: _Point, right: _Point) -> list[_Point]:
    """Points strictly between two others, which follow one of them up to some place and the other one after it."""
    candidates = []
    for place in sorted(left.kept ^ right.kept):
        for early, late in ((left, right), (right, left)):
            kept = frozenset(p for p in early.kept if p <= place) | frozenset(p for p in late.kept if p > place)
            candidates.append(_point(operations, kept))
    between = []
    for point in sorted(candidates, key=lambda point: (point.nanoseconds, point.bytes)):
        previous = between[-1] if between else left
        if right.bytes < point.bytes < previous.bytes and previous.nanoseconds < point.nanoseconds < right.nanoseconds:
            between.append(point)
    return between


def _thin(points: list[_Point], limit: int) -> list[_Point]:
    """At most `limit` points: those nearest to even steps along the frontier, both ends included."""
    if len(points) <= limit:
        return points
    positions = _positions(points)
    steps = [step / (limit - 1) for step in range(limit)]
    nearest = {min(range(len(points)), key=lambda index: abs(positions[index] - step)) for step in steps}
    return [points[index] for index in sorted({0, *nearest, len(points) - 1})]
