"""What speculators does without the patches, for each pair: the reason for all of this."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from cell import engine, is_0_3, model, skipping, vllm_version
from speculators_vllm_compat.patches import PATCHES
from tiny_models import prompt

pytestmark = pytest.mark.engine

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_unpatched_extraction_fails():
    """A whole extraction, in a process that never imports this package."""
    ended = subprocess.run(
        [sys.executable, str(DEMO), "unpatched", str(model("llama"))],
        env={**os.environ, "SPECULATORS_VLLM_COMPAT": "off"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 1
    if transformers.__version__.startswith("5"):
        expected = "No module named 'transformers.modeling_attn_mask_utils'"
    elif is_0_3():
        expected = "is_encoder_decoder"
    else:
        expected = "NVIDIA driver"  # asked for the memory of a GPU that is not there
    assert expected in ended.stderr


@pytest.mark.skipif(
    is_0_3() or vllm_version() != "0.16.0",
    reason="only 0.4 on 0.16 gets as far as returning results without the patches",
)
def test_results_in_the_wrong_order():
    """speculators 0.4's own code, but for what a machine without a GPU needs."""
    others = [patch.id for patch in PATCHES if patch.id not in {"memory_query"}]
    prompts = [prompt(5 + index, seed=index) for index in range(12)]
    with skipping(*others) as module, engine(module) as generator:
        results = generator.generate(prompts)
    found = [result["input_ids"].tolist() for result in results]
    assert sorted(found) == sorted(prompts)
    assert found == [prompts[index] for index in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)]
