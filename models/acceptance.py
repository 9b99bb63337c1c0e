"""Acceptance: small networks on the verifier's logits, so that only counts and tokens leave the GPU.

    Greedy     the verifier's greedy tokens -> accepted drafts
    Sampled    logits -> adjust -> probs -> a token drawn for every row -> accepted drafts. Temperature 0 is one case.
               A draft that was not drawn itself (its q is one-hot) is accepted with the chance it must, p, and the
               answer is the one that plain decoding draws
    Rejection  the same probs p against the probs q that drafts were drawn from -> accepted drafts
    Logprobs   the verifier's own log-probabilities of chosen tokens, and its best tokens

Vocabulary-wide tensors never leave the GPU: logits and the drafter's q are bound from one network to the next. A step
runs the cheapest of these networks that will do. They are no part of the verifier's network, so that it stays the same
for every way of sampling, and a step of greedy requests pays for no softmax. Acceptance has no weights and runs on one
rank.

Legend: R rows with logits, V vocabulary, B blocks, Q rows of the largest block, Z rows of q, K its
columns (or alternatives a row).
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.network_model import NetworkModel
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.limits import MAX_LOGPROBS, EngineLimits
from glmspec.plugins import accept, adjust, reject, sample


@dataclass(frozen=True)
class DraftProbs:
    """How a drafter gives q. columns: of a row. candidates: they name their tokens (else they are the vocabulary)."""

    columns: int
    candidates: bool


class LogitsNetwork(NetworkModel):
    """A network on logits."""

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config
        self.path = self.name


class Greedy(LogitsNetwork):
    """Drafts against the verifier's greedy tokens."""

    name = "accept"

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's `greedy_ids`, and the blocks."""
        return [TensorSpec("greedy_ids", "int32", ("R",)), *_block_specs(limits)]

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks `accepted` and `tokens`."""
        _accept(net, net.inputs["greedy_ids"])


class Sampled(LogitsNetwork):
    """Drafts against tokens drawn from the probs of their rows."""

    name = "sample"

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's `logits`, how they are sampled, and the blocks."""
        return [*_probs_specs(self.config, net_config), TensorSpec("uniform", "float32", ("R",)), *_block_specs(limits)]

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks `accepted` and `tokens`."""
        _accept(net, sample.native(**_probs(net), u_R=net.inputs["uniform"]))


class Rejection(LogitsNetwork):
    """Drafts drawn from q against the probs of their rows."""

    def __init__(self, config: VerifierConfig, q: DraftProbs) -> None:
        self.name = rejecting(q)
        self.q = q
        super().__init__(config)

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's `logits`, how they are sampled, the drafter's `q`, and the blocks."""
        columns = self.q.columns
        ids = [TensorSpec("q_ids", "int32", ("Z", columns))] if self.q.candidates else []
        return [
            *_probs_specs(self.config, net_config),
            TensorSpec("q", "float32", ("Z", columns)),
            *ids,
            TensorSpec("q_rows", "int32", ("R",)),  # of a row's draft
            TensorSpec("uniform", "float32", ("R",)),
            TensorSpec("last_uniform", "float32", ("B",)),
            TensorSpec("verify_blocks", "int32", ("B",)),  # 1: block verification, 0: standard
            *_block_specs(limits),
        ]

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks `accepted` and `tokens`."""
        x = net.inputs
        accepted_B, tokens_BQ = reject.native(
            **_probs(net),
            draft_R=x["draft_ids"],
            q_row_R=x["q_rows"],
            row_BQ=x["block_rows"],
            count_B=x["draft_counts"],
            accept_R=x["uniform"],
            last_B=x["last_uniform"],
            block_B=x["verify_blocks"],
            q_ZK=x["q"],
            q_ids_ZK=x.get("q_ids"),
        )
        _mark(net, accepted_B, tokens_BQ)


class Logprobs(LogitsNetwork):
    """Log-probabilities before any adjustment."""

    name = "logprobs"

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's `logits`, and the tokens asked for."""
        return [_logits_spec(self.config, net_config), TensorSpec("token_ids", "int32", ("R",))]

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks `logprobs`, and the best tokens with theirs, `top_ids` and `top_logprobs`, largest first."""
        alternatives = min(MAX_LOGPROBS, self.config.vocab_size)
        logits_RV = ops.cast(net.inputs["logits"], "float32")
        shifted_RV = logits_RV - ops.reduce(logits_RV, "MAX", 1)
        log_sum_R1 = ops.unary(ops.reduce(ops.unary(shifted_RV, "EXP"), "SUM", 1), "LOG")
        asked_R1 = ops.gather_elements(shifted_RV, ops.reshape(net.inputs["token_ids"], (0, 1)), 1) - log_sum_R1
        best_RK, ids_RK = ops.topk(shifted_RV, alternatives, 1)
        net.output(ops.reshape(asked_R1, (-1,)), TensorSpec("logprobs", "float32", ("R",)))
        net.output(best_RK - log_sum_R1, TensorSpec("top_logprobs", "float32", ("R", alternatives)))
        net.output(ids_RK, TensorSpec("top_ids", "int32", ("R", alternatives)))


# The networks of every deployment.
NETWORKS: dict[str, type[LogitsNetwork]] = {network.name: network for network in (Greedy, Sampled, Logprobs)}


def rejecting(q: DraftProbs) -> str:
    """Name of the network that rejects drafts of such probs."""
    return f"reject-{q.columns}" if q.candidates else "reject"


def acceptance_of(config: VerifierConfig, name: str, q: DraftProbs | None) -> LogitsNetwork:
    """The network of this name. q: of one that rejects."""
    return NETWORKS[name](config) if q is None else Rejection(config, q)


def _logits_spec(config: VerifierConfig, net_config: NetworkConfig) -> TensorSpec:
    return TensorSpec("logits", net_config.compute, ("R", config.vocab_size))


def _probs_specs(config: VerifierConfig, net_config: NetworkConfig) -> list[TensorSpec]:
    """The inputs that a row's probs are computed from."""
    return [
        _logits_spec(config, net_config),
        TensorSpec("adjust_places", "int32", ("E", 2)),  # row and token
        *(TensorSpec(f"adjust_{name}", "float32", ("E",)) for name in ("before", "factor", "after")),
        TensorSpec("temperature", "float32", ("R",)),
        TensorSpec("top_k", "int32", ("R",)),
        TensorSpec("top_p", "float32", ("R",)),
        TensorSpec("min_p", "float32", ("R",)),
    ]


