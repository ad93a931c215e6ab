"""The embedded Triton, for real: it answers, refuses, notices, and never leaves anything behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from fakes.disks import tmpfs

from lora_slots.stack import (
    ModelsFailed,
    NoTemporary,
    NotReady,
    Ports,
    PortTaken,
    ServerDied,
    SetupError,
    StackConfig,
    StackError,
    StubDied,
    TritonServer,
    launch,
)
from lora_slots.stack.keeper import SHARED_MEMORY
from lora_slots.stack.ports import choose_ports
from lora_slots.stack.probe import doors_not_open

pytestmark = pytest.mark.triton

CONFIG = """
backend: "python"
max_batch_size: 0
input [{name: "WORD" data_type: TYPE_STRING dims: [1]}]
output [{name: "WORD" data_type: TYPE_STRING dims: [1]}]
instance_group [{kind: KIND_CPU count: 1}]
"""
ECHO = """
import os
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        word = [pb.get_input_tensor_by_name(r, "WORD").as_numpy()[0] + os.environ["MARK"].encode() for r in requests]
        return [pb.InferenceResponse([pb.Tensor("WORD", np.array([w], dtype=object))]) for w in word]
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("the example base is not there")
"""
STUCK_LOADING = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(600)
"""
STUCK_SERVING = """
import pathlib
import time

class TritonPythonModel:
    def initialize(self, args):
        self.mark = pathlib.Path(__file__).with_name("busy")

    def execute(self, requests):
        self.mark.touch()
        time.sleep(600)
"""
HANGING = """
import ctypes
import pathlib

class TritonPythonModel:
    def initialize(self, args):
        self.mark = pathlib.Path(__file__).with_name("busy")

    def execute(self, requests):
        self.mark.touch()
        ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock: no Python thread of this process runs any more
"""
# A program with a server in it that says what it is about to do, a line each.
CHILD = """
import signal, sys, tempfile
from pathlib import Path
from lora_slots.stack import StackConfig, TritonServer, exit_on_signals, launch, probe, process

def announce(owner, name, told=lambda *words: ""):
    real = getattr(owner, name)
    def saying(*words, **named):
        print(name, told(*words), flush=True)
        return real(*words, **named)
    setattr(owner, name, saying)

announce(launch, "command", lambda *words: words[-1].name)  # the folder and the server have one name
announce(launch, "check_stub")
announce(probe, "is_ready")
announce(probe, "doors_not_open")
announce(process.KeptProcess, "_tell")
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
mine = Path(tempfile.mkdtemp())
config = StackConfig(model_repository=Path(sys.argv[1]), environment={"MARK": "!"}, temporary=(mine,))
with exit_on_signals(), TritonServer(config) as server:
    print("serving", flush=True)
    sys.stdin.read() if sys.argv[2] == "leave" else signal.pause()
"""


def repository(folder: Path, **models: str) -> Path:
    """A model repository with one Python model for each name and source."""
    for name, source in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG)
        (folder / name / "1" / "model.py").write_text(source)
    return folder


def config_for(path: Path, **changes: object) -> StackConfig:
    return replace(StackConfig(path, environment={"MARK": "!"}, ready_timeout_s=60), **changes)  # type: ignore[arg-type]


