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
from dataclasses import dataclass
from pathlib import Path

import click

from glmspec.build.errors import EngineError, MissingCapability

READY_TIMEOUT_S = 180
EXIT_TIMEOUT_S = 30  # too short a one kills the stub in the middle and leaks shared memory
_LOG_TAIL = 25  # lines of the server's log shown when it fails


@dataclass(frozen=True)
class Ports:
    """Where the server listens."""

    host: str
    http: int
    grpc: int
    metrics: int

    @classmethod
    def choose(cls, host: str = "127.0.0.1", http: int = 0, grpc: int = 0, metrics: int = 0) -> Ports:
        """The given ports, a free one for each 0."""
        with_free = [socket.socket() for wanted in (http, grpc, metrics) if wanted == 0]
        for one in with_free:  # all held at once, so that they differ
            one.bind((host, 0))
        free = iter([one.getsockname()[1] for one in with_free])
        for one in with_free:
            one.close()
        return cls(host, *(wanted or next(free) for wanted in (http, grpc, metrics)))

    def describe(self) -> str:
        """One line for people."""
        return (
            f"gRPC {self.host}:{self.grpc} · HTTP http://{self.host}:{self.http} · "
            f"metrics http://{self.host}:{self.metrics}/metrics"
        )


class Server:
    """A tritonserver process. Use as a context manager, or `start` and `stop`."""

    def __init__(self, repository: Path, ports: Ports, log: Path) -> None:
        self.repository, self.ports, self.log = repository.resolve(), ports, log
        self._process: subprocess.Popen | None = None
        self._scratch: Path | None = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def start(self) -> Server:
        """Start and wait until the model is ready. Raises `EngineError` with the log's tail when it never is."""
        if not (self.repository / "glmspec" / "config.pbtxt").exists():
            raise EngineError(
                f"{self.repository}: not a model repository. Make one: glmspec-build repo ENGINES -o REPO"
            )
        self._scratch = Path(tempfile.mkdtemp(prefix="glmspec-triton-"))
        command, environment = _command(self._scratch)
        command += self._arguments()
        with self.log.open("wb") as log:
            # Its own session, so that a terminal's interrupt reaches us first and we stop it in order.
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit code."""
        return self._process.wait()

    def stop(self) -> None:
        """Let requests in flight finish, then end the server."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(EXIT_TIMEOUT_S + 10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

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
            if self._process.poll() is not None:
                raise EngineError(f"tritonserver ended with code {self._process.returncode}:\n{self._tail()}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise EngineError(f"tritonserver was not ready after {READY_TIMEOUT_S} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])


def run_server(repository: Path, ports: Ports) -> None:
    """Serve in the foreground until interrupted, terminated, or the server ends."""
    log = Path(tempfile.mkstemp(prefix="glmspec-triton-", suffix=".log")[1])
    click.echo(f"Starting tritonserver, log in {log}", err=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Server(repository, ports, log) as server:
        click.echo(f"Ready: {ports.describe()}")
        try:
            code = server.wait()
        except KeyboardInterrupt:
            click.echo("Stopping", err=True)
            return
    raise EngineError(f"tritonserver ended with code {code}; its log is {log}")


def _command(scratch: Path) -> tuple[list[str], dict[str, str]]:
    """The server's command and environment."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if system := shutil.which("tritonserver"):
        return [system], environment
    spec = importlib.util.find_spec("pytriton")
    if spec is None:
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
        raise MissingCapability(
            f"nvidia-pytriton has no Triton stub for Python {version}. Use Python 3.11, 3.12 or 3.13."
        )
    home = scratch / "backends" / "python"
    home.mkdir(parents=True)
    for file in (server / "backends" / "python").iterdir():
        (home / file.name).symlink_to(file)
    shutil.copyfile(stub, home / stub.name)
    (home / stub.name).chmod(0o755)
    return home.parent
