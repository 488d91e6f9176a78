"""Tokens as they are sampled: an engine says after every launch how far its requests are.

for answers in stream(engine, requests, cancelled=lambda: False):
    answers[0].token_ids            # the tokens of request 0 so far
    answers[0].completion           # and its completion, once it has ended
"""

from collections.abc import Callable, Iterator, Sequence

from tpu_grpo.engine.broken import impossible
from tpu_grpo.engine.dealing import expected_tokens, make_groups
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.generation import Generation, Partial
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.records.stages import Request


def stream(engine: Engine, requests: Sequence[Request], cancelled: Callable[[], bool]) -> Iterator[list[Partial]]:
    """Sample completions, and yield what there is of each, in the order of the requests, after every launch.

    Whoever stops listening ends the requests; the engine can be used again afterwards.

    Args:
        engine: has weights, and nothing else to do.
        requests: what to sample.
        cancelled: is asked before every launch; once it says yes, requests end with the tokens that they have.

    Raises:
        RequestError: if the engine can never serve one of them; none is started then.
        NonFiniteError: if a log-probability is not finite.
    """
    engine.check(requests)
    expected = expected_tokens(requests)
    generation, going = engine.begin(requests, expected), True
    generation.hold(make_groups(requests, expected))
    try:
        while going:
            if cancelled():
                generation.cancel()
            going = generation.advance()
            answers = [generation.partial(index) for index in range(len(requests))]
            if any(answer.completion is not None and impossible(answer.completion).any() for answer in answers):
                raise NonFiniteError(
                    "the log-probabilities of an answer must be finite and at most 0, got others: the model's weights "
                    "are broken, or their numbers too large for model.dtype; name another checkpoint"
                )
            yield answers
    except GeneratorExit:
        _end(generation)
        raise


def _end(generation: Generation) -> None:
    generation.cancel()
    while generation.advance():
        pass
