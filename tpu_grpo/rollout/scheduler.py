"""sglang-jax's scheduler with continuous batching, paged cache and prefix tree, driven on the calling thread.

Its decisions depend on the submitted requests alone: no clock, free memory, thread or socket takes part in them.
"""

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from sgl_jax.srt.managers.communication import CommunicationBackend
from sgl_jax.srt.managers.io_struct import TokenizedGenerateReqInput
from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
from sgl_jax.srt.managers.scheduler import GenerationBatchResult, Scheduler
from sgl_jax.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.sampling.sampling_params import SamplingParams as LibrarySamplingParams
from sgl_jax.srt.server_args import PortArgs, ServerArgs

from tpu_grpo.errors import RequestError
from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.decode_loop import LaunchOutput, Sampled
from tpu_grpo.rollout.reservation import Reservation, computed_experts, keep, reserve
from tpu_grpo.rollout.routed_experts import ExpertTable
from tpu_grpo.rollout.runner import Runner
from tpu_grpo.rollout.running import InFlight, RunningRequest
from tpu_grpo.rollout.shapes import rows_left
from tpu_grpo.rollout.step_arrays import StepOutput
from tpu_grpo.rollout.use import EngineUse
from tpu_grpo.types import Request


class _NoPeers(CommunicationBackend):
    """Stands in for the connection to the processes that send a server's requests and receive its answers."""

    def recv_requests(self) -> Any:
        """Refuse: requests come by ``SteppedScheduler.submit``."""
        raise AssertionError("the library's event loop does not run")

    def send_pyobj(self, data: Any) -> None:
        """Refuse: the library sends only that it gave a request up, which ``Engine.check`` rules out."""
        raise AssertionError(f"sglang-jax gave a request up: {data}")


