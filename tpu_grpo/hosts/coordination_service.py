"""The parts of JAX's coordination service that this package uses; only this file uses private names of the service.

``jax.distributed.initialize`` of jax 0.10.2 cannot be used as it is, for two reasons:

- The client aborts the process (LOG(FATAL), SIGABRT) when the service reports an error, when the connection closes
  because host 0 died, and when ``connect`` times out. Python code cannot prevent that. With ``recoverable``
  (``jax_enable_recoverability``) the service does not report errors of other hosts, but a closed connection still
  aborts. A ``missed_heartbeat_callback`` should replace the abort, but jaxlib cannot convert the callback's argument.
  So the callback never runs: ``connect`` raises ``std::bad_cast``, and on the client's own thread that exception
  becomes SIGABRT. ``_end_on_abort`` turns SIGABRT into a message and exit code 3.
- The service waits an hour for hosts to register. Clients give up earlier, and do not learn which hosts are missing.
  With ``cluster_register_timeout``, which ``initialize`` does not pass on, the service tells all clients in time.

So this file makes client and service as ``initialize`` does, and stores them in ``jax._src.distributed.global_state``.
"""

import atexit
import ctypes
import hmac
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tpu_grpo.hosts.authentication import SIGNATURE_BYTES, VARIABLE, signature, take_secret
from tpu_grpo.hosts.ending import alone, end_process, this_process
from tpu_grpo.hosts.host_agreement import attacked
from tpu_grpo.hosts.meeting import LOOPBACK, Caller, arrive, hold_port, no_answer, own_address, too_late
from tpu_grpo.records.errors import ConfigError, LockstepError

HEARTBEAT_SECONDS = 300
"""jax takes a silent host for lost after this time; `Watch` (watch.py), with a much shorter timeout, notices first."""
SHUTDOWN_SECONDS = 60
"""In jax's shutdown, a host waits this long for the other hosts to end."""
LEAVE_SECONDS = 10
"""At its end, host 0 waits this long for the other hosts to leave the service."""
GRACE_SECONDS = 2
"""Clients wait this much longer than the service: the service's error names missing hosts, and has to come first."""
ROOT = "tpu_grpo/start"

_leaving = threading.Lock()
_kept: list[Any] = []
"""References to the signal handlers that ctypes made: a registered handler must not be garbage collected."""


class Service:
    """The key-value store of the coordination service. Keys are paths; values are bytes of any length.

    Whoever can connect to the service can write values. With a ``key`` (authentication.py), each value is stored after
    a signature of its path and content, and reading a value with a wrong signature raises LockstepError.
    """

    def __init__(self, client: Any, key: bytes = b"") -> None:
        self._client, self._key = client, key

    def put(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """Store a value. Blocks for as long as the service does not answer. Raises LockstepError if the key has a value
        already, and ``overwrite`` is False."""
        from jax.errors import JaxRuntimeError

        signed = signature(self._key, key.encode(), value) + value
        try:
            self._client.key_value_set_bytes(key, signed, allow_overwrite=overwrite)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                raise attacked(key, "a value that was there before this host wrote its own") from error
            raise

    def wait(self, key: str, seconds: float) -> bytes | None:
        """Return the value once it is stored, or None after ``seconds``, even if the service is frozen."""
        from jax.errors import JaxRuntimeError

        try:
            return self._opened(key, self._client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1000))))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def list(self, directory: str) -> dict[str, bytes]:
        """Return the values below a directory, by relative path. Blocks while the service does not answer."""
        prefix = f"{directory}/"
        found = self._client.key_value_dir_get_bytes(prefix)
        return {key.removeprefix(prefix): self._opened(key, value) for key, value in found}

    def _opened(self, key: str, stored: bytes) -> bytes:
        """Check the signature at the beginning of what was stored, and return the value after the signature."""
        if not self._key:
            return stored
        proof, value = stored[:SIGNATURE_BYTES], stored[SIGNATURE_BYTES:]
        if not hmac.compare_digest(proof, signature(self._key, key.encode(), value)):
            raise attacked(key, "a value without their signature")
        return value

    def delete(self, key: str) -> None:
        """Remove a value."""
        self._client.key_value_delete(key)


def connect(coordinator: str, count: int, index: int, timeout_seconds: float, run: str = "") -> Service:
    """Meet the other hosts of the run, start the service (on host 0) and connect to it.

    Raises:
        ConfigError: jax has created its devices already, without those of the other hosts; another program uses the
            port; the secret is too short, or differs from host 0's.
        LockstepError: the coordinator, or other hosts, did not join within ``timeout_seconds``.
    """
    import jax
    from jax._src import distributed, xla_bridge

    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            "several hosts must meet before jax uses a device, so that it sees those of all, got a jax that has "
            "devices already; start the run first, and every run in a process of its own"
        )
    if "cpu" in (jax.config.jax_platforms or ""):  # pyrefly: ignore[missing-attribute]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # With asynchronous dispatch, a process with one device starts a program before the previous one has finished.
        # gloo would then use one program's data from other hosts in the other program: wrong numbers, or an abort.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    state: Any = distributed.global_state
    state.coordinator_address, state.num_processes, state.process_id = coordinator, count, index
    seconds = max(1, math.ceil(timeout_seconds))
    me, secret = Caller(run, index, count), take_secret()
    if index == 0:
        if not secret:
            print(
                f"{VARIABLE} is not set: whoever reaches {coordinator} can forge what hosts tell each other, and end "
                "the run",
                file=sys.stderr,
                flush=True,
            )
        with hold_port(coordinator, me, timeout_seconds, secret) as meeting:
            meeting.await_all(timeout_seconds)
            meeting.share_port()
            state.service = _service(coordinator, count, seconds)
            meeting.call()
            key = meeting.session_key
    else:
        key = arrive(coordinator, me, timeout_seconds, secret)
    state.client = _client(coordinator, index, seconds)
    try:
        state.client.connect()
    except RuntimeError as error:
        why = ""
        try:
            state.client.shutdown()
        except RuntimeError as repeated:  # has the service's message, unlike the exception of ``connect``
            why = str(repeated)
        state.client = state.service = None  # else jax shuts them down again when the process ends
        raise LockstepError(_not_connected(why, coordinator, me, timeout_seconds)) from error
    _end_on_abort(state.client)
    handler = signal.getsignal(signal.SIGTERM)
    state.initialize_preemption_sync_manager()  # as in ``jax.distributed``, but SIGTERM keeps its handler
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    service = Service(state.client, key)
    this_process.leave = partial(_leave, service, count, index)
    atexit.register(_leave_together, state)
    return service


