"""The command line of ``scripts/eval.py``: evaluates one checkpoint of a run, without training.

    --checkpoint best, if step 40 is best    reads <run.dir>/checkpoints/40
    answers, rewards, estimates              are written to <run.dir>/evaluations/checkpoint_40.jsonl and .json

With the config of the run, the results equal those of the run's own evaluation after that step. Nothing that imports
jax is imported before ``prepare`` has chosen jax's platform.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tpu_grpo.cli.starting import command_parser, config_from_words, exit_code_of, start
from tpu_grpo.config import RunConfig
from tpu_grpo.hosts import Hosts, Watch, keep_programs
from tpu_grpo.observe.run_files import EVALUATIONS_DIR
from tpu_grpo.records.errors import ConfigError

if TYPE_CHECKING:
    from tpu_grpo.observe.evaluation import Evaluation
    from tpu_grpo.run.policies import Chosen

ABOUT = """Evaluates a checkpoint of a run on held-out prompts, without training.

CHECKPOINT is a step of run.dir, latest, best, initial (the model as the run starts), or a directory of a step. What is
evaluated, and how, is the section `evaluation`. On several hosts every one runs the same command; on one machine
scripts/local_hosts.py --command "python scripts/eval.py" starts them."""
USAGE = "python scripts/eval.py [CONFIG.yaml] --checkpoint best [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT, words="the config, and settings")
    parser.add_argument("--checkpoint", required=True, help="a step, latest, best, initial, or a directory")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _evaluate(options.words, options.checkpoint))


def _evaluate(words: Sequence[str], which: str) -> None:
    config = config_from_words(words)
    with start(config) as (hosts, watch):
        chosen, evaluation = evaluate_checkpoint(config, which, hosts, watch)
        if hosts.is_first:
            title = f"{config.run.name}, {chosen.name}{config.rollout.rounding_text}"
            show(evaluation, title, Console(highlight=False))
            print(f"samples: {config.run_dir}/{EVALUATIONS_DIR}/{chosen.name}.jsonl")


def evaluate_checkpoint(config: RunConfig, which: str, hosts: Hosts, watch: Watch) -> "tuple[Chosen, Evaluation]":
    """Evaluate a checkpoint, and write samples and figures into the run's directory; every host calls this.

    Raises:
        TpuGrpoError: for anything wrong with the config, the checkpoint, the data or a reward.
    """
    from tpu_grpo.engine.options import EngineOptions
    from tpu_grpo.engine.sampler import Sampler
    from tpu_grpo.learner import parameters
    from tpu_grpo.observe.evaluation import record_of, write_samples
    from tpu_grpo.records.json_files import write_json
    from tpu_grpo.run.inputs import check_model, open_model
    from tpu_grpo.run.meshes import build_meshes
    from tpu_grpo.run.parts import evaluate_policy, open_engines, open_held_out_task, stop_ids
    from tpu_grpo.run.policies import choose, load_policy

    keep_programs(hosts)
    chosen = choose(config.run_dir, which)
    hosts.agree("the checkpoint that is evaluated", chosen.name)
    checkpoint, tokenizer = open_model(config.model, config.run.seed, hosts)
    check_model(config, checkpoint)
    held_out = open_held_out_task(config, tokenizer, hosts)
    if held_out is None:
        raise ConfigError("an evaluation needs held-out data, got none; set evaluation.path")
    with closing(held_out):
        meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint)
        ids = stop_ids(config.environment, config.data, tokenizer, checkpoint.directory)
        options = EngineOptions.from_config(config, ids, replicas=meshes.replicas, platform=meshes.platform)
        with watch.stage(f"loading {chosen.name}"):
            sections = config.meshes, config.model.lora
            engines = open_engines(options, hosts, checkpoint, meshes, *sections, held_out.environments)
            policy = load_policy(config.model, config.run.seed, checkpoint, meshes.trainer, chosen, hosts.index)
            engines.install(parameters(policy))
            engines.replicas.compile_all()
        sampler = Sampler(
            engines.replicas, tokenizer, config.rollout, config.algorithm, config.run.seed, held_out.environments
        )
        with watch.stage(f"evaluation of {chosen.name}"):
            evaluation, samples = evaluate_policy(sampler, held_out, chosen.step or 0)
            hosts.agree(f"tokens of the evaluation of {chosen.name}", evaluation.digest)
    if hosts.is_first:
        write_samples(config.run_dir, chosen.name, samples)
        write_json(config.run_dir / EVALUATIONS_DIR / f"{chosen.name}.json", record_of(evaluation))
    return chosen, evaluation


def show(evaluation: "Evaluation", title: str, console: Console) -> None:
    """Print a table of the estimates, and the mean lengths of the completions."""
    table = Table("", "reward", "mean", "95 % interval", "problems", title=title)
    for mode, found in evaluation.estimates.items():
        for name, e in found.items():
            table.add_row(mode, name, f"{e.value:.4f}", f"{e.low:.4f} to {e.high:.4f}", str(e.problems))
    console.print(table)
    for mode, tokens in evaluation.tokens.items():
        console.print(f"{mode}: {tokens:.1f} tokens, {evaluation.truncated[mode]:.1%} cut")
