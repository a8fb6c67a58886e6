"""The mask helper that speculators' EAGLE-1 model imports, gone from newer transformers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
import transformers
from sources import sources

from cell import patched
from speculators_vllm_compat.patches.attn_mask_utils import causal_mask
from speculators_vllm_compat.patching import Verdict

_MODULE = "transformers.modeling_attn_mask_utils"
_GONE = transformers.__version__.startswith("5.")  # 5.24 in the tests' environments
_EAGLE = "from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask\n"
_HELPER = "def _prepare_4d_causal_attention_mask(attention_mask, input_shape): ...\n"


def test_probe(finding_of):
    expected = Verdict.NEEDED if _GONE else Verdict.NOT_NEEDED
    assert finding_of("attn_mask_utils").verdict is expected


@pytest.mark.parametrize(
    ("eagle", "helper", "expected"),
    [
        (_EAGLE, _HELPER, Verdict.NOT_NEEDED),
        (_EAGLE, None, Verdict.NEEDED),
        ("import torch\n", None, Verdict.NOT_NEEDED),
        (_EAGLE, "def prepare_mask(): ...\n", Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, eagle, helper, expected):
    files = {"speculators/models/eagle.py": eagle}
    if helper is not None:
        files["transformers/modeling_attn_mask_utils.py"] = helper
    finding = patch_named("attn_mask_utils").probe(sources(tmp_path, files))
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert "modeling_attn_mask_utils.py" in finding.where
        assert "_prepare_4d_causal_attention_mask" in finding.expected


def test_import_of_speculators_without_it():
    code = (
        "import transformers.configuration_utils as c, torch; c.torch = torch; import speculators"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    if _GONE:
        assert f"No module named '{_MODULE}'" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(_GONE, reason="this transformers has no helper to compare with")
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_is_that_of_transformers(past, window, padded, dtype):
    from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask

    batch, queries = 2, 5
    attention_mask = None
    if padded:
        attention_mask = torch.ones(batch, queries + past)
        attention_mask[1, :2] = 0
    embeds = torch.zeros(batch, queries, 4, dtype=dtype)
    arguments = (attention_mask, (batch, queries), embeds, past, window)
    found, wanted = causal_mask(*arguments), _prepare_4d_causal_attention_mask(*arguments)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.equal(wanted)


def test_mask_by_hand():
    mask = causal_mask(torch.tensor([[0, 1, 1, 1]]), (1, 2), torch.zeros(1, 2, 4), 2)
    hidden = torch.finfo(torch.float32).min
    assert mask.tolist() == [[[[hidden, 0.0, 0.0, hidden], [hidden, 0.0, 0.0, 0.0]]]]


def test_applied_and_reverted():
    with patched():
        pass
    before = sys.modules.get(_MODULE)
    with patched():
        from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask

        assert (_prepare_4d_causal_attention_mask is causal_mask) is _GONE
    assert sys.modules.get(_MODULE) is (None if _GONE else before) or not _GONE
    assert (importlib.util.find_spec(_MODULE) is None) is _GONE
