"""The verifier's config: every Hugging Face spelling is read here and nowhere else.

The model file, the converter and the engine see `VerifierConfig`. Field names follow the published
`GlmMoeDsaConfig`; see each field for its unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from glmspec.core.fields import Fields
from glmspec.models.configs.unread import refuse_unread
from glmspec.network.trt_limits import MAX_TOPK

ARCHITECTURE = "GlmMoeDsaForCausalLM"
LATENT_NORM_EPS = 1e-6  # q_a, kv_a and the indexer's k_norm: the published class does not use rms_norm_eps there


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """A GLM-5.3-architecture verifier. Sizes are element counts unless said otherwise."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # dense MLP
    moe_intermediate_size: int  # one routed expert
    num_hidden_layers: int  # without the MTP module
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    mlp_layer_types: tuple[str, ...]  # "dense" or "sparse", one a layer
    index_topk: int  # context rows each token attends to
    index_n_heads: int
    index_head_dim: int
    indexer_types: tuple[str, ...]  # "full" or "shared", one a layer
    rope_theta: float
    rope_interleave: bool
    indexer_rope_interleave: bool
    rms_norm_eps: float
    max_position_embeddings: int
    num_nextn_predict_layers: int  # MTP modules in the checkpoint
    index_share_for_mtp_iteration: bool  # made for reusing the first run's top-k in the later ones of a chain
    eos_token_ids: tuple[int, ...]

    @property
    def latent_dim(self) -> int:
        """Columns of a latent cache row: the rotary key and the compressed K/V."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Columns of one head's query and key before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Attention scale, on the un-absorbed head size."""
        return self.qk_head_dim**-0.5

    def deeper(self, layers: int) -> VerifierConfig:
        """With as many layers more, of an MTP module's kind: experts and an indexer of their own."""
        return replace(
            self,
            num_hidden_layers=self.num_hidden_layers + layers,
            mlp_layer_types=(*self.mlp_layer_types, *["sparse"] * layers),
            indexer_types=(*self.indexer_types, *["full"] * layers),
        )

    @classmethod
    def from_hf(cls, values: dict, source: str) -> VerifierConfig:
        """Read a Hugging Face config.json. Raises `ConfigError` naming the field."""
        fields = Fields(values, source)
        _require_architecture(fields)
        layers = fields.integer("num_hidden_layers")
        sizes = [name for name, kind in cls.__annotations__.items() if kind == "int"]
        sizes.remove("num_nextn_predict_layers")  # which alone may be absent
        config = cls(
            **{name: fields.integer(name) for name in sizes},
            norm_topk_prob=fields.boolean("norm_topk_prob"),
            routed_scaling_factor=fields.number("routed_scaling_factor"),
            mlp_layer_types=_mlp_layer_types(fields, layers),
            indexer_types=_indexer_types(fields, layers),
            rope_theta=rope_theta(fields),
            # Configs saved by the published class drop these two; the class always interleaves.
            rope_interleave=fields.boolean("rope_interleave", True),
            indexer_rope_interleave=fields.boolean("indexer_rope_interleave", True),
            rms_norm_eps=fields.number("rms_norm_eps"),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
            index_share_for_mtp_iteration=fields.boolean("index_share_for_mtp_iteration", False),
            eos_token_ids=end_token_ids(fields),
        )
        _refuse_what_the_network_lacks(fields)
        config._check(fields)
        refuse_unread(fields)
        return config

    def _check(self, fields: Fields) -> None:
        if self.qk_rope_head_dim % 2:
            fields.fail("qk_rope_head_dim", "an even number (rotary pairs)")
        if self.index_head_dim < self.qk_rope_head_dim:
            fields.fail("index_head_dim", f"at least qk_rope_head_dim ({self.qk_rope_head_dim})")
        if self.num_experts_per_tok > min(self.n_routed_experts, MAX_TOPK):
            experts = f"at most n_routed_experts ({self.n_routed_experts}), and {MAX_TOPK}, TensorRT's most"
            fields.fail("num_experts_per_tok", experts)
        if self.indexer_types[0] != "full":
            fields.fail("indexer_types", 'a first entry of "full": a shared layer reuses an earlier layer\'s top-k')
        for token in self.eos_token_ids:
            if token >= self.vocab_size:
                fields.fail("eos_token_id", f"ids below vocab_size ({self.vocab_size})")


def _require_architecture(fields: Fields) -> None:
    """Refuse other architectures by name, `glm5_next` (GLM-5.3-Flash) among them."""
    architectures = fields.get("architectures")
    if architectures != [ARCHITECTURE]:
        fields.fail("architectures", f"[{ARCHITECTURE!r}] (glmspec serves no other verifier)")
    if fields.get("model_type") != "glm_moe_dsa":
        fields.fail("model_type", "'glm_moe_dsa'")


