"""The stream: epochs are complete and differ, a step alone decides its batch, held-out prompts are the first ones."""

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import WriteJsonl
from tpu_grpo.config import DataSection, EvaluationSection
from tpu_grpo.config.data_sections import SourceSpec
from tpu_grpo.data.rendering import RenderedPrompts
from tpu_grpo.data.stream import Part, PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Prompt


def stream(count: int, per_step: int, seed: int = 0, shuffle: bool = True) -> PromptStream:
    prompts = tuple(Prompt(text=str(i), token_ids=(i + 1,), columns={"n": i}) for i in range(count))
    return PromptStream(
        [Part("data", RenderedPrompts(prompts, dropped=0))], prompts_per_step=per_step, seed=seed, shuffle=shuffle
    )


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


def test_steps_count_from_one():
    with pytest.raises(DataError, match="a step must be >= 1, got 0"):
        stream(3, 2).batch(0)


def test_no_prompts():
    with pytest.raises(DataError, match="at least one prompt, got none"):
        stream(0, 1)


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


@pytest.mark.full
def test_evaluation_of_the_builtin_task_holds_nothing_it_trains_on(tokenizer: PreTrainedTokenizerFast):
    prompts = open_evaluation_prompts(evaluation(prompts=100), DataSection(), tokenizer)
    assert prompts is not None
    assert len(prompts) == 100
    opened = open_prompts(DataSection(prompts_per_step=8000), seed=0, tokenizer=tokenizer)
    assert not {p.text for p in prompts} & {p.text for p in opened.batch(1).prompts}
    assert prompts == open_evaluation_prompts(evaluation(prompts=100), DataSection(), tokenizer)


# --- sorted, and mixed -----------------------------------------------------------------------------------------------


def sorted_stream(levels: Sequence[Any], seed: int = 0, shuffle: bool = True, per_step: int = 1) -> PromptStream:
    prompts = tuple(Prompt(str(i), (i + 1,), {"n": i, "level": level}) for i, level in enumerate(levels))
    parts = [Part("data", RenderedPrompts(prompts, dropped=0))]
    return PromptStream(parts, prompts_per_step=per_step, seed=seed, shuffle=shuffle, curriculum="level")


def test_a_curriculum_goes_from_the_smallest_to_the_largest_in_every_epoch():
    levels = [3, 1, 2, 1, 3, 2, 1, 2, 3] * 20
    of = sorted_stream(levels, per_step=7)
    flat = numbers(of, range(1 + 3 * len(levels) // 7))
    epochs = [tuple(flat[start : start + len(levels)]) for start in (0, len(levels), 2 * len(levels))]
    for epoch in epochs:
        assert sorted(epoch) == list(range(len(levels)))
        assert [levels[n] for n in epoch] == sorted(levels)
    assert len(set(epochs)) == 3  # equal values in an order of each epoch's own
    assert numbers(sorted_stream(levels, seed=1), range(180)) != numbers(sorted_stream(levels), range(180))


def test_a_curriculum_without_shuffling_keeps_the_order_of_equal_values():
    assert numbers(sorted_stream([2, 1, 2, 1], shuffle=False), range(8)) == [1, 3, 0, 2, 1, 3, 0, 2]


def test_texts_that_are_numbers_are_sorted_as_numbers_and_others_as_texts():
    assert numbers(sorted_stream(["10", "9", "9.5"]), range(3)) == [1, 2, 0]
    assert numbers(sorted_stream(["10", "9", "b"]), range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([1, None], "a value in every record, prompt 1 "),
        ([1, "b"], "'<' not supported"),
        ([[1], [2]], "unhashable"),
        (["3", "1", "nan", "2"], r"got NaN in prompt 2 \(from 0\)"),
        ([float("nan"), 1.0], "got NaN in prompt 0 "),
    ],
)
def test_a_curriculum_that_cannot_be_sorted(levels: list[Any], said: str):
    with pytest.raises(DataError, match=said):
        sorted_stream(levels)


def mixed(weights: Sequence[float], sizes: Sequence[int], per_step: int = 1, **settings: Any) -> PromptStream:
    parts = []
    for name, (weight, size) in zip("xyz", zip(weights, sizes, strict=True), strict=False):
        prompts = tuple(Prompt(f"{name}{i}", (i + 1,), {"source": name, "n": i, "level": -i}) for i in range(size))
        parts.append(Part(name, RenderedPrompts(prompts, dropped=1), weight))
    return PromptStream(parts, prompts_per_step=per_step, **(dict[str, Any](seed=0, shuffle=True) | settings))


def test_a_mixture_gives_every_source_its_share_at_any_time():
    of = mixed([0.5, 0.3, 0.2], [500, 700, 300], per_step=10)
    taken = [p.columns["source"] for step in range(1, 101) for p in of.batch(step).prompts]
    for n in (1, 7, 10, 99, 100, 500, 1000):
        for name, share in (("x", 0.5), ("y", 0.3), ("z", 0.2)):
            assert abs(taken[:n].count(name) - share * n) < 1
    assert [source["prompts"] for source in of.describe()["sources"]] == [500, 700, 300]
    assert of.dropped == 3


def test_sources_of_a_mixture_go_through_epochs_of_their_own():
    of = mixed([2, 1], [300, 100], per_step=9)
    taken = [p for step in range(1, 201) for p in of.batch(step).prompts]
    for name, size in (("x", 300), ("y", 100)):
        own = [p.columns["n"] for p in taken if p.columns["source"] == name]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))
    orders = [[p.columns["n"] for p in taken if p.columns["source"] == name][:100] for name in "xy"]
    assert orders[0] != orders[1]
    batch = of.batch(150)
    assert batch.records == tuple(p.columns["n"] + {"x": 0, "y": 300}[p.columns["source"]] for p in batch.prompts)
    assert of.size == 400


