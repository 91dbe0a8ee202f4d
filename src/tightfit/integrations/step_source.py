"""Finds a training step in the source of a loop that is running: the lines from the model's call to `backward()`.

They are the loss. Run again, dry, they tell what the loop's own step takes, whatever its author computes there and
however the loss is called. Of these lines only those are taken on which the loss depends (a backward slice: Weiser,
"Program slicing", 1981), so that logging, counting and fetching the next batch happen once, in the loop itself.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeGuard

from tightfit.errors import ModelError

LOSS = "__loss__"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPOUND = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_SEVERAL = 2  # micro-batches that stand for a number of them that cannot be read: the second finds gradients


@dataclass(frozen=True)
class Level:
    """A list of statements, and which of them runs."""

    block: list[ast.stmt]
    index: int
    owner: ast.AST


@dataclass(frozen=True)
class WrittenStep:
    """The lines of a step in a file, and the frame in which they run.

    `statements` run from the model's call on, `loss` is the expression whose `backward()` follows. `levels` are the
    nested lists of statements, the outermost first, that lead to the one that holds both.
    """

    file: str
    line: int
    frame: FrameType
    levels: tuple[Level, ...]
    statements: tuple[ast.stmt, ...]
    loss: ast.expr

    @cached_property
    def code(self) -> CodeType:
        """The statements, and the loss assigned to `LOSS`; inside a loop of one turn, so that `continue` may stand."""
        last = ast.Assign([ast.Name(LOSS, ast.Store())], self.loss)
        turn = ast.For(ast.Name("__turn__", ast.Store()), ast.Constant("1"), [*self.statements, last], [])
        tree = ast.fix_missing_locations(ast.Module([ast.copy_location(turn, self.loss)], []))
        try:
            return compile(tree, self.file, "exec")
        except SyntaxError as error:
            raise ModelError(f"{self.file}:{self.line}: the lines of the step do not stand alone: {error}") from error

    @property
    def reads(self) -> frozenset[str]:
        """The names of variables that the lines read before they bind them."""
        bound: set[str] = set()
        return frozenset(_read_first(self.statements, bound) | (_loads(self.loss) - bound))

    @property
    def binds(self) -> frozenset[str]:
        """The names of variables that the lines bind."""
        return frozenset(part.id for s in self.statements for part in ast.walk(s) if _is_bound(part))

    @property
    def reenters(self) -> bool:
        """Whether the lines enter again a `with` in which the model's call stands (autocast, for one)."""
        return any(isinstance(statement, ast.With | ast.AsyncWith) for statement in self.statements[:1])

    @property
    def dropped(self) -> frozenset[str]:
        """Names that the loop deletes behind the step: what they held is not there in the next one."""
        level = self.levels[-1]
        deleted = [s for s in level.block[level.index + 1 :] if isinstance(s, ast.Delete)]
        return frozenset(t.id for s in deleted for t in s.targets if isinstance(t, ast.Name))

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped by norm behind it."""
        return any(_called(node) == "clip_grad_norm_" for node in self._behind())

    def micro_batches(self) -> int:
        """How many backward passes the loop has for each step of the optimizer.

        The N of an optimizer that steps where `... % N == 0`, or of the `range(N)` around a backward behind which the
        optimizer steps; where there is a condition of another kind, a number of more than one.
        """
        guards = [node for node in self._behind() if isinstance(node, ast.If) and _steps(node)]
        parts = [part for guard in guards for part in ast.walk(guard.test)]
        moduli = [part.right for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)]
        if moduli:
            return self._count(moduli[0])
        if guards:
            return _SEVERAL
        return 1 if any(_called(node) == "step" for node in self._behind(1)) else self._inner_loop()

    def _inner_loop(self) -> int:
        owner = self.levels[-1].owner
        if isinstance(owner, ast.For) and isinstance(owner.iter, ast.Call) and _called(owner.iter) == "range":
            return self._count(owner.iter.args[-1])
        return _SEVERAL if any(_called(node) == "step" for node in self._behind()) else 1

    def _count(self, expression: ast.expr) -> int:
        names = {**self.frame.f_globals, **self.frame.f_locals}
        try:
            count = eval(compile(ast.Expression(expression), self.file, "eval"), names)
        except Exception:  # the author's expression, outside its place
            return _SEVERAL
        return count if isinstance(count, int) and count >= 1 else _SEVERAL

    def _behind(self, levels: int | None = None) -> Iterator[ast.AST]:
        """All that is written behind the step, in its own list of statements and in those around it."""
        for depth, level in enumerate(self.levels[::-1][:levels]):
            for statement in level.block[level.index + (depth > 0) :]:
                yield from ast.walk(statement)


def find_step(frames: Iterable[FrameType]) -> WrittenStep:
    """The step in the innermost of some frames that has one.

    Raises `ModelError` where no frame's source has a `backward()` behind the statement that runs.
    """
    first = ""
    for frame in frames:
        file = frame.f_code.co_filename
        first = first or f"{file}:{frame.f_lineno}"
        if Path(file).is_file():
            step = _step_in(frame, ast.parse(Path(file).read_text("utf-8")))
            if step is not None:
                return step
    raise ModelError(f"{first}: no backward() follows the model's call in its loop, so there is no step to plan for")


def _step_in(frame: FrameType, tree: ast.Module) -> WrittenStep | None:
    levels = tuple(_levels(tree, frame.f_lineno))
    for depth in range(len(levels), 0, -1):
        block, first = levels[depth - 1].block, levels[depth - 1].index
        found = ((i, _backward(block[i])) for i in range(first, len(block)))
        last, call = next(((i, call) for i, call in found if call is not None), (0, None))
        if call is None or (last == first and isinstance(block[first], _COMPOUND)):
            continue
        loss = _loss_of(call)
        levels = (*levels[: depth - 1], Level(block, last, levels[depth - 1].owner))
        return WrittenStep(
            frame.f_code.co_filename, frame.f_lineno, frame, levels, _slice(block[first:last], loss), loss
        )
    return None


def _levels(tree: ast.Module, line: int) -> Iterator[Level]:
    """The lists of statements that lead to a line, from the innermost function that holds it, the outermost first."""
    levels: list[Level] = []
    node: ast.AST | None = tree
    while node is not None:
        if isinstance(node, _SCOPES):
            levels = []
        holder, node = node, None
        for block in _blocks(holder):
            for index, statement in enumerate(block):
                if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                    levels.append(Level(block, index, holder))
                    node = statement
    return iter(levels)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _backward(statement: ast.stmt) -> ast.Call | None:
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call) and _called(node) == "backward")
    return next(calls, None)


def _loss_of(call: ast.Call) -> ast.expr:
    """`loss` in `loss.backward()`, `scaler.scale(loss).backward()` and `accelerator.backward(loss)`."""
    assert isinstance(call.func, ast.Attribute), "backward is called on something"
    loss = call.args[0] if call.args else call.func.value
    while isinstance(loss, ast.Call) and _called(loss) == "scale" and loss.args:
        loss = loss.args[0]
    return loss


def _slice(statements: list[ast.stmt], loss: ast.expr) -> tuple[ast.stmt, ...]:
    """The statements on which the loss depends; the first one, with the model's call, in any case."""
    needed, taken = _loads(loss), []
    for statement in reversed(statements):
        if statement is statements[0] or needed & _changes(statement):
            taken.append(statement)
            needed |= _loads(statement)
    return tuple(reversed(taken))


def _loads(node: ast.AST) -> set[str]:
    """Names that are read, those in `name += ...` included."""
    parts = list(ast.walk(node))
    added = {part.target.id for part in parts if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name)}
    return added | {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _read_first(statements: Iterable[ast.stmt], bound: set[str]) -> set[str]:
    """The names that statements read while they are not bound; adds to `bound` what they bind in any case."""
    read: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.With | ast.AsyncWith):
            read |= {name for item in statement.items for name in _loads(item)} - bound
            read |= _read_first(statement.body, bound)
        else:
            read |= _loads(statement) - bound
            if not isinstance(statement, _COMPOUND):
                bound |= {part.id for part in ast.walk(statement) if _is_bound(part)}
    return read


def _is_bound(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _changes(statement: ast.stmt) -> set[str]:
    """Names that a statement binds, or whose items, attributes or contents it sets."""
    changed = set()
    for part in ast.walk(statement):
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
            changed.add(_root(part))
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            changed.add(_root(part.value.func))
    return changed


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _called(node: Any) -> str:
    """The last part of the name of what is called, if something is."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _steps(guard: ast.If) -> bool:
    return any(_called(node) == "step" for statement in guard.body for node in ast.walk(statement))
