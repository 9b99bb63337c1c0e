"""Which model file a config belongs to."""

from __future__ import annotations

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.dflash import DFlash
from glmspec.models.dflash2 import DFlash2
from glmspec.models.dspark import DSpark
from glmspec.models.mtp import MtpLayer
from glmspec.models.verifier import Verifier
from glmspec.network.contract import TensorSpec
from glmspec.network.module import Module

_DRAFTERS: dict[str, type[DFlash]] = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark}


def model_of(
    config: VerifierConfig | DrafterConfig,
    taps: tuple[int, ...] = (),
    *,
    hidden: bool = False,
    sampled: bool = False,
    illegal: IllegalIds = ALL_LEGAL,
) -> Verifier | DFlash:
    """The model tree of a config. taps, hidden: a verifier's further outputs. illegal: ids that it never chooses.
    sampled: a drafter draws its drafts."""
    if isinstance(config, VerifierConfig):
        return Verifier(config, taps, hidden=hidden, illegal=illegal)
    drafter = _DRAFTERS[config.kind](config, sampled=sampled)
    drafter.named()
    return drafter


def checkpoint_specs(config: VerifierConfig | DrafterConfig, modules: int) -> list[TensorSpec]:
    """The weights of a checkpoint, whole and plain: those of the config's own network and of so many MTP modules beyond
    a verifier's last layer."""
    trees: list[Module] = [model_of(config)]
    if isinstance(config, VerifierConfig):
        trees += [MtpLayer(config, config.num_hidden_layers + at) for at in range(modules)]
    return [spec for tree in trees for spec in tree.weight_specs("bfloat16")]
