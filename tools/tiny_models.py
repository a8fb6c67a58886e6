"""Tiny models with random weights, made on the spot, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS = 6
POSITIONS = 2048

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    # Wide enough that layers change the stream by far more than any tolerance.
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, head_dim=32)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_COMMON, head_dim=32)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_COMMON,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )


def _mla(mscale_all_dim: float, **more: Any) -> dict[str, Any]:
    """The DeepSeek forms' attention: low-rank keys and values, rope as published (YaRN)."""
    common = {**_COMMON, "num_key_value_heads": 4}
    return {
        **common,
        "kv_lora_rank": 512,  # with 64 rotated dimensions, the only size the CPU kernels take
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": mscale_all_dim,
            "original_max_position_embeddings": 512,
        },
        "rope_theta": 10000.0,
        **more,
    }


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_mla(
            # transformers 4 leaves mscale_all_dim out of this model's attention scale.
            mscale_all_dim=0.0,
            q_lora_rank=None,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            scoring_func="softmax",
        )
    )


def _deepseek_v3(**more: Any) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_mla(
            mscale_all_dim=1.0,
            **{
                "q_lora_rank": 64,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 3,
                "n_group": 2,
                "topk_group": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                **more,
            },
        )
    )


def _deepseek_v3_dense() -> Any:
    return _deepseek_v3(first_k_dense_replace=LAYERS)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}

# For formats that round so coarsely that tokens change experts: no layer has any.
WITHOUT_EXPERTS: dict[str, Callable[[], Any]] = {"deepseek_v3_dense": _deepseek_v3_dense}


def build(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a model in float32, with a tokenizer, to ``folder/name``; returns that folder."""
    import torch
    from transformers import AutoModelForCausalLM

    target = folder / name
    if (target / "config.json").is_file():
        return target
    config = {**CONFIGS, **WITHOUT_EXPERTS}[name]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    for parameter_name, parameter in model.named_parameters():
        if "e_score_correction_bias" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(target)
    build_tokenizer().save_pretrained(target)
    return target


def build_tokenizer() -> Any:
    """A tokenizer of whole words: w0, w1, ... as many as the vocabulary holds."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"w{i}" for i in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, special ones left out.

    With a mixture of experts, a token whose best experts score alike to the last bit can go to
    either, and both are right; such a token shows as one row that differs by far more than any
    rounding, from one layer on. Change the seed where that happens.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()


class Reference:
    """What transformers computes for a model: the residual stream after each layer.

    The last layer's is taken before the final norm, which ``output_hidden_states`` does not
    give, so every layer is hooked.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model.eval()
        self._seen: dict[int, Any] = {}
        for index, layer in enumerate(self._model.model.layers):
            layer.register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Callable[..., None]:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._seen[index] = hidden[0].clone()

        return keep

    def __call__(self, ids: list[int], layers: list[int]) -> list[Any]:
        """[tokens, hidden] for each of the layers."""
        import torch

        with torch.inference_mode():
            self._model(torch.tensor([ids]), use_cache=False)
        return [self._seen[layer] for layer in layers]


def largest_difference(
    results: list[dict[str, Any]], reference: Reference, layers: list[int]
) -> float:
    """The largest absolute difference of ``generate()``'s results from transformers.

    Raises:
        AssertionError: A result has another shape, or other ids, than it should.
    """
    worst = 0.0
    for result in results:
        expected = reference(result["input_ids"].tolist(), layers)
        assert len(result["hidden_states"]) == len(layers)
        for found, wanted in zip(result["hidden_states"], expected, strict=True):
            assert found.shape == wanted.shape, (found.shape, wanted.shape)
            difference = (found.double() - wanted.double()).abs().max().item()
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst
