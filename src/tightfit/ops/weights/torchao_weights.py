"""Weights of linear layers in few bits by torchao: quantised, taken apart into plain tensors, and put together again.

torchao does the quantisation and the products. This file chooses its settings, and gives its weights a form that
safetensors holds. Nothing of torchao is imported before it is needed, which takes seconds.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tightfit.errors import DeviceError, InputError

Method = Literal["int8_dynamic", "int8", "int8_static", "int4"]
INSTALL = "pip install 'tightfit[lowbit]'"
# Of torchao. 0.18 has the int4 weights of CPUs in its prototype folder, and a prototype may move with any release.
FIRST, BELOW = (0, 18), (0, 19)
GROUP_SIZE = 32  # weights that share a scale in int4: the smallest that torchao's CPU kernel knows
ROW_MULTIPLE = 16  # PyTorch packs 4-bit weights of a CPU in so many rows (`_convert_weight_to_int4pack_for_cpu`)
PACKED_ROWS = 64  # blocks of rows that PyTorch packs by themselves with AVX-512; of fewer with other instructions
SIXTEEN = 16  # values of a 4-bit code
EXTREMES = (127, -128, -127)  # codes whose products overflow 16 bits first


class WeightParts(NamedTuple):
    """A quantised weight as plain tensors by name, and what else it takes to put it together, as JSON."""

    tensors: dict[str, Tensor]
    described: dict[str, Any]


def torchao_version() -> str:
    """The version that is installed. Raises `InputError` where it is none, or one that this file does not know."""
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(f"quantised weights need the package torchao, which is not installed: {INSTALL}") from error
    if not FIRST <= tuple(int(part) for part in version.split(".")[:2]) < BELOW:
        wanted = f">={'.'.join(map(str, FIRST))},<{'.'.join(map(str, BELOW))}"
        raise InputError(f"torchao {version} is installed, and quantised weights need torchao{wanted}: {INSTALL}")
    return version


def quantise_layers(
    model: nn.Module, method: Method, paths: Iterable[str], scales: Mapping[str, Tensor] | None = None
) -> None:
    """Quantise the weights of the linear layers at `paths` in place. They must be such that `objection` is None.

    `scales` are those of the layers' inputs, for `int8_static` (`calibrated`). Raises `InputError` where torchao is
    missing, and `DeviceError` where this machine computes no such products.
    """
    torchao_version()
    demand_products(method)
    quantize = _torchao().quantize_
    layers = {path: model.get_submodule(path) for path in paths}
    if method == "int8_static":
        assert scales is not None, "int8_static needs the scales of a calibration"
        for path, layer in layers.items():
            quantize(layer, _config(method, scales[path].clone()))  # each layer has one of its own, in a file too
        return
    chosen = {id(layer) for layer in layers.values()}
    quantize(model, _config(method), filter_fn=lambda module, path: id(module) in chosen)


def objection(layer: nn.Linear, method: Method) -> str | None:
    """Why a layer cannot be quantised by a method; None where it can."""
    if method != "int4":
        return None
    rows, columns = layer.weight.shape
    if columns % GROUP_SIZE:
        return f"{columns} inputs are no multiple of {GROUP_SIZE}"
    return f"{rows} outputs are no multiple of {ROW_MULTIPLE}" if rows % ROW_MULTIPLE else None


def observer() -> Any:
    """A module that sees the inputs of a layer, and then gives their scale (`calculate_qparams`)."""
    package = importlib.import_module("torchao.quantization.observer")
    ao = _torchao()
    return package.AffineQuantizedMinMaxObserver(
        ao.MappingType.SYMMETRIC,
        torch.int8,
        granularity=ao.PerTensor(),
        eps=torch.finfo(torch.float32).eps,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
        keepdim=True,  # torchao wants a scale with as many dimensions as the input
    )


def demand_products(method: Method) -> None:
    """Raise `DeviceError` where this machine has no products of such weights, or wrong ones."""
    if method in ("int8_dynamic", "int8_static") and not int8_products_are_exact():
        raise DeviceError(
            f"{method}: products of int8 numbers overflow on this CPU (it has no VNNI instructions): take int8, whose "
            "products are in floating point"
        )
    if method == "int4" and not has_int4():
        raise DeviceError("int4: PyTorch has no products of 4-bit weights for this CPU: take int8")


@cache
def int8_products_are_exact() -> bool:
    """True if PyTorch's int8 product is right for the largest codes. Some kernels add two products in 16 bits."""
    made = torch.tensor(EXTREMES, dtype=torch.int8)
    for rows in (1, 64):
        one = made[torch.arange(rows * 128).view(rows, 128) % 2]
        other = made[torch.arange(128 * 64).view(64, 128) % 3]
        for left, right in ((one, other), (one.abs().clamp(max=127), torch.full_like(other, 127))):
            if not torch.equal(torch.ops.aten._int_mm(left, right.t()), left.int() @ right.t().int()):
                return False
    return True


