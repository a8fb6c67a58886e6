"""Workers: random weights made inside vLLM, for what transformers has no model or format of.

Named as the worker extension of a rehearsal, so every worker imports this before it loads the
model. vLLM's own "dummy" weights are within 0.001: layers would hardly change the stream, and
states of different layers could not be told apart. These have the size trained ones have.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .engine import FORMAT
from .parameters import code_size, fill


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
            codes = code_size(own)
            for leaf, tensor in own.items():
                generator = torch.Generator().manual_seed(
                    zlib.crc32(f"{seed} {name}.{leaf}".encode())
                )
                fill(leaf, tensor.data, codes=codes, hidden=hidden, generator=generator)
