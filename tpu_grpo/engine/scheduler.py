"""sglang-jax's scheduler with continuous batching, paged cache and prefix tree, driven on the calling thread.

    scheduler.submit(request)
    scheduler.start()       # schedules a prefill step or several decode steps, and launches them
    scheduler.finish()      # waits for the devices and collects the tokens

The scheduler's decisions depend only on the submitted requests: no clock, free memory, thread or socket affects them.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, Literal, override

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh
from jaxtyping import Int
from sgl_jax.srt.managers.communication import CommunicationBackend
from sgl_jax.srt.managers.io_struct import TokenizedGenerateReqInput
from sgl_jax.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sgl_jax.srt.managers.scheduler import GenerationBatchResult, Scheduler
from sgl_jax.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixCache
from sgl_jax.srt.sampling.sampling_params import SamplingParams as LibrarySamplingParams
from sgl_jax.srt.server_args import PortArgs, ServerArgs

from tpu_grpo.engine import repairs
from tpu_grpo.engine.decode_loop import LaunchOutput, Sampled, StepOutput, for_host
from tpu_grpo.engine.experts import ExpertTable
from tpu_grpo.engine.launches import Runner
from tpu_grpo.engine.options import rows_left
from tpu_grpo.engine.reservation import (
    Reservation,
    computed_experts,
    count_allocated,
    give_back,
    keep,
    reserve,
    reserve_ahead,
)
from tpu_grpo.engine.window_pages import Rows
from tpu_grpo.records.errors import RequestError
from tpu_grpo.records.stages import Completion, Request


@dataclass(eq=False)
class RunningRequest:
    """A request inside the scheduler, with the log-probabilities of the tokens sampled so far."""

    request: Request
    req: Req
    stop_token_ids: frozenset[int]
    logprobs: list[float] = field(default_factory=list)
    kept: list[int] | None = None
    """For each sampled token the number of tokens that the filters kept; None if the engine does not count them."""
    likeliest: list[dict[int, float]] = field(default_factory=list)

    def completion(self) -> Completion:
        """Build the finished completion; if its last allowed token is a stop token, it counts as stopped."""
        stops = not self.request.sampling.ignore_stop and self.req.output_ids[-1] in self.stop_token_ids
        truncated = isinstance(self.req.finished_reason, FINISH_LENGTH) and not stops
        return Completion(
            token_ids=np.asarray(self.req.output_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            finish_reason="length" if truncated else "stop",
            cached_tokens=self.req.cached_tokens,
            experts=self.req.routed_experts,
            kept=None if self.kept is None else np.asarray(self.kept, np.int32),
            likeliest=tuple(self.likeliest),
        )


@dataclass(frozen=True)
class InFlight:
    """A prefill step, or a launch of decode steps, that the devices are computing."""

    batch: ScheduleBatch
    reservation: Reservation | None
    """The cache slots of a launch of decode steps; None for a prefill step."""
    output: StepOutput | LaunchOutput


@dataclass
class EngineUse:
    """The counters of an engine (int), and the host's seconds by activity (float)."""

    schedule: float = 0.0
    """Choosing the next batch and reserving its cache slots."""
    launch: float = 0.0
    """Building inputs and calling compiled programs."""
    wait: float = 0.0
    """Waiting for the devices."""
    collect: float = 0.0
    """Appending sampled tokens to their requests."""
    prefills: int = 0
    """Launches of a prefill step."""
    accepted: int = 0
    """Rows whose prompts were completely prefilled, so that decode steps can continue them."""
    retracted: int = 0
    """Rows that were returned to the queue because the cache ran short, and computed anew later."""
    launches: int = 0
    """Launches of decode steps."""
    steps: int = 0
    """Decode steps of all launches."""
    tokens: int = 0
    """Tokens that decode steps sampled."""
    places: int = 0
    """Tokens that the decode steps would have sampled with the maximum number of rows."""
    decode: float = 0.0
    """The part of ``launch``, ``wait`` and ``collect`` that decode steps took."""
    environments: float = 0.0
    """Waiting for environments while there is nothing else to do."""
    turns: int = 0
    """Turns of conversations that have ended."""
    later_tokens: int = 0
    """Prompt tokens of all turns except the first of each conversation."""
    later_cached: int = 0
    """The part of ``later_tokens`` that was found in the prefix cache."""

    @contextmanager
    def time(self, what: Literal["schedule", "launch", "wait", "collect", "decode", "environments"]) -> Iterator[None]:
        """Add the seconds of the ``with`` block to the field ``what``, which also names the block in a profile."""
        start = time.perf_counter()
        with TraceAnnotation(what):
            yield
        setattr(self, what, getattr(self, what) + time.perf_counter() - start)

    def time_decode(self, reservation: Reservation | None) -> AbstractContextManager[None]:
        """Add the seconds of the ``with`` block to ``decode`` if there is a reservation: only decode steps have one."""
        return nullcontext() if reservation is None else self.time("decode")

    def __sub__(self, before: "EngineUse") -> "EngineUse":
        return EngineUse(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    @property
    def figures(self) -> dict[str, float]:
        """Return the metrics of a rollout; metrics of decode steps or of turns only if there were any."""
        values = {"rollout/wait_seconds": self.wait}
        if self.prefills:
            values["rollout/prefills"] = self.prefills
            values["rollout/accepted_rows"] = self.accepted / self.prefills
        if self.retracted:
            values["rollout/retracted"] = self.retracted
        if self.launches:
            values["rollout/tokens_per_launch"] = self.tokens / self.launches
            values["rollout/occupied_rows"] = self.tokens / self.places
        if self.turns:
            values["rollout/environment_wait_seconds"] = self.environments
            values["rollout/served_turns"] = self.turns
        if self.later_tokens:
            values["rollout/turn_cached_share"] = self.later_cached / self.later_tokens
        return values


def total_use(uses: Iterable[EngineUse]) -> EngineUse:
    """Sum the counters of several engines."""
    given = list(uses)
    return EngineUse(**{f.name: sum(getattr(use, f.name) for use in given) for f in fields(EngineUse)})


class _NoPeers(CommunicationBackend):
    """Stands in for the connection to the processes that send a server's requests and receive its answers."""

    @override
    def recv_requests(self) -> Any:
        raise AssertionError("the library's event loop does not run; requests come by SteppedScheduler.submit")

    @override
    def send_pyobj(self, data: Any) -> None:
        """Fail: the library sends only that it gave up a request, and ``Engine.check`` refuses such requests."""
        raise AssertionError(f"sglang-jax gave a request up: {data}")


class SteppedScheduler(Scheduler):
    """The library's Scheduler with our runner in its worker; the caller makes each step instead of an event loop.

    The devices compute between ``start`` and ``finish``, so that the caller can serve other engines meanwhile. The
    server's sockets, streams, logs and environment variables are left out.
    """

    def __init__(self, server_args: ServerArgs, mesh: Mesh, build_runner: Callable[..., Runner]):
        no_ports: Any = SimpleNamespace(**dict.fromkeys(PortArgs.__dataclass_fields__))
        with repairs.in_process(build_runner):
            super().__init__(server_args, no_ports, communication_backend=_NoPeers(), mesh=mesh)
        self._decode_first_n = self._consec_decode = 0  # else the library reads environment variables
        worker: Any = self.tp_worker
        self.runner: Runner = worker.model_runner
        self.programs = self.runner.programs
        self.running: dict[str, RunningRequest] = {}
        self.use = EngineUse()
        self.before_launch: Callable[[], None] | None = None
        self.in_flight: InFlight | None = None
        self._ahead: tuple[Reservation, LaunchOutput] | None = None
        """The launch that is queued on the devices behind the launch in flight, to continue its rows."""
        self._decisions = hashlib.sha256()
        self._request_table: ReqToTokenPool
        self._allocator: BaseTokenToKVPoolAllocator
        self._request_table, self._allocator = worker.get_memory_pool()  # the slots of each request, and the free slots
        layout, slots = self.programs.expert_layout, self._allocator.size + self._allocator.page_size
        self._experts = None if layout is None else ExpertTable(layout, slots)
        if (windows := self.runner.windows) is not None:
            windows.live, windows.unowned = self._live_rows, self._free_pages
            if isinstance(self.tree_cache, RadixCache):
                windows.guard(self.tree_cache)

    @override
    def stream_output(self, *_: Any, **__: Any) -> None:
        """Do nothing: completions are read from the requests."""

    @override
    def log_prefill_stats(self, *_: Any) -> None:
        """Log nothing: the pipeline reports tokens per second."""

    @override
    def log_decode_stats(self, *_: Any, **__: Any) -> None:
        """Log nothing: the pipeline reports tokens per second."""

    def submit(self, request: Request) -> RunningRequest:
        """Queue a request; requests are served in the order in which they were submitted."""
        stop_token_ids = self.runner.options.stop_token_ids
        params = LibrarySamplingParams(
            max_new_tokens=request.sampling.max_new_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=request.sampling.ignore_stop,
        )
        params.normalize(None)
        rid = str(len(self.running))
        asked: dict[str, Any] = {"rid": rid, "text": "", "input_ids": list(request.token_ids)}
        asked |= {"sampling_params": params, "logprob_start_len": -1, "token_ids_logprob": None}
        asked |= {"dp_rank": 0, "return_routed_experts": request.return_experts}
        self.handle_generate_request(TokenizedGenerateReqInput(**asked))
        running = RunningRequest(request, self.waiting_queue[-1], stop_token_ids)
        self.running[rid] = running
        self._decisions.update(np.asarray(request.token_ids, np.int32).tobytes())
        return running

    def start(self, *, most_steps: int | None = None, more_wait: bool = False, ahead: bool = False) -> None:
        """Take up the launch that was queued ahead, or schedule a batch and launch it; call ``finish`` next.

        Args:
            most_steps: the most decode steps of this launch, if fewer than usual.
            more_wait: whether the caller has more requests to submit once there are places for them.
            ahead: whether to queue the next launch on the devices already, if this one has decode steps and no request
                waits. Then no request may be submitted until the next ``start`` has returned.

        Raises:
            RequestError: if requests wait but none of them can ever run.
        """
        assert self.in_flight is None, "the launch before has not been finished"
        self.in_flight = self._take_up() or self._schedule(most_steps, more_wait)
        if self.in_flight is None:
            self._rest()
            self.last_batch = None
        elif ahead:
            self._launch_ahead(self.in_flight)

    def _schedule(self, most_steps: int | None, more_wait: bool) -> InFlight | None:
        """Schedule one batch and launch it; None if there is nothing to do."""
        with self.use.time("schedule"):
            with repairs.without_sampling_info():
                batch = self.get_next_batch_to_run()
            self.cur_batch, reservation = batch, None
            if batch and batch.forward_mode.is_decode():
                rungs, waiting = self.runner.options.shapes.batch, more_wait or bool(self.waiting_queue)
                left = rows_left(rungs, batch.batch_size(), waiting=waiting)
                steps = self.programs.steps
                reservation = reserve(batch, steps if most_steps is None else min(most_steps, steps), left)
        return InFlight(batch, reservation, self._launch(batch, reservation)) if batch else None

    def _launch_ahead(self, flight: InFlight) -> None:
        """Queue a launch on the devices behind ``flight``, to continue its rows.

        So the devices need not wait until the host has collected tokens and built inputs. Nothing is queued if launches
        have one step.
        """
        steps = self.programs.steps
        if flight.reservation is None or self.waiting_queue or steps == 1:
            return
        assert isinstance(flight.output, LaunchOutput)
        with self.use.time("schedule"):
            reservation = reserve_ahead(flight.batch, flight.reservation, steps)
        if reservation is not None:
            output = self._launch(flight.batch, reservation, flight.output)
            assert isinstance(output, LaunchOutput)
            self._ahead = reservation, output

    def _take_up(self) -> InFlight | None:
        """Take up the launch that was queued ahead; None if none was, or if too few rows are left for a step."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        reservation, output = ahead
        if len(reservation.columns) <= reservation.left:
            give_back(self.running_batch, reservation)
            return None
        assert not self.waiting_queue, "a request was submitted after a launch had been made ahead"
        with self.use.time("schedule"):
            with repairs.slots_taken(reservation.slots[:, 0]), repairs.without_sampling_info():
                batch = self.get_next_batch_to_run()
            assert batch is not None
            assert np.array_equal(batch.seq_lens, reservation.lengths), "rows have moved on from where they were"
            count_allocated(batch, reservation.lengths, reservation.ends)
        self.cur_batch = batch
        return InFlight(batch, reservation, output)

    @property
    def ready(self) -> bool:
        """Whether ``finish`` would not have to wait for the devices."""
        flight = self.in_flight
        return flight is None or all(array.is_ready() for array in jax.tree.leaves(for_host(flight.output)))

    def finish(self) -> None:
        """Wait for the current step or launch, if there is one, and collect its tokens."""
        if self.in_flight is None:
            return
        flight, self.in_flight = self.in_flight, None
        with self.use.time_decode(flight.reservation):
            with self.use.time("wait"):
                output = jax.device_get(for_host(flight.output))
            with self.use.time("collect"):
                self._take_in(flight.batch, flight.reservation, output)

    @property
    def digest(self) -> str:
        """SHA-256 of every prompt and launch so far: the requests, their cache slots, and the sampled tokens."""
        return self._decisions.hexdigest()

    def _note_launch(self, batch: ScheduleBatch, reservation: Reservation | None) -> None:
        """Add a launch to the digest; a launch of decode steps has a reservation."""
        rids = ",".join(req.rid for req in batch.reqs)
        slots, lengths, left = batch.out_cache_loc, batch.seq_lens, 0
        if reservation is not None:
            slots, lengths, left = reservation.slots, reservation.lengths, reservation.left
        self._decisions.update(f"{batch.forward_mode.name} {rids} {left} ".encode())
        self._decisions.update(np.asarray(lengths, np.int64).tobytes())
        self._decisions.update(np.asarray(slots, np.int64).tobytes())

    def _launch(
        self, batch: ScheduleBatch, reservation: Reservation | None, before: LaunchOutput | None = None
    ) -> StepOutput | LaunchOutput:
        """Launch a scheduled batch, and start the asynchronous copy of its outputs to the host."""
        with self.use.time_decode(reservation), self.use.time("launch"):
            self.forward_ct += 1
            self._note_launch(batch, reservation)
            if self.before_launch is not None:
                self.before_launch()
            if reservation is None:
                self.use.prefills += 1
                for row, req in zip(batch.req_pool_indices, batch.reqs, strict=True):
                    self.programs.inputs.admit(row, self.running[req.rid].request)
                output = self.programs.prefill(batch)
            else:
                output = self.programs.launch(batch, reservation, before)
            for array in jax.tree.leaves(for_host(output)):
                array.copy_to_host_async()
        return output

    def _take_in(self, batch: ScheduleBatch, reservation: Reservation | None, output: Any) -> None:
        """Process a StepOutput or LaunchOutput whose arrays are on the host."""
        if reservation is None:
            sampled = Sampled.of_prefill(output, len(batch.reqs))
            self.use.accepted += sum(req.is_chunked <= 0 for req in batch.reqs)  # before the library lowers is_chunked
        else:
            sampled = Sampled.of_launch(output, reservation.columns)
            keep(batch, reservation, sampled.count)
            steps = int(sampled.count.max())
            self.use.launches += 1
            self.use.steps += steps
            self.use.tokens += int(sampled.count.sum())
            self.use.places += steps * self.max_running_requests
            for _ in range(steps - 1):  # as the library does after single steps
                self.new_token_ratio = max(self.new_token_ratio - self.new_token_ratio_decay, self.min_new_token_ratio)
        if self._experts is not None and output.experts is not None:
            self._experts.store(*computed_experts(batch, reservation, sampled.count, output.experts))
        self._decisions.update(sampled.count.tobytes() + sampled.tokens.tobytes())
        self._collect(batch, sampled)
        if reservation is not None:
            self._drop_finished(batch)
        self.last_batch = batch

    def _collect(self, batch: ScheduleBatch, sampled: Sampled) -> None:
        """Append the sampled tokens and their log-probabilities to their requests."""
        reqs, counts, tokens = list(batch.reqs), sampled.count.tolist(), sampled.tokens.T.tolist()
        kept = counts if sampled.kept is None else sampled.kept.T.tolist()
        sampling = [req.is_chunked <= 0 for req in reqs]  # a row whose prompt has more chunks samples no token
        for req, count, row in zip(reqs, counts, tokens, strict=True):
            req.output_ids.extend(row[: count - 1])  # the library appends the last, and checks for the end
        last = [row[count - 1] for count, row in zip(counts, tokens, strict=True)]
        batch.output_ids = np.array(last, np.int32)
        batch.per_dp_bs_size = len(last)  # the library drops the tokens of all rows from this index on
        self.process_batch_result(batch, GenerationBatchResult(None, last, [], [], 0, 0))
        rows = zip(reqs, sampling, counts, sampled.logprobs.T.tolist(), kept, strict=True)
        for place, (req, samples, count, logprobs, kept_of_row) in enumerate(rows):
            running = self.running[req.rid]
            if samples:
                running.logprobs += logprobs[:count]
                if sampled.kept is not None:
                    running.kept = (running.kept or []) + kept_of_row[:count]
                if sampled.likeliest is not None and running.request.return_likeliest:
                    ids, values = (array[:count, place].tolist() for array in sampled.likeliest)
                    running.likeliest += [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            assert len(req.output_ids) == len(running.logprobs), f"sglang-jax lost a token of request {req.rid}"

    def _drop_finished(self, batch: ScheduleBatch) -> None:
        """Remove finished rows from the running batch, so that waiting requests can take their places.

        The library removes them only when it prepares a decode step, and admits no request before that.
        """
        stays = np.array([not req.finished() for req in batch.reqs])
        if self._ahead is not None:
            reservation, output = self._ahead
            give_back(batch, reservation.of(~stays))
            self._ahead = reservation.of(stays), output
        batch.filter_batch()
        if not stays.all():
            batch.reqs_info[0].batch_is_full = False

    def maybe_collect_routed_experts(self, req: Req) -> None:
        """Store a finished request's experts in it; the library calls this before it frees the request's slots."""
        if req.return_routed_experts:
            assert self._experts is not None, "Engine.check refuses such a request"
            computed = len(req.origin_input_ids) + len(req.output_ids) - 1
            req.routed_experts = self._experts.read(self._request_table.req_to_token[req.req_pool_idx, :computed])

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values; call it only between generations.

        Cached prefixes belong to the weights that computed them, so this is called after every weight sync.
        """
        assert not self.waiting_queue, "requests are still waiting"
        assert self.running_batch.is_empty(), "requests are still running"
        self.tree_cache.reset()
        self._request_table.clear()
        self._allocator.clear()
        if self.runner.windows is not None:
            self.runner.windows.clear()
        self.cur_batch = self.last_batch = None
        self.running = {}
        if self._experts is not None:
            self._experts.forget()

    def _live_rows(self) -> Rows:
        """Return the rows of all requests that hold slots."""
        reqs = [row.req for row in self.running.values() if row.req.req_pool_idx is not None]
        places, page = np.array([req.req_pool_idx for req in reqs], np.int32), self._allocator.page_size
        slots = self._request_table.req_to_token[places, : self.runner.options.shapes.context]
        first = np.array([max(0, req.kv_committed_len - 1) for req in reqs])  # it may be computed by the launch to come
        return Rows(slots[:, ::page] // page, first, np.array([req.kv_allocated_len for req in reqs]))

    def _free_pages(self) -> Int[np.ndarray, " pages"]:
        free: Any = self._allocator
        return free.free_slots[0] if free.page_size == 1 else np.concatenate([*free.free_pages, *free.release_pages])

    def _extend_requests_to_queue(self, reqs: list[Req], is_retracted: bool = False) -> None:
        """Queue requests as the library does, and count those that were retracted because the cache ran short."""
        self.use.retracted += len(reqs) if is_retracted else 0
        super()._extend_requests_to_queue(reqs, is_retracted)

    def _rest(self) -> None:
        """After a ``start`` without a batch, check for requests that can never run, and for leaked cache slots.

        One such ``start`` while requests wait is normal: only then does the library notice that its batch is empty.
        """
        if self.waiting_queue and self.last_batch is None:
            req = self.waiting_queue[0]
            free = self._allocator.available_size() + self.tree_cache.evictable_size()  # prefixes can be freed
            raise RequestError(
                f"request {req.rid} ({len(req.origin_input_ids)} prompt tokens, up to "
                f"{req.sampling_params.max_new_tokens} new) cannot be scheduled although nothing else runs: "
                f"{free} of {self.max_total_num_tokens} cache tokens are free; raise rollout.kv_tokens"
            )
        self.check_memory()
        self.new_token_ratio = self.init_new_token_ratio
