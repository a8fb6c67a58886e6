"""Decoder layer call signature: the model's own forward runs, and its layers are observed."""

from __future__ import annotations

import types
from typing import Any

from .. import __version__
from ..patching import CUSTOM_WORKER, Finding, Ledger, Patch, Sources
from ..probing import absent, at, needed, unfit, unknown
from ..switches import Forward, forward_mode

_CLASS = "HiddenStatesWorkerExtension"
_METHODS = {
    "_setup_hidden_states_capture": ("layer_ids",),
    "_store_captured_states": ("aux_hidden_states",),
    "_reset_capture": (),
    "_get_captured_states": (),
}

# What a patched worker answers when capture is set up, for the driver to check.
GREETING = f"speculators-vllm-compat {__version__}"


def probe(sources: Sources) -> Finding:
    worker = sources.custom_worker
    if worker is None:
        return absent(sources.speculators, "data_generation.custom_worker", _CLASS)
    for name, arguments in _METHODS.items():
        signature = worker.function(f"{_CLASS}.{name}")
        if signature is None:
            return absent(sources.speculators, "data_generation.custom_worker", f"{_CLASS}.{name}")
        if problem := unfit(signature, arguments):
            return unknown(problem, at(worker, signature.line), f"{name}{arguments}")
    forward = worker.function("_patched_forward")
    if forward is None:
        name = "_patched_forward"
        return absent(sources.speculators, "data_generation.custom_worker", name)
    return needed("speculators replaces the model's forward", at(worker, forward.line))


def set_up_capture(worker: Any, module: types.ModuleType, layer_ids: list[int]) -> str:
    """Start observing the layers of a worker's model.

    Args:
        worker: The vLLM worker.
        module: speculators' custom_worker module.
        layer_ids: Layers whose output to capture; repeated ones are captured once.

    Returns:
        GREETING, by which the driver knows that the worker is patched.

    Raises:
        RuntimeError: The model has no decoder layers that can be found, or too few.
    """
    from vllm.distributed import get_tp_group

    from ..capture.observer import Observer
    from ..capture.stepping import Stepper
    from .language_model import find_decoder

    distinct = tuple(dict.fromkeys(layer_ids))
    decoder = find_decoder(worker.model_runner.model)
    layers = len(decoder.layers)
    if outside := [i for i in distinct if not 0 <= i < layers]:
        raise RuntimeError(
            f"layer_ids {outside} are not in {type(decoder).__name__}; expected 0 to {layers - 1}"
        )
    worker._layer_ids = distinct
    worker._hidden_states_observer = None
    replaced = forward_mode() is Forward.REPLACED
    if get_tp_group().rank_in_group == 0:  # every rank holds the same states
        worker._hidden_states_observer = Observer(worker.model_runner, decoder, distinct)
        if not replaced:
            worker._hidden_states_observer.observe_layers()
    if replaced:
        decoder._extension = worker
        decoder.forward = types.MethodType(module._patched_forward, decoder)
    worker._hidden_states_stepper = Stepper(worker, decoder, worker._hidden_states_observer)
    return GREETING


def open_ring(worker: Any, path: str, plan: Any) -> str:
    """Open the memory shared with the driver, on the rank that captures.

    Returns:
        "" when it is open, or why it is not.
    """
    from ..capture.ring import RingEnd

    observer = worker._hidden_states_observer
    if observer is not None:
        device = next(worker.model_runner.model.parameters()).device
        try:
            observer.transfer.ring = RingEnd(path, plan, device)
        except OSError as error:
            return str(error)
    return ""


def run_step(worker: Any, step: int, slot: int | None, scheduler_output: Any) -> Any:
    """Launch one scheduled step; see ``Stepper.run``."""
    return worker._hidden_states_stepper.run(step, slot, scheduler_output)


def finish_steps(worker: Any) -> Any:
    """Wait for every step launched."""
    return worker._hidden_states_stepper.finish()


def reset_capture(worker: Any, call: Any = None) -> Any:
    """Forget what was captured.

    Returns:
        Its argument: an answer that the driver recognises as the answer to this very question.

    Raises:
        RuntimeError: Capture was never set up.
    """
    if not hasattr(worker, "_layer_ids"):
        raise RuntimeError(
            "_setup_hidden_states_capture was not called; expected it before any capture"
        )
    if worker._hidden_states_observer is not None:
        worker._hidden_states_observer.reset()
    return call


def captured_states(worker: Any) -> dict[str, list[Any]] | None:
    """The states by request id, on the rank that captures; None on others."""
    observer = worker._hidden_states_observer
    return None if observer is None else observer.results()


def store_states(worker: Any, aux_hidden_states: list[Any]) -> None:
    """Take what the replaced forward collected, one tensor a layer in the order of the model."""
    observer = worker._hidden_states_observer
    if observer is not None:
        for layer_id, states in zip(sorted(observer.layer_ids), aux_hidden_states, strict=True):
            observer.store(layer_id, states)


def apply(module: types.ModuleType, ledger: Ledger) -> None:
    owner = getattr(module, _CLASS)

    def replace(name: str, function: Any) -> None:
        ledger.wrap(
            owner, name, lambda _wrapped, self, args, kwargs: function(self, *args, **kwargs)
        )

    def forward(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        from ..capture.replaced import DecoderView

        decoder, *rest = args
        return wrapped(DecoderView(decoder), *rest, **kwargs)

    replace(
        "_setup_hidden_states_capture",
        lambda self, layer_ids: set_up_capture(self, module, layer_ids),
    )
    replace("_store_captured_states", store_states)
    replace("_reset_capture", reset_capture)
    replace("_get_captured_states", captured_states)
    ledger.add(owner, "_open_capture_ring", open_ring)
    ledger.add(owner, "_run_capture_step", run_step)
    ledger.add(owner, "_finish_capture_steps", finish_steps)
    ledger.wrap(module, "_patched_forward", forward)


PATCH = Patch(
    id="decoder_layer_call",
    summary="Runs the model's own forward and observes its decoder layers.",
    why="speculators replaces the forward and calls every layer with three keywords: DeepSeek-V2 "
    "class layers lose llama_4_scaling, Gemma its normaliser, other layers raise.",
    upstream="vllm/model_executor/models/deepseek_v2.py, 0.12.0; the models' forwards",
    process="worker",
    probe=probe,
    target=CUSTOM_WORKER,
    apply=apply,
    removable="never, as long as those releases are supported",
)
