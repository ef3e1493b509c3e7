"""A model from the ``config.json`` that Hugging Face's transformers writes.

Fields that change sizes are read; those that are known not to are passed over; any other is an error that names it, lest a
size be missed in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from recoup.errors import UsageError
from recoup.job.model import Model

__all__ = ["FAMILIES", "model_of_config", "read_config"]

Config = Mapping[str, Any]

_HARMLESS = frozenset(
    {
        "_attn_implementation", "_name_or_path", "activation_function", "architectures", "attn_implementation", "auto_map",
        "aux_loss_alpha", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "decoder_start_token_id", "dense_act_fn",
        "dtype", "eos_token_id", "ep_size", "feed_forward_proj", "gradient_checkpointing", "hidden_act", "hidden_activation", "id2label",
        "init_config", "init_device", "initializer_factor", "initializer_range", "is_encoder_decoder", "is_gated_act", "label2id",
        "layer_norm_eps", "layer_norm_epsilon", "learned_pos_emb", "logit_scale", "max_position_embeddings", "max_window_layers",
        "mlp_only_layers", "model_type", "n_ctx", "n_group", "n_positions", "name_or_path", "no_bias", "norm_eps", "norm_topk_prob",
        "norm_type", "output_router_logits", "pad_token_id", "partial_rotary_factor", "position_embedding_type", "pretraining_tp",
        "quantization_config", "relative_attention_max_distance", "relative_attention_num_buckets", "reorder_and_upcast_attn",
        "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "routed_scaling_factor",
        "router_aux_loss_coef", "router_jitter_noise", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "scoring_func", "seq_aux",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "task_specific_params", "tokenizer_class", "topk_group", "topk_method", "torch_dtype", "transformers_version", "unk_token_id",
        "use_cache", "use_pad_tok_in_ffn", "use_parallel_residual", "use_qk_norm", "use_sliding_window", "verbose",
    }
)  # fmt: skip


def read_config(path: str | os.PathLike[str], ignore: Iterable[str] = ()) -> Model:
    """The model of a configuration file.

    Args:
        path: the ``config.json``.
        ignore: fields that the caller knows not to change sizes.

    Raises:
        UsageError: the file cannot be read or is no JSON object, its family is not known, a field is missing or not known.
    """
    try:
        config = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read the configuration {os.fspath(path)}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{os.fspath(path)} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{os.fspath(path)} holds no JSON object, but {type(config).__name__}")
    return model_of_config(config, ignore, name=Path(path).resolve().parent.name)


def model_of_config(config: Config, ignore: Iterable[str] = (), name: str = "model") -> Model:
    """The model of a configuration.

    Raises:
        UsageError: its family is not known, a field is missing or not known; the message names the field.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UsageError(f"configuration field `model_type`: {family!r} is not known; valid values: {', '.join(FAMILIES)}")
    reader = _Reader(config)
    model = FAMILIES[family](reader, name)
    unknown = sorted(set(config) - reader.read - _HARMLESS - set(ignore))
    if unknown:
        raise UsageError(
            f"configuration field `{unknown[0]}` is not known for {family}, and might change sizes; known are"
            f" {', '.join(sorted(reader.read))}; if it does not, pass it over with --ignore-field {unknown[0]}"
        )
    return model


class _Reader:
    """A configuration that remembers which fields were asked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.read: set[str] = set()

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number by the first of its names that is there.

        Raises:
            UsageError: none is there and there is no default, or it is no whole number.
        """
        self.read.update(names)
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"configuration field `{name}` must be a whole number, got {value!r}")
            return value
        if default is None:
            raise UsageError(f"configuration field `{names[0]}` is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """A truth value.

        Raises:
            UsageError: it is something else.
        """
        self.read.add(name)
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise UsageError(f"configuration field `{name}` must be true or false, got {value!r}")
        return value

    def share(self, *names: str) -> bool:
        """Whether any of these probabilities is above 0."""
        self.read.update(names)
        return any(float(self.config.get(name) or 0.0) > 0 for name in names)

    def absent(self, name: str, what: str) -> None:
        """Passes if a field is not there, or empty.

        Raises:
            UsageError: it is there; what it asks for is not modelled.
        """
        self.read.add(name)
        if self.config.get(name) not in (None, 0, False):
            raise UsageError(
                f"configuration field `{name}`: {what} is not modelled; pass --ignore-field {name} to plan as if it were not there"
            )


def _llama(reader: _Reader, name: str) -> Model:
    if reader.config.get("use_sliding_window", True):
        reader.absent("sliding_window", "attention within a window")
    reader.read.add("sliding_window")
    bias = reader.flag("attention_bias", False)
    reader.flag("mlp_bias", False)
    return Model(
        name=name, layers=reader.size("num_hidden_layers"), hidden=reader.size("hidden_size"), heads=reader.size("num_attention_heads"),
        kv_heads=reader.size("num_key_value_heads", default=0), head_dim=reader.size("head_dim", default=0),
        ffn=reader.size("intermediate_size"), gated=True, vocab=reader.size("vocab_size"), tied=reader.flag("tie_word_embeddings", False),
        rope=True, norm="rmsnorm", bias=bias, attention_dropout=reader.share("attention_dropout"),
    )  # fmt: skip


def _mixtral(reader: _Reader, name: str) -> Model:
    dense = _llama(reader, name)
    experts = {
        "experts": reader.size("num_local_experts", "num_experts"), "experts_per_token": reader.size("num_experts_per_tok"),
        "expert_ffn": reader.size("moe_intermediate_size", default=0),
        "shared_ffn": reader.size("shared_expert_intermediate_size", default=0),
        "moe_every": reader.size("decoder_sparse_step", default=1),
    }  # fmt: skip
    return _changed(dense, experts)


def _deepseek(reader: _Reader, name: str) -> Model:
    reader.absent("num_nextn_predict_layers", "multi-token prediction")
    width = reader.size("moe_intermediate_size")
    changes = {
        "head_dim": reader.size("v_head_dim"), "experts": reader.size("n_routed_experts"),
        "experts_per_token": reader.size("num_experts_per_tok"), "expert_ffn": width,
        "shared_ffn": width * reader.size("n_shared_experts", default=0), "dense_layers": reader.size("first_k_dense_replace", default=0),
        "moe_every": reader.size("moe_layer_freq", default=1), "query_rank": reader.size("q_lora_rank", default=0),
        "latent_rank": reader.size("kv_lora_rank"), "rope_dim": reader.size("qk_rope_head_dim"), "kv_heads": 0,
    }  # fmt: skip
    reader.size("qk_nope_head_dim")
    return _changed(_llama(reader, name), changes)


def _gpt2(reader: _Reader, name: str) -> Model:
    return Model(
        name=name, layers=reader.size("n_layer", "num_hidden_layers"), hidden=reader.size("n_embd", "hidden_size"),
        heads=reader.size("n_head", "num_attention_heads"), ffn=reader.size("n_inner", default=0), vocab=reader.size("vocab_size"),
        tied=reader.flag("tie_word_embeddings", True), positions=reader.size("n_positions", "n_ctx", default=1024),
        attention_dropout=reader.share("attn_pdrop"), hidden_dropout=reader.share("resid_pdrop", "embd_pdrop"),
    )  # fmt: skip


def _neox(reader: _Reader, name: str) -> Model:
    return Model(
        name=name, layers=reader.size("num_hidden_layers"), hidden=reader.size("hidden_size"), heads=reader.size("num_attention_heads"),
        ffn=reader.size("intermediate_size"), vocab=reader.size("vocab_size"), tied=reader.flag("tie_word_embeddings", False), rope=True,
        bias=reader.flag("attention_bias", True), attention_dropout=reader.share("attention_dropout"),
        hidden_dropout=reader.share("hidden_dropout"),
    )  # fmt: skip


def _bert(reader: _Reader, name: str) -> Model:
    reader.size("type_vocab_size", default=2)
    return Model(
        name=name, layers=reader.size("num_hidden_layers"), hidden=reader.size("hidden_size"), heads=reader.size("num_attention_heads"),
        ffn=reader.size("intermediate_size"), vocab=reader.size("vocab_size"), positions=reader.size("max_position_embeddings"),
        attention_dropout=reader.share("attention_probs_dropout_prob"), hidden_dropout=reader.share("hidden_dropout_prob"),
        tied=reader.flag("tie_word_embeddings", True), causal=False, head_products=2,
    )  # fmt: skip


def _t5(reader: _Reader, name: str) -> Model:
    encoder = reader.size("num_layers")
    gated = str(reader.config.get("feed_forward_proj", "relu")).startswith("gated")
    return Model(
        name=name, layers=encoder + reader.size("num_decoder_layers", default=encoder), encoder_layers=encoder,
        hidden=reader.size("d_model"),
        heads=reader.size("num_heads"), head_dim=reader.size("d_kv"), ffn=reader.size("d_ff"), gated=gated, vocab=reader.size("vocab_size"),
        norm="rmsnorm", bias=False, tied=reader.flag("tie_word_embeddings", True), attention_dropout=reader.share("dropout_rate"),
        hidden_dropout=reader.share("dropout_rate"),
    )  # fmt: skip


def _changed(model: Model, changes: Mapping[str, object]) -> Model:
    return msgspec.structs.replace(model, **changes)


FAMILIES: dict[str, Callable[[_Reader, str], Model]] = {
    "llama": _llama, "mistral": _llama, "qwen2": _llama, "qwen3": _llama, "mixtral": _mixtral, "qwen2_moe": _mixtral, "qwen3_moe": _mixtral,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "gpt2": _gpt2, "gpt_neox": _neox, "bert": _bert, "t5": _t5,
}  # fmt: skip
"""Families of models (``model_type``) that can be read."""
