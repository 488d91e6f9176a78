"""sglang-jax's scheduler with continuous batching, paged cache and prefix tree, stepped on the calling thread.

Its decisions depend on the submitted requests alone: no clock, free memory, thread or socket takes part in them.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from sgl_jax.srt.managers.communication import CommunicationBackend
from sgl_jax.srt.managers.io_struct import TokenizedGenerateReqInput
from sgl_jax.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sgl_jax.srt.managers.scheduler import GenerationBatchResult, Scheduler
from sgl_jax.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.sampling.sampling_params import SamplingParams as LibrarySamplingParams
from sgl_jax.srt.server_args import PortArgs, ServerArgs

from tpu_grpo.errors import RequestError
from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.routed_experts import ExpertTable
from tpu_grpo.rollout.runner import Runner, StepOutput
from tpu_grpo.types import Completion, Request


@dataclass
class StepSeconds:
    """Seconds that all steps so far spent, by what was done."""

    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    """Waiting for the devices."""
    collect: float = 0.0
    """Appending sampled tokens to their requests."""
    steps: int = 0
    """The number of steps."""


@dataclass(eq=False)
class RunningRequest:
    """A request inside the scheduler, with the log-probabilities of the tokens sampled so far."""

    request: Request
    req: Req
    stop_token_ids: frozenset[int]
    logprobs: list[float] = field(default_factory=list)

    @property
    def prefilled(self) -> bool:
        """Whether its prompt is in the cache, where requests with the same prompt can reuse it."""
        return bool(self.req.output_ids)

    def completion(self) -> Completion:
        """Build the finished completion; one whose last allowed token is a stop token counts as stopped."""
        stops = not self.request.sampling.ignore_stop and self.req.output_ids[-1] in self.stop_token_ids
        truncated = isinstance(self.req.finished_reason, FINISH_LENGTH) and not stops
        return Completion(
            token_ids=np.asarray(self.req.output_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            finish_reason="length" if truncated else "stop",
            cached_tokens=self.req.cached_tokens,
            experts=self.req.routed_experts,
        )


class _NoPeers(CommunicationBackend):
    """Stands in for the connection to the processes that send a server's requests and receive its answers."""

    def recv_requests(self) -> Any:
        """Refuse: requests come by ``SteppedScheduler.submit``."""
        raise AssertionError("the library's event loop does not run")

    def send_pyobj(self, data: Any) -> None:
        """Refuse: the library sends only that it gave a request up, which ``Engine.check`` rules out."""
        raise AssertionError(f"sglang-jax gave a request up: {data}")


@dataclass(frozen=True)
class StepInFlight:
    """A step that the devices are computing."""

    batch: ScheduleBatch
    output: StepOutput


