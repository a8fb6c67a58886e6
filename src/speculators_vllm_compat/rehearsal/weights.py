"""Random weights that transformers writes, and what it computes with them."""

from __future__ import annotations

import importlib
import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .layers import Config

# An expert's own part, where they are variations of one: the other part is all of theirs.
_OWN = 0.2
_OF_EXPERT = re.compile(r"(?<=\.experts\.)\d+\.")


def model_class(config: Config) -> type[Any] | None:
    """transformers' class for the architecture a config names, if it has one."""
    import transformers

    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type):
            return found
    return None


def write(config: Config, folder: Path, *, seed: int, dtype: str) -> None:
    """Make a model in float32, seeded, and write it to a folder that holds its config.

    Args:
        config: What ``folder/config.json`` holds; saving must not change it.
        folder: Where to.
        seed: Of the weights.
        dtype: Of the written tensors.
    """
    import torch
    from transformers import AutoConfig

    made_from = AutoConfig.from_pretrained(folder)
    made_from._attn_implementation = "eager"
    kind = model_class(config)
    assert kind is not None  # asked before
    torch.manual_seed(seed)
    model = kind(made_from).float().eval()
    spread(model)
    if dtype != "float32":
        make_experts_alike(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def spread(model: Any) -> None:
    """Give the parts of an untrained model the size trained ones have.

    Matrices keep the size of what goes through them: larger ones would make attention so sharp
    that rounding grows from layer to layer. Norms and biases, at one and zero before, vary, so
    that leaving one out shows.
    """
    import torch

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.weight.std() > 0:
                module.weight.mul_(1 / (math.sqrt(module.in_features) * module.weight.std()))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rsplit(".", 1)[-1]
            if "e_score_correction_bias" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.02)
            elif isinstance(tensor, torch.nn.Parameter) and (
                leaf == "bias" or leaf.endswith("_bias") or (leaf == "weight" and tensor.ndim == 1)
            ):
                tensor.add_(torch.randn(tensor.shape) * 0.1)


def make_experts_alike(model: Any) -> None:
    """Turn experts into variations of each layer's first one, their size kept.

    Rounding of reduced precision sends a token whose experts score alike to other ones. It then
    ends up nearly the same, while a token that is sent to all the wrong ones still shows.
    """
    import torch

    layers: dict[str, list[Any]] = {}
    for name, tensor in model.named_parameters():
        if _OF_EXPERT.search(name):
            layers.setdefault(_OF_EXPERT.sub("", name, count=1), []).append(tensor)
        elif ".experts." in name and tensor.ndim == 3:
            layers[name] = list(tensor.detach())  # all experts of a layer in one tensor
    share = math.sqrt(1 - _OWN**2)
    with torch.no_grad():
        for experts in layers.values():
            common = experts[0].clone()
            for expert in experts:
                expert.mul_(_OWN).add_(common, alpha=share)


def make_tokenizer(vocabulary: int, folder: Path) -> None:
    """A tokenizer of whole words, for a model that came without one."""
    from transformers import PreTrainedTokenizerFast

    tokenizers = importlib.import_module("tokenizers")  # comes with transformers
    special = ["<unk>", "<s>", "</s>"]
    words = [*special, *(f"w{i}" for i in range(vocabulary - len(special)))]
    numbered = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbered, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


class Reference:
    """What transformers computes in float32: the residual stream after each decoder layer.

    The last layer's is taken before the final norm, so every layer is hooked.
    """

    def __init__(self, config: Config, folder: Path, count: int) -> None:
        import torch

        kind = model_class(config)
        assert kind is not None  # asked before
        self._model = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._seen: dict[int, Any] = {}
        for index, layer in enumerate(_decoder_layers(self._model, count)):
            layer.register_forward_hook(self._keep(index))

    def __call__(self, ids: Sequence[int], layers: Sequence[int]) -> list[Any]:
        """[tokens, hidden] in float32 for each of the layers."""
        import torch

        with torch.inference_mode():
            self._model(torch.tensor([list(ids)]), use_cache=False)
        return [self._seen[layer] for layer in layers]

    def _keep(self, index: int) -> Callable[..., None]:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._seen[index] = hidden[0].clone()

        return keep


def _decoder_layers(model: Any, count: int) -> Any:
    """The language model's list of layers; encoders of images or sound have lists of their own."""
    import torch

    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks")
        and len(module) == count
        and not any(word in name for word in ("vision", "visual", "audio", "encoder"))
    }
    if len(found) != 1:
        raise LookupError(
            f"{type(model).__name__} has {len(found)} lists of {count} decoder layers "
            f"({sorted(found)}); expected one. Its values cannot be compared with transformers."
        )
    return next(iter(found.values()))
