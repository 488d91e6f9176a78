"""What hosts exchange, between real processes, and with one."""

import numpy as np
import pytest

from tests.hosts.processes import run
from tpu_grpo.hosts import Hosts, packed, unpacked
from tpu_grpo.records.errors import LockstepError


@pytest.mark.full
def test_values_of_all_hosts_reach_all_hosts() -> None:
    ended = run(
        """
        print(hosts.gather("rewards", b"from %d" % index))
        print(hosts.gather("an empty one", b""))
        print(hosts.share("one of records", [index, "a"], tuple[int, str]))
        print(hosts.broadcast("seed", 7 if hosts.is_first else None, int))
        long = hosts.gather("a long one", bytes([index]) * 6_000_000)
        print([(len(value), set(value)) for value in long])
        hosts.agree("params", b"same" * 1000)
        hosts.agree_all({"a": "1", "b": "x" * 1000})
        began = time.monotonic()
        for step in range(300):
            assert hosts.gather("step", b"%d" % (step + index)) == [b"%d" % (step + other) for other in range(count)]
        print((time.monotonic() - began) / 300, file=sys.stderr)
        hosts.barrier("the end")
        print(len(hosts.service.list("tpu_grpo/exchange")) <= 2 * count)
        """,
        3,
    )
    for end in ended.values():
        assert (end.code, end.out.splitlines()) == (
            0,
            [
                "[b'from 0', b'from 1', b'from 2']",
                "[b'', b'', b'']",
                "[(0, 'a'), (1, 'a'), (2, 'a')]",
                "7",
                "[(6000000, {0}), (6000000, {1}), (6000000, {2})]",
                "True",
            ],
        ), end


@pytest.mark.full
def test_what_differs_is_named_on_every_host() -> None:
    ended = run(
        """
        values = {"data.path": "b.jsonl" if index == 1 else "a.jsonl", "run.seed": "0", "template": "x" * (99 + index)}
        if index == 2:
            values["extra"] = "yes"
        try:
            hosts.agree_all(values)
        except TpuGrpoError as error:
            print(error)
        hosts.agree("params_digest", b"abc" if index else b"")
        """,
        3,
    )
    for end in ended.values():
        lines = end.out.splitlines()
        assert lines[0] == "every host must have the same; start all from the same files"
        assert lines[1] == "  data.path differs: host 1 has 'b.jsonl'; hosts 0, 2 have 'a.jsonl'"
        assert lines[2].startswith("  template differs: host 0 has sha256 ")
        assert lines[3:] == ["  extra differs: host 2 has 'yes'; hosts 0, 1 have no value"]
        assert end.code == 3
        assert "params_digest differs: host 0 has sha256 e3b0c44298fc...; hosts 1, 2 have sha256 ba7816bf8f01..." in (
            end.errors
        )


@pytest.mark.full
def test_hosts_at_different_calls_are_told_at_once() -> None:
    ended = run("hosts.barrier('rollout' if index == 1 else 'rewards')", 2)
    for end in ended.values():
        assert end.code == 3, end
        assert "LockstepError: hosts must do the same in the same order; at exchange 1, " in end.errors
        assert "host 0 has rewards; host 1 has rollout" in end.errors


@pytest.mark.full
def test_a_host_that_does_not_come_is_named() -> None:
    ended = run(
        """
        if index == 1:
            time.sleep(3)
        else:
            began, hosts.timeout_seconds = time.monotonic(), 1.5
            try:
                hosts.gather("the rewards", b"")
            except TpuGrpoError as error:
                print(error, 1.4 < time.monotonic() - began < 3)
            time.sleep(1)
        """,
        3,
    )
    for index in (0, 2):
        assert ended[index].out == (
            "every host must reach the rewards within 1.5 s; host 1 did not; "
            "see what they print, and whether they run the same command True\n"
        ), ended


@pytest.mark.parametrize("value", [b"", b"{", b"[1]", b'["x", 1]', b"[" * 100_000, b'["a", "\xff"]'])
def test_a_value_of_another_type_is_named(monkeypatch: pytest.MonkeyPatch, value: bytes) -> None:
    hosts = Hosts()
    monkeypatch.setattr(hosts, "gather", lambda *_: [value])
    with pytest.raises(LockstepError, match="got what no host tells at 'rewards of host 0'"):
        hosts.share("rewards", (1, "a"), tuple[int, str])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have 24 bytes, got 0"),
        ("AAAA", "while decompressing"),
        ("%", "Only base64 data"),
        (packed(np.zeros(2)), "must have 24 bytes, got 16"),
        (packed(np.zeros(10**6)), "must have 24 bytes, got 25"),
    ],
)
def test_packed_numbers_are_exact_and_of_the_count_that_is_expected(text: str, why: str) -> None:
    numbers = np.array([0.1, -1e-300, np.nan])
    assert unpacked(packed(numbers), 3).tobytes() == numbers.tobytes()
    with pytest.raises(ValueError, match=why):
        unpacked(text, 3)


def test_one_host_agrees_with_itself() -> None:
    alone = Hosts()
    assert alone.gather("a", b"1") == [b"1"]
    assert alone.broadcast("b", (2, "x"), tuple[int, str]) == (2, "x")
    alone.barrier("c")
    alone.agree("d", "3")
    alone.agree_all({"e": "4"})


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="2 hosts need a service"):
        Hosts(0, 2)


def test_half_of_a_surrogate_pair_is_told_as_a_question_mark() -> None:
    """A broken file may hold one, and what is said of the file goes to all hosts."""
    assert Hosts().broadcast("what a file holds", {"a": "b\ud800"}, dict[str, str]) == {"a": "b?"}
    assert Hosts().share("what a file holds", ["\udfff", "é"], list[str]) == [["?", "é"]]
