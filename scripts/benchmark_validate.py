"""Benchmark of `validate --config-only` on GLM-5.3's config, a rank of eight; writes docs/benchmarks/.

For FP8 and NVFP4: what authoring a rank's network takes, whether two authorings have the same content hash, and the
whole command, its compiling stage over all 78 layers at once and over groups of layers, with nothing remembered and
with everything. Every command is a process of its own, whose peak memory is the kernel's count. docs/validate.md quotes
the times, and the command's own words.

    python scripts/benchmark_validate.py [--rounds N]
    python scripts/benchmark_validate.py --quote      # times nothing: counts layers anew and rewrites what is quoted
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from measured import OUT, ROOT, console, made_by, origin, write

from glmspec.build.deployment import open_deployment
from glmspec.build.settings import BuildOptions
from glmspec.build.target import PROXY_PACKAGE, TARGETS
from glmspec.network.limits import CONTEXT, GENERATION
from glmspec.network.reader import read
from glmspec.network.trt import backend

CONFIG = ROOT / "tests" / "data" / "glm-5.3-config.json"
TARGET, TP, GROUP = "b200", 8, 8
GUIDE = ROOT / "docs" / "validate.md"
GLMSPEC_BUILD = (sys.executable, "-c", "from glmspec.build.cli import main; main()")
EXAMPLE = "glmspec-build validate config.json --config-only --target b200 --tp 8 --quant nvfp4 --mtp"
TIMES = """| weights | what is compiled | whole command | of it, compiling | peak memory |
|---|---|---|---|---|
"""
PACKAGES = ("glmspec", "torch", "transformers", "tensorrt_rtx")


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Times each thing is measured; medians are reported.")
@click.option("--quote", is_flag=True, help="Time nothing: count layers, and rewrite docs/validate.md's quotes.")
def main(rounds: int, quote: bool) -> None:
    """Measure and write the report."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "config.json").write_bytes(CONFIG.read_bytes())
        if quote:
            result = json.loads((OUT / "validate.json").read_text(encoding="utf-8")) | {"networks": networks(folder)}
            write("validate", result, report)
            GUIDE.write_text(quoted(GUIDE.read_text(encoding="utf-8"), result, shown(folder)), encoding="utf-8")
            return
        config = {"target": TARGET, "tp": TP, "group layers": GROUP, "rounds": rounds}
        results = {quant: measure(folder, quant, rounds) for quant in ("fp8", "nvfp4")}
        counted = {"networks": networks(folder)}
    write("validate", made_by(PACKAGES, **config) | counted | {"results": results}, report)


def measure(folder: Path, quant: str, rounds: int) -> dict[str, Any]:
    """All numbers of one recipe."""
    numbers = authoring(folder, quant, rounds)
    numbers["whole"] = [command(folder, quant, "--group-layers", "0") for _ in range(min(rounds, 2))]
    cold, warm = [], []
    for number in range(rounds):
        cache = ("--cache", str(folder / f"{quant}{number}"))
        cold.append(command(folder, quant, "--group-layers", str(GROUP), *cache))
        warm.append(command(folder, quant, "--group-layers", str(GROUP), *cache))
    return numbers | {"groups, nothing remembered": cold, "groups, all remembered": warm}


def authoring(folder: Path, quant: str, rounds: int) -> dict[str, Any]:
    """Seconds to author a rank's network, its layers and its content hash, which is the same each time."""
    deployment = open_deployment(folder, (), TARGETS[TARGET], BuildOptions(tp=TP, quant=quant), config_only=True)
    by_profile: dict[str, Any] = {}
    for profile in (GENERATION, CONTEXT):
        seconds, hashes = [], set()
        for _ in range(rounds):
            start = time.perf_counter()
            net = deployment.author(deployment.verifier, profile, backend(PROXY_PACKAGE))
            seconds.append(time.perf_counter() - start)
            hashes.add(read(net.definition, net.backend).content_hash())
        if len(hashes) > 1:
            raise SystemExit(f"{profile}: two authorings of one network have different hashes: {hashes}")
        console.print(f"{quant}, {profile}: authored in {statistics.median(seconds):.2f} s")
        by_profile[profile] = {"seconds": seconds, "sha256": hashes.pop()}
    return {"authoring": by_profile}


