"""The samples of an evaluation: ``evaluations/<name>.jsonl`` in the run's directory, a line per completion."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tpu_grpo.evaluation.evaluating import Answered
from tpu_grpo.metrics.jsonl import encode_line, replace_bytes

EVALUATIONS = "evaluations"


def write_samples(run_dir: Path, name: str, answered: Sequence[Answered], display_names: Mapping[str, str]) -> Path:
    """Write all completions with their rewards, as a whole or not at all.

    A line holds problem (from 0), mode, sample (from 0), prompt, completion, the answer that votes count, rewards by
    name (null where one does not apply), tokens and finish_reason.
    """
    lines = []
    for part in answered:
        group = part.rollout.group_size
        for row, (prompt, completion) in enumerate(
            zip(part.rollout.row_prompts, part.rollout.completions, strict=True)
        ):
            values = {display_names[reward]: float(v[row]) for reward, v in part.scores.by_name.items()}
            lines.append(
                encode_line(
                    {
                        "problem": row // group,
                        "mode": part.mode,
                        "sample": row % group,
                        "prompt": prompt.text,
                        "completion": part.rollout.texts[row],
                        "answer": part.answers[row],
                        "rewards": {reward: None if np.isnan(v) else v for reward, v in values.items()},
                        "tokens": len(completion.token_ids),
                        "finish_reason": completion.finish_reason,
                    }
                )
            )
    path = run_dir / EVALUATIONS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, b"".join(lines))
    return path
