"""The formats in which drafters are published, read as one.

| format | layers' keys | drafting keys | a tap |
|---|---|---|---|
| speculators | `transformer_layer_config` | top level | `aux_hidden_state_layer_ids`: k is the stream after k layers |
| z-lab | top level | `dflash_config`, some at the top level | `target_layer_ids`: k - 1, the output of layer k - 1 |
| DeepSpec | top level | top level | the same, -1 for the embedding |

A key that is at the top level and in `dflash_config` must say the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.core.fields import Fields

WINDOW_ANCHORED = "anchored"  # every row of the block at anchor p sees [p - W, p): how speculators trains
WINDOW_RELATIVE = "relative"  # row at position q sees |q - k| < W: z-lab (and vLLM for every format)

SPECULATORS = {"DSparkDraftModel": "dspark", "DFlash2DraftModel": "dflash2", "DFlashDraftModel": "dflash"}
ARCHITECTURES = SPECULATORS | {"Qwen3DSparkModel": "dspark"}
_MARKS = ("speculators_model_type", "speculators_config", "transformer_layer_config")


@dataclass(frozen=True)
class Dialect:
    """The places where a drafter's config keeps its keys. top: those of drafting. block: those of the layers. window:
    the convention it is trained with."""

    kind: str
    speculators: bool
    top: Fields
    block: Fields
    window: str

    @classmethod
    def of(cls, values: dict, source: str) -> Dialect:
        """Recognize the format. Raises `ConfigError` for an unknown architecture, and for keys that disagree."""
        speculators = any(values.get(mark) is not None for mark in _MARKS)
        known = SPECULATORS if speculators else ARCHITECTURES
        fields = Fields(values, source)
        names = fields.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
            fields.fail("architectures", f"one of {', '.join(known)}")
        kind, top = known[names[0]], Fields(_merged(fields), source, fields.asked)
        if speculators:
            fields.choice("speculators_model_type", (kind,))
        if kind == "dflash" and top.get("markov_rank"):
            top.fail("markov_rank", "none or 0 of a DFlashDraftModel: with a Markov head it is DSpark")
        block = top.section("transformer_layer_config") if speculators else top
        window = WINDOW_ANCHORED if speculators else WINDOW_RELATIVE
        return cls(kind, speculators, top, block, window)

    @property
    def format(self) -> str:
        """The name of the format in the table above."""
        return "speculators" if self.speculators else "z-lab" if self.top.has("dflash_config") else "DeepSpec"

    @property
    def taps(self) -> tuple[int, ...]:
        """k for every verifier layer k after which the residual stream is read, in rising order."""
        key, least = ("aux_hidden_state_layer_ids", 0) if self.speculators else ("target_layer_ids", -1)
        ids = self.top.integers(key, least=least)
        if list(ids) != sorted(set(ids)):
            self.top.fail(key, "distinct ids in rising order")
        taps = list(ids) if self.speculators else [layer + 1 for layer in ids]
        self.top.choice("eagle_aux_hidden_state_layer_ids", (taps,), taps)  # vLLM's own, counted as speculators does
        return tuple(taps)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The attention of every layer. z-lab and DeepSpec leave them out where no layer slides."""
        kinds, layers = ("sliding_attention", "full_attention"), self.block.integer("num_hidden_layers")
        if not self.speculators and not self.block.has("layer_types"):
            self.block.choice("use_sliding_window", (False,), False)
            return ("full_attention",) * layers
        types = self.block.choices("layer_types", kinds, layers)
        slides, used = "sliding_attention" in types, self.block.boolean("use_sliding_window", True)
        if slides and not used:
            self.block.fail("use_sliding_window", "true or null, because layer_types has sliding_attention")
        self.top.choice("use_swa", (slides,), slides)
        return types

    @property
    def sliding_window_non_causal(self) -> bool:
        """Whether rows of a block see each other both ways on sliding layers. z-lab's always do."""
        if self.speculators:
            return self.top.boolean("sliding_window_non_causal")
        return self.top.boolean("sliding_window_non_causal", self.kind != "dspark")

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the head: the verifier's vocabulary where the format has no other."""
        if self.speculators:
            return self.top.integer("draft_vocab_size")
        return self.top.integer("draft_vocab_size", self.block.integer("vocab_size"))


def _merged(fields: Fields) -> dict:
    """The top level with the keys that `dflash_config` adds."""
    if not fields.has("dflash_config"):
        return fields.values
    nested = fields.section("dflash_config")
    for key, value in nested.values.items():
        if value is not None and fields.values.get(key, value) not in (None, value):
            nested.fail(key, f"agreement with the top level's {fields.values[key]!r}")
    return {
        **nested.values,
        **fields.values,
        **{key: value for key, value in nested.values.items() if value is not None},
    }
