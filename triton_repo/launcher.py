"""Starting and stopping tritonserver: the system's own, or the one inside the nvidia-pytriton package.

What the packaged one needs, beyond a command line: a backend directory with the stub of the running Python
version beside the backend, the running Python's own libraries first in LD_LIBRARY_PATH (the stub links
libpython), and the environment's bin first in PATH (the stub takes its prefix from the first python3).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from glmspec.core.errors import EngineError, MissingCapability
from glmspec.core.files import opened_alone
from glmspec.core.progress import Progress
from glmspec.runtime.directory import EngineDirectory
from glmspec.triton_repo.interface import MODEL_NAME
from glmspec.triton_repo.repository import open_repository

READY_TIMEOUT_S = 180
EXIT_TIMEOUT_S = 30  # too short a one kills the stub in the middle and leaks shared memory
_SCRATCH, _LOCK = "glmspec-triton-", "lock"
_LOG_TAIL = 25  # lines of the server's log shown when it fails


@dataclass(frozen=True)
class Ports:
    """Where the server listens: its host and a TCP port for each protocol."""

    host: str
    http: int
    grpc: int
    metrics: int

    @classmethod
    def choose(cls, host: str = "127.0.0.1", http: int = 0, grpc: int = 0, metrics: int = 0) -> Ports:
        """The given ports, a free one for each 0. Raises `EngineError` for a host that is none of this machine's."""
        with ExitStack() as bound:  # all at once, so that they differ
            ports = [port or bound.enter_context(_bound(host, 0)).getsockname()[1] for port in (http, grpc, metrics)]
        return cls(host, *ports)

    def describe(self) -> str:
        """One line for people."""
        return (
            f"gRPC {self.host}:{self.grpc} · HTTP http://{self.host}:{self.http} · "
            f"metrics http://{self.host}:{self.metrics}/metrics"
        )


def _bound(host: str, port: int) -> socket.socket:
    """A socket on a port, 0 for a free one. Raises `EngineError` when it is taken or the host is not ours."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port left a moment ago is free
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise EngineError(f"{host}:{port}: cannot listen there ({error}).") from None
    return bound


class Server:
    """A tritonserver process. Use as a context manager, or `start` and `stop`."""

    def __init__(self, repository: Path, ports: Ports, log: Path) -> None:
        self.repository, self.ports, self.log = repository.resolve(), ports, log
        self._process: subprocess.Popen | None = None
        self._scratch = ExitStack()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process id. Raises `EngineError` before it is started."""
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen:
        if self._process is None:
            raise EngineError(f"{self.repository}: its server is not started.")
        return self._process

    def start(self) -> Server:
        """Start and wait until the model is ready. Raises `EngineError` with the log's tail when it never is."""
        if not (self.repository / MODEL_NAME / "config.pbtxt").exists():
            raise EngineError(
                f"{self.repository}: not a model repository. Make one: glmspec-build repo ENGINES -o REPO"
            )
        for port in (self.ports.http, self.ports.grpc, self.ports.metrics):
            _bound(self.ports.host, port).close()  # else another server's answer would pass for ours
        try:
            scratch, lock = self._scratch.enter_context(scratch_folder())
            command, environment = _command(scratch)
            with self.log.open("wb") as log:
                # Its own session, so that a terminal's interrupt reaches us first and we stop it in order.
                self._process = subprocess.Popen(
                    [*command, *self._arguments()],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[lock],
                )
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def wait(self) -> int:
        """Wait until the server ends by itself. Returns its exit code; raises `EngineError` before it is started."""
        return self._running.wait()

    def stop(self) -> None:
        """Let requests in flight finish, then end the server and whatever it leaves behind."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(EXIT_TIMEOUT_S + 10)
            with suppress(ProcessLookupError):  # a server that runs out of its exit timeout leaves its stub
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._scratch.close()

    def _arguments(self) -> list[str]:
        ports = self.ports
        return [
            f"--model-repository={self.repository}",
            f"--http-address={ports.host}",
            f"--http-port={ports.http}",
            f"--grpc-address={ports.host}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={ports.host}",
            f"--metrics-port={ports.metrics}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            "--disable-auto-complete-config",
        ]

    def _wait_ready(self) -> None:
        url = f"http://{self.ports.host}:{self.ports.http}/v2/health/ready"
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._running.poll() is not None:
                raise EngineError(f"tritonserver ended with code {self._running.returncode}:\n{self._tail()}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise EngineError(f"tritonserver was not ready after {READY_TIMEOUT_S} s:\n{self._tail()}")

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not line.startswith(("|", "+"))][-_LOG_TAIL:])  # no option table


def run_server(repository: Path, ports: Ports, progress: Progress) -> None:
    """Serve in the foreground until interrupted, terminated, or the server ends. Raises before anything starts for a
    repository or engines that are damaged, and for engines that this version cannot serve."""
    EngineDirectory.open(open_repository(repository)).check_runs()
    descriptor, name = tempfile.mkstemp(prefix=_SCRATCH, suffix=".log")
    os.close(descriptor)
    log = Path(name)
    progress.say(f"Starting tritonserver, log in {log}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = Server(repository, ports, log)
    try:
        with progress.stage("Loading engines"):
            server.start()
        click.echo(f"Ready: {ports.describe()}")
        code = server.wait()
    except KeyboardInterrupt:
        progress.say("Stopping")
        return
    finally:
        server.stop()
    if code:
        raise EngineError(f"tritonserver ended with code {code}; its log is {log}")


@contextmanager
def scratch_folder() -> Iterator[tuple[Path, int]]:
    """A temporary folder, and the descriptor of a lock that says it is in use: by this process and by those that
    inherit it. Folders of runs that were killed, whose locks nobody holds, are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*/{_LOCK}"):
        with suppress(OSError), opened_alone(left, wait=False):
            shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    try:
        with opened_alone(folder / _LOCK, wait=False) as lock:
            yield folder, lock
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(scratch: Path) -> tuple[list[str], dict[str, str]]:
    """The server's command and environment."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if system := shutil.which("tritonserver"):
        return [system], environment
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise MissingCapability(
            "no tritonserver on PATH and no nvidia-pytriton in this environment. "
            "Use NVIDIA's Triton container, or: pip install 'glmspec[local]'"
        )
    package = Path(spec.submodule_search_locations[0])
    libraries = [sysconfig.get_config_var("LIBDIR"), str(package.parent / "nvidia_pytriton.libs")]
    libraries += filter(None, [environment.get("LD_LIBRARY_PATH")])
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    backends = _assemble_backend(package / "tritonserver", scratch)
    return [str(package / "tritonserver" / "bin" / "tritonserver"), f"--backend-directory={backends}"], environment


def _assemble_backend(server: Path, scratch: Path) -> Path:
    """A backend directory with the Python backend and the stub for this Python version."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise MissingCapability(f"nvidia-pytriton has no Triton stub for Python {version}. Use Python 3.11 or 3.12.")
    home = scratch / "backends" / "python"
    home.mkdir(parents=True)
    for file in (server / "backends" / "python").iterdir():
        (home / file.name).symlink_to(file)
    shutil.copyfile(stub, home / stub.name)
    (home / stub.name).chmod(0o755)
    return home.parent
