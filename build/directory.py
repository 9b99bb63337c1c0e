"""An engine directory as it is read: by the runtime, the repository generator and `inspect`.

`build/engine.py` writes it; its docstring shows the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from glmspec.build.configs.fields import Fields, read_json
from glmspec.build.configs.illegal import IllegalIds
from glmspec.build.configs.limits import EngineLimits
from glmspec.build.errors import EngineError
from glmspec.build.machine import Machine
from glmspec.convert.checkpoint import Checkpoint, read_checkpoint
from glmspec.convert.files import BUNDLE, ENGINES, sha256


@dataclass(frozen=True)
class EngineDirectory:
    """An engine directory's own record, checked against the files it lists."""

    folder: Path
    record: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> EngineDirectory:
        """Raises `EngineError` when it is none, or when a file it lists is gone or changed."""
        record = read_json(folder / "config.json")
        kind = record["producer"].get("kind") if isinstance(record.get("producer"), dict) else None
        if kind == BUNDLE:
            raise EngineError(
                f"{folder}: a bundle, not an engine directory yet. Finish it on a machine with a {record['target']}: "
                f"glmspec-build engine --from-bundle {folder} -o ENGINES"
            )
        if kind != ENGINES:
            raise EngineError(
                f"{folder}: not an engine directory. Make one: glmspec-build engine --verifier DIR -o {folder}"
            )
        if not {"compute_capability", "mtp", "mapping", "acceptance", "illegal_ids"} <= record.keys():
            raise EngineError(f"{folder}: built by another version of glmspec. Build the engine directory again.")
        directory = cls(folder, record)
        directory._check()
        return directory

    def _check(self) -> None:
        fields = Fields(self.record, f"{self.folder}/config.json")
        for name, digest in fields.section("files").values.items():
            if not (self.folder / name).exists():
                raise EngineError(f"{self.folder / name}: missing. Build the engine directory again.")
            if sha256(self.folder / name) != digest:
                raise EngineError(
                    f"{self.folder / name}: changed since the engine directory was built. Build it again."
                )
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

    def judges(self, drafter: str | None) -> list[str]:
        """The acceptance networks that a drafter needs, or that plain decoding does (None)."""
        law = self.model(drafter)["build_config"]["law"] if drafter else None
        return [name for name in self.acceptance if (q := self.model(name)["build_config"]["q"]) is None or q == law]

    @property
    def names(self) -> list[str]:
        """Every model's folder."""
        mtp = [self.mtp] if self.mtp else []
        return [self.verifier, *mtp, *(drafter["name"] for drafter in self.drafters), *self.acceptance]

    @property
    def limits(self) -> EngineLimits:
        """The limits every model was built for."""
        return EngineLimits(**self.record["limits"])

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

    def choose_drafter(self, name: str | None) -> str | None:
        """The drafter called `name`, or whose source folder was called so; for None the first block drafter, else the
        MTP module, else none. Raises `EngineError` for a name that is unknown or fits two."""
        if name is None:
            return self.choices[0] if self.choices else None
        if name == self.mtp:
            return name
        for key in ("name", "source"):
            found = [drafter["name"] for drafter in self.drafters if drafter[key] == name]
            if len(found) == 1:
                return found[0]
            if found:
                raise EngineError(f"{self.folder}: drafter {name!r}: fits {' and '.join(found)}; say which.")
        known = ", ".join(self.choices) or "none"
        raise EngineError(
            f"{self.folder}: drafter {name!r}: no such drafter in this engine directory. It has: {known}."
        )

    def checkpoint(self, name: str) -> Checkpoint:
        """A model's weights. Raises when they moved or are not those it was built for: by their recorded digest,
        and up to 1 GiB by hashing the file."""
        weights = self.model(name)["weights"]
        home = (self.folder / name / weights["folder"]).resolve()
        if not (home / "config.json").exists():
            raise EngineError(f"{self.folder / name}: its weights are expected in {home}, and are not there.")
        checkpoint = read_checkpoint(home)
        expected = f"expected {weights['sha256'][:12]}"
        if checkpoint.weights_sha256 != weights["sha256"]:
            self._refuse(name, home, f"found {checkpoint.weights_sha256[:12]}, {expected}")
        for path, why in checkpoint.changed():
            self._refuse(name, path, why)
        return checkpoint

    def _refuse(self, name: str, place: Path, why: str) -> NoReturn:
        raise EngineError(
            f"{place}: these are not the weights {self.folder / name} was built for ({why}). Build the engine again."
        )
