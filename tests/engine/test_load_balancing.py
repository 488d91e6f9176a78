"""Which replica serves which group, and in which order: worked by hand."""

from dataclasses import replace

import pytest

from tests.engine.building import engine_options, requests
from tpu_grpo.engine.load_balancing import (
    Dealer,
    Group,
    Load,
    divided_places,
    expected_tokens,
    make_groups,
    places_for,
    reporting_host,
    steps_between_points,
)
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Request, SamplingParams

PLACES = 2


def singles(*tokens: int) -> list[Group]:
    """Groups of one request each."""
    return [Group(number, (number,), expected) for number, expected in enumerate(tokens)]


def numbers(dealt: list[list[Group]]) -> list[list[int]]:
    return [[group.number for group in groups] for groups in dealt]


def idle(replicas: int, places: int = PLACES) -> list[Load]:
    return [Load(0, places)] * replicas


# --- what is expected ------------------------------------------------------------------------------------------------


def test_the_unknown_get_the_mean_of_the_known() -> None:
    asked = requests([(1,), (2,), (3,), (4,)], SamplingParams(100))
    assert expected_tokens(asked, [30.4, None, 10.0, 0.2]) == [30, 14, 10, 1]  # 40.6 / 3 = 13.5; at least 1
    assert expected_tokens(asked) == [50] * 4
    assert expected_tokens([]) == []


def test_groups_are_ordered_by_what_is_expected_of_a_completion() -> None:
    """Prompt 1 has three samples of 20; its total does not put it before prompt 2, of which 30 are expected."""
    asked = requests([(5,), (6, 6), (7,), (6, 6), (8,), (6, 6)])
    groups = make_groups(asked, [10, 20, 30, 20, 10, 20])
    assert [(group.members, group.tokens) for group in groups] == [((2,), 30), ((1, 3, 5), 60), ((0,), 10), ((4,), 10)]
    assert [group.members for group in make_groups(asked, [9] * 6)] == [(0,), (1, 3, 5), (2,), (4,)]
    asked = requests([(5, 1), (5,), (5, 1)], group=2)  # in conversations prompts that are equal have other environments
    assert [group.members for group in make_groups(asked, [9] * 6)] == [(0, 1, 4, 5), (2, 3)]
    assert [group.members for group in make_groups(asked, [9] * 6, converse=True)] == [(0, 1), (2, 3), (4, 5)]


def test_points_come_often_enough_for_the_longest_answer() -> None:
    asked = requests(sampling=SamplingParams(16384))
    assert steps_between_points(asked) == 512
    assert steps_between_points(requests(sampling=SamplingParams(100))) == 16


@pytest.mark.parametrize(("cache", "places"), [(None, 8), (80, 5), (15, 1)])
def test_a_cache_has_places_for_what_is_expected(cache: int | None, places: int) -> None:
    """Every request needs 3 + 10 tokens and a margin of 2."""
    options = replace(engine_options(), kv_tokens=cache, page_size=1)
    asked = [Request((7, 7, 9), SamplingParams(20), request.key) for request in requests()]
    assert options.tokens_of_request(13) == 15
    assert places_for(asked, [10] * 4, options) == places


# --- dealing ---------------------------------------------------------------------------------------------------------


def test_with_nothing_known_groups_are_dealt_in_turn() -> None:
    asked = requests([(1, 2), (3,), (4, 4, 4), (5,), (6,)], group=2)
    for replicas, shares in [
        (2, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]),
        (3, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5]]),
        (6, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], []]),
        (1, [list(range(10))]),
    ]:
        dealer = Dealer(make_groups(asked, expected_tokens(asked)), [[0]] * replicas)
        dealer.deal(idle(replicas, places=4))
        assert dealer.assigned == shares
        assert dealer.waits == (replicas < 3)  # three replicas of 4 places have room for 6 groups of 2


def test_the_longest_go_to_the_replica_with_the_least_to_do_as_long_as_there_are_places() -> None:
    """Replica 0 gets 9, replica 1 gets 7 and 5 and is full, though it has less to do than replica 0 gets with 4."""
    dealer = Dealer(singles(9, 7, 5, 4, 2, 1), [[0], [0]])
    assert numbers(dealer.deal(idle(2))) == [[0, 3, 5], [1, 2, 4]]
    assert dealer.waits


def test_an_idle_replica_takes_over_what_waits_at_a_busy_one() -> None:
    """At the point replica 0 still has 9 and 4 at work; replica 1 has ended 7 and 5 and its own 2."""
    dealer = Dealer(singles(9, 7, 5, 4, 2, 1), [[0], [0]])
    dealer.deal(idle(2))
    dealt = dealer.deal([Load(2, PLACES, tokens=6, held=(5,)), Load(0, PLACES)])
    assert numbers(dealt) == [[], [5]]
    assert dealer.assigned == [[0, 3], [1, 2, 4, 5]]
    assert not dealer.waits


@pytest.mark.parametrize(
    ("groups", "rows", "places", "waits"),
    [
        (2, 0, 4, False),
        (3, 0, 4, True),
        (2, 1, 4, False),  # the second has one place, and one row of it waits
        (3, 1, 4, True),
        (1, 4, 4, True),
        (0, 4, 4, False),
        (4, 0, 9, False),
    ],
)
def test_a_group_waits_until_its_first_row_has_a_place(groups: int, rows: int, places: int, waits: bool) -> None:
    dealer = Dealer([Group(n, (2 * n, 2 * n + 1), 2) for n in range(groups)], [[0]])
    dealer.deal([Load(rows, places)])
    assert dealer.waits is waits


def test_every_request_is_told_to_one_host_that_serves_it() -> None:
    """Groups are dealt in turn, and hosts of a replica take its groups in turn."""

    def told(*drivers: tuple[int, ...]) -> list[int]:
        dealer = Dealer(singles(1, 1, 1, 1), drivers)
        dealer.deal(idle(len(drivers)))
        return dealer.reporting_hosts

    assert told((0,), (0,), (1,), (1,)) == [0, 0, 1, 1]
    assert told((0, 1)) == [0, 1, 0, 1]
    assert told((0, 1), (2, 3)) == [0, 2, 1, 3]
    assert told((0, 1, 2)) == [0, 1, 2, 0]
    assert reporting_host(5, (2, 3), replicas=2) == 2


def test_the_environments_of_a_host_are_divided_among_its_replicas() -> None:
    drivers = [[0], [0], [0], [1], [1], [1]]
    assert divided_places(None, drivers) == [None] * 6
    assert divided_places(8, drivers) == [3, 3, 2] * 2
    assert divided_places(8, [[0, 1], [2, 3]]) == [8, 8]
    with pytest.raises(ConfigError, match=r"environment\.workers must be at least the 3 engines of a host, .* got 2; "):
        divided_places(2, drivers)
