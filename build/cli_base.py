"""What every command has: options in sections, sizes such as 128k, -q, -v and --log-file, and errors as one message."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from glmspec.core.errors import GlmspecError, os_error_text

Value = TypeVar("Value")
_HUB_ID = re.compile(r"(?:https?://huggingface\.co/|hf://)?([\w.-]+/([\w.-]+))/?")
_COUNT = re.compile(r"(\d+)|(\d+(?:\.\d+)?)([km])|(\d+)([KM])")
_TIMES = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
COMMON = "Every command"


class Count(click.ParamType):
    """A number of tokens, as vLLM reads it: 4096, 128k (128,000) or 128K (131,072). least: the least that is legal."""

    name = "count"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The word that --help shows, as click's own number types have one."""
        return "COUNT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of tokens. Fails, naming the option, for text that is no count and for less than `least`."""
        if not isinstance(value, int):
            match = _COUNT.fullmatch(value)
            if not match:
                self.fail(f"{value!r} is no count: give a number such as 4096, 128k (128,000) or 128K (131,072).")
            number = float(match[2] or match[4] or match[1]) * _TIMES.get(match[3] or match[5], 1)
            value = int(match[1]) if match[1] else round(number)
        if value < self.least:
            self.fail(f"{value} is not in the range x>={self.least}.", param, ctx)
        return value


class Place(click.Path):
    """A folder or file that is there; what looks like a Hugging Face id in its place gets advice."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Fails for one that is not there, with the command that downloads it where it looks like an id."""
        match = _HUB_ID.fullmatch(str(value))
        if match and not Path(value).exists() and not Path(match[1]).parent.exists():
            self.fail(
                f"{value}: found no such folder; it looks like a Hugging Face id. Download it, then give its folder: "
                f"hf download {match[1]} --local-dir {match[2]}",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


FOLDER = Place(exists=True, file_okay=False, path_type=Path)
PLACE = Place(exists=True, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
WRITTEN = click.Path(dir_okay=False, path_type=Path)
JSON = click.Path(dir_okay=False, allow_dash=True, path_type=Path)
OUT = click.Path(file_okay=False, path_type=Path)


def section(title: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give a command these options, in this order, under a title of --help."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
            command.__click_params__[-1].section = title
        return command

    return add


def as_one(kind: Callable[..., Value]) -> Callable[[Callable[[Value], None]], Callable[..., None]]:
    """Hand a command its parameters as one value. kind: a dataclass whose fields are called as they are."""

    def decorate(command: Callable[[Value], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_one_value(**values: Any) -> None:
            command(kind(**values))

        return with_one_value

    return decorate


class Command(click.Command):
    """Shows its options in sections; has -q, -v and --log-file, and makes the `Progress` that they ask for."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        common = (
            click.Option(["-q", "--quiet"], is_flag=True, help="Say nothing but results and errors."),
            click.Option(["-v", "--verbose"], is_flag=True, help="Say more: versions, times, memory."),
            click.Option(["--log-file"], type=WRITTEN, help="Append all that is said, with the time, to a file."),
        )
        for option in common:
            vars(option)["section"] = COMMON
        self.params = [*self.params, *common]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with its `Progress` in `ctx.obj`; what ends it is in the log too."""
        from glmspec.core.progress import RichProgress

        self._refuse_one_file_twice(ctx)
        quiet, verbose, log = (ctx.params.pop(name) for name in ("quiet", "verbose", "log_file"))
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose exclude each other")
        try:
            ctx.obj = RichProgress(quiet=quiet, verbose=verbose, log=log)
        except OSError as error:
            raise GlmspecError(f"--log-file {log}: cannot be written ({error.strerror}). Choose another.") from None
        try:
            ctx.obj.log(f"$ glmspec-build {shlex.join(sys.argv[1:])}")
            if verbose or log:
                ctx.obj.detail(_versions())
            return super().invoke(ctx)
        except (GlmspecError, click.ClickException, KeyboardInterrupt) as error:
            ctx.obj.log(f"{type(error).__name__}: {error}")
            raise
        except Exception:
            ctx.obj.log(traceback.format_exc())
            raise
        finally:
            ctx.obj.detail(_usage())
            ctx.obj.close()

    def _refuse_one_file_twice(self, ctx: click.Context) -> None:
        """Two options that name one file: what is written last would take the place of the other, or of an input."""
        named: dict[Path, str] = {}
        for param in self.params:
            path, kind = ctx.params.get(param.name or ""), param.type
            if not isinstance(kind, click.Path) or kind.dir_okay or path is None:
                continue
            if str(path) == "-" or (path.exists() and not path.is_file()):
                continue
            option = max(param.opts, key=len)
            if (other := named.setdefault(path.resolve(), option)) != option:
                raise click.UsageError(f"{other} and {option} name one file, {path}: choose another for one of them")
            if not kind.exists and _is_ours(path.resolve()):
                raise click.UsageError(f"{option} {path}: a file that glmspec wrote in its folder; choose another")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A list a section, in the order of the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and isinstance(param, click.Option):
                title = getattr(param, "section", COMMON if "help" in param.name else "Options")
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Commands(click.Group):
    """Turns our own exceptions into a message and an exit code; keeps the commands in the order of the work."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except GlmspecError as error:
            click.echo(f"glmspec-build: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt as error:
            click.echo(f"glmspec-build: interrupted{f': {error}' if error.args else ''}", err=True)
            sys.exit(130)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # its reader has read enough
                click.echo(f"glmspec-build: {os_error_text(error)}", err=True)
            _drop_output()
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the work."""
        return list(self.commands)


def _is_ours(path: Path) -> bool:
    """Whether a file is one of those that a record of ours keeps the digest of, or the record."""
    from glmspec.core.files import produced
    from glmspec.core.sealed import MANIFEST

    for home in path.parents if path.exists() else ():
        for record_file in (home / "config.json", home / MANIFEST):
            try:
                record = json.loads(record_file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            listed = {*record.get("files", ()), *record.get("parts", ())} if produced(record) else set()
            if produced(record) and (path == record_file or str(path.relative_to(home)) in listed):
                return True
    return False


def _drop_output() -> None:
    """Let go of what standard output does not take; else Python tries again at exit, and complains."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress() -> Any:
    """The running command's `RichProgress`."""
    return click.get_current_context().obj


def required(option: str, value: Value | None) -> Value:
    """The value of an option that must be given here, and not in every use of its command."""
    if value is None:
        raise click.UsageError(f"Missing option {option!r}.")
    return value


def result(text: str) -> None:
    """Write a command's result to standard output, and to the log."""
    progress().log(text)
    click.echo(text)


def write_json_to(path: Path, value: Any) -> None:
    """A JSON file, or standard output for "-"."""
    from glmspec.core.files import json_bytes, write_output

    if str(path) == "-":
        result(json.dumps(value, indent=2))
    else:
        write_output(path, json_bytes(value))


def _versions() -> str:
    from glmspec.core.versions import versions

    return ", ".join(f"{name} {number or 'none'}" for name, number in versions().items())


def _usage() -> str:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    return f"CPU {used.ru_utime + used.ru_stime:.1f} s, at most {used.ru_maxrss / 1e6:.2f} GB of memory"
