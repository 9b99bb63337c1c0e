"""What compressed-tensors declares: config groups, transforms, sparsity. (ModelOpt writes such groups as well.)"""

from __future__ import annotations

import re
from typing import Any

from glmspec.convert.scheme import (
    CACHED,
    DYNAMIC,
    NONE,
    STATIC,
    Declared,
    Scheme,
    check_keys,
    check_symmetric,
    ignored,
    unsupported,
)
from glmspec.core.errors import ConfigError
from glmspec.core.fields import Fields
from glmspec.network.formats import BLOCK, GROUP

_STRATEGIES = {
    (8, "tensor"): "fp8",
    (8, "channel"): "fp8_rows",
    (8, "block"): "fp8_block",
    (4, "tensor_group"): "nvfp4",
    (4, "group"): "nvfp4",
}
_PACKINGS = ("dense", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision", "fakequant")
_OFFLINE = ("weight_input", "weight_output")


def read_compressed_tensors(fields: Fields) -> Declared:
    """A quantization_config of the method compressed-tensors."""
    if fields.has("quantization_config"):  # beside sparsity_config, in an older shape
        nested = fields.section("quantization_config").values
        fields = Fields(nested | {k: v for k, v in fields.values.items() if k != "quantization_config"}, fields.source)
    check_keys(fields, ("quant_method", "config_groups", "format", "sparsity_config", "transform_config"))
    if fields.has("sparsity_config"):
        _sparsity(fields.section("sparsity_config"))
    notes = _transforms(fields.section("transform_config")) if fields.has("transform_config") else ()
    schemes = read_groups(fields) if fields.values.get("config_groups") else ()
    if schemes:
        _check_packing(fields)
    dtypes = [dtype for section in _weights_of(fields) if (dtype := section.get("scale_dtype"))]
    exponents = any(str(dtype).endswith(("uint8", "e8m0fnu")) for dtype in dtypes)
    return Declared(schemes, ignored(fields), exponents, notes=notes)


def _weights_of(fields: Fields) -> list[dict[str, Any]]:
    return [group["weights"] for group in (fields.values.get("config_groups") or {}).values() if group.get("weights")]


def _check_packing(fields: Fields) -> None:
    if fields.values.get("format") not in (None, *_PACKINGS):
        unsupported(fields, "format", f"the format {fields.values['format']}")


def _sparsity(fields: Fields) -> None:
    """Sparsity that leaves the tensors whole says nothing of use."""
    check_keys(fields, ("format", "targets", "global_sparsity", "sparsity_structure", "registry_requires_subclass"))
    if fields.values.get("format") not in (None, "dense"):
        unsupported(fields, "format", "sparse storage")


def _transforms(fields: Fields) -> tuple[str, ...]:
    """Rotations: those of weights alone, which cancel, are in the tensors already; any other would have to be done
    while the model runs."""
    check_keys(fields, ("config_groups",))
    groups = fields.section("config_groups") if fields.values.get("config_groups") else Fields({}, fields.source)
    for name in groups.values:
        group = groups.section(name)
        check_keys(group, ("type", "apply", "randomize", "requires_grad", "head_dim", "precision"))
        turns = group.values.get("apply") or []
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            group.fail("apply", "a list of objects with location and targets")
        for turn in turns:
            check_keys(Fields(turn, f"{group.source}: apply"), ("targets", "location", "inverse"))
        online = [turn for turn in turns if turn.get("location") not in _OFFLINE]
        if online:
            where = "; ".join(f"{turn.get('location')} of {_shown(turn.get('targets'))}" for turn in online)
            raise ConfigError(
                f"{group.source}: a {group.values.get('type')} transform at {where}: it rotates activations while the "
                "model runs, which is not supported, and without it answers are wrong. Get the checkpoint without it."
            )
        if turns and len({bool(turn.get("inverse")) for turn in turns}) < 2:
            targets = "; ".join(_shown(turn.get("targets")) for turn in turns)
            raise ConfigError(
                f"{group.source}: a {group.values.get('type')} transform of the weights of {targets}: found no inverse "
                "that undoes it, expected one. Get the checkpoint without it."
            )
    return (f"transforms that are part of the weights: {', '.join(groups.values)}",) if groups.values else ()


def _shown(targets: Any) -> str:
    return ", ".join(map(str, targets)) if isinstance(targets, list) else str(targets)


def read_groups(fields: Fields) -> tuple[Scheme, ...]:
    """The schemes of `config_groups`."""
    groups = fields.section("config_groups")
    return tuple(scheme for name in groups.values for scheme in _group(groups.section(name), fields))


def _group(group: Fields, whole: Fields) -> tuple[Scheme, ...]:
    """The scheme of a config group; none when it has no weights: then it is of attention and its cache."""
    check_keys(group, ("targets", "weights", "input_activations", "output_activations", "format"))
    named = group.values.get("targets") or ["Linear"]
    if not isinstance(named, (str, list)):
        group.fail("targets", "a list of modules")
    targets = (named,) if isinstance(named, str) else tuple(map(str, named))
    if not group.has("weights"):
        attention = all(re.search(f"attn|attention|{CACHED}", target, re.IGNORECASE) for target in targets)
        if not attention and (group.has("input_activations") or group.has("output_activations")):
            group.fail("weights", "an object: a group that quantizes activations alone is not supported")
        return ()
    if group.has("output_activations"):
        unsupported(group, "output_activations", "quantization of a module's outputs")
    packing = group.values.get("format") or whole.values.get("format") or "no format named"
    formats = _weights(group.section("weights"), str(packing))
    _check_packing(group)
    inputs = group.section("input_activations") if group.has("input_activations") else None
    return (Scheme(f"{group.source}: weights", targets, formats, _activations(inputs, formats)),)


_ARGS = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder")


def _weights(args: Fields, packing: str) -> tuple[str, ...]:
    check_keys(args, _ARGS)
    values = args.values
    bits, size = _bits(args), values.get("group_size")
    if str(values.get("type") or "int").lower() != "float":
        unsupported(args, "num_bits", f"INT{bits} ({packing})")
    check_symmetric(args)
    if values.get("actorder") not in (None, False, "weight", "static"):
        unsupported(args, "actorder", "a permutation of columns (activation order)")
    strategy = str(values.get("strategy") or ("channel" if size == -1 else "group" if size else "tensor")).lower()
    format = _STRATEGIES.get((bits, strategy))
    if strategy == "block" and values.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        args.fail("block_structure", f"[{BLOCK}, {BLOCK}], the only blocks that are supported")
    if format == "nvfp4" and size != GROUP:
        unsupported(args, "group_size", "MXFP4" if size == 32 else f"FP4 in groups of {size}")
    if format is None:
        unsupported(args, "strategy", f"MXFP{bits}" if size == 32 else f"FP{bits} with one scale a {strategy}")
    return (format,)


def _bits(args: Fields) -> int:
    return args.integer("num_bits") if args.has("num_bits") else 8


def _activations(args: Fields | None, formats: tuple[str, ...]) -> str:
    """Whether the inputs of weights in such a format are quantized. Raises for a format other than the weights'."""
    if args is None:
        return NONE
    check_keys(args, _ARGS)
    check_symmetric(args)
    bits, kind = _bits(args), str(args.values.get("type") or "int").lower()
    if kind != "float" or bits != (4 if formats == ("nvfp4",) else 8):
        unsupported(args, "num_bits", f"{kind} activations of {bits} bits beside weights in {formats[0]}")
    static = args.values.get("dynamic") in (None, False, "local")
    if static and formats == ("fp8_block",):
        unsupported(args, "dynamic", "a stored scale of activations beside block scales of weights")
    return STATIC if static else DYNAMIC