class SteppedScheduler(Scheduler):
    """The library's Scheduler, driven by calls instead of its event loop.

    ``submit`` queues requests. ``start`` launches a prefill step or several decode steps and returns while the devices
    work, so that other engines can be served meanwhile; ``finish`` collects the tokens. ``forget_prefixes`` empties the
    cache.
    """

    def __init__(self, server_args: ServerArgs, mesh: Mesh, build_runner: Callable[..., Runner]):
        no_ports: Any = SimpleNamespace(**dict.fromkeys(PortArgs.__dataclass_fields__))
        with repairs.in_process(build_runner):
            super().__init__(server_args, no_ports, communication_backend=_NoPeers(), mesh=mesh)
        self._decode_first_n = self._consec_decode = 0  # or the library takes them from the environment of this host
        self.running: dict[str, RunningRequest] = {}
        self.use = EngineUse()
        self.retractions = 0
        self.before_launch: Callable[[], None] | None = None
        self._experts = self._expert_table()
        self._log = hashlib.sha256()
        self.in_flight: InFlight | None = None

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

    def start(self, *, most_steps: int | None = None, more_wait: bool = False) -> None:
        """Schedule one batch and launch it on the devices; call ``finish`` next.

        Args:
            most_steps: decode steps of a launch, if it is to have fewer than others.
            more_wait: whether requests wait for a place that have not been submitted.

        Raises:
            RequestError: if requests wait but none of them can ever run.
        """
        assert self.in_flight is None, "the launch before has not been finished"
        with self.use.time("schedule"):
            with repairs.without_sampling_info():
                batch = self.get_next_batch_to_run()
            self.cur_batch, reservation = batch, None
            if batch and batch.forward_mode.is_decode():
                rungs, waiting = self.runner.settings.shapes.batch, more_wait or bool(self.waiting_queue)
                left = rows_left(rungs, batch.batch_size(), waiting=waiting)
                steps = self.runner.steps_per_launch
                reservation = reserve(batch, steps if most_steps is None else min(most_steps, steps), left)
        if batch:
            self.in_flight = InFlight(batch, reservation, self._launch(batch, reservation))
        else:
            self._rest()
            self.last_batch = None

    @property
    def ready(self) -> bool:
        """Whether ``finish`` would not have to wait for the devices."""
        return self.in_flight is None or all(array.is_ready() for array in jax.tree.leaves(self.in_flight.output))

    def finish(self) -> None:
        """Wait for what is in flight, if anything is, and collect its tokens."""
        if self.in_flight is None:
            return
        flight, self.in_flight = self.in_flight, None
        with self.use.time("wait"):
            output = jax.device_get(flight.output)
        with self.use.time("collect"):
            self._take_in(flight.batch, flight.reservation, output)

    @property
    def digest(self) -> str:
        """sha256 of every launch so far: which requests ran, in which cache slots, and which tokens were sampled."""
        return self._log.hexdigest()

    def _launch(self, batch: ScheduleBatch, reservation: Reservation | None) -> StepOutput | LaunchOutput:
        """Launch a scheduled batch, and let what it leaves on the devices come to the host as soon as it is there."""
        with self.use.time("launch"):
            self.forward_ct += 1
            self._note_decision(batch, reservation)
            if self.before_launch is not None:
                self.before_launch()
            if reservation is None:
                self.use.prefills += 1
                for row, req in zip(batch.req_pool_indices, batch.reqs, strict=True):
                    self.runner.inputs.admit(row, self.running[req.rid].request)
                output = self.runner.prefill(batch)
            else:
                output = self.runner.launch(batch, reservation)
            for array in jax.tree.leaves(output):
                array.copy_to_host_async()
        return output

    def _take_in(self, batch: ScheduleBatch, reservation: Reservation | None, output: Any) -> None:
        """Take in a StepOutput or LaunchOutput, whose arrays are on the host now."""
        sampled = Sampled.of(output, len(batch.reqs))
        if reservation is not None:
            self._keep(batch, reservation, sampled)
        if self._experts is not None and output.experts is not None:
            self._experts.store(*computed_experts(batch, reservation, sampled.count, output.experts))
        self._log.update(sampled.count.tobytes() + sampled.tokens.tobytes())
        if reservation is None:
            self.use.accepted += sum(req.is_chunked <= 0 for req in batch.reqs)  # before the library counts a chunk off
        self._collect(batch, sampled)
        if reservation is not None:
            self._drop_finished(batch)
        self.last_batch = batch

    def _keep(self, batch: ScheduleBatch, reservation: Reservation, sampled: Sampled) -> None:
        """Give back the slots that a launch did not use, and count its steps, as the library counts single ones."""
        keep(batch, reservation, sampled.count)
        self.use.count_launch(sampled.count, self.max_running_requests)
        for _ in range(int(sampled.count.max()) - 1):
            self.new_token_ratio = max(self.new_token_ratio - self.new_token_ratio_decay, self.min_new_token_ratio)

    def _collect(self, batch: ScheduleBatch, sampled: Sampled) -> None:
        """Append the sampled tokens and their log-probabilities to their requests."""
        reqs, counts = list(batch.reqs), sampled.count.tolist()
        samples = [req.is_chunked <= 0 for req in reqs]  # a chunk of a prompt samples none
        tokens, logprobs = sampled.tokens.T.tolist(), sampled.logprobs.T.tolist()
        for req, count, row in zip(reqs, counts, tokens, strict=True):
            req.output_ids.extend(row[: count - 1])  # the library appends the last one, and looks whether it ends
        last = [row[count - 1] for count, row in zip(counts, tokens, strict=True)]
        batch.output_ids = np.array(last, np.int32)
        batch.per_dp_bs_size = len(last)  # the library drops the tokens of all rows from this one on
        self.process_batch_result(batch, GenerationBatchResult(None, last, [], [], 0, 0))
        for req, count, row, samples_one in zip(reqs, counts, logprobs, samples, strict=True):
            known = self.running[req.rid].logprobs
            known.extend(row[:count] if samples_one else ())
            assert len(req.output_ids) == len(known), f"sglang-jax lost a token of request {req.rid}"

    def _drop_finished(self, batch: ScheduleBatch) -> None:
        """Take finished rows out of the running batch, so that requests can take their places before the next launch.

        The library does so when it prepares a decode step, and lets nobody in before that.
        """
        rows = batch.batch_size()
        batch.filter_batch()
        if batch.batch_size() < rows:
            batch.reqs_info[0].batch_is_full = False

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

    def _note_decision(self, batch: ScheduleBatch, reservation: Reservation | None) -> None:
        rids = ",".join(req.rid for req in batch.reqs)
        slots, left = (batch.out_cache_loc, 0) if reservation is None else (reservation.slots, reservation.left)
        self._log.update(f"{batch.forward_mode.name} {rids} {left} ".encode())
        self._log.update(np.asarray(batch.seq_lens, np.int64).tobytes())
        self._log.update(np.asarray(slots, np.int64).tobytes())

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
