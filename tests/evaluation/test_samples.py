"""The lines that an evaluation leaves of conversations and plain answers."""

import json
from pathlib import Path

import numpy as np

from tests.observe.metrics.samples import completion
from tests.talks import talk
from tpu_grpo.evaluation.evaluating import EvaluationSamples
from tpu_grpo.evaluation.samples import write_samples
from tpu_grpo.records.stages import Prompt, PromptBatch, Rollout, Scores


def test_a_conversation_has_its_turns(tmp_path: Path) -> None:
    made = talk([1, 2], ([11, 12], [21]), ([13], []), prompt="first", turns={0: {"answer": "5"}}, ending="done")
    rollout = Rollout(PromptBatch(0, (Prompt("asked", (9,)),)), 2, (made, completion([7])), ("text", "plain"), 0.0)
    scores = Scores(np.zeros(2), {"success": np.array([1.0, 0.0])}, 0.0)
    path = write_samples(tmp_path, "4", [EvaluationSamples("greedy", rollout, scores, ("5", None))])
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["prompt"], first["tokens"], first["answer"]) == ("first", 3, "5")
    assert (first["environment"], first["ending"], first["mask"]) == ("Toy", "done", [[2, 1], [1, 0]])
    assert [turn["answer"] for turn in first["turns"]] == ["5", ""]
    assert (second["prompt"], second["tokens"]) == ("asked", 1)
    assert not {"turns", "mask", "ending", "environment", "failure"} & set(second)
