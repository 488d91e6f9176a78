import jax
import numpy as np

from tpu_grpo.observe.process_metrics import CompilationCounter


def test_a_new_shape_adds_one_and_a_known_one_none() -> None:
    scale = jax.jit(lambda x: x * 2 + 1)
    with CompilationCounter() as counter:
        scale(np.ones(3, np.float32))
        assert counter.count == 1
        scale(np.zeros(3, np.float32))
        assert counter.count == 1
        scale(np.ones(4, np.float32))
        assert counter.count == 2


def test_a_jitted_function_inside_another_adds_none() -> None:
    inner = jax.jit(lambda x: x - 3)
    outer = jax.jit(lambda x: inner(x) * 5)
    with CompilationCounter() as counter:
        outer(np.ones(7, np.float32))
        assert counter.count == 1


def test_ahead_of_time_compilation_counts_and_eager_operations_do() -> None:
    with CompilationCounter() as counter:
        jax.jit(lambda x: x * 7).lower(np.ones(5, np.float32)).compile()
        assert counter.count == 1
        jax.numpy.add(np.ones(1237, np.float32), 1.0)  # eager, with a shape nothing else uses
        assert counter.count > 1


def test_it_stops_at_the_end_of_the_block_and_counters_do_not_share() -> None:
    with CompilationCounter() as first:
        jax.jit(lambda x: x + 11)(np.ones(2, np.float32))
    with CompilationCounter() as second:
        jax.jit(lambda x: x + 12)(np.ones(2, np.float32))
    assert (first.count, second.count) == (1, 1)
