"""The drafter's config, read from a config.json in any format that drafters are published in.

A drafter is a DFlash block (a few Qwen3-style layers over the verifier's tapped features); DFlash2 adds a grouped
dynamic convolution and a candidate selector, DSpark a Markov head and a confidence head.

Contradictions are refused. The token that a row of the block predicts depends on the kind and on `sample_from_anchor`;
a wrong choice only lowers acceptance, silently, so `block_size`, `sample_from_anchor` and `speculative_tokens` must
agree. Fewer drafts than a checkpoint allows (`--num-speculative-tokens`) are a smaller block, as in vLLM, not a cut of
its answers: rows see each other both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from glmspec.core.errors import ConfigError
from glmspec.core.fields import Fields
from glmspec.models.configs.drafter_dialects import Dialect
from glmspec.models.configs.unread import refuse_unread
from glmspec.models.configs.verifier import rope_theta
from glmspec.network.trt_limits import MAX_TOPK

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class MarkovHeadConfig:
    """DSpark: logits of the next draft are biased by the drafts before it. rank: columns of W1 and W2. type: how the
    bias is made, one of MARKOV_HEADS. top_k: a draft is one of so many best logits of its row, and only those are
    biased; None, as it is trained: any token."""

    rank: int
    type: str = "vanilla"
    top_k: int | None = None


@dataclass(frozen=True, kw_only=True)
class ConfidenceHeadConfig:
    """DSpark: per-position acceptance estimate. with_markov: its input is [hidden ; W1[previous]]."""

    with_markov: bool


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """DFlash2: causal convolution along the block. taps: rows it looks at. group: columns sharing a delta."""

    taps: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Selector:
    """DFlash2: drafts are chosen among the `top_k` best logits of a row by a bilinear score of `rank`."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class Scaling:
    """z-lab: the block's embeddings and the logits times a factor, then logits kept within +- cap by a tanh."""

    embedding: float = 1.0
    logits: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A block drafter. Sizes are element counts unless said otherwise."""

    kind: str  # "dflash", "dflash2" or "dspark"
    hidden_size: int  # the verifier's
    vocab_size: int  # the verifier's
    draft_vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]  # "sliding_attention" or "full_attention", one a layer
    sliding_window: int | None  # context rows a sliding layer sees
    sliding_window_non_causal: bool  # sliding layers: rows of the block see each other both ways
    window: str  # WINDOW_ANCHORED or WINDOW_RELATIVE
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    taps: tuple[int, ...]  # k means the residual stream after k verifier layers
    block_size: int
    sample_from_anchor: bool  # the anchor's row predicts a draft of its own
    mask_token_id: int
    scaling: Scaling
    markov: MarkovHeadConfig | None
    confidence: ConfidenceHeadConfig | None
    convolution: Convolution | None
    selector: Selector | None
    mask_embedding: bool = False  # the mask token has a row of its own beside the weights, which no config tells

    @property
    def num_hidden_layers(self) -> int:
        """Drafter layers."""
        return len(self.layer_types)

    @property
    def num_drafts(self) -> int:
        """Most drafts one block proposes: every row, or all but the anchor's."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_draft_row(self) -> int:
        """Row of the block that predicts the first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def dflash2(self) -> tuple[Convolution, Selector]:
        """The parts that a DFlash2 drafter alone has. Raises `ConfigError` for other kinds."""
        if self.convolution is None or self.selector is None:
            raise ConfigError(f"drafter: found kind {self.kind} without convolution or selector, expected dflash2.")
        return self.convolution, self.selector

    @property
    def reduced_vocabulary(self) -> bool:
        """True when drafts come from a vocabulary of the drafter's own."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def from_hf(cls, values: dict, source: str, window: str | None = None) -> DrafterConfig:
        """Read a drafter's config.json. window: another convention than the format's own. Raises `ConfigError`
        naming the field."""
        dialect = Dialect.of(values, source)
        kind, fields, block = dialect.kind, dialect.top, dialect.block
        _refuse_what_the_network_lacks(dialect)
        vocab_size, layer_types = block.integer("vocab_size"), dialect.layer_types
        config = cls(
            kind=kind,
            hidden_size=block.integer("hidden_size"),
            vocab_size=vocab_size,
            intermediate_size=block.integer("intermediate_size"),
            num_attention_heads=block.integer("num_attention_heads"),
            num_key_value_heads=block.integer("num_key_value_heads"),
            head_dim=block.integer("head_dim"),
            max_position_embeddings=block.integer("max_position_embeddings"),
            draft_vocab_size=dialect.draft_vocab_size,
            layer_types=layer_types,
            sliding_window=block.integer("sliding_window") if "sliding_attention" in layer_types else None,
            sliding_window_non_causal=dialect.sliding_window_non_causal,
            window=window or dialect.window,
            rms_norm_eps=block.number("rms_norm_eps"),
            rope_theta=rope_theta(block),
            taps=dialect.taps,
            block_size=fields.integer("block_size", least=2),
            # Absent, the published classes differ: DSpark samples from the anchor, DFlash does not.
            # The agreement with speculative_tokens below keeps this from being a guess.
            sample_from_anchor=fields.boolean("sample_from_anchor", kind == "dspark"),
            mask_token_id=_mask_token_id(fields, vocab_size),
            scaling=_scaling(fields, block),
            markov=_markov(fields) if kind == "dspark" else None,
            confidence=_confidence(fields) if kind == "dspark" else None,
            convolution=_convolution(fields, block) if kind == "dflash2" else None,
            selector=_selector(fields, dialect.draft_vocab_size) if kind == "dflash2" else None,
        )
        config._check(fields, block)
        if dialect.speculators:
            config._check_speculative_tokens(fields)
        elif kind != "dspark" and config.sample_from_anchor:
            fields.fail("sample_from_anchor", "false: z-lab's DFlash and DFlash2 draft from rows 1 and up")
        if block is not fields:  # vLLM's readers find some keys of the layers at the top level too
            fields.asked.update(key for key, value in block.values.items() if fields.values.get(key) == value)
        refuse_unread(fields)
        return config

    def drafting(self, drafts: int) -> DrafterConfig:
        """This drafter with blocks of as many drafts, from 1 to `num_drafts`: fewer rows, which see each other."""
        return replace(self, block_size=drafts if self.sample_from_anchor else 1 + drafts)

    def chosen(self, window: str | None, drafts: int | None, markov_top_k: int | None = None) -> DrafterConfig:
        """This drafter as a user wants it: another window convention, fewer drafts, fewer candidates of a Markov head.
        None: as the checkpoint says. Raises `ConfigError` for a Markov head that cannot."""
        config = self if drafts is None else self.drafting(drafts)
        config = config if window is None else replace(config, window=window)
        return config if markov_top_k is None else replace(config, markov=self._among_best(markov_top_k))

    def _among_best(self, top_k: int) -> MarkovHeadConfig:
        max_k = min(self.draft_vocab_size, MAX_TOPK)
        if self.markov is None or self.markov.type != "vanilla" or not 1 <= top_k <= max_k:
            head = self.markov.type if self.markov else "no"
            raise ConfigError(
                f"--markov-top-k: found {top_k} for a {self.kind} drafter with {head} Markov head, expected 1 to "
                f"{max_k} (of its {self.draft_vocab_size} draft tokens) and a vanilla head. Leave it out."
            )
        return replace(self.markov, top_k=top_k)

    def _check(self, fields: Fields, block: Fields) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            block.fail("num_attention_heads", f"a multiple of num_key_value_heads ({self.num_key_value_heads})")
        if self.head_dim % 2:
            block.fail("head_dim", "an even number (rotary pairs)")
        if self.draft_vocab_size > self.vocab_size:
            fields.fail("draft_vocab_size", f"at most the verifier's vocab_size ({self.vocab_size})")
        if self.convolution and self.convolution.taps > self.block_size:
            fields.fail("conv_kernel_size", f"at most block_size ({self.block_size})")
        if fields.has("target_hidden_size") and fields.integer("target_hidden_size") != self.hidden_size:
            fields.fail("target_hidden_size", f"null or hidden_size ({self.hidden_size})")

    def _check_speculative_tokens(self, fields: Fields) -> None:
        tokens = _speculative_tokens(fields)
        if tokens.integer("speculative_tokens") != self.num_drafts:
            anchored = "true" if self.sample_from_anchor else "false"
            tokens.fail(
                "speculative_tokens",
                f"{self.num_drafts}: what block_size {self.block_size} with sample_from_anchor {anchored} drafts",
            )


