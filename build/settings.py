"""What the commands that build are asked for, a value a command. Imports nothing heavy: the command line makes it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

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
