import json

import pytest

from tightfit.devices.spec import DeviceSpec
from tightfit.errors import DeviceError


def test_a_spec_comes_back_from_json_as_it_was(spec, tmp_path):
    path = tmp_path / "device.json"
    spec.to_json(path)
    assert DeviceSpec.from_json(path) == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("products", {"nn/float32": ["fast"]}),
        ("streams", {"copy/float32": [[1.0, float("nan")]]}),
        ("streams", {"copy/float32": [1.0]}),
        ("attention", {"forward/full/float32": [{"length": 1}]}),
        ("kind", "abacus"),
        ("memory_bytes", "lots"),
        ("colour", "grey"),
    ],
)
def test_a_spec_with_a_wrong_figure_is_refused_by_what_to_do(spec, key, value):
    with pytest.raises(DeviceError, match="calibrate the device again"):
        DeviceSpec.from_dict({**spec.to_dict(), key: value})


def test_a_spec_with_a_missing_table_is_refused(spec):
    data = spec.to_dict()
    del data["streams"]
    with pytest.raises(DeviceError, match="streams"):
        DeviceSpec.from_dict(data)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"name": "half a spec"})])
def test_a_file_that_is_not_a_spec_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(DeviceError) as caught:
        DeviceSpec.from_json(path)
    assert "\n" not in str(caught.value)
