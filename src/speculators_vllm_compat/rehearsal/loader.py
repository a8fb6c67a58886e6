"""Workers: random weights made inside vLLM, for what transformers has no model or format of.

Named as the worker extension of a rehearsal, so every worker imports this before it loads the
model. vLLM's own "dummy" weights are within 0.001: layers would hardly change the stream, and
states of different layers could not be told apart. These have the size trained ones have.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .engine import FORMAT

# Integers that are places or sizes, not values: a random one would be out of range.
_PLACES = ("g_idx", "weight_shape", "sort_indices", "workspace")


class RehearsalWorkerExtension(HiddenStatesWorkerExtension):  # type: ignore[misc]
    """speculators' extension as it is; its module registers the loader."""


@register_model_loader(FORMAT)
class RandomLoader(BaseModelLoader):  # type: ignore[misc]
    """Fills a model's parameters, quantized ones included, from seeds made of their names.

    A parameter that every rank has whole is the same on every rank.
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        seed = int(model_config.seed or 0)
        hidden = int(model_config.get_hidden_size())
        for name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            packed = any(not tensor.is_floating_point() for tensor in own.values())
            for leaf, tensor in own.items():
                generator = torch.Generator().manual_seed(
                    zlib.crc32(f"{seed} {name}.{leaf}".encode())
                )
                fill(leaf, tensor.data, packed=packed, hidden=hidden, generator=generator)


def fill(
    name: str, tensor: torch.Tensor, *, packed: bool, hidden: int, generator: torch.Generator
) -> None:
    """Give one parameter random values of a sensible size.

    Args:
        name: Its name within its module.
        tensor: The parameter.
        packed: Its module holds integers: the weights are codes, and scales make them small.
        hidden: The hidden size, for scales whose weights' width cannot be told from here.
        generator: On the CPU, so that the values are the same on any device.
    """
    if tensor.device.type == "meta":
        return
    if not tensor.is_floating_point():
        tensor.copy_(_codes(name, tensor, hidden, generator))
        return
    normal = torch.randn(tensor.shape, generator=generator)
    if "scale" in name:
        size = 1 / (4.6 * math.sqrt(hidden)) if packed else 1.0  # 4.6: of int4 codes, -8 to 7
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
    if any(place in name for place in _PLACES):
        return torch.zeros_like(tensor)
    if "scale" in name:  # exponents, of weights of about 3 (MXFP4)
        middle = 127 - round(math.log2(3 * math.sqrt(hidden)))
        low, high = middle - 1, middle + 2
    else:
        information = torch.iinfo(tensor.dtype)
        low, high = information.min, information.max
    shape = tuple(tensor.shape)
    return torch.randint(low, high, shape, generator=generator).to(tensor.dtype)
