"""transformers 5's PreTrainedConfig, annotated with a name its module does not hold."""

from __future__ import annotations

import subprocess
import sys

import pytest
import transformers
from sources import sources

from cell import patched
from speculators_vllm_compat.patching import Verdict

_V5 = transformers.__version__.startswith("5.")
_FORMS = {
    "4.57": ("class PretrainedConfig:\n    model_type: str = ''\n", Verdict.NOT_NEEDED),
    "5.0": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "class PreTrainedConfig:\n    dtype: 'str | torch.dtype | None' = None\n",
        Verdict.NEEDED,
    ),
    "mended": (
        "import torch\nclass PreTrainedConfig:\n    dtype: 'torch.dtype | None' = None\n",
        Verdict.NOT_NEEDED,
    ),
    "drifted": ("class Configuration:\n    dtype: 'torch.dtype | None' = None\n", None),
}


def _import_speculators(prelude: str) -> subprocess.CompletedProcess[str]:
    # The other thing transformers 5 breaks is put right by hand, to meet this one.
    code = (
        "import sys, types\n"
        "mask = types.ModuleType('transformers.modeling_attn_mask_utils')\n"
        "mask._prepare_4d_causal_attention_mask = None\n"
        "import transformers\n"
        "try:\n    import transformers.modeling_attn_mask_utils\n"
        "except ImportError:\n    sys.modules[mask.__name__] = mask\n"
        f"{prelude}\nimport speculators\nprint('imported')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_probe(finding_of):
    from transformers import configuration_utils

    finding = finding_of("pretrained_config_torch")
    assert finding.verdict is (Verdict.NEEDED if _V5 else Verdict.NOT_NEEDED)
    assert finding.where.startswith(configuration_utils.__file__ + ":")


@pytest.mark.parametrize("form", _FORMS)
def test_probe_of_other_forms(tmp_path, patch_named, form):
    text, expected = _FORMS[form]
    read = sources(tmp_path, {"transformers/configuration_utils.py": text})
    finding = patch_named("pretrained_config_torch").probe(read)
    assert finding.verdict is (expected or Verdict.UNKNOWN_FORM)
    if expected is None:
        assert finding.where.endswith("configuration_utils.py")
        assert "PreTrainedConfig" in finding.found
        assert "PreTrainedConfig" in finding.expected


def test_import_of_speculators_without_and_with_it():
    ended = _import_speculators("")
    if _V5:
        assert "name 'torch' is not defined" in ended.stderr
    else:
        assert ended.stdout.strip() == "imported"
    by_hand = "import speculators_vllm_compat as compat; compat.apply()"
    ended = _import_speculators(by_hand)
    assert ended.stdout.strip().endswith("imported"), ended.stderr


def test_applied_and_reverted():
    import torch
    from transformers import configuration_utils

    before = vars(configuration_utils).get("torch")
    with patched():
        assert vars(configuration_utils).get("torch") is (torch if _V5 else before)
    assert vars(configuration_utils).get("torch") is before
