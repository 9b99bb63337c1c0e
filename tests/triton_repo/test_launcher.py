"""Starting and stopping tritonserver: what fails says why and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from glmspec.core.errors import EngineError, MissingCapability
from glmspec.triton_repo import launcher
from glmspec.triton_repo.launcher import Ports, Server
from glmspec.triton_repo.repository import write_repository


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """Where temporary folders go in this test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def repository_without_engines(golden_engines: Path, home: Path) -> Path:
    engines = Path(shutil.copytree(golden_engines, home / "engines"))
    write_repository(engines, home / "repo", None, True)
    shutil.rmtree(engines)
    return home / "repo"


@pytest.fixture
def repo(golden_engines, tmp_path) -> Path:
    return repository_without_engines(golden_engines, tmp_path)


@pytest.fixture
def stand_in(monkeypatch):
    """Put Python code in the place of tritonserver."""

    def use(code: str) -> None:
        monkeypatch.setattr(launcher, "_command", lambda scratch: ([sys.executable, "-c", code], dict(os.environ)))

    return use


def assert_gone(server: Server) -> None:
    assert server._process.poll() is not None
    with pytest.raises(ProcessLookupError):  # neither the server nor a stub of its
        os.killpg(server.pid, 0)


def free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def test_chosen_ports_differ_and_are_free():
    for _ in range(20):
        ports = Ports.choose()
        numbers = {ports.http, ports.grpc, ports.metrics}
        assert len(numbers) == 3
        assert all(port > 0 and free(port) for port in numbers)
        assert ports.host == "127.0.0.1"


def test_given_ports_are_kept_and_the_rest_filled_in():
    ports = Ports.choose("127.0.0.1", http=1234, metrics=4321)
    assert (ports.http, ports.metrics) == (1234, 4321)
    assert ports.grpc not in (0, 1234, 4321)
    assert Ports.choose("::1", 1, 2, 3) == Ports("::1", 1, 2, 3)


def test_a_folder_that_is_no_repository_is_refused_before_anything_starts(tmp_path, scratch):
    server = Server(tmp_path, Ports.choose(), tmp_path / "log")
    with pytest.raises(EngineError, match=f"^{tmp_path}: not a model repository. Make one: glmspec-build repo"):
        server.start()
    assert server._process is None
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "log").exists()
    server.stop()  # harmless


@pytest.fixture(scope="module")
def failed(golden_engines, tmp_path_factory):
    """The real tritonserver on a repository whose engines are gone: (message, server, scratch, engines)."""
    home = tmp_path_factory.mktemp("gone")
    scratch = home / "scratch"
    scratch.mkdir()
    server = Server(repository_without_engines(golden_engines, home), Ports.choose(), home / "log")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineError) as caught:
        patch.setattr(tempfile, "tempdir", str(scratch))
        server.start()
    return str(caught.value), server, scratch, home / "engines"


def test_a_server_that_cannot_load_the_model_leaves_nothing_behind(failed):
    message, server, scratch, _ = failed
    assert message.startswith("tritonserver ended with code 1:\n")
    assert_gone(server)
    assert list(scratch.iterdir()) == []


def test_a_server_that_cannot_load_the_model_says_why(failed):
    """Above the table of server options that the log ends with."""
    message, _, _, engines = failed
    assert f"{engines / 'config.json'}: missing" in message


def test_a_server_that_dies_shows_the_end_of_its_log(repo, tmp_path, scratch, stand_in):
    stand_in("print(*range(100), sep='\\n'); raise SystemExit(7)")
    server = Server(repo, Ports.choose(), tmp_path / "log")
    lines = "\n".join(str(line) for line in range(75, 100))
    with pytest.raises(EngineError, match=f"^tritonserver ended with code 7:\n{lines}$"):
        server.start()
    assert_gone(server)
    assert list(scratch.iterdir()) == []


def test_a_server_that_is_never_ready_is_ended(repo, tmp_path, scratch, stand_in, monkeypatch):
    monkeypatch.setattr(launcher, "READY_TIMEOUT_S", 0.5)
    stand_in("import time; print('thinking', flush=True); time.sleep(600)")
    server = Server(repo, Ports.choose(), tmp_path / "log")
    with pytest.raises(EngineError, match=re.escape("tritonserver was not ready after 0.5 s:")):
        server.start()
    assert_gone(server)
    assert list(scratch.iterdir()) == []


