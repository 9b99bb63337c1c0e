"""The exceptions a user may see, and the exit code each one means.

`glmspec-build` prints the message of a `GlmspecError` without a traceback. A
message names the tensor, field or file, what was found, what was expected and
what to do about it.
"""

import errno

_ADVICE = {
    errno.ENOSPC: " Make room on its disk, or choose another place.",
    errno.EDQUOT: " Make room in your quota, or choose another place.",
    errno.EACCES: " Choose another place, or run as somebody who may.",
    errno.EPERM: " Choose another place, or run as somebody who may.",
    errno.EROFS: " Choose another place.",
    errno.EIO: " The disk may be failing, or not be reachable.",
}


def os_error_text(error: OSError) -> str:
    """An error of the operating system as a message: the file, what is wrong, what to do."""
    name = error.filename2 or error.filename  # of two the one that is written
    where = f"{name}: " if name else ""
    return f"{where}{error.strerror or error}.{_ADVICE.get(error.errno or 0, '')}"


def unwritable_text(path: object, error: OSError) -> str:
    """Why an output could not be written, told of its final place."""
    return f"{path}: cannot be written ({error.strerror or error}).{_ADVICE.get(error.errno or 0, '')}"


class GlmspecError(Exception):
    """A mistake in what the user gave us: exit code 1."""

    exit_code = 1


class ConfigError(GlmspecError):
    """A config.json field is missing, has a wrong value or contradicts another."""


class CheckpointError(GlmspecError):
    """A checkpoint folder, shard or tensor is missing, surplus or of a wrong shape; a file of ours changed."""


class NetworkError(GlmspecError):
    """A network could not be authored or built; the message holds the layer's module path."""


class EngineError(GlmspecError):
    """An engine directory does not match this version, target or checkpoint."""


class RequestError(GlmspecError):
    """A generation request that cannot be served as asked."""


class ServerError(GlmspecError):
    """A Triton server that does not answer."""


class MissingCapability(GlmspecError):
    """This machine lacks something the command needs (a GPU, TensorRT): exit code 3."""

    exit_code = 3
