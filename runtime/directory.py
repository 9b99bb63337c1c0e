"""An engine directory as it is read: by the runtime, the repository generator and `inspect`.

`build/engine_writer.py` writes it; its docstring shows the layout. A bundle is read by the same class: it has the same
records, and no plans yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from glmspec.convert.checkpoint import Checkpoint, built_for
from glmspec.core.errors import EngineError, MissingCapability
from glmspec.core.fields import Fields, read_json
from glmspec.core.files import BUNDLE, ENGINES
from glmspec.core.sealed import check_files, check_shape, kind_of, open_sealed
from glmspec.models.configs.illegal import IllegalIds
from glmspec.network.limits import EngineLimits
from glmspec.network.machine import Machine, this_machine

AGAIN = {ENGINES: "Build the engine directory again.", BUNDLE: "Prepare the bundle again."}
_HOW = {
    ENGINES: "an engine directory. Make one: glmspec-build engine --verifier DIR -o ENGINES",
    BUNDLE: "a bundle. Make one: glmspec-build engine --verifier DIR --target b200 -o OUT",
}
SHAPE = {
    "producer": {"kind": str, "version": str},
    "target": str,
    "compute": str,
    "compute_capability": (str, NoneType),
    "tensorrt": {"package": str, "version": str},
    "mapping": {"tp_size": int, "moe_ep_size": int},
    "limits": dict,
    "eos_token_ids": list,
    "illegal_ids": list,
    "tokenizer": (str, NoneType),
    "verifier": str,
    "mtp": (str, NoneType),
    "acceptance": list,
    "drafters": list,
    "files": dict,
}
BUNDLE_SHAPE = SHAPE | {"kernels": (str, NoneType), "finish": str}
DRAFTER = {"name": str, "kind": str, "source": str}
WEIGHTS = {"folder": str, "sha256": str, "config_sha256": str}
CONTRACT = {"inputs": list, "outputs": list}
CHOICES = {
    "taps": list,
    "hidden": bool,
    "drafter_window": (str, NoneType),
    "num_speculative_tokens": (int, NoneType),
    "markov_top_k": (int, NoneType),
    "sampled": bool,
    "q": (dict, NoneType),
    "illegal_ids": list,
}
MODEL = {
    "pretrained_config": {"architecture": str, "eos_token_ids": (list, NoneType), "source": {"folder": str}},
    "build_config": {"compute": str, **CHOICES, "law": (dict, NoneType), "num_drafts": int, "limits": dict},
    "weights": WEIGHTS,
    "networks": dict,
    "plans": dict,
    "contract": CONTRACT,
}


@dataclass(frozen=True)
class EngineDirectory:
    """An engine directory's own record, checked against the files it lists."""

    folder: Path
    record: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, kind: str = ENGINES) -> EngineDirectory:
        """kind: ENGINES, or BUNDLE for one without plans. Raises `EngineError` when it is none, or when a file it lists
        is gone or changed."""
        actual = kind_of(folder)
        if actual == BUNDLE and kind == ENGINES:
            raise EngineError(
                f"{folder}: a bundle, not an engine directory yet. Finish it on the machine that it is for: "
                f"glmspec-build engine --from-bundle {folder} -o ENGINES"
            )
        if actual != kind:
            raise EngineError(f"{folder}: not {_HOW[kind]}")
        if kind == BUNDLE and "members" in read_json(folder / "config.json"):
            raise EngineError(f"{folder}: a bundle that an earlier version of glmspec prepared. {AGAIN[BUNDLE]}")
        shape = BUNDLE_SHAPE if kind == BUNDLE else SHAPE
        directory = cls(folder, open_sealed(folder / "config.json", shape, AGAIN[kind]))
        directory._check()
        return directory

    def _check(self) -> None:
        fields = Fields(self.record, f"{self.folder}/config.json")
        for at, drafter in enumerate(self.drafters):
            check_shape(Fields({str(at): drafter}, f"{fields.source}: drafters").section(str(at)), DRAFTER)
        if not all(isinstance(name, str) for name in self.acceptance):
            fields.fail("acceptance", "names")
        check_files(self.folder, self.record["files"], self.again)
        if self.tokenizer:
            for path in self.tokenizer.rglob("*"):
                if path.is_file() and str(path.relative_to(self.folder)) not in self.record["files"]:
                    raise EngineError(
                        f"{path}: found in the tokenizer's folder, and `engine` did not write it. Remove it."
                    )
        for name, model in self.models.items():
            path = self.folder / name / "config.json"
            check_shape(Fields(model, str(path)), MODEL)
            limits_of(Fields(model["build_config"], str(path)))
        verifier = self.model(self.verifier)
        for key, built in (
            ("limits", verifier["build_config"]["limits"]),
            ("illegal_ids", verifier["build_config"]["illegal_ids"]),
            ("eos_token_ids", verifier["pretrained_config"]["eos_token_ids"]),
        ):
            if self.record.get(key) != built:
                fields.fail(key, f"what the engines were built with: {built}")

    def check_machine(self, machine: Machine) -> None:
        """Raise `EngineError` when plans were compiled for another GPU or by another TensorRT than this machine's."""
        capability, tensorrt = self.record["compute_capability"], self.record["tensorrt"]
        if capability is None:
            return  # networks are authored at load, and their hashes compared
        if machine.compute_capability not in (None, capability):
            raise EngineError(
                f"{self.folder}: built for {capability}, and this machine's GPU is {machine.compute_capability}. "
                "Build the engine directory for this GPU."
            )
        if machine.version not in (None, tensorrt["version"]):
            raise EngineError(
                f"{self.folder}: built by {tensorrt['package']} {tensorrt['version']}, and this machine has "
                f"{machine.version}. Install that version, or build the engine directory again."
            )

    def check_runs(self) -> None:
        """Raise `EngineError` for engines of another machine, `MissingCapability` for those this version cannot run."""
        self.check_machine(this_machine(self.record["tensorrt"]["package"]))
        target = self.record["target"]
        if target != "cpu":
            raise MissingCapability(
                f"{self.folder}: built for {target}, and this version runs engines for the target cpu only. "
                "Build with --target cpu to generate or serve on this machine."
            )

    @property
    def again(self) -> str:
        """What to do about one that changed."""
        return AGAIN[self.record["producer"]["kind"]]

    @property
    def verifier(self) -> str:
        """Name of the verifier's folder."""
        return self.record["verifier"]

    @property
    def drafters(self) -> list[dict[str, str]]:
        """Name, kind and source folder of each block drafter, in the order they were given."""
        return self.record["drafters"]

    @property
    def choices(self) -> list[str]:
        """Names of all that can draft: the block drafters, then the MTP module."""
        return [*(drafter["name"] for drafter in self.drafters), *([self.mtp] if self.mtp else [])]

    @property
    def acceptance(self) -> list[str]:
        """Names of the networks on the verifier's logits."""
        return self.record["acceptance"]

    @property
    def mtp(self) -> str | None:
        """Name of the folder of the verifier's MTP module, None without one."""
        return self.record["mtp"]

    def acceptance_for(self, drafter: str | None) -> list[str]:
        """The acceptance networks that a drafter needs, or that plain decoding does (None)."""
        probs = self.model(drafter)["build_config"]["law"] if drafter else None
        return [name for name in self.acceptance if (q := self.model(name)["build_config"]["q"]) is None or q == probs]

    @property
    def names(self) -> list[str]:
        """Every model's folder."""
        mtp = [self.mtp] if self.mtp else []
        return [self.verifier, *mtp, *(drafter["name"] for drafter in self.drafters), *self.acceptance]

    @property
    def limits(self) -> EngineLimits:
        """The limits every model was built for."""
        return limits_of(Fields(self.record, f"{self.folder}/config.json"))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        return tuple(self.record["eos_token_ids"])

    @property
    def illegal(self) -> IllegalIds:
        """Token ids that the head has rows for and the tokenizer does not know."""
        return IllegalIds.from_json(self.record["illegal_ids"])

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's folder, None without one."""
        return self.folder / self.record["tokenizer"] if self.record["tokenizer"] else None

    def model(self, name: str) -> dict[str, Any]:
        """A model's own config.json."""
        return read_json(self.folder / name / "config.json")

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Every model's own config.json, by name."""
        return {name: self.model(name) for name in self.names}

    def choose_drafter(self, name: str | None) -> str | None:
        """The drafter called `name`, or whose source folder was called so; for None the first block drafter, else the
        MTP module, else none. Raises `EngineError` for a name that is unknown or fits two."""
        if name is None:
            return self.choices[0] if self.choices else None
        if name == self.mtp:
            return name
        for key in ("name", "source"):
            names = [drafter["name"] for drafter in self.drafters if drafter[key] == name]
            if len(names) == 1:
                return names[0]
            if names:
                raise EngineError(f"{self.folder}: drafter {name!r}: fits {' and '.join(names)}; say which.")
        known = ", ".join(self.choices) or "none"
        raise EngineError(
            f"{self.folder}: drafter {name!r}: no such drafter in this engine directory. It has: {known}."
        )

    def weights(self, name: str) -> Checkpoint:
        """A model's checkpoint, its files not hashed. Raises when it moved or is not the one it was built for."""
        return self._weights(name, self.model(name)["weights"])

    def _weights(self, name: str, recorded: dict[str, str]) -> Checkpoint:
        return built_for((self.folder / name / recorded["folder"]).resolve(), self.folder / name, recorded, self.again)

    def all_weights(self) -> dict[str, Checkpoint]:
        """Every model's checkpoint, as `weights` has it; models that share one have one value (see `each_once`)."""
        opened: dict[tuple[str, ...], Checkpoint] = {}
        checkpoints = {}
        for name, model in self.models.items():
            recorded = model["weights"]
            key = tuple(recorded[part] for part in WEIGHTS)
            if key not in opened:
                opened[key] = self._weights(name, recorded)
            checkpoints[name] = opened[key]
        return checkpoints

    def checkpoint(self, name: str) -> Checkpoint:
        """A model's checkpoint to load. Raises when it is not the one it was built for: by its recorded digests, and up
        to 1 GiB by hashing its files."""
        checkpoint = self.weights(name)
        checkpoint.check_loaded()
        return checkpoint


def limits_of(fields: Fields) -> EngineLimits:
    """What a record holds under `limits`. Raises `ConfigError` for other keys than there are limits."""
    try:
        return EngineLimits(**fields.section("limits").values)
    except TypeError:
        fields.fail("limits", f"numbers: {', '.join(limit.name for limit in dataclasses.fields(EngineLimits))}")


def each_once(weights: Mapping[str, Checkpoint]) -> list[Checkpoint]:
    """Each checkpoint once, in the order of the models that have it. weights: by the model's name."""
    return list({checkpoint.folder: checkpoint for checkpoint in weights.values()}.values())
