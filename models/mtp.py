"""The MTP module (multi-token prediction): the verifier's own drafter, one decoder layer beyond its last.

    x_i = eh_proj([enorm(embed(t_{i+1})) ; hnorm(h_i)]) -> decoder layer -> shared_head.norm -> head: drafts t_{i+2}

h_i is the verifier's hidden state after its final norm, or, for the next draft of a chain, this module's own after
`shared_head.norm`. Row i stands at position i in caches of its own. Embedding and head are the verifier's.

Either source is bound whole, and the network takes its rows: the verifier's `hidden` for the first run of a chain, the
`draft_hidden` of the run before for those after it.

This is a network beside the verifier's, of the verifier's own decoder layer. Its caches are named as those of layer L
would be, its weights as in the checkpoint, which is the verifier's: one recipe, one division among ranks, one hash.
The verifier gives `hidden` only when asked, so its network is the same without the module.

A draft is a run. Which row goes on from which is an input (`hidden_rows`), so states and drafts go from output to
input on the device. Later runs leave rows in the module's caches that know drafts; the next step's first run writes
over every one of them that anything will read. `index_share_for_mtp_iteration` would let later runs reuse the first
one's rows of context, in a second network without an indexer: that is not done, and `engine` says so.

Legend: N tokens of the step, H rows of the source, R rows whose logits are asked for, D hidden, V vocabulary.
"""

from __future__ import annotations

from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.dflash import TEMPERATURE, UNIFORM
from glmspec.models.layers.basic import Linear, RMSNorm, VocabularyEmbedding, legal_logits, legal_specs
from glmspec.models.layers.mla import Step
from glmspec.models.network_model import NetworkModel
from glmspec.models.verifier import DecoderSublayers, cache_specs, hidden_spec, step_of, step_specs
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.limits import EngineLimits
from glmspec.network.module import Module
from glmspec.plugins import argmax, draft_probs, draw, margin


class SharedHead(Module):
    """The module's own part of its head: the norm before it."""

    def __init__(self, config: VerifierConfig) -> None:
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(DecoderSublayers):
    """A decoder layer over the next token's embedding and the hidden state before it."""

    def __init__(self, config: VerifierConfig, index: int) -> None:
        super().__init__(config.deeper(1 + index - config.num_hidden_layers), index)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)
        self.named(f"model.layers.{index}")

    def forward(self, embedded_ND: Tensor, hidden_ND: Tensor, step: Step) -> Tensor:
        """The normed hidden state, [N, D]."""
        x_ND = self.eh_proj(ops.concat([self.enorm(embedded_ND), self.hnorm(hidden_ND)], 1))
        x_ND, _ = self.sublayers(x_ND, step, None)
        return self.shared_head.norm(x_ND)


class Mtp(NetworkModel):
    """The module as a network. Its weights have the checkpoint's names.

    sampled: drafts are drawn, from the probs `q` that are one more output; else they are the best. illegal: ids that
    are never drafted.
    """

    name = path = "mtp"

    def __init__(self, config: VerifierConfig, *, sampled: bool = False, illegal: IllegalIds = ALL_LEGAL) -> None:
        self.config, self.sampled, self.illegal = config, sampled, illegal
        self.index = config.num_hidden_layers
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size)
        self.layer = MtpLayer(config, self.index)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.embed_tokens.named("model.embed_tokens")
        self.lm_head.named("lm_head")

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """Step inputs, tables and caches."""
        return [
            *step_specs(self.config, limits, net_config),
            *legal_specs(self.config.vocab_size, self.illegal, net_config),
            hidden_spec(self.config, net_config.compute, "H"),
            TensorSpec("hidden_rows", "int32", ("N",)),  # the row of `hidden` that each row goes on from
            *(TensorSpec(name, "float32", ("R",)) for name in (TEMPERATURE, UNIFORM) if self.sampled),
            *cache_specs(self.config.deeper(1), self.index, limits, net_config),
        ]

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks `logits`, `draft_ids`, `margin` (of the best logit over the second best), `draft_hidden` and, where
        drafts are drawn, `q` as outputs."""
        x, config, step = net.inputs, self.config, step_of(net, self.config, limits)
        hidden_ND = ops.gather(x["hidden"], x["hidden_rows"])
        hidden_ND = self.layer(self.embed_tokens(x["token_ids"]), hidden_ND, step)
        logits_RV = legal_logits(self.lm_head(ops.gather(hidden_ND, x["logit_rows"])), config.vocab_size)
        net.output(logits_RV, TensorSpec("logits", net.compute, ("R", config.vocab_size)))
        net.output(self._draft(logits_RV, x), TensorSpec("draft_ids", "int32", ("R",)))
        net.output(margin.native(logits_RV), TensorSpec("margin", "float32", ("R",)))
        # Not `hidden`, which is an input: tensors are bound by name.
        net.output(hidden_ND, TensorSpec("draft_hidden", net.compute, ("N", config.hidden_size)))

    def _draft(self, logits_RV: Tensor, x: dict[str, Tensor]) -> Tensor:
        """int32 [R]."""
        best_R = argmax.native(logits_RV)
        if not self.sampled:
            return best_R
        q_RV = draft_probs.native(logits_RV, best_R, x[TEMPERATURE])
        logits_RV.net.output(q_RV, TensorSpec("q", "float32", ("R", self.config.vocab_size)))
        return draw.native(q_RV, x[UNIFORM])
