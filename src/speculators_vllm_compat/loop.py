"""The one loop behind ``generate()``, for every release of speculators and vLLM.

Requests go into vLLM's scheduler, every scheduled step is executed, and a request is finished
as soon as its whole prompt is scheduled, however many steps that takes; that frees its slot
for the next one. The workers attribute the rows; here they are put into the caller's order.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from .calls import accepts
from .capture.collect import Collector
from .errors import WorkerError
from .prompts import read_prompts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType

logger = logging.getLogger("speculators_vllm_compat")


def generate(generator: Any, names: ModuleType, token_ids: Any) -> list[dict[str, Any]]:
    """Hidden states of every token of every sequence.

    Args:
        generator: A VllmHiddenStatesGenerator.
        names: The module it is defined in; ``Request`` and ``SamplingParams`` are looked up
            there at each call, so that a name somebody replaced is used.
        token_ids: A list of lists of token ids, a list of 1-D tensors, or a 2-D tensor.

    Returns:
        One dict a sequence, in the order given: ``input_ids`` (int64, [tokens]),
        ``hidden_states`` (one [tokens, hidden] CPU tensor for each of ``generator.layer_ids``,
        in that order, owning its storage) and ``loss_mask`` (None).

    Raises:
        TypeError, ValueError: The argument is not usable; nothing was scheduled.
        RuntimeError: A worker failed, or captured other rows than were scheduled. Every request
            of the call is dropped and the generator stays usable.
    """
    results = dict(generate_iter(generator, names, token_ids))
    return [results[index] for index in range(len(results))]


def generate_iter(
    generator: Any, names: ModuleType, token_ids: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The results of ``generate()``, each as soon as it is complete.

    The workers compute on while a result is used; what was handed over is not kept, so host
    memory holds the sequences under way and no more. Exhaust or close the iterator before the
    next call.

    Args:
        generator: A VllmHiddenStatesGenerator.
        names: The module it is defined in.
        token_ids: As for ``generate()``; checked at once.

    Returns:
        Pairs of a sequence's position in ``token_ids`` and its dict, in the order in which they
        are complete.

    Raises:
        TypeError, ValueError, RuntimeError: As for ``generate()``.
    """
    if getattr(generator, "_generating", False):
        raise RuntimeError(
            "another generate_iter() of this generator is under way; expected one call at a time. "
            "Exhaust it, or close() it."
        )
    return _results(generator, names, _prompts(generator, token_ids))


