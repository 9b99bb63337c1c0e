"""What a refactoring must not change, as plain data: `tests/data/frozen.json` and `ptx.json` hold it as it was.

`freeze.py` writes those files, `tests/test_frozen.py` and the compile tests of the plugins compare with them. As much
as can be goes through the command line.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file

from glmspec.build.cli import main
from glmspec.build.deployment import Deployment, open_deployment
from glmspec.build.plugin_variants import variants_of
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.network.reader import read
from glmspec.network.trt import Backend, backend
from support.cli import run
from support.models import ASSETS, DATA, GOLDENS, edit_checkpoint
from support.tensorrt_stand_in import networks_with_plugins

FROZEN = DATA / "frozen.json"
PLACES = {"ASSETS": ASSETS, "GOLDENS": GOLDENS / "checkpoints", "DATA": DATA}  # how paths are written down


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- the command line -----------------------------------------------------------------------------


def commands() -> dict[str, dict[str, Any]]:
    """Every command in its order, with its help and its parameters in theirs."""
    context = click.Context(main)
    listed = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {
        name: {"help": command.help, "parameters": [_parameter(one) for one in command.params]}
        for name, command in listed.items()
    }


def _parameter(one: click.Parameter) -> dict[str, Any]:
    """What a user may see of an option or an argument; what is false, empty or not given is left out."""
    bounds = ("choices", "case_sensitive", "min", "max", "least", "exists", "file_okay", "dir_okay", "allow_dash")
    shown = {
        "names": [*one.opts, *one.secondary_opts],
        "type": one.type.name,
        **{name: getattr(one.type, name, None) for name in bounds},
        "required": one.required,
        "multiple": one.multiple,
        "values": one.nargs if one.nargs != 1 else None,
        "default": one.default if isinstance(one.default, bool | int | float | str | tuple) else None,
        **{name: getattr(one, name, None) for name in ("is_flag", "hidden", "metavar", "section", "help")},
    }
    given = {name: value for name, value in shown.items() if value not in (None, ()) and value is not False}
    return json.loads(json.dumps(given))  # tuples are lists there


MISTAKES = (
    # wrong usage
    "compile",
    "inspect ASSETS/tiny-verifier --verbos",
    "convert ASSETS/tiny-verifier",
    "convert ASSETS/tiny-verifier -o TMP/out --dry-run",
    "convert ASSETS/tiny-verifier --dry-run --resume",
    "convert ASSETS/tiny-verifier -o TMP/out --tp 0",
    "convert TMP/nowhere -o TMP/out",
    "convert ASSETS/tiny-verifier -o TMP/out --quant int4",
    "convert ASSETS/tiny-verifier -o TMP/out --quant fp8 --recipe TMP/rules.json",
    "convert zai-org/GLM-5.3 -o TMP/out",
    "convert DATA/glm-5.3-config.json -o TMP/out",
    "engine --verifier ASSETS/tiny-verifier -o TMP/out",
    "engine --verifier ASSETS/tiny-verifier --target a100 -o TMP/out",
    "engine --verifier ASSETS/tiny-verifier --target cpu -o TMP/out --max-model-len 1.5",
    "engine --verifier ASSETS/tiny-verifier --target cpu -o TMP/out --max-num-seqs 0",
    "engine --from-bundle ASSETS --target b200",
    "validate --target cpu",
    "validate ASSETS/tiny-verifier",
    "plugins --target b200 --mtp --max-num-seqs 4",
    "plugins --target b200 --verifier ASSETS/tiny-verifier --op argmax",
    "generate ASSETS --prompt a",
    "generate ASSETS --max-tokens 2",
    "generate ASSETS --prompt a --input TMP/rules.json --max-tokens 2",
    "generate ASSETS --prompt a --max-tokens 2 --no-speculation --drafter mtp",
    "generate ASSETS --prompt a --max-tokens 0",
    "repo ASSETS -o TMP/out --no-speculation --drafter dspark",
    "repo ASSETS -o TMP/out --no-speculation --adaptive-verification",
    "repo ASSETS -o TMP/out --adaptive-verification --adaptive-threshold 1.5",
    "repo ASSETS -o TMP/out --cost-table TMP/costs.json",
    "serve ASSETS --http-port 70000",
    # what is wrong in the input
    "convert TMP/other -o TMP/out",
    "convert ASSETS/tiny-dspark -o TMP/out --tp 2",
    "convert ASSETS/tiny-dspark -o TMP/out --quant fp8",
    "convert ASSETS/tiny-dspark -o TMP/out --format hf",
    "convert ASSETS/tiny-verifier -o TMP/out --tp 3",
    "convert ASSETS/tiny-verifier -o TMP/out --quant fp8 --tp 2",
    "convert ASSETS/tiny-verifier -o TMP/out --ep 2",
    "convert ASSETS/tiny-verifier -o TMP/out --recipe TMP/rules.json",
    "convert ASSETS/tiny-verifier -o TMP/out --calibration TMP/rules.json",
    "convert ASSETS/tiny-verifier -o TMP/out --resume",
    "convert ASSETS/tiny-verifier -o TMP/other",
    f"convert ASSETS/tiny-dspark -o TMP/out --expect-sha256 {'0' * 64}",
    "verify ASSETS/tiny-verifier",
    "engine --verifier ASSETS/tiny-dspark --target cpu -o TMP/out",
    "engine --verifier DATA --target cpu -o TMP/out",
    "engine --verifier ASSETS/tiny-verifier --drafter ASSETS/tiny-verifier --target cpu -o TMP/out",
    "engine --verifier ASSETS/tiny-verifier --drafter GOLDENS/dspark --target cpu -o TMP/out",
    "engine --verifier ASSETS/tiny-verifier --target cpu -o TMP/out --max-model-len 999999",
    "engine --verifier ASSETS/tiny-verifier --target cpu -o TMP/out --num-speculative-tokens 4",
    "engine --verifier ASSETS/tiny-verifier --target cpu -o TMP/out --plugins on",
    "engine --verifier ASSETS/tiny-verifier --target cpu -o TMP/out --mtp --num-speculative-tokens 17",
    "engine --verifier ASSETS/tiny-verifier --drafter ASSETS/tiny-dspark --target cpu -o TMP/out"
    " --num-speculative-tokens 9",
    "engine --verifier ASSETS/tiny-verifier --drafter ASSETS/tiny-dflash2 --target cpu -o TMP/out --markov-top-k 4",
    "engine --verifier ASSETS/tiny-verifier --drafter ASSETS/tiny-dspark --target cpu -o TMP/out --markov-top-k 999",
    "engine --verifier GOLDENS/verifier --target cpu -o TMP/out --mtp",
    "engine --from-bundle ASSETS -o TMP/out",
    "validate ASSETS/tiny-verifier --target cpu --stage nonsense",
    "plugins --target cpu",
    "plugins --target b200 --op nonsense",
    "generate ASSETS/tiny-verifier --prompt a --max-tokens 2",
    "repo ASSETS/tiny-verifier -o TMP/out",
    "serve ASSETS/tiny-verifier",
    "inspect ASSETS",
    # what the machine lacks
    "convert ASSETS/tiny-verifier -o TMP/out --device cuda",
    "calibrate ASSETS/tiny-verifier --input ASSETS/prompts.jsonl -o TMP/out",
    "plugins --target b200 --op argmax",
)


def mistake(line: str, home: Path) -> dict[str, Any]:
    """The exit code and all that is said of a mistake, on a machine that has no GPU, no ModelOpt and no Triton; what it
    left in `home`, an empty folder."""
    (home / "other").mkdir()
    (home / "other" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (home / "rules.json").write_text('[{"modules": "*", "format": "int3"}]')
    before = sorted(home.rglob("*"))
    places = {**PLACES, "TMP": home}
    words = [_placed(word, places) for word in shlex.split(line)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        for name in ("triton", "tensorrt", "modelopt.torch.quantization"):
            patch.setitem(sys.modules, name, None)
        result = run(*words, *([] if line == "compile" else ["-q"]))
    left = sorted(home.rglob("*"))
    text = result.output
    for name, place in sorted(places.items(), key=lambda item: -len(str(item[1]))):
        text = text.replace(str(place), name)
    raised = None if isinstance(result.exception, SystemExit) else repr(result.exception)
    said = {"code": result.exit_code, "message": text.splitlines(), "raised": raised, "left": left != before}
    return {name: value for name, value in said.items() if value}


def _placed(word: str, places: dict[str, Path]) -> str:
    name, slash, rest = word.partition("/")
    return f"{places[name]}{slash}{rest}" if name in places else word


# -- converted checkpoints ------------------------------------------------------------------------

CONVERSIONS = (
    *(f"ASSETS/tiny-verifier --quant {quant} --tp {tp}" for quant in ("auto", "bf16", "nvfp4") for tp in (1, 2)),
    "ASSETS/tiny-verifier --quant fp8",
    "ASSETS/tiny-verifier --quant nvfp4 --tp 2 --ep 2",
    "ASSETS/tiny-verifier --quant nvfp4 --calibration TMP/amax.json",
    "TMP/wide --quant fp8",
    "TMP/wide --quant nvfp4",
    "ASSETS/tiny-verifier --format hf",
    "ASSETS/tiny-verifier --format hf --quant fp8",
    "ASSETS/tiny-verifier --format hf --quant nvfp4",
    "ASSETS/tiny-dspark",
    "ASSETS/tiny-dspark --quant bf16",
    "ASSETS/tiny-dflash2",
    "GOLDENS/verifier",
    "GOLDENS/dspark",
    "GOLDENS/dspark_redvocab",
    "GOLDENS/dflash2",
)  # fmt: skip


def converted(line: str, home: Path) -> dict[str, str]:
    """The SHA-256 of every file of weights of a conversion, by name. home: an empty folder."""
    if "TMP" in line:
        _write_wide(home)
    result = run(
        "convert", *(_placed(word, {**PLACES, "TMP": home}) for word in line.split()), "-o", home / "out", "-q"
    )
    assert result.exit_code == 0, result.output
    return {path.name: sha256(path.read_bytes()) for path in sorted((home / "out").glob("*.safetensors"))}


def _write_wide(home: Path) -> None:
    """A verifier whose matrices span all magnitudes, zeros among them, so that scales meet their limits; and a largest
    activation of every matrix of its experts."""
    tensors = load_file(ASSETS / "tiny-verifier" / "model.safetensors")
    experts = [name.removesuffix(".weight") for name in sorted(tensors) if ".mlp.experts." in name]
    (home / "amax.json").write_text(json.dumps({module: 1 + at / 7 for at, module in enumerate(experts)}))
    group = {name: torch.arange(x.shape[-1]) // 16 for name, x in tensors.items() if x.dim() == 2}
    wide = {name: tensors[name] * (2.0 ** -(5 * at % 32)) * (at % 4 != 1) for name, at in group.items()}
    edit_checkpoint(ASSETS / "tiny-verifier", home / "wide", add={name: x.bfloat16() for name, x in wide.items()})


# -- networks -------------------------------------------------------------------------------------

BOTH = ("tiny-dspark", "tiny-dflash2")
DRAWN = {"draft_sampling": "probabilistic"}
# Target, drafters, options.
NETWORKS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "verifier alone": ("cpu", (), {}),
    "all, greedy": ("cpu", BOTH, {"mtp": True}),
    "all, drawn": ("cpu", BOTH, {"mtp": True, **DRAWN}),
    "all, bfloat16, tp 2": ("cpu", BOTH, {"mtp": True, "compute": "bfloat16", "tp": 2}),
    "drawn among the best": ("cpu", BOTH, {**DRAWN, "markov_top_k": 16}),
    "greedy among the best, 4 drafts, relative": (
        "cpu", ("tiny-dspark",), {"markov_top_k": 16, "num_speculative_tokens": 4, "drafter_window": "relative"},
    ),
    "fp8": ("cpu", (), {"mtp": True, "quant": "fp8"}),
    "nvfp4, tp 2, ep 2": ("cpu", (), {"mtp": True, "quant": "nvfp4", "tp": 2, "ep": 2}),
    "rtx-pro-6000, short": ("rtx-pro-6000", BOTH, {"mtp": True, "max_model_len": 128, "max_num_seqs": 2}),
    "b200, nvfp4, drawn": ("b200", BOTH, {"mtp": True, "quant": "nvfp4", **DRAWN, "markov_top_k": 16}),
    "h200, fp8": ("h200", BOTH, {"mtp": True, "quant": "fp8"}),
    "b300": ("b300", ("tiny-dspark",), {"compute": "float32"}),
    "GLM-5.3, b200, nvfp4, tp 8": ("b200", (), {"mtp": False, "quant": "nvfp4", "tp": 8}),
}  # fmt: skip


def deployed(name: str) -> Deployment:
    """One of `NETWORKS`, opened."""
    target, drafters, options = NETWORKS[name]
    full = name.startswith("GLM-5.3")
    verifier = DATA / "glm-5.3-config.json" if full else ASSETS / "tiny-verifier"
    folders = [ASSETS / drafter for drafter in drafters]
    return open_deployment(verifier, folders, TARGETS[target], BuildOptions(**options), config_only=full)


def networks(name: str) -> dict[str, str]:
    """Content hashes as engine directories record them, by member and profile; with those of the same networks with
    plugins where the target has them, and of the list of kernels that they ask for."""
    deployment = deployed(name)
    graphs = _graphs(deployment, backend())
    hashes = {place: graph.content_hash() for place, graph in graphs.items()}
    if deployment.has_plugins and not name.startswith("GLM-5.3"):
        with pytest.MonkeyPatch.context() as patch:
            for module in networks_with_plugins(patch):
                plugged = _graphs(deployment, Backend(module), plugged=True)
        hashes |= {f"{place} with plugins": graph.content_hash() for place, graph in plugged.items()}
    kernels = variants_of(deployment, list(graphs.values()))
    if deployment.has_plugins:
        hashes["kernels"] = _digest(one.name for one in kernels.variants)
        hashes["kept"] = _digest(kernels.kept)
    return hashes


def _graphs(deployment: Deployment, trt: Backend, **how: Any) -> dict[str, Any]:
    made = {}
    for member in deployment.members:
        for profile in deployment.profiles(member):
            net = deployment.author(member, profile, trt, **how)
            made[f"{member.name} {profile}"] = read(net.definition, net.backend)
    return made


def _digest(names: Iterable[str]) -> str:
    return sha256("\n".join(names).encode())
