"""What a disk may hold after a power cut, by what POSIX promises and nothing more.

A file has the content of its last sync. What was written since is lost, or there in part. A folder has the names of its
last sync, and any of the changes since: in any selection, as no order among them is promised. A rename within a
folder is one change; between folders it is two.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faulty_files import Call

ROOT = "."


@dataclass
class _File:
    durable: bytes = b""
    now: bytes = b""


@dataclass
class _Change:
    """Names that a folder loses and gets, in one moment."""

    lost: str | None = None
    new: dict[str, int] = field(default_factory=dict)

    def on(self, names: dict[str, int]) -> None:
        if self.lost is not None:
            names.pop(self.lost, None)
        names.update(self.new)


@dataclass
class _Folder:
    durable: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def change(self, change: _Change) -> None:
        change.on(self.now)
        self.pending.append(change)


Tree = dict[str, "Tree | bytes"]


class Disk:
    """Mutable: files and folders, what of them is on the disk and what is not yet."""

    def __init__(self, tree: Tree | None = None) -> None:
        """With these files on it, all of them synced."""
        self._nodes: list[_File | _Folder] = []
        self._opened: dict[int, int] = {}
        self._keep(tree or {})

    def _keep(self, tree: Tree) -> int:
        number = len(self._nodes)
        self._nodes.append(folder := _Folder())
        for name, node in tree.items():
            if isinstance(node, bytes):
                self._nodes.append(_File(node, node))
                folder.now[name] = len(self._nodes) - 1
            else:
                folder.now[name] = self._keep(node)
        folder.durable = dict(folder.now)
        return number

    def do(self, call: Call) -> None:
        folder, name = self._parent(call.path)
        if call.kind in ("create", "mkdir"):
            self._nodes.append(_File() if call.kind == "create" else _Folder())
            made = len(self._nodes) - 1
            self._opened[call.number] = made
            folder.change(_Change(new={name: made}))
        elif call.kind == "open":
            self._opened[call.number] = folder.now[name]
        elif call.kind == "write":
            file = self._file(self._opened[call.number])
            file.now += call.content
        elif call.kind == "sync":
            file = self._file(self._opened[call.number])
            file.durable = file.now
        elif call.kind == "unlink":
            folder.change(_Change(lost=name))
        elif call.kind == "rename":
            target, new = self._parent(call.target)
            moved = folder.now[name]
            if target is folder:
                folder.change(_Change(lost=name, new={new: moved}))
            else:
                target.change(_Change(new={new: moved}))
                folder.change(_Change(lost=name))
        elif call.kind == "sync_folder":
            synced = self._folder(self._at(call.path))
            synced.durable = dict(synced.now)
            synced.pending.clear()
        else:
            raise AssertionError(call)

    def after_a_cut(self, chance: random.Random) -> Iterator[Tree]:
        """What may be there: nothing of what was not synced; the names of it and not the content; all of it (as when
        only the process ends); and one more at random.
        """
        yield self._tree(0, lambda pending: [], lambda file: file.durable)
        yield self._tree(0, list, lambda file: file.durable)
        yield self._tree(0, list, lambda file: file.now)
        yield self.some(chance)

    def some(self, chance: random.Random) -> Tree:
        def content(file: _File) -> bytes:
            kept = chance.randint(len(file.durable), len(file.now))
            blank = bytes(len(file.now) - len(file.durable))
            return chance.choice([file.durable, file.now, file.now[:kept], file.durable + blank])

        return self._tree(0, lambda pending: [each for each in pending if chance.random() < 0.5], content)

    def _tree(self, number: int, applied: Callable[[list], list], content: Callable[[_File], bytes]) -> Tree:
        folder = self._folder(number)
        names = dict(folder.durable)
        for change in applied(folder.pending):
            change.on(names)
        tree: Tree = {}
        for name, at in names.items():
            node = self._nodes[at]
            tree[name] = content(node) if isinstance(node, _File) else self._tree(at, applied, content)
        return tree

    def _at(self, path: str) -> int:
        number = 0
        for part in Path(path).parts:
            number = self._folder(number).now[part]
        return number

    def _parent(self, path: str) -> tuple[_Folder, str]:
        if path == ROOT:
            return self._folder(0), ROOT
        return self._folder(self._at(str(Path(path).parent))), Path(path).name

    def _file(self, number: int) -> _File:
        node = self._nodes[number]
        assert isinstance(node, _File)
        return node

    def _folder(self, number: int) -> _Folder:
        node = self._nodes[number]
        assert isinstance(node, _Folder)
        return node


def rebuild(tree: Tree, folder: Path) -> None:
    """The files of a tree, in a folder that is not there yet."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            rebuild(node, folder / name)
