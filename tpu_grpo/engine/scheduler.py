"""sglang-jax's scheduler with continuous batching, paged cache and prefix tree, driven on the calling thread.

Its decisions depend on the submitted requests alone: no clock, free memory, thread or socket takes part in them.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from sgl_jax.srt.managers.io_struct import TokenizedGenerateReqInput
from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
from sgl_jax.srt.managers.scheduler import GenerationBatchResult
from sgl_jax.srt.sampling.sampling_params import SamplingParams as LibrarySamplingParams
from sgl_jax.srt.server_args import ServerArgs

from tpu_grpo.engine import repairs
from tpu_grpo.engine.decisions import DecisionLog
from tpu_grpo.engine.decode_loop import LaunchOutput, Sampled, for_host
from tpu_grpo.engine.quiet_scheduler import QuietScheduler
from tpu_grpo.engine.reservation import (
    Reservation,
    computed_experts,
    count_allocated,
    give_back,
    keep,
    reserve,
    reserve_ahead,
)
from tpu_grpo.engine.routed_experts import ExpertTable
from tpu_grpo.engine.runner import Runner
from tpu_grpo.engine.running import Ahead, InFlight, RunningRequest
from tpu_grpo.engine.shapes import rows_left
from tpu_grpo.engine.step_arrays import StepOutput
from tpu_grpo.engine.use import EngineUse
from tpu_grpo.records.errors import RequestError
from tpu_grpo.records.stages import Request


class SteppedScheduler(QuietScheduler):
    """The library's Scheduler, driven by calls.

    ``submit`` queues requests. ``start`` launches a prefill step or several decode steps and returns while the devices
    work, so that other engines can be served meanwhile; ``finish`` collects the tokens. ``forget_prefixes`` empties the
    cache.
    """

    def __init__(self, server_args: ServerArgs, mesh: Mesh, build_runner: Callable[..., Runner]):
        super().__init__(server_args, mesh, build_runner)
        self.running: dict[str, RunningRequest] = {}
        self.use = EngineUse()
        self.before_launch: Callable[[], None] | None = None
        self._experts = self._expert_table()
        self._decisions = DecisionLog()
        self.in_flight: InFlight | None = None
        self._ahead: Ahead | None = None

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
        self._decisions.submitted(request.token_ids)
        return running

    def start(self, *, most_steps: int | None = None, more_wait: bool = False, ahead: bool = False) -> None:
        """Schedule one batch and launch it on the devices, unless they have it already; call ``finish`` next.

        Args:
            most_steps: decode steps of a launch, if it is to have fewer than others.
            more_wait: whether requests wait for a place that have not been submitted.
            ahead: whether the devices may get the launch after this one, too, if it is one of decode steps and no
                request waits. No request may be submitted before the second ``start`` from here.

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
                rungs, waiting = self.runner.settings.shapes.batch, more_wait or bool(self.waiting_queue)
                left = rows_left(rungs, batch.batch_size(), waiting=waiting)
                steps = self.runner.steps_per_launch
                reservation = reserve(batch, steps if most_steps is None else min(most_steps, steps), left)
        return InFlight(batch, reservation, self._launch(batch, reservation)) if batch else None

    def _launch_ahead(self, flight: InFlight) -> None:
        """Give the devices the launch after this one, with rows that go on where this one leaves them.

        So they need not wait until the host has collected tokens and built inputs. A launch of one step is left alone.
        """
        steps = self.runner.steps_per_launch
        if flight.reservation is None or self.waiting_queue or steps == 1:
            return
        assert isinstance(flight.output, LaunchOutput)
        with self.use.time("schedule"):
            reservation = reserve_ahead(flight.batch, flight.reservation, steps)
        if reservation is not None:
            output = self._launch(flight.batch, reservation, flight.output)
            assert isinstance(output, LaunchOutput)
            self._ahead = Ahead(reservation, output)

    def _take_up(self) -> InFlight | None:
        """Take up the launch that was made ahead; none if so few rows are left that it makes no step."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        reservation = ahead.reservation
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
        return InFlight(batch, reservation, ahead.output)

    @property
    def ready(self) -> bool:
        """Whether ``finish`` would not have to wait for the devices."""
        flight = self.in_flight
        return flight is None or all(array.is_ready() for array in jax.tree.leaves(for_host(flight.output)))

    def finish(self) -> None:
        """Wait for what is in flight, if anything is, and collect its tokens."""
        if self.in_flight is None:
            return
        flight, self.in_flight = self.in_flight, None
        with self.use.time("wait"):
            output = jax.device_get(for_host(flight.output))
        with self.use.time("collect"):
            self._take_in(flight.batch, flight.reservation, output)

    @property
    def digest(self) -> str:
        """sha256 of every prompt and launch so far: which requests ran, in which cache slots, and what was sampled."""
        return self._decisions.digest

    def _launch(
        self, batch: ScheduleBatch, reservation: Reservation | None, before: LaunchOutput | None = None
    ) -> StepOutput | LaunchOutput:
        """Launch a scheduled batch, and let what it leaves on the devices come to the host as soon as it is there."""
        with self.use.time("launch"):
            self.forward_ct += 1
            self._decisions.launched(batch, reservation)
            if self.before_launch is not None:
                self.before_launch()
            if reservation is None:
                self.use.prefills += 1
                for row, req in zip(batch.req_pool_indices, batch.reqs, strict=True):
                    self.runner.inputs.admit(row, self.running[req.rid].request)
                output = self.runner.prefill(batch)
            else:
                output = self.runner.launch(batch, reservation, before)
            for array in jax.tree.leaves(for_host(output)):
                array.copy_to_host_async()
        return output

    def _take_in(self, batch: ScheduleBatch, reservation: Reservation | None, output: Any) -> None:
        """Take in a StepOutput or LaunchOutput, whose arrays are on the host now."""
        if reservation is None:
            sampled = Sampled.of_prefill(output, len(batch.reqs))
        else:
            sampled = Sampled.of_launch(output.results, reservation.columns, output.kept)
            self._keep(batch, reservation, sampled)
        if self._experts is not None and output.experts is not None:
            self._experts.store(*computed_experts(batch, reservation, sampled.count, output.experts))
        self._decisions.sampled(sampled)
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
        if sampled.kept is not None:
            for req, count, row, samples_one in zip(reqs, counts, sampled.kept.T.tolist(), samples, strict=True):
                running = self.running[req.rid]
                running.kept = (running.kept or []) + (row[:count] if samples_one else [])

    def _drop_finished(self, batch: ScheduleBatch) -> None:
        """Take finished rows out of the running batch, so that requests can take their places before the next launch.

        The library does so when it prepares a decode step, and lets nobody in before that.
        """
        stays = np.array([not req.finished() for req in batch.reqs])
        if self._ahead is not None:
            reservation, output = self._ahead.reservation, self._ahead.output
            give_back(batch, reservation.of(~stays))
            self._ahead = Ahead(reservation.of(stays), output)
        batch.filter_batch()
        if not stays.all():
            batch.reqs_info[0].batch_is_full = False

    def maybe_collect_routed_experts(self, req: Req) -> None:
        """Take a finished request's experts; the library calls this before it frees the cache slots."""
        if req.return_routed_experts:
            assert self._experts is not None, "Engine.check refuses such a request"
            request_table, _ = self.pools()
            computed = len(req.origin_input_ids) + len(req.output_ids) - 1
            req.routed_experts = self._experts.read(request_table.req_to_token[req.req_pool_idx, :computed])

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values; call it only between generations.

        Cached prefixes belong to the weights that computed them, so this follows every weight sync.
        """
        assert not self.waiting_queue, "requests are still waiting"
        assert self.running_batch.is_empty(), "requests are still running"
        request_table, allocator = self.pools()
        self.tree_cache.reset()
        request_table.clear()
        allocator.clear()
        self.cur_batch = self.last_batch = None
        self.running = {}
        if self._experts is not None:
            self._experts.forget()

    def _extend_requests_to_queue(self, reqs: list[Req], is_retracted: bool = False) -> None:
        """Queue requests as the library does, and count those that return because the cache ran short."""
        self.use.retracted += len(reqs) if is_retracted else 0
        super()._extend_requests_to_queue(reqs, is_retracted)

    def _rest(self) -> None:
        """Check, when there is no batch, for leaked slots, as the library does, and for requests that can never run.

        One empty step while requests wait is normal, because the library notices only then that its batch is empty.
        """
        if self.waiting_queue and self.last_batch is None:
            req = self.waiting_queue[0]
            raise RequestError(
                f"request {req.rid} ({len(req.origin_input_ids)} prompt tokens, up to "
                f"{req.sampling_params.max_new_tokens} new) cannot be scheduled although nothing else runs: "
                f"{self.available_tokens()} of {self.max_total_num_tokens} cache tokens are free; raise "
                "rollout.kv_tokens"
            )
        self.check_memory()
        self.new_token_ratio = self.init_new_token_ratio

    def _expert_table(self) -> ExpertTable | None:
        layout, (_, allocator) = self.runner.expert_layout, self.pools()
        return None if layout is None else ExpertTable(layout, allocator.size + allocator.page_size)
