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
    (64, "codebook_size num_embeddings"),
    (VOCABULARY, "vocab_size_per_layer_input *vocab_size input_vocab entity_vocab* *_vocab n_token"),
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
    (64, "upsample_initial_channel"),
    (16, "hidden_sizes neck_hidden_sizes embed_dims encoder_hidden_sizes *channels num_filters"),
    (16, "conv_dim tdnn_dim xvector_output_dim classifier_proj_size codevector_dim proj_codevector_dim"),
    (
        HIDDEN,
        "*hidden_size *d_model *n_embd *hidden_dim *emb_dim *embed_dim *model_dim dim *_dim *embedding_size",
    ),
    (HIDDEN, "*embedding_dim hidden_dimension width *_size *_features *_units"),
)

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
SERIES = {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1}
PYRAMID = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
          "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip
DEPTH = {"neck_hidden_sizes": [16, 16], "reassemble_factors": [1, 0.5], "fusion_hidden_size": 16,
         "head_hidden_size": 8}  # fmt: skip

# What an architecture, or a part of one, needs beside what its names say.
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("granitemoehybrid", "qwen3_next", "kimi_linear", "lfm3", "qwen3_5_text"), HYBRID),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen4_exp_text", "bailing_hybrid", "minicpm_ocr_text"), HYBRID),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm4v_moe_text"), SECTIONS),
    **dict.fromkeys(("glm_ocr_text", "qwen2_5_omni_text", "glm_image_text"), SECTIONS),
    **dict.fromkeys(("paddleocr_vl_text", "cosmos3_edge_text"), SECTIONS),
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), SERIES),
    **{f"vibevoice_acoustic_tokenizer{part}": {"num_filters": 4} for part in ("", "_encoder", "_decoder")},
    **dict.fromkeys(("donut-swin", "maskformer-swin", "swin", "swinv2"), PYRAMID),
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "big_bird": {"attention_type": "original_full"},  # it is what so short a sequence is given
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bros": {"dim_bbox": 8, "bbox_scale": 1.0},
    "chameleon": {"vocabulary_map": {"<image>": 5, **{f"IMGIMG{c}Z": 6 + i for i, c in enumerate("ABCD")}}},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
              "num_experts_per_tok": 2},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2, "token_dropout": False,
            "position_embedding_type": "rotary"},
    "focalnet": {"depths": [1, 1], "embed_dim": 16, "hidden_sizes": [16, 32], "focal_levels": [2, 2],
                 "focal_windows": [3, 3], "patch_size": 4},
    "funnel": {"d_model": 32, "d_inner": 48, "n_head": 4, "d_head": 8, "block_sizes": [1, 1]},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "hiera": {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 16, "num_query_pool": 1,
              "image_size": [32, 32], "patch_kernel": [7, 7], "masked_unit_size": [4, 4],
              "masked_unit_attention": [True, False]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"channel_shrink_ratio": 4, "num_attention_heads": 4, "hidden_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mgp-str": {"num_bpe_labels": 20, "num_wordpiece_labels": 20, "num_character_labels": 20},
    "ministral": {"head_dim": 8},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.1},
    "mobilevitv2": {"width_multiplier": 0.25},
    "moonshine": {"pad_token_id": 0},
    "nemotron": {"head_dim": 8},
    "neomme": {"head_dim": 16},
    "nystromformer": {"segment_means_seq_len": 12, "num_landmarks": 4},
    "perceiver": {"d_latents": 32, "d_model": 32, "num_self_attends_per_block": 2, "num_blocks": 1,
                  "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32,
                  "v_channels": 32, "num_latents": 6, "max_position_embeddings": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": False, "attn_layers": ["local", "local"], "axial_pos_embds": False,
                 "local_attn_chunk_length": 4},
    "rt_detr_resnet": {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                       "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]},
    "rt_detr": {"encoder_in_channels": [8, 16, 16], "decoder_in_channels": [32, 32, 32], "d_model": 32,
                "encoder_hidden_dim": 32},
    "rt_detr_v2": {"encoder_in_channels": [8, 16, 16], "decoder_in_channels": [32, 32, 32], "d_model": 32,
                   "encoder_hidden_dim": 32},
    "upernet": {"backbone_config": RESNET, "hidden_size": 16, "auxiliary_in_channels": 16},
    "detr": {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
             "backbone_config": RESNET},
    "conditional_detr": {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
                         "backbone_config": RESNET},
    "deformable_detr": {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
                        "backbone_config": RESNET, "num_feature_levels": 3},
    "table-transformer": {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
                          "backbone_config": RESNET},
    "dab-detr": {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
                 "backbone_config": RESNET},
    "wav2vec2-bert": {"vocab_size": VOCABULARY, "conv_depthwise_kernel_size": 3},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY, "conv_depthwise_kernel_size": 3},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "attn_layer_period": 2, "attn_layer_offset": 1,
              "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "mamba_ngroups": 1,
               "mamba_headdim": 8},
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
    keep = {**OVERRIDES.get(getattr(kind, "model_type", ""), {}), **(keep or {})}
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if "kv_lora_rank" in fields:  # all heads have keys of their own
        keep = {"num_key_value_heads": HEADS, **keep}
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
    config = config_of(**shrunk(config_of))
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
