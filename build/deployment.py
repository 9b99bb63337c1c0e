"""What is to be built: a verifier and its drafters, opened and checked, for a target and its limits.

`engine` builds a `Deployment`, `validate` checks one; neither reads a checkpoint's weights to make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glmspec.build.member import MTP, VERIFIER, Member
from glmspec.build.settings import GREEDY, PLUGINS_AUTO, PLUGINS_OFF, PLUGINS_ON, PROBABILISTIC, BuildOptions
from glmspec.build.target import Target
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.names import ConvertOptions
from glmspec.convert.recipe import RECIPES
from glmspec.convert.tokenizer import known_ids
from glmspec.convert.weights import Weights, open_weights
from glmspec.core.errors import ConfigError
from glmspec.models.acceptance import NETWORKS, rejecting
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.network.config import NetworkConfig
from glmspec.network.graph import Network
from glmspec.network.limits import CONTEXT, GENERATION, EngineLimits
from glmspec.network.shards import Mapping
from glmspec.network.trt import Backend
from glmspec.network.trt_limits import KV_CACHE_DTYPES

MAX_MTP_DRAFTS = 16


@dataclass(frozen=True)
class Deployment:
    """A verifier (the first member), its drafters and the acceptance networks. plugins: see `BuildOptions`."""

    target: Target
    members: tuple[Member, ...]
    limits: EngineLimits
    compute: str
    plugins: str = PLUGINS_AUTO

    @property
    def verifier(self) -> Member:
        """The first member."""
        return self.members[0]

    @property
    def drafters(self) -> tuple[Member, ...]:
        """Those with checkpoints of their own."""
        return tuple(member for member in self.members if isinstance(member.config, DrafterConfig))

    @property
    def weights(self) -> list[Weights]:
        """The members' weights, each once: several members may share one."""
        return list({id(member.weights): member.weights for member in self.members}.values())

    @property
    def mapping(self) -> Mapping:
        """How the verifier is divided."""
        return self.verifier.weights.mapping

    @property
    def kinds(self) -> tuple[str, ...]:
        """The number formats among the verifier's weights (see `NetworkConfig`)."""
        return self.verifier.weights.net_config(self.compute).kinds

    def net_config(self, member: Member, profile: str, *, plugged: bool = False) -> NetworkConfig:
        """How a member's network is authored. plugged: with plugins, where they are wanted and the target has them."""
        own = NetworkConfig(compute=self.compute) if member.accepts else member.weights.net_config(self.compute)
        plugins = self.target.gpu if plugged and self.has_plugins and self.plugins != PLUGINS_OFF else ""
        return replace(own, profile=profile, plugins=plugins)

    @property
    def has_plugins(self) -> bool:
        """Whether the target's TensorRT has plugins: tensorrt_rtx has none, the executor runs their references."""
        return self.target.package == "tensorrt"

    def author(
        self, member: Member, profile: str, backend: Backend, *, static: bool = False, plugged: bool = False
    ) -> Network:
        """A member's network for a profile. static: every size fixed at its greatest. plugged: with plugins, where they
        are wanted and the target has them; for the target's own TensorRT only."""
        net_config = self.net_config(member, profile, plugged=plugged)
        if static:
            ranges = member.ranges(self.limits)[profile]
            net_config = replace(net_config, sizes={symbol: most for symbol, (_, _, most) in ranges.items()})
        return member.model.author(self.limits, net_config, backend)

    def profiles(self, member: Member) -> tuple[str, ...]:
        """Plans a member has: one a profile where an engine is compiled, one network for all on the executor. To the
        acceptance networks all steps are alike."""
        if not self.target.package:
            return (CONTEXT,)
        return (GENERATION,) if member.accepts else (GENERATION, CONTEXT)


