"""The stream: epochs are complete and differ, a step alone decides its batch, held-out prompts are the first ones."""

import subprocess
import sys
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.prompts.conftest import WriteJsonl
from tpu_grpo.config import DataSection, EvaluationSection
from tpu_grpo.errors import DataError
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.prompts.rendering import RenderedPrompts
from tpu_grpo.types import Prompt


def stream(count: int, per_step: int, seed: int = 0, shuffle: bool = True) -> PromptStream:
    prompts = tuple(Prompt(text=str(i), token_ids=(i + 1,), columns={"n": i}) for i in range(count))
    return PromptStream(RenderedPrompts(prompts, dropped=0), prompts_per_step=per_step, seed=seed, shuffle=shuffle)


def evaluation(**settings: Any) -> EvaluationSection:
    return EvaluationSection.model_validate(settings)


def numbers(of: PromptStream, steps: range) -> list[int]:
    return [p.columns["n"] for step in steps for p in of.batch(step + 1).prompts]


# Sets of hundreds: grain's shuffle takes some 65536 / n tries per element (5 ms each at n = 10).
@pytest.mark.parametrize("per_step", [1, 28, 30, 900])
def test_every_epoch_holds_every_prompt_once(per_step: int):
    flat = numbers(stream(300, per_step), range(-(-900 // per_step)))
    for start in (0, 300, 600):  # steps of 28 straddle epochs, steps of 900 hold three
        assert sorted(flat[start : start + 300]) == list(range(300))


def test_epochs_have_orders_of_their_own():
    of = stream(100, 100)
    assert len({tuple(numbers(of, range(epoch, epoch + 1))) for epoch in range(10)}) == 10


def test_the_seed_decides_the_order():
    orders = {tuple(numbers(stream(100, 100, seed), range(1))) for seed in (*range(10), 2**32 - 1)}
    assert len(orders) == 11
    assert numbers(stream(100, 3, 7), range(40)) == numbers(stream(100, 3, 7), range(40))


def test_neighbouring_seeds_share_no_epoch():
    epochs = [[tuple(numbers(stream(100, 100, seed), range(e, e + 1))) for e in range(5)] for seed in (0, 1)]
    assert not set(epochs[0]) & set(epochs[1])


def test_prompts_per_step_cut_the_same_order():
    assert numbers(stream(100, 2), range(60)) == numbers(stream(100, 6), range(20))


def test_any_step_can_be_asked_for_in_any_order():
    one, other = stream(70, 4), stream(70, 4)
    in_order = [one.batch(step) for step in range(1, 26)]
    backwards = [other.batch(step) for step in reversed(range(1, 26))]
    assert in_order == backwards[::-1]
    assert [b.step for b in in_order] == list(range(1, 26))
    assert len(other.batch(10**9).prompts) == 4


def test_without_shuffling_records_come_in_order():
    assert numbers(stream(3, 2, shuffle=False), range(4)) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_less_data_than_a_step_takes_repeats():
    assert numbers(stream(1, 3), range(2)) == [0] * 6


def test_steps_count_from_one():
    with pytest.raises(DataError, match="a step must be >= 1, got 0"):
        stream(3, 2).batch(0)


def test_no_prompts():
    with pytest.raises(DataError, match="at least one prompt, got none"):
        stream(0, 1)


def test_opening_a_file(tokenizer: PreTrainedTokenizerFast, write_jsonl: WriteJsonl):
    path = write_jsonl([{"question": "x" * n, "answer": str(n)} for n in (1, 2, 3, 40)])
    data = DataSection(path=path, chat_template=False, max_prompt_tokens=9, too_long="drop", prompts_per_step=2)
    opened = open_prompts(data, seed=5, tokenizer=tokenizer)
    assert (opened.len_epoch, opened.dropped, opened.columns) == (3, 1, ("question", "answer"))
    flat = [p for step in range(1, 4) for p in opened.batch(step).prompts]
    assert sorted(p.text for p in flat[:3]) == ["x", "xx", "xxx"]
    assert all(p.columns == {"question": p.text, "answer": str(len(p.text))} for p in flat)


def test_opening_the_builtin_task(tokenizer: PreTrainedTokenizerFast):
    opened = open_prompts(DataSection(), seed=0, tokenizer=tokenizer)
    prompt = opened.batch(1).prompts[0]
    a, b = map(int, prompt.columns["question"].rstrip("=").split("+"))
    assert prompt.columns["answer"] == str(a + b)
    assert prompt.text == f"<s>user:{a}+{b}=</s><s>assistant:"


def test_evaluation_takes_the_first_that_fit(tokenizer: PreTrainedTokenizerFast, write_jsonl: WriteJsonl):
    path = write_jsonl([{"question": "x" * n} for n in (3, 40, 1, 2)])
    data = DataSection(path="train.jsonl", chat_template=False, max_prompt_tokens=9, too_long="drop")
    prompts = open_evaluation_prompts(evaluation(path=path, prompts=2), data, tokenizer)
    assert prompts is not None
    assert [p.text for p in prompts] == ["xxx", "x"]
    with pytest.raises(DataError, match="got 40 in record 1"):
        open_evaluation_prompts(
            evaluation(path=path, prompts=2), data.model_copy(update={"too_long": "error"}), tokenizer
        )


def test_evaluation_without_heldout_data(tokenizer: PreTrainedTokenizerFast):
    assert open_evaluation_prompts(evaluation(), DataSection(path="train.jsonl"), tokenizer) is None


def test_evaluation_of_the_builtin_task_holds_nothing_it_trains_on(tokenizer: PreTrainedTokenizerFast):
    prompts = open_evaluation_prompts(evaluation(prompts=100), DataSection(), tokenizer)
    assert prompts is not None
    assert len(prompts) == 100
    opened = open_prompts(DataSection(prompts_per_step=8000), seed=0, tokenizer=tokenizer)
    assert not {p.text for p in prompts} & {p.text for p in opened.batch(1).prompts}
    assert prompts == open_evaluation_prompts(evaluation(prompts=100), DataSection(), tokenizer)


def test_importing_prompts_does_not_import_jax():
    code = "import sys, tpu_grpo.prompts; assert not {'jax', 'grain', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
