"""One loop behind ``generate()`` for every release of speculators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, GENERATOR_CLASS, Finding, Ledger, Patch, Sources
from ..probing import absent, at, lacking, misplaced, misreturned, needed, unfit, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_NAME = f"{GENERATOR_CLASS}.generate"

# What the loop and the capture read of a scheduled step.
_OUTPUT = {
    "SchedulerOutput": (
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
    ),
    "NewRequestData": ("req_id", "prompt_token_ids", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "num_computed_tokens"),
}


def probe(sources: Sources) -> Finding:
    generator = sources.generator
    signature = generator.function(_NAME) if generator else None
    if generator is None or signature is None:
        return absent(sources.speculators, "data_generation.vllm_hidden_states_generator", _NAME)
    where = at(generator, signature.line)
    if problem := unfit(signature, {"token_ids"}):
        return unknown(problem, where, "generate(token_ids)")
    module = sources.vllm.module("v1.core.sched.scheduler")
    for name, given in (
        ("schedule", ()),
        ("add_request", ("request",)),
        ("finish_requests", ("request_ids", "finished_status")),
    ):
        called = module.function(f"Scheduler.{name}") if module else None
        if module is None or called is None:
            return absent(sources.vllm, "v1.core.sched.scheduler", f"Scheduler.{name}")
        problem = misplaced(called, given)
        if name == "schedule":
            problem = problem or misreturned(module, f"Scheduler.{name}", "SchedulerOutput")
        if problem:
            return unknown(problem, at(module, called.line), f"{name}{given}")
    assert module is not None
    init = "Scheduler.__init__"
    told = module.line(init) is not None and not module.is_stub(init)
    if told and not module.mentions(init, "self.requests"):
        where = at(module, module.line(init))
        return unknown("Scheduler without requests", where, "an attribute requests")
    output = sources.vllm.module("v1.core.sched.output")
    for name, fields in _OUTPUT.items():
        if output is None or output.fields(name) is None:
            return absent(sources.vllm, "v1.core.sched.output", name)
        if problem := lacking(output.fields(name), fields):
            return unknown(f"{name} with {problem}", at(output, output.line(name)), f"{fields}")
    return needed("speculators' own loop returns wrong values for some calls", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    from .. import loop

    owner = getattr(module, GENERATOR_CLASS)

    def generate(_wrapped: Any, instance: Any, args: Any, kwargs: Any) -> list[dict[str, Any]]:
        return loop.generate(instance, module, *args, **kwargs)

    def generate_iter(self: Any, token_ids: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        return loop.generate_iter(self, module, token_ids)

    generate_iter.__doc__ = loop.generate_iter.__doc__
    ledger.wrap(owner, "generate", generate)
    ledger.add(owner, "generate_iter", generate_iter)
    # Counted over the generator's life, for callers that must not lose a token unawares.
    ledger.add(owner, "truncated_sequences", 0)
    ledger.add(owner, "truncated_tokens", 0)


PATCH = Patch(
    id="generate_loop",
    summary="Runs every prompt to its end and returns results in the order asked for.",
    why="0.4 returns results in the lexicographic order of request ids and at most 32; 0.3.0 cuts "
    "a prompt the token budget splits and shifts what follows; both cut to max_model_len - 1 "
    "without a word, and both are unusable after a failed call.",
    upstream="speculators/data_generation/vllm_hidden_states_generator.py, 0.3.0 to 0.4.0.1",
    process="driver",
    probe=probe,
    target=GENERATOR,
    imports=("speculators_vllm_compat.loop",),
    apply=apply,
    removable="never, as long as those releases are supported",
)
