"""The wire below store_s3.py: HTTP exchanges that another thread can cut.

botocore signs requests and reads answers; between the two stands `Wire`, its `before-send` hook. A read time-out alone
does not bound a store that sends one byte a second, headers included: every recv is in time. So the caller's thread
watches what its workers receive (`Crew`) and shuts the socket of an exchange that is too slow or not wanted any more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import urllib3
from botocore.awsrequest import AWSResponse
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from adapter_slots.errors import MoveCancelled, StoreUnavailable
from adapter_slots.store import StoreSettings, Transfer

BEAT_S = 0.05
"""How soon a cancel or a slow exchange is seen."""

T = TypeVar("T")


class Exchange:
    """One request and its answer. `got` is called by the worker, `cut` by the watching thread."""

    def __init__(self) -> None:
        self.why_cut: str | None = None
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._over = False
        self._received = 0
        self._window = (time.monotonic(), 0)

    def got(self, num_bytes: int) -> None:
        """Bytes of the body arrived."""
        self._received += num_bytes

    def watch(self, sock: socket.socket | None) -> None:
        """The connection's socket, known before the first byte of the answer."""
        with self._lock:
            self._sock = sock
            late = self.why_cut is not None
        if late:
            self.cut(str(self.why_cut))

    def cut(self, why: str) -> None:
        """Wake the worker with an end of stream; what it raises is explained by `why_cut`."""
        with self._lock:
            self.why_cut = self.why_cut or why
            if self._sock is not None and not self._over:
                try:
                    # socket's own method: that of an SSLSocket would drop the TLS state under the reader
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
                except OSError:
                    self._sock = None  # closed already

    def end(self) -> None:
        """The socket is no longer ours: the pool may give it to another exchange."""
        with self._lock:
            self._over, self._sock = True, None

    def is_slow(self, now: float, settings: StoreSettings) -> bool:
        """Did a whole window pass with less than the lowest rate? Starts the next window."""
        since, before = self._window
        if now - since < settings.slow_window_s:
            return False
        self._window = (now, self._received)
        return self._received - before < settings.min_bytes_per_s * (now - since)


_current = threading.local()


class _HTTP(HTTPConnection):
    def getresponse(self) -> Any:
        _tell(self.sock)
        return super().getresponse()


class _HTTPS(HTTPSConnection):
    def getresponse(self) -> Any:
        _tell(self.sock)
        return super().getresponse()


class _HTTPPool(HTTPConnectionPool):
    ConnectionCls = _HTTP


class _HTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _HTTPS


def _tell(sock: socket.socket | None) -> None:
    exchange: Exchange | None = getattr(_current, "exchange", None)
    if exchange is not None:
        exchange.watch(sock)


class Wire:
    """Sends what botocore signed. Honours `ca_bundle` (AWS_CA_BUNDLE), REQUESTS_CA_BUNDLE and the proxy variables."""

    def __init__(self, settings: StoreSettings, ca_bundle: str | None) -> None:
        self._options: dict[str, Any] = {
            "maxsize": 64,  # idle connections kept: several adapters may be on their way
            "timeout": urllib3.Timeout(connect=settings.connect_timeout_s, read=settings.read_timeout_s),
            "ca_certs": ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE") or get_cert_path(True),
            "cert_reqs": "CERT_REQUIRED",
        }
        self._managers: dict[str | None, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def send(self, request: Any, **_: Any) -> AWSResponse:
        """The `before-send` hook: the answer's head is read, its body is not."""
        scheme = "https" if request.url.startswith("https:") else "http"
        pool = self._manager(get_environ_proxies(request.url).get(scheme)).connection_from_url(request.url)
        answer = pool.urlopen(
            request.method,
            "/" + request.url.split("/", 3)[3] if request.url.count("/") > 2 else "/",
            body=request.body,
            headers=request.headers,
            retries=False,
            redirect=False,
            assert_same_host=False,
            preload_content=False,
            decode_content=False,
        )
        return AWSResponse(request.url, answer.status, answer.headers, answer)

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            for manager in self._managers.values():
                manager.clear()

    def _manager(self, proxy: str | None) -> urllib3.PoolManager:
        with self._lock:
            if proxy not in self._managers:
                made = urllib3.ProxyManager(proxy, **self._options) if proxy else urllib3.PoolManager(**self._options)
                made.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
                self._managers[proxy] = made
            return self._managers[proxy]


class Crew:
    """Workers of one operation. The caller's thread waits in `result` and watches them meanwhile.

    Leaving the block cuts what still runs; no thread outlives it.
    """

    def __init__(self, settings: StoreSettings, transfer: Transfer, size: int) -> None:
        self.stopped = threading.Event()
        """Set when nothing of the operation is wanted any more: ends the waits between retries."""
        self._settings = settings
        self._transfer = transfer
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="store")
        self._jobs: set[Future[Any]] = set()
        self._exchanges: set[Exchange] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stopped.set()
        with self._lock:
            running = list(self._exchanges)
        for exchange in running:
            exchange.cut("stopped")
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Let a worker do it."""
        future = self._pool.submit(job)
        self._jobs.add(future)
        return future

    def result(self, future: Future[T]) -> T:
        """Wait for a job. Raises what it raised, what another one raised meanwhile, or MoveCancelled."""
        while not future.done():
            done, self._jobs = wait(self._jobs, BEAT_S, FIRST_COMPLETED)
            for job in done:
                job.result()
            self._transfer.check()
            self._cut_slow()
        return future.result()

    @contextmanager
    def exchange(self) -> Iterator[Exchange]:
        """One request by the calling worker. Errors of a cut exchange become what it was cut for."""
        exchange = Exchange()
        with self._lock:
            self._exchanges.add(exchange)
        _current.exchange = exchange
        try:
            if self.stopped.is_set():
                raise MoveCancelled("the move was given up")
            yield exchange
        except Exception:
            if self.stopped.is_set():
                raise MoveCancelled("the move was given up") from None
            if exchange.why_cut is not None:
                raise StoreUnavailable(exchange.why_cut) from None
            raise
        finally:
            _current.exchange = None
            exchange.end()
            with self._lock:
                self._exchanges.discard(exchange)

    def _cut_slow(self) -> None:
        now, low = time.monotonic(), self._settings.min_bytes_per_s
        with self._lock:
            slow = [exchange for exchange in self._exchanges if exchange.is_slow(now, self._settings)]
        for exchange in slow:
            exchange.cut(f"the store sends less than {low} bytes/s (over {self._settings.slow_window_s:g} s)")
