"""What a checkpoint declares about its quantization: `quantization_config` in config.json, hf_quant_config.json.

Every key is understood here, known to be harmless (`HARMLESS` says why), or refused by its name: a key that changes
what is computed and that no tensor shows would make answers silently wrong. `agreement.py` holds it against the
tensors. Read are fp8 (as DeepSeek writes it), modelopt, compressed-tensors and quark.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from glmspec.convert.compressed_tensors import read_compressed_tensors, read_groups
from glmspec.convert.scheme import (
    CACHED,
    DYNAMIC,
    HARMLESS,
    NONE,
    STATIC,
    UNSAID,
    Declared,
    Scheme,
    check_keys,
    check_symmetric,
    ignored,
    is_class,
    is_pattern,
    refuse_set,
    unsupported,
)
from glmspec.core.errors import ConfigError
from glmspec.core.fields import Fields, read_json
from glmspec.network.formats import BLOCK, GROUP

HF_QUANT = "hf_quant_config.json"
_CONFIGS = ("quantization_config", "compression_config", "quantization")  # the last is MLX's

# ModelOpt's names: formats, activations. All others are refused by name.
_ALGOS = {
    "FP8": ("fp8", STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_rows", DYNAMIC),
    "FP8_PB_WO": ("fp8_block", DYNAMIC),  # the name says weights only; what serves it rounds activations as blocks do
    "FP8_PB_REAL": ("fp8_block", DYNAMIC),
    "FP8_BLOCK_SCALES": ("fp8_block", DYNAMIC),
    "NVFP4": ("nvfp4", STATIC),
    "W4A16_NVFP4": ("nvfp4", NONE),
}
_QUARK_SCHEMES = {"per_tensor": "fp8", "per_channel": "fp8_rows", "per_block": "fp8_block"}


def declared(folder: Path, config: dict[str, Any]) -> Declared:
    """What the configs of a checkpoint folder say. Raises `ConfigError` naming a key that is not understood, a format
    that is not supported, or two files that contradict each other."""
    declarations = []
    for place, values in (("config.json", config), ("config.json: text_config", config.get("text_config"))):
        for key in _CONFIGS:
            if isinstance(values, dict) and values.get(key) is not None:
                declarations.append(_read(Fields(values, f"{folder}/{place}").section(key)))
    if (folder / HF_QUANT).exists():
        declarations.append(_hf_quant(Fields(read_json(folder / HF_QUANT), f"{folder}/{HF_QUANT}")))
    first, *others = [declaration for declaration in declarations if declaration.said] or [Declared()]
    for other in others:
        _check_same(first, other)
    return first


def _check_same(first: Declared, other: Declared) -> None:
    """Two places may differ in what they leave open, never in what they say."""
    for scheme in other.schemes:
        for target in scheme.targets:
            named = () if is_class(target) or is_pattern(target) else first.of(target)
            known = named or first.schemes  # one that is listed nowhere follows any
            if not any(_agree(scheme, mine) for mine in known):
                beside = known[0].label if known else "the other place, which declares nothing quantized"
                raise ConfigError(f"{scheme.label}: contradicts {beside}. Only one can be right: remove the other.")
    if first.schemes and not other.schemes:
        raise ConfigError(
            f"{first.schemes[0].label}: contradicted by the other place that speaks of quantization ({HF_QUANT} or "
            "config.json), which declares nothing quantized. Only one can be right: remove the other."
        )


def _agree(first: Scheme, other: Scheme) -> bool:
    formats = set(first.formats) & set(other.formats)
    activations = {first.activations, other.activations} - {UNSAID}
    same_activations = len(activations) < 2 or formats == {"fp8_block"}  # blocks have one way to round activations
    return bool(formats) and same_activations


def _read(fields: Fields) -> Declared:
    """A quantization_config, by its method."""
    method = fields.values.get("quant_method")
    if method is None:  # of KV caches alone, or by an exporter that forgot it
        if "config_groups" in fields.values:
            method = "compressed-tensors"
        elif "quant_algo" in fields.values or not fields.values.keys() - HARMLESS.keys():
            method = "modelopt"
    readers = {"fp8": _fp8, "compressed-tensors": read_compressed_tensors, "quark": _quark}
    method = str(method)
    if method.startswith("modelopt"):
        return _modelopt(fields)
    if method not in readers:
        fields.fail("quant_method", f"modelopt, {', '.join(readers)}: other formats of weights are not supported")
    return readers[method](fields)


# -- fp8 ----------------------------------------------------------------------------------------------


def _fp8(fields: Fields) -> Declared:
    """DeepSeek's and transformers' keys, and Quark's older ones."""
    known = ("quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt", "expert_dtype", "export")
    check_keys(fields, known)
    if str(fields.values.get("fmt") or "e4m3").lower() not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        unsupported(fields, "fmt", "FP8 in another format than e4m3")
    if fields.values.get("expert_dtype") not in (None, "fp8"):
        unsupported(fields, "expert_dtype", "experts in another format than the rest")
    block = fields.values.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        fields.fail("weight_block_size", f"[{BLOCK}, {BLOCK}], the only blocks that are supported")
    exponents = fields.values.get("scale_fmt")
    if exponents not in (None, "float", "float32", "ue8m0"):
        fields.fail("scale_fmt", "'float' or 'ue8m0'")
    scheme = fields.values.get("activation_scheme")
    if scheme not in (None, STATIC, DYNAMIC):
        fields.fail("activation_scheme", "'static' or 'dynamic'")
    formats = ("fp8_block",) if block else ("fp8", "fp8_rows")
    if "weight_block_size" not in fields.values:
        formats = ("fp8", "fp8_rows") if scheme == STATIC else ("fp8_block", "fp8", "fp8_rows")
    if block and scheme == STATIC:
        unsupported(fields, "activation_scheme", "a stored scale of activations beside block scales of weights")
    if fields.has("export"):
        _check_export(fields.section("export"))
    powers = exponents == "ue8m0"
    notes = ("scale_fmt ue8m0: scales of activations are not rounded to powers of two here",) if powers else ()
    spoken = f"{fields.source}: quant_method 'fp8'" + (f", weight_block_size {block}" if block else "")
    fp8 = Scheme(spoken, ("*",), formats, scheme or UNSAID)
    return Declared((fp8,), ignored(fields), powers, notes=notes)


