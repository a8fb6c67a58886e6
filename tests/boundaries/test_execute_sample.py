"""A step in two calls: execute_model, then sample_tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sources import EXECUTOR, GENERATOR, sources

from cell import assert_right, engine, is_0_3, patched
from speculators_vllm_compat.patches.execute_sample import end_step
from speculators_vllm_compat.patches.model_runner_v2 import batch_of
from speculators_vllm_compat.patching import GENERATOR_CLASS, Verdict
from tiny_models import prompt

_ONE_CALL = "class MultiprocExecutor:\n    def execute_model(self, scheduler_output): ...\n"
_TWO_CALLS = _ONE_CALL + "    def sample_tokens(self, grammar_output, non_block=False): ...\n"


class Worker:
    """Plays a worker whose step is a call of its own, or two."""

    def __init__(self, drops: bool) -> None:
        self.drops = drops
        self.asked: list[object] = []

    def drop_logits(self) -> bool:
        return self.drops

    def sample_tokens(self, grammar_output):
        self.asked.append(grammar_output)


def test_probe(finding_of):
    expected = Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED
    assert finding_of("execute_sample").verdict is expected


@pytest.mark.parametrize(
    ("executor", "generator", "expected"),
    [
        (_ONE_CALL, "", Verdict.NOT_NEEDED),
        (_ONE_CALL, "self.executor.sample_tokens(output)", Verdict.NEEDED),
        (_TWO_CALLS, "", Verdict.NEEDED),
        (_TWO_CALLS, "self.executor.sample_tokens(output)", Verdict.NOT_NEEDED),
        (_ONE_CALL.replace("scheduler_output", "batch"), "", Verdict.UNKNOWN_FORM),
        (_TWO_CALLS.replace("grammar_output", "grammar"), "", Verdict.UNKNOWN_FORM),
        ("class Executor: ...", "", Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, executor, generator, expected):
    finding = patch_named("execute_sample").probe(
        sources(tmp_path, {EXECUTOR: executor, GENERATOR: generator})
    )
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert "multiproc_executor.py" in finding.where
        assert finding.expected


@pytest.mark.parametrize(
    ("output", "drops", "asked"),
    [("output", False, []), (None, False, [None]), (None, True, [])],
    ids=["execute samples", "sampling ends the step", "logits can be dropped"],
)
def test_end_of_a_step(output, drops, asked):
    worker = Worker(drops)
    end_step(worker, worker, output)
    assert worker.asked == asked


def test_v1_drops_its_logits_and_v2_does_not():
    runner = SimpleNamespace(input_batch=None, input_ids=None, execute_model_state="logits")
    batch = batch_of(runner)
    assert batch.drop_logits()
    assert runner.execute_model_state is None
    assert not batch.drop_logits()  # nothing is held: this step was none of that kind
    assert not batch_of(SimpleNamespace(prepare_inputs=print)).drop_logits()


@pytest.mark.engine
@pytest.mark.skipif(not is_0_3(), reason="0.4 samples by itself")
def test_without_sampling_the_second_step_fails():
    """speculators' own loop, on a generator whose constructor ran with the patches."""
    with patched() as module, engine(module) as generator:
        own_loop = vars(getattr(module, GENERATOR_CLASS))["generate"].__wrapped__
        with pytest.raises(Exception, match=r"sample_tokens\(\) must be called"):
            own_loop(generator, [prompt(5, seed=index) for index in range(40)])  # two steps


@pytest.mark.engine
def test_patched_values_are_right_over_many_steps():
    prompts = [prompt(n, seed=n) for n in (300, 280, 260, 240)]
    with (
        patched() as module,
        engine(module, max_model_len=512, max_num_batched_tokens=64) as generator,
    ):
        for _ in range(2):
            assert_right(generator.generate(prompts), prompts)
