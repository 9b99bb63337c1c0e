"""What stays as it is, whatever a refactoring moves: options, messages, converted bytes, networks, kernels.

`python tests/support/freeze.py` writes what these tests compare with. Change it knowingly: scripts depend on options,
checkpoints and engine directories on digests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import compiled, frozen

FROZEN = json.loads(frozen.FROZEN.read_text(encoding="utf-8"))


def test_what_is_kept_is_what_is_compared():
    """No digest is left of a case that is gone."""
    for name, cases in (
        ("mistakes", frozen.MISTAKES),
        ("checkpoints", frozen.CONVERSIONS),
        ("networks", frozen.NETWORKS),
    ):
        assert list(FROZEN[name]) == list(cases)


def test_commands_in_the_order_of_the_work():
    assert list(frozen.commands()) == list(FROZEN["commands"])


@pytest.mark.parametrize("name", FROZEN["commands"])
def test_a_command_s_help_options_and_arguments(name):
    found, kept = frozen.commands()[name], FROZEN["commands"][name]
    names = [[one["names"] for one in command["parameters"]] for command in (found, kept)]
    assert names[0] == names[1]
    for parameter, as_it_was in zip(found["parameters"], kept["parameters"], strict=True):
        assert parameter == as_it_was
    assert found["help"] == kept["help"]


@pytest.mark.parametrize("line", frozen.MISTAKES)
def test_a_mistake_s_exit_code_and_message(line, tmp_path):
    """And nothing is left behind."""
    found = frozen.mistake(line, tmp_path)
    assert found == FROZEN["mistakes"][line]
    assert found.keys() == {"code", "message"}


@pytest.mark.parametrize("line", frozen.CONVERSIONS)
def test_a_converted_checkpoint_s_bytes(line, tmp_path: Path):
    assert frozen.converted(line, tmp_path) == FROZEN["checkpoints"][line]


@pytest.mark.parametrize("name", frozen.NETWORKS)
def test_networks(name):
    """Engine directories and compiled plans are known by these."""
    assert frozen.networks(name) == FROZEN["networks"][name]


def test_every_kernel_s_ptx_is_kept():
    """Their digests are compared where they are compiled: the tests of each op (`support.compiled`)."""
    assert list(json.loads(compiled.PTX.read_text())) == [variant.name for variant in compiled.every_variant()]
