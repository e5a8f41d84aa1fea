import numpy as np
import pytest
from stage_folders import stage_folder

from fedlight.datamodules.vectors.opinion_space import opinion_space
from fedlight.report.sections import groups
from fedlight.runs.run import read_runs

PEOPLE = "person,group,votes,x,y\n"
CLIENTS = "stage,round,client,examples,group,selector,accuracy,own_accuracy\n"


@pytest.fixture
def two_camps():
    """Votes of 40 people in two camps on 30 statements, of which each has seen some; 0 where there is no vote."""
    rng = np.random.default_rng(0)
    camp = np.arange(40) % 2
    likes = np.where(camp[:, None] == 0, 1, -1) * np.where(np.arange(30) < 20, 1, -1)
    votes = np.where(rng.random(likes.shape) < 0.1, -likes, likes)
    return camp, np.where(rng.random(likes.shape) < 0.4, 0, votes)


def test_the_first_direction_is_what_people_disagree_about(two_camps):
    camp, votes = two_camps
    x, y = opinion_space(votes).T
    sides = [x[camp == one] for one in (0, 1)]
    assert max(sides[0].max(), sides[1].max()) > 0
    assert sides[0].max() < sides[1].min() or sides[1].max() < sides[0].min()
    assert x.std() > 2 * y.std()


def test_who_has_voted_on_little_is_moved_outwards(two_camps):
    """Three quarters of a person's opinions are untold: it would be a quarter as far from the middle, and is half as far."""
    _, votes = two_camps
    few = np.zeros(votes.shape[1], dtype=int)
    told = np.flatnonzero(votes[0])[::4]
    few[told] = votes[0, told]
    x = abs(opinion_space(np.vstack([votes, few]))[:, 0])
    assert 0.35 < x[-1] / np.median(x[:-1]) < 0.65


@pytest.mark.parametrize(
    "votes", [np.zeros((3, 4)), np.ones((3, 4)), np.array([[1], [-1]]), np.zeros((2, 0))]
)
def test_votes_that_tell_little_have_a_place_as_well(votes):
    places = opinion_space(votes)
    assert places.shape == (len(votes), 2)
    assert np.isfinite(places).all()


def conversation(home, seed, groups=("0", "1", "")):
    """People of a conversation, and two methods: one with groups, one without."""
    folder = home / f"seed{seed}"
    people = "".join(f"p{n},{groups[n % len(groups)]},5,{n},{-n}\n" for n in range(6))
    stage_folder(folder / "opinions", "call x.y", people_csv=PEOPLE + people)
    for method in ("fedbis", "fedbiscuit"):
        lines = [f"test,,p{n},9,,{n % 2 if method == 'fedbiscuit' else ''},0.5,0.5\n" for n in range(4)]
        stage_folder(folder / method, clients_csv=CLIENTS + "".join(lines))


def test_a_panel_for_polis_groups_and_one_for_each_method_with_groups(tmp_path):
    for seed in (0, 1):
        conversation(tmp_path, seed)
    section = groups.opinions_section(read_runs([tmp_path]))
    (chart,) = section.parts  # of the first seed
    assert [axes.get_title() for axes in chart.figure.axes] == ["Polis' own groups", "fedbiscuit"]
    place, of_groups = {"person": "p1", "x": 1.0, "y": -1.0}, {"Polis' own groups": "group 1"}
    assert chart.rows[1] == {**place, **of_groups, "fedbiscuit": "selector 1"}
    assert chart.rows[5]["Polis' own groups"] == chart.rows[5]["fedbiscuit"] == ""
    names = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert names == ["no client", "group 0", "group 1", "selector 0", "selector 1"]


def test_people_without_groups_or_with_many_or_no_conversation(tmp_path):
    conversation(tmp_path / "none", 0, groups=("",))
    (chart,) = groups.opinions_section(read_runs([tmp_path / "none"])).parts
    assert [axes.get_title() for axes in chart.figure.axes] == ["fedbiscuit"]
    conversation(tmp_path / "many", 0, groups=[str(n) for n in range(20)])
    people = "".join(f"{n},{n},1,{n},{n}\n" for n in range(20))
    (tmp_path / "many/seed0/opinions/people.csv").write_text(PEOPLE + people)
    (chart,) = groups.opinions_section(read_runs([tmp_path / "many"])).parts
    conversation(tmp_path / "gone", 0)
    (tmp_path / "gone/seed0/opinions/people.csv").unlink()
    assert groups.opinions_section(read_runs([tmp_path / "gone"])) is None
