"""What is checked of the generator's results, on tensors alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the norm of a row. Float32: both sides sum in another order, measured differences are below
# 1e-5. The others have 8 and 11 bits of mantissa and round at other places, layer after layer. A
# row of another token is off by more than half of its norm.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
# Rounding of reduced precision sends a token whose experts score alike to other ones, rightly.
TIES = 0.1
# What neighbouring layers have to differ by for the comparison to be able to fail.
TELLING = 5

LENGTHS = (200, 1, 15, 16, 17, 130, 30, 45, 5, 90, 60, 12)  # more than ten; the first is long
BUDGET = 96  # fewer tokens than the longest prompt has
# Alone: the longest, the shortest, and one that ends with a block of 16.
ALONE = (0, 1, 3)


@dataclass(frozen=True)
class Outcome:
    """One check.

    Attributes:
        name: What was checked.
        passed: The result; None when it was not run.
        note: Why it failed or was not run, or what the difference means.
        difference: The largest, as a share of a row's norm; None where there is no such number.
    """

    name: str
    passed: bool | None
    note: str = ""
    difference: float | None = None


@dataclass(frozen=True)
class Judge:
    """When two sets of rows count as equal."""

    dtype: str
    experts: bool

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def ties(self) -> float:
        """The share of rows that may be off."""
        return TIES if self.experts and self.dtype != "float32" else 0.0

    def compare(self, name: str, pairs: Sequence[tuple[Any, Any]]) -> Outcome:
        """Whether the rows of pairs of [tokens, hidden] tensors, found and expected, are equal."""
        shapes = [(tuple(f.shape), tuple(w.shape)) for f, w in pairs if f.shape != w.shape]
        if shapes:
            found, wanted = shapes[0]
            return Outcome(name, False, f"a result has shape {found}; expected {wanted}")
        off = torch.cat([relative(found, wanted) for found, wanted in pairs])
        wrong = int((off > self.tolerance).sum())
        worst = float(off.max())
        if wrong <= self.ties * len(off):
            note = f"{wrong} of {len(off)} rows are off, as ties between experts" if wrong else ""
            return Outcome(name, True, note, worst)
        note = f"{wrong} of {len(off)} rows differ by more than {self.tolerance:.0e}"
        if self.experts and wrong <= max(1, TIES * len(off)):
            note += "; so few can be ties between experts: try another --seed"
        return Outcome(name, False, note, worst)


def relative(found: Any, wanted: Any) -> Any:
    """For each row, the norm of the difference as a share of the norm: [tokens], float64.

    Infinite where a value is not finite.
    """
    found, wanted = found.double(), wanted.double()
    size = wanted.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    off = (found - wanted).norm(dim=1) / size
    return torch.where(off.isfinite(), off, torch.full_like(off, float("inf")))


def prompts(longest: int, vocabulary: int, first: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids from ``first`` on, none longer than ``longest``."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(first, vocabulary, (min(length, longest),), generator=generator).tolist()
        for length in LENGTHS
    ]


def form(results: list[dict[str, Any]], prompts: list[list[int]], layers: int) -> Outcome:
    """One result for each prompt, in order, with one row a token for each layer."""
    name = "row counts and order"
    if len(results) != len(prompts):
        return Outcome(name, False, f"{len(results)} results for {len(prompts)} prompts")
    for index, (result, ids) in enumerate(zip(results, prompts, strict=True)):
        if result["input_ids"].tolist() != ids:
            return Outcome(name, False, f"result {index} is not that of prompt {index}")
        rows = [len(states) for states in result["hidden_states"]]
        if rows != [len(ids)] * layers:
            return Outcome(
                name, False, f"prompt {index} has rows {rows}; expected {layers} times {len(ids)}"
            )
    return Outcome(name, True)


def finite(results: list[dict[str, Any]]) -> Outcome:
    """Every value is finite and every row has one that is not zero."""
    name = "rows finite and not zero"
    for index, result in enumerate(results):
        for place, states in enumerate(result["hidden_states"]):
            if not states.isfinite().all():
                return Outcome(name, False, f"prompt {index}, layer {place}: not finite")
            if not (states != 0).any(dim=1).all():
                return Outcome(name, False, f"prompt {index}, layer {place}: a row of zeros")
    return Outcome(name, True)


def telling(results: list[dict[str, Any]], layers: Sequence[int], judge: Judge) -> Outcome:
    """Rows of other layers, and of other tokens, differ by far more than the tolerance."""
    name = "layers and tokens told apart"
    needed = TELLING * judge.tolerance
    apart = []
    for result in results:
        states = result["hidden_states"]
        for place, other in itertools.combinations(range(len(layers)), 2):
            if layers[place] != layers[other]:
                apart.append(float(relative(states[place], states[other]).median()))
        for layer in states:
            if len(layer) > 1:
                apart.append(float(relative(layer[1:], layer[:-1]).median()))
    least = min(apart, default=float("inf"))
    if least >= needed:
        return Outcome(name, True, f"at least {least:.1e} apart")
    return Outcome(
        name,
        False,
        f"only {least:.1e} apart; expected {needed:.0e}: the comparisons prove nothing",
    )


def pairs(
    found: list[dict[str, Any]], wanted: list[dict[str, Any]], order: Sequence[int] | None = None
) -> list[tuple[Any, Any]]:
    """The states of results beside those they should equal: ``found[i]``, ``wanted[order[i]]``."""
    indices = range(len(found)) if order is None else order
    return [
        pair
        for result, index in zip(found, indices, strict=True)
        for pair in zip(result["hidden_states"], wanted[index]["hidden_states"], strict=True)
    ]
