"""This room answers held-out prompts greedily and sampled, says with which certainty how good they are, and which step
was the best.

evaluating.py   turns completions and scores into estimates: read this
statistics.py   computes pass@k, majority votes and intervals;  answers.py finds the answer that a vote counts
log.py          keeps evaluation.jsonl, and which step was the best;  samples.py writes a file per evaluation
"""

from tpu_grpo.evaluation.evaluating import (
    GREEDY,
    Evaluation,
    EvaluationSamples,
    EvaluationSettings,
    describe,
    evaluate,
)
from tpu_grpo.evaluation.log import EvaluationLog, evaluation_of, record_of
from tpu_grpo.evaluation.samples import write_samples
from tpu_grpo.evaluation.statistics import Estimate

__all__ = [
    "GREEDY",
    "Estimate",
    "Evaluation",
    "EvaluationLog",
    "EvaluationSamples",
    "EvaluationSettings",
    "describe",
    "evaluate",
    "evaluation_of",
    "record_of",
    "write_samples",
]
