"""The directory in which this package caches files for a user, and the cache of compiled jax programs there.

The next run reads programs from the cache instead of compiling them:

    keep_programs(hosts)      # before anything large is compiled

jax 0.10.2 has a compilation cache. This file changes it in four ways:

- Every process writes the programs it compiles. In jax only process 0 does. On a slice, whose hosts have separate
  disks, the other hosts would compile again at each start, and process 0 would wait for them.
- A program's file appears whole or not at all, and holds a checksum. jax writes into a file that other processes may
  be reading, and a file cut off by a full disk or a kill would stay in the cache.
- A full or read-only disk is reported once, not for every program.
- Programs for CPUs are kept in a directory per kind of CPU and number of threads. The compiled code depends on both
  (see joining.py), but jax's key includes neither.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from tpu_grpo.hosts.host_agreement import Hosts
from tpu_grpo.hosts.host_log import logger
from tpu_grpo.hosts.joining import cpu_devices

CACHE_VARIABLE = "TPU_GRPO_CACHE"
VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""jax's own variable. If the user sets it, jax caches programs in that directory, and this file changes nothing."""
MOST_BYTES = 10 * 2**30
"""If the cache is larger at the start, the least recently used programs are removed."""
CHECKSUM_BYTES = 32
WAITING_SECONDS = 5.0
"""A process that waits longer than this for a lock prints which file it waits for."""


def cache_directory() -> Path:
    """Return the cache directory: ``$TPU_GRPO_CACHE`` if set, else the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("tpu_grpo")).expanduser().absolute()


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a file's lock (flock) during the block; the system releases the lock if the process dies.

    In the block, do nothing that needs the other hosts of a run, such as the first use of a device: another host may be
    waiting for the lock.

    Raises:
        OSError: for a path that cannot be written.
    """
    with path.open("a") as file:  # if the path is a link, its target is not changed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            line = f"waiting for another process of this machine, which has locked {path}"
            telling = threading.Timer(WAITING_SECONDS, lambda: print(line, file=sys.stderr, flush=True))
            telling.daemon = True
            telling.start()
            fcntl.flock(file, fcntl.LOCK_EX)
            telling.cancel()
        yield


def keep_programs(hosts: Hosts) -> None:
    """Make jax read compiled programs from disk and write new ones there; call it before much is compiled."""
    if os.environ.get(VARIABLE):
        return
    cache = ProgramCache(programs_directory(), speaks=hosts.is_first)
    if not cache.open():
        return
    import jax
    from jax._src import compilation_cache, compiler

    jax.config.update("jax_compilation_cache_dir", str(cache.directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # most time goes into many small programs
    compilation_cache.reset_cache()
    setattr(compilation_cache, "get_file_cache", lambda path: (cache, path))  # noqa: B010  # it is no attribute of ours
    setattr(compiler, "_cache_write", _write)  # noqa: B010


def programs_directory() -> Path:
    """Return the directory for programs of this kind of device, in `cache_directory`."""
    return cache_directory() / "programs" / _kind_of_device()


def _kind_of_device() -> str:
    """Return "accelerator", or for CPUs a digest of what jax's cache key lacks: CPU features and the thread count."""
    if "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        return "accelerator"
    threads = [os.environ.get("NPROC"), os.cpu_count(), len(os.sched_getaffinity(0)), cpu_devices()]
    return f"cpu-{hashlib.sha256(json.dumps([_cpu(), *threads]).encode()).hexdigest()[:12]}"


def _cpu() -> list[str]:
    """Return the lines of /proc/cpuinfo that describe the first processor's model and features."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        return sorted(line for line in first if line.startswith(("model name", "flags", "Features", "CPU")))
    return []


class ProgramCache:
    """Implements jax's cache interface with files of compiled programs.

    If the disk cannot be written, every process logs that; a process with ``speaks=True`` also prints it to stderr.
    """

    def __init__(self, directory: Path, *, speaks: bool = True):
        self.directory = directory
        self._path = directory  # jax reads this attribute for its log
        self._speaks = speaks
        self._writes = True

    def open(self) -> bool:
        """Create the directory for this user only, and free space; return whether only this user can write there."""
        ours = False
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.stat()
            if not (ours := found.st_uid == os.getuid() and not found.st_mode & 0o022):  # cached programs are executed
                raise PermissionError(errno.EPERM, "others may write there")
            if found.st_mode & 0o077:
                self.directory.chmod(0o700)
            self._make_room()
        except OSError as error:
            self._stop_writing(error)
        return ours

    def get(self, key: str) -> bytes | None:
        """Return a program; None if it is missing, or its file is damaged; a damaged file is removed."""
        path = self.directory / key
        try:
            found = path.read_bytes()
        except OSError:
            return None
        checksum, program = found[:CHECKSUM_BYTES], found[CHECKSUM_BYTES:]
        whole = hashlib.sha256(program).digest() == checksum
        with contextlib.suppress(OSError):  # on a read-only disk
            if whole:
                os.utime(path)  # `_make_room` needs the time of the last use
            else:
                path.unlink()
        return program if whole else None

    def put(self, key: str, value: bytes) -> None:
        """Write a program; do nothing once a write has failed."""
        if not self._writes:
            return
        unfinished = self.directory / f".{os.getpid()}-{threading.get_ident()}"
        try:
            unfinished.write_bytes(hashlib.sha256(value).digest() + value)
            unfinished.replace(self.directory / key)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            self._stop_writing(error)

    def _make_room(self) -> None:
        files = [(path.stat(), path) for path in self.directory.iterdir()]
        files.sort(key=lambda found: found[0].st_mtime)
        total = sum(state.st_size for state, _ in files)
        for state, path in files:
            if total <= MOST_BYTES:
                break
            path.unlink(missing_ok=True)  # another process may make room, too
            total -= state.st_size

    def _stop_writing(self, error: OSError) -> None:
        self._writes = False
        what = (
            f"compiled programs cannot be kept in {self.directory}: {error.strerror}; the run goes on, and the next "
            f"start compiles again. Make room there, or set {CACHE_VARIABLE} to another directory"
        )
        logger.warning(what)
        if self._speaks:
            print(what, file=sys.stderr, flush=True)


def _write(
    cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any, host_callbacks: Any
) -> None:
    """Write a program to the cache; replaces jax's ``compiler._cache_write``, which writes only in process 0."""
    if host_callbacks:  # such a program holds memory addresses of this process
        return
    from jax._src import compilation_cache
    from jax.errors import JaxRuntimeError

    try:
        compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, int(compile_time_secs))
    except JaxRuntimeError as error:  # not every program can be serialized
        logger.warning("the program %s is not kept: %s", module_name, error)
