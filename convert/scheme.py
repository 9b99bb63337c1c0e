"""How modules are declared to be quantized, and what the readers of such declarations (`declared.py`) share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NoReturn

from glmspec.core.errors import ConfigError
from glmspec.core.fields import Fields

STATIC, DYNAMIC, NONE, UNSAID = "static", "dynamic", "none", ""
CACHED = r"(?:[qkv]|kv|qkv|kv_[ab])_proj(?:_with_mqa)?"  # projections whose outputs attention multiplies or caches

_PLAIN_LISTS = ("ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers")
# Keys that change nothing here, and why.
HARMLESS = {
    **dict.fromkeys((*_PLAIN_LISTS, "modules_to_convert"), "lists of modules misname them; the tensors decide"),
    **dict.fromkeys(
        ("version", "producer", "quantization_status", "global_compression_ratio"), "says how the checkpoint was made"
    ),
    **dict.fromkeys(
        (
            *("run_compressed", "dequantize", "use_optimized_inference", "is_checkpoint_fp8_serialized"),
            *("use_deep_gemm", "enable_buffer_reuse", "max_input_numel"),
        ),
        "tells a program how to load or to quantize",
    ),
    **dict.fromkeys(
        (
            "kv_cache_scheme",
            "kv_cache_quant_algo",
            "kv_cache_quant_config",
            "kv_cache_quant_method",
            "kv_cache_group",
            "kv_cache_post_rope",
            "min_kv_scale",
            "softmax_quant_spec",
        ),
        "of attention and caches in another format than ours",
    ),
    **dict.fromkeys(
        ("observer", "observer_kwargs", "observer_cls", "round_method", "scale_calculation_mode", "mx_element_dtype"),
        "how scales were found",
    ),
    **dict.fromkeys(("scale_dtype", "zp_dtype", "scale_type", "scale_format"), "the tensors' own dtypes say it"),
    **dict.fromkeys(("packed_modules_mapping", "target_device", "quant_mode"), "of the tool that quantized"),
}


@dataclass(frozen=True, eq=False)
class Scheme:
    """How some modules are said to be quantized. label: where that is said. targets: names, shell patterns, `re:`
    patterns, or classes such as Linear. formats: number formats that fit, the likeliest first. activations: STATIC
    (by a stored scale), DYNAMIC, NONE or UNSAID."""

    label: str
    targets: tuple[str, ...]
    formats: tuple[str, ...]
    activations: str = UNSAID


@dataclass(frozen=True)
class Declared:
    """What is declared; no schemes: nothing is quantized, or nothing is said. exponents: U8 scales are E8M0.
    ignored: patterns of modules that are said to be plain. said: False for a section that says nothing of weights."""

    schemes: tuple[Scheme, ...] = ()
    ignored: tuple[str, ...] = ()
    exponents: bool = False
    said: bool = True
    notes: tuple[str, ...] = field(default=(), compare=False)

    def of(self, module: str) -> tuple[Scheme, ...]:
        """The schemes that may be a module's: the one that names it or what it is part of, else those of classes."""
        listed = self._named
        named = next((listed[part] for part in _parts(module) if part in listed), None) if listed else None
        named = named or next((scheme for match, scheme in self._patterns if match(module)), None)
        return (named,) if named else self._classes

    def formats(self, module: str) -> tuple[str, ...]:
        """The formats that are declared for a module."""
        return tuple(dict.fromkeys(format for scheme in self.of(module) for format in scheme.formats))

    def ignores(self, module: str) -> bool:
        """True for a module that is listed as plain, by itself or as a part."""
        names, patterns = self._plain
        return any(part in names for part in _parts(module)) or any(match(module) for match in patterns)

    @cached_property
    def _plain(self) -> tuple[set[str], list[Callable[[str], Any]]]:
        return set(self.ignored), [pattern_of(name) for name in self.ignored if is_pattern(name)]

    @cached_property
    def _named(self) -> dict[str, Scheme]:
        return {t: s for s in self.schemes for t in s.targets if not is_pattern(t) and not is_class(t)}

    @cached_property
    def _patterns(self) -> list[tuple[Callable[[str], Any], Scheme]]:
        return [(pattern_of(t), s) for s in self.schemes for t in s.targets if is_pattern(t) and t != "*"]

    @cached_property
    def _classes(self) -> tuple[Scheme, ...]:
        return tuple(s for s in self.schemes if any(is_class(t) or t == "*" for t in s.targets))


def _parts(module: str) -> Iterator[str]:
    """A module's name, then those of the modules it is part of."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def check_keys(fields: Fields, understood: Iterable[str]) -> None:
    """Refuse what is neither understood nor harmless, unless its value says nothing, as in `configs/unread.py`."""
    for key in sorted(fields.values.keys() - set(understood) - HARMLESS.keys()):
        if fields.get(key):
            fields.fail(key, "no such key: glmspec does not know it, and it may change what is computed")


def unsupported(fields: Fields, key: str, what: str) -> NoReturn:
    """Raise `ConfigError`: the key asks for something that is not supported."""
    raise ConfigError(
        f"{fields.source}: {key}: found {fields.values.get(key)!r}: {what} is not supported. "
        "Supported are FP8 in e4m3 (128x128 blocks, one scale, one a row) and NVFP4."
    )


def refuse_set(fields: Fields, what: dict[str, str]) -> None:
    """Keys that must be absent, false or empty, and what they mean otherwise."""
    for key, meaning in what.items():
        if fields.values.get(key):
            unsupported(fields, key, meaning)


def ignored(fields: Fields) -> tuple[str, ...]:
    """The modules that are listed as plain."""
    lists = [fields.values[key] for key in _PLAIN_LISTS if isinstance(fields.values.get(key), list)]
    return tuple(str(name) for one_list in lists for name in one_list)


def check_symmetric(args: Fields) -> None:
    """Refuse zero points."""
    if args.values.get("symmetric") is False:
        unsupported(args, "symmetric", "quantization with zero points")


def is_pattern(target: str) -> bool:
    """True for a shell pattern or a regular expression."""
    return target.startswith("re:") or "*" in target


def is_class(target: str) -> bool:
    """Linear, RoutedExperts, ...: names of modules begin with a small letter."""
    return target[:1].isupper()


def pattern_of(target: str) -> Callable[[str], Any]:
    """Does a module's name match? Raises `ConfigError` for what is no regular expression."""
    if not target.startswith("re:"):
        return lambda module: fnmatchcase(module, target)
    try:
        return re.compile(target.removeprefix("re:")).match
    except re.error as error:
        raise ConfigError(f"quantization config: {target!r}: not a regular expression ({error}).") from None
