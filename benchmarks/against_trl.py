"""Compares training with TRL on the same completions: commands that exchange files in one folder.

    python -m benchmarks.against_trl record /tmp/against         # 60 steps of the demo, and their rollouts
    uv venv /tmp/trl && uv pip install -p /tmp/trl/bin/python trl==1.16.0 torch
    /tmp/trl/bin/python benchmarks/against_trl.py follow /tmp/against      # PyTorch, and nothing of this package
    python -m benchmarks.against_trl compare /tmp/against        # the table
    /tmp/trl/bin/python benchmarks/against_trl.py free /tmp/against --seed 0   # TRL samples by itself, on these prompts
    python -m benchmarks.against_trl accuracy /tmp/against --seed 0

TRL's ``GRPOTrainer`` starts from the same taught model as the demo. Its ``rollout_func`` gets the prompts and
completions of each step that this package sampled; rewards, advantages, loss, clipping and AdamW are TRL's. The code
names only those settings of TRL that differ from its defaults. The table shows for some steps

    apart      |theirs - ours| / |ours - start|, over all parameters
    moved      |ours - start|
    greedy     the held-out accuracy of both models, by the evaluation of this package
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS, SHOWN = 60, (5, 20, 40, 60)
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo_cpu.yaml"
PROMPTS, GROUP, RATE, B2 = 32, 8, 1e-4, 0.95
"""The demo's prompts per step, group size, learning rate, and beta2 of AdamW, for which torch has another default."""


def record(directory: Path) -> None:
    """Train the demo; write every rollout into a file, and the models before the first and after the shown steps."""
    import tpu_grpo
    from examples.own_loop import steps
    from tpu_grpo.run.exporting import Policy, export_policy
    from tpu_grpo.run.inputs import open_inputs
    from tpu_grpo.run.parts import build_parts

    config = tpu_grpo.load_config(CONFIG, [f"run.dir={directory}/run", f"run.max_steps={STEPS}"])
    with tpu_grpo.start(config) as (hosts, _), (directory / "rollouts.jsonl").open("w") as file:
        inputs = open_inputs(config)
        parts = build_parts(inputs, hosts)

        def export(step: int) -> None:
            policy = Policy(parts.learner.policy(), step, parts.checkpoint, inputs.tokenizer)
            export_policy(config, policy, directory / "ours" / str(step))

        export(0)
        for scored, _ in steps(parts, STEPS):
            rollout = scored.rollout
            rows = zip(rollout.row_prompts, rollout.completions, strict=True)
            lines = [
                {
                    "prompt": list(map(int, prompt.token_ids)),
                    "completion": completion.token_ids.tolist(),
                    "logprobs": completion.logprobs.tolist(),
                    "answer": prompt.gold,
                }
                for prompt, completion in rows
            ]
            file.write(json.dumps(lines) + "\n")
            print(f"step {rollout.batch.step}  reward {scored.scores.total.mean():.3f}", flush=True)
            if rollout.batch.step in SHOWN:
                export(rollout.batch.step)
        parts.task.close()
        parts.learner.close()


def follow(directory: Path, seed: int | None = None) -> None:
    """Let TRL train on the rollouts, in an environment with torch and trl, which need not have this package.

    With a seed, TRL takes only the prompts of the rollouts, and samples completions itself.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rollouts = [json.loads(line) for line in (directory / "rollouts.jsonl").open()]
    tokenizer = AutoTokenizer.from_pretrained(directory / "ours" / "0")
    model = AutoModelForCausalLM.from_pretrained(directory / "ours" / "0", dtype=torch.float32)
    problems = [row for rows in rollouts for row in rows[::GROUP]]
    texts = [tokenizer.decode(row["prompt"]) for row in problems]
    assert tokenizer(texts)["input_ids"] == [row["prompt"] for row in problems]

    def handed_on(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rows = rollouts[trainer.state.global_step]
        assert len(prompts) == len(rows)
        names = {"prompt_ids": "prompt", "completion_ids": "completion", "logprobs": "logprobs", "answer": "answer"}
        return {name: [row[of] for row in rows] for name, of in names.items()}

    def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]

    class Shown(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(f"step {state.global_step}", flush=True)
            if state.global_step in SHOWN:
                target = directory / whose(seed) / str(state.global_step)
                model.save_pretrained(target)
                tokenizer.save_pretrained(target)

    settings = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=max(len(row["completion"]) for rows in rollouts for row in rows),
        seed=seed or 0,
        max_steps=len(rollouts),
        loss_type="grpo",  # the mean over completions of their means
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=B2,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
    )
    data = Dataset.from_dict({"prompt": texts, "answer": [row["answer"] for row in problems]})
    sampler = {"rollout_func": handed_on} if seed is None else {}
    trainer = GRPOTrainer(model, is_right, settings, data, processing_class=tokenizer, callbacks=[Shown()], **sampler)
    trainer.train()


def whose(seed: int | None) -> str:
    """Return the name of the folder of TRL's models; ``seed`` as in `follow`."""
    return "theirs" if seed is None else f"free_{seed}"


def greedy(directory: Path, name: str) -> float:
    """Return the held-out accuracy of a model, by the evaluation of this package."""
    import tpu_grpo
    from tpu_grpo.cli.evaluate import evaluate_checkpoint

    words = [f"model.path={directory}/{name}", f"run.dir={directory}/evaluated/{name}"]
    config = tpu_grpo.load_config(CONFIG, words)
    with tpu_grpo.start(config) as (hosts, watch):
        _, evaluation = evaluate_checkpoint(config, "initial", hosts, watch)
    return evaluation.means["greedy"]["exact_answer"]


def accuracy(directory: Path, seed: int) -> None:
    """Print the held-out accuracy of a run in which TRL sampled the completions."""
    print(*[f"step {step}: {greedy(directory, f'{whose(seed)}/{step}'):.3f}" for step in SHOWN], sep="  ")


def compare(directory: Path) -> None:
    """Print the table that compares both models after some steps."""
    print("| step | apart | moved | ours, greedy | TRL, greedy |\n|---|---|---|---|---|")
    start = tensors(directory / "ours" / "0")
    for step in SHOWN:
        ours, theirs = (tensors(directory / name / str(step)) for name in ("ours", "theirs"))
        assert ours.keys() == theirs.keys() == start.keys()
        moved = distance(ours, start)
        found = [greedy(directory, f"{name}/{step}") for name in ("ours", "theirs")]
        print(f"| {step} | {distance(theirs, ours) / moved:.1e} | {moved:.3f} | {found[0]:.3f} | {found[1]:.3f} |")


def tensors(directory: Path) -> dict[str, Any]:
    """Read the weights of a model, by name."""
    from safetensors.numpy import load_file

    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the Euclidean norm of the difference of all parameters."""

    def squares() -> Iterator[float]:
        for name, value in one.items():
            difference = value.astype("float64") - other[name]
            yield float((difference * difference).sum())

    return sum(squares()) ** 0.5


def main() -> None:
    """Run the command that the first argument names."""
    parts = {"record": record, "follow": follow, "compare": compare, "free": follow, "accuracy": accuracy}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of free and accuracy")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    seed = {"seed": options.seed} if options.part in ("free", "accuracy") else {}
    parts[options.part](options.directory.resolve(), **seed)


if __name__ == "__main__":
    sys.path = [place for place in sys.path if place != str(Path(__file__).parent)]
    main()
