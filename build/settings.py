"""What commands that build or run engines are asked for, a value a command. Imports nothing heavy: the command line
makes it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glmspec.runtime.options import GenerateOptions

if TYPE_CHECKING:
    from glmspec.runtime.adaptive import Adaptive

GREEDY, PROBABILISTIC = "greedy", "probabilistic"  # how drafts are chosen
PLUGINS_AUTO, PLUGINS_ON, PLUGINS_OFF = "auto", "on", "off"  # whether plugins stand in for TensorRT's layers
_OPTIONS = {"compute": "dtype"}  # fields that the command line has under another name


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What the user may choose; None takes the checkpoint's (tp, ep) or the target's default."""

    mtp: bool = False  # the verifier's MTP module too
    quant: str = "auto"
    tp: int | None = None
    ep: int | None = None
    compute: str | None = None
    kv_cache_dtype: str = "auto"
    plugins: str = PLUGINS_AUTO  # on: refuse where one cannot be
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_cached_tokens: int | None = None
    num_speculative_tokens: int | None = None  # drafts of a block; None: as many as each drafter's checkpoint allows
    markov_top_k: int | None = None  # drafts of a Markov head are among so many best logits; None: any
    drafter_window: str | None = None  # None: as each drafter's format is trained
    draft_sampling: str = GREEDY  # or "probabilistic": drafts are drawn

    @property
    def given(self) -> list[str]:
        """The command line's names of those that were given."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [f"--{_OPTIONS.get(name, name).replace('_', '-')}" for name in names]


@dataclass(frozen=True, kw_only=True)
class DeploymentSettings:
    """What `engine`, `validate` and `plugins` are all asked: which models, for which target, how large.

    verifier, target: None where the command has another source of them, or says that they are missing. target: a name
    in `TARGETS`."""

    verifier: Path | None
    drafters: tuple[Path, ...]
    target: str | None
    options: BuildOptions


@dataclass(frozen=True, kw_only=True)
class EngineSettings(DeploymentSettings):
    """bundle: to be finished, in place of all that says what to build. output: None takes a finished bundle's name."""

    output: Path | None
    no_validate: bool
    resume: bool
    bundle: Path | None


@dataclass(frozen=True, kw_only=True)
class ValidateSettings(DeploymentSettings):
    """source, verifier: one of them, the same. stages: all where none is named. group_layers: compiled at a time, 0 for
    all. cache: folder that remembers what compiled. json_file, junit: reports to write."""

    source: Path | None
    config_only: bool
    stages: tuple[str, ...]
    group_layers: int
    cache: Path | None
    json_file: Path | None
    junit: Path | None


@dataclass(frozen=True, kw_only=True)
class PluginsSettings(DeploymentSettings):
    """verifier: None for the sizes of the full model. ops: all where none is named. output: a folder to write."""

    config_only: bool
    ops: tuple[str, ...]
    output: Path | None
    json_file: Path | None


@dataclass(frozen=True, kw_only=True)
class DraftingSettings:
    """What `generate` and `repo` are both asked: how drafts are made, and how many of them are verified.

    drafter: its name, None for the first block drafter. verification: how drawn drafts are accepted. adaptive: choose
    how many are verified; adaptive_threshold, cost_table, confidence_temperatures: see `Adaptive`, the last a file."""

    drafter: str | None
    no_speculation: bool
    verification: str
    adaptive: bool
    adaptive_threshold: float | None
    cost_table: Path | None
    confidence_temperatures: Path | None

    def engine_options(self) -> dict[str, Any]:
        """As `Engine` and `write_repository` take them. Raises `ConfigError` for a file of temperatures that holds
        none."""
        return {
            "drafter": self.drafter,
            "speculate": not self.no_speculation,
            "verification": self.verification,
            "adaptive": self._adaptive(),
        }

    def _adaptive(self) -> Adaptive | None:
        """None where all drafts are verified."""
        if not self.adaptive:
            return None
        from glmspec.runtime.adaptive import Adaptive
        from glmspec.runtime.estimates import read_temperatures

        temperatures = read_temperatures(self.confidence_temperatures) if self.confidence_temperatures else None
        return Adaptive(threshold=self.adaptive_threshold or 0.0, costs=self.cost_table, temperatures=temperatures)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(GenerateOptions):
    """engines: the directory that answers. drafting: how its drafts are made and verified."""

    engines: Path
    drafting: DraftingSettings
