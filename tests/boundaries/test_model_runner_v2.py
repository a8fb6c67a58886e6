"""The runner's own batch of a step, V1 and V2.

V2 needs Triton and so a GPU; here stand-ins play it, and tools/gpu_values.py runs the real one.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from sources import sources
from steps import FakeDecoder, RunnerV1, RunnerV2, step

from cell import assert_right, engine, is_0_3, patched
from speculators_vllm_compat.capture.observer import Observer
from speculators_vllm_compat.patches.model_runner_v2 import BatchV1, BatchV2, batch_of
from speculators_vllm_compat.patching import CUSTOM_WORKER, Verdict
from tiny_models import prompt

_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_BATCH = "vllm/v1/worker/gpu/input_batch.py"
_V2 = {
    _RUNNER: (
        "class GPUModelRunner:\n    def prepare_inputs(self, scheduler_output): ...\n"
        "    def execute_model(self, scheduler_output): ...\n"
    ),
    _BATCH: "class InputBatch:\n    req_ids: list[str]\n    input_ids: object\n",
}


def test_probe(finding_of):
    assert finding_of("model_runner_v2").verdict is Verdict.NEEDED  # both releases have V2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Verdict.NOT_NEEDED),  # up to 0.11
        (_V2, Verdict.NEEDED),
        ({**_V2, _RUNNER: "class GPUModelRunner: ...\n"}, Verdict.UNKNOWN_FORM),
        ({**_V2, _BATCH: "class InputBatch:\n    ids: list[str]\n"}, Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, files, expected):
    finding = patch_named("model_runner_v2").probe(sources(tmp_path, files))
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert "model_runner.py" in finding.where
        assert finding.expected


def test_which_runner_is_which():
    assert isinstance(batch_of(RunnerV1(FakeDecoder())), BatchV1)
    assert isinstance(batch_of(RunnerV2(FakeDecoder())), BatchV2)
    with pytest.raises(RuntimeError, match="has neither input_batch nor prepare_inputs"):
        batch_of(SimpleNamespace())


@pytest.mark.parametrize("runner_class", [RunnerV1, RunnerV2])
def test_rows_are_given_by_the_runners_own_order(runner_class):
    """The stand-in's state of a token is a function of the token, so every row can be checked."""
    decoder = FakeDecoder()
    runner = runner_class(decoder)
    observer = Observer(runner, decoder, [0, 1])
    observer.observe_layers()
    prompts = {"long": [9, 8, 7, 6, 5], "short": [3], "middle": [4, 2, 1]}
    runner.execute_model(step(new=prompts))
    results = observer.results()
    for request_id, ids in prompts.items():
        for layer, states in enumerate(results[request_id]):
            assert states[:, 0].tolist() == [token * 10.0 + layer for token in ids]


@pytest.mark.skipif(is_0_3(), reason="0.3.0 slices in the order of the input, whatever the runner")
def test_unpatched_there_is_no_input_batch():
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    worker = module.HiddenStatesWorkerExtension()
    worker.model_runner = RunnerV2(FakeDecoder())
    worker._layer_ids = frozenset([0])
    worker._reset_capture()
    worker._set_request_metadata({"a": 1})
    with pytest.raises(AttributeError, match="input_batch"):
        worker._store_captured_states([torch.zeros(1, 2)])


@pytest.mark.skipif(not is_0_3(), reason="0.4 asks the runner, or fails")
def test_unpatched_rows_go_to_the_wrong_sequences():
    """0.3.0 gives a batch's rows out in the order of the input; V2 has the shortest first."""
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    worker = module.HiddenStatesWorkerExtension()
    worker._layer_ids, worker._captured_states = frozenset([0]), None
    decoder = FakeDecoder()
    decoder.layers[0].register_forward_hook(
        lambda _layer, _args, output: worker._store_captured_states([sum(output)])
    )
    RunnerV2(decoder).execute_model(step(new={"long": [9, 8, 7], "short": [3]}))
    [states] = worker._get_captured_states()
    assert states[:3, 0].tolist() == [30.0, 90.0, 80.0]  # "long" should be 90, 80, 70


@pytest.mark.engine
def test_patched_values_are_right_where_the_order_matters():
    prompts = [prompt(n, seed=n) for n in (90, 1, 50, 2, 30, 3)]
    with patched() as module, engine(module) as generator:
        assert_right(generator.generate(prompts), prompts)
