"""Workers are patched however they start, and a driver whose workers would not be says so."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from cell import assert_right, engine, patched
from speculators_vllm_compat.errors import WorkerError
from tiny_models import prompt

pytestmark = pytest.mark.engine

torch.set_num_threads(1)  # a thread pool from before a fork leaves the child's OpenMP waiting

PROMPTS = [prompt(length, seed=length) for length in (40, 3, 17)]


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_patched_however_started(start_method):
    with patched() as module, engine(module, start_method=start_method) as generator:
        assert_right(generator.generate(PROMPTS), PROMPTS)


def test_two_generators_in_one_process():
    with (
        patched() as module,
        engine(module) as first,
        engine(module, layer_ids=[2]) as second,
    ):
        for _ in range(2):
            assert_right(first.generate(PROMPTS), PROMPTS)
            assert_right(second.generate(PROMPTS[::-1]), PROMPTS[::-1], layers=[2])


def test_filtered_plugin_is_told_before_a_worker_starts(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    before = set(multiprocessing.active_children())
    with (
        patched() as module,
        pytest.raises(
            WorkerError, match="VLLM_PLUGINS is 'lora_filesystem_resolver', which leaves"
        ),
        engine(module, start_method="spawn"),
    ):
        pass
    assert set(multiprocessing.active_children()) == before


def test_spawned_worker_without_the_plugin_is_found_out(monkeypatch):
    """If the early check were wrong, the answer to the set-up of capture would still tell."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    with patched() as module:
        from speculators_vllm_compat.patches import worker_plugin

        monkeypatch.setattr(worker_plugin, "refuse_unpatched_workers", lambda: None)
        import transformers

        # Without the patches, spawned workers fail at their own import on transformers 5.
        error, message = (
            (Exception, "")
            if transformers.__version__.startswith("5")
            else (WorkerError, "they run without the patches")
        )
        with pytest.raises(error, match=message), engine(module, start_method="spawn"):
            pass
