"""Lengthens the record of a step that was run dry with a few of a model's equal blocks to all of them.

The record of the block in the middle must be that of its neighbours, moved by one block: each operator with its
numbers, each storage with its size, its birth and its death. Then it is repeated once for each block that was left out.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tightfit.tracing.record import Assumption, ModuleCall, OperatorRecord, Phase, StepTrace, StorageRecord
from tightfit.tracing.step import STEPPED

Name = Callable[[str], str]
Segment = tuple[Literal["forward", "backward"], int]  # of a group


class Unequal(Exception):
    """The record of a group is not that of its neighbour, moved by a block."""


@dataclass(frozen=True)
class EqualBlocks:
    """Equal blocks of one list, in groups that follow one another: `left` are run, and `out` stand behind the middle
    one of these, whose record is repeated. A group is the paths of its blocks.

    `reach` is the number of groups over which a record may refer to what belongs to its own group; what is farther away
    is one and the same for all groups.
    """

    holder: str
    left: tuple[tuple[str, ...], ...]
    out: tuple[tuple[str, ...], ...]
    reach: int

    @property
    def middle(self) -> int:
        return len(self.left) // 2

    @property
    def paths_out(self) -> list[str]:
        return [path for group in self.out for path in group]


def lengthened(trace: StepTrace, run: EqualBlocks) -> StepTrace:
    """The record with the blocks of a run that were left out. It has one forward and one backward, and levels that are
    sums over its storages. Raises `Unequal`.
    """
    return _Lengthening(trace, run).trace()


@dataclass
class _Piece:
    """A part of the record: operators from `start` up to `end`, of one group or of none."""

    of: Segment | None
    start: int
    end: int


# A record's home: the group and segment in which it began ("before": there when the step begins), or none, and its
# place among those that began there.
_Home = tuple[str, int, int] | None


@dataclass
class _Segments:
    """Records of one kind (operators, storages, values, calls) with their homes, and where they are in the new record.

    `order` are the new records: the old index, and the new number of its group; None: it belongs to none.
    """

    homes: list[_Home]
    order: list[tuple[int, int | None]] = field(default_factory=list)
    new_of: dict[tuple[str, int, int] | int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, where: Iterable[tuple[str, int] | None], middle: int, more: int) -> "_Segments":
        """`where` is the segment of each record. As many groups are added behind the middle one as `more`."""
        counts: dict[tuple[str, int], int] = {}
        homes: list[_Home] = []
        for segment in where:
            if segment is None:
                homes.append(None)
            else:
                homes.append((*segment, counts.get(segment, 0)))
                counts[segment] = counts.get(segment, 0) + 1
        found = cls(homes)
        grouped = itertools.groupby(range(len(homes)), lambda index: None if (h := homes[index]) is None else h[:2])
        for segment, members in grouped:
            indexes = list(members)
            if segment is None:
                found.order += [(index, None) for index in indexes]
                continue
            kind, group = segment
            own = group if group <= middle else group + more
            times = [own]
            if group == middle:
                times = [own + n for n in range(more + 1)]
                times = times[::-1] if kind == "backward" else times
            found.order += [(index, time) for time in times for index in indexes]
        for new, (index, group) in enumerate(found.order):
            home = homes[index]
            found.new_of[index if home is None or group is None else (home[0], group, home[2])] = new
        return found

    def members(self, kind: str, group: int) -> list[int]:
        return [index for index, home in enumerate(self.homes) if home is not None and home[:2] == (kind, group)]


class _Lengthening:
    def __init__(self, trace: StepTrace, run: EqualBlocks):
        self.old, self.run = trace, run
        self.middle, self.more = run.middle, len(run.out)
        self.groups = {path: number for number, group in enumerate(run.left) for path in group}
        self.found_groups: dict[str, int | None] = {}
        self.count = len(trace.operators)
        self.sums = _alive(trace.storages, self.count)
        self.pieces = self._pieces()
        self.starts = [piece.start for piece in self.pieces]
        self.operators = _Segments.of((self._segment(time) for time in range(self.count)), self.middle, self.more)
        self.storages = _Segments.of(map(self._segment_of_storage, trace.storages), self.middle, self.more)
        self.values = _Segments.of(map(self._segment_of_value, range(len(trace.values))), self.middle, self.more)
        self.calls = _Segments.of(self._segments_of_calls(), self.middle, self.more)
        # Where the operators of a segment begin in the new record.
        self.begins: dict[tuple[str, int], int] = {}
        for new, (index, group) in enumerate(self.operators.order):
            if group is not None and (home := self.operators.homes[index]) is not None:
                self.begins.setdefault((home[0], group), new)
        for one, other in ((self.middle - 1, self.middle), (self.middle, self.middle + 1)):
            self._compare(one, other)

    @property
    def _added(self) -> range:
        """The new numbers of the groups that were left out."""
        return range(self.middle + 1, self.middle + 1 + self.more)

    # Where things are

    def group_of(self, path: str) -> int | None:
        """The group that a path lies in."""
        if path not in self.found_groups:
            parts, found = path.split(" ")[0].split("."), None
            for end in range(len(parts), 0, -1):
                if (found := self.groups.get(".".join(parts[:end]))) is not None:
                    break
            self.found_groups[path] = found
        return self.found_groups[path]

    def _pieces(self) -> list[_Piece]:
        old, last = self.old, len(self.run.left) - 1
        middle = next((i for i, o in enumerate(old.operators) if o.phase is not Phase.FORWARD), self.count)
        first_of = {group[0]: number for number, group in enumerate(self.run.left)}
        begun = [(call.start, first_of[call.path]) for call in old.calls if call.path in first_of]
        forward = [(start, group) for start, group in begun if start < middle]
        if not begun:  # a part of the model that this step does not use
            return [_Piece(None, 0, self.count + 1)]
        if [group for _, group in forward] != list(range(last + 1)):
            raise Unequal("blocks do not run once, one after the other")
        end_of = self.run.left[-1][-1]
        end = max(call.end for call in old.calls if call.path == end_of and call.start < middle)
        backward: dict[int, int] = {}
        ends = 0
        for time in range(middle, self.count):
            if (group := self.group_of(old.operators[time].module)) is not None:
                backward.setdefault(group, time)
                ends = time + 1 if group == 0 else ends
        if list(backward) != list(range(last, -1, -1)):
            raise Unequal("backward does not pass through the blocks from the last to the first")
        pieces = [
            _Piece(("forward", group), start, after)
            for (start, group), (after, _) in zip(forward, [*forward[1:], (end, 0)], strict=True)
        ]
        begins = list(backward.values())
        pieces += [
            _Piece(("backward", group), start, after)
            for group, start, after in zip(backward, begins, [*begins[1:], ends], strict=True)
        ]
        covered, found = 0, []
        for piece in pieces:
            if piece.start < covered or piece.end < piece.start:
                raise Unequal("blocks overlap")
            if piece.start > covered:
                found.append(_Piece(None, covered, piece.start))
            found.append(piece)
            covered = piece.end
        return [*found, _Piece(None, covered, self.count + 1)]

    def _piece(self, time: int) -> _Piece:
        return self.pieces[bisect_right(self.starts, time) - 1]

    def _segment(self, time: int) -> Segment | None:
        return self._piece(time).of

    def _segment_of_storage(self, storage: StorageRecord) -> tuple[str, int] | None:
        if storage.operator is None and storage.born == 0:  # it was there before the step
            group = self.group_of(storage.name) if storage.name else None
            return None if group is None else ("before", group)
        return self._segment(storage.born)

    def _segment_of_value(self, index: int) -> tuple[str, int] | None:
        value = self.old.values[index]
        home = self.storages.homes[value.storage]
        # A streamed weight that goes before the step begins gets a value at its time, which is that of operator 0.
        is_made = value.operator or (self.old.operators and index in self.old.operators[0].makes)
        if value.operator is not None and is_made:
            return self._segment(value.operator)
        return None if home is None else home[:2]

    def _segments_of_calls(self) -> list[tuple[str, int] | None]:
        found: list[tuple[str, int] | None] = []
        for call in self.old.calls:
            # A call at the end of a block may be the next block's or the last one's within this block.
            group, piece = self.group_of(call.path), self._piece(call.start)
            if group is not None and piece.of is not None and piece.of[1] != group and piece.start == call.start:
                piece = self._piece(call.start - 1)
            found.append(piece.of)
        return found

    # References from one record to another. They are of the same kind in every group, or name the same thing.

    def _relative(self, records: _Segments, index: int, group: int) -> tuple[str, int, int] | None:
        home = records.homes[index]
        return None if home is None else (home[0], home[1] - group, home[2])

    def _relative_time(self, time: int, group: int) -> tuple[str, int, int] | None:
        piece = self._piece(time)
        return None if piece.of is None else (piece.of[0], piece.of[1] - group, time - piece.start)

    def _same(self, one: Any, other: Any, relative: Callable[[Any, int], Any], group: int) -> bool:
        if one is None or other is None:
            return one is other
        way, own = relative(one, group), relative(other, group + 1)
        if one != other:
            return way is not None and way == own and abs(way[1]) <= self.run.reach
        return way is None or way[1] + group in (0, len(self.run.left) - 1)

    def _compare(self, group: int, other: int) -> None:
        def same_index(records: _Segments) -> Callable[[int, int], bool]:
            return lambda a, b: self._same(a, b, lambda index, g: self._relative(records, index, g), group)

        def same_indexes(records: _Segments, ones: Sequence[int], others: Sequence[int]) -> bool:
            return len(ones) == len(others) and all(map(same_index(records), ones, others))

        def same_call(one: int, two: int) -> bool:
            return one == two if min(one, two) < 0 else same_index(self.calls)(one, two)

        def same_time(one: int | None, two: int | None) -> bool:
            return self._same(one, two, self._relative_time, group)

        def same_end(one: int | None, two: int | None) -> bool:
            return same_time(one and one - 1, two and two - 1)

        old, named = self.old, self._renamed(group, lambda away: self.run.left[other + away])

        def operators(a: int, b: int) -> bool:
            one, two = old.operators[a], old.operators[b]
            return (
                self._in_group(one, named, (), (), -1) == two._replace(reads=(), makes=(), call=-1)
                and same_indexes(self.values, one.reads, two.reads)
                and same_indexes(self.values, one.makes, two.makes)
                and same_call(one.call, two.call)
                and self._beside(a) == self._beside(b)
            )

        def storages(a: int, b: int) -> bool:
            one, two = old.storages[a], old.storages[b]
            plain = {"operator": None, "born": 0, "died": None}
            return (
                one._replace(name=named(one.name), **plain) == two._replace(**plain)
                and same_time(one.operator, two.operator)
                and same_time(one.born, two.born)
                and same_end(one.died, two.died)
            )

        def values(a: int, b: int) -> bool:
            one, two = old.values[a], old.values[b]
            return (
                one.saved == two.saved
                and same_index(self.storages)(one.storage, two.storage)
                and same_time(one.operator, two.operator)
            )

        def calls(a: int, b: int) -> bool:
            one, two = old.calls[a], old.calls[b]
            return (
                named(one.path) == two.path
                and same_call(one.caller, two.caller)
                and same_time(one.start, two.start)
                and same_end(one.end, two.end)
            )

        checks = (
            (self.operators, operators), (self.storages, storages), (self.values, values), (self.calls, calls)
        )  # fmt: skip
        for records, same in checks:
            for kind in ("before", "forward", "backward"):
                ones, others = records.members(kind, group), records.members(kind, other)
                if len(ones) != len(others) or not all(map(same, ones, others)):
                    raise Unequal(f"{same.__name__} of {self.run.left[other][0]} in {kind}")

    def _beside(self, time: int) -> tuple[int, int]:
        """Bytes that the levels count beside the sums over storages at an operator."""
        return self.old.levels[time] - self.sums[time], self.old.starts[time] - self.sums[time]

    # The new record

    def _renamed(self, group: int, names_of: Callable[[int], tuple[str, ...]]) -> Name:
        """Gives a name in the record of a group that of the same thing for another one. `names_of` are the blocks of
        the latter's neighbour at so many groups from it. What is farther away than `reach` keeps its name.
        """
        known: dict[str, str] = {}

        def renamed(name: str) -> str:
            found = known.get(name)
            if found is None:
                of, found = self.group_of(name), name
                if of is not None and abs(of - group) <= self.run.reach:
                    for before, after in zip(self.run.left[of], names_of(of - group), strict=True):
                        if name.startswith(before) and name[len(before) : len(before) + 1] in ("", "."):
                            found = after + name[len(before) :]
                known[name] = found
            return found

        return renamed

    def _in_group(
        self, operator: OperatorRecord, named: Name, reads: tuple[int, ...], makes: tuple[int, ...], call: int
    ) -> OperatorRecord:
        name = operator.name
        if name.startswith(STEPPED):
            name = f"{STEPPED}{named(name.removeprefix(STEPPED))}"
        region = None if operator.region is None else named(operator.region)
        return operator._replace(
            name=name, module=named(operator.module), region=region, reads=reads, makes=makes, call=call
        )

    def _number(self, group: int) -> int:
        """The new number of a group that is left. Raises `Unequal` for one whose neighbours may be new."""
        if group in (self.middle, self.middle + 1):
            raise Unequal("something outside of the blocks depends on one in the middle")
        return group if group < self.middle else group + self.more

    def _index(self, records: _Segments, index: int, group: int | None, new_group: int | None) -> int:
        """The new index of a record, as one of a group sees it; `group` is the old number of that group."""
        home = records.homes[index]
        if home is None:
            return records.new_of[index]
        kind, of, place = home
        found = records.new_of.get((kind, self._seen(of, group, new_group), place))
        if found is None:
            raise Unequal("blocks at an end have more than those in the middle, and something depends on it")
        return found

    def _seen(self, of: int, group: int | None, new_group: int | None) -> int:
        """The new number of a group that another one refers to: a neighbour of its own, or one and the same for all."""
        if group is None or new_group is None or abs(of - group) > self.run.reach:
            return self._number(of)
        return new_group + of - group

    def _time(self, time: int, group: int | None, new_group: int | None) -> int:
        """The new time of a time, as a record of a group sees it."""
        piece = self._piece(time)
        if piece.of is None:
            shift = self._shift(piece)
            return time + shift
        kind, of = piece.of
        begins = self.begins.get((kind, self._seen(of, group, new_group)))
        if begins is None:
            raise Unequal("something lasts until a block that has no operators")
        return begins + time - piece.start

    def _end(self, time: int, group: int | None, new_group: int | None) -> int:
        """The same for the time after the last operator of something."""
        return self._time(time - 1, group, new_group) + 1 if time else 0

    def _shift(self, piece: _Piece) -> int:
        """By how many operators what is outside of all blocks comes later."""
        lengths = {p.of[0]: p.end - p.start for p in self.pieces if p.of is not None and p.of[1] == self.middle}
        passed = {p.of[0] for p in self.pieces if p.of is not None and p.of[1] == self.middle and p.end <= piece.start}
        return self.more * sum(lengths[kind] for kind in passed)

    def trace(self) -> StepTrace:
        """The new record."""
        old = self.old
        named = self._names_of_all()

        def group_in(records: _Segments, index: int) -> int | None:
            home = records.homes[index]
            return None if home is None else home[1]

        storages, values, calls, operators, levels, starts = [], [], [], [], [], []
        for index, new in self.storages.order:
            one, group = old.storages[index], group_in(self.storages, index)
            before = one.operator is None and one.born == 0
            storages.append(
                one._replace(
                    name=named[new](one.name),
                    operator=None if one.operator is None else self._time(one.operator, group, new),
                    born=0 if before else self._time(one.born, group, new),
                    died=None if one.died is None else self._end(one.died, group, new),
                )
            )
        for index, new in self.values.order:
            value, group = old.values[index], group_in(self.values, index)
            values.append(
                value._replace(
                    storage=self._index(self.storages, value.storage, group, new),
                    operator=self._time(value.operator, group, new) if value.operator else value.operator,
                )
            )
        for index, new in self.calls.order:
            call, group = old.calls[index], group_in(self.calls, index)
            caller = -1 if call.caller < 0 else self._index(self.calls, call.caller, group, new)
            start, end = self._time(call.start, group, new), self._end(call.end, group, new)
            calls.append(ModuleCall(named[new](call.path), caller, start, end, *call[4:]))
        sums = _alive(storages, len(self.operators.order))
        for now, (index, new) in enumerate(self.operators.order):
            operator, group = old.operators[index], group_in(self.operators, index)
            reads = tuple(self._index(self.values, value, group, new) for value in operator.reads)
            makes = tuple(self._index(self.values, value, group, new) for value in operator.makes)
            turn = -1 if operator.call < 0 else self._index(self.calls, operator.call, group, new)
            operators.append(self._in_group(operator, named[new], reads, makes, turn))
            level, start = self._beside(index)
            levels.append(sums[now] + level)
            starts.append(sums[now] + start)
        first, last = old.repeated
        return replace(
            old,
            operators=tuple(operators),
            storages=tuple(storages),
            values=tuple(values),
            calls=tuple(calls),
            levels=tuple(levels),
            starts=tuple(starts),
            assumptions=tuple(self._assumptions(named)),
            repeated=(self._time(first, None, None), self._end(last, None, None)),
            with_gradient=tuple(self._names(old.with_gradient, named)),
            gradients_before=tuple(self._names(old.gradients_before, named)),
        )

    def _names_of_all(self) -> dict[int | None, Name]:
        """For each new group what gives names in the record that it is made from its own; None: outside of all."""
        before, out = self.run.left[: self.middle + 1], self.run.out
        paths = [*before, *out, *self.run.left[self.middle + 1 :]]

        def of(new: int) -> Name:
            group = new if new < len(before) else max(self.middle, new - len(out))
            return self._renamed(group, lambda away: paths[new + away])

        return {None: lambda name: name, **{new: of(new) for new in range(len(paths))}}

    def _names(self, names: Sequence[str], named: Mapping[int | None, Name]) -> Iterator[str]:
        """The names of parameters, with those of the new blocks behind those of the middle group."""
        for group, members in itertools.groupby(names, self.group_of):
            held = list(members)
            yield from held
            if group == self.middle:
                yield from (named[new](name) for new in self._added for name in held)

    def _assumptions(self, named: Mapping[int | None, Name]) -> Iterator[Assumption]:
        for group, members in itertools.groupby(self.old.assumptions, lambda each: self.group_of(each.module)):
            held = list(members)
            yield from held
            if group == self.middle:
                yield from (replace(each, module=named[new](each.module)) for new in self._added for each in held)


def _alive(storages: Sequence[StorageRecord], count: int) -> list[int]:
    """Bytes of the storages that are there at each operator."""
    changes = [0] * (count + 2)
    for storage in storages:
        changes[min(storage.born, count)] += storage.bytes
        if storage.died is not None:
            changes[min(storage.died, count)] -= storage.bytes
    return list(itertools.accumulate(changes))
