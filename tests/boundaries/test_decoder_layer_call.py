"""Decoder layer call signature: layers are observed, whatever they take and return."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from sources import WORKER, sources
from steps import FakeDecoder, RunnerV1, RunnerV2, step

from cell import assert_right, engine, patched
from speculators_vllm_compat.capture.observer import Observer
from speculators_vllm_compat.capture.replaced import DecoderView, LayerCall, llama_4_scaling
from speculators_vllm_compat.capture.residual import residual_stream
from speculators_vllm_compat.capture.steps import SequenceStates, Span, spans
from speculators_vllm_compat.errors import ConfigurationError, UnknownFormError
from speculators_vllm_compat.patching import CUSTOM_WORKER, Verdict
from tiny_models import prompt

_METHODS = {
    "_setup_hidden_states_capture": "layer_ids",
    "_store_captured_states": "aux_hidden_states",
    "_reset_capture": "",
    "_get_captured_states": "",
}


def _worker_source(methods: dict[str, str], forward: str = "_patched_forward") -> str:
    lines = [f"    def {name}(self, {arguments}): ...\n" for name, arguments in methods.items()]
    return f"def {forward}(self): ...\nclass HiddenStatesWorkerExtension:\n{''.join(lines)}"


def test_probe(finding_of):
    finding = finding_of("decoder_layer_call")
    assert finding.verdict is Verdict.NEEDED
    assert "custom_worker.py:" in finding.where


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_worker_source(_METHODS), Verdict.NEEDED),
        (_worker_source({**_METHODS, "_reset_capture": "batch"}), Verdict.UNKNOWN_FORM),
        (_worker_source({**_METHODS, "_store_captured_states": "aux"}), Verdict.UNKNOWN_FORM),
        (_worker_source(dict(list(_METHODS.items())[:3])), Verdict.UNKNOWN_FORM),
        (_worker_source(_METHODS, "_forward"), Verdict.UNKNOWN_FORM),
        (None, Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, text, expected):
    read = sources(tmp_path, {} if text is None else {WORKER: text})
    finding = patch_named("decoder_layer_call").probe(read)
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert "custom_worker.py" in finding.where
        assert finding.expected


# What layers return.

HIDDEN, RESIDUAL = torch.arange(8.0).reshape(4, 2), torch.full((4, 2), 100.0)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((HIDDEN, RESIDUAL), HIDDEN + RESIDUAL),
        ([HIDDEN, RESIDUAL], HIDDEN + RESIDUAL),
        (HIDDEN, HIDDEN),
        ((HIDDEN, None), HIDDEN),
        ((HIDDEN,), HIDDEN),
    ],
)
@pytest.mark.parametrize("rows", [3, 4])
def test_forms_of_a_return(output, expected, rows):
    found = residual_stream(output, rows)
    assert found.equal(expected[:rows])
    before = found.clone()
    parts = output if isinstance(output, tuple | list) else [output]
    for part in parts:
        if part is not None:
            part.add_(1)  # as a later layer's fused norm does
    assert found.equal(before)
    for part in parts:
        if part is not None:
            part.sub_(1)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            (HIDDEN, RESIDUAL, HIDDEN),
            r"returned \[torch.Size\(\[4, 2\]\), .*expected a tensor",
        ),
        ((HIDDEN, RESIDUAL[:2]), "expected a tensor"),
        ((HIDDEN, "state"), "expected a tensor"),
        ({"hidden": HIDDEN}, "returned dict"),
        ((), r"returned \[\]"),
        (HIDDEN[:2], r"shape \(2, 2\); expected .* at least the 3 tokens scheduled"),
        (HIDDEN[None], r"shape \(1, 4, 2\)"),
    ],
)
def test_forms_that_are_not_known(output, message):
    with pytest.raises(ValueError, match=message):
        residual_stream(output, 3)


# Which rows belong to whom.


@pytest.fixture(params=[RunnerV1, RunnerV2])
def observed(request):
    """A runner under observation; its states of a token are ten times the token."""
    decoder = FakeDecoder()
    runner = request.param(decoder, padding=request.param is RunnerV1)
    observer = Observer(runner, decoder, [1, 0])
    observer.observe_layers()
    return runner, observer


def _tokens(results, request_id) -> list[float]:
    return [(value - 1) / 10 for value in results[request_id][0][:, 0].tolist()]  # of layer 1


def test_chunks_and_a_preempted_request(observed):
    runner, observer = observed
    long, short = [5, 6, 7, 8, 9], [3, 4]
    runner.execute_model(step(new={"long": long, "short": short}, counts={"long": 3}))
    runner.execute_model(step(cached={"long": 3}, counts={"long": 1}))
    # Preempted: it starts over, next to a new one.
    runner.execute_model(step(new={"new": [1]}, cached={"long": 0}, counts={"long": 4}))
    runner.execute_model(step(cached={"long": 4}, counts={"long": 1}))
    results = observer.results()
    assert (_tokens(results, "long"), _tokens(results, "short")) == (long, short)
    assert _tokens(results, "new") == [1]
    assert observer.results() is None  # handed over once


def test_warm_up_and_empty_steps_are_ignored(observed):
    runner, observer = observed
    runner.decoder(torch.zeros(4))
    runner.execute_model(step(), dummy_run=True)
    runner.execute_model(step())
    assert observer.results() is None


def test_an_unfinished_prompt_is_found_out(observed):
    runner, observer = observed
    runner.execute_model(step(new={"long": [1, 2, 3]}, counts={"long": 2}))
    with pytest.raises(RuntimeError, match="states of long: 1 of 3 tokens were never computed"):
        observer.results()


def test_wrong_tokens_are_found_out_with_the_step(observed):
    runner, observer = observed
    runner.execute_model(step(new={"a": [1, 2]}))
    runner.execute_model(step(cached={"a": 1}, counts={"a": 1}, new={"b": [7]}))
    runner.prompts["b"] = [8]
    runner.execute_model(step(cached={"b": 0}, counts={"b": 1}))
    with pytest.raises(RuntimeError, match=r"step 3, its rows: rows 0 to 0 were computed from"):
        observer.results()
    observer.reset()
    runner.execute_model(step(new={"c": [4]}))
    assert _tokens(observer.results(), "c") == [4]


def test_a_layer_that_does_not_run_or_runs_twice(observed):
    runner, observer = observed
    layers = runner.decoder.layers
    runner.decoder.forward = lambda ids: layers[0](ids)
    runner.execute_model(step(new={"a": [1]}))
    with pytest.raises(RuntimeError, match=r"step 1, its rows: layers \[1\] did not run"):
        observer.results()
    observer.reset()
    runner.decoder.forward = lambda ids: (layers[0](ids), layers[0](ids), layers[1](ids))
    runner.execute_model(step(new={"a": [1]}))
    with pytest.raises(RuntimeError, match="step 1, layer 0: layer 0 ran twice"):
        observer.results()


def test_a_failure_of_the_step_itself_passes_through(observed):
    runner, observer = observed
    own = runner.decoder.forward

    def fail(ids):
        own(ids)
        raise LookupError("the model's")

    runner.decoder.forward = fail
    with pytest.raises(LookupError, match="the model's"):
        runner.execute_model(step(new={"a": [1]}))
    assert observer.results() is None


def test_spans():
    scheduled = step(new={"a": [1, 2], "b": [3]}, cached={"c": 4}, counts={"c": 2})
    assert spans(scheduled, ["gone", "c", "a", "b"]) == [
        Span("c", 0, 4, 2),
        Span("a", 2, 0, 2),
        Span("b", 4, 0, 1),
    ]
    with pytest.raises(ValueError, match="expected each of the scheduled"):
        spans(scheduled, ["a", "b"])
    scheduled.total_num_scheduled_tokens = 6
    with pytest.raises(ValueError, match="add up to 5 tokens; expected the 6"):
        spans(scheduled, ["a", "b", "c"])


def test_states_own_their_storage_and_keep_their_dtype():
    states = SequenceStates([7, 8], 1)
    rows = torch.ones(3, 2, dtype=torch.bfloat16)
    states.put(Span("a", 1, 0, 2), torch.tensor([0, 7, 8]), [rows])
    [found] = states.complete()
    assert (found.dtype, found.untyped_storage().nbytes()) == (torch.bfloat16, 8)


# How layers are called, where speculators' own forward is kept.


class DeepseekLayer(torch.nn.Module):
    """Called by position in vLLM: positions, hidden_states, residual, llama_4_scaling."""

    def forward(self, positions, hidden_states, residual, llama_4_scaling=None):
        scale = 1.0 if llama_4_scaling is None else llama_4_scaling.flatten()[:, None]
        return hidden_states * scale, hidden_states if residual is None else residual


class PlainLayer(torch.nn.Module):
    def forward(self, position_ids, hidden_states):
        return hidden_states + position_ids[:, None]


class NoneLayer(torch.nn.Module):
    def forward(self, hidden_states, positions, residual):
        return hidden_states, None


class KeywordLayer(torch.nn.Module):
    def forward(self, x, **kwargs):
        return x, kwargs["residual"] if kwargs["residual"] is not None else x * 0


class GreedyLayer(torch.nn.Module):
    def forward(self, hidden_states, positions, residual, kv_states): ...


class TripleLayer(torch.nn.Module):
    def forward(self, hidden_states, positions, residual):
        return hidden_states, residual, positions


POSITIONS = torch.tensor([0, 3, 4, 9])


@pytest.mark.parametrize(
    ("layer", "total"),
    [
        (DeepseekLayer(), HIDDEN * 2),
        (PlainLayer(), HIDDEN + POSITIONS[:, None]),
        (NoneLayer(), HIDDEN),
        (KeywordLayer(), HIDDEN),
    ],
)
def test_layers_are_called_by_their_real_signature(layer, total):
    hidden, residual = LayerCall(layer, None)(
        hidden_states=HIDDEN, positions=POSITIONS, residual=None
    )
    assert (hidden + residual).equal(total)


def test_layers_that_cannot_be_called():
    with pytest.raises(UnknownFormError, match=r"GreedyLayer.forward.* needs \['kv_states'\]"):
        LayerCall(GreedyLayer(), None)
    with pytest.raises(UnknownFormError, match="TripleLayer returned tuple; expected a tensor"):
        LayerCall(TripleLayer(), None)(HIDDEN, POSITIONS, RESIDUAL)


def test_llama_4_scaling_is_that_of_vllm():
    from vllm.model_executor.models.deepseek_v2 import _get_llama_4_scaling

    config = SimpleNamespace(llama_4_scaling={"original_max_position_embeddings": 16, "beta": 0.1})
    positions = torch.tensor([0, 1, 15, 16, 17, 31, 32, 700])
    found = llama_4_scaling(config, positions)
    wanted = _get_llama_4_scaling(16, 0.1, positions)
    assert found.shape == wanted.shape
    # log1p(x) against log(1 + x): the last bit of float32.
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert found.flatten()[2] == 1.0
    assert found.flatten()[3] > 1.0
    assert llama_4_scaling(SimpleNamespace(), positions) is None
    hidden, _ = LayerCall(DeepseekLayer(), config)(torch.ones(8, 2), positions, None)
    assert hidden[:, 0].equal(found.flatten())


def test_view_of_the_decoder():
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList([PlainLayer(), GreedyLayer()])
    decoder.start_layer, decoder.end_layer = 0, 1  # the second belongs to another rank
    decoder.embed_tokens = torch.nn.Embedding(4, 2)
    decoder.norm = lambda hidden, residual=None: (
        hidden * 2 if residual is None else (hidden * 2, residual)
    )
    view = DecoderView(decoder)
    assert view.embed_input_ids is decoder.embed_tokens
    assert isinstance(view.layers[0], LayerCall)
    assert view.layers[1] is decoder.layers[1]
    assert view.norm(HIDDEN, 0)[0].equal(HIDDEN * 2)
    assert view.norm(HIDDEN, RESIDUAL)[1] is RESIDUAL
    assert view.end_layer == 1


def test_a_mode_that_is_none(monkeypatch):
    monkeypatch.setenv("SPECULATORS_VLLM_COMPAT_FORWARD", "both")
    from speculators_vllm_compat.switches import forward_mode

    with pytest.raises(ConfigurationError, match="is 'both'; expected one of observed, replaced"):
        forward_mode()


# Unpatched and patched.


def test_unpatched_forward_fails_on_other_layers(monkeypatch):
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    first = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0)
    monkeypatch.setattr(module, "get_pp_group", lambda: first)
    monkeypatch.setattr(module, "get_tp_group", lambda: first)
    stored = []
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList([PlainLayer(), PlainLayer()])
    decoder.start_layer, decoder.end_layer = 0, 2
    decoder.embed_input_ids = decoder.get_input_embeddings = torch.nn.Embedding(4, 2)
    decoder.norm = lambda hidden, residual=None: hidden
    decoder._extension = SimpleNamespace(
        _layer_ids=frozenset([1]), _store_captured_states=stored.append
    )
    arguments = (decoder, torch.tensor([1, 2]), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        module._patched_forward(*arguments)
    with patched():
        module._patched_forward(*arguments)
    expected = decoder.embed_input_ids(torch.tensor([1, 2])) + torch.tensor([[0.0], [2.0]])
    assert stored[0][0].equal(expected)


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["observed", "replaced"])
@pytest.mark.parametrize("model_name", ["llama", "deepseek_v2"])
def test_patched_values_are_right(monkeypatch, mode, model_name):
    monkeypatch.setenv("SPECULATORS_VLLM_COMPAT_FORWARD", mode)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    prompts = [prompt(n, seed=n) for n in (100, 1, 30)]
    with patched() as module, engine(module, model_name) as generator:
        for _ in range(2):
            assert_right(generator.generate(prompts), prompts, model_name)


def test_revert_restores_the_identical_objects():
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    owner = module.HiddenStatesWorkerExtension
    before = {**vars(owner)}, module._patched_forward
    with patched():
        changed = [name for name in _METHODS if vars(owner)[name] is not before[0][name]]
        assert changed == list(_METHODS)
        assert module._patched_forward is not before[1]
    assert all(vars(owner)[name] is before[0][name] for name in _METHODS)
    assert module._patched_forward is before[1]