class SteppedScheduler(Scheduler):
    """The library's Scheduler, driven by calls instead of its event loop.

    ``submit`` queues requests. ``start_step`` launches a step and returns while the devices work, so that other engines
    can be served meanwhile; ``finish_step`` collects the tokens. ``forget_prefixes`` empties the cache.
    """

    def __init__(self, server_args: ServerArgs, mesh: Mesh, build_runner: Callable[..., Runner]):
        no_ports: Any = SimpleNamespace(**dict.fromkeys(PortArgs.__dataclass_fields__))
        with repairs.in_process(build_runner):
            super().__init__(server_args, no_ports, communication_backend=_NoPeers(), mesh=mesh)
        self._decode_first_n = self._consec_decode = 0  # or the library takes them from the environment of this host
        self.running: dict[str, RunningRequest] = {}
        self.seconds = StepSeconds()
        self.retractions = 0
        self.before_launch: Callable[[], None] | None = None
        self._experts = self._expert_table()
        self._log = hashlib.sha256()
        self.in_flight: StepInFlight | None = None

    @property
    def runner(self) -> Runner:
        """The model runner inside the library's worker, which is ours."""
        worker: Any = self.tp_worker
        return worker.model_runner

    def submit(self, request: Request, stop_token_ids: frozenset[int]) -> RunningRequest:
        """Queue a request; requests are served in the order in which they were submitted."""
        params = LibrarySamplingParams(
            max_new_tokens=request.sampling.max_new_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=request.sampling.ignore_stop,
        )
        params.normalize(None)
        rid = str(len(self.running))
        fields: dict[str, Any] = {"rid": rid, "text": "", "input_ids": list(request.token_ids)}
        fields |= {"sampling_params": params, "logprob_start_len": -1, "token_ids_logprob": None}
        fields |= {"dp_rank": 0, "return_routed_experts": request.return_experts}
        self.handle_generate_request(TokenizedGenerateReqInput(**fields))
        running = RunningRequest(request, self.waiting_queue[-1], stop_token_ids)
        self.running[rid] = running
        return running

    def start_step(self) -> None:
        """Schedule one batch and launch it on the devices; call ``finish_step`` next.

        Raises:
            RequestError: if requests wait but none of them can ever run.
        """
        assert self.in_flight is None, "the step before has not been finished"
        start = time.perf_counter()
        with repairs.without_sampling_info():
            batch = self.get_next_batch_to_run()
        self.cur_batch = batch
        self.seconds.schedule += time.perf_counter() - start
        if batch:
            self.in_flight = StepInFlight(batch, self._launch(batch))
        else:
            self._rest()
            self.last_batch = None

    def finish_step(self) -> None:
        """Wait for the step in flight, if there is one, and collect its tokens."""
        if self.in_flight is None:
            return
        step, self.in_flight = self.in_flight, None
        start = time.perf_counter()
        output = jax.device_get(step.output)
        self.seconds.wait += time.perf_counter() - start
        self.seconds.steps += 1
        batch, tokens, self._logprobs = step.batch, output.tokens[: len(step.batch.reqs)], output.logprobs
        if self._experts is not None and output.experts is not None:
            self._experts.store(batch.out_cache_loc, output.experts[: len(batch.out_cache_loc)])
        self._log.update(tokens.tobytes())
        batch.output_ids = tokens
        batch.per_dp_bs_size = len(tokens)  # the library drops the tokens of all rows from this one on
        self.process_batch_result(batch, GenerationBatchResult(None, tokens.tolist(), [], [], 0, 0))
        self.last_batch = batch

    @property
    def digest(self) -> str:
        """sha256 of every step so far: which requests ran, in which cache slots, and which tokens were sampled."""
        return self._log.hexdigest()

    def _launch(self, batch: ScheduleBatch) -> StepOutput:
        """Launch the step program on a scheduled batch."""
        start = time.perf_counter()
        self.forward_ct += 1
        self._note_decision(batch)
        if self.before_launch is not None:
            self.before_launch()
        if batch.forward_mode.is_extend():
            for row, req in zip(batch.req_pool_indices, batch.reqs, strict=True):
                self.runner.inputs.admit(row, self.running[req.rid].request)
        output = self.runner.launch(batch)
        self.seconds.launch += time.perf_counter() - start
        return output

    def process_batch_result(
        self, batch: ScheduleBatch, result: GenerationBatchResult, launch_done: Any = None
    ) -> None:
        """Append the sampled tokens and their log-probabilities to their requests."""
        del launch_done
        start = time.perf_counter()
        reqs, samples = (
            list(batch.reqs),
            [req.is_chunked <= 0 for req in batch.reqs],
        )  # a chunk of a prompt samples none
        super().process_batch_result(batch, result)
        for row, req in enumerate(reqs):
            logprobs = self.running[req.rid].logprobs
            if samples[row]:
                logprobs.append(float(self._logprobs[row]))
            assert len(req.output_ids) == len(logprobs), f"sglang-jax lost a token of request {req.rid}"
        self.seconds.collect += time.perf_counter() - start

    def maybe_collect_routed_experts(self, req: Req) -> None:
        """Take a finished request's experts; the library calls this before it frees the cache slots."""
        if req.return_routed_experts:
            assert self._experts is not None, "Engine.check refuses such a request"
            request_table, _ = self._pools()
            computed = len(req.origin_input_ids) + len(req.output_ids) - 1
            req.routed_experts = self._experts.read(request_table.req_to_token[req.req_pool_idx, :computed])

    def stream_output(self, *_: Any, **__: Any) -> None:
        """Do nothing: completions are read from the requests."""

    def log_prefill_stats(self, *_: Any) -> None:
        """Log nothing: the pipeline reports tokens per second."""

    def log_decode_stats(self, *_: Any, **__: Any) -> None:
        """Log nothing: the pipeline reports tokens per second."""

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values; call it only between generations.

        Cached prefixes belong to the weights that computed them, so this follows every weight sync.
        """
        assert not self.waiting_queue, "requests are still waiting"
        assert self.running_batch.is_empty(), "requests are still running"
        request_table, allocator = self._pools()
        self.tree_cache.reset()
        request_table.clear()
        allocator.clear()
        self.cur_batch = self.last_batch = None
        self.running = {}
        if self._experts is not None:
            self._experts.forget()

    def _extend_requests_to_queue(self, reqs: list[Req], is_retracted: bool = False) -> None:
        """Queue requests as the library does, and count those that return because the cache ran short."""
        self.retractions += len(reqs) if is_retracted else 0
        super()._extend_requests_to_queue(reqs, is_retracted)

    def _note_decision(self, batch: ScheduleBatch) -> None:
        rids = ",".join(req.rid for req in batch.reqs)
        self._log.update(f"{batch.forward_mode.name} {rids} ".encode())
        self._log.update(np.asarray(batch.seq_lens, np.int64).tobytes())
        self._log.update(np.asarray(batch.out_cache_loc, np.int64).tobytes())

    def _rest(self) -> None:
        """Check, when there is no batch, for leaked slots, as the library does, and for requests that can never run.

        One empty step while requests wait is normal, because the library notices only then that its batch is empty.
        """
        if self.waiting_queue and self.last_batch is None:
            req = self.waiting_queue[0]
            raise RequestError(
                f"request {req.rid} ({len(req.origin_input_ids)} prompt tokens, up to "
                f"{req.sampling_params.max_new_tokens} new) cannot be scheduled although nothing else runs: "
                f"{self._available_tokens()} of {self.max_total_num_tokens} cache tokens are free; raise "
                "rollout.kv_tokens"
            )
        self.check_memory()
        self.new_token_ratio = self.init_new_token_ratio

    def _available_tokens(self) -> int:
        _, allocator = self._pools()
        return allocator.available_size() + self.tree_cache.evictable_size()

    def _expert_table(self) -> ExpertTable | None:
        layout, (_, allocator) = self.runner.expert_layout, self._pools()
        return None if layout is None else ExpertTable(layout, allocator.size + allocator.page_size)

    def _pools(self) -> tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]:
        """Return the table of each running request's cache slots, and the allocator that knows the free slots."""
        request_table, allocator = self.req_to_token_pool, self.token_to_kv_pool_allocator
        assert request_table is not None
        assert allocator is not None
        return request_table, allocator