def _block_specs(limits: EngineLimits) -> list[TensorSpec]:
    """The inputs that say which rows are a block's, and its drafts."""
    return [
        TensorSpec("draft_ids", "int32", ("R",)),  # the draft after each row, if one follows
        TensorSpec("block_rows", "int32", ("B", limits.block_rows)),  # the anchor's row and its drafts'
        TensorSpec("draft_counts", "int32", ("B",)),
    ]


def _probs(net: Network) -> dict[str, Tensor]:
    """Adjusted logits and four settings, from which `sample` and `reject` compute probs, by their arguments' names."""
    x = net.inputs
    logits_RV = adjust.native(
        x["logits"], x["adjust_places"], x["adjust_before"], x["adjust_factor"], x["adjust_after"]
    )
    return {"logits_RV": logits_RV} | {f"{name}_R": x[name] for name in ("temperature", "top_k", "top_p", "min_p")}


def _accept(net: Network, tokens_R: Tensor) -> None:
    """Accepts the drafts that are the verifier's tokens."""
    x = net.inputs
    _mark(net, *accept.native(tokens_R, x["draft_ids"], x["block_rows"], x["draft_counts"]))


def _mark(net: Network, accepted_B: Tensor, tokens_BQ: Tensor) -> None:
    net.output(accepted_B, TensorSpec("accepted", "int32", ("B",)))
    net.output(tokens_BQ, TensorSpec("tokens", "int32", ("B", tokens_BQ.shape[1])))