def serve_alone() -> None:
    """Start a service on the loopback interface for a run of one process: gloo needs one to connect CPU devices.

    Does nothing if jax is connected to a service already, or has created its devices, because then it is too late.
    """
    import jax
    from jax._src import distributed, xla_bridge

    state: Any = distributed.global_state
    if state.client is not None or xla_bridge.backends_are_initialized():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        address = f"{LOOPBACK}:{probe.getsockname()[1]}"
    state.coordinator_address, state.num_processes, state.process_id = address, 1, 0
    state.service, state.client = _service(address, 1, SHUTDOWN_SECONDS), _client(address, 0, SHUTDOWN_SECONDS)
    state.client.connect()
    atexit.register(state.shutdown)


def _leave(service: Service, count: int, index: int) -> None:
    """Report to the service that this host has left; host 0, which runs the service, waits for other reports first."""
    with _leaving:  # if two threads leave at the same time, the second waits for the first
        if this_process.has_left:
            return
        with suppress(RuntimeError, LockstepError):  # the service is gone already, or holds a forged value
            if index == 0:
                end = time.monotonic() + LEAVE_SECONDS
                for other in range(1, count):
                    service.wait(f"{ROOT}/left/{other}", max(0.0, end - time.monotonic()))
            this_process.has_left = True
            service.put(f"{ROOT}/left/{index}", b"")
        this_process.has_left = True


def _leave_together(state: Any) -> None:
    """Report that this host has left, and then shut down jax's client, which waits for the other hosts."""
    if this_process.leave is not None:
        this_process.leave()
    state.shutdown()


def _service(coordinator: str, count: int, seconds: int) -> Any:
    """Start the service as ``jax.distributed`` does, with arguments that ``initialize`` does not pass on."""
    from jaxlib import _jax

    family, address, port = own_address(coordinator)
    return _jax.get_distributed_runtime_service(
        f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}",
        count,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        cluster_register_timeout=seconds,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


def _client(coordinator: str, index: int, seconds: int) -> Any:
    """Make a client as ``jax.distributed`` does, with arguments that ``initialize`` does not pass on."""
    from jaxlib import _jax

    return _jax.get_distributed_runtime_client(
        coordinator,
        index,
        init_timeout=seconds + GRACE_SECONDS,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        missed_heartbeat_callback=_never_called,
        shutdown_on_destruction=False,
        use_compression=True,
    )


def _never_called(*_: object) -> None:
    raise AssertionError("jaxlib can call this callback now: _end_on_abort is no longer needed")


def _not_connected(why: str, coordinator: str, me: Caller, timeout_seconds: float) -> str:
    """Return an error text: it names the hosts that the service reports as missing, or else host 0."""
    names = re.search(r"reached the barrier: (\d+)/.*timed out task names:\n((?:\d+\n)+)", why, re.DOTALL)
    if names:
        late = sorted(int(number) for number in names[2].split())
        unnamed = me.count - int(names[1]) - len(late)
        return too_late(late, me, timeout_seconds, f" and {unnamed} more" if unnamed else "")
    status = re.search(r"Agent status: (?:%s)?(.+)", why)
    return no_answer(coordinator, me, timeout_seconds, status[1].strip() if status else "")


def _end_on_abort(client: Any) -> None:
    """Turn an abort by the coordination client into exit code 3; other aborts stay aborts.

    The signal handler runs on the aborting thread. While the client aborts, its thread holds the client's lock, so a
    request to the client does not return. If a request returns, other code has aborted.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    before = signal.SIG_DFL.value

    def handle(_: int) -> None:
        if this_process.has_left:
            os._exit(this_process.leaving_with or 0)
        in_main = threading.get_ident() == threading.main_thread().ident
        if in_main or _answers(lambda: client.key_value_dir_get_bytes("nothing/"), within_seconds=1.0):
            libc.signal(signal.SIGABRT, before)
            os.kill(os.getpid(), signal.SIGABRT)
            return
        alone.set()
        end_process("lost host 0: the coordination service it runs closed the connection, or gave another host up")

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    _kept.append(handler)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def _answers(call: Callable[[], object], *, within_seconds: float) -> bool:
    """Return whether ``call`` returns in time, without RuntimeError. Another thread calls it: it may never return."""
    answered = threading.Event()

    def ask() -> None:
        try:
            call()
        except RuntimeError:
            return
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(within_seconds)
