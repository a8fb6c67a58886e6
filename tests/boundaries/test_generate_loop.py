"""The one loop behind generate()."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from sources import GENERATOR, sources

from cell import LAYERS, assert_right, difference, engine, is_0_3, patched, unpatched
from speculators_vllm_compat.errors import WorkerError
from speculators_vllm_compat.patching import GENERATOR_CLASS, Verdict
from tiny_models import prompt

_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_GENERATE = f"class {GENERATOR_CLASS}:\n    def generate(self, token_ids): ...\n"
_FORMS = (
    "class Scheduler:\n    def schedule(self): ...\n"
    "    def add_request(self, request): ...\n"
    "    def finish_requests(self, request_ids, finished_status): ...\n"
)


def _own_loop(module):
    """speculators' own generate(), for a generator whose constructor ran with the patches."""
    return vars(getattr(module, GENERATOR_CLASS))["generate"].__wrapped__


@pytest.fixture(scope="module")
def generator():
    with contextlib.ExitStack() as stack:
        with patched() as module:  # each test switches the patches on for itself
            made = stack.enter_context(engine(module))
        yield made


def test_probe(finding_of):
    finding = finding_of("generate_loop")
    assert finding.verdict is Verdict.NEEDED
    assert "vllm_hidden_states_generator.py:" in finding.where


