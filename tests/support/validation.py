"""`validate` on a small verifier and on the full model's config, for tests."""

from __future__ import annotations

from pathlib import Path

from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.build.validate.report import Report
from glmspec.build.validate.run import NAMES, ValidateOptions, validate_source
from glmspec.core.progress import Progress
from support.models import DATA

STATIC = ("config", "weights", "layers", "ranks", "profiles", "memory", "limits")
FULL = DATA / "glm-5.3-config.json"
# All that FP8 blocks and NVFP4 groups of two ranks divide.
DIVISIBLE = dict(
    num_attention_heads=8,
    num_key_value_heads=8,
    v_head_dim=32,
    qk_nope_head_dim=24,
    intermediate_size=256,
    moe_intermediate_size=256,
    n_routed_experts=8,
    num_hidden_layers=4,
    indexer_types=["full", "full", "shared", "full"],
    vocab_size=101,
)


def check(
    source: Path, *stages: str, target: str = "b200", drafters=(), wanted: dict | None = None, **options
) -> Report:
    config_only = options.pop("config_only", False)
    asked = ValidateOptions(stages or NAMES, **(wanted or {}))
    built = BuildOptions(**options)
    return validate_source(source, drafters, TARGETS[target], built, asked, Progress(), config_only=config_only)


def told(report: Report) -> str:
    return "\n".join(f"{one.stage}: {fault}" for one in report.outcomes for fault in one.faults)


def failed(report: Report) -> list[str]:
    return [one.stage for one in report.outcomes if one.faults]
