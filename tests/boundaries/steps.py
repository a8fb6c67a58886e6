"""Stand-ins for vLLM's scheduler output, model runners and a decoder whose states tell tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class FakeLayer(torch.nn.Module):
    """A layer whose hidden state plus residual is ten times the token plus the layer's number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, ids: torch.Tensor) -> Any:
        total = (ids * 10.0 + self.number)[:, None].expand(-1, 2)
        return total - 1.0, torch.ones_like(total)


class FakeDecoder(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(FakeLayer(number) for number in range(layers))

    def forward(self, ids: torch.Tensor) -> None:
        for layer in self.layers:
            layer(ids)


class RunnerV1:
    """Rows in the order of input_batch, which here is the reverse of the scheduler's."""

    def __init__(self, decoder: torch.nn.Module, padding: int = 0) -> None:
        self.decoder = decoder
        self.padding = padding
        self.prompts: dict[str, list[int]] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.input_ids = SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int32))

    def order(self, scheduler_output: Any) -> list[str]:
        return list(reversed(scheduler_output.num_scheduled_tokens))

    def rows(self, scheduler_output: Any, order: list[str]) -> torch.Tensor:
        self.prompts.update(
            {r.req_id: r.prompt_token_ids for r in scheduler_output.scheduled_new_reqs}
        )
        start = dict.fromkeys(self.prompts, 0)
        cached = scheduler_output.scheduled_cached_reqs
        start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids = []
        for name in order:
            count = scheduler_output.num_scheduled_tokens[name]
            ids += self.prompts[name][start[name] : start[name] + count]
        return torch.tensor(ids + [99] * self.padding, dtype=torch.int32)

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> None:
        if dummy_run:
            self.decoder(torch.zeros(4))
            return
        if not scheduler_output.total_num_scheduled_tokens:
            return
        order = self.order(scheduler_output)
        self.input_batch.req_ids = [*order, "finished"]
        ids = self.rows(scheduler_output, order)
        self.input_ids.gpu[: len(ids)] = ids
        self.decoder(ids)


class RunnerV2(RunnerV1):
    """Rows sorted by scheduled tokens, in a batch made for the step."""

    def __init__(self, decoder: torch.nn.Module, padding: int = 0) -> None:
        super().__init__(decoder, padding)
        del self.input_batch, self.input_ids

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        scheduled = scheduler_output.num_scheduled_tokens
        order = sorted(scheduled, key=scheduled.__getitem__)
        return SimpleNamespace(req_ids=order, input_ids=self.rows(scheduler_output, order))

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> None:
        if dummy_run:
            self.decoder(torch.zeros(4))
        elif scheduler_output.total_num_scheduled_tokens:
            self.decoder(self.prepare_inputs(scheduler_output).input_ids)


def step(
    new: dict[str, list[int]] | None = None,
    counts: dict[str, int] | None = None,
    cached: dict[str, int] | None = None,
) -> Any:
    """A scheduler output.

    Args:
        new: Prompts of requests that are new in this step.
        counts: Tokens scheduled; the whole prompt of a new request that is not named.
        cached: Tokens computed earlier, of requests that are not new.
    """
    new, cached = new or {}, cached or {}
    scheduled = {**{name: len(ids) for name, ids in new.items()}, **(counts or {})}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=ids, num_computed_tokens=0)
            for name, ids in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )
