"""Every architecture of transformers, built from a small config that is derived from its own.

A config's numbers are made small by what they are called (``hidden_size``, ``n_layer``, ``vocab_size``);
``OVERRIDES`` says what an architecture needs beside that. Values and inputs are functions of a seed alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

VOCABULARY, HIDDEN, LAYERS, HEADS, IMAGE, PATCH = 96, 32, 2, 4, 32, 8
LARGEST = 1_500_000  # parameters: what is larger was not made small

# The mappings of transformers' Auto classes, the first that knows an architecture says which class is built.
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "AUDIO_CLASSIFICATION", "DEPTH_ESTIMATION",
    "IMAGE_TEXT_TO_TEXT", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "MASKED_IMAGE_MODELING",
    "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "PRETRAINING",
    "TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION", "MULTIMODAL_LM",
)  # fmt: skip

# What fields are called, as globs, and the most that they may be; the first that matches holds. Where a field
# is a sequence, that is the most of each of its elements.
SIZES: tuple[tuple[int | None, str], ...] = (
    # what looks like a size and is none
    (
        None,
        "chunk_size_feed_forward type_vocab_size num_channels pretraining_tp *_scale *_factor *_ratio *_rate",
    ),
    (None, "spatial_merge_size temporal_patch_size merge_size kernel_size mamba_expand mamba_d_conv"),
    # counts
    (VOCABULARY, "*vocab_size num_embeddings input_vocab codebook_size entity_vocab* *_vocab n_token"),
    (2, "*num_experts_per_tok *experts_per_token *moe_k *moe_topk *top_k_experts"),
    (4, "num_experts moe_num_experts n_routed_experts num_local_experts"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    (1, "num_hidden_groups inner_group_num num_blocks_per_group"),
    (0, "num_mtp_layers num_nextn_predict_layers"),
    (2, "*num_key_value_heads *num_kv_heads *n_head_kv *num_key_value_attention_heads"),
    (LAYERS, "*num_hidden_layers *num_layers *n_layer *_layers *n_layers *num_blocks"),
    (LAYERS, "layers depth depths *_depth num_block_repeats layer_num"),
    (HEADS, "*attention_heads *num_heads *n_head *n_heads *attn_heads *_heads heads"),
    (8, "*head_dim d_kv *head_size d_head *dim_head *_rank"),
    (4, "index_topk index_local_blocks"),
    (1, "mamba_n_groups n_groups num_groups mamba_num_groups"),
    (4, "ssm_state_size state_size mamba_d_state d_state"),
    (8, "mamba_d_head"),
    (4, "chunk_size mamba_chunk_size segment_means_seq_len attention_chunk_size"),
    # positions and windows
    (128, "max_2d_position_embeddings max_temporal_embeddings"),
    (64, "*max_source_positions *max_target_positions *max_position *max_positions *max_position_embeddings"),
    (64, "n_positions n_ctx context_length max_seq_len max_sequence_length seq_len seq_length"),
    (4, "sliding_window sliding_window_size local_attention attention_window attention_window_size"),
    (4, "local_window_size"),
    (IMAGE, "*image_size img_size crop_size resolution"),
    (PATCH, "patch_size"),
    ((IMAGE // PATCH) ** 2, "mm_tokens_per_image image_seq_length num_image_tokens"),
    (6, "num_query_tokens *num_latents resampler_n_latents num_queries num_detection_tokens"),
    (2, "num_denoising num_maskmem num_frames frames_per_clip mask_time_length mask_feature_length"),
    (16, "num_mel_bins feature_size input_feat_per_channel mel_dim n_mel_bins num_mel_channels"),
    (64, "max_length spec_size"),
    (4, "num_conv_pos_embeddings"),
    (2, "num_conv_pos_embedding_groups"),
    (6, "num_labels num_classes"),
    # widths
    (48, "*intermediate_size *ffn_dim *d_ff n_inner *mlp_dim *ffn_hidden_size *feedforward_dim *dim_ff dff"),
    (16, "*moe*size *moe*dim *shared*size *shared*dim *expert*size *expert*dim"),
    (16, "hidden_sizes neck_hidden_sizes embed_dims encoder_hidden_sizes *channels num_filters"),
    (16, "conv_dim tdnn_dim xvector_output_dim classifier_proj_size codevector_dim proj_codevector_dim"),
    (
        HIDDEN,
        "*hidden_size *d_model *n_embd *hidden_dim *emb_dim *embed_dim *model_dim dim *_dim *embedding_size",
    ),
    (HIDDEN, "*embedding_dim hidden_dimension width *_size *_features *_units"),
)

HYBRID = {"num_hidden_layers": 4}

# What an architecture needs beside what its names say.
OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2]},
    "informer": {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2]},
    "time_series_transformer": {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2]},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "donut-swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4},
    "maskformer-swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4},
    "swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "hiera": {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 16},
    "focalnet": {"depths": [1, 1], "embed_dim": 16, "hidden_sizes": [16, 32], "focal_levels": [2, 2],
                 "focal_windows": [3, 3]},
    "funnel": {"d_model": 32, "d_inner": 48, "n_head": 4, "d_head": 8, "block_sizes": [1, 1]},
    "perceiver": {"d_latents": 32, "d_model": 32, "num_self_attends_per_block": 2, "num_blocks": 1,
                  "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32,
                  "v_channels": 32, "num_latents": 6, "max_position_embeddings": 64},
    "mgp-str": {"num_bpe_labels": 20, "num_wordpiece_labels": 20, "num_character_labels": 20},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.1},
}  # fmt: skip

DROPOUT = re.compile(r".*(drop|mask_time_prob|mask_feature_prob|jitter).*")
TOKEN = re.compile(r".*(token_(id|index)|_token_ids|_idx|_index|_id)")


@functools.cache
def _size(name: str) -> Any:
    for value, patterns in SIZES:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split()):
            return value
    return None


def shrunk(kind: type, keep: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments that make a config of a kind small, by the names of its fields."""
    keep = keep or {}
    given: dict[str, Any] = {}
    nested = getattr(kind, "sub_configs", {})
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, default = field.name, field.default
        if name in keep or name in nested:
            continue
        if isinstance(default, float | int) and not isinstance(default, bool) and DROPOUT.fullmatch(name):
            given[name] = type(default)(0)
        elif isinstance(default, int) and not isinstance(default, bool):
            if TOKEN.fullmatch(name) and default >= VOCABULARY:
                given[name] = 3 + sum(map(ord, name)) % 40  # some id that the vocabulary has
            elif (size := _size(name)) is not None and default > size:
                given[name] = size
        elif isinstance(default, tuple | list) and default and all(type(x) is int for x in default):
            size = _size(name)
            given |= {} if size is None else {name: [min(size, x) for x in default]}
    for name, sub in _parts(kind).items():
        if name not in keep:
            given[name] = {**shrunk(sub), "model_type": sub.model_type}
    return {**given, **keep}


