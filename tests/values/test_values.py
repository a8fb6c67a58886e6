"""Hidden states of four layers equal transformers', for every kind of call and every form."""

from __future__ import annotations

import os

import pytest
import torch

import tiny_models
from cell import assert_right, engine, is_0_3, patched, splits_by_default
from tiny_models import prompt

pytestmark = pytest.mark.engine

MIXED = [700, 1, 200, 15, 17, 16]  # the shortest is not first


def _prompts(lengths: list[int], seed: int) -> list[list[int]]:
    return [prompt(length, seed=seed + index) for index, length in enumerate(lengths)]


# All of them, or those of a run that is about the pair more than about the models.
MODELS = os.environ.get("VALUES_MODELS", ",".join(tiny_models.CONFIGS)).split(",")


@pytest.fixture(scope="module", params=MODELS)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def generator(model_name):
    with patched() as module, engine(module, model_name) as made:
        yield made


@pytest.fixture(scope="module")
def splitting(model_name):
    """A generator whose token budget splits prompts over steps."""
    if not (is_0_3() or splits_by_default()):
        pytest.skip("this vLLM splits no prompts unless asked, and speculators does not ask")
    with (
        patched() as module,
        engine(module, model_name, max_model_len=768, max_num_batched_tokens=96) as made,
    ):
        yield made


def _check(evidence, model_name, case, results, prompts, layers=None) -> None:
    worst = assert_right(results, prompts, model_name, layers)
    evidence.add(model_name, case, len(prompts), worst)


def test_mixed_lengths(evidence, model_name, generator):
    prompts = _prompts(MIXED, 0)
    results = generator.generate(prompts)
    _check(evidence, model_name, "mixed lengths", results, prompts)
    for result in results:
        assert result["input_ids"].dtype is torch.long
        assert result["loss_mask"] is None
        for states in result["hidden_states"]:
            assert states.device.type == "cpu"
            assert states.dtype is torch.float32
            assert states.untyped_storage().nbytes() == states.nbytes  # it owns its storage


@pytest.mark.parametrize("count", [12, 40])
def test_many_sequences(evidence, model_name, generator, count):
    prompts = _prompts([3 + (7 * index) % 40 for index in range(count)], 100)
    _check(evidence, model_name, f"{count} sequences", generator.generate(prompts), prompts)


def test_budget_splits_prompts(evidence, model_name, splitting):
    prompts = _prompts([700, 1, 300, 15, 95, 96, 97, 200], 200)
    _check(evidence, model_name, "budget splits prompts", splitting.generate(prompts), prompts)


def test_same_prompt_twice(evidence, model_name, generator):
    prompts = [prompt(200, seed=300)] * 2
    _check(evidence, model_name, "same prompt twice", generator.generate(prompts), prompts)
    again = generator.generate(prompts)
    _check(evidence, model_name, "same prompt again", again, prompts)


def test_shared_prefixes_over_two_calls(evidence, model_name, generator):
    prefix = prompt(130, seed=400)
    for call in range(2):
        prompts = [prefix + tail for tail in _prompts([1, 40, 300], 410 + 10 * call)]
        case = f"shared prefixes, call {call + 1}"
        _check(evidence, model_name, case, generator.generate(prompts), prompts)


def test_tensor_as_input(evidence, model_name, generator):
    prompts = _prompts([33, 33, 33], 500)
    results = generator.generate(torch.tensor(prompts))
    _check(evidence, model_name, "2-D tensor", results, prompts)
    results = generator.generate([torch.tensor(ids) for ids in prompts])
    _check(evidence, model_name, "list of tensors", results, prompts)


def test_unsorted_and_repeated_layers(evidence):
    layers = [4, 0, 5, 0]
    prompts = _prompts([20, 50], 600)
    with patched() as module, engine(module, "llama", layers, start_method="spawn") as made:
        results = made.generate(prompts)
    _check(evidence, "llama", "layers 4, 0, 5, 0, spawned worker", results, prompts, layers)
    for result in results:
        first, second = result["hidden_states"][1], result["hidden_states"][3]
        assert first.data_ptr() != second.data_ptr()


def test_values_tell_layers_apart(model_name, generator):
    """The comparison can fail: neighbouring layers differ by far more than the tolerance."""
    [result] = generator.generate([prompt(20, seed=700)])
    for first, second in zip(result["hidden_states"], result["hidden_states"][1:], strict=False):
        assert (first - second).abs().max() > 0.1


def test_two_ranks_give_the_values_of_one(evidence, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    prompts = _prompts([*MIXED, 40], 800)
    with patched() as module, engine(module, "llama", tensor_parallel_size=2) as made:
        results = made.generate(prompts)
    _check(evidence, "llama", "tensor_parallel_size=2", results, prompts)


@pytest.mark.parametrize("form", ["deepseek_v2", "deepseek_v3"])
def test_real_mla(evidence, monkeypatch, form):
    """Multi-head latent attention as such, where the build has float32 kernels for it."""
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    if "CPU_MLA" not in registry.AttentionBackendEnum.__members__:
        pytest.skip("this CPU build has no MLA kernels for float32 (CPU_MLA, from 0.28)")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")

    def choose_backend(config):
        config.attention_config.backend = registry.AttentionBackendEnum.CPU_MLA

    prompts = _prompts([40, 3, 150], 900)
    with patched() as module, engine(module, form, configure=choose_backend) as made:
        results = made.generate(prompts)
    _check(evidence, form, "real MLA", results, prompts)