@cache
def has_int4() -> bool:
    """True if PyTorch computes with 4-bit weights on this CPU."""
    try:
        packed = _packed(torch.zeros(ROW_MULTIPLE, GROUP_SIZE, dtype=torch.int32))
        scales = torch.ones(1, ROW_MULTIPLE, 2)
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.ones(1, GROUP_SIZE), packed, GROUP_SIZE, scales)
    except (RuntimeError, NotImplementedError):
        return False
    return tuple(found.shape) == (1, ROW_MULTIPLE)


def parts_of(weight: Tensor) -> WeightParts | None:
    """A weight of torchao's as plain tensors; None for any other tensor."""
    kind = type(weight.data).__name__
    held: Any = weight.data
    if kind == "Int8Tensor":
        names = list(held.__tensor_flatten__()[0])
        tensors = {name: getattr(held, name).contiguous() for name in names}
        return WeightParts(tensors, {"kind": kind, "dtype": _name(held.dtype), "block_size": list(held.block_size)})
    if kind == "Int4OpaqueTensor":
        # How a CPU packs the codes depends on its instructions, so a file has them in their plain order.
        codes = _plain_codes(held.qdata, tuple(held.shape))
        tensors = {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scale_and_zero": held.scale_and_zero.contiguous()}
        return WeightParts(tensors, {"kind": kind, "block_size": list(held.block_size)})
    return None


def weight_of(parts: WeightParts, method: Method) -> nn.Parameter:
    """The weight that `parts_of` took apart, for this machine's products. Raises `KeyError` for parts of others."""
    tensors, described = dict(parts.tensors), parts.described
    if described["kind"] == "Int4OpaqueTensor":
        found = _int4(tensors["codes"], tensors["scale_and_zero"], described["block_size"])
    else:
        ao = _torchao()
        workflows = importlib.import_module("torchao.quantization.quantize_.workflows")
        granularity = {"int8_dynamic": ao.PerRow, "int8_static": ao.PerTensor}.get(method)
        activations = None if granularity is None else workflows.QuantizeTensorToInt8Kwargs(granularity())
        found = ao.Int8Tensor(
            tensors.pop("qdata"),
            tensors.pop("scale"),
            described["block_size"],
            getattr(torch, described["dtype"]),
            act_quant_kwargs=activations,
            **tensors,
        )
    return nn.Parameter(found, requires_grad=False)


def _int4(halves: Tensor, scale_and_zero: Tensor, block_size: list[int]) -> Tensor:
    codes = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1)
    opaque = importlib.import_module("torchao.prototype.quantization.int4.int4_opaque_tensor")
    return opaque.Int4OpaqueTensor(_packed(codes.int()), scale_and_zero, block_size, codes.shape)


def _packed(codes: Tensor) -> Tensor:
    """Codes (rows, columns) int32 as this CPU's products read them, uint8 (rows, columns / 2)."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def _plain_codes(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The codes in packed ones, uint8 (rows, columns).

    Packing moves codes and does not change them. So where each one went is read from packed places, 4 bits at a time.
    """
    rows, columns = shape
    block = PACKED_ROWS if rows % PACKED_ROWS == 0 else rows
    places = torch.arange(block * columns).view(block, columns)
    found = torch.zeros(block * columns, dtype=torch.int64)
    digit = 1
    while digit < block * columns:
        found += _halves(_packed((places // digit % SIXTEEN).int())).flatten().long() * digit
        digit *= SIXTEEN
    codes = torch.empty(rows // block, block * columns, dtype=torch.uint8)
    codes[:, found] = _halves(packed).view(rows // block, -1)
    codes = codes.view(rows, columns)
    assert torch.equal(_packed(codes.int()), packed), "packing moves codes within blocks of rows"
    return codes


def _halves(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1)


def _config(method: Method, scale: Tensor | None = None) -> Any:
    """torchao's settings of a method. They leave those of the compiler alone, which would hold for the process."""
    ao = _torchao()
    makers: dict[str, Callable[[], Any]] = {
        "int8": lambda: ao.Int8WeightOnlyConfig(set_inductor_config=False),
        "int8_dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "int8_static": lambda: ao.Int8StaticActivationInt8WeightConfig(
            act_quant_scale=scale, granularity=[ao.PerTensor(), ao.PerRow()], set_inductor_config=False
        ),
        "int4": lambda: importlib.import_module(
            "torchao.prototype.quantization.int4.inference_workflow"
        ).PrototypeInt4WeightOnlyConfig(group_size=GROUP_SIZE, set_inductor_config=False),
    }
    return makers[method]()


def _torchao() -> Any:
    return importlib.import_module("torchao.quantization")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