# -- ModelOpt -----------------------------------------------------------------------------------------


def _hf_quant(fields: Fields) -> Declared:
    check_keys(fields, ("quantization", "quant_method"))
    return _modelopt(fields.section("quantization")) if fields.has("quantization") else Declared(said=False)


def _modelopt(fields: Fields) -> Declared:
    """Both shapes: flat, as in config.json, and under `quantization`."""
    if fields.has("quantization"):
        check_keys(fields, ("quant_method", "quantization"))
        return _modelopt(fields.section("quantization"))
    own = ("quant_method", "quant_algo", "group_size", "quantized_layers", "config_groups", *_MODELOPT_REFUSED)
    check_keys(fields, own)
    mixed = "MIXED_PRECISION" if fields.has("quantized_layers") else "NO_QUANT"
    algo = str(fields.values.get("quant_algo") or mixed).upper()
    groups = read_groups(fields) if fields.has("config_groups") and not fields.has("quantized_layers") else ()
    if algo == "MIXED_PRECISION":
        schemes = _mixed(fields) if fields.has("quantized_layers") else groups
    elif algo == "NO_QUANT":
        schemes = () if "quant_algo" in fields.values else groups
    else:
        schemes = (_algo(fields, ("*",)),)
        for group in groups:
            if not _agree(group, schemes[0]):
                raise ConfigError(f"{group.label}: contradicts {schemes[0].label}. Only one can be right.")
    return Declared(
        schemes, ignored(fields), said=bool(schemes) or (algo == "NO_QUANT" and "quant_algo" in fields.values)
    )


_MODELOPT_REFUSED = {
    "has_zero_point": "quantization with zero points",
    "pre_quant_scale": "a scale of a module's inputs (AWQ, SmoothQuant)",
    "lora_rank": "SVDQuant",
}


def _mixed(fields: Fields) -> tuple[Scheme, ...]:
    """A scheme for every algorithm of `quantized_layers`, with the modules it is said of."""
    layers = fields.section("quantized_layers")
    by_algo: dict[str, list[str]] = {}
    for module in layers.values:
        layer = layers.section(module)
        check_keys(layer, ("quant_algo", "group_size", *_MODELOPT_REFUSED))
        by_algo.setdefault(str(layer.values.get("quant_algo")).upper(), []).append(module)
        _algo(layer, (module,))
    return tuple(
        Scheme(f"{layers.source}: quant_algo {algo!r}", tuple(modules), (_ALGOS[algo][0],), _ALGOS[algo][1])
        for algo, modules in by_algo.items()
    )


