"""Miniatures of published config forms: what decides which code runs stays, the rest shrinks."""

from __future__ import annotations

import copy

import pytest

from speculators_vllm_compat.rehearsal import layers
from speculators_vllm_compat.rehearsal.miniature import (
    FIRST_PLAIN_TOKEN,
    VOCABULARY,
    UnusableConfigError,
    completed,
    default_layers,
    own_dtype,
    shrink,
    text_of,
    with_dtype,
)

# The published forms, with the fields that matter here.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2_5 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "pad_token_id": 163839,
    "text_config": {
        **{k: v for k, v in DEEPSEEK_V3.items() if k != "quantization_config"},
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}
            },
        },
        "vocab_size": 163840,
    },
    "vision_config": {
        "vt_num_hidden_layers": 27,
        "vt_hidden_size": 1152,
        "mm_hidden_size": 1152,
        "text_hidden_size": 7168,
    },
}
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "vocab_size": 201088,
}
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "image_token_index": 262144,
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "image_size": 896},
}
QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34, "vision_output_dim": 4096},
}
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "vocab_size": 131072,
}

FORMS = {
    "llama": LLAMA_3_8B,
    "qwen3_moe": QWEN3_30B_A3B,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k25": KIMI_K2_5,
    "gpt_oss": GPT_OSS_120B,
    "gemma3": GEMMA_3_27B,
    "qwen3_next": QWEN3_NEXT_80B,
    "llama4": LLAMA_4_SCOUT,
    "nemotron_h": NEMOTRON_H,
}
# Fields that decide which code runs, or with which sizes kernels are called.
KEPT = {
    "architectures",
    "model_type",
    "head_dim",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_scaling",
    "rope_theta",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "full_attention_interval",
    "sliding_window_pattern",
    "interleave_moe_layer_step",
    "n_shared_experts",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "query_pre_attn_scalar",
    "topk_method",
    "quantization_config",
    "max_position_embeddings",
}


@pytest.fixture(params=FORMS)
def form(request):
    return copy.deepcopy(FORMS[request.param])


def test_the_published_config_is_not_changed(form):
    before = copy.deepcopy(form)
    shrink(form, None)
    assert form == before


def test_what_decides_which_code_runs_is_kept(form):
    small = shrink(form, None)
    text = text_of(form)
    for name in KEPT & set(text):
        assert small.text[name] == text[name], name
    assert small.config["architectures"] == form["architectures"]


def test_layers_asked_for_are_of_the_same_kind_and_in_order(form):
    small = shrink(form, None)
    every, few = layers.kinds(text_of(form)), layers.kinds(small.text)
    assert list(small.layers) == default_layers(len(every))
    assert list(small.places) == sorted(set(small.places))
    assert [few[place] for place in small.places] == [every[layer] for layer in small.layers]
    assert small.places[-1] == len(few) - 1  # the last layer's state is before the final norm
    assert set(few) == set(every)


def test_the_first_layers_follow_the_rules_of_the_model(form):
    small = shrink(form, None)
    assert (
        layers.kinds(small.text) == layers.kinds(text_of(form))[: small.text["num_hidden_layers"]]
    )


def test_it_is_small(form):
    small = shrink(form, None)
    text = small.text
    assert text["num_hidden_layers"] <= 18
    assert text["vocab_size"] <= VOCABULARY
    if not any(key.startswith("mamba") for key in text):
        assert text["hidden_size"] <= 1024
        assert text["intermediate_size"] <= 256
        assert text.get("moe_intermediate_size", 0) <= 256


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_everything_splits_over_the_ranks(form, ranks):
    small = shrink(form, None, ranks=ranks)
    text = small.text
    heads = text["num_attention_heads"]
    key_values = text["num_key_value_heads"]
    assert heads % ranks == 0
    assert heads % key_values == 0
    assert key_values % ranks == 0 or ranks % key_values == 0
    assert text["intermediate_size"] % ranks == 0
    before = text_of(form)
    if "kv_lora_rank" not in text:
        assert heads // key_values == before["num_attention_heads"] // before["num_key_value_heads"]
    if "linear_num_key_heads" in text:
        assert text["linear_num_key_heads"] % ranks == 0
        assert text["linear_num_value_heads"] == 2 * text["linear_num_key_heads"]


def test_head_sizes_stay_where_they_are_the_hidden_size_over_the_heads():
    text = shrink(LLAMA_3_8B, None).text
    assert text["hidden_size"] // text["num_attention_heads"] == 4096 // 32


def test_experts(form):
    text = shrink(form, None).text
    numbers = {text[name] for name in layers.EXPERTS if name in text}
    if not numbers:
        return
    [experts] = numbers
    chosen = {text[n] for n in ("num_experts_per_tok", "experts_per_token") if n in text}
    assert len(chosen) == 1
    groups, best = text.get("n_group", 1), text.get("topk_group", 1)
    assert experts % groups == 0
    assert experts // groups >= 2
    assert best <= groups
    assert 1 <= chosen.pop() <= best * experts // groups
    assert experts <= 16


def test_groups_of_experts_still_choose():
    text = shrink(DEEPSEEK_V3, None).text
    assert 1 <= text["topk_group"] < text["n_group"]
    assert text["num_experts_per_tok"] < text["n_routed_experts"]


def test_dense_and_expert_layers():
    small = shrink(DEEPSEEK_V3, [0, 5, 60])
    assert small.places == (0, 3, 4)
    assert small.kinds == {"MLA, dense": (3, 3), "MLA, experts": (2, 58)}
    assert small.text["num_nextn_predict_layers"] == 0


