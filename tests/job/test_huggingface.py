"""Configurations of transformers as models: sizes by family, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recoup.errors import UsageError
from recoup.job.huggingface import FAMILIES, model_of_config, read_config
from recoup.job.presets import preset
from recoup.job.stages import total_parameters

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0}, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "sliding_window": None,
    "output_router_logits": False, "router_aux_loss_coef": 0.02,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
T5 = {
    "model_type": "t5", "num_layers": 24, "d_model": 1024, "num_heads": 128, "d_kv": 128, "d_ff": 65536, "vocab_size": 32128,
    "dropout_rate": 0.1,
    "feed_forward_proj": "relu", "is_encoder_decoder": True, "relative_attention_num_buckets": 32,
}  # fmt: skip
BERT = {
    "model_type": "bert", "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
    "vocab_size": 30522,
    "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
    "num_hidden_layers": 61, "vocab_size": 129280, "v_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA, "llama3-8b"), (MIXTRAL, "mixtral-8x7b"), (T5, "t5-11b"), (DEEPSEEK, "deepseek-v3")],
    ids=lambda value: str(value)[:12],
)
def test_sizes_are_those_of_the_presets(config: dict[str, Any], name: str) -> None:
    known = preset(name)
    model = model_of_config(config, name=name)
    assert total_parameters(model) == pytest.approx(total_parameters(known), rel=0.02 if name == "t5-11b" else 0)
    for field in ("layers", "hidden", "heads", "kv", "head", "feed_forward", "gated", "experts", "kinds"):
        assert getattr(model, field) == getattr(known, field), field


def test_parameters_of_public_models() -> None:
    # GPT-2 XL has 1,557,611,200 parameters.
    assert total_parameters(model_of_config(GPT2)) == 1_557_611_200
    # BERT-large with its head: 335,174,458 with the types of tokens and the pair's classifier, which are left out.
    assert total_parameters(model_of_config(BERT)) == pytest.approx(335_174_458, rel=0.01)
    assert model_of_config(T5).kinds == ("encoder",) * 24 + ("decoder",) * 24


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, GPT2, T5, BERT, DEEPSEEK])
def test_an_unknown_field_is_an_error_unless_passed_over(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="configuration field `adapter_width` is not known") as caught:
        model_of_config(config | {"adapter_width": 64})
    assert "--ignore-field adapter_width" in str(caught.value)
    assert model_of_config(config | {"adapter_width": 64}, ignore=["adapter_width"]) == model_of_config(config)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mamba"}, "`model_type`: 'mamba' is not known; valid values: llama"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"hidden_size": "wide"}, "`hidden_size` must be a whole number, got 'wide'"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` must be a whole number"),
        ({"attention_bias": "no"}, "`attention_bias` must be true or false"),
        ({"num_attention_heads": 31, "num_key_value_heads": 31}, "`heads`: 31 must divide hidden 4096"),
        ({"num_key_value_heads": 5}, "`kv_heads`: 5 must divide heads 32"),
        ({"sliding_window": 4096}, "`sliding_window`: attention within a window is not modelled"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        model_of_config(LLAMA | changes)
    assert text in str(caught.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "my-llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    assert read_config(path).name == "my-llama"
    with pytest.raises(UsageError, match="cannot read"):
        read_config(tmp_path / "none.json")
    path.write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        read_config(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="no JSON object"):
        read_config(path)


def test_every_family_reads_a_configuration() -> None:
    plain = LLAMA | {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 0,
        "hidden_dropout": 0.0,
    }  # fmt: skip
    for family in FAMILIES:
        base = {"gpt2": GPT2, "bert": BERT, "t5": T5, "deepseek_v2": DEEPSEEK, "deepseek_v3": DEEPSEEK}.get(family, plain)
        model = model_of_config(base | {"model_type": family}, ignore=plain)
        assert total_parameters(model) > 0
