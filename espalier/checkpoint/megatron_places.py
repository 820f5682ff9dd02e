"""Where the tensors of transformers' models stand in those of Megatron-core, and under which keys.

The layout of ``linear_qkv`` and the names are those of megatron.core 0.16, models of its GPT class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from espalier.checkpoint.index import FormatError
from espalier.layout.layout import Box

LAYERS = "decoder.layers."


class Place(NamedTuple):
    """Where values of a tensor of transformers' stand in one of Megatron's.

    Attributes:
        box: of the tensor ``name``.
        there: the same values in the tensor ``key``, which may have one dim more before.
        turned: whether rows are columns there.
        half: of gate and up in one matrix, which it is of, and how many rows a half has.
    """

    name: str
    box: Box
    key: str
    there: Box
    turned: bool = False
    half: tuple[int, int] | None = None


class Sizes(NamedTuple):
    """What is to be known of a model: heads of queries, of keys and values, and the lengths of dims.

    ``routed`` and ``shared`` are those within an expert, and within the one that all rows go through;
    ``apart`` is whether each expert has tensors of its own, as in transformers before 5. ``latent`` is of
    attention through smaller spaces (DeepSeek's): the sizes of queries' (0 if they have none), of keys' and
    values', and of a head's query without positions, its part with them, and its value.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    inner: int
    words: int
    positions: int
    experts: int
    routed: int
    shared: int
    apart: bool
    latent: tuple[int, int, int, int, int]

    @staticmethod
    def of(config: Mapping[str, Any]) -> Sizes:
        """Those of a config.json."""

        def get(*names: str) -> int | None:
            return next((int(config[n]) for n in names if config.get(n) is not None), None)

        hidden, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head")
        layers, words = get("num_hidden_layers", "n_layer"), get("vocab_size")
        if hidden is None or heads is None or layers is None or words is None:
            raise FormatError("The config does not say hidden_size, num_attention_heads and the like.")
        routed = get("moe_intermediate_size", "intermediate_size") or 0
        return Sizes(
            layers,
            hidden,
            heads,
            get("num_key_value_heads") or heads,
            get("head_dim") or hidden // heads,
            get("intermediate_size", "n_inner") or 4 * hidden,
            words,
            get("max_position_embeddings", "n_positions") or 0,
            get("num_experts", "num_local_experts", "n_routed_experts") or 0,
            routed,
            get("shared_expert_intermediate_size") or (get("n_shared_experts") or 0) * routed,
            str(config.get("transformers_version", "")).startswith("4."),
            (
                get("q_lora_rank") or 0,
                get("kv_lora_rank") or 0,
                get("qk_nope_head_dim") or 0,
                get("qk_rope_head_dim") or 0,
                get("v_head_dim") or 0,
            ),
        )


def places(config: Mapping[str, Any], *, stacked: bool, every: bool = True) -> Iterator[Place]:
    """Where each tensor that such a model may have stands.

    Args:
        config: of a model of transformers.
        stacked: whether layers are one tensor, else each has its own.
        every: also where other versions and options of Megatron's put it.

    Raises:
        FormatError: the model is of no kind that is known.
    """
    kind, sizes = config.get("model_type"), Sizes.of(config)
    if kind not in _KINDS:
        raise FormatError(
            f"Models of the type {kind!r} have no names of Megatron's here: expected {', '.join(_KINDS)}."
        )
    outside, inside, layers = _KINDS[kind]
    for name, key, shape in outside(sizes):
        whole = Box((0,) * len(shape), shape)
        yield Place(name, whole, key, whole)
    for i in range(sizes.layers):
        for place in inside(sizes):
            for other in (place, *(_otherwise(place) if every else ())):
                there = other.there
                if stacked:
                    there = Box((i, *there.offsets), (1, *there.sizes))
                middle = "" if stacked else f"{i}."
                yield other._replace(
                    name=f"{layers}{i}.{place.name}", key=f"{LAYERS}{middle}{other.key}", there=there
                )


def is_routed(name: str) -> bool:
    """Whether a tensor of transformers' is of experts, which an optimizer of Megatron's has apart."""
    return ".experts." in name


def is_trained(key: str) -> bool:
    """Whether a tensor of Megatron's is a parameter, which an optimizer has states of."""
    return not key.endswith(_BIAS)


def _otherwise(place: Place) -> Iterator[Place]:
    """Where the same values stand by other versions and options of Megatron."""
    for key in _OLDER.get(place.key, ()):
        yield place._replace(key=key)
    key, start, sizes = place.key, place.there.offsets, place.there.sizes
    if _EXPERTS in key:  # each expert has tensors of its own
        key = key.replace(_EXPERTS, f"{_EXPERTS}{start[0]}.")
        start, sizes = start[1:], sizes[1:]
        yield place._replace(key=key, there=Box(start, sizes))
    if place.half is not None:  # and gate and up, too
        at = start[0] - place.half[0] * place.half[1]
        yield place._replace(key=f"{key}_{'wv'[place.half[0]]}", there=Box((at, *start[1:]), sizes))


def _rows(
    name: str, key: str, parts: Iterable[tuple[int, int, int]], width: int | None, turned: bool = False
) -> Iterator[Place]:
    """Of a tensor and its bias: runs of rows, from where, to where, how many."""
    for start, at, n in parts:
        if width is None:
            yield Place(name, Box((start,), (n,)), key, Box((at,), (n,)))
            continue
        box, there = Box((start, 0), (n, width)), Box((at, 0), (n, width))
        if turned:
            box = Box(box.offsets[::-1], box.sizes[::-1])
        yield Place(name, box, key, there, turned)


def _queries(s: Sizes) -> tuple[list[tuple[int, int, int]], ...]:
    """Rows of queries, keys and values, in matrices of their own and in Megatron's."""
    each = s.heads // s.groups * s.head
    group = each + 2 * s.head
    return (
        [(g * each, g * group, each) for g in range(s.groups)],
        [(g * s.head, g * group + each, s.head) for g in range(s.groups)],
        [(g * s.head, g * group + each + s.head, s.head) for g in range(s.groups)],
    )


def _gated(s: Sizes) -> Iterator[Place]:
    """A layer of Llama's kind."""
    yield from _attention(s)
    yield from _mlp(s)


def _attention(s: Sizes) -> Iterator[Place]:
    """What a layer has but for the MLP."""
    for word, parts in zip("qkv", _queries(s), strict=True):
        yield from _rows(f"self_attn.{word}_proj.weight", f"{_QKV}weight", parts, s.hidden)
        yield from _rows(f"self_attn.{word}_proj.bias", f"{_QKV}bias", parts, None)
    for word in "qk":
        key = f"self_attention.{word}_layernorm.weight"
        yield from _rows(f"self_attn.{word}_norm.weight", key, [(0, 0, s.head)], None)
    rows = [(0, 0, s.hidden)]
    yield from _rows("self_attn.o_proj.weight", f"{_PROJ}weight", rows, s.heads * s.head)
    yield from _rows("self_attn.o_proj.bias", f"{_PROJ}bias", rows, None)
    yield from _rows("input_layernorm.weight", f"{_QKV}layer_norm_weight", rows, None)
    yield from _rows("post_attention_layernorm.weight", f"{_FC1}layer_norm_weight", rows, None)


def _mlp(s: Sizes, name: str = "mlp.", inner: int = 0, start: str = "mlp.") -> Iterator[Place]:
    """Gate, up and down."""
    inner = inner or s.inner
    for i, word in enumerate(("gate", "up")):
        parts = [(0, i * inner, inner)]
        for kind, width in (("weight", s.hidden), ("bias", None)):
            for place in _rows(f"{name}{word}_proj.{kind}", f"{start}linear_fc1.{kind}", parts, width):
                yield place._replace(half=(i, inner))
    rows = [(0, 0, s.hidden)]
    yield from _rows(f"{name}down_proj.weight", f"{start}linear_fc2.weight", rows, inner)
    yield from _rows(f"{name}down_proj.bias", f"{start}linear_fc2.bias", rows, None)


def _latent(s: Sizes) -> Iterator[Place]:
    """What a layer has but for the MLP, where queries, keys and values come from smaller spaces."""
    queries, keys, without, turned, value = s.latent
    each = s.heads * (without + turned)
    for name, key, n, width in (
        ("q_proj", "linear_q_proj", each, s.hidden),
        ("q_a_proj", "linear_q_down_proj", queries, s.hidden),
        ("q_b_proj", "linear_q_up_proj", each, queries),
        ("kv_a_proj_with_mqa", "linear_kv_down_proj", keys + turned, s.hidden),
        ("kv_b_proj", "linear_kv_up_proj", s.heads * (without + value), keys),
        ("o_proj", "linear_proj", s.hidden, s.heads * value),
    ):
        yield from _rows(f"self_attn.{name}.weight", f"self_attention.{key}.weight", [(0, 0, n)], width)
        yield from _rows(f"self_attn.{name}.bias", f"self_attention.{key}.bias", [(0, 0, n)], None)
    for word, n in (("q", queries), ("kv", keys)):
        key = f"self_attention.linear_{word}_up_proj.layer_norm_weight"
        yield from _rows(f"self_attn.{word}_a_layernorm.weight", key, [(0, 0, n)], None)
    rows = [(0, 0, s.hidden)]
    yield from _rows("input_layernorm.weight", "input_layernorm.weight", rows, None)
    yield from _rows("post_attention_layernorm.weight", f"{_FC1}layer_norm_weight", rows, None)


def _routed(
    s: Sizes, mixtral: bool = False, attention: Any = _attention, shared: str = "mlp.shared_expert."
) -> Iterator[Place]:
    """A layer with experts, or one without among such."""
    for place in (*attention(s), *_mlp(s)):
        norm = place.name.startswith("post_attention_layernorm.")
        yield place._replace(key=f"pre_mlp_layernorm.{place.name.rpartition('.')[2]}") if norm else place
    block = "block_sparse_moe." if mixtral and s.apart else "mlp."
    yield from _rows(f"{block}gate.weight", "mlp.router.weight", [(0, 0, s.experts)], s.hidden)
    yield from _rows(f"{block}gate.e_score_correction_bias", f"mlp{_BIAS}", [(0, 0, s.experts)], None)
    if s.shared:
        yield from _rows("mlp.shared_expert_gate.weight", f"{_SHARED}gate_weight", [(0, 0, 1)], s.hidden)
        yield from _mlp(s, shared, s.shared, _SHARED)
    for e in range(s.experts):
        for place in _mlp(s, "", s.routed, _EXPERTS):
            word = place.name.removesuffix(".weight")
            if word == place.name:  # a bias, which transformers' experts have not
                continue
            there = Box((e, *place.there.offsets), (1, *place.there.sizes))
            if s.apart:
                name, box = f"{block}experts.{e}.{_WORDS[word] if mixtral else word}.weight", place.box
            else:
                name = f"{block}experts.{'gate_up_proj' if place.half else 'down_proj'}"
                box = there
            yield place._replace(name=name, box=box, there=there)


def _gpt2(s: Sizes) -> Iterator[Place]:
    """A layer of GPT-2, whose matrices have inputs as rows."""
    size = s.heads * s.head
    for i, parts in enumerate(_queries(s)):
        parts = [(start + i * size, at, n) for start, at, n in parts]
        yield from _rows("attn.c_attn.weight", f"{_QKV}weight", parts, s.hidden, turned=True)
        yield from _rows("attn.c_attn.bias", f"{_QKV}bias", parts, None)
    rows, inner = [(0, 0, s.hidden)], [(0, 0, s.inner)]
    for kind in ("weight", "bias"):
        yield from _rows(f"ln_1.{kind}", f"{_QKV}layer_norm_{kind}", rows, None)
        yield from _rows(f"ln_2.{kind}", f"{_FC1}layer_norm_{kind}", rows, None)
    for name, key, parts, width in (
        ("attn.c_proj", _PROJ, rows, size),
        ("mlp.c_fc", _FC1, inner, s.hidden),
        ("mlp.c_proj", _FC2, rows, s.inner),
    ):
        yield from _rows(f"{name}.weight", f"{key}weight", parts, width, turned=True)
        yield from _rows(f"{name}.bias", f"{key}bias", parts, None)


def _around(embedding: str, norm: str, position: str = "") -> Any:
    """What a model has outside of layers: name, key, shape."""

    def tensors(s: Sizes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield f"{embedding}.weight", "embedding.word_embeddings.weight", (s.words, s.hidden)
        yield "lm_head.weight", "output_layer.weight", (s.words, s.hidden)
        if position:
            yield f"{position}.weight", "embedding.position_embeddings.weight", (s.positions, s.hidden)
        for kind in ("weight", "bias"):
            yield f"{norm}.{kind}", f"decoder.final_layernorm.{kind}", (s.hidden,)

    return tensors


_QKV, _PROJ = "self_attention.linear_qkv.", "self_attention.linear_proj."
_FC1, _FC2 = "mlp.linear_fc1.", "mlp.linear_fc2."
# norms that are modules of their own there, or are called so
_OLDER = {
    f"{linear}layer_norm_{kind}": (f"{norm}.{kind}",)
    for linear, norm in ((_QKV, "input_layernorm"), (_FC1, "pre_mlp_layernorm"))
    for kind in ("weight", "bias")
}
_OLDER |= {f"pre_mlp_layernorm.{kind}": (f"{_FC1}layer_norm_{kind}",) for kind in ("weight", "bias")}
_OLDER |= {
    f"self_attention.linear_{word}_up_proj.layer_norm_weight": (f"self_attention.{word}_layernorm.weight",)
    for word in ("q", "kv")
}
_OLDER["input_layernorm.weight"] = (f"{_QKV}layer_norm_weight",)
_EXPERTS, _SHARED = "mlp.experts.experts.", "mlp.shared_experts."
_BIAS = ".router.expert_bias"  # which a rule moves, no gradient
_WORDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # as Mixtral called them
_OUTSIDE = _around("model.embed_tokens", "model.norm")
_LLAMA, _MOE = (_OUTSIDE, _gated, "model.layers."), (_OUTSIDE, _routed, "model.layers.")
_MIXTRAL = (_OUTSIDE, partial(_routed, mixtral=True), "model.layers.")
_BIASED = partial(_routed, shared="mlp.shared_experts.")
_KINDS: dict[str, tuple[Any, Any, str]] = {
    "gpt2": (_around("transformer.wte", "transformer.ln_f", "transformer.wpe"), _gpt2, "transformer.h."),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _MOE),
    "mixtral": _MIXTRAL,
    "glm4_moe": (_OUTSIDE, _BIASED, "model.layers."),
    "deepseek_v3": (_OUTSIDE, partial(_BIASED, attention=_latent), "model.layers."),
}
