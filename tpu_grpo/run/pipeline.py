"""The training loop of a GRPO run, from the first step to the summary.

    prompts -> rollout -> rewards -> update -> weight sync, and again

Every stage is a call on a part that tpu_grpo/run/parts.py built. Stages exchange the records of
tpu_grpo/records/stages.py.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_grpo.algorithms import notices
from tpu_grpo.config import RunConfig
from tpu_grpo.config.plugins import addition
from tpu_grpo.data.prompt_draw import PromptDraw
from tpu_grpo.hosts import Hosts, StepAbandoned, StopRequest, Watch, announce, with_reminders
from tpu_grpo.models.tokenizers import padding_notes
from tpu_grpo.observe.callbacks import Callback
from tpu_grpo.observe.evaluation import EvaluationLog, describe, write_samples
from tpu_grpo.observe.live_report import LiveReport
from tpu_grpo.observe.process_metrics import CompilationCounter, memory_metrics
from tpu_grpo.observe.run_files import (
    ADAPTERS_DIR,
    CHANGES_FILE,
    CHECKPOINTS_DIR,
    EXPORTS_DIR,
    METRICS_FILE,
    PROFILE_DIR,
    SUMMARY_FILE,
    plan_of,
    saved_steps,
)
from tpu_grpo.observe.run_log import RunLog, open_run_log
from tpu_grpo.observe.step_metrics import rollout_metrics, sync_metrics, tokens_digest, update_metrics
from tpu_grpo.observe.summary import build_summary, versions
from tpu_grpo.records.errors import DiskError, Interrupted
from tpu_grpo.records.json_files import read_records, write_json
from tpu_grpo.records.stages import PromptBatch, Rollout, ScoredRollout, UpdateResult
from tpu_grpo.rewards.distributed import DistributedScoring
from tpu_grpo.run.directory import RunDirectory, first_does
from tpu_grpo.run.inputs import Inputs
from tpu_grpo.run.parts import Parts, build_parts, built_for_good, evaluate_policy, give_back_memory
from tpu_grpo.run.policies import Chosen, exported_values
from tpu_grpo.run.rounds import Rounds, StepGroups
from tpu_grpo.run.timeline import Timeline

if TYPE_CHECKING:
    from tpu_grpo.run.partial_groups import PartialGroups

ALONE = Hosts()
KEPT_AT_LEAST = 0.9
"""Warn if less than this share of the norm of the optimizer's step reaches the parameters."""