def test_layer_types_are_cut():
    small = shrink(GPT_OSS_120B, [2, 18, 33, 35])
    assert small.text["layer_types"] == ["sliding_attention", "full_attention"] * 3
    assert small.places == (0, 2, 3, 5)
    assert small.text["sliding_window"] == 64


def test_sliding_pattern():
    small = shrink(GEMMA_3_27B, [5, 61])
    assert small.places == (5, 6)  # the sixth is the first with full attention
    assert small.kinds["full attention, dense"] == (1, 10)
    assert small.text["sliding_window"] < 200


def test_sparse_step_and_dense_layers_of_qwen():
    config = {**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1, 30]}
    every = layers.kinds(config)
    assert [kind[-1] for kind in every[:4]] == ["dense", "dense", "dense", "experts"]
    small = shrink(config, [3, 29, 47])
    assert small.text["mlp_only_layers"] == [1]
    assert layers.kinds(small.text) == every[: small.text["num_hidden_layers"]]


def test_linear_and_full_attention():
    small = shrink(QWEN3_NEXT_80B, [0, 3, 47])
    assert small.places == (0, 3, 7)
    assert small.text["linear_num_key_heads"] == 2


def test_a_pattern_given_as_text_is_cut_and_state_space_widths_stay():
    small = shrink(NEMOTRON_H, [0, 55])
    pattern = small.text["hybrid_override_pattern"]
    assert NEMOTRON_H["hybrid_override_pattern"].startswith(pattern)
    assert set(pattern) == set("M-*")
    assert small.text["hidden_size"] == 4480
    assert small.text["mamba_num_heads"] == 128


def test_a_wrapper_stays_and_its_other_parts_fit():
    small = shrink(KIMI_K2_5, None)
    assert small.wrapper
    assert small.config["text_config"] is small.text
    assert small.config["vision_config"]["vt_num_hidden_layers"] == 2
    assert small.config["vision_config"]["vt_hidden_size"] == 1152
    assert small.config["vision_config"]["text_hidden_size"] == small.text["hidden_size"]
    assert small.quantization == "compressed-tensors pack-quantized"
    groups = small.text["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert small.text["hidden_size"] % groups["group_size"] == 0


@pytest.mark.parametrize("form", [DEEPSEEK_V3, KIMI_K2_5, GPT_OSS_120B])
def test_quantization_is_dropped_on_request_and_named(form):
    small = shrink(form, None, keep_quantization=False)
    assert small.quantization is None
    assert small.dropped_quantization
    assert "quantization_config" not in small.config
    assert "quantization_config" not in small.text


def test_special_tokens_lie_in_the_vocabulary_and_apart_from_the_plain_ones(form):
    small = shrink(form, None)

    def ids(part):
        for key, value in part.items():
            if isinstance(value, dict):
                yield from ids(value)
            elif "token_id" in key or "token_index" in key:
                yield from value if isinstance(value, list) else [value]

    assert all(0 <= number < FIRST_PLAIN_TOKEN for number in ids(small.config))


def test_special_tokens_stay_different():
    config = shrink(LLAMA_3_8B, None).config
    assert len({config["bos_token_id"], *config["eos_token_id"]}) == 3


@pytest.mark.parametrize("outside", [[-1], [0, 32], []])
def test_layers_that_do_not_exist(outside):
    with pytest.raises(UnusableConfigError, match="the model has layers 0 to 31"):
        shrink(LLAMA_3_8B, outside)


def test_heads_that_do_not_split():
    with pytest.raises(UnusableConfigError, match="cannot be split over --tensor-parallel-size 3"):
        shrink(LLAMA_3_8B, None, ranks=3)


def test_a_config_without_layers():
    with pytest.raises(UnusableConfigError, match="no num_hidden_layers"):
        shrink({"architectures": ["Whatever"], "vision_config": {}}, None)


def test_a_layer_asked_for_twice_and_out_of_order():
    small = shrink(LLAMA_3_8B, [31, 2, 31])
    assert small.places == (1, 0, 1)


def test_a_layer_that_is_not_the_last_one_stays_so():
    small = shrink(LLAMA_3_8B, [2, 5])
    assert small.places == (0, 1)
    assert small.text["num_hidden_layers"] == 3


def test_a_tiny_model_is_left_as_it_is():
    tiny = {**LLAMA_3_8B, "hidden_size": 128, "head_dim": 32, "num_attention_heads": 4}
    tiny.update(num_key_value_heads=2, intermediate_size=256, num_hidden_layers=4, vocab_size=512)
    assert shrink(tiny, [0, 1, 2, 3]).changes == ()


def test_defaults_of_the_class_are_filled_in_where_the_config_is_silent():
    published = {"text_config": {"num_hidden_layers": 34, "hidden_size": 2560}, "x": 1}
    known = {"text_config": {"num_hidden_layers": 34, "num_attention_heads": 8, "other": 2}}
    full = completed(published, known)
    assert full["text_config"]["num_attention_heads"] == 8
    assert full["text_config"]["hidden_size"] == 2560
    assert "other" not in full["text_config"]
    assert "num_attention_heads" not in published["text_config"]


def test_dtype():
    config = {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "a": 1}
    changed = with_dtype(config, "float32")
    assert changed == {"torch_dtype": "float32", "text_config": {"dtype": "float32"}, "a": 1}
    assert own_dtype({**LLAMA_3_8B}) == "bfloat16"
    assert own_dtype({"num_hidden_layers": 1}) is None