# Features that every drafter's network has, whatever a config says; the published default first.
_IMPLIED_BLOCK: dict[str, tuple] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "qk_norm": (True,),
    "use_qk_norm": (True,),
}
_IMPLIED: dict[str, tuple] = {
    "attention_mode": ("gqa", "mha"),
    "conv_kernel_conditioning": ("input",),
    "use_aux_hidden_state": (True,),
}


def _refuse_what_the_network_lacks(dialect: Dialect) -> None:
    """Variants of the published drafters that no tensor shows."""
    fields, block = dialect.top, dialect.block
    for place, implied in ((block, _IMPLIED_BLOCK), (fields, _IMPLIED)):
        for key, legal in implied.items():
            place.choice(key, legal, legal[0])
    fields.choice("projector_type", ("dflash", dialect.kind), "dflash")
    vocab, window = block.integer("vocab_size"), block.get("sliding_window")
    fields.choice("target_vocab_size", (vocab,), vocab)
    fields.choice("swa_window_size", (window,), window)
    for place in (fields, block):  # the verifier's embedding and head serve, tied or not
        place.boolean("tie_word_embeddings", False)


def _mask_token_id(fields: Fields, vocab_size: int) -> int:
    """Never a default: another token in its place lowers acceptance, silently."""
    token = fields.integer("mask_token_id", least=0)
    if token >= vocab_size:
        fields.fail("mask_token_id", f"an id below vocab_size ({vocab_size})")
    return token


