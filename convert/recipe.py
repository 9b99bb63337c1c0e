"""Which number format every weight gets.

`--quant NAME` names one of the recipes here; `--recipe FILE` is a list of rules (JSON or YAML), first match wins:

    - {modules: "model.layers.*.mlp.experts.*", format: nvfp4}
    - {modules: "*.self_attn.o_proj", format: fp8_block}

`modules` is a shell pattern over Hugging Face module names, `format` one of auto, bfloat16, fp8_block, fp8, nvfp4.
auto keeps what the checkpoint has. Only the matrices that published checkpoints quantize may be: the router, norms,
embedding, head, the indexer's weights_proj and kv_b_proj keep their precision (kv_b is split and absorbed, and a router
bias in bfloat16 reroutes tokens).

auto changes no value: quantized weights are kept bit for bit, each unit under its own scales (gate and up of an expert
differ in the wild), and what the networks take plain (the absorbed halves of kv_b) is dequantized to float32. The named
recipes quantize what published checkpoints quantize, and round the rest to bfloat16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from glmspec.core.errors import ConfigError
from glmspec.network.formats import QUANTIZED

AUTO = "auto"
FORMATS = (AUTO, "bfloat16", "fp8_block", "fp8", "nvfp4")
_QUANTIZABLE = re.compile(
    r".*\.(?:self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj|indexer\.wq_b|indexer\.wk)"
    r"|(?:gate|up|down|gate_up)_proj)"
)
_KV_B = re.compile(r".*\.self_attn\.kv_b_proj")


@dataclass(frozen=True)
class Rule:
    """Modules that match the shell pattern get the format."""

    modules: str
    format: str


@dataclass(frozen=True)
class Recipe:
    """name: as shown and recorded. rules: first match wins, none is auto. kv_b: format of the absorbed halves."""

    name: str
    rules: tuple[Rule, ...]
    kv_b: str = AUTO

    def format(self, module: str, stored_as: str, keep: bool = False) -> str:
        """The format of a module's weight that lies in the checkpoint as `stored_as`. keep: leave quantized weights
        that our networks take plain (kv_b, the head) as they are where the recipe does not say otherwise."""
        if _KV_B.fullmatch(module):
            wanted = self.kv_b
        elif quantizable(module):
            wanted = next((rule.format for rule in self.rules if fnmatchcase(module, rule.modules)), AUTO)
        else:
            wanted = "bfloat16" if self.kv_b == "bfloat16" and stored_as in QUANTIZED else AUTO
        # A scale a row has no place in the networks; float32 loses nothing.
        plain = stored_as in QUANTIZED and not quantizable(module) and not keep
        kept = "float32" if stored_as == "fp8_rows" or plain else stored_as
        return kept if wanted == AUTO else wanted

    def check_used(self, modules: list[str]) -> None:
        """Raise `ConfigError` for a rule that no quantizable module matches: a misspelling."""
        for rule in self.rules:
            if not any(fnmatchcase(module, rule.modules) for module in modules if quantizable(module)):
                raise ConfigError(
                    f"recipe {self.name}: modules {rule.modules!r}: match no quantizable module of this checkpoint, "
                    f"such as {next(iter(filter(quantizable, modules)), 'none at all')}."
                )


def quantizable(module: str) -> bool:
    """True for the matrices that may be quantized."""
    return _QUANTIZABLE.fullmatch(module) is not None


RECIPES = {
    AUTO: Recipe(AUTO, ()),
    "bf16": Recipe("bf16", (Rule("*", "bfloat16"),), "bfloat16"),
    "fp8": Recipe("fp8", (Rule("*", "fp8_block"),), "bfloat16"),
    "nvfp4": Recipe("nvfp4", (Rule("*.mlp.experts.*", "nvfp4"),), "bfloat16"),
}


def read_recipe(path: Path) -> Recipe:
    """A recipe file. Raises `ConfigError` naming the rule."""
    import yaml

    try:
        rules = yaml.safe_load(path.read_text(encoding="utf-8-sig"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as JSON or YAML ({error}).") from None
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"{path}: found {type(rules).__name__}, expected a list of rules with modules and format.")
    return Recipe(path.name, tuple(_rule(path, at, rule) for at, rule in enumerate(rules)), "bfloat16")


def _rule(path: Path, at: int, rule: Any) -> Rule:
    where = f"{path}: rule {at + 1}"
    if not isinstance(rule, dict) or set(rule) != {"modules", "format"}:
        raise ConfigError(f"{where}: found {rule!r}, expected the keys modules and format.")
    if not isinstance(rule["modules"], str):
        raise ConfigError(f"{where}: modules: found {rule['modules']!r}, expected a pattern.")
    if rule["format"] not in FORMATS:
        raise ConfigError(f"{where}: format: found {rule['format']!r}, expected one of {', '.join(FORMATS)}.")
    return Rule(rule["modules"], rule["format"])
