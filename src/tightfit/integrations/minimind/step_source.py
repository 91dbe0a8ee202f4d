"""Finds a training step in the source of a running loop: the lines from the model's call to `backward()`.

These lines compute the loss. Run again, dry, they predict the loop's own step, whatever its author computes there. Only
lines on which the loss depends are used (a backward slice: Weiser, "Program slicing", 1981). So logging, counting and
fetching the next batch happen once, in the loop itself.
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
_SEVERAL = 2  # assumed for an unknown number of micro-batches: the second one finds gradients, like all later ones


@dataclass(frozen=True)
class Level:
    """A list of statements, and the index of the running one."""

    block: list[ast.stmt]
    index: int
    owner: ast.AST


@dataclass(frozen=True)
class WrittenStep:
    """The lines of a step in a file, and the frame in which they run.

    `statements` begin with the model's call. `loss` is the expression before the following `backward()`. `levels` are
    the nested lists of statements around both, the outermost first.
    """

    file: str
    line: int
    frame: FrameType
    levels: tuple[Level, ...]
    statements: tuple[ast.stmt, ...]
    loss: ast.expr

    @cached_property
    def code(self) -> CodeType:
        """The compiled statements, with the loss assigned to `LOSS`. They are in a loop of one iteration, so that
        `continue` is valid.
        """
        last = ast.Assign([ast.Name(LOSS, ast.Store())], self.loss)
        turn = ast.For(ast.Name("__turn__", ast.Store()), ast.Constant("1"), [*self.statements, last], [])
        tree = ast.fix_missing_locations(ast.Module([ast.copy_location(turn, self.loss)], []))
        try:
            return compile(tree, self.file, "exec")
        except SyntaxError as error:
            raise ModelError(
                f"{self.file}:{self.line}: the lines of the step cannot run outside of their loop: {error}"
            ) from error

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
        """True if the lines enter the `with` around the model's call again, for example autocast."""
        return any(isinstance(statement, ast.With | ast.AsyncWith) for statement in self.statements[:1])

    @property
    def dropped(self) -> frozenset[str]:
        """Names that the loop deletes after the step, so that their values do not exist in the next step."""
        level = self.levels[-1]
        deleted = [s for s in level.block[level.index + 1 :] if isinstance(s, ast.Delete)]
        return frozenset(t.id for s in deleted for t in s.targets if isinstance(t, ast.Name))

    @property
    def clips(self) -> bool:
        """True if the loop clips gradients by norm after the step."""
        return any(_called(node) == "clip_grad_norm_" for node in self._behind())

    def micro_batches(self) -> int:
        """The number of backward passes for each step of the optimizer.

        It is N if the optimizer steps under a condition `... % N == 0`, or after a loop over `range(N)`. Under any
        other condition, it is assumed to be `_SEVERAL`.
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
        except Exception:  # the author's own expression may raise anything when it runs here
            return _SEVERAL
        return count if isinstance(count, int) and count >= 1 else _SEVERAL

    def _behind(self, levels: int | None = None) -> Iterator[ast.AST]:
        """All nodes after the step, in its own list of statements and in those around it."""
        for depth, level in enumerate(self.levels[::-1][:levels]):
            for statement in level.block[level.index + (depth > 0) :]:
                yield from ast.walk(statement)


def find_step(frames: Iterable[FrameType]) -> WrittenStep:
    """The step in the innermost of the frames that contains one.

    Raises `ModelError` if no frame's source has a `backward()` after the running statement.
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
        # If the running statement is compound and contains the `backward()` itself, it is the loop around the step, and
        # that `backward()` does not follow the call.
        if call is None or (last == first and isinstance(block[first], _COMPOUND)):
            continue
        loss = _loss_of(call)
        levels = (*levels[: depth - 1], Level(block, last, levels[depth - 1].owner))
        return WrittenStep(
            frame.f_code.co_filename, frame.f_lineno, frame, levels, _slice(block[first:last], loss), loss
        )
    return None


def _levels(tree: ast.Module, line: int) -> Iterator[Level]:
    """The nested lists of statements around a line, within the innermost function, the outermost first."""
    levels: list[Level] = []
    node: ast.AST | None = tree
    while node is not None:
        if isinstance(node, _SCOPES):
            levels = []  # the names of an outer function's lines are not those of this frame
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
    """The statements on which the loss depends, and always the first one, with the model's call."""
    needed, taken = _loads(loss), []
    for statement in reversed(statements):
        if statement is statements[0] or needed & _changes(statement):
            taken.append(statement)
            needed |= _loads(statement)
    return tuple(reversed(taken))


def _loads(node: ast.AST) -> set[str]:
    """Names that are read, including those in `name += ...`."""
    parts = list(ast.walk(node))
    added = {part.target.id for part in parts if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name)}
    return added | {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _read_first(statements: Iterable[ast.stmt], bound: set[str]) -> set[str]:
    """The names that statements read before they are bound. Adds to `bound` the names that are always bound."""
    read: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.With | ast.AsyncWith):
            read |= {name for item in statement.items for name in _loads(item)} - bound
            read |= _read_first(statement.body, bound)
        else:
            read |= _loads(statement) - bound
            if not isinstance(statement, _COMPOUND):  # the body of an `if` or a loop may not run
                bound |= {part.id for part in ast.walk(statement) if _is_bound(part)}
    return read


def _is_bound(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _changes(statement: ast.stmt) -> set[str]:
    """Names that a statement binds, or whose items, attributes or contents it may change."""
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
    """The last part of a called function's name; empty if the node is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _steps(guard: ast.If) -> bool:
    return any(_called(node) == "step" for statement in guard.body for node in ast.walk(statement))