def train(
    inputs: Inputs,
    hosts: Hosts = ALONE,
    watch: Watch | None = None,
    stop: StopRequest | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Run a config to its end and leave its files in ``run.dir``; every host calls this, host 0 writes.

    Returns the content of summary.json.

    Args:
        inputs: the opened inputs of the run, with its config.
        hosts: the connected hosts of the run, whose settings have been compared (tpu_grpo/run/fingerprints.py).
        watch: is given the name of each stage, for messages when another host is lost.
        stop: once a stop is requested, the run ends after the current step at the latest, with a checkpoint.
        callbacks: receive the metrics and samples of steps and evaluations, on host 0.

    Raises:
        Interrupted: if a stop was requested; the checkpoint is saved.
        TpuGrpoError: for anything wrong with the config, the model, the data, a reward or a number.
    """
    config = inputs.config
    with (
        RunDirectory(config, hosts) as directory,
        CompilationCounter() as compilations,
        with_reminders(hosts) as compiled,
    ):
        parts = build_parts(inputs, hosts)
        start, prompts = parts.learner.restored_step, parts.task.prompts
        notes = [*directory.begin(start, prompts.describe()), *prompts.notes]
        carries = config.open_groups > 0
        steps, has_page = config.run.max_steps, config.logging.report
        every = config.evaluation.every if config.has_held_out else None
        logged = config.run_dir, config.run, config.logging, config.model_dump(mode="json")
        live = LiveReport(config.run_dir, steps, hosts, start, directory.is_ours, has_page=has_page)
        with live if hosts.is_first else nullcontext() as report:
            with (
                open_run_log(*logged, start, report, evaluation_every=every, callbacks=callbacks)
                if report
                else RunLog([]) as log,
                closing(parts.task),
                PromptDraw.open(config.run_dir, config.data, prompts, start, hosts, config.run.seed, carries) as draw,
            ):
                best = "" if parts.task.held_out is None else parts.task.held_out.best
                evaluations = EvaluationLog(config.run_dir, start, best, hosts)
                watch, stop = watch or Watch(hosts), stop or StopRequest()
                has_plan = hosts.is_first and plan_of(config.run_dir) is not None
                run = Run(
                    *(config, hosts, watch, stop, inputs, directory, parts, draw, log, evaluations, compilations),
                    planned=addition("planned").note_of(config.run_dir) if has_plan else None,
                    planned_at=start + 3,
                    compiled=compiled,
                )
                with built_for_good():
                    run.train(start, notes)
            return run.finish()


@dataclass
class Run:
    """A run in progress."""

    config: RunConfig
    hosts: Hosts
    watch: Watch
    stop: StopRequest
    inputs: Inputs
    directory: RunDirectory
    parts: Parts
    draw: PromptDraw
    log: RunLog
    evaluations: EvaluationLog
    compilations: CompilationCounter
    planned: Callable[[Mapping[str, Any]], str] | None
    """Says how a step's times compare with the run's plan; None without a plan."""
    planned_at: int
    """The step that is compared with the plan; late enough that nothing is compiled in it."""
    compiled: Callable[[], None]
    """Is called after each step, because everything is compiled after the first."""
    warned_of_lost_steps: bool = False
    ahead: StepGroups | None = None
    """With algorithm.staleness, the groups of the next step, which were sampled during the update."""
    done: int = 0
    """The number of the last step done."""
    updating: bool = False
    """Whether a step is past the point from which it is always finished."""

    def train(self, start: int, notes: Sequence[str] = ()) -> None:
        """Run steps ``start + 1`` to ``run.max_steps``, or until no prompt is left; show ``notes`` first."""
        checkpoint = self.inputs.checkpoint
        notes = *notes, *(() if checkpoint is None else checkpoint.notes), *padding_notes(self.inputs.tokenizer)
        notes = *notes, *notices(self.config.algorithm, self.config.rollout), *self.inputs.teacher_notes
        for note in (*notes, *self.parts.learner.restore_notes):
            self.log.note(note)
        if start:
            self.log.note(f"continuing after step {start}")
        self.stop.begin()
        try:
            step = self._train(start)
        except StepAbandoned:
            raise self._stopped(self.done) from None
        if step < self.config.run.max_steps:
            self.log.note(f"the run ends after step {step}: {self.draw.selection.exhausted}")
        self.parts.learner.close(best=self._best_step)
        if self.hosts.is_first and (against := self.config.logging.against) is not None:
            lines = list(read_records(self.config.run_dir / METRICS_FILE))
            published = addition("published").read_published(against)
            for text in published.sentences(lines, self.config.model_dump(mode="json")):
                self.log.note(text)
        if self.config.export.every is not None:
            with self.watch.stage("export"):
                self.log.note(self._export(step))

    def _train(self, step: int) -> int:
        """Do the steps after ``step``, and return the number of the last step done."""
        self.done = step
        if not step:
            with self._may_be_abandoned(together=True):
                self._evaluate_if_due(0)
        announce(self.hosts, f"step {step + 1} begins, in which the update is compiled")
        profile_dir = self.config.run_dir / PROFILE_DIR
        with Timeline(self.config.logging.profile_steps, profile_dir, self.hosts.index, self.log.note) as timeline:
            while not self._is_last(step):
                with timeline.step(step + 1):
                    self._step(step + 1)
                    step = self.done = step + 1
                    self.compiled()
                    if self._any_host(self.stop.asked or self.log.asked_to_stop) and not self._is_last(step):
                        raise self._stopped(step)
                    if step == self._best_step or self._due(step, self.config.checkpoint.every):
                        self._save(step)
        return step

    def _step(self, step: int) -> None:
        started, parts, stage = time.perf_counter(), self.parts, self.watch.stage
        groups = self.ahead or _result_of(self._sampled_groups(step))
        carried = {} if parts.partial is None else parts.partial.end(groups.needed)
        if self.config.rollout.release_during_update:
            parts.engines.release()
        self.updating = True
        with stage(f"teachers of step {step}") if self.config.teachers else nullcontext():
            taught = parts.learner.taught(groups.learnt)  # before the sampler's devices sample ahead
        with closing(self._groups_ahead(step + 1)) as sampling:
            next(sampling, None)  # hosts that sample do so now
            with stage(f"update of step {step}"):
                update = parts.learner.update(groups.learnt, taught)
            self.ahead = _result_of(sampling)
        self.updating = False
        for note in update.notes:
            self.log.note(note)
        self._warn_of_lost_steps(step, update)
        with stage(f"weight sync of step {step}"):
            sync = parts.engines.install(parts.learner.params())
            seconds = time.perf_counter() - started
            probed = parts.probe.after_sync(step)
        self._check_directory(step)
        used = groups.used.rollout
        self.draw.done(step, used.batch, {"tokens": used.mean_tokens, "pass_rate": groups.used.mean_rewards()})
        if _every(step, self.config.logging.samples_every):
            self.log.samples(step, groups.learnt, update.advantages)
        self.log.histograms(step, update.histograms)
        line: dict[str, Any] = {
            "step": step,
            **rollout_metrics(groups.sampled),
            **(groups.metrics() if self.config.data.dynamic.is_on else {}),
            **carried,
            **self.draw.metrics(),
            **update_metrics(update),
            **sync_metrics(sync),
            "step/seconds": seconds,
            **({} if probed is None else {"agreement/probe": probed}),
            "compile/count": self.compilations.count,
            **memory_metrics(),
            **self._evaluate_if_due(step),
        }
        self.log.step(line, groups.learnt, update.advantages)
        if step == self.planned_at and self.planned is not None:
            self.log.note(self.planned(line))

    def _sampled_groups(self, step: int) -> Generator[None, None, StepGroups]:
        """Sample at most data.dynamic.rounds batches of prompts, until enough groups have a learning signal.

        The generator pauses where ``_carried_rollout`` does.
        """
        rounds, carry = Rounds(wanted=self.config.data.prompts_per_step), self.parts.partial
        for _ in range(self.config.data.dynamic.rounds):
            if carry is None:
                scored = self._scored_rollout(self.draw.batch(step, after=rounds.last))
            else:
                scored = yield from self._carried_rollout(step, carry)
            rounds.add(scored, self.parts.learner.informative(scored))
            if rounds.enough:
                break
        return rounds.groups()

    def _groups_ahead(self, step: int) -> Generator[None, None, StepGroups | None]:
        """With algorithm.staleness, sample ``step`` early, and keep its groups for the checkpoint before it."""
        carry = self.parts.partial
        if not self.config.algorithm.staleness or carry is None or self._is_last(step - 1):
            return None
        groups = yield from self._sampled_groups(step)
        carry.hold()
        return groups

    def _scored_rollout(self, batch: PromptBatch) -> ScoredRollout:
        """Sample completions of a batch; complete groups are scored while other groups are still being sampled."""
        parts, stage, known = self.parts, self.watch.stage, self.draw.history.last("tokens", batch.records)
        name = f"step {batch.step}" + (f", round {batch.round + 1}" if batch.round else "")
        with parts.task.rewards.begin(batch) as scoring:
            with stage(f"rollout of {name}"), self._may_be_abandoned(together=True):
                drawn = [(prompt.token_ids, batch.positions[p]) for p, prompt in enumerate(batch.prompts)]
                self.hosts.agree(f"prompts of {name}", repr(drawn))
                rollout = parts.sampler.rollout(batch, scoring.add, known)
                self.hosts.agree(f"tokens of {name}", tokens_digest(rollout.completions))
            return self._scored(name, rollout, scoring)

    def _carried_rollout(self, step: int, carry: "PartialGroups") -> Generator[None, None, ScoredRollout]:
        """Sample open groups until a step's groups are complete, and score these; all other groups stay open.

        The generator pauses between the sampling, in which hosts without engines have no part, and the exchange of the
        completions.
        """
        parts, stage, name = self.parts, self.watch.stage, f"step {step}"
        wanted = self.config.data.prompts_per_step
        carry.begin(self.draw.next(step, carry.room))
        groups, known = carry.groups, self.draw.history.last("tokens", [group.record for group in carry.groups])
        with ExitStack() as stack:
            scoring = None
            if len(groups) == wanted and all(group.is_new for group in groups):  # known to be those that are scored
                scoring = stack.enter_context(parts.task.rewards.begin(carry.batch(step, groups)))
            with stage(f"rollout of {name}"), self._may_be_abandoned(together=True):
                self.hosts.agree(f"prompts of {name}", repr([(group.step, group.position) for group in groups]))
                ended = None if scoring is None else scoring.add
                collect = parts.sampler.go_on(step, groups, wanted, carry.due(step), known, ended)
            yield
            with stage(f"completions of {name}"), self._may_be_abandoned(together=True):
                sampled = collect()
                tokens = [completion for group in sampled.groups for completion in group.completions]
                self.hosts.agree(f"tokens of {name}", f"{sampled.length} {tokens_digest(tokens)}")
                rollout = carry.take(step, sampled, self.inputs.tokenizer)
            if scoring is None:
                scoring = stack.enter_context(parts.task.rewards.begin(rollout.batch))
            return self._scored(name, rollout, scoring)

    def _scored(self, name: str, rollout: Rollout, scoring: DistributedScoring) -> ScoredRollout:
        with self.watch.stage(f"rewards of {name}"):
            with self._may_be_abandoned():
                scoring.score_own([rollout])
            [scores] = scoring.finish([rollout])
        return ScoredRollout(rollout, scores)

    def _warn_of_lost_steps(self, step: int, update: UpdateResult) -> None:
        """Warn once if rounding removes much of the optimizer's step, by the metric ``update/applied_fraction``."""
        kept = update.metrics.get("update/applied_fraction", 1.0)  # without a token there was no update
        if kept < KEPT_AT_LEAST and not self.warned_of_lost_steps:
            self.warned_of_lost_steps = True
            self.log.note(
                f"step {step}: only {kept:.0%} of the optimizer's step arrived in the parameters, the rest was rounded "
                "away; use model.param_dtype=float32, or a higher optimizer.learning_rate"
            )

    def _save(self, step: int) -> None:
        """Save a checkpoint; write adapters also as separate files that other libraries read."""
        with self.watch.stage(f"saving step {step}"):
            carry = self.parts.partial
            self.parts.learner.save(step, best=self._best_step, carried=None if carry is None else carry.saved)
            give_back_memory()  # that the previous save, done by now, has freed
            if (environments := self.parts.task.environments) is not None:
                environments.forget(min(saved_steps(self.config.run_dir / CHECKPOINTS_DIR), default=0))
            if adapters := self.parts.learner.adapters():
                if self.hosts.is_first:
                    from tpu_grpo.models.lora import write_adapters  # only needed here

                    directory, model = self.config.run_dir / ADAPTERS_DIR / str(step), self.config.model
                    write_adapters(directory, adapters, model.lora, model.hub or model.path)
                self.hosts.barrier(f"adapters of step {step}")

    def _check_directory(self, step: int) -> None:
        """Save ``step``, the last step done, in another directory and raise DiskError if run.dir is not there now."""
        if first_does(self.hosts, "whether run.dir is still there", bool, self.directory.is_ours):
            return
        was, kept, data = self.directory.path, "nothing was done yet", self.parts.task.prompts.describe()
        if step:
            apart = first_does(self.hosts, "a directory apart", str, lambda: self.directory.set_up_apart(data))
            carried = None if self.parts.partial is None else self.parts.partial.saved
            self.parts.learner.save_apart(Path(apart) / CHECKPOINTS_DIR, step, carried)
            kept = f"step {step} was saved in {apart}; go on with run.dir={apart} checkpoint.resume=auto"
        raise DiskError(f"run.dir must stay where it is during a run, but {was} is gone or another one now; {kept}")

    def _export(self, last: int) -> str:
        """Export the policy that ``export.every`` names, unless that was done before; returns a note about it."""
        from tpu_grpo.run.exporting import Policy, export_policy  # only needed here

        config, parts = self.config, self.parts
        step = last if config.export.every == "last" else self.evaluations.best_step
        if not step:
            return "nothing was exported: no evaluation was better than that of the model before the first step"
        directory = config.run_dir / EXPORTS_DIR / str(step)
        if first_does(self.hosts, "whether the export is there", bool, directory.exists):
            return f"the model of step {step} is in {directory} already"
        if step != last:
            parts.engines.release()  # the engines are not used again
        model = parts.learner.policy(None if step == last else step)
        chosen = Chosen(config.run_dir / CHECKPOINTS_DIR, step)
        saved = exported_values(config.export, config.model, model, chosen, self.hosts.index)
        policy = Policy(model, step, parts.checkpoint, self.inputs.tokenizer, saved)
        export_policy(config, policy, directory, self.hosts)
        return f"the model of step {step} was exported to {directory}"

    def _stopped(self, step: int) -> Interrupted:
        """Save ``step``, the last step done (0 if there was none), and return the exception that ends the run."""
        self._check_directory(step)
        if step:
            self._save(step)
            self.parts.learner.close(best=self._best_step)
            return Interrupted(f"stopped after step {step} as asked, which is saved; {self.config.going_on}")
        return Interrupted("stopped before the first step was done, as asked; nothing was saved")

    @contextmanager
    def _may_be_abandoned(self, *, together: bool = False) -> Iterator[None]:
        """Abandon the step once a signal has asked any host to stop; all hosts abandon it at the end of the same block.

        A block that several hosts compute ``together`` is finished first; any other block is left immediately. Nothing
        is abandoned once the step's update has begun.
        """
        if self.updating:
            yield
            return
        with suppress(StepAbandoned), nullcontext() if together and self.hosts.count > 1 else self.stop.abandoning():
            yield
        if self._any_host(self.stop.signalled):
            raise StepAbandoned

    def _any_host(self, asked: bool) -> bool:
        """Return whether any host was asked to stop; all hosts get the same answer, so all stop after the same step."""
        return b"1" in self.hosts.gather("stop", b"1" if asked else b"0")

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        held_out = self.parts.task.held_out
        due = step == 0 or self._due(step, self.config.evaluation.every)
        if held_out is None or not due:
            return {}
        with self.watch.stage(f"evaluation after step {step}"):
            evaluation, samples = evaluate_policy(self.parts.sampler, held_out, step)
            self.hosts.agree(f"tokens of the evaluation after step {step}", evaluation.digest)
        self._check_directory(step)
        self.evaluations.add(evaluation)
        self.log.evaluation(evaluation, samples)
        if self.hosts.is_first:
            write_samples(self.config.run_dir, str(step), samples)
        self.log.note(describe(evaluation, len(held_out.prompts)) + self.config.rollout.rounding_text)
        return evaluation.metrics()

    @property
    def _best_step(self) -> int | None:
        """The step whose checkpoint is kept as the best; None if none is kept."""
        return self.evaluations.best_step if self.config.checkpoint.keep_best else None

    def _due(self, step: int, every: int) -> bool:
        """Return whether ``every`` divides the step, or the step is the last."""
        return self._is_last(step) or _every(step, every)

    def _is_last(self, step: int) -> bool:
        """Return whether the step just done is the last: run.max_steps is reached, or no prompt is left."""
        return step >= self.config.run.max_steps or self.draw.selection.exhausted is not None

    def finish(self) -> dict[str, Any]:
        """Write summary.json, and check that all hosts end with the same parameters."""
        digest = self.parts.learner.params_digest()
        self.hosts.agree("parameters after the last step", digest)
        if not self.hosts.is_first:
            return {"params_digest": digest}
        lines = list(read_records(self.config.run_dir / METRICS_FILE))
        all_steps = not lines or lines[-1]["step"] >= self.config.run.max_steps
        summary = build_summary(
            lines,
            params_digest=digest,
            versions=versions(),
            evaluation=self.evaluations.summary(),
            changes=list(read_records(self.config.run_dir / CHANGES_FILE, missing_ok=True)),
            ended_early=None if all_steps else self.draw.selection.exhausted,
        )
        write_json(self.config.run_dir / SUMMARY_FILE, summary)
        return summary


def _result_of[T](generator: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return what it returns."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def _every(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
