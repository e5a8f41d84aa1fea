import random

from fedlight.callbacks.loop.plan import form_bundles
from fedlight.federation.client import Visit


def names(bundles):
    return [[[(v.client_id, v.split) for v in group] for group in bundle] for bundle in bundles]


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


def test_left_over_clients_form_a_smaller_group():
    visits = [Visit(name, 2) for name in "abcd"]
    assert names(form_bundles(visits, 3)) == [
        [[("a", "train"), ("b", "train"), ("c", "train")]],
        [[("d", "train")]],
    ]


def test_second_visits_follow_the_first_visits_of_the_same_clients():
    visits = [visit for name in "abc" for visit in (Visit(name, 2), Visit(name, 1, "synthetic"))]
    assert names(form_bundles(visits, 2)) == [
        [[("a", "train"), ("b", "train")], [("a", "synthetic"), ("b", "synthetic")]],
        [[("c", "train")], [("c", "synthetic")]],
    ]


def test_clients_with_unlike_visits_are_apart():
    visits = [Visit("a", 2), Visit("b", 3), Visit("c", 2), Visit("c", 1, "synthetic"), Visit("d", 3)]
    assert names(form_bundles(visits, 4)) == [
        [[("a", "train")]],
        [[("b", "train"), ("d", "train")]],
        [[("c", "train")], [("c", "synthetic")]],
    ]


def test_splits_may_differ_where_the_batches_are_equally_many():
    visits = [Visit("a", 2), Visit("b", 2, "mixed")]
    assert names(form_bundles(visits, 2)) == [[[("a", "train"), ("b", "mixed")]]]


def test_kinds_are_apart_and_none_is_alone():
    bits = {"a": 4, "b": 16, "c": 4, "d": None, "e": None, "f": 16}
    visits = [Visit(name, 2) for name in bits]
    found = form_bundles(visits, 4, lambda visit: bits[visit.client_id])
    assert [[v.client_id for v in group] for ((*group,),) in found] == [["a", "c"], ["b", "f"], ["d"], ["e"]]


def test_a_client_with_one_visit_that_is_alone_is_alone_in_all():
    visits = [visit for name in "ab" for visit in (Visit(name, 2), Visit(name, 1, "synthetic"))]
    found = form_bundles(visits, 2, lambda visit: None if visit == Visit("a", 1, "synthetic") else 0)
    assert [len(group) for bundle in found for group in bundle] == [1, 1, 1, 1]


def test_a_clients_name_is_no_kind():
    """The key of a client that is alone cannot meet the key of others."""
    visits = [Visit("a", 2), Visit("b", 2)]
    assert len(form_bundles(visits, 2, lambda visit: "a" if visit.client_id == "b" else None)) == 2


def test_groups_do_not_depend_on_the_order_of_the_plan():
    rng = random.Random(0)
    visits = [Visit(f"c{i:02}", 1 + i % 3) for i in range(20)]
    expected = {frozenset(group) for bundle in form_bundles(visits, 4) for group in bundle}
    for _ in range(10):
        rng.shuffle(visits)
        assert {frozenset(group) for bundle in form_bundles(visits, 4) for group in bundle} == expected


def test_nobody_makes_no_bundle():
    assert form_bundles([], 3) == []
