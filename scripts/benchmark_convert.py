"""Benchmark of the converter on a synthetic FP8 checkpoint with GLM-5.3's tensor shapes; writes docs/benchmarks/.

Three questions, each answered in one run because machines drift: what the arithmetic of FP8 -> NVFP4 costs on one core
(and ModelOpt's own CPU path), how the whole conversion compares with the disk's own copy, and how much memory it takes.

    python scripts/benchmark_convert.py [--rounds N] [--scratch FOLDER]
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import torch
from measured import ROOT, console, made_by, origin, write
from rich.progress import track
from safetensors.torch import save_file

from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.formats import Matrix, amax, convert, to_float32
from glmspec.convert.implied import ImpliedSource
from glmspec.convert.recipe import RECIPES
from glmspec.convert.writer import Run
from glmspec.core.fields import read_json

CONFIG = ROOT / "tests" / "data" / "glm-5.3-config.json"
PACKAGES = ("glmspec", "torch", "numba", "nvidia-modelopt", "numpy")
EXPERTS, SHARD_BYTES = 96, 1 << 29
WORKERS = os.cpu_count() or 1


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds; the medians are reported.")
@click.option("--scratch", type=click.Path(file_okay=False, path_type=Path), help="Where the checkpoints go.")
@click.option("--convert-once", nargs=2, type=click.Path(path_type=Path), hidden=True, help="Source and output.")
def main(rounds: int, scratch: Path | None, convert_once: tuple[Path, Path] | None) -> None:
    """Measure and write the report."""
    if convert_once:
        return convert_in_this_process(*convert_once)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        source = Path(folder) / "hf"
        size = synthesize(source)
        config = {"input GB": size / 1e9, "experts": EXPERTS, "workers": WORKERS, "rounds": rounds}
        result = made_by(PACKAGES, **config) | {
            "arithmetic": measure_arithmetic(rounds),
            "whole": measure_whole(source, Path(folder), size, rounds),
        }
    write("convert", result, report)


def synthesize(folder: Path) -> int:
    """A verifier of one dense and one MoE layer with the real widths and fewer experts and words; bytes written."""
    folder.mkdir()
    config = read_json(CONFIG)
    for key in ("index_topk_freq", "index_skip_topk_offset", "first_k_dense_replace"):
        config.pop(key, None)
    config |= {
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "shared"],
        "n_routed_experts": EXPERTS,
        "num_nextn_predict_layers": 0,
        "vocab_size": 4096,
        "eos_token_id": [1],
        "quantization_config": {"quant_method": "fp8"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator, shards, shard, size, total = torch.Generator().manual_seed(0), [], {}, 0, 0
    for name, info in track(ImpliedSource(folder).tensors.items(), "Making the checkpoint", console=console):
        tensor = random_tensor(info.dtype, info.shape, generator)
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        if size > SHARD_BYTES:
            shards.append(list(shard))
            save_file(shard, folder / f"model-{len(shards):05d}.safetensors")
            shard, size = {}, 0
    shards.append(list(shard))
    save_file(shard, folder / f"model-{len(shards):05d}.safetensors")
    where = {name: f"model-{at:05d}.safetensors" for at, names in enumerate(shards, 1) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def random_tensor(dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Gaussian weights, in FP8 as a real quantizer leaves them."""
    values = torch.randn(shape, generator=generator)
    if dtype == "F8_E4M3":
        return (values * 90).clamp(-448, 448).to(torch.float8_e4m3fn)
    if dtype == "F32":
        return values.abs() * 1e-4
    return values.bfloat16()


def measure_arithmetic(rounds: int) -> dict[str, float]:
    """GB of FP8 input a second on one thread, in memory: our kernels, and ModelOpt's functions."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    codes = random_tensor("F8_E4M3", (2048, 6144), generator)
    scales = torch.rand(16, 48, generator=generator) * 1e-4
    block = Matrix("fp8_block", {"": codes.view(torch.uint8).numpy(), "scale_inv": scales.numpy()})
    bfloat16 = convert(block, "bfloat16")
    size = codes.nbytes
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "FP8 blocks to NVFP4": (size, lambda: convert(block, "nvfp4", amax(block))),
        "bfloat16 to NVFP4": (2 * size, lambda: convert(bfloat16, "nvfp4", amax(bfloat16))),
        "FP8 blocks to float32": (size, lambda: to_float32(block)),
        "ModelOpt: bfloat16 to NVFP4": (2 * size, lambda: modelopt(bfloat16.tensor())),
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):  # the first one compiles
        for name, (volume, run) in cases.items():
            start = time.perf_counter()
            run()
            speeds[name].append(volume / 1e9 / (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}


def modelopt(weight: torch.Tensor) -> object:
    """The same quantization by ModelOpt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

    return NVFP4QTensor.quantize(weight, 16, None, weight.abs().amax().float() / (6 * 448))


def measure_whole(source: Path, folder: Path, size: int, rounds: int) -> dict[str, float]:
    """Seconds of copying the checkpoint's files, and of converting them in a process of its own, in turn, with the
    page cache emptied of the source before each; peak memory of the conversion."""
    copies, conversions, peaks = [], [], []
    for _ in track(range(rounds), "Copy, convert", console=console):
        forget(source)
        start = time.perf_counter()
        copy(source, folder / "copy")
        copies.append(time.perf_counter() - start)
        shutil.rmtree(folder / "copy")
        forget(source)
        command = [sys.executable, __file__, "--convert-once", str(source), str(folder / "out")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, peak = map(float, done.stdout.split()[-2:])
        conversions.append(seconds)
        peaks.append(peak)
        shutil.rmtree(folder / "out")
    ratios = [copied / converted for copied, converted in zip(copies, conversions, strict=True)]
    return {
        "copy GB/s": size / 1e9 / statistics.median(copies),
        "convert GB/s": size / 1e9 / statistics.median(conversions),
        "convert to copy": statistics.median(ratios),
        "peak RSS GB": max(peaks),
    }


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy(source: Path, out: Path) -> None:
    """Copy a folder's files and sync them."""
    out.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, out / path.name)
        descriptor = os.open(out / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def convert_in_this_process(source: Path, out: Path) -> None:
    """Convert FP8 to NVFP4 and print the seconds and the peak memory in GB."""
    start = time.perf_counter()
    plan_conversion(source, ConvertOptions(RECIPES["nvfp4"])).write(out, Run(workers=WORKERS))
    seconds = time.perf_counter() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def report(result: dict) -> str:
    """The page people read."""
    config, whole = result["config"], result["whole"]
    rows = "\n".join(f"| {name} | {speed:.2f} |" for name, speed in result["arithmetic"].items())
    return f"""# Converter benchmark: FP8 to NVFP4, GLM-5.3's tensor shapes

{origin("benchmark_convert.py", result)}
A synthetic checkpoint of {config["input GB"]:.2f} GB: the real widths, {config["experts"]} experts, FP8 with 128x128
blocks. Medians of {config["rounds"]} rounds in one run. Shared machines drift: compare the ratios. CPU only.

Arithmetic alone, one thread, in memory, largest magnitude included:

| what | GB of input a second |
|---|---|
{rows}

The whole conversion (read, quantize experts to NVFP4, write, sync, hash input and output; {config["workers"]} workers):

| what | value |
|---|---|
| copying the input's files, synced | {whole["copy GB/s"]:.2f} GB/s |
| converting them | {whole["convert GB/s"]:.2f} GB/s of input |
| converting, in units of copying | {whole["convert to copy"]:.2f} |
| peak memory of the conversion | {whole["peak RSS GB"]:.2f} GB |
"""


if __name__ == "__main__":
    main()