def _results(
    generator: Any, names: ModuleType, token_ids: list[list[int]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    call = generator._request_counter
    generator._request_counter += 1
    prompts = {f"req_{call}_{index}": ids for index, ids in enumerate(token_ids)}
    position = {request_id: index for index, request_id in enumerate(prompts)}
    layers = len(dict.fromkeys(generator.layer_ids))
    generator._generating = True
    try:
        _start_capture(generator.executor, call)
        ring = getattr(generator, "_hidden_states_ring", None)
        with Collector(generator.executor, ring, layers, prompts) as collector:
            _add_requests(generator, names, prompts)
            for request_id, states in _prefill(generator, collector, prompts):
                result = {
                    "input_ids": torch.tensor(prompts[request_id], dtype=torch.long),
                    "hidden_states": _in_asked_order(states, generator.layer_ids),
                    "loss_mask": None,
                }
                handed_over = [(position[request_id], result)]
                del states, result  # the caller's from here on, and freed when it lets go
                yield handed_over.pop()
    except BaseException:
        _abandon(generator, list(prompts))
        raise
    finally:
        generator._generating = False


def _prompts(generator: Any, token_ids: Any) -> list[list[int]]:
    model_config = generator.vllm_config.model_config
    longest = model_config.max_model_len - 1  # vLLM keeps a position for the token it samples
    prompts = read_prompts(
        token_ids, longest=longest, vocabulary=int(model_config.get_vocab_size())
    )
    if prompts.cut_sequences:
        generator.truncated_sequences += prompts.cut_sequences
        generator.truncated_tokens += prompts.cut_tokens
        logger.warning(
            "%d of %d sequences were cut to %d tokens (%d tokens lost): vLLM keeps one position "
            "of max_model_len=%d free. To keep them, create the generator with max_model_len set "
            "to the longest sequence plus 1.",
            prompts.cut_sequences,
            len(prompts.token_ids),
            longest,
            prompts.cut_tokens,
            model_config.max_model_len,
        )
    return prompts.token_ids


def _start_capture(executor: Any, call: int) -> None:
    """Forget what an earlier call left, and make sure that the replies are this call's."""
    replies = executor.collective_rpc("_reset_capture", args=(call,))
    if any(reply != call for reply in replies):
        raise WorkerError(
            f"the workers answered {replies!r} to the start of call {call}; expected {call} from "
            "each. Either an earlier call was interrupted between a question and its answer, or "
            "the workers run without the patches. Create a new generator."
        )


def _add_requests(generator: Any, names: ModuleType, prompts: Mapping[str, list[int]]) -> None:
    sampling = names.SamplingParams(max_tokens=1, temperature=0.0)
    arguments = {
        "sampling_params": sampling,
        "pooling_params": None,
        "eos_token_id": generator.tokenizer.eos_token_id,
        "arrival_time": 0.0,
    }
    if accepts(names.Request, "block_hasher"):
        arguments["block_hasher"] = generator.block_hasher
    for request_id, ids in prompts.items():
        request = names.Request(request_id=request_id, prompt_token_ids=ids, **arguments)
        generator.scheduler.add_request(request)


def _prefill(
    generator: Any, collector: Collector, request_ids: Iterable[str]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Execute steps until every prompt is computed; yields each sequence's states."""
    scheduler = generator.scheduler
    unfinished = set(request_ids)
    while unfinished:
        output = scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            raise RuntimeError(_stalled(generator, unfinished))
        # Whoever is complete is told from the scheduler before the step has run: vLLM counts
        # tokens when it schedules them. Preemption takes num_computed_tokens back to 0, so it
        # tells, and a count of ours would not, whether a prompt is complete.
        computed = [scheduler.requests[request_id] for request_id in scheduled]
        done = [r.request_id for r in computed if r.num_computed_tokens >= r.num_prompt_tokens]
        yield from collector.run(output)
        if done:
            _finish(generator, done)
            unfinished.difference_update(done)
    yield from collector.finish()


def _finish(generator: Any, request_ids: list[str]) -> None:
    # Aborted, not stopped: nothing was sampled that anybody would want.
    from vllm.v1.request import RequestStatus

    generator.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)


def _abandon(generator: Any, request_ids: list[str]) -> None:
    """Leave nothing of a failed call for the next one to meet."""
    known = [r for r in request_ids if r in generator.scheduler.requests]
    if known:
        _finish(generator, known)
    with contextlib.suppress(Exception):  # the failure that led here is the one to tell
        generator.executor.collective_rpc("_reset_capture")


def _stalled(generator: Any, unfinished: set[str]) -> str:
    cache = generator.vllm_config.cache_config
    room = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
    waiting = [generator.scheduler.requests[request_id] for request_id in unfinished]
    longest = max(request.num_prompt_tokens for request in waiting)
    return (
        f"vLLM scheduled nothing while {len(unfinished)} sequences are unfinished. The longest "
        f"has {longest} tokens, the KV cache holds {room}. Raise gpu_memory_utilization, or "
        "lower max_model_len and the length of the sequences."
    )


def _in_asked_order(states: list[torch.Tensor], layer_ids: list[int]) -> list[torch.Tensor]:
    """One tensor a layer asked for; the workers sent one for each distinct layer."""
    by_layer = dict(zip(dict.fromkeys(layer_ids), states, strict=True))
    ordered, used = [], set()
    for layer in layer_ids:
        # A layer asked for twice gets two tensors: results own their storage.
        shared = layer in used or not by_layer[layer].untyped_storage().resizable()
        ordered.append(by_layer[layer].clone() if shared else by_layer[layer])
        used.add(layer)
    return ordered
