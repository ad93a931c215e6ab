"""The embedded stack without a Triton: ports, log, checks before the start, libpython."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from lora_slots.stack import (
    LibpythonMissing,
    NumpyTooNew,
    PortTaken,
    SetupError,
    StackConfig,
    TritonMissing,
    WrongPython,
    exit_on_signals,
    launch,
    libpython,
    log,
    probe,
)
from lora_slots.stack.ports import choose_ports

FAILED_LOAD = r"""
W1130 22:27:25.479438 8078 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, no pool"
E1130 22:27:25.479591 8078 server.cc:241] "CudaDriverHelper has not been initialized."
I1130 22:27:25.480670 8078 model_lifecycle.cc:472] "loading: boom:1"
E1130 22:27:25.825482 8078 model_lifecycle.cc:642] "failed to load 'boom' version 1: Internal: ValueError: no\n\nAt:\n"
I1130 22:27:25.825506 8078 model_lifecycle.cc:777] "failed to load 'boom'"
I1130 22:27:25.825578 8078 server.cc:604]~
+------------------+------+
| Repository Agent | Path |
+------------------+------+
+------------------+------+

I1130 22:27:25.825661 8078 server.cc:674]~
+-------+---------+--------------------------------+
| Model | Version | Status                         |
+-------+---------+--------------------------------+
| boom  | 1       | UNAVAILABLE: Internal: no      |
+-------+---------+--------------------------------+

I1130 22:27:25.826746 8078 tritonserver.cc:2598]~
+----------------------------------+---------+
| Option                           | Value   |
+----------------------------------+---------+
| server_id                        | abc-123 |
+----------------------------------+---------+
error: creating server: Internal - failed to load all models
""".replace("~", " ")  # Triton's headings of tables end so


def test_chosen_ports_are_three_free_ones() -> None:
    """Each 0 becomes a port of its own that can be bound."""
    ports = choose_ports(0, 0, 0)
    assert len({port for _, port in ports.doors()}) == 3
    for _, port in ports.doors():
        socket.create_server(("127.0.0.1", port)).close()


def test_ports_asked_for_are_kept() -> None:
    """A free number that was asked for is used, and not chosen again for another door."""
    free = choose_ports(0, 0, 0).grpc
    assert choose_ports(0, free, 0).grpc == free


def test_usual_ports_come_first_and_give_way() -> None:
    """Where none was asked for, the usual port is taken, and any free one if that is in use or asked for elsewhere."""
    usual = choose_ports(0, 0, 0)
    assert choose_ports(0, 0, 0, usual) == usual
    with socket.create_server(("127.0.0.1", usual.http)):
        assert choose_ports(0, 0, 0, usual).http not in {0, usual.http}
    swapped = choose_ports(usual.grpc, 0, 0, usual)
    assert swapped.http == usual.grpc
    assert swapped.grpc not in {0, usual.grpc}


@pytest.mark.parametrize(("port", "why"), [(70_000, "1 to 65535"), (-1, "1 to 65535")])
def test_port_out_of_range_is_refused(port: int, why: str) -> None:
    """A number that is no port is refused as such."""
    with pytest.raises(PortTaken, match=why):
        choose_ports(0, port, 0)


def test_one_port_for_two_doors_is_refused() -> None:
    """The same number for two doors is refused, naming the second."""
    free = choose_ports(0, 0, 0).http
    with pytest.raises(PortTaken, match=r"metrics port .* http door"):
        choose_ports(free, 0, free)


def test_a_refused_port_is_named_as_the_caller_set_it() -> None:
    """The message names the setting of the library, or that of whoever asked through it."""
    assert "Give grpc_port another number" in str(PortTaken("grpc", 1, "no"))
    assert "Give --grpc-port another number" in str(PortTaken("grpc", 1, "no", setting="--grpc-port"))


def test_a_port_taken_on_all_addresses_is_taken() -> None:
    """A server on 0.0.0.0 holds the port on the loopback address too."""
    with socket.create_server(("0.0.0.0", 0)) as other, pytest.raises(PortTaken):  # noqa: S104 - that is the case
        choose_ports(other.getsockname()[1], 0, 0)


def test_log_tail_tells_what_matters() -> None:
    """The tail has the failure and the table of models, and nothing of GPUs and options."""
    tail = log.tail(FAILED_LOAD)
    assert "ValueError: no\n" in tail
    assert "| boom  | 1       | UNAVAILABLE" in tail
    assert tail.splitlines()[-1] == "error: creating server: Internal - failed to load all models"
    for noise in ("Cuda", "pinned", "Repository Agent", "server_id", "server.cc:604"):
        assert noise not in tail


def test_log_tail_is_bounded() -> None:
    """The tail has at most the lines asked for, each of bounded length."""
    tail = log.tail("x" * 5000 + "\n" + "\n".join(map(str, range(100))), lines=7)
    assert tail.splitlines() == [str(number) for number in range(93, 100)]
    assert len(log.tail("x" * 5000)) < 1000


def test_failed_models_are_read_from_the_log() -> None:
    """Each model that failed is named once."""
    assert log.failed_models(FAILED_LOAD) == ["boom"]
    assert log.failed_models("Poll failed for model directory 'ens': unused") == ["ens"]
    assert log.failed_models("all is well") == []


def test_missing_log_is_empty(tmp_path: Path) -> None:
    """A log that is not there yet reads as empty."""
    assert log.tail(log.read(tmp_path / "none")) == ""


@pytest.mark.parametrize("version", ["2.0.0", "2.4.6"])
def test_numpy_2_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A numpy with which strings would be lost is refused before the start, with what to do."""
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(NumpyTooNew, match=f"numpy {version} .*make setup"):
        launch.check_numpy()


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 13, 0)])
def test_other_pythons_are_refused(version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without numpy 1.26 or without a stub is refused, naming those that work."""
    monkeypatch.setattr(sys, "version_info", type("V", (tuple,), {"major": version[0], "minor": version[1]})(version))
    with pytest.raises(WrongPython, match=rf"{version[0]}\.{version[1]} .*3\.11 or 3\.12"):
        libpython.check_python()


def test_missing_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error says how to get it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TritonMissing, match="make setup"):
        launch.triton_home()


def test_stub_without_its_library_is_refused() -> None:
    """A program whose libraries are not all there is refused with the loader's own words."""
    with pytest.raises(SetupError, match="cannot be executed"):
        launch.check_stub(Path("/nonexistent/stub"), dict(os.environ))


def test_environment_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter's folder comes first on PATH, and what the user set comes after it."""
    monkeypatch.setenv("PATH", "/usr/bin")
    environment = launch.server_environment(Path("/a/b/c"), StackConfig(Path(), environment={"MARK": "!"}))
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["MARK"] == "!"


def _nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the library is neither beside the interpreter nor known to the loader."""
    monkeypatch.setattr(libpython, "_beside_the_interpreter", lambda _: None)
    monkeypatch.setattr(libpython, "_loader_finds", lambda _: False)


def test_libpython_beside_the_interpreter_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of the very interpreter is preferred to the system's, and its folder is named."""
    (tmp_path / libpython.library_name()).touch()
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: str(tmp_path))
    assert libpython.find_libpython(bring=False).library_folder == tmp_path


