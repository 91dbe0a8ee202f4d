"""The lines of a step are found in a running loop as its author wrote it."""

import ast
import runpy
import sys
import textwrap

import pytest

from tightfit.errors import ModelError
from tightfit.integrations.minimind.step_source import LOSS, find_step


@pytest.fixture
def step_of(tmp_path):
    """The step that is found when a script calls `model`, and the number of its micro-batches."""

    def run(source):
        found = []

        def model(*arguments):
            if not found:
                step = find_step([sys._getframe(1)])
                found.append((step, step.micro_batches()))
            return Value()

        script = tmp_path / "loop.py"
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        runpy.run_path(str(script), init_globals={"model": model, "optimizer": Value(), "scaler": Value()})
        return found[0]

    return run


class Value:
    """Answers to everything with itself."""

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **keywords):
        return self

    def __truediv__(self, other):
        return self

    __add__ = __mul__ = __rmul__ = __truediv__


def lines(step):
    return [ast.unparse(statement) for statement in step.statements], ast.unparse(step.loss)


@pytest.mark.keeps("plan-covers-own-step")
def test_a_loop_in_a_function_is_read_from_the_call_to_the_loss(step_of):
    step, micro_batches = step_of("""
        def train(batches, scale):
            for number, batch in enumerate(batches):
                result = model(batch)
                loss = result.loss * scale
                print(number) if number > 5 else None
                scaler.scale(loss).backward()
                optimizer.step()
                del result
        train([1, 2], 3)
    """)
    assert lines(step) == (["result = model(batch)", "loss = result.loss * scale"], "loss")
    assert step.reads == {"model", "batch", "scale"}
    assert (step.dropped, step.clips, micro_batches) == ({"result"}, False, 1)


def test_statements_on_which_the_loss_does_not_depend_are_left_to_the_loop(step_of):
    step, _ = step_of("""
        for x in range(2):
            out = model(x)
            seen = [x]
            x = next(iter([5]))
            optimizer.zero_grad()
            loss = out.mean()
            loss.backward()
            optimizer.step()
    """)
    assert lines(step) == (["out = model(x)", "loss = out.mean()"], "loss")


def test_a_with_around_the_call_is_entered_again(step_of):
    step, _ = step_of("""
        from contextlib import nullcontext
        for x in range(2):
            with nullcontext():
                reference = model(x)
                loss = model(x) + reference
            loss.backward()
    """)
    assert step.reenters
    assert step.reads == {"nullcontext", "model", "x"}
    assert step.binds == {"reference", "loss"}


def test_a_loss_in_one_line_needs_no_statement(step_of):
    step, _ = step_of("for x in range(2): (model(x).loss / 2).backward()")
    assert lines(step) == ([], "model(x).loss / 2")
    names = {"model": lambda x: Value(), "x": 1}
    exec(step.code, names)
    assert isinstance(names[LOSS], Value)


def test_the_loss_of_accelerates_backward_is_its_argument(step_of):
    step, _ = step_of("""
        accelerator = optimizer
        loss = model(1)
        accelerator.backward(loss)
    """)
    assert lines(step) == (["loss = model(1)"], "loss")


MODULUS = """
    every = 4
    for number in range(8):
        loss = model(number)
        loss.backward()
        if (number + 1) % every == 0:
            optimizer.step()
"""
INNER = """
    for step in range(2):
        for micro_step in range(3):
            loss = model(step)
            loss.backward()
        optimizer.step()
"""
UNKNOWN = """
    for number in range(2):
        loss = model(number)
        loss.backward()
        if sum([number]) > 0:
            optimizer.step()
"""


@pytest.mark.parametrize(("source", "count"), [(MODULUS, 4), (INNER, 3), (UNKNOWN, 2)])
def test_gradient_accumulation_is_read_from_the_loop(source, count, step_of):
    assert step_of(source)[1] == count


def test_clipping_behind_the_step_is_seen(step_of):
    step, _ = step_of("""
        import torch
        clip_grad_norm_ = print
        model(1).backward()
        clip_grad_norm_()
    """)
    assert step.clips


@pytest.mark.parametrize("source", ["x = model(1)\n", "model(1).sum().backwards()\n"])
def test_a_call_without_a_backward_is_told_with_its_line(source, step_of):
    with pytest.raises(ModelError, match=r"loop\.py:1: no backward\(\) follows the model's call"):
        step_of(source)


def test_a_step_that_leaves_its_function_is_told(step_of):
    step, _ = step_of("""
        def train():
            for x in range(2):
                loss = model(x)
                if x > 9:
                    loss = 0
                    return loss
                loss.backward()
        train()
    """)
    with pytest.raises(ModelError, match="the lines of the step cannot run outside of their loop"):
        _ = step.code
