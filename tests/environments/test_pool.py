"""A pool plays conversations, many at once, each with an environment of its own."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from tests.environments.playing import acted, answer, begun, call, calls, ended, failure, open_pool, says, told
from tests.marks import left_after, marked
from tpu_grpo.environments import pool as pool_module
from tpu_grpo.environments.actions import Answered, BadCall, Ended, ToolCall
from tpu_grpo.environments.pool import EnvironmentPool
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers import supervisor
from tpu_grpo.workers.attributes import rebuilt
from tpu_grpo.workers.channel import BrokenChannelError

COUNTER, ASYNC = "tests.environments.games:Counter", "tests.environments.games:Async"
MIXED = "tests.environments.games:Mixed"


@pytest.fixture(scope="module")
def pool():
    with open_pool(COUNTER, options={"first": 1}) as pool:
        yield pool


def test_a_conversation_from_its_beginning_to_its_end(pool: EnvironmentPool):
    reply = begun(pool, columns={"target": 6})
    assert reply == Answered(({"role": "user", "content": "Count to 6."},))
    assert acted(pool, call("increment", step=2)) == Answered(({"role": "tool", "name": "increment", "content": "3"},))
    assert told(acted(pool, call("increment", step=1, times=3))) == "6"
    end = ended(pool)
    assert (end.reward, end.turn_rewards, end.kept) == (1.0, (2.0, 1.0), None)


@pytest.mark.parametrize("more", [{"tool_calls": "abc"}, {"role": "tool", "tool_call_id": "1"}])
def test_a_message_that_no_environment_gives_is_a_foreign_reply(more: dict[str, str]) -> None:
    with pytest.raises(BrokenChannelError):
        pool_module._check(Answered(({"role": "user", "content": "x"} | more,)), None)


def test_calls_of_a_turn_are_made_in_order_and_bad_ones_are_answered(pool: EnvironmentPool):
    begun(pool, columns={"target": 6})
    made = [
        ToolCall("increment", {"step": 2}),
        ToolCall("decrement", {"step": 2}),
        ToolCall("increment", {}),
        ToolCall("increment", {"step": 1, "by": 2}),
        ToolCall("reset", {"target": 3}),
        BadCall("the call is no JSON"),
        ToolCall("increment", {"step": "a"}),
        ToolCall("increment", {"step": 3}),
    ]
    reply = answer(acted(pool, calls(*made)))
    assert [(message["role"], message["name"], message["content"]) for message in reply.messages] == [
        ("tool", "increment", "3"),
        ("tool", "decrement", "Error: there is no tool 'decrement'; the tools are: increment, look"),
        ("tool", "increment", "Error: increment needs the argument 'step'; it takes: step, times"),
        ("tool", "increment", "Error: increment has no argument 'by'; it takes: step, times"),
        ("tool", "reset", "Error: there is no tool 'reset'; the tools are: increment, look"),
        ("tool", "", "Error: the call is no JSON"),
        (
            "tool",
            "increment",
            "Error: the argument 'step' does not fit: Input should be a valid integer, unable to parse string as an "
            "integer, got 'a'",
        ),
        ("tool", "increment", "6"),
    ]
    assert reply.errors == 6
    pool.drop(0)


def test_every_conversation_has_an_environment_of_its_own_and_a_seed(pool: EnvironmentPool):
    seen = []
    for key, seed in ((1, 5), (2, 5), (3, 6)):
        pool.start(key, "", {"target": 1, "environment": "kept", "prompt": "p"}, seed)
        pool.take(key)
        seen.append(eval(told(acted(pool, call("look"), key))))
        pool.drop(key)
    assert seen[0] == seen[1]
    assert seen[0] == {
        "seed": 5,
        "columns": {"environment": "kept", "prompt": "p"},
        "made_before": 0,
        "drawn": seen[0]["drawn"],
    }
    assert seen[2]["drawn"] != seen[0]["drawn"]


def test_a_column_named_seed_is_the_column(pool: EnvironmentPool):
    begun(pool, columns={"target": 1, "seed": 99})
    assert eval(told(acted(pool, call("look"))))["seed"] == 99
    pool.drop(0)


def test_a_conversation_that_is_over_or_was_not_begun_may_be_dropped(pool: EnvironmentPool):
    """A signal can come between what the pool does and what its caller takes note of."""
    begun(pool, columns={"target": 1})
    ended(pool)
    pool.drop(0)
    pool.drop(1)
    assert told(begun(pool, columns={"target": 2})) == "Count to 2."
    pool.drop(0)


def test_attributes_are_kept_for_rewards():
    with open_pool(COUNTER, keep=True) as pool:
        begun(pool, columns={"target": 2, "big": "x" * 2**20})
        acted(pool, call("increment", step=2))
        kept = ended(pool).kept
    assert kept is not None
    assert kept.source == COUNTER
    environment = rebuilt(kept, EpisodeError)
    assert environment.counter == 2
    with pytest.raises(AttributeError, match="bytes, and an attribute may have 1,048,576$"):
        _ = environment.columns


@pytest.mark.parametrize("form", [4, 5])
def test_steps_take_texts_and_end_by_themselves(form: int):
    with open_pool("tests.environments.games:Steps", options={"form": form}) as pool:
        assert told(begun(pool, columns={"goal": "a", "other": 1})) == "Say a. Seed 7."
        assert acted(pool, says("b")) == Answered(({"role": "user", "content": "No."},), 0.0, False)
        assert acted(pool, says("a")) == Answered(({"role": "user", "content": "Yes."},), 1.0, True)
        assert ended(pool).reward is None


# --- many at once ----------------------------------------------------------------------------------------------------


def test_256_conversations_at_once(pool: EnvironmentPool):
    for key in range(256):
        pool.start(key, "", {"target": key}, seed=key)
    for key in range(256):
        assert told(pool.take(key)) == f"Count to {key}."
        pool.act(key, call("increment", step=key - 1))
    for key in range(256):
        assert told(pool.take(key)) == str(key)
        pool.end(key)
    for key in range(256):
        end = pool.take(key)
        assert end.reward == 1.0


def test_conversations_wait_for_places_in_their_order_and_never_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_PATIENCE_SECONDS", 1000.0)
    with open_pool(COUNTER, workers=2) as pool:
        for key in range(5):
            pool.start(key, "", {"target": key}, seed=0)
        assert [told(pool.take(key)) for key in (0, 1)] == ["Count to 0.", "Count to 1."]
        assert not pool.ready(2)
        pool.end(0)
        pool.take(0)
        while not pool.ready(2):
            time.sleep(0.01)
        assert told(pool.take(2)) == "Count to 2."
        assert told(pool.take(4)) == "Count to 4."  # those that have places go on only once this one has
        assert not pool.ready(3)
        monkeypatch.setattr(pool_module, "_PATIENCE_SECONDS", 0.1)
        while not pool.ready(3):  # who only asks whether it is ready is not left waiting, either
            time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize(("seconds", "reply"), [(100.0, None), (121.0, ("late", "had no process after 120 s; "))])
def test_the_time_until_a_process_is_forked_is_not_the_environment_s(
    monkeypatch: pytest.MonkeyPatch, seconds: float, reply: tuple[str, str] | None
):
    """A server forks one at a time: of many conversations that begin at once the last would have had none left."""
    with open_pool(COUNTER, timeout=30.0) as pool:
        begun(pool, 0, {"target": 0})
        server = psutil.Process(pool.groups[""].servers[0].process._process.pid)
        server.suspend()
        pool.start(1, "", {"target": 1}, seed=0)
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
        is_over = pool.ready(1)
        server.resume()
        if reply is None:
            assert not is_over
            assert told(pool.take(1)) == "Count to 1."
        else:
            kind, text = failure(pool.take(1))
            assert (kind, text[: len(reply[1])]) == reply


def test_what_is_dropped_is_over_and_others_can_begin(pool: EnvironmentPool):
    before = marked()
    for key in range(3):
        begun(pool, key, {"target": 1})
    assert len(marked() - before) == 3
    pool.act(0, call("look"))
    for key in range(3):
        pool.drop(key)
    assert left_after(before, 10.0) == set()
    assert told(begun(pool, 0, {"target": 1})) == "Count to 1."
    pool.drop(0)


@pytest.mark.full
def test_a_server_is_replaced_after_so_many_conversations():
    with open_pool(COUNTER, recycle=2) as pool:
        group = pool.groups[""]
        servers = set()
        for key in range(6):
            begun(pool, key, {"target": 1})
            while len(group.servers) > 1 and not group.servers[-1].is_ready:
                pool.ready(key)
            servers |= {server.process._process.pid for server in group.servers}
        assert told(acted(pool, call("increment", step=5), 0)) == "5"  # one of the first server goes on
        for key in range(6):
            pool.drop(key)
        assert len(servers) == 4
        while len(group.servers) > 1 or group.ending:
            pool._pump(0.01)


@pytest.mark.full
def test_environments_are_closed_before_their_server_or_the_pool_ends(tmp_path: Path):
    with open_pool("tests.environments.games:Closing", recycle=2) as pool:
        group = pool.groups[""]
        for key in range(6):
            begun(pool, key, {"path": str(tmp_path / str(key))})
            ended(pool, key)
            while len(group.servers) > 1 and not group.servers[-1].is_ready:
                pool._pump(0.01)
        begun(pool, 6, {"path": str(tmp_path / "6")})  # it is not asked what it was worth
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4", "5", "6"]


@pytest.mark.full
def test_processes_know_nothing_of_the_accelerator_and_order_sets_alike(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("TPU_GRPO_CACHE", "/nowhere")  # which is ours: what a shipped environment works out lies there
    with open_pool("tests.environments.games:Knows") as pool:
        assert eval(told(begun(pool))) == {
            "numpy": np.random.RandomState(7).randint(10**6),
            "imported": [],  # what each process would import by itself costs several times what a fork does
            "jax": False,
            "platforms": "cpu",
            "tpu": ["TPU_GRPO_CACHE", "TPU_GRPO_WORKER"],
            "hash": "0",
        }


@pytest.mark.full
def test_what_a_shipped_class_wants_imported_is_there_before_conversations_are_forked():
    with open_pool("tests.environments.games:Prepared") as pool:
        assert eval(told(begun(pool))) == {"imported": ["wave"]}
    with open_pool("tests.environments.games:Unprepared") as pool, pytest.raises(EpisodeError, match="no_such_package"):
        begun(pool)


# --- async -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared():
    with open_pool(ASYNC) as pool:
        yield pool


def test_async_conversations_share_a_loop(shared: EnvironmentPool):
    for key in range(64):
        shared.start(key, "", {}, seed=key)
    for key in range(64):
        assert shared.take(key) == Answered(())
    for key in range(64):
        shared.act(key, call("meet", others=64))
    for key in range(64):
        assert told(shared.take(key)) == "met"
    for key in range(64):
        assert ended(shared, key).reward == 0.5


@pytest.mark.full
def test_what_blocks_a_loop_has_a_process_of_its_own():
    """Tools that are not awaited would wait for each other on one loop."""
    with open_pool(MIXED) as pool:
        for key in range(3):
            assert begun(pool, key) == Answered(())
        assert len({told(acted(pool, call("here"), key)) for key in range(3)}) == 3
        assert [told(acted(pool, call(tool), 0)) for tool in ("begin", "here", "look")][::2] == ["begun", "done"]
        assert [ended(pool, key).reward for key in range(3)] == [0.5] * 3


@pytest.mark.full
@pytest.mark.parametrize("name", [MIXED, ASYNC])
def test_each_call_of_a_turn_has_its_own_time(name: str):
    with open_pool(name, timeout=1.6) as pool:
        begun(pool, 0)
        begun(pool, 1)
        pool.act(1, calls(ToolCall("write", {"size": 1}), ToolCall("wait", {"seconds": 1000.0}), BadCall("no JSON")))
        reply = answer(acted(pool, calls(*[ToolCall("wait", {"seconds": 0.11})] * 16)))  # 1.76 seconds together
        assert [message["content"] for message in reply.messages] == ["waited 0.11"] * 16
        assert failure(pool.take(1)) == ("late", "did not answer within its timeout of 1.6 s in the tool wait")
        assert ended(pool).reward == 0.5


@pytest.mark.parametrize("name", [MIXED, ASYNC])
def test_a_turn_makes_so_many_calls_and_the_policy_is_told_of_the_rest(name: str):
    """Eighty answers of a MiB would be more than a process may write at once."""
    with open_pool(name) as pool:
        begun(pool)
        reply = answer(acted(pool, calls(*[ToolCall("write", {"size": 2**20})] * 80)))
        assert [len(message["content"]) for message in reply.messages[:16]] == [2**20] * 16
        refused = {
            "role": "tool",
            "name": "write",
            "content": "Error: a turn may make at most 16 calls; 64 more were not made",
        }
        assert list(reply.messages[16:]) == [refused]
        assert reply.errors == 64
        assert ended(pool).reward == 0.5


def test_an_async_tool_that_raises_is_an_answer(shared: EnvironmentPool):
    begun(shared)
    assert told(acted(shared, call("fail"))) == "Error: ValueError: no"
    assert ended(shared).reward == 0.5


@pytest.mark.parametrize("tool", ["wait", "resist"])
def test_a_late_coroutine_is_cancelled_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, shared: EnvironmentPool, tool: str
):
    begun(shared, 0)
    begun(shared, 1)
    with monkeypatch.context() as patched:
        patched.setattr(shared, "_timeout", 0.25)
        shared.act(0, call(tool, **({"seconds": 1000.0} if tool == "wait" else {})))
    assert told(acted(shared, call("wait", seconds=0.1), 1)) == "waited 0.1"
    assert failure(shared.take(0)) == ("late", f"did not answer within its timeout of 0.25 s in the tool {tool}")
    assert ended(shared, 1).reward == 0.5


def test_an_async_environment_that_exits_ends_alone(shared: EnvironmentPool):
    begun(shared, 0)
    begun(shared, 1)
    kind, text = failure(acted(shared, call("leave"), 0))
    assert (kind, text[:34]) == ("died", "called sys.exit(4) in the tool lea")
    assert ended(shared, 1).reward == 0.5


@pytest.mark.full
def test_a_blocked_loop_is_ended_with_all_that_share_it(monkeypatch: pytest.MonkeyPatch):
    with open_pool(ASYNC) as pool:
        begun(pool, 0)
        begun(pool, 1)
        with monkeypatch.context() as patched:
            patched.setattr(supervisor, "_GRACE_SECONDS", 0.25)
            patched.setattr(pool, "_timeout", 0.25)
            assert failure(acted(pool, call("block"), 0))[0] == "late"
        assert failure(acted(pool, call("wait", seconds=0.0), 1)) == (
            "died",
            "was ended with its process, where another environment had blocked the event loop",
        )
        assert begun(pool, 2) == Answered(())


@pytest.mark.full
def test_an_async_process_is_replaced_after_so_many_conversations():
    with open_pool(ASYNC, recycle=2) as pool:
        for key in range(2):
            begun(pool, key)
        first, group = marked(), pool.groups[""]
        while not group.workers[-1].is_ready:
            pool.ready(0)
        begun(pool, 2)
        assert told(acted(pool, call("wait", seconds=0.0), 0)) == "waited 0.0"
        for key in range(2):
            assert ended(pool, key).reward == 0.5
        deadline = time.monotonic() + 10.0
        while len(group.servers[0].workers) > 1 and time.monotonic() < deadline:
            pool.ready(2)
        assert len(first - marked()) == 1
        assert ended(pool, 2).reward == 0.5


@pytest.mark.full
def test_servers_are_replaced_while_their_last_conversations_end():
    """An answer that comes with the word that its process is gone may be the last of a server."""
    with open_pool(COUNTER, recycle=3) as pool:
        for wave in range(12):
            for key in range(24):
                pool.start(key, "", {"target": 6}, 7)
            assert all(isinstance(pool.take(key), Answered) for key in range(24))
            for key in range(24):
                pool.end(key)
            time.sleep(0.01 * (wave % 2))
            assert [pool.take(key) for key in range(24)] == [Ended(reward=0.0, turn_rewards=())] * 24
