"""The residual stream after a decoder layer, from whatever the layer returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def residual_stream(
    output: Any, rows: int, place: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like
) -> torch.Tensor:
    """What transformers calls ``hidden_states[i + 1]``, before the next layer's norm.

    Args:
        output: What the layer returned: a tensor, ``(hidden, residual)`` or ``(hidden, None)``.
        rows: How many leading rows are tokens; what follows is padding.
        place: Gives the memory for the result, for a tensor of its form.

    Returns:
        [rows, hidden], in memory that no later layer writes to.

    Raises:
        ValueError: The output has another form, or too few rows.
    """
    hidden, residual = _parts(output)
    if hidden.dim() != 2 or hidden.shape[0] < rows:
        raise ValueError(
            f"a decoder layer returned a tensor of shape {tuple(hidden.shape)}; expected "
            f"[tokens, hidden] with at least the {rows} tokens scheduled"
        )
    hidden = hidden[:rows]
    target = place(hidden)
    if residual is None:
        return target.copy_(hidden)
    return torch.add(hidden, residual[:rows], out=target)


def _parts(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(output, torch.Tensor):
        return output, None
    if isinstance(output, tuple | list) and len(output) in (1, 2):
        hidden, residual = output[0], output[1] if len(output) == 2 else None
        if isinstance(hidden, torch.Tensor) and (
            residual is None
            or (isinstance(residual, torch.Tensor) and residual.shape == hidden.shape)
        ):
            return hidden, residual
    shown = (
        [getattr(part, "shape", type(part).__name__) for part in output]
        if isinstance(output, tuple | list)
        else type(output).__name__
    )
    raise ValueError(
        f"a decoder layer returned {shown}; expected a tensor, (hidden, residual) of one shape, "
        "or (hidden, None): how these add up to the residual stream is not known"
    )
