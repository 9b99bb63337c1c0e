"""`glmspec-build calibrate`: the largest input of every quantizable module, collected by ModelOpt on a live model.

The model is transformers' own, so it must fit this machine (on a GPU machine it is spread over the GPUs there are).
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glmspec.convert.recipe import quantizable
from glmspec.convert.source import Source
from glmspec.convert.storage import EXPERT_MATRICES, weights_of
from glmspec.convert.tokenizer import has_tokenizer
from glmspec.core.errors import ConfigError, MissingCapability
from glmspec.core.fields import read_json
from glmspec.core.files import check_output, json_bytes, write_output
from glmspec.core.progress import Progress
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.network.formats import QUANTIZED

_LINEAR = re.compile(r"(.*)\.input_quantizer\._amax")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)_input_quantizer\._amax")


def calibrate(folder: Path, prompts: Path, out: Path, progress: Progress) -> int:
    """Run every prompt through the verifier in `folder` and write {module: amax} to `out`; the number of modules.
    prompts: JSON lines with `prompt_token_ids`, or `prompt` when the folder has a tokenizer. Raises naming the line."""
    check_output(out)
    quantization = _modelopt()
    config = VerifierConfig.from_hf(read_json(folder / "config.json"), f"{folder}/config.json")
    if any(weight.format in QUANTIZED for weight in weights_of(Source(folder)).values()):
        raise ConfigError(f"{folder}: its weights are quantized; calibrate the checkpoint that they were made from.")
    ids = _prompts(folder, prompts, config)
    if not ids:
        raise ConfigError(f"{prompts}: found no prompts, expected JSON lines.")
    with progress.stage("Loading the model"):
        model = _load(folder)

    def forward(model: Any) -> None:
        import torch

        with torch.inference_mode(), progress.steps("Calibrating", len(ids)) as advance:
            for number, token_ids in enumerate(ids, 1):
                model(torch.tensor([token_ids], device=model.device), use_cache=False)
                advance(f"prompt {number}")

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints what it registers
        warnings.simplefilter("ignore")
        quantization.quantize(model, quantization.FP8_DEFAULT_CFG, forward)
    amaxes = dict(sorted(_amaxes(model, config.n_routed_experts)))
    write_output(out, json_bytes(amaxes))
    return len(amaxes)


def _modelopt() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt.torch.quantization as quantization
    except ImportError as error:
        raise MissingCapability(f"calibrate needs ModelOpt ({error}): install glmspec's extra `quant`.") from None
    return quantization


def _load(folder: Path) -> Any:
    import torch
    from transformers import GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # its report lists the MTP module, tensor by tensor
    logging.disable_progress_bar()
    options: dict[str, Any] = (
        {"dtype": "auto", "device_map": "auto"} if torch.cuda.is_available() else {"dtype": torch.float32}
    )
    return GlmMoeDsaForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def _amaxes(model: Any, experts: int) -> Iterator[tuple[str, float]]:
    """Module and amax. The experts of a layer share one: ModelOpt sees their inputs together."""
    for name, buffer in model.named_buffers():
        amax = float(buffer.max()) if name.endswith("_amax") else 0.0
        if match := _EXPERTS.fullmatch(name):
            for expert in range(experts):
                yield from ((f"{match[1]}.{expert}.{kind}", amax) for kind in EXPERT_MATRICES[match[2]])
        elif (match := _LINEAR.fullmatch(name)) and quantizable(match[1]) and amax > 0:
            yield match[1], amax


def _prompts(folder: Path, path: Path, config: VerifierConfig) -> list[tuple[int, ...]]:
    from glmspec.runtime.prompts import read_requests
    from glmspec.runtime.text import Tokenizer

    tokenizer = Tokenizer(folder) if has_tokenizer(folder) else None
    limit = config.max_position_embeddings
    requests = read_requests(
        path, tokenizer, settings={"max_tokens": 1}, vocab_size=config.vocab_size, max_model_len=limit
    )
    return [request.prompt_ids for request in requests]
