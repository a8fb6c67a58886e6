"""SchedulerConfig's is_encoder_decoder."""

from __future__ import annotations

import pytest

from cell import assert_right, engine, is_0_3, patched, skipping, unpatched
from speculators_vllm_compat.patching import Verdict
from tiny_models import prompt

_ARGUMENTS = {"max_num_seqs": 32, "max_model_len": 1024, "max_num_batched_tokens": 8192}


def test_probe(finding_of):
    expected = Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED
    assert finding_of("scheduler_config").verdict is expected


def test_unpatched_fails():
    with unpatched() as module, pytest.raises(Exception, match="is_encoder_decoder"):
        module.SchedulerConfig(**_ARGUMENTS)


@pytest.mark.engine
@pytest.mark.skipif(not is_0_3(), reason="0.4 passes is_encoder_decoder itself")
def test_generator_fails_without_it():
    with (
        skipping("scheduler_config") as module,
        pytest.raises(Exception, match="is_encoder_decoder"),
        engine(module),
    ):
        pass


@pytest.mark.skipif(not is_0_3(), reason="not needed for 0.4")
def test_argument_is_filled_in_and_kept():
    with patched() as module:
        assert module.SchedulerConfig(**_ARGUMENTS).max_num_seqs == 32
        explicit = module.SchedulerConfig(**_ARGUMENTS, is_encoder_decoder=True)
        assert not explicit.enable_chunked_prefill  # what vLLM sets for encoder-decoder models


@pytest.mark.engine
def test_patched_values_are_right():
    prompts = [prompt(n, seed=n) for n in (17, 5)]
    with patched() as module, engine(module) as generator:
        assert_right(generator.generate(prompts), prompts)


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before = module.SchedulerConfig
    with patched() as module:
        assert (module.SchedulerConfig is before) is not is_0_3()
    assert module.SchedulerConfig is before