def test_an_interrupt_while_starting_ends_the_server(repo, tmp_path, scratch, stand_in, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    stand_in("import time; time.sleep(600)")
    monkeypatch.setattr(Server, "_wait_ready", interrupt)
    server = Server(repo, Ports.choose(), tmp_path / "log")
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert_gone(server)
    assert list(scratch.iterdir()) == []


def test_a_server_deaf_to_sigterm_is_killed_with_its_children(repo, tmp_path, scratch, stand_in, monkeypatch):
    def hear(server: Server) -> None:
        while "deaf" not in server.log.read_text():
            threading.Event().wait(0.05)

    monkeypatch.setattr(Server, "_wait_ready", hear)
    monkeypatch.setattr(launcher, "EXIT_TIMEOUT_S", -9.9)  # stop waits 10 s longer than the server is told to
    sleep = "import time; time.sleep(600)"
    stand_in(
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "  # the child inherits it
        f"subprocess.Popen([sys.executable, '-c', {sleep!r}]); print('deaf', flush=True); {sleep}"
    )
    server = Server(repo, Ports.choose(), tmp_path / "log").start()
    assert_stop_leaves_nobody(server)


def test_a_server_that_ends_at_once_leaves_no_child_behind(repo, tmp_path, scratch, stand_in, monkeypatch):
    """As tritonserver does when --exit-timeout-secs runs out: it exits with 1, and its stub was still there an hour
    later."""
    monkeypatch.setattr(Server, "_wait_ready", lambda server: threading.Event().wait(0.5))
    sleep = "import time; time.sleep(600)"
    stand_in(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}")
    server = Server(repo, Ports.choose(), tmp_path / "log").start()
    assert_stop_leaves_nobody(server)


def assert_stop_leaves_nobody(server: Server) -> None:
    try:
        assert _group_runs(server.pid)
        server.stop()
        assert server._process.poll() is not None
        for _ in range(40):
            if not _group_runs(server.pid):
                break
            threading.Event().wait(0.05)
        assert not _group_runs(server.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _group_runs(group: int) -> bool:
    """Whether a process of the group is alive. A killed child stays a zombie until init takes it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def test_the_systems_own_tritonserver_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher.shutil, "which", lambda name: f"/opt/bin/{name}")
    command, environment = launcher._command(tmp_path)
    assert command == ["/opt/bin/tritonserver"]
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


@pytest.fixture
def bare(monkeypatch) -> None:
    """No tritonserver on PATH, no nvidia-pytriton."""
    find = importlib.util.find_spec
    monkeypatch.setattr(launcher.shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytriton" else find(name))


def test_without_any_tritonserver_the_error_says_what_to_install(repo, tmp_path, scratch, bare):
    with pytest.raises(MissingCapability, match=r"pip install 'glmspec\[local\]'$") as caught:
        Server(repo, Ports.choose(), tmp_path / "log").start()
    assert caught.value.exit_code == 3


def test_a_python_without_a_stub_is_named(tmp_path):
    (tmp_path / "python_backend_stubs" / "3.8").mkdir(parents=True)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(MissingCapability, match=f"no Triton stub for Python {version}"):
        launcher._assemble_backend(tmp_path, tmp_path / "scratch")


def test_a_missing_tritonserver_leaves_no_scratch_folder(repo, tmp_path, scratch, bare):
    with pytest.raises(MissingCapability):
        Server(repo, Ports.choose(), tmp_path / "log").start()
    assert list(scratch.iterdir()) == []


def test_a_port_that_another_server_holds_is_not_taken_for_ready(repo, tmp_path, scratch, stand_in):
    """`glmspec-build serve` twice on the default ports: the second says Ready, then ends."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    other = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    stand_in("import time; time.sleep(1); print('failed to start HTTP service: Address in use'); raise SystemExit(1)")
    server = Server(repo, Ports.choose(http=other.server_port), tmp_path / "log")
    try:
        with pytest.raises(EngineError):
            server.start()
    finally:
        server.stop()
        other.shutdown()
        other.server_close()


def test_a_host_that_is_not_ours_is_named():
    with pytest.raises(EngineError, match=r"203\.0\.113\.1"):
        Ports.choose("203.0.113.1")


def test_the_scratch_of_a_killed_run_goes_and_that_of_a_running_one_stays(scratch):
    (scratch / "glmspec-triton-dead").mkdir()
    (scratch / "glmspec-triton-dead" / "lock").touch()
    with launcher.scratch_folder() as (first, lock):
        assert list(scratch.iterdir()) == [first] and os.get_inheritable(lock) is False
        with launcher.scratch_folder() as (second, _):
            assert sorted(scratch.iterdir()) == sorted([first, second])
    assert list(scratch.iterdir()) == []
