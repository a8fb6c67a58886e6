"""speculators' own replaced forward, made to fit the model it is bound to.

An opt-in (``SPECULATORS_VLLM_COMPAT_FORWARD=replaced``) for people who compare with states
made before. That forward calls ``layer(hidden_states=, positions=, residual=)`` and expects
two tensors back; here it sees a view of the decoder whose layers are called by their real
signature. What a model's own forward does around its layers is lost, as it always was.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..calls import accepts
from ..errors import UnknownFormError
from ..patches.embed_function import embed_function

_SYNONYMS = {
    "hidden_states": ("hidden_states", "x"),
    "positions": ("positions", "position_ids"),
    "residual": ("residual",),
    "llama_4_scaling": ("llama_4_scaling",),
}


def llama_4_scaling(config: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """The attention scaling by position of Mistral-Large-3, or None where the config has none.

    Args:
        config: The decoder's config; ``llama_4_scaling`` holds ``beta`` and
            ``original_max_position_embeddings``.
        positions: [tokens].

    Returns:
        [tokens, 1, 1], to be multiplied with the queries.
    """
    scaling = getattr(config, "llama_4_scaling", None)
    if scaling is None:
        return None
    periods = torch.floor(positions / scaling["original_max_position_embeddings"])
    return (1 + scaling["beta"] * torch.log1p(periods))[..., None, None]


class LayerCall:
    """A decoder layer, called with speculators' three keywords.

    Args:
        layer: The layer.
        config: The decoder's config.

    Raises:
        UnknownFormError: The layer needs an argument there is no value for.
    """

    def __init__(self, layer: Any, config: Any) -> None:
        self._layer = layer
        self._config = config
        self._binding = _bind(layer)

    def __call__(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, residual: Any
    ) -> tuple[torch.Tensor, Any]:
        values = {
            "hidden_states": hidden_states,
            "positions": positions,
            "residual": residual if isinstance(residual, torch.Tensor) else None,
        }
        if "llama_4_scaling" in self._binding:
            values["llama_4_scaling"] = llama_4_scaling(self._config, positions)
        output = self._layer(**{name: values[known] for known, name in self._binding.items()})
        if isinstance(output, torch.Tensor):
            return output, 0  # speculators adds the two, and 0 adds nothing
        if not isinstance(output, tuple) or len(output) != 2:
            raise UnknownFormError(
                f"{type(self._layer).__name__} returned {type(output).__name__}; expected a tensor "
                "or two. Unset SPECULATORS_VLLM_COMPAT_FORWARD to observe the layers instead."
            )
        hidden, residual = output
        return hidden, 0 if residual is None else residual


class DecoderView:
    """The decoder as the replaced forward sees it; what is not adapted is the decoder's own."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        embed = embed_function(decoder)
        self.embed_input_ids = embed
        self.get_input_embeddings = embed
        config = getattr(decoder, "config", None)
        self.layers = [
            LayerCall(layer, config) if decoder.start_layer <= index < decoder.end_layer else layer
            for index, layer in enumerate(decoder.layers)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def norm(self, hidden_states: torch.Tensor, residual: Any) -> tuple[torch.Tensor, Any]:
        """The final norm, with or without a residual to add."""
        norm = self._decoder.norm
        if isinstance(residual, torch.Tensor):
            normed: tuple[torch.Tensor, Any] = norm(hidden_states, residual)
            return normed
        return norm(hidden_states), None


def _bind(layer: Any) -> dict[str, str]:
    """Which parameter of the layer takes which of the values there are."""
    parameters = inspect.signature(layer.forward).parameters
    binding = {
        known: name
        for known, names in _SYNONYMS.items()
        for name in names
        if name in parameters
        or (known == name != "llama_4_scaling" and accepts(layer.forward, name))
    }
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    left = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in variadic
        and name not in binding.values()
    ]
    if left or "hidden_states" not in binding:
        raise UnknownFormError(
            f"{type(layer).__name__}.forward{tuple(parameters)} needs {left or 'hidden_states'}; "
            f"expected no more than {sorted(_SYNONYMS)}. Unset SPECULATORS_VLLM_COMPAT_FORWARD to "
            "observe the layers instead."
        )
    return binding