@pytest.mark.parametrize(
    ("generate", "scheduler", "expected"),
    [
        (_GENERATE, _FORMS, Verdict.NEEDED),
        (_GENERATE, _FORMS.replace("(self):", "(self, throttle_prefills=False):"), Verdict.NEEDED),
        (_GENERATE.replace("token_ids", "prompts"), _FORMS, Verdict.UNKNOWN_FORM),
        ("class Other: ...\n", _FORMS, Verdict.UNKNOWN_FORM),
        (_GENERATE, _FORMS.replace("schedule(self)", "schedule(self, x)"), Verdict.UNKNOWN_FORM),
        (_GENERATE, _FORMS.replace("finished_status", "status"), Verdict.UNKNOWN_FORM),
        (_GENERATE, "class Scheduler: ...\n", Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, generate, scheduler, expected):
    read = sources(tmp_path, {GENERATOR: generate, _SCHEDULER: scheduler})
    finding = patch_named("generate_loop").probe(read)
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert ".py" in finding.where
        assert finding.expected


@pytest.mark.engine
@pytest.mark.skipif(is_0_3(), reason="0.3.0 fails at the reply's form before it returns anything")
def test_own_loop_returns_another_order(generator):
    prompts = [prompt(5 + index, seed=index) for index in range(12)]
    with patched() as module:
        # Its request of metadata and its reading of replies still fit the patched workers.
        own = _own_loop(module)(generator, prompts)
        found = [result["input_ids"].tolist() for result in own]
        assert found == [prompts[index] for index in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)]
        assert_right(generator.generate(prompts), prompts)


@pytest.mark.engine
@pytest.mark.skipif(is_0_3(), reason="0.3.0 fails at the reply's form before it returns anything")
def test_own_loop_takes_no_more_than_32(generator):
    prompts = [prompt(5, seed=index) for index in range(40)]
    with patched() as module:
        with pytest.raises(RuntimeError, match="not found in captured states"):
            _own_loop(module)(generator, prompts)
        left_behind = list(generator.scheduler.requests)
        generator.scheduler.finish_requests(left_behind, _aborted())
        assert_right(generator.generate(prompts), prompts)


def _aborted():
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


@pytest.mark.engine
@pytest.mark.parametrize("layer_ids", [[5, 0], [3, 3, 1], [2]])
def test_layers_in_the_order_asked_for(layer_ids):
    prompts = [prompt(n, seed=n) for n in (8, 20)]
    with patched() as module, engine(module, layer_ids=layer_ids) as made:
        results = made.generate(prompts)
        assert made.layer_ids == layer_ids
    assert_right(results, prompts, layers=layer_ids)
    storages = {s.untyped_storage().data_ptr() for r in results for s in r["hidden_states"]}
    assert len(storages) == 2 * len(layer_ids)


@pytest.mark.engine
def test_usable_and_right_after_a_worker_failed(generator, monkeypatch):
    prompts = [prompt(n, seed=n) for n in (40, 300, 7)]

    def install_failure(worker):
        layer = worker.model_runner.model.model.layers[2]

        def fail(*_):
            handle.remove()
            raise LookupError("injected into a layer")

        handle = layer.register_forward_hook(fail)

    for _ in range(2):
        generator.executor.collective_rpc(install_failure)
        with patched(), pytest.raises(RuntimeError, match="injected into a layer"):
            generator.generate(prompts)
        assert not generator.scheduler.requests
        with patched():
            assert_right(generator.generate(prompts), prompts)


@pytest.mark.engine
def test_usable_and_right_after_an_interrupt_before_a_step(generator, monkeypatch):
    prompts = [prompt(n, seed=n) for n in (40, 7)]

    own = generator.executor.collective_rpc

    def interrupt(method, *args, **kwargs):
        if method == "_run_capture_step":
            raise KeyboardInterrupt
        return own(method, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(generator.executor, "collective_rpc", interrupt)
        with patched(), pytest.raises(KeyboardInterrupt):
            generator.generate(prompts)
    assert not generator.scheduler.requests
    with patched():
        assert_right(generator.generate(prompts), prompts)


def test_replies_of_another_call_are_found_out(generator, monkeypatch):
    own = generator.executor.collective_rpc

    def lagging(method, *args, **kwargs):
        reply = own(method, *args, **kwargs)
        return [-1] if method == "_reset_capture" else reply

    monkeypatch.setattr(generator.executor, "collective_rpc", lagging)
    with patched(), pytest.raises(WorkerError, match=r"answered \[-1\] to the start of call"):
        generator.generate([[5, 6]])


@pytest.mark.engine
def test_states_that_are_not_the_prompts_are_found_out(generator):
    """The runner's token ids are changed under the capture: nothing is returned."""

    def corrupt(worker):
        layer = worker.model_runner.model.model.layers[0]

        def change(*_):
            handle.remove()
            worker.model_runner.input_ids.gpu[3] += 1

        handle = layer.register_forward_hook(change)

    generator.executor.collective_rpc(corrupt)
    prompts = [prompt(20, seed=3)]
    with patched(), pytest.raises(RuntimeError, match=r"step 1, its rows: rows 0 to 19 were com"):
        generator.generate(prompts)
    with patched():
        assert_right(generator.generate(prompts), prompts)


@pytest.mark.engine
def test_a_prompt_that_the_cache_cannot_hold():
    def shrink(config):
        config.cache_config.num_gpu_blocks_override = 2

    with patched() as module, engine(module, configure=shrink) as made:
        room = 2 * made.vllm_config.cache_config.block_size
        with pytest.raises(RuntimeError, match=f"has 900 tokens, the KV cache holds {room}"):
            made.generate([prompt(900, seed=1), prompt(4, seed=2)])
        assert_right(made.generate([prompt(4, seed=2)]), [prompt(4, seed=2)])


@pytest.mark.engine
def test_truncation_is_counted_and_logged(caplog):
    prompts = [prompt(n, seed=n) for n in (64, 63, 10)]
    with patched() as module, engine(module, max_model_len=64) as made:
        assert (made.truncated_sequences, made.truncated_tokens) == (0, 0)
        with caplog.at_level(logging.WARNING, "speculators_vllm_compat"):
            results = made.generate(prompts)
        assert (made.truncated_sequences, made.truncated_tokens) == (1, 1)
    assert_right(results, [ids[:63] for ids in prompts])
    assert "1 of 3 sequences were cut to 63 tokens (1 tokens lost)" in caplog.text


@pytest.mark.engine
def test_one_more_position_keeps_the_token():
    prompts = [prompt(64, seed=1)]
    with patched() as module, engine(module, max_model_len=65) as made:
        assert_right(made.generate(prompts), prompts)
        assert made.truncated_tokens == 0


@pytest.mark.engine
def test_a_replaced_request_is_used(generator, monkeypatch):
    made = []
    with patched() as module:
        own = module.Request

        def without_hasher(request_id, prompt_token_ids, sampling_params, pooling_params,
                           eos_token_id, arrival_time):  # fmt: skip
            request = own(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling_params=sampling_params,
                pooling_params=pooling_params,
                eos_token_id=eos_token_id,
                arrival_time=arrival_time,
            )
            made.append(request_id)
            return request

        prompts = [prompt(n, seed=n) for n in (20, 3)]
        monkeypatch.setattr(module, "Request", without_hasher)
        assert_right(generator.generate(prompts), prompts)
        monkeypatch.undo()
    assert len(made) == 2


@pytest.mark.engine
def test_results_do_not_share_memory_between_calls(generator):
    prompts = [prompt(30, seed=1)]
    with patched():
        [first] = generator.generate(prompts)
        kept = [states.clone() for states in first["hidden_states"]]
        generator.generate([prompt(30, seed=2)])
    assert all(a.equal(b) for a, b in zip(first["hidden_states"], kept, strict=True))
    assert difference([first], "llama", LAYERS) < 1e-4
    assert all(isinstance(states, torch.Tensor) for states in kept)


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        owner = getattr(module, GENERATOR_CLASS)
        before = dict(vars(owner))
    with patched():
        assert vars(owner)["generate"] is not before["generate"]
        assert owner.truncated_tokens == 0
    assert dict(vars(owner)) == before
    assert vars(owner)["generate"] is before["generate"]
