"""sglang-jax's scheduler without what a server has around it: sockets, streams, logs, settings of the environment."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jax.sharding import Mesh
from sgl_jax.srt.managers.communication import CommunicationBackend
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.server_args import PortArgs, ServerArgs

from tpu_grpo.engine import repairs
from tpu_grpo.engine.runner import Runner


class _NoPeers(CommunicationBackend):
    """Stands in for the connection to the processes that send a server's requests and receive its answers."""

    def recv_requests(self) -> Any:
        """Refuse: requests come by ``SteppedScheduler.submit``."""
        raise AssertionError("the library's event loop does not run")

    def send_pyobj(self, data: Any) -> None:
        """Refuse: the library sends only that it gave a request up, which ``Engine.check`` rules out."""
        raise AssertionError(f"sglang-jax gave a request up: {data}")


class QuietScheduler(Scheduler):
    """The library's Scheduler, with our runner in its worker."""

    def __init__(self, server_args: ServerArgs, mesh: Mesh, build_runner: Callable[..., Runner]):
        no_ports: Any = SimpleNamespace(**dict.fromkeys(PortArgs.__dataclass_fields__))
        with repairs.in_process(build_runner):
            super().__init__(server_args, no_ports, communication_backend=_NoPeers(), mesh=mesh)
        self._decode_first_n = self._consec_decode = 0  # or the library takes them from the environment of this host

    def stream_output(self, *_: Any, **__: Any) -> None:
        """Do nothing: completions are read from the requests."""

    def log_prefill_stats(self, *_: Any) -> None:
        """Log nothing: the pipeline reports tokens per second."""

    def log_decode_stats(self, *_: Any, **__: Any) -> None:
        """Log nothing: the pipeline reports tokens per second."""

    def pools(self) -> tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]:
        """Return the table of each running request's cache slots, and the allocator that knows the free slots."""
        request_table, allocator = self.req_to_token_pool, self.token_to_kv_pool_allocator
        assert request_table is not None
        assert allocator is not None
        return request_table, allocator

    def available_tokens(self) -> int:
        """Return the cache tokens that are free, or held only by prefixes that can be evicted."""
        _, allocator = self.pools()
        return allocator.available_size() + self.tree_cache.evictable_size()