def _parts(kind: type) -> dict[str, Any]:
    """The kinds of the configs that a config holds."""
    names = getattr(kind, "sub_configs", {})
    found = {name: sub for name, sub in names.items() if dataclasses.is_dataclass(sub)}
    if len(found) < len(names):  # any kind fits there: the one that is taken where none is given
        whole = kind()
        held = {name: type(getattr(whole, name, None)) for name in names}
        found |= {name: sub for name, sub in held.items() if dataclasses.is_dataclass(sub)}
    return {name: sub for name, sub in found.items() if sub.__name__ != "PreTrainedConfig"}


def task_of(kind: str) -> str:
    """The name of the class of transformers that is built of an architecture."""
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        if kind in names:
            found = names[kind]
            return found if isinstance(found, str) else found[0]
    found = modeling_auto.MODEL_MAPPING_NAMES[kind]
    return found if isinstance(found, str) else found[0]


def built(kind: str) -> nn.Module:
    """A small model of an architecture, with values of torch's generator."""
    import transformers

    transformers.logging.set_verbosity_error()
    config_of = transformers.CONFIG_MAPPING[kind]
    overrides = OVERRIDES.get(kind, {})
    config = config_of(**shrunk(config_of, overrides))
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if part is not None:
            part._experts_implementation = "eager"  # the grouped product takes no float64
    return getattr(transformers, task_of(kind))(config)


def kinds() -> list[str]:
    """The architectures: of those that are built of one class that of the shortest name."""
    from transformers import CONFIG_MAPPING

    found: dict[str, str] = {}
    for kind in sorted(CONFIG_MAPPING, key=lambda name: (len(name), name)):
        with contextlib.suppress(KeyError):
            found.setdefault(task_of(kind), kind)
    return sorted(found.values())


def is_causal(kind: str) -> bool:
    """Whether an architecture's class models language from left to right, from tokens alone."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return kind in causal and task_of(kind) == causal[kind]
