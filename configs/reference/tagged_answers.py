r"""The rewards of the reference runs on GSM8K, whose answers stand in tags.

The completion of a prompt that ends with an opened ``<reasoning>`` is worth, as ``vtc`` scores it, for the answer 18:

    ... </reasoning> <answer>\boxed{18}</answer>      1.0
    ... <answer>\boxed{18}</answer>                   0.5, for the answer alone
    ... </reasoning> <answer>\boxed{17}</answer>      0.1, for the form alone
"""

import re

from tpu_grpo.rewards import per_sample
from tpu_grpo.rewards.shipped.correctness import boxed
from tpu_grpo.rewards.shipped.mathematics import math

ANSWER = re.compile(r"<answer>(.+?)</answer>", re.DOTALL)
WHOLE = re.compile(r"<reasoning>.+</reasoning>.*?<answer>.+?</answer>", re.DOTALL)
BARE_BOX = re.compile(r"\\boxed\s*\{?\s*([a-zA-Z0-9.,-]+)")


def solution(answer: str) -> str:
    """Return what stands after GSM8K's ``####``."""
    return answer.rpartition("####")[2].strip()


@per_sample
def vtc(completion: str, answer: str) -> float:
    """Score form and boxed answer, as Tunix's example for Qwen3-1.7B does."""
    tags = ("</reasoning>", "<answer>", "</answer>")
    places = [completion.find(tag) for tag in tags]
    has_form = all(completion.count(tag) == 1 for tag in tags) and places == sorted(places)
    is_right = _boxed_answer(completion) == solution(answer).replace(",", "")
    return (1.0 if is_right else 0.1) if has_form else (0.5 if is_right else 0.0)


def _boxed_answer(completion: str) -> str | None:
    """Return what the last box holds, of the last answer if there are tags; without braces, what follows it."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    text = answers[-1] if answers else completion
    found = boxed(text)[-1:] or BARE_BOX.findall(text)[:1]
    return found[0].strip().replace(",", "").strip() if found else None


@per_sample
def right_answer(completion: str, answer: str) -> float:
    """Score 1.0 where the last answer in tags is right, as text or as mathematics."""
    answers = ANSWER.findall(completion)
    if not answers:
        return 0.0
    said, right = re.sub(r"[$€£]", "", answers[-1]).strip(), solution(answer)
    return 1.0 if said == right else math(f"\\boxed{{{said}}}", right) or 0.0


@per_sample
def tags(completion: str) -> float:
    """Score 1.0 for reasoning in tags, followed by an answer in tags."""
    return float(WHOLE.search(completion) is not None)