def _scaling(fields: Fields, block: Fields) -> Scaling:
    """z-lab's factors, which every format may leave out."""
    neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    for key in neutral:
        if block is not fields and block.get(key) not in (None, neutral[key]):
            block.fail(key, "it at the top level, with what concerns drafting")
    return Scaling(*(fields.number(key) if fields.has(key) else value for key, value in neutral.items()))


def _speculative_tokens(fields: Fields) -> Fields:
    """The proposal method that the config names as its default."""
    section = fields.section("speculators_config")
    default = section.get("default_proposal_method")
    for method in section.get("proposal_methods") or []:
        if isinstance(method, dict) and method.get("proposal_type") == default:
            return section.sections.setdefault(
                default, Fields(method, f"{section.source}: proposal_methods[{default}]")
            )
    section.fail("default_proposal_method", "the proposal_type of one of proposal_methods")


def _markov(fields: Fields) -> MarkovHeadConfig | None:
    rank = fields.integer("markov_rank", least=0)
    if rank == 0:
        return None
    return MarkovHeadConfig(rank=rank, type=fields.choice("markov_head_type", MARKOV_HEADS))


def _confidence(fields: Fields) -> ConfidenceHeadConfig | None:
    if not fields.boolean("enable_confidence_head"):
        return None
    with_markov = fields.boolean("confidence_head_with_markov")
    if with_markov and fields.integer("markov_rank", least=0) == 0:
        fields.fail("confidence_head_with_markov", "false, because markov_rank is 0")
    return ConfidenceHeadConfig(with_markov=with_markov)


def _convolution(fields: Fields, block: Fields) -> Convolution:
    taps, group = fields.integer("conv_kernel_size"), fields.integer("conv_group_size")
    if block.integer("hidden_size") % group:
        fields.fail("conv_group_size", f"a divisor of hidden_size ({block.values['hidden_size']})")
    return Convolution(taps=taps, group=group)


def _selector(fields: Fields, vocab_size: int) -> Selector:
    top_k = fields.integer("selector_top_k")
    if top_k > min(vocab_size, MAX_TOPK):
        fields.fail("selector_top_k", f"at most draft_vocab_size ({vocab_size}), and {MAX_TOPK}, TensorRT's most")
    return Selector(rank=fields.integer("selector_rank"), top_k=top_k)
