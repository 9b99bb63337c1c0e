"""Running `glmspec-build` in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from glmspec.build.cli import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def done(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(code: int, *arguments: object) -> str:
    """The command ends with this code and a message, without a traceback; returns the message."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)  # anything else would print a traceback
    assert not result.stdout
    if code != 2:
        assert result.stderr.count("glmspec-build: ") == 1
    return result.stderr