def echo(server: TritonServer, word: str) -> str:
    """Ask the echo model over HTTP."""
    tensor = {"name": "WORD", "shape": [1], "datatype": "BYTES", "data": [word]}
    connection = http.client.HTTPConnection(server.http_url, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/echo/infer", json.dumps({"inputs": [tensor]}), {"Connection": "close"})
        answer = json.loads(connection.getresponse().read())
    return str(answer["outputs"][0]["data"][0])


def eventually(true: Callable[[], object], within_s: float = 20.0) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_naming(text: str) -> list[int]:
    """The live processes that have the text in their arguments, this one apart."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and text.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def regions(name: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{name}*"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("my models"), echo=ECHO)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, checked to be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def test_answers_again_after_a_second_start(models: Path, temporary: Path) -> None:
    """A server answers, stops without a trace, and the same object starts a second time."""
    server = TritonServer(config_for(models))
    for word in ("first", "second"):
        with server:
            name = next(temporary.iterdir()).name
            assert echo(server, word) == f"{word}!"
            assert regions(name)
            server.poll()
        assert processes_naming(name) == []
        assert regions(name) == []
    assert server.pid is None


def test_listens_on_loopback_only(models: Path, temporary: Path) -> None:
    """None of the three doors listens on any address but 127.0.0.1."""
    with TritonServer(config_for(models)) as server:
        rows = [
            line.split()[1].split(":")
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        ]
        for _, port in server.ports.doors():
            addresses = {address for address, number in rows if int(number, 16) == port}
            assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, ::ffff:127.0.0.1
            assert addresses
        assert server.pid is not None
        assert doors_not_open(server.pid, server.ports) == []
        assert doors_not_open(os.getpid(), server.ports) == ["http", "grpc", "metrics"]


@pytest.mark.parametrize("door", ["http", "grpc", "metrics"])
def test_taken_port_is_refused_before_the_start(door: str, models: Path, temporary: Path) -> None:
    """A taken port is refused with the door, the number, the holder and the setting that changes it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"{door} port {port} .* process {os.getpid()} .*{door}_port") as caught:
            TritonServer(config_for(models, **{f"{door}_port": port})).start()
    assert (caught.value.door, caught.value.port) == (door, port)