def open_deployment(
    verifier: Path, drafters: Sequence[Path], target: Target, options: BuildOptions, *, config_only: bool = False
) -> Deployment:
    """Open and check everything but weights' values. config_only: no weights are looked for, a config.json says what
    they would be. Raises naming the field or tensor at fault."""
    _check_options(drafters, options)
    first = _open_verifier(verifier, options, config_only)
    others = _open_drafters(drafters, options, config_only)
    taps = _check_family(first, others)
    compute = options.compute or target.compute
    _check_cache_dtype(options.kv_cache_dtype)
    _check_latents(first, target, compute)
    first = first if config_only else replace(first, illegal=_illegal_ids(first))
    modules = [_mtp(first, options)] if options.mtp else []
    most_drafts = max((member.num_drafts for member in (*modules, *others)), default=0)
    limits = engine_limits(first.verifier_config, most_drafts, target, options)
    verifier_member = replace(first, taps=taps, hidden=options.mtp)
    all_probs = dict.fromkeys(member.probs for member in (*modules, *others) if member.probs)
    acceptance_networks = [Member(name, first.folder, first.weights) for name in NETWORKS]
    acceptance_networks += [Member(rejecting(probs), first.folder, first.weights, q=probs) for probs in all_probs]
    members = (verifier_member, *modules, *others, *acceptance_networks)
    deployment = Deployment(target, members, limits, compute, options.plugins)
    if deployment.plugins == PLUGINS_ON and not deployment.has_plugins:
        have = f"{target.package} has no plugins" if target.package else "the executor runs the plugins' references"
        raise ConfigError(f"--plugins: found on, expected auto or off for --target {target.name}: {have}.")
    return deployment


def _check_options(drafters: Sequence[Path], options: BuildOptions) -> None:
    for name, value, used in (
        ("--drafter-window", options.drafter_window, drafters),
        ("--num-speculative-tokens", options.num_speculative_tokens, drafters or options.mtp),
        ("--draft-sampling", options.draft_sampling, drafters or options.mtp),
        ("--markov-top-k", options.markov_top_k, drafters),
    ):
        if value not in (None, GREEDY) and not used:
            raise ConfigError(f"{name}: found {value} and no drafter, expected one. Add --drafter, or leave it out.")


def _mtp(verifier: Member, options: BuildOptions) -> Member:
    """The verifier's MTP module as a model of its own, whose weights lie in the verifier's checkpoint."""
    if (options.num_speculative_tokens or 0) > MAX_MTP_DRAFTS:
        raise ConfigError(
            f"--num-speculative-tokens: found {options.num_speculative_tokens}, expected 1 to {MAX_MTP_DRAFTS} with "
            "--mtp: a draft is a run of the module, and late ones seldom stand."
        )
    if not verifier.weights.mtp:
        raise ConfigError(
            f"{verifier.folder}: --mtp: found no multi-token-prediction module in this checkpoint, expected one "
            "(model.layers.N.eh_proj.weight beyond the last layer). Leave --mtp out, or get a checkpoint that has it."
        )
    sampled = options.draft_sampling == PROBABILISTIC
    return Member(
        MTP,
        verifier.folder,
        verifier.weights,
        drafts=options.num_speculative_tokens,
        sampled=sampled,
        illegal=verifier.illegal,
    )


def _illegal_ids(verifier: Member) -> IllegalIds:
    """What the tokenizer beside the verifier does not know, but for end tokens: choosing one ends the answer, and needs
    no text. None where there is no tokenizer to ask."""
    known = known_ids(verifier.folder)
    if known is None:
        return ALL_LEGAL
    return IllegalIds.beside(known | set(verifier.end_ids or ()), verifier.config.vocab_size)


def _open_verifier(folder: Path, options: BuildOptions, config_only: bool) -> Member:
    conversion = ConvertOptions(RECIPES[options.quant], Mapping(options.tp or 1, options.ep or 1))
    weights = open_weights(folder, conversion, config_only=config_only)
    if not isinstance(weights.config, VerifierConfig):
        raise ConfigError(f"{folder}: --verifier: found a drafter, expected a verifier.")
    if isinstance(weights, Checkpoint):
        _check_converted(weights, folder, options)
    return Member(VERIFIER, folder, weights)


def _check_converted(checkpoint: Checkpoint, folder: Path, options: BuildOptions) -> None:
    """A converted checkpoint has its mapping and formats already."""
    mapping = checkpoint.mapping
    for name, wanted, have in (("--tp", options.tp, mapping.tp), ("--ep", options.ep, mapping.ep)):
        if wanted not in (None, have):
            raise ConfigError(
                f"{folder}: {name}: found {wanted}, expected {have}, as the checkpoint was converted. Leave it out, or "
                f"convert again with {name} {wanted}."
            )
    recipe = checkpoint.record["quantization"]["recipe"]
    if options.quant not in ("auto", recipe):
        raise ConfigError(
            f"{folder}: --quant: found {options.quant}, expected {recipe}, as the checkpoint was converted. Leave it "
            f"out, or convert again with --quant {options.quant}."
        )


