"""The record comes back as it was given, and nothing else is taken for one."""

import json
import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.training.checkpoint import strict_json
from tightfit.training.checkpoint.manifest import Content, Manifest, TensorsFile, parse_manifest
from tightfit.training.checkpoint.record import decoded, encoded

NOTHING = TensorsFile(0, Content(0, "0" * 64), {}, {}, {})


def through_a_manifest(record: dict) -> dict:
    return dict(parse_manifest(Manifest(1, NOTHING, {}, record).to_bytes()).record)


# Letters by name: of all characters, hypothesis makes tables first, which takes eight seconds.
TEXTS = st.text(st.sampled_from('aZ0 $"\\\n\x00\x7f\u2028ü漢😀\ufeff'))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just(2**3000) | st.just(-(2**1024))
KEYS = TEXTS | st.just("$float") | st.just("$dict")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.keeps("record-beside-tensors-comes")
@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_any_json_comes_back_as_it_was(value):
    back = through_a_manifest({"value": value})["value"]

    assert repr(back) == repr(value)  # NaN and -0.0 too, and no integer for a float


@pytest.mark.keeps("record-beside-tensors-comes")
def test_floats_come_back_bit_for_bit():
    chance = random.Random(0)
    floats = [struct.unpack("<d", chance.randbytes(8))[0] for _ in range(2000)]
    floats = [*(number for number in floats if not math.isnan(number)), 5e-324, -0.0, 1.7976931348623157e308, math.inf]

    back = through_a_manifest({"floats": floats})["floats"]

    assert struct.pack(f"<{len(floats)}d", *back) == struct.pack(f"<{len(floats)}d", *floats)


def test_the_state_of_pythons_random_numbers_comes_back():
    version, state, gauss = random.Random(3).getstate()
    back = through_a_manifest({"random": (version, state, gauss)})["random"]

    again = random.Random()
    again.setstate((back[0], tuple(back[1]), back[2]))
    assert again.random() == random.Random(3).random()


def test_numbers_beyond_pythons_limit_of_digits_come_back():
    assert through_a_manifest({"x": -(10**5000)}) == {"x": -(10**5000)}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"a": [1, {"b": {1, 2}}]}, r"record.a\[1\].b: a set is no JSON"),
        ({"a": b"bytes"}, "record.a: a bytes is no JSON"),
        ({"a": {1: 2}}, "record.a: has the key 1, and only texts can be keys"),
    ],
)
def test_what_is_no_json_is_refused_by_its_place(value: dict, line: str):
    with pytest.raises(ValueError, match=line):
        Manifest(1, NOTHING, {}, value).to_bytes()


def test_what_is_nested_too_deeply_is_refused_before_it_is_written():
    value: list = []
    for _ in range(1000):
        value = [value]

    with pytest.raises(ValueError, match="nested deeper than 100"):
        encoded(value)


def test_as_deep_as_may_be_comes_back():
    value: dict = {}
    for _ in range(98):
        value = {"$": value}

    assert decoded(json.loads(json.dumps(encoded(value)))) == value


def test_what_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strict_json, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"manifest.json is 1,\d\d\d bytes long, more than 1,000: the record "):
        Manifest(1, NOTHING, {}, {"text": "x" * 900}).to_bytes()
    monkeypatch.setattr(strict_json, "MAX_CONTAINERS", 20)
    with pytest.raises(ValueError, match="has more than 20 lists and objects"):
        Manifest(1, NOTHING, {}, {"lists": [[]] * 20}).to_bytes()
