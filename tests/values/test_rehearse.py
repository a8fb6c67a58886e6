"""``rehearse`` for real: right models pass, wrong values and missing patches do not."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import speculators_vllm_compat.loop
from cell import patched
from speculators_vllm_compat.cli import rehearse
from speculators_vllm_compat.rehearsal import files, parameters, process, stage
from speculators_vllm_compat.rehearsal.checks import Judge, finite, form, pairs, relative, telling
from speculators_vllm_compat.rehearsal.engine import has_backend

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# An architecture vLLM runs as Llama's and transformers does not have.
WITHOUT_REFERENCE = {**LLAMA, "architectures": ["InternLM3ForCausalLM"]}


@pytest.fixture
def model(tmp_path):
    def write(config: dict) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture
def environment(tmp_path):
    """For the command: switched on, MLA not switched off, files where they can be counted."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    changed = {**os.environ, "TMPDIR": str(scratch), "SPECULATORS_VLLM_COMPAT": "on"}
    changed.pop("VLLM_MLA_DISABLE", None)
    return changed


CODE = """
import argparse, sys
from speculators_vllm_compat.cli import rehearse
parser = argparse.ArgumentParser()
rehearse.add_arguments(parser)
sys.exit(rehearse.main(parser.parse_args()))
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", CODE, *words]


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), env=environment, capture_output=True, text=True, check=False, timeout=400
    )


def left_behind(environment: dict[str, str]) -> list[str]:
    """Folders and logs of the command; vLLM's and torch's own caches are theirs."""
    return [p.name for p in Path(environment["TMPDIR"]).glob("speculators-vllm-compat*")]


pytestmark = pytest.mark.engine


def test_llama_as_vllm_starts_its_workers(environment, model):
    ended = run(environment, str(model(LLAMA)))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 worker (spawn)" in " ".join(ended.stdout.split())
    assert "values of transformers        ok" in ended.stdout
    assert "split prompts as whole        ok" in ended.stdout
    assert "FAILED" not in ended.stdout
    assert "\033" not in ended.stdout + ended.stderr
    assert "starting the engine ..." in ended.stderr
    assert not left_behind(environment)


def test_deepseek_v3(environment, model):
    if not has_backend("CPU_MLA"):
        pytest.skip("this CPU build has no MLA kernels for float32 (CPU_MLA, from 0.28)")
    ended = run(
        environment, str(model(DEEPSEEK_V3)), "--start-method", "fork", "--layer-ids", "60", "1"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = " ".join(ended.stdout.split())
    assert "float32, CPU_MLA, compared with transformers" in text
    assert "asked for 60 -> 3, 1 -> 0" in text
    assert "values of transformers ok" in text
    assert "the quantization scheme fp8: left out" in text


def test_without_the_patches_it_fails_and_says_where(environment, model):
    environment["SPECULATORS_VLLM_COMPAT"] = "off"
    ended = run(environment, str(model(LLAMA)), "--start-method", "fork")
    assert ended.returncode == 1
    assert "patches are switched off" in ended.stdout
    assert "failed while starting the engine" in ended.stdout
    assert "the last lines of the log" in ended.stdout
    [log] = left_behind(environment)  # the log alone
    assert log.endswith(".log")


def test_interrupted_it_leaves_nothing(environment, model):
    started = subprocess.Popen(
        command(str(model(LLAMA)), "--start-method", "fork"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where this runs in the background, an interrupt may be ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert started.stderr is not None
        while "starting the engine" not in started.stderr.readline():
            pass
        deadline = time.monotonic() + 120
        while len(_descendants(started.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        processes = _descendants(started.pid)
        assert len(processes) >= 2  # the stage and a worker, or Python's resource tracker
        for _ in range(3):  # as impatient people do
            started.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, told = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == 130
    assert "interrupted; workers ended" in told
    assert not left_behind(environment)
    # One that ended stays listed where nobody collects it, as in some containers.
    assert not [pid for pid in processes if process._session(pid) is not None]


def _descendants(pid: int) -> list[int]:
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children += [int(child) for child in path.read_text().split()]
    return children + [deeper for child in children for deeper in _descendants(child)]


def rehearsed(folder: Path, tmp_path: Path, **changed) -> tuple[int, list[dict], dict]:
    """A rehearsal in this process, so that it can be tampered with: exit status and events."""
    parser = argparse.ArgumentParser()
    rehearse.add_arguments(parser)
    arguments = parser.parse_args([str(folder), "--start-method", "fork"])
    work = tmp_path / "work"
    work.mkdir()
    path = rehearse._order(arguments, folder, files.read_config(folder), work)
    order = dataclasses.replace(stage.Order(**json.loads(path.read_text())), **changed)
    seen = rehearse._Seen()
    events: list[dict] = []

    def tell(**event) -> None:
        events.append(event)
        if "check" in event:
            seen.outcomes.append(event["check"])
        seen.done = event.get("done", seen.done)

    with patched():
        stage.rehearse(order, tell)
    [plan] = [event["plan"] for event in events if "plan" in event]
    return seen.exit_status(), seen.outcomes, plan


def test_wrong_values_are_found(tmp_path, model, monkeypatch):
    """Layers handed over in the wrong order: each state is finite, and of the right shape."""
    original = speculators_vllm_compat.loop._in_asked_order
    monkeypatch.setattr(
        speculators_vllm_compat.loop,
        "_in_asked_order",
        lambda states, layer_ids: original(states, layer_ids)[::-1],
    )
    status, outcomes, _ = rehearsed(model(LLAMA), tmp_path)
    failed = [outcome["name"] for outcome in outcomes if outcome["passed"] is False]
    assert status == 1
    assert failed == ["values of transformers"]


def test_the_model_against_itself(tmp_path, model):
    status, outcomes, plan = rehearsed(model(WITHOUT_REFERENCE), tmp_path)
    assert status == 0, outcomes
    assert not plan["reference"]
    assert [outcome["name"] for outcome in outcomes] == [
        "row counts and order",
        "rows finite and not zero",
        "layers and tokens told apart",
        "twice the same",
        "permuted batch",
        "alone as in a batch",
        "split prompts as whole",
    ]


def test_a_model_that_differs_from_itself_is_found(tmp_path, model, monkeypatch):
    """Every call but the first shifts the rows of one prompt by one, as a bad offset would."""
    original = speculators_vllm_compat.loop.generate

    def generate(generator, names, token_ids):
        results = original(generator, names, token_ids)
        if len(results) > 1 and generator._request_counter > 1:
            states = results[2]["hidden_states"]
            results[2]["hidden_states"] = [layer.roll(1, 0) for layer in states]
        return results

    monkeypatch.setattr(speculators_vllm_compat.loop, "generate", generate)
    status, outcomes, _ = rehearsed(model(WITHOUT_REFERENCE), tmp_path)
    failed = {outcome["name"] for outcome in outcomes if outcome["passed"] is False}
    assert status == 1
    assert failed == {"twice the same", "permuted batch", "split prompts as whole"}


def test_a_layer_that_does_not_exist(environment, model):
    ended = run(environment, str(model(LLAMA)), "--layer-ids", "32")
    assert ended.returncode == 2
    assert "layers [32] asked for; the model has layers 0 to 31" in ended.stderr
    assert not left_behind(environment)


# What the checks say of tensors, without an engine.

EXACT, ROUNDED = Judge("float32", experts=True), Judge("bfloat16", experts=True)


def results(lengths, layers=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.arange(length),
            "hidden_states": [torch.randn(length, 8, generator=generator) for _ in range(layers)],
        }
        for length in lengths
    ]


def test_equal_rows_pass_and_one_wrong_row_does_not():
    found, wanted = results([50, 3]), results([50, 3])
    assert EXACT.compare("x", pairs(found, wanted)).passed
    found[0]["hidden_states"][1][7] += 0.01
    outcome = EXACT.compare("x", pairs(found, wanted))
    assert outcome.passed is False
    assert "1 of 106 rows differ by more than 1e-04" in outcome.note
    assert "try another --seed" in outcome.note
    assert ROUNDED.compare("x", pairs(found, wanted)).passed


def test_ties_are_a_matter_of_reduced_precision_and_few_rows():
    found, wanted = results([100]), results([100])
    for layer in found[0]["hidden_states"]:
        layer[:11] += 5
    assert not ROUNDED.compare("x", pairs(found, wanted)).passed
    for layer, right in zip(found[0]["hidden_states"], wanted[0]["hidden_states"], strict=True):
        layer[5:] = right[5:]
    outcome = ROUNDED.compare("x", pairs(found, wanted))
    assert outcome.passed
    assert outcome.note == "10 of 200 rows are off, as ties between experts"
    assert not Judge("bfloat16", experts=False).compare("x", pairs(found, wanted)).passed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value):
    found = results([4])
    found[0]["hidden_states"][1][2, 3] = value
    outcome = finite(found)
    assert outcome.passed is False
    assert outcome.note == "prompt 0, layer 1: not finite"
    assert relative(found[0]["hidden_states"][1], torch.ones(4, 8)).max() == float("inf")


def test_a_row_of_zeros():
    found = results([4])
    found[0]["hidden_states"][0][1] = 0
    assert finite(found).note == "prompt 0, layer 0: a row of zeros"
    assert finite(results([4])).passed


def test_form():
    prompts = [list(range(3)), list(range(5))]
    assert form(results([3, 5]), prompts, 2).passed
    assert form(results([3]), prompts, 2).note == "1 results for 2 prompts"
    assert form(results([5, 3]), prompts, 2).note == "result 0 is not that of prompt 0"
    short = results([3, 5])
    short[1]["hidden_states"][1] = short[1]["hidden_states"][1][1:]
    assert form(short, prompts, 2).note == "prompt 1 has rows [5, 4]; expected 2 times 5"


def test_states_that_cannot_be_told_apart():
    same = results([9])
    same[0]["hidden_states"][1] = same[0]["hidden_states"][0].clone()
    assert telling(same, [0, 1], EXACT).passed is False
    assert telling(same, [1, 1], EXACT).passed  # one layer, asked for twice
    assert telling(results([9]), [0, 1], EXACT).passed


def test_shapes_that_differ():
    outcome = EXACT.compare("x", pairs(results([4]), results([5])))
    assert outcome.note == "a result has shape (4, 8); expected (5, 8)"


def filled(tensor: torch.Tensor, name: str = "weight", codes: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    parameters.fill(name, tensor, codes=codes, hidden=256, generator=generator)
    return tensor


def test_weights_keep_the_size_of_what_goes_through_them():
    assert filled(torch.empty(512, 256)).std() == pytest.approx(1 / 16, rel=0.02)
    norm = filled(torch.empty(4096))
    assert norm.mean() == pytest.approx(1, abs=0.01)
    assert norm.std() == pytest.approx(0.1, rel=0.05)
    assert filled(torch.empty(4096), "bias").abs().mean() < 0.1
    assert filled(torch.empty(1), "k_scale") == 1


def test_int4_codes_have_no_mean_and_their_scales_make_them_small():
    own = {
        "weight_packed": torch.empty(512, 32, dtype=torch.int32),
        "weight_scale": torch.empty(512, 2),
        "weight_shape": torch.empty(2, dtype=torch.int64),
    }
    codes = parameters.code_size(own)
    for name, tensor in own.items():
        filled(tensor, name, codes)
    assert own["weight_shape"].tolist() == [0, 0]
    packed = own["weight_packed"].view(torch.uint8).int()
    numbers = torch.cat([packed % 16, packed // 16]).float() - 8
    weights = numbers * own["weight_scale"].mean()
    assert numbers.mean() == pytest.approx(0, abs=0.05)
    assert weights.std() == pytest.approx(1 / 16, rel=0.05)


def test_int8_and_fp8_codes():
    own = {"weight": torch.empty(512, 256, dtype=torch.int8), "weight_scale": torch.empty(512, 1)}
    codes = parameters.code_size(own)
    weights = filled(own["weight"], "weight", codes) * filled(own["weight_scale"], "s_scale", codes)
    assert weights.std() == pytest.approx(1 / 16, rel=0.1)
    assert weights.mean().abs() < 0.002
    own = {"weight": torch.empty(512, 256, dtype=torch.float8_e4m3fn)}
    assert parameters.code_size(own) == 1
    assert filled(own["weight"]).float().std() == pytest.approx(1 / 16, rel=0.05)


def test_mxfp4_exponents():
    scales = filled(torch.empty(512, 8, dtype=torch.uint8), "w13_weight_scale", 4.3)
    assert 2.0 ** (scales.float().mean() - 127) * 3 == pytest.approx(1 / 16, rel=0.5)


def test_a_parameter_is_the_same_wherever_it_is_made():
    assert torch.equal(filled(torch.empty(64, 64)), filled(torch.empty(64, 64)))
