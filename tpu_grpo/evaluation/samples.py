"""Writes the samples of an evaluation to ``evaluations/<name>.jsonl`` in the run's directory, a line per completion."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu_grpo.evaluation.evaluating import EvaluationSamples
from tpu_grpo.observe.metrics.conversations import sampled_conversation
from tpu_grpo.observe.metrics.jsonl import encode_line, replace_bytes
from tpu_grpo.observe.metrics.run_files import EVALUATIONS_DIR


def write_samples(run_dir: Path, name: str, samples: Sequence[EvaluationSamples]) -> Path:
    """Write all completions with their rewards, as a whole or not at all, and return where they are.

    A line holds problem (from 0), mode, sample (from 0), prompt, completion, the answer that votes count, the right
    one (gold) where the record has it, rewards by name (null where one does not apply), tokens and finish_reason; of a
    conversation also what `SampledConversation` has.
    """
    path = run_dir / EVALUATIONS_DIR / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, b"".join(encode_line(record) for of_mode in samples for record in _records(of_mode)))
    return path


def _records(samples: EvaluationSamples) -> Iterator[dict[str, Any]]:
    rollout, by_name = samples.rollout, samples.scores.by_name
    for row, (prompt, completion) in enumerate(zip(rollout.row_prompts, rollout.completions, strict=True)):
        yield {
            "problem": row // rollout.group_size,
            "mode": samples.mode,
            "sample": row % rollout.group_size,
            "prompt": prompt.text if completion.episode is None else completion.episode.prompt,
            "completion": rollout.texts[row],
            "answer": samples.final_answers[row],
            **({} if prompt.gold is None else {"gold": prompt.gold}),
            "rewards": {name: None if np.isnan(v[row]) else float(v[row]) for name, v in by_name.items()},
            "tokens": completion.sampled_tokens,
            "finish_reason": completion.finish_reason,
            **({} if (conversation := sampled_conversation(completion)) is None else conversation.fields()),
        }
