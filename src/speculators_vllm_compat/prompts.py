"""What a caller hands to ``generate()``, checked before anything is scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Prompts:
    """The sequences of one call, ready to be scheduled.

    Attributes:
        token_ids: One list of token ids a sequence, cut where ``max_model_len`` asked for it.
        cut_sequences: How many sequences were cut.
        cut_tokens: How many tokens they lost together.
    """

    token_ids: list[list[int]]
    cut_sequences: int
    cut_tokens: int


def read_prompts(token_ids: Any, *, longest: int, vocabulary: int) -> Prompts:
    """Check and normalise the argument of ``generate()``.

    Args:
        token_ids: A list of lists of ids, a list of 1-D tensors, or a 2-D tensor.
        longest: The most tokens a sequence may have; longer ones are cut at the end.
        vocabulary: How many ids the model's embedding has.

    Raises:
        TypeError: It is something else, or holds ids that are not integers.
        ValueError: It is empty, holds an empty sequence, or an id outside the vocabulary.
    """
    sequences = [
        _sequence(index, item, vocabulary) for index, item in enumerate(_sequences(token_ids))
    ]
    lost = [max(0, len(sequence) - longest) for sequence in sequences]
    return Prompts([s[:longest] for s in sequences], sum(map(bool, lost)), sum(lost))


def _sequences(token_ids: Any) -> list[Any]:
    if isinstance(token_ids, torch.Tensor):
        if token_ids.dim() != 2:
            raise ValueError(
                f"token_ids is a tensor of shape {tuple(token_ids.shape)}; expected [sequences, "
                "tokens]. Pass a 2-D tensor, or a list with one sequence an entry."
            )
        token_ids = list(token_ids)
    if not isinstance(token_ids, list | tuple):
        raise TypeError(
            f"token_ids is a {type(token_ids).__name__}; expected a list of sequences of token "
            "ids, or a 2-D tensor. Tokenize texts first."
        )
    if not token_ids:
        raise ValueError("token_ids cannot be empty; expected at least one sequence of token ids.")
    return list(token_ids)


def _sequence(index: int, item: Any, vocabulary: int) -> list[int]:
    try:
        # One conversion checks every id: a list with anything but integers gives another dtype,
        # and nested lists another shape.
        ids = torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"token_ids[{index}] is not a sequence of token ids ({error}); expected a list of "
            "integers or a 1-D tensor. Tokenize texts first."
        ) from error
    if ids.dim() != 1:
        raise ValueError(
            f"token_ids[{index}] has {ids.dim()} dimensions; expected a flat sequence of token "
            "ids. Pass a list with one sequence an entry."
        )
    if not len(ids):
        raise ValueError(
            f"token_ids[{index}] is empty; expected at least one token id. Leave the sequence out."
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"token_ids[{index}] holds {ids.dtype}; expected integers.")
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        position = int(outside.nonzero()[0])
        raise ValueError(
            f"token_ids[{index}][{position}] is {int(ids[position])}; expected an id from 0 to "
            f"{vocabulary - 1}, the model's vocabulary. Check that the tokenizer is the model's."
        )
    result: list[int] = ids.tolist()
    return result