def _algo(fields: Fields, targets: tuple[str, ...]) -> Scheme:
    refuse_set(fields, _MODELOPT_REFUSED)
    algo = str(fields.values.get("quant_algo")).upper()
    if algo not in _ALGOS:
        unsupported(fields, "quant_algo", algo)
    format, activations = _ALGOS[algo]
    size = {"nvfp4": GROUP, "fp8_block": BLOCK}.get(format)
    if size and fields.values.get("group_size") not in (None, 0, size):
        fields.fail("group_size", f"{size}, as {algo} has it")
    return Scheme(f"{fields.source}: quant_algo {algo!r}", targets, (format,), activations)


# -- Quark --------------------------------------------------------------------------------------------


def _quark(fields: Fields) -> Declared:
    tables = ("layer_quant_config", "layer_type_quant_config")
    check_keys(fields, ("quant_method", "global_quant_config", "algo_config", "export", *tables))
    if fields.has("export"):
        _check_export(fields.section("export"))
    algorithms = fields.values.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if not isinstance(algorithm, dict) or algorithm.get("name") not in ("gptq", "awq", "smooth", "autosmoothquant"):
            unsupported(fields, "algo_config", "an algorithm that may change what the model computes")
    schemes = []
    for key in tables:
        table = fields.section(key) if fields.values.get(key) else Fields({}, fields.source)
        schemes += [scheme for target in table.values for scheme in _quark_scheme(table.section(target), (target,))]
    if fields.values.get("global_quant_config"):
        schemes += _quark_scheme(fields.section("global_quant_config"), ("*",))
    exponents = any(str(dtype).endswith("e8m0fnu") for dtype in _values(fields.values, "scale_type"))
    return Declared(tuple(schemes), ignored(fields), exponents)


def _quark_scheme(fields: Fields, targets: tuple[str, ...]) -> tuple[Scheme, ...]:
    check_keys(fields, ("weight", "input_tensors", "output_tensors", "bias"))
    cache = all(re.search(CACHED, target) for target in targets)
    refuse_set(fields, {"bias": "a quantized bias"} | ({} if cache else {"output_tensors": "quantization of outputs"}))
    if not fields.values.get("weight"):
        refuse_set(fields, {"input_tensors": "quantization of activations alone"})
        return ()
    weight = fields.section("weight")
    check_keys(weight, _QUARK_ARGS)
    kind = str(weight.values.get("qscheme"))
    if weight.values.get("dtype") != "fp8_e4m3" or kind not in _QUARK_SCHEMES:
        unsupported(weight, "dtype", f"{weight.values.get('dtype')} ({kind})")
    if weight.values.get("block_size") not in (None, [BLOCK, BLOCK]):
        weight.fail("block_size", f"[{BLOCK}, {BLOCK}], the only blocks that are supported")
    check_symmetric(weight)
    format, activations = _QUARK_SCHEMES[kind], NONE
    if fields.has("input_tensors"):
        inputs = fields.section("input_tensors")
        check_keys(inputs, _QUARK_ARGS)
        if inputs.values.get("dtype") != "fp8_e4m3":
            unsupported(inputs, "dtype", f"{inputs.values.get('dtype')} activations beside weights in FP8")
        activations = DYNAMIC if inputs.values.get("is_dynamic") else STATIC
        if activations == STATIC and format == "fp8_block":
            unsupported(inputs, "is_dynamic", "a stored scale of activations beside block scales of weights")
    return (Scheme(f"{fields.source}: weight", targets, (format,), activations),)


def _check_export(fields: Fields) -> None:
    check_keys(fields, ("weight_format", "pack_method", "weight_merge_groups"))
    if fields.values.get("weight_format") not in (None, "real_quantized"):
        unsupported(fields, "weight_format", "simulated quantization")


_QUARK_ARGS = ("dtype", "qscheme", "ch_axis", "group_size", "block_size", "symmetric", "is_dynamic")


def _values(held: Any, key: str) -> list[Any]:
    """Every value under a key, however deep."""
    if isinstance(held, dict):
        return [v for k, v in held.items() if k == key] + [value for v in held.values() for value in _values(v, key)]
    return [value for v in held for value in _values(v, key)] if isinstance(held, list) else []
