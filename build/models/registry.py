"""Which model file a config belongs to."""

from __future__ import annotations

from glmspec.build.configs.drafter import DrafterConfig
from glmspec.build.configs.verifier import VerifierConfig
from glmspec.build.models.dflash import DFlash
from glmspec.build.models.dflash2 import DFlash2
from glmspec.build.models.dspark import DSpark
from glmspec.build.models.verifier import Verifier

_DRAFTERS: dict[str, type[DFlash]] = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark}


def model_of(config: VerifierConfig | DrafterConfig, taps: tuple[int, ...] = ()) -> Verifier | DFlash:
    """The model tree of a config. taps: a verifier's residual-stream outputs."""
    if isinstance(config, VerifierConfig):
        return Verifier(config, taps)
    drafter = _DRAFTERS[config.kind](config)
    drafter.named()
    return drafter
