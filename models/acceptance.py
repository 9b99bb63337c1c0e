"""What happens to the verifier's logits: small networks beside it, so that only counts and tokens leave the GPU.

    Greedy     the tokens the verifier says -> which drafts stand
    Sampled    logits -> adjust -> law -> a token drawn for every row -> which drafts stand. Temperature 0 is one case.
               A draft that was not drawn itself (its q is one-hot) stands with the chance it must, p, and the answer is
               the very one that plain decoding draws
    Rejection  the same law against the law q that drafts were drawn from
    Logprobs   the verifier's own log-probabilities of chosen tokens, and its best tokens

The logits are the verifier's output, bound as an input here. Acceptance has no weights and runs on one rank.

Legend: R rows with logits, V vocabulary, B blocks, Q most rows of a block, E adjusted logits, Z rows of q, K its
columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.models.configs.verifier import VerifierConfig
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.limits import EngineLimits
from glmspec.network.module import Module
from glmspec.network.trt import Backend
from glmspec.plugins import accept, adjust, reject, sample
from glmspec.plugins.registration import author

MAX_LOGPROBS = 20  # alternatives a request may ask for


@dataclass(frozen=True)
class DraftProbs:
    """How a drafter gives q. columns: of a row. candidates: they name their tokens (else they are the vocabulary)."""

    columns: int
    candidates: bool


class LogitsNetwork(Module):
    """A network on logits: owns the engine's inputs and outputs."""

    name: str

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config
        self.named()

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """Step inputs."""
        raise NotImplementedError

    def forward(self, x: dict[str, Tensor]) -> None:
        """Marks the outputs. x: the inputs."""
        raise NotImplementedError

    def author(self, limits: EngineLimits, net_config: NetworkConfig, backend: Backend) -> Network:
        """The whole network."""
        net = Network(self.name, net_config, backend, author)
        net.declare(self.input_specs(limits, net_config))
        with net.scope(self.name):
            self.forward(net.inputs)
        return net.finish()


class Greedy(LogitsNetwork):
    """Drafts against the verifier's greedy tokens."""

    name = "accept"

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's `greedy_ids`, and the blocks."""
        return [TensorSpec("greedy_ids", "int32", ("R",)), *_block_specs(limits)]

    def forward(self, x: dict[str, Tensor]) -> None:
        """Marks `accepted` and `tokens`."""
        _verdict(*accept.native(x["greedy_ids"], x["draft_ids"], x["block_rows"], x["draft_counts"]))


class Sampled(LogitsNetwork):
    """Drafts against tokens drawn from the law of their rows."""

    name = "sample"

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's `logits`, how they are sampled, and the blocks."""
        return [*_probs_specs(self.config, net_config), TensorSpec("uniform", "float32", ("R",)), *_block_specs(limits)]

    def forward(self, x: dict[str, Tensor]) -> None:
        """Marks `accepted` and `tokens`."""
        drawn_R = sample.native(*_probs(x), x["uniform"])
        _verdict(*accept.native(drawn_R, x["draft_ids"], x["block_rows"], x["draft_counts"]))


class Rejection(LogitsNetwork):
    """Drafts drawn from q against the law of their rows."""

    def __init__(self, config: VerifierConfig, q: DraftProbs) -> None:
        super().__init__(config)
        self.q = q
        self.name = rejecting(q)

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

    def forward(self, x: dict[str, Tensor]) -> None:
        """Marks `accepted` and `tokens`."""
        names = ("draft_ids", "q_rows", "block_rows", "draft_counts", "uniform", "last_uniform", "verify_blocks", "q")
        _verdict(*reject.native(*_probs(x), *(x[name] for name in names), x.get("q_ids")))


class Logprobs(LogitsNetwork):
    """Log-probabilities before any adjustment."""

    name = "logprobs"

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """The verifier's `logits`, and the tokens asked for."""
        return [_logits_spec(self.config, net_config), TensorSpec("token_ids", "int32", ("R",))]

    def forward(self, x: dict[str, Tensor]) -> None:
        """Marks `logprobs`, and the best tokens with theirs, `top_ids` and `top_logprobs`, largest first."""
        net, most = x["logits"].net, min(MAX_LOGPROBS, self.config.vocab_size)
        logits_RV = ops.cast(x["logits"], "float32")
        z_RV = logits_RV - ops.reduce(logits_RV, "MAX", 1)
        whole_R1 = ops.unary(ops.reduce(ops.unary(z_RV, "EXP"), "SUM", 1), "LOG")
        mine_R1 = ops.gather_elements(z_RV, ops.reshape(x["token_ids"], (0, 1)), 1) - whole_R1
        best_RK, ids_RK = ops.topk(z_RV, most, 1)
        net.output(ops.reshape(mine_R1, (-1,)), TensorSpec("logprobs", "float32", ("R",)))
        net.output(best_RK - whole_R1, TensorSpec("top_logprobs", "float32", ("R", most)))
        net.output(ids_RK, TensorSpec("top_ids", "int32", ("R", most)))


NETWORKS: dict[str, type[LogitsNetwork]] = {one.name: one for one in (Greedy, Sampled, Logprobs)}  # every deployment's


def rejecting(q: DraftProbs) -> str:
    """Name of the network that rejects drafts of such a law."""
    return f"reject-{q.columns}" if q.candidates else "reject"


def acceptance_of(config: VerifierConfig, name: str, q: DraftProbs | None) -> LogitsNetwork:
    """The network of this name. q: of one that rejects."""
    return NETWORKS[name](config) if q is None else Rejection(config, q)


def _logits_spec(config: VerifierConfig, net_config: NetworkConfig) -> TensorSpec:
    return TensorSpec("logits", net_config.compute, ("R", config.vocab_size))


def _probs_specs(config: VerifierConfig, net_config: NetworkConfig) -> list[TensorSpec]:
    """What a row's law is made of."""
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
    """Which rows are whose, and what was drafted."""
    return [
        TensorSpec("draft_ids", "int32", ("R",)),  # the draft after each row, if one follows
        TensorSpec("block_rows", "int32", ("B", limits.block_rows)),  # the anchor's row and its drafts'
        TensorSpec("draft_counts", "int32", ("B",)),
    ]


def _probs(x: dict[str, Tensor]) -> list[Tensor]:
    """What every row's law is made of: adjusted logits, and four settings."""
    entries = (x["adjust_places"], x["adjust_before"], x["adjust_factor"], x["adjust_after"])
    logits_RV = adjust.native(x["logits"], *entries)
    return [logits_RV, x["temperature"], x["top_k"], x["top_p"], x["min_p"]]


def _verdict(accepted_B: Tensor, tokens_BQ: Tensor) -> None:
    net = accepted_B.net
    net.output(accepted_B, TensorSpec("accepted", "int32", ("B",)))
    net.output(tokens_BQ, TensorSpec("tokens", "int32", ("B", tokens_BQ.shape[1])))