def test_a_mixture_of_equal_sources_shuffles_them_differently():
    of = mixed([1, 1], [100, 100])
    taken = [p.columns["n"] for step in range(1, 201) for p in of.batch(step).prompts]
    assert taken[0::2] != taken[1::2]


@pytest.mark.parametrize("curriculum", [None, "level"])
def test_a_mixture_can_be_asked_for_any_step(curriculum: str | None):
    one, other = (mixed([2, 1], [70, 30], per_step=4, curriculum=curriculum) for _ in range(2))
    in_order = [one.batch(step) for step in range(1, 80)]
    assert [other.batch(step) for step in reversed(range(1, 80))][::-1] == in_order
    assert len(one.batch(10**9).prompts) == 4
    if curriculum:
        first = [p.columns["n"] for b in in_order for p in b.prompts if p.columns["source"] == "y"][:30]
        assert first == list(range(29, -1, -1))  # level is -n


def test_the_digest_is_of_everything_that_decides_the_order():
    settings: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"shuffle": False}, {"per_step": 2}, {"curriculum": "level"},
        {"weights": [1, 2]}, {"sizes": [70, 31]},
    ]  # fmt: skip
    digests = [mixed(**(dict[str, Any](weights=[2, 1], sizes=[70, 30]) | changed)).digest for changed in settings]
    assert len(set(digests)) == len(digests)
    assert mixed([2, 1], [70, 30]).digest == digests[0]


def test_opening_a_mixture(tokenizer: PreTrainedTokenizerFast, write_jsonl: WriteJsonl):
    first = write_jsonl([{"question": "a" * n, "answer": str(n)} for n in (1, 2, 40)])
    second = write_jsonl([{"problem": "b", "test": "t"}])
    sources = (
        SourceSpec(path=first, weight=3, name="plain"),
        SourceSpec(path=second, columns={"question": "problem"}, prompt_template="[{question}]"),
    )
    data = DataSection(
        sources=sources, chat_template=False, max_prompt_tokens=9, too_long="drop", prompts_per_step=4, shuffle=False
    )
    opened = open_prompts(data, seed=5, tokenizer=tokenizer)
    assert opened.columns == ("question", "answer", "test", "source")
    assert opened.describe()["sources"] == [
        {"name": "plain", "weight": 3.0, "prompts": 2, "dropped": 1},
        {"name": "source1", "weight": 1.0, "prompts": 1, "dropped": 0},
    ]
    prompts = {p.text: dict(p.columns) for p in opened.batch(1).prompts}
    assert prompts == {
        "a": {"question": "a", "answer": "1", "test": None, "source": "plain"},
        "aa": {"question": "aa", "answer": "2", "test": None, "source": "plain"},
        "[b]": {"question": "b", "answer": None, "test": "t", "source": "source1"},
    }


def test_a_mixture_names_its_sources_itself(tokenizer: PreTrainedTokenizerFast, write_jsonl: WriteJsonl):
    path = write_jsonl([{"question": "a", "source": "web"}])
    with pytest.raises(DataError, match=r"one has such a column already; rename it, e\.g\. columns: {origin: source}"):
        open_prompts(DataSection(sources=(SourceSpec(path=path),)), 0, tokenizer)


def test_an_evaluation_may_have_a_template_of_its_own(tokenizer: PreTrainedTokenizerFast, write_jsonl: WriteJsonl):
    path = write_jsonl([{"problem": "x"}])
    section = evaluation(path=path, prompt_template="({question})", columns={"question": "problem"})
    prompts = open_evaluation_prompts(section, DataSection(path="train.jsonl", chat_template=False), tokenizer)
    assert prompts is not None
    assert [(p.text, p.columns) for p in prompts] == [("(x)", {"question": "x"})]