def _open_drafters(folders: Sequence[Path], options: BuildOptions, config_only: bool) -> list[Member]:
    """Named after their kind; a second one of a kind gets a number."""
    window, drafts = options.drafter_window, options.num_speculative_tokens
    members: list[Member] = []
    for folder in folders:
        weights = open_weights(folder, config_only=config_only)
        config = weights.config
        if not isinstance(config, DrafterConfig):
            raise ConfigError(f"{folder}: --drafter: found a verifier, expected a drafter.")
        if drafts is not None and not 1 <= drafts <= config.num_drafts:
            raise ConfigError(
                f"{folder}: --num-speculative-tokens: found {drafts}, expected 1 to {config.num_drafts}, the "
                f"drafts of this drafter's blocks (block_size {config.block_size}, sample_from_anchor "
                f"{str(config.sample_from_anchor).lower()})."
            )
        same = sum(member.drafter_config.kind == config.kind for member in members)
        name = config.kind + (f"-{same + 1}" if same else "")
        sampled = options.draft_sampling == PROBABILISTIC
        among = options.markov_top_k if config.markov else None
        chosen: dict[str, Any] = dict(window=window, drafts=drafts, markov_top_k=among)
        members.append(Member(name, folder, weights, **chosen, sampled=sampled))
        members[-1].config  # noqa: B018  (refuses what the drafter cannot)
    if options.markov_top_k is not None and not any(member.markov_top_k for member in members):
        raise ConfigError(
            f"--markov-top-k: found {options.markov_top_k} and no drafter with a Markov head among "
            f"{', '.join(member.name for member in members)}, expected one. Leave it out."
        )
    return members


def _check_family(verifier: Member, drafters: Sequence[Member]) -> tuple[int, ...]:
    """The drafters must fit the verifier; returns the taps, the union of what they read."""
    target = verifier.config
    for member in drafters:
        config, where = member.drafter_config, f"{member.folder}/config.json"
        for key in ("hidden_size", "vocab_size"):
            if getattr(config, key) != getattr(target, key):
                raise ConfigError(
                    f"{where}: {key}: found {getattr(config, key)}, expected the verifier's {getattr(target, key)}."
                )
        if config.taps[-1] > target.num_hidden_layers:
            raise ConfigError(
                f"{where}: aux_hidden_state_layer_ids: found {list(config.taps)}, expected ids from 0 to "
                f"{target.num_hidden_layers}: the verifier has {target.num_hidden_layers} layers."
            )
    return tuple(sorted({tap for member in drafters for tap in member.drafter_config.taps}))


def _check_cache_dtype(wanted: str) -> None:
    if wanted != "auto":
        raise ConfigError(
            f"--kv-cache-dtype: found {wanted}, expected auto (the compute dtype): TensorRT's in-place cache update "
            f"takes {', '.join(KV_CACHE_DTYPES)} only."
        )


def _check_latents(verifier: Member, target: Target, compute: str) -> None:
    """tensorrt_rtx 1.7 ends in an internal error where a bfloat16 latent row has an odd number of columns."""
    rank = verifier.verifier_config.kv_lora_rank
    if target.package and compute == "bfloat16" and rank % 2:
        raise ConfigError(
            f"{verifier.folder}: kv_lora_rank: found {rank}, expected an even number: TensorRT compiles no bfloat16 "
            "network with latent rows of an odd number of columns. Take --dtype float32, or --target cpu."
        )


def engine_limits(verifier: VerifierConfig, most_drafts: int, target: Target, options: BuildOptions) -> EngineLimits:
    """The limits every model of the deployment shares. most_drafts: that any of the drafters proposes at once."""
    if (options.max_model_len or 0) > verifier.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len: found {options.max_model_len}, expected at most {verifier.max_position_embeddings}, "
            "the verifier's max_position_embeddings."
        )
    block_rows = 1 + most_drafts
    max_num_seqs = options.max_num_seqs or target.max_num_seqs
    tokens = options.max_num_batched_tokens or max(target.max_num_batched_tokens, max_num_seqs * block_rows)
    cached = options.max_cached_tokens
    return EngineLimits(
        max_model_len=options.max_model_len or min(target.max_model_len, verifier.max_position_embeddings),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        page_size=target.page_size,
        segment_rows=max(target.segment_rows, block_rows),
        block_rows=block_rows,
        pool_pages=None if cached is None else -(-cached // target.page_size),
    )
