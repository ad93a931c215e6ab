"""One embedded Triton: started, watched, stopped.

Rules:

* Nothing is started before Python, numpy, libpython, the stub and the ports have been looked at.
* It counts as started only when *our* server answers: ready, under our name, and all three ports are its own.
* A keeper process (keeper.py) stands between us and the server, so it stops on whatever way we end.
* `poll` finds what Triton's own readiness does not tell: a dead Python stub.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from lora_slots.stack import launch, log, probe
from lora_slots.stack.config import LOOPBACK, Ports, StackConfig
from lora_slots.stack.errors import ModelsFailed, NotReady, PortTaken, ServerDied, SetupError, StackError, StubDied
from lora_slots.stack.keeper import Order, remove_shared_memory
from lora_slots.stack.ports import choose_ports
from lora_slots.stack.process import KeptProcess

POLL_S = 0.05
LOOK_S = 0.5
NOW = float("-inf")
_TRIES = 3  # with ports of our own choice, should somebody take one between the look and the start
_DOORS_S = 5.0  # the metrics door opens some 50 ms after readiness


class TritonServer:
    """An embedded Triton, as a context manager: ready inside the block, stopped and cleaned up after it.

    with TritonServer(StackConfig(model_repository=path)) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    """

    def __init__(self, config: StackConfig) -> None:
        self.config = config
        self._ports: Ports | None = None
        self._process: KeptProcess | None = None
        self._stubs: probe.StubWatch | None = None
        self._name = ""
        self._owner = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def ports(self) -> Ports:
        """The ports in use. Raises StackError before the start."""
        if self._ports is None:
            raise StackError("the embedded Triton has not been started")
        return self._ports

    @property
    def http_url(self) -> str:
        """host:port of HTTP, as tritonclient.http takes it."""
        return f"{LOOPBACK}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """host:port of gRPC, as tritonclient.grpc takes it."""
        return f"{LOOPBACK}:{self.ports.grpc}"

    @property
    def urls(self) -> dict[str, str]:
        """Its doors as programs are told of them: gRPC by host:port, the others by URL."""
        return {"grpc": self.grpc_url, "http": f"http://{self.http_url}", "metrics": self.metrics_url}

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{LOOPBACK}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver; None while it does not run."""
        return self._process.pid or None if self._process else None

    def start(self) -> None:
        """Start the server and return when it is ready. Raises StackError; then nothing is left running."""
        if self._process is not None:
            raise StackError("this embedded Triton has been started already")
        config = self.config
        self._owner = os.getpid()
        asked = {"http": config.http_port, "grpc": config.grpc_port, "metrics": config.metrics_port}
        try:
            for remaining in reversed(range(_TRIES)):
                try:
                    self._start_once()
                    return
                except PortTaken as error:
                    if asked[error.door] or not remaining:
                        raise
        except BaseException:
            self.stop()
            raise

    def poll(self) -> None:
        """Look whether all is well. Raises ServerDied when the server has ended, StubDied when a Python model has."""
        if self._process is None or self._stubs is None:
            raise StackError("the embedded Triton is not running")
        if self._process.ended():
            code = self._process.returncode
            how = f"with code {code}" if code is not None else "(its keeper was killed)"
            raise ServerDied(f"the embedded Triton ended by itself {how}", returncode=code, log_tail=self.log_tail())
        dead = self._stubs.dead(time.monotonic())
        if dead:
            raise StubDied(
                f"the Python process of {', '.join(dead)} ended; Triton does not restart it, so this server must be",
                log_tail=self.log_tail(), instances=dead,
            )  # fmt: skip

    def reload(self, model: str) -> None:
        """Load a model anew whose Python process died, and forget that death. Needs `control_models`.

        Raises StackError if Triton cannot load it.
        """
        if self._stubs is None:
            raise StackError("the embedded Triton is not running")
        for file in (self._folder() / "models" / model).glob("*/model.py"):
            with suppress(OSError):  # from the second time on Triton loads only what looks changed, even if it is dead
                os.utime(file)
        why = probe.load_model(self.ports.http, model)
        if why:
            raise StackError(f"{model} cannot be loaded again: {why}", log_tail=self.log_tail())
        self._stubs.bury()

    def wait(self, timeout_s: float | None = None, *, every_s: float = 0.5) -> None:
        """Return after `timeout_s` (None: never). Raises as `poll` as soon as something died."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.poll()
            left = every_s if deadline is None else min(every_s, deadline - time.monotonic())
            if left <= 0:
                return
            time.sleep(left)

    def stop(self) -> None:
        """Stop the server, wait until nothing of it is left. May be called at any time, any number of times.

        Interrupted (Ctrl-C) while waiting, it kills the server at once and lets the interrupt pass on.
        """
        if self._owner == os.getpid():  # a forked child has no say
            try:
                self._end()
            finally:
                for folder in self.config.temporary:
                    shutil.rmtree(folder, ignore_errors=True)

    def kill(self) -> None:
        """As `stop`, without waiting for what runs in it: an orderly stop takes Triton about three seconds."""
        if self._owner == os.getpid() and self._process is not None:
            self._process.kill()
        self.stop()

    def log_tail(self, lines: int = log.TAIL_LINES) -> str:
        """The last lines of the server's log that tell something; "" after the stop, unless there is a `log_path`."""
        return log.tail(log.read(self._log_path()), lines)

    def _start_once(self) -> None:
        config = self.config
        home = launch.triton_home()
        environment = launch.server_environment(home, config)
        self._ports = choose_ports(config.http_port, config.grpc_port, config.metrics_port, config.usual_ports)
        given = config.model_repository
        models = given if isinstance(given, Path) else given(self._ports)
        if not models.is_dir():
            raise SetupError(f"the model repository {models} is not a folder")
        self._name = f"lora-slots-{secrets.token_hex(8)}"
        atexit.register(self.stop)
        try:
            folder = self._folder()
            launch.check_stub(launch.make_folder(folder, home, models), environment)
            self._log_path().parent.mkdir(parents=True, exist_ok=True)
            order = Order(
                argv=launch.command(home, config, self._ports, folder),
                log=str(self._log_path()), folder=str(folder), temporary=[str(path) for path in config.temporary],
                shm_prefix=self._name, exit_timeout_s=config.exit_timeout_s, parent=os.getpid(),
            )  # fmt: skip
            self._process = KeptProcess(order, environment)
            self._process.start()
            self._stubs = probe.StubWatch(self._process.pid)
            self._await_ready(self._process.pid, self._ports)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if not self._name:
            return
        try:
            if self._process is not None:
                self._process.stop()
        except BaseException:
            if self._process is not None:
                self._process.kill()
            raise
        finally:
            remove_shared_memory(self._name)  # the keeper did, unless it was killed
            shutil.rmtree(self._folder(), ignore_errors=True)
            atexit.unregister(self.stop)
            self._process = self._stubs = None
            self._name = ""

    def _await_ready(self, pid: int, ports: Ports) -> None:
        deadline = time.monotonic() + self.config.ready_timeout_s
        look_at = NOW
        while not probe.is_ready(ports.http):
            look_at = self._look(look_at)
            if time.monotonic() > deadline:
                raise NotReady(
                    f"the embedded Triton was not ready after {self.config.ready_timeout_s:g} s",
                    log_tail=self.log_tail(),
                )
            time.sleep(POLL_S)
        if probe.server_name(ports.http) != self._name:
            raise PortTaken("http", ports.http, "another server answers on it", log_tail=self.log_tail())
        deadline = time.monotonic() + _DOORS_S
        while (closed := probe.doors_not_open(pid, ports)) != []:
            look_at = self._look(look_at)
            if time.monotonic() > deadline:
                if closed is None:  # it lives, and this machine shows nobody its sockets
                    return
                port = dict(ports.doors())[closed[0]]
                raise PortTaken(closed[0], port, "Triton does not listen on it", log_tail=self.log_tail())
            time.sleep(POLL_S)

    def _look(self, at: float) -> float:
        """`_check_start`, if it is time for it; when the next time is. Every process of the machine is looked at."""
        now = time.monotonic()
        if now < at:
            return at
        self._check_start()
        return now + LOOK_S

    def _check_start(self) -> None:
        """As `poll`, saying more exactly what made a start fail."""
        try:
            self.poll()
        except StubDied:
            raise
        except ServerDied as error:
            text = log.read(self._log_path())
            port, models = log.port_in_use(text), log.failed_models(text)
            if port is not None:
                door = next((door for door, number in self.ports.doors() if number == port), "http")
                raise PortTaken(door, port, "it was taken while Triton started", log_tail=error.log_tail) from None
            if models:
                raise ModelsFailed(models, log_tail=error.log_tail) from None
            raise

    def _folder(self) -> Path:
        return Path(tempfile.gettempdir()) / self._name

    def _log_path(self) -> Path:
        return (self.config.log_path or self._folder() / "triton.log").resolve()