def command(folder: Path, quant: str, *options: str) -> dict[str, float]:
    """One run of the command: seconds in all, of its compiling stage, and peak memory."""
    report = folder / "report.json"
    line = ["validate", str(folder), "--config-only", "--target", TARGET, "--tp", str(TP), "--quant", quant]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*GLMSPEC_BUILD, *line, "--json", str(report), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"validate failed: {report.read_text(encoding='utf-8')}")
    stages = json.loads(report.read_text(encoding="utf-8"))["stages"]
    stage_seconds = {stage["stage"]: stage["seconds"] for stage in stages}
    numbers = {"seconds": seconds, "build": stage_seconds["build"], "peak GB": usage.ru_maxrss * 1024 / 1e9}
    console.print(f"{quant} {' '.join(options[:2])}: {numbers}")
    return numbers


def networks(folder: Path) -> dict[str, Any]:
    """The layers of today's networks, by number format, model and profile. They are the same on every machine."""
    layers = {quant: layer_counts(folder, quant) for quant in ("fp8", "nvfp4")}
    return {"date": date.today().isoformat(), "glmspec": version("glmspec"), "layers": layers}


def layer_counts(folder: Path, quant: str) -> dict[str, int]:
    """Layers of every network of the quoted command with these weights."""
    options = BuildOptions(tp=TP, quant=quant, mtp=True)
    deployment = open_deployment(folder, (), TARGETS[TARGET], options, config_only=True)
    return {
        f"{member.name}, {profile}": deployment.author(member, profile, backend(PROXY_PACKAGE)).definition.num_layers
        for member in deployment.members
        for profile in deployment.profiles(member)
    }


def shown(folder: Path) -> str:
    """What the quoted command prints."""
    line = [*GLMSPEC_BUILD, *EXAMPLE.split()[1:]]
    done = subprocess.run(line, cwd=folder, env=os.environ | {"COLUMNS": "126"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{EXAMPLE}: {done.stdout}{done.stderr}")
    return done.stdout


def quoted(guide: str, result: dict[str, Any], printed: str | None = None) -> str:
    """docs/validate.md with the times of this result and, where it is given, what the command printed."""
    head, table, tail = guide.partition(TIMES)
    guide = head + table + times(result) + tail[tail.index("\n## ") :]
    if printed is None:
        return guide
    head, command, tail = guide.partition(f"    $ {EXAMPLE}\n")
    block = "".join(f"    {line}".rstrip() + "\n" for line in printed.strip().splitlines())
    return f"{head}{command}\n{block}\n{tail[tail.index('And one that fails') :]}"


def times(result: dict[str, Any]) -> str:
    """The lines of the table of whole commands."""
    lines = []
    for quant, numbers in result["results"].items():
        for what in ("whole", "groups, nothing remembered", "groups, all remembered"):
            middle = {key: statistics.median(run[key] for run in numbers[what]) for key in numbers[what][0]}
            title = "all 78 layers in one network" if what == "whole" else f"groups of {GROUP} layers{what[6:]}"
            cells = f"{middle['seconds']:.1f} s | {middle['build']:.1f} s | {middle['peak GB']:.1f} GB"
            lines.append(f"| {quant} | {title} | {cells} |")
    return "\n".join(lines) + "\n"


def report(result: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# `validate --config-only` on GLM-5.3, a rank of eight",
        "",
        origin("benchmark_validate.py", result),
        f"Target {TARGET}, --tp {TP}, default limits; compiled with tensorrt_rtx for SM120 as the proxy, one static",
        f"bucket of a generation step. Medians of {result['config']['rounds']} runs (whole: of 2). CPU only; shared",
        "machines drift.",
        "",
        "| weights | profile | layers | authored in |",
        "|---|---|---|---|",
    ]
    for quant, numbers in result["results"].items():
        for profile, authored in numbers["authoring"].items():
            layers = result["networks"]["layers"][quant][f"verifier, {profile}"]
            lines.append(f"| {quant} | {profile} | {layers:,} | {statistics.median(authored['seconds']):.2f} s |")
    lines += ["", f"Layers are counted on {result['networks']['date']}, by glmspec {result['networks']['glmspec']}."]
    lines += ["", "Content hashes of repeated authorings are equal (the script fails otherwise).", ""]
    return "\n".join(lines) + "\n" + TIMES + times(result)


if __name__ == "__main__":
    main()
