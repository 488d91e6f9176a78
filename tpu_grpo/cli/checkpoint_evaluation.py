"""Evaluates one checkpoint of a run, without training, which is what scripts/eval.py does.

    name, step = "best", 40            ->  <run.dir>/checkpoints/40
    answers, rewards, estimates        ->  <run.dir>/evaluations/checkpoint_40.jsonl and .json

With the config of the run, the numbers are those that the run found after that step.
"""

from contextlib import closing

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.sampler import Sampler
from tpu_grpo.hosts import Hosts, Watch, keep_programs
from tpu_grpo.learner import parameters
from tpu_grpo.observe.evaluation import Evaluation, record_of, write_samples
from tpu_grpo.observe.json_lines import write_json
from tpu_grpo.observe.run_files import EVALUATIONS_DIR
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.meshes import build_meshes
from tpu_grpo.run.parts import open_engines, open_model
from tpu_grpo.run.saved import Chosen, choose, load_policy
from tpu_grpo.run.task import evaluate_policy, open_held_out


def evaluate_checkpoint(config: RunConfig, which: str, hosts: Hosts, watch: Watch) -> tuple[Chosen, Evaluation]:
    """Evaluate a checkpoint, and keep samples and numbers in the run's directory; every host calls it, host 0 writes.

    Raises:
        TpuGrpoError: for anything wrong with the config, the checkpoint, the data or a reward.
    """
    keep_programs(config.run.compilation_cache, hosts)
    chosen = choose(config, which)
    hosts.agree("the checkpoint that is evaluated", chosen.name)
    checkpoint, tokenizer = open_model(config, hosts)
    held_out = open_held_out(config, tokenizer, hosts)
    if held_out is None:
        raise ConfigError("an evaluation needs held-out data, got none; set evaluation.path")
    with closing(held_out):
        meshes = build_meshes(config, checkpoint)
        with watch.stage(f"loading {chosen.name}"):
            engines = open_engines(config, hosts, checkpoint, tokenizer, meshes, held_out.environments)
            engines.install(parameters(load_policy(config, checkpoint, meshes.trainer, chosen, hosts.index)))
            engines.replicas.compile_all()
        sampler = Sampler(engines.replicas, tokenizer, config, held_out.environments)
        with watch.stage(f"evaluation of {chosen.name}"):
            evaluation, samples = evaluate_policy(sampler, held_out, chosen.step or 0)
            hosts.agree(f"tokens of the evaluation of {chosen.name}", evaluation.digest)
    if hosts.is_first:
        write_samples(config.run_dir, chosen.name, samples)
        write_json(config.run_dir / EVALUATIONS_DIR / f"{chosen.name}.json", record_of(evaluation))
    return chosen, evaluation
