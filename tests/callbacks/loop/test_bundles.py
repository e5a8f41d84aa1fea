import random

import pytest

from fedlight.callbacks.loop.plan import form_bundles
from fedlight.federation.client import Visit


def names(bundles):
    return [[" ".join(f"{v.client_id} {v.split}" for v in group) for group in bundle] for bundle in bundles]


def both(clients):
    return [visit for name in clients for visit in (Visit(name, 2), Visit(name, 1, "synthetic"))]


UNLIKE = [Visit("a", 2), Visit("b", 3), *both("c"), Visit("d", 3)]


def flat(bundles):
    return [visit for bundle in bundles for group in bundle for visit in group]


def test_one_at_once_keeps_the_order_of_the_plan():
    visits = [Visit("b", 2), Visit("b", 1, "synthetic"), Visit("a", 2), Visit("c", 3)]
    bundles = form_bundles(visits, 1)
    assert flat(bundles) == visits
    assert [len(bundle) for bundle in bundles] == [2, 1, 1]
    assert all(len(group) == 1 for bundle in bundles for group in bundle)


def test_visits_are_the_same_objects():
    visits = [Visit("a", 2), Visit("b", 2)]
    assert all(a is b for a, b in zip(flat(form_bundles(visits, 2)), visits, strict=True))


@pytest.mark.parametrize(
    ("visits", "at_once", "expected"),
    [
        ([], 3, []),
        ([Visit(name, 2) for name in "abcd"], 3, [["a train b train c train"], ["d train"]]),
        (both("abc"), 2, [["a train b train", "a synthetic b synthetic"], ["c train", "c synthetic"]]),
        (UNLIKE, 4, [["a train"], ["b train d train"], ["c train", "c synthetic"]]),
        ([Visit("a", 2), Visit("b", 2, "mixed")], 2, [["a train b mixed"]]),
    ],
    ids=["nobody", "left over clients", "second visits follow", "unlike visits", "splits of equal length"],
)
def test_clients_with_as_many_batches_in_each_visit_form_groups(visits, at_once, expected):
    assert names(form_bundles(visits, at_once)) == expected


@pytest.mark.parametrize(
    ("visits", "kind", "expected"),
    [
        (
            [Visit(name, 2) for name in "abcdef"],
            lambda visit: {"a": 4, "b": 16, "c": 4, "f": 16}.get(visit.client_id),
            [["a train c train"], ["b train f train"], ["d train"], ["e train"]],
        ),
        (
            both("ab"),
            lambda visit: None if visit == Visit("a", 1, "synthetic") else 0,
            [["a train", "a synthetic"], ["b train", "b synthetic"]],
        ),
        (
            [Visit("a", 2), Visit("b", 2)],
            lambda visit: "a" if visit.client_id == "b" else None,  # no key of the client that is alone
            [["a train"], ["b train"]],
        ),
    ],
    ids=["by bits", "alone in one visit and so in all", "a client's name is no kind"],
)
def test_kinds_are_apart_and_none_is_alone(visits, kind, expected):
    assert names(form_bundles(visits, 4, kind)) == expected


def test_groups_do_not_depend_on_the_order_of_the_plan():
    rng = random.Random(0)
    visits = [Visit(f"c{i:02}", 1 + i % 3) for i in range(20)]
    expected = {frozenset(group) for bundle in form_bundles(visits, 4) for group in bundle}
    for _ in range(10):
        rng.shuffle(visits)
        assert {frozenset(group) for bundle in form_bundles(visits, 4) for group in bundle} == expected
