"""One model of a deployment: a verifier, its MTP module, a drafter, or a network on the verifier's logits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glmspec.convert.weights import Weights
from glmspec.models.acceptance import NETWORKS, DraftProbs, LogitsNetwork, acceptance_of
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.models.configs.kinds import Config
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.dflash import DFlash
from glmspec.models.mtp import Mtp
from glmspec.models.registry import model_of
from glmspec.models.verifier import Verifier
from glmspec.network.limits import EngineLimits, Ranges

VERIFIER, MTP = "verifier", "mtp"
MTP_DRAFTS = 3  # of an MTP module in a step; later ones seldom stand


@dataclass(frozen=True)
class Member:
    """One model of a deployment. taps, hidden: a verifier's outputs for the drafters, for its MTP module. illegal: ids
    that a verifier or its MTP module never chooses. window, drafts, markov_top_k: a drafter's, as the user chose them;
    sampled: whether its drafts are drawn. source: the name of the folder that was given, where `folder` is another. q:
    of a network that rejects drafts, how their probs are given."""

    name: str
    folder: Path
    weights: Weights
    taps: tuple[int, ...] = field(default=())
    hidden: bool = False
    window: str | None = None
    drafts: int | None = None
    sampled: bool = False
    source: str = ""
    q: DraftProbs | None = None
    markov_top_k: int | None = None
    illegal: IllegalIds = ALL_LEGAL

    @classmethod
    def chosen(cls, name: str, weights: Weights, folder: Path, choices: dict[str, Any], source: str = "") -> Member:
        """A member as a record keeps it. choices: see the property of that name."""
        return cls(
            name,
            folder,
            weights,
            tuple(choices["taps"]),
            choices["hidden"],
            choices["drafter_window"],
            choices["num_speculative_tokens"],
            choices["sampled"],
            source,
            DraftProbs(**choices["q"]) if choices["q"] else None,
            choices["markov_top_k"],
            IllegalIds.from_json(choices["illegal_ids"]),
        )

    @property
    def accepts(self) -> bool:
        """True of a network on the verifier's logits."""
        return self.name in NETWORKS or self.q is not None

    @property
    def config(self) -> Config:
        """What its checkpoint says, with what was chosen."""
        config = self.weights.config
        if isinstance(config, DrafterConfig):
            return config.chosen(self.window, self.drafts, self.markov_top_k)
        return config

    @property
    def verifier_config(self) -> VerifierConfig:
        """Of a verifier, its MTP module or an acceptance network: the verifier's config."""
        config = self.config
        assert isinstance(config, VerifierConfig)
        return config

    @property
    def drafter_config(self) -> DrafterConfig:
        """Of a block drafter: its config."""
        config = self.config
        assert isinstance(config, DrafterConfig)
        return config

    @property
    def choices(self) -> dict[str, Any]:
        """What its network is made with besides its checkpoint, for a record."""
        return {
            "taps": list(self.taps),
            "hidden": self.hidden,
            "drafter_window": self.window,
            "num_speculative_tokens": self.drafts,
            "markov_top_k": self.markov_top_k,
            "sampled": self.sampled,
            "q": asdict(self.q) if self.q else None,
            "illegal_ids": self.illegal.to_json(),
        }

    @property
    def model(self) -> Verifier | Mtp | DFlash | LogitsNetwork:
        """Its network, before its `NetworkConfig` is chosen."""
        if self.accepts:
            return acceptance_of(self.verifier_config, self.name, self.q)
        if self.name == MTP:
            return Mtp(self.verifier_config, sampled=self.sampled, illegal=self.illegal)
        return model_of(self.config, self.taps, hidden=self.hidden, sampled=self.sampled, illegal=self.illegal)

    @property
    def num_drafts(self) -> int:
        """Drafts that it proposes at once, 0 where it is no drafter."""
        if isinstance(self.config, DrafterConfig):
            return self.config.num_drafts
        return self.drafts or MTP_DRAFTS if self.name == MTP else 0

    @property
    def probs(self) -> DraftProbs | None:
        """How it gives the probs that its drafts are drawn from; None where they are not drawn."""
        if not self.sampled:
            return None
        if isinstance(self.config, VerifierConfig):
            return DraftProbs(self.config.vocab_size, candidates=False)
        among = self.config.selector or self.config.markov
        if among and among.top_k:
            return DraftProbs(among.top_k, candidates=True)
        return DraftProbs(self.config.draft_vocab_size, candidates=self.config.reduced_vocabulary)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """A verifier's end tokens."""
        return self.weights.end_tokens or ()

    def index_topk(self, limits: EngineLimits) -> int:
        """K of its DSA top-k, 0 for a drafter."""
        return limits.index_topk(self.config.index_topk) if isinstance(self.config, VerifierConfig) else 0

    @property
    def sliding_window(self) -> int:
        """Rows that a drafter's sliding layers see, 0 where none slides."""
        return self.config.sliding_window or 0 if isinstance(self.config, DrafterConfig) else 0

    def ranges(self, limits: EngineLimits) -> dict[str, Ranges]:
        """The run-time ranges of its inputs, by profile."""
        return limits.profiles(self.index_topk(limits), self.sliding_window, self.config.vocab_size)