@pytest.mark.parametrize("door", ["http", "grpc", "metrics"])
def test_port_taken_while_triton_starts(
    door: str, models: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that somebody takes between our look and Triton's bind is refused as taken, also the metrics one."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        late = replace(choose_ports(0, 0, 0), **{door: other.getsockname()[1]})
        monkeypatch.setattr("lora_slots.stack.server.choose_ports", lambda *_: late)
        with pytest.raises(PortTaken) as caught:
            TritonServer(config_for(models, **{f"{door}_port": getattr(late, door)})).start()
    assert caught.value.door == door


def test_chosen_port_lost_in_a_race_is_chosen_again(
    models: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port of our own choice that somebody takes before Triton does costs a second try, not the start; the model
    repository is made for the ports of each try."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = choose_ports(0, 0, 0)
        lost = replace(free, http=other.getsockname()[1])
        answers = iter([lost, free])
        monkeypatch.setattr("lora_slots.stack.server.choose_ports", lambda *_: next(answers))
        made_for = []

        def make(ports: Ports) -> Path:
            made_for.append(ports)
            return models

        with TritonServer(config_for(models, model_repository=make)) as server:
            assert echo(server, "here") == "here!"
    assert made_for == [lost, free]


def test_another_server_on_the_port_is_not_taken_for_ours(
    models: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ready answer counts only under our server's name."""
    with TritonServer(config_for(models)) as server:
        monkeypatch.setattr("lora_slots.stack.server.choose_ports", lambda *_: server.ports)
        other = TritonServer(config_for(models, http_port=server.ports.http))
        with pytest.raises(PortTaken):
            other.start()
        assert echo(server, "still here") == "still here!"


def test_model_that_does_not_load_is_named(tmp_path: Path, temporary: Path) -> None:
    """A model that fails to load ends the start with its name and its own error."""
    path = repository(tmp_path / "models", echo=ECHO, broken=BROKEN)
    with pytest.raises(ModelsFailed, match="the example base is not there") as caught:
        TritonServer(config_for(path)).start()
    assert caught.value.models == ("broken",)
    assert "CudaDriverHelper" not in caught.value.log_tail


def test_missing_repository_is_refused(tmp_path: Path, temporary: Path) -> None:
    """A model repository that is not there is refused without a start."""
    with pytest.raises(SetupError, match="nowhere"):
        TritonServer(config_for(tmp_path / "nowhere")).start()


def test_temporary_folder_with_a_blank_is_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary folder in which Triton would hang, since a shell splits its path, is refused."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "my temporary"))
    with pytest.raises(SetupError, match="TMPDIR"):
        TritonServer(config_for(models)).start()


def test_full_temporary_folder_is_told(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server's folder does not fit, the error names the place and TMPDIR, and nothing is left there."""
    with tmpfs(tmp_path / "small", "size=1m") as small:
        monkeypatch.setattr("tempfile.tempdir", str(small))
        with pytest.raises(NoTemporary, match=rf"{small}: No space left on device.*TMPDIR"):
            TritonServer(config_for(models)).start()
        assert list(small.iterdir()) == []


def test_missing_temporary_folder_is_told(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder that went away is named."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(NoTemporary, match=r"gone: No such file.*TMPDIR"):
        TritonServer(config_for(models)).start()


def test_stub_that_cannot_run_is_noticed_while_loading(
    models: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub that cannot be executed, with which Triton would load for ever, ends the start at once."""
    make = launch.make_folder

    def without_stub(*words: Path) -> Path:
        stub = make(*words)
        shutil.copyfile("/bin/true", stub)
        return stub

    monkeypatch.setattr(launch, "make_folder", without_stub)
    with pytest.raises(StubDied):
        TritonServer(config_for(models)).start()


def test_unknown_argument_shows_tritons_own_words(models: Path, temporary: Path) -> None:
    """A server that ends at once is reported with its code and what it said."""
    with pytest.raises(ServerDied, match="no-such-flag"):
        TritonServer(config_for(models, arguments=("--no-such-flag=1",))).start()


def test_slow_start_ends_at_the_timeout(tmp_path: Path, temporary: Path) -> None:
    """A model that loads for ever is given up at the timeout, with the log so far, and killed."""
    path = repository(tmp_path / "models", slow=STUCK_LOADING)
    began = time.monotonic()
    with pytest.raises(NotReady, match="loading: slow:1"):
        TritonServer(config_for(path, ready_timeout_s=1.5, exit_timeout_s=1)).start()
    assert time.monotonic() - began < 20


def test_killed_server_is_noticed(models: Path, temporary: Path) -> None:
    """A server killed while serving is reported with the signal and its log's tail."""
    with TritonServer(config_for(models)) as server:
        name = next(temporary.iterdir()).name
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerDied, match="code -9") as caught:
            server.wait(20)
        assert "Started HTTPService" in caught.value.log_tail
        assert regions(name) == []


def test_killed_stub_is_noticed(models: Path, temporary: Path) -> None:
    """A Python model whose process died is reported by name, though Triton still calls itself ready."""
    with TritonServer(config_for(models)) as server:
        server.poll()
        (stub,) = processes_naming(f"{next(temporary.iterdir())}/backends/python/triton_python_backend_stub")
        os.kill(stub, signal.SIGKILL)
        with pytest.raises(StubDied, match="echo_0_0"):
            server.wait(20)


def test_killed_keeper_takes_the_server_along(models: Path, temporary: Path) -> None:
    """A server whose keeper was killed does not live on."""
    with TritonServer(config_for(models)) as server:
        name = next(temporary.iterdir()).name
        pids = processes_naming(name)
        (keeper,) = (pid for pid in pids if b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(keeper, signal.SIGKILL)
        with pytest.raises(ServerDied, match="keeper"):
            server.wait(20)
        assert eventually(lambda: processes_naming(name) == [])
    assert regions(name) == []


def test_killed_keeper_leaves_no_model_that_hangs(tmp_path: Path, temporary: Path) -> None:
    """A model that would not notice its server's end is killed by us, where the keeper can no more."""
    path = repository(tmp_path / "models", echo=HANGING)
    with TritonServer(config_for(path)) as server:
        name = next(temporary.iterdir()).name
        asking = threading.Thread(target=_ask, args=(server,))
        asking.start()
        assert eventually((path / "echo" / "1" / "busy").exists)
        (keeper,) = (p for p in processes_naming(name) if b"keeper.py" in Path(f"/proc/{p}/cmdline").read_bytes())
        os.kill(keeper, signal.SIGKILL)
        with pytest.raises(ServerDied, match="keeper"):
            server.wait(20)
        assert eventually(lambda: processes_naming(name) == [])
    asking.join(10)


def test_stuck_model_does_not_hold_up_the_stop(tmp_path: Path, temporary: Path) -> None:
    """A request that never ends does not keep the server from being stopped."""
    path = repository(tmp_path / "models", echo=STUCK_SERVING)
    with TritonServer(config_for(path, exit_timeout_s=1)) as server:
        name = next(temporary.iterdir()).name
        asking = threading.Thread(target=_ask, args=(server,))
        asking.start()
        assert eventually((path / "echo" / "1" / "busy").exists)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    asking.join(10)
    assert processes_naming(name) == []


def _ask(server: TritonServer) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        echo(server, "no answer")


def test_log_can_be_kept(models: Path, temporary: Path, tmp_path: Path) -> None:
    """A log with a path of its own is there after the stop."""
    with TritonServer(config_for(models, log_path=tmp_path / "logs" / "triton.log")):
        pass
    assert "successfully loaded 'echo'" in (tmp_path / "logs" / "triton.log").read_text()


def test_not_started_is_an_error(models: Path) -> None:
    """A server that was not started has no address and is not well."""
    server = TritonServer(config_for(models))
    with pytest.raises(StackError, match="not been started"):
        _ = server.http_url
    with pytest.raises(StackError, match="not running"):
        server.poll()
    server.stop()


class Child:
    """The CHILD program, as a terminal would run it: in a process group of its own."""

    def __init__(self, models: Path, how: str = "pause") -> None:
        self.name = self.words = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(models), how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip

    def read_until(self, moment: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            self.name = rest if word == "command" else self.name
            if word == moment:
                return
        raise AssertionError(f"the child never came to {moment}: {self.process.communicate()[1]}")

    def interrupt(self, number: int = signal.SIGINT) -> None:
        os.killpg(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def end(self) -> int:
        self.words = self.process.communicate(timeout=30)[1]
        return self.process.returncode

    def left_nothing(self) -> bool:
        return not processes_naming(self.name or "lora-slots-never") and not regions(self.name or "lora-slots-never")


@pytest.mark.parametrize("moment", ["command", "check_stub", "is_ready", "doors_not_open", "serving"])
def test_interrupt_leaves_nothing(moment: str, models: Path, temporary: Path) -> None:
    """Ctrl-C at any moment of the start, or while serving, leaves no process, no memory and no folder."""
    with Child(models) as child:
        child.read_until(moment)
        child.interrupt()
        assert child.end() == -signal.SIGINT, child.words
        assert child.left_nothing()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_nothing(number: int, models: Path, temporary: Path) -> None:
    """SIGTERM and SIGHUP end the program in order, after its server."""
    with Child(models) as child:
        child.read_until("serving")
        child.interrupt(number)
        assert child.end() == 128 + number
        assert child.left_nothing()


def test_second_interrupt_kills_at_once(models: Path, temporary: Path) -> None:
    """Ctrl-C during the stop does not wait for Triton's own."""
    with Child(models) as child:
        child.read_until("serving")
        child.interrupt()
        child.read_until("_tell")
        began = time.monotonic()
        child.interrupt()
        assert child.end() == -signal.SIGINT, child.words
        assert time.monotonic() - began < 2
        assert child.left_nothing()


@pytest.mark.parametrize("moment", ["is_ready", "serving"])
def test_killed_program_leaves_nothing(moment: str, models: Path, temporary: Path) -> None:
    """A program that is killed outright leaves no process, no memory and no folder, some seconds later."""
    with Child(models) as child:
        child.read_until(moment)
        child.process.kill()
        child.end()
        assert eventually(child.left_nothing)
        assert eventually(lambda: not list(temporary.iterdir()))


def test_leaving_without_stop_leaves_nothing(models: Path, temporary: Path) -> None:
    """A program that ends in order inside the block waits until its server is gone."""
    with Child(models, "leave") as child:
        child.read_until("serving")
        assert child.end() == 0
        assert child.left_nothing()
