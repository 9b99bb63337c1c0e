"""Some layers of a verifier as a network: groups of layers compile faster, one after the other, than the whole.

The first group holds the embedding, the last one the head; in between the residual stream and, where the next layer
reuses them, the rows attended to go from group to group.

Legend: N tokens of the step, R rows whose logits are asked for, D hidden, K rows attended to.
"""

from __future__ import annotations

from collections.abc import Iterator

from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.layers.basic import EXPERT_START, LEGAL_BIAS, VOCABULARY_START
from glmspec.models.layers.mla import SelectedRows
from glmspec.models.verifier import Verifier, index_cache, latent_cache, step_of
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import CACHE, TensorSpec
from glmspec.network.graph import Network
from glmspec.network.limits import EngineLimits
from glmspec.network.module import Weight

STREAM, ROWS, VISIBLE = "group.stream", "group.rows", "group.visible"


class LayerGroup(Verifier):
    """Layers `span` of a verifier, under the whole network's names. rows: K of its top-k."""

    def __init__(
        self,
        config: VerifierConfig,
        taps: tuple[int, ...],
        span: range,
        rows: int,
        *,
        hidden: bool = False,
        illegal: IllegalIds = ALL_LEGAL,
    ) -> None:
        super().__init__(config, taps, hidden=hidden, illegal=illegal)
        self.span, self.rows = span, rows
        self.first, self.last = span.start == 0, span.stop == config.num_hidden_layers

    def weights(self) -> Iterator[Weight]:
        """Of these layers, and of the embedding or the head where they are in it."""
        if self.first:
            yield from self.model.embed_tokens.weights()
        for index in self.span:
            yield from self.model.layers[index].weights()
        if self.last:
            yield from self.model.norm.weights()
            yield from self.lm_head.weights()

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's inputs that these layers read, and the tensors that come from the group before."""
        caches = {name(index) for index in self.span for name in (latent_cache, index_cache)}
        unused = set() if self.first else {"token_ids", VOCABULARY_START}
        unused |= set() if self.last else {"logit_rows", LEGAL_BIAS}
        if not any(self.config.indexer_types[index] == "full" for index in self.span):
            unused |= {"segment_rows", "row_slot", "page_table"}
        if not any(self.config.mlp_layer_types[index] == "sparse" for index in self.span):
            unused.add(EXPERT_START)
        specs = [
            spec
            for spec in super().input_specs(limits, net_config)
            if spec.name not in unused and (spec.role != CACHE or spec.name in caches)
        ]
        return specs + ([] if self.first else self._handed_on(net_config, self.span.start))

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks the stream and rows, or the verifier's own outputs, as outputs."""
        inputs, step = net.inputs, step_of(net, self.config, limits)
        selected = SelectedRows(inputs[ROWS], inputs[VISIBLE]) if ROWS in inputs else None
        if self.first:
            x_ND = self.model.embed_tokens(inputs["token_ids"])
            self.tap(0, x_ND)
        else:
            x_ND = inputs[STREAM]
        for index in self.span:
            x_ND, selected = self.model.layers[index](x_ND, step, selected)
            self.tap(index + 1, x_ND)
        if self.last:
            self.head(x_ND)
            return
        # A tap may be the same tensor, and a tensor has one name.
        tensors = [ops.identity(x_ND), *((selected.rows_NK, selected.visible_NK) if selected else ())]
        for spec, tensor in zip(self._handed_on(net.config, self.span.stop), tensors, strict=False):
            net.output(tensor, spec)

    def _handed_on(self, net_config: NetworkConfig, layer: int) -> list[TensorSpec]:
        """The tensors that a group's first layer takes from the group before: the stream, and the rows if the layer
        reuses them."""
        specs = [TensorSpec(STREAM, net_config.compute, ("N", self.config.hidden_size))]
        if self.config.indexer_types[layer] == "shared":
            specs += [TensorSpec(ROWS, "int32", ("N", self.rows)), TensorSpec(VISIBLE, "int32", ("N", self.rows))]
        return specs
