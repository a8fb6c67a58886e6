"""Bad input is refused before anything is scheduled, and the generator stays usable and right."""

from __future__ import annotations

import logging

import pytest
import torch

from cell import assert_right, engine, patched
from tiny_models import VOCABULARY, prompt

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def generator():
    with patched() as module, engine(module, max_model_len=128) as made:
        yield made


@pytest.mark.parametrize(
    ("token_ids", "error", "message"),
    [
        ([], ValueError, "token_ids cannot be empty"),
        (torch.empty((0, 5), dtype=torch.long), ValueError, "token_ids cannot be empty"),
        ([[5, 6], []], ValueError, r"token_ids\[1\] is empty"),
        (torch.empty((2, 0), dtype=torch.long), ValueError, r"token_ids\[0\] is empty"),
        ([[5, VOCABULARY]], ValueError, rf"token_ids\[0\]\[1\] is {VOCABULARY}"),
        ([[5], [7, -1, 2]], ValueError, r"token_ids\[1\]\[1\] is -1"),
        (torch.tensor([5, 6]), ValueError, r"shape \(2,\); expected \[sequences, tokens\]"),
        (torch.tensor([[[5, 6]]]), ValueError, r"shape \(1, 1, 2\)"),
        ([5, 6], ValueError, r"token_ids\[0\] has 0 dimensions"),
        ([[[5, 6]]], ValueError, r"token_ids\[0\] has 2 dimensions"),
        ([["w1"]], TypeError, r"token_ids\[0\] is not a sequence of token ids"),
        ("a text", TypeError, "token_ids is a str"),
        (["a text"], TypeError, r"token_ids\[0\] is not a sequence of token ids"),
        ([[5.0, 6.0]], TypeError, r"token_ids\[0\] holds torch.float32; expected integers"),
        ([[True, False]], TypeError, r"token_ids\[0\] holds torch.bool"),
        (None, TypeError, "token_ids is a NoneType"),
        ({"input_ids": [[5]]}, TypeError, "token_ids is a dict"),
    ],
)
def test_refused(generator, token_ids, error, message):
    with pytest.raises(error, match=message):
        generator.generate(token_ids)
    assert not generator.scheduler.requests
    prompts = [prompt(17, seed=1), prompt(3, seed=2)]
    assert_right(generator.generate(prompts), prompts)


def test_too_long_is_cut_counted_and_logged(generator, caplog):
    prompts = [prompt(127, seed=3), prompt(128, seed=4), prompt(200, seed=5)]
    before = generator.truncated_sequences, generator.truncated_tokens
    with caplog.at_level(logging.WARNING, "speculators_vllm_compat"):
        results = generator.generate(prompts)
    assert_right(results, [ids[:127] for ids in prompts])
    assert generator.truncated_sequences - before[0] == 2
    assert generator.truncated_tokens - before[1] == 1 + 73
    assert "2 of 3 sequences were cut to 127 tokens (74 tokens lost)" in caplog.text
    assert "max_model_len" in caplog.text


@pytest.mark.parametrize("layer_ids", [[0, 6], [-1]])
def test_layer_out_of_range(layer_ids):
    with (
        patched() as module,
        pytest.raises(ValueError, match=r"out of bounds \[0, 5\]"),
        engine(module, layer_ids=layer_ids),
    ):
        pass