def _mlp_layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    dense = fields.integer("first_k_dense_replace", None, least=0)
    from_count = None if dense is None else ("dense",) * min(dense, layers) + ("sparse",) * max(layers - dense, 0)
    if not fields.has("mlp_layer_types"):
        if from_count is None:
            fields.fail("mlp_layer_types", "this list or first_k_dense_replace")
        return from_count
    listed = fields.choices("mlp_layer_types", ("dense", "sparse"), layers)
    if from_count is not None and listed != from_count:
        fields.fail("mlp_layer_types", f"agreement with first_k_dense_replace ({dense})")
    return listed


def _indexer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """`indexer_types` itself, or its two shorthands; every layer is full when none is given."""
    shorthands = {"index_topk_pattern": _pattern(fields, layers), "index_topk_freq": _every(fields, layers)}
    given = {key: types for key, types in shorthands.items() if types is not None}
    if fields.has("indexer_types"):
        given = {"indexer_types": fields.choices("indexer_types", ("full", "shared"), layers)} | given
    for key, types in given.items():
        if types != next(iter(given.values())):
            fields.fail(next(iter(given)), f"agreement with {key} (index_skip_topk_offset with index_topk_freq)")
    return next(iter(given.values()), ("full",) * layers)


def _pattern(fields: Fields, layers: int) -> tuple[str, ...] | None:
    """Letters, or the types themselves."""
    pattern = fields.get("index_topk_pattern")
    if isinstance(pattern, list):
        return fields.choices("index_topk_pattern", ("full", "shared"), layers)
    if pattern is None:
        return None
    if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - {"F", "S"}:
        fields.fail("index_topk_pattern", f"{layers} letters, each F or S")
    return tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)


def _every(fields: Fields, layers: int) -> tuple[str, ...] | None:
    """Every so many layers a full one, from an offset on. 1 is the published default, which the published class lets
    any list overrule. An offset has no default: libraries differ."""
    every = fields.integer("index_topk_freq", 1)
    listed = any(fields.has(key) for key in ("index_topk_pattern", "indexer_types"))
    offset = fields.integer("index_skip_topk_offset", *([None] if every == 1 or listed else []), least=0)
    if every == 1 or offset is None:
        return None
    return tuple("full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers))


def rope_theta(fields: Fields) -> float:
    """The rotary base, from `rope_parameters` or, in older configs, the top level or `rope_scaling`. All places, and
    all kinds of layers where `rope_parameters` lists them, must say the same, and no other embedding than the default
    over all rotary columns."""
    ropes = [*_ropes(fields, "rope_parameters"), *_ropes(fields, "rope_scaling")]
    for rope in ropes:
        rope.choice("rope_type", ("default",), "default")
        rope.choice("type", ("default",), "default")
    for place in (*ropes, fields):
        place.choice("partial_rotary_factor", (1.0, 1), 1.0)
    bases = [(place, place.number("rope_theta")) for place in (*ropes, fields) if place.has("rope_theta")]
    if not bases:
        fields.fail("rope_parameters", "an object with rope_theta, or a rope_theta of its own")
    first, theta = bases[0]
    for place, other in bases:
        if other != theta:
            place.fail("rope_theta", f"agreement with that of {first.source} ({theta})")
    return theta


def _ropes(fields: Fields, key: str) -> list[Fields]:
    """The object under `key`, or those in it, one for every kind of layers."""
    if not fields.has(key):
        return []
    section = fields.section(key)
    if section.values and all(isinstance(value, dict) for value in section.values.values()):
        return [section.section(kind) for kind in section.values]
    return [section]


def end_token_ids(fields: Fields) -> tuple[int, ...]:
    """`eos_token_id`, one id or a list of them; none when the key is absent."""
    if not fields.has("eos_token_id"):  # then generation_config.json or the tokenizer may name one
        return ()
    if isinstance(fields.get("eos_token_id"), int):
        return (fields.integer("eos_token_id", least=0),)
    return fields.integers("eos_token_id")


# Features that the network has, whatever a config says; the published default first.
_IMPLIED: dict[str, tuple] = {
    "attention_bias": (False,),
    "is_causal": (True,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32", "fp32"),
    "n_group": (1,),
    "scoring_func": ("sigmoid",),
    "tie_word_embeddings": (False,),
    "topk_group": (1,),
    "topk_method": ("noaux_tc",),
}


def _refuse_what_the_network_lacks(fields: Fields) -> None:
    """Values the published config class allows and the GLM-5.3 family never uses, and names for one size twice."""
    fields.choice("hidden_act", ("silu",))
    for key, legal in _IMPLIED.items():
        fields.choice(key, legal, legal[0])
    heads, experts = fields.integer("num_attention_heads"), fields.integer("n_routed_experts")
    if fields.integer("num_key_value_heads", heads) != heads:
        fields.fail("num_key_value_heads", f"num_attention_heads ({heads}): latent attention has a key a head")
    for key in ("num_experts", "num_local_experts"):
        if fields.integer(key, experts) != experts:
            fields.fail(key, f"n_routed_experts ({experts})")
    kinds, types = ("indexed_attention", "full_attention", "deepseek_sparse_attention"), fields.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind not in kinds for kind in types)):
        fields.fail("layer_types", "'indexed_attention' in every layer")