def test_libpython_of_the_system_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that the loader finds is left to it."""
    _nothing_here(monkeypatch)
    monkeypatch.setattr(libpython, "_loader_finds", lambda _: True)
    assert libpython.find_libpython(bring=False).library_folder is None


def test_missing_libpython_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can bring the library, the error names the package for apt and dnf."""
    _nothing_here(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(LibpythonMissing, match=r"apt-get install libpython3\.\d+.*dnf install python3\.\d+-libs"):
        libpython.find_libpython(cache=tmp_path)


def _fake_apt(folder: Path, *, works: bool) -> None:
    """apt-get and dpkg-deb that bring a package with the library in it, or fail."""
    folder.mkdir()
    apt = '#!/bin/sh\ncase "$*" in *download*) touch libpython.deb;; esac\n' if works else "#!/bin/sh\nexit 100\n"
    target = f"$3/usr/lib/{libpython.library_name()}"
    unpack = f'#!/bin/sh\nmkdir -p "$3/usr/lib" && touch "{target}"\n'
    for name, script in (("apt-get", apt), ("dpkg-deb", unpack)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


def test_libpython_is_brought_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is downloaded and unpacked into the cache, and found there the next time without apt."""
    _nothing_here(monkeypatch)
    _fake_apt(tmp_path / "bin", works=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "cache" / "libpython" / version / "usr" / "lib"
    assert libpython.find_libpython(cache=tmp_path / "cache").library_folder == folder
    assert libpython.find_libpython(bring=False, cache=tmp_path / "cache").library_folder == folder


def test_failing_apt_leaves_no_half_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that fails is an error, not an empty cache."""
    _nothing_here(monkeypatch)
    _fake_apt(tmp_path / "bin", works=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(LibpythonMissing):
        libpython.find_libpython(cache=tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*.so*")) == list((tmp_path / "cache").rglob("new-*")) == []


def test_a_cache_that_cannot_be_written_leaves_the_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library cannot be put into the cache, the error still says what to install."""
    _nothing_here(monkeypatch)
    _fake_apt(tmp_path / "bin", works=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "cache").write_text("")
    with pytest.raises(LibpythonMissing, match="apt-get install"):
        libpython.find_libpython(cache=tmp_path / "cache")


def test_exit_on_signals_gives_handlers_back() -> None:
    """After the block the handlers are those of before."""
    before = signal.getsignal(signal.SIGTERM)
    with exit_on_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_stack_is_light_to_import() -> None:
    """Importing the stack brings neither numpy nor a client library."""
    code = "import sys, lora_slots.stack; print(sorted({'numpy', 'grpc', 'tritonclient'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_stub_is_named_once_it_is_one(tmp_path: Path) -> None:
    """A child that is still the shell it starts as gets no name; as a stub it has its instance's, also when dead."""
    stub = tmp_path / "triton_python_backend_stub"
    script = f"read line; exec -a {stub} {sys.executable} -c 'input(chr(46))' model 1 echo_0_0 DEFAULT"
    with subprocess.Popen(["/bin/bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        watch = probe.StubWatch(os.getpid())
        assert watch.dead(0.0) == []
        child.stdin.write(b"go\n")
        child.stdin.flush()
        assert child.stdout.read(1) == b"."  # it is the stub now
        assert watch.dead(1.0) == []
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert watch.dead(2.0) == []
        assert watch.dead(3.0) == ["echo_0_0"]
    assert watch.dead(9.0) == []
