"""Random values of a sensible size for the parameters of a vLLM model, quantized ones included."""

from __future__ import annotations

import math

import torch

# Integers that are places or sizes, not values: a random one would be out of range.
_PLACES = ("g_idx", "weight_shape", "sort_indices", "workspace")
# Of the KV cache, whose values need no scaling here.
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
_OF_NIBBLES = 4.3  # 1 to 15
_OF_BYTES = 74.0  # -128 to 127


def code_size(parameters: dict[str, torch.Tensor]) -> float:
    """The standard deviation of a module's random codes; 1 where its weights are no integers."""
    sizes = [
        _OF_BYTES if tensor.dtype is torch.int8 else _OF_NIBBLES
        for name, tensor in parameters.items()
        if not tensor.is_floating_point() and not any(place in name for place in _PLACES)
    ]
    return max(sizes, default=1.0)


def fill(
    name: str, tensor: torch.Tensor, *, codes: float, hidden: int, generator: torch.Generator
) -> None:
    """Give one parameter random values of a sensible size.

    Args:
        name: Its name within its module.
        tensor: The parameter.
        codes: The module's code size: its scales make weights of that size small.
        hidden: The hidden size, for scales whose weights' width cannot be told from here.
        generator: On the CPU, so that the values are the same on any device.
    """
    if tensor.device.type == "meta":
        return
    if not tensor.is_floating_point():
        tensor.copy_(_codes(name, tensor, hidden, generator))
        return
    normal = torch.randn(tensor.shape, generator=generator)
    if name.lstrip("_") in _CACHE_SCALES:
        values = torch.ones(tensor.shape)
    elif "scale" in name:
        size = 1.0 if codes == 1.0 else 1 / (codes * math.sqrt(hidden))
        values = size * (0.5 + torch.rand(tensor.shape, generator=generator))
    elif "bias" in name:
        values = 0.05 * normal
    elif tensor.ndim < 2:
        values = 1 + 0.1 * normal  # a norm
    else:
        values = normal / math.sqrt(tensor.shape[-1])
    tensor.copy_(values.to(tensor.dtype))


def _codes(
    name: str, tensor: torch.Tensor, hidden: int, generator: torch.Generator
) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if any(place in name for place in _PLACES):
        return torch.zeros_like(tensor)
    if "scale" in name:  # exponents, of weights of about 3 (MXFP4)
        middle = 127 - round(math.log2(3 * math.sqrt(hidden)))
        return torch.randint(middle - 1, middle + 2, shape, generator=generator)
    # Nibbles of 1 to 15, the middle one of which stands for zero: a mean that is not zero would
    # push every row the same way, layer after layer, until all are alike.
    width = tensor.element_size()
    high, low = torch.randint(1, 16, (2, *shape, width), generator=generator)
    return (16 * high + low).to(torch.uint8).view(tensor.dtype).view(shape)
