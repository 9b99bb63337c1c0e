"""The GitHub Actions workflow runs commands that exist, on files that exist."""

from __future__ import annotations

import json
import re
import shlex

import yaml
from support.cli import done
from support.models import DATA

from glmspec.build.cli import main

ROOT = DATA.parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "validate.yml"


def workflow() -> dict:
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))


def commands(values: dict[str, str]) -> list[list[str]]:
    """The validate step for one row of the matrix, as the shell would split it."""
    (job,) = workflow()["jobs"].values()
    steps = {step.get("name"): step for step in job["steps"]}
    text = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: values[match[1]], steps["Validate"]["run"])
    text = text.replace('"$SOURCE"', str(ROOT / workflow()["env"]["SOURCE"]))
    return shlex.split(text)


def test_every_row_of_the_matrix_is_a_command(tmp_path):
    (job,) = workflow()["jobs"].values()
    known = {option for param in main.commands["validate"].params for option in param.opts}
    for row in job["strategy"]["matrix"]["include"]:
        command = commands(row)
        assert command[:2] == ["glmspec-build", "validate"]
        assert {word for word in command if word.startswith("--")} <= known
    command[command.index("--json") + 1] = str(tmp_path / "validation.json")
    command[command.index("--junit") + 1] = str(tmp_path / "validation.xml")
    done(*command[1:], "--stage", "config", "--stage", "weights")
    assert json.loads((tmp_path / "validation.json").read_text())["ok"]
    assert (tmp_path / "validation.xml").exists()


def test_what_it_installs_and_keeps_is_there():
    (job,) = workflow()["jobs"].values()
    text = WORKFLOW.read_text(encoding="utf-8")
    assert (ROOT / "constraints.txt").exists() and (ROOT / workflow()["env"]["SOURCE"]).exists()
    assert "docs/validate.md" in text and (ROOT / "docs" / "validate.md").exists()
    kept = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert kept[0]["if"] == "always()" and "validation.xml" in kept[0]["with"]["path"]
