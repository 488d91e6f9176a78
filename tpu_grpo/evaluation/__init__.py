"""Evaluation: held-out prompts answered greedily and sampled, what that says with which certainty, and the best step.

evaluating.py   answers and scores -> estimates and samples: read this
statistics.py   pass@k, majority votes, intervals;  answers.py: the answer that a vote counts
log.py          evaluation.jsonl, and which step was the best;  samples.py: the samples, a file per evaluation
"""

from tpu_grpo.evaluation.evaluating import GREEDY, Answered, Evaluation, Plan, describe, evaluate
from tpu_grpo.evaluation.log import BEST_FILE, EvaluationLog, evaluation_of, record_of
from tpu_grpo.evaluation.samples import EVALUATIONS, write_samples
from tpu_grpo.evaluation.statistics import Estimate

__all__ = [
    "BEST_FILE",
    "EVALUATIONS",
    "GREEDY",
    "Answered",
    "Estimate",
    "Evaluation",
    "EvaluationLog",
    "Plan",
    "describe",
    "evaluate",
    "evaluation_of",
    "record_of",
    "write_samples",
]
