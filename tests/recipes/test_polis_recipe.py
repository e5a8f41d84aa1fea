import gzip
import json
from itertools import permutations

import numpy as np
import pytest
from recipe_runs import ran, rows_of
from scipy import stats
from tiny_world import fedlight, make_encoder, table, write_lines, write_rows

from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.recipes import recipe as recipes
from fedlight.recipes.polis import Jury, PairBounds, contested, opinion_pairs, opinion_table, read_opinions
from fedlight.support.seeding import derive_seed

pytestmark = pytest.mark.slow  # whole recipes

STATEMENTS = 24
NAMES = {1: "agree", -1: "disagree", 0: "pass"}


def conversation(people=60, seed=0):
    """Two groups with opposed votes on the first half of the statements; everybody likes even ones of the other half."""
    rng = np.random.default_rng(seed)
    votes = []
    for person in range(people):
        for statement in range(STATEMENTS):
            vote = (-1) ** (statement % 2)
            if statement < STATEMENTS // 2:
                vote *= (-1) ** (person % 2)
            vote *= -1 if rng.random() < 0.05 else 1
            if rng.random() < 0.1:
                vote = 0
            group = None if person == 5 else str(person % 2)
            row = {"participant": person, "group": group, "statement_id": statement}
            votes.append(row | {"vote": NAMES[vote]})
    votes.append({"participant": 0, "group": "0", "statement_id": 99, "vote": "agree"})
    return votes


def statements():
    told = [(n, f"statement {n} about {n % 5}", n % 2) for n in range(STATEMENTS)]
    names = ("statement_id", "statement", "moderated")
    return [dict(zip(names, row, strict=True)) for row in [*told, (99, "moderated out", -1)]]


@pytest.fixture
def files(tmp_path):
    return {
        "votes": write_rows(tmp_path / "votes.jsonl", conversation()),
        "statements": write_rows(tmp_path / "statements.jsonl", statements()),
    }


@pytest.fixture
def draw(files, tmp_path):
    def draw(**settings):
        sides = [tmp_path / f"{side}.jsonl" for side in ("train", "test")]
        made = {**files, "seed": 0, "train": str(sides[0]), "test": str(sides[1]), **settings}
        done = opinion_pairs(**made)
        return done, *(load_rows(str(side)) for side in sides)

    return draw


def votes_of(rows):
    return {(str(row["participant"]), row["statement_id"]): row["vote"] for row in rows}


def number(text):
    return int(text.split()[1])


def chosen_first(row):
    pair = [number(row["response_a"]), number(row["response_b"])]
    return pair if row["choice"] == "a" else pair[::-1]


@pytest.mark.parametrize("test_statements", ["own", "new"])
@pytest.mark.parametrize("pairs", ["contested", "all"])
def test_pairs_are_what_a_person_says_and_statements_are_on_one_side(draw, pairs, test_statements):
    done, train, test = draw(pairs=pairs, test_statements=test_statements)
    said = votes_of(conversation())
    sides = {}
    for side, rows in (("train", train), ("test", test)):
        assert len(rows) == done[side] > 0
        for row in rows:
            liked, disliked = chosen_first(row)
            assert said[row["client"], liked] == "agree"
            assert said[row["client"], disliked] == "disagree"
            sides.setdefault((row["client"], side), set()).update((liked, disliked))
        assert 0.4 < np.mean([row["choice"] == "a" for row in rows]) < 0.6
        assert len({(row["client"], *sorted(chosen_first(row))) for row in rows}) == len(rows)
    clients = {client for client, _ in sides}
    assert len(clients) == done["clients"] <= done["eligible"] <= done["people"] - done["jury"] == 30
    assert all(sides[client, "train"].isdisjoint(sides[client, "test"]) for client in clients)
    names = ("train", "test")
    trained, tested = (set().union(*(s for (_, of), s in sides.items() if of == side)) for side in names)
    assert trained.isdisjoint(tested) == (test_statements == "new")
    assert done["moderated_out"] == 1
    assert done["statements"] == STATEMENTS
    assert {row["group"] for row in train if row["client"] != "5"} <= {"0", "1"}


def test_only_the_jury_says_what_is_contested(draw, tmp_path):
    """The jury's votes decide by hand which pairs are there; a client's votes may be the opposite."""
    bounds = PairBounds(10, max_train=1000, max_test=1000)
    done, train, test = draw(jury=Jury(0.4, min_minority=0.35), bounds=bounds)
    assert done["jury"] == 24
    order = np.random.default_rng(derive_seed(0, "jury")).permutation(60)
    people = sorted({str(row["participant"]) for row in conversation()})
    jury = {people[index] for index in order[:24].tolist()}
    assert jury.isdisjoint({row["client"] for row in train})
    said = votes_of(conversation())
    allowed = set()
    for one, other in permutations(range(STATEMENTS), 2):
        ways = [
            sum((said.get((p, x)), said.get((p, y))) == ("agree", "disagree") for p in jury)
            for x, y in ((one, other), (other, one))
        ]
        if sum(ways) >= 8 and min(ways) >= 0.35 * sum(ways):
            allowed.add((one, other))
    assert {tuple(chosen_first(row)) for row in train + test} <= allowed
    # Both are in the half on which the groups are opposed.
    assert all(max(pair) < STATEMENTS // 2 for pair in allowed)
    # All of a client's allowed pairs are there.
    client = train[0]["client"]
    own = [row for row in train if row["client"] == client]
    seen = {s for row in own for s in chosen_first(row)}
    within = {(x, y) for x, y in allowed if {x, y} <= seen}
    expected = {(x, y) for x, y in within if (said[client, x], said[client, y]) == ("agree", "disagree")}
    assert {tuple(chosen_first(row)) for row in own} == expected


def test_heavy_voters_have_no_more_pairs_and_seeds_draw_others(draw):
    seven = {"pairs": "all", "bounds": PairBounds(7, max_train=12, max_test=5)}
    done, train, test = draw(**seven)
    for rows, most in ((train, 12), (test, 5)):
        counts = np.unique([row["client"] for row in rows], return_counts=True)[1]
        assert len(counts) == 7
        assert counts.max() == most
    assert done["eligible"] > 7
    assert draw(**seven)[1] == train
    other = draw(**seven, seed=1)[1]
    assert {row["client"] for row in other} != {row["client"] for row in train}


def test_what_the_jury_likes_is_a_share_of_its_votes(draw):
    _, _, test = draw(pairs="all")
    shares = {number(row[f"response_{s}"]): row[f"jury_{s}"] for row in test for s in "ab"}
    liked = [share for n, share in shares.items() if n >= STATEMENTS // 2 and n % 2 == 0]
    disliked = [share for n, share in shares.items() if n >= STATEMENTS // 2 and n % 2]
    assert min(liked) > 0.8
    assert max(disliked) < 0.2
    assert all(0.2 < share < 0.8 for n, share in shares.items() if n < STATEMENTS // 2)


def test_votes_are_read_once(tmp_path, files):
    rows = [*conversation(), {"participant": 0, "group": "0", "statement_id": 0, "vote": "pass"}]
    opinions = read_opinions(write_rows(tmp_path / "twice.jsonl", rows), files["statements"])
    assert opinions.repeated == 1
    person, statement = opinions.people.index("0"), opinions.texts.index("statement 0 about 0")
    assert opinions.votes[person, statement] == 0
    assert opinions.groups[opinions.people.index("5")] == ""
    assert opinions.votes.shape == (60, STATEMENTS)


def test_settings_out_of_range(draw):
    with pytest.raises(ValueError, match="pairs='contestd': did you mean 'contested'"):
        draw(pairs="contestd")
    with pytest.raises(ValueError, match=r"jury\.share=1 must lie between 0 and 1"):
        Jury(share=1)
    with pytest.raises(ValueError, match=r"jury\.share=0\.001 of 60 people is nobody: raise it"):
        draw(jury=Jury(share=0.001), pairs="all")
    with pytest.raises(ValueError, match=r"jury\.min_minority=0\.6"):
        Jury(min_minority=0.6)
    with pytest.raises(RowsError, match="0 people beside the jury have 500 training and 2 test pairs: lower"):
        draw(bounds=PairBounds(min_train=500, max_train=500))


def test_nobody_decided_is_not_contested():
    decided, is_contested = contested(np.zeros((3, 4), dtype=int), 1, 0.0)
    assert not decided.any()
    assert not is_contested.any()


RULES = [
    *("nothing learned", "the longer statement", "what the jury likes more"),
    *("Bradley-Terry", "Bradley-Terry, a factor by person"),
]
OWN = {"p": 1.0, "q": 0.5, "r": 0.75, "s": 0.25, "t": 0.75}
BIS = {"p": 0.5, "q": 0.5, "r": 0.5, "s": 0.0, "t": 1.0}


def folder(path, stage, accuracies, selectors=None):
    path.mkdir(parents=True)
    lines = [f"{stage},,{c},2,0,{(selectors or {}).get(c, '')},{x},{x}\n" for c, x in accuracies.items()]
    head = "stage,round,client,examples,group,selector,accuracy,own_accuracy\n"
    (path / "clients.csv").write_text(head + "".join(lines))
    return str(path)


def test_table_by_hand(tmp_path):
    margins = {"p": (0.9, 0.1), "q": (0.1, 0.9), "r": (0.5, 0.5), "s": (0.6, 0.4), "t": (0.4, 0.6)}
    groups = {"p": "0", "q": "0", "r": "1", "s": "1", "t": ""}
    texts = {"response_a": "same size", "response_b": "same too!"}
    pairs = [
        {"client": c, "group": groups[c], **texts, "choice": "a", "jury_a": a, "jury_b": b}
        for c, (a, b) in margins.items()
    ]
    test = write_rows(tmp_path / "test.jsonl", pairs)
    disliked = [{"client": "q", **texts, "choice": "b"}]  # what the two rules that learn have seen
    sides = write_rows(tmp_path / "train.jsonl", disliked), test
    selectors = {"p": 1, "q": 1, "r": 0, "s": 0, "t": 0}
    methods = {
        "FedBis": {"train": folder(tmp_path / "bis", "own", BIS)},
        "grouped": {"train": folder(tmp_path / "grouped", "own", OWN, selectors)},
    }
    rows = {row["method"]: row for row in opinion_table(methods, *sides)["rows"]}
    assert list(rows) == [*RULES, "FedBis", "grouped"]
    own = [rows[rule]["own"] for rule in RULES]
    assert own == pytest.approx([0.5, 0.5, (1 + 0 + 0.5 + 1 + 0) / 5, 0, 0])
    assert rows["grouped"]["own"] == pytest.approx(0.65)
    assert rows["grouped"]["worst_tenth"] == 0.25
    assert rows["grouped"]["gain"] == pytest.approx(0.15)
    assert rows["grouped"]["over_rule"] == pytest.approx(0.15)  # over the first of three rules that have 0.5
    assert rows["Bradley-Terry"]["over_rule"] == -0.5
    assert [rows["nothing learned"][f"over_rule{end}"] for end in ("", "_low", "_high")] == [0, 0, 0]
    assert rows["grouped"]["groups_ari"] == 1.0
    assert "gain" not in rows["FedBis"]
    assert "groups_ari" not in rows["FedBis"]
    # An independent bootstrap of people; both draw 2,000 and more times.
    gains = np.array([OWN[c] - BIS[c] for c in OWN])
    for name, values in (("own", np.array([*OWN.values()])), ("gain", gains)):
        found = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=0)
        interval = rows["grouped"][f"{name}_low"], rows["grouped"][f"{name}_high"]
        assert interval == pytest.approx(found.confidence_interval, abs=0.051)  # means are multiples of 0.05
    with pytest.raises(ValueError, match="against='FedBus' is no method: FedBis, grouped"):
        opinion_table(methods, *sides, against="FedBus")
    (tmp_path / "bis/clients.csv").write_text("stage,client,own_accuracy,selector\nown,p,1,\n")
    with pytest.raises(ValueError, match="accuracies of 1 clients, not of the 5 with test pairs"):
        opinion_table(methods, *sides)


def test_accuracies_of_both_orders_are_compared_where_all_methods_have_them(tmp_path):
    texts = {"response_a": "liked", "response_b": "not so", "jury_a": 1, "jury_b": 0}
    test = write_rows(tmp_path / "test.jsonl", [{"client": "p", "group": "", **texts, "choice": "a"}])
    head = "stage,client,selector,own_accuracy,own_both_orders"
    lines = {"bis": "own,p,,0.5,1.0", "grouped": "own,p,0,0.25,0.0", "single": "test,p,0,0.75,"}
    for name, line in lines.items():
        write_lines(tmp_path / name / "clients.csv", head, line)

    def own(*names):
        methods = {name: {"train": str(tmp_path / name), "test": str(tmp_path / name)} for name in names}
        found = opinion_table(methods, test, test, against=names[0])["rows"]
        return [row["own"] for row in found if row["method"] in names]

    assert own("bis", "grouped") == [1.0, 0.0]
    assert own("bis", "single") == [0.5, 0.75]


def test_lora_on_the_encoder_trains_on_the_pairs_of_the_recipe(draw, tmp_path, any_text):
    _, train, test = draw(bounds=PairBounds(6))
    ran(
        *("fit", "--config=polis_lora.yaml", f"--model.model={make_encoder(tmp_path / 'encoder')}"),
        *(f"--data.source={tmp_path / 'train.jsonl'}", f"--data.split.test_source={tmp_path / 'test.jsonl'}"),
        *(f"--trainer.default_root_dir={tmp_path / 'run'}", "--trainer.accelerator=cpu"),
        *("--trainer.max_epochs=3", "--federated.clients_per_round=2", "--federated.local_steps=1"),
        *("--data.batch_size=4", "--model.num_adapters=2", "--federated.algorithm=FedBiscuit"),
        "--federated.algorithm.warmup_rounds=1",
    )
    visits = table(tmp_path / "run/visits.csv")
    assert len(visits) == 3 * 2
    assert {row["client"] for row in train} >= {visit["client"] for visit in visits}
    own = [row for row in table(tmp_path / "run/clients.csv") if row["own_accuracy"]]
    assert sum(int(row["examples"]) for row in own) == 2 * len(test)  # each pair in both orders


def test_the_whole_recipe(files, tmp_path):
    options = [f"{name}={file}" for name, file in files.items()]
    ran(
        *("run", "polis", f"--output={tmp_path / 'out'}", "--seeds", "0", *options, "model=hashed"),
        *("rounds=8", "clients_per_round=6", "clients_at_once=6", "local_steps=2", "bounds.num_clients=8"),
        *("hidden=4", "warmup_rounds=1", "regroup_every=1", "global_rounds=5", "rounds_of_two_visits=4"),
        "rounds_of_soft=5",
        "batch_size=8",
        "lr=0.05",
    )
    run = tmp_path / "out/seed0"
    assert "FedRep" in (tmp_path / "out/seeds_0/figure/methods.svg").read_text()
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(recipes.load("polis")["stages"]["table"]["with"]["methods"]) + len(RULES)
    assert list(rows)[: len(RULES)] == RULES
    assert rows["nothing learned"]["own"] == 0.5
    for method, row in rows.items():
        assert 0 <= row["own_low"] <= row["own"] <= row["own_high"] <= 1
        assert ("gain" in row) == (method != "FedBis")
        assert ("groups_ari" in row) == ("U = " in method or "groups" in method)
    best = max(rows[rule]["own"] for rule in RULES)
    for row in rows.values():
        assert row["over_rule"] == pytest.approx(row["own"] - best)
    # All methods have as many visits and steps, pooled training steps on as many pairs as a round.
    stages = [path.name for path in run.iterdir() if (path / "visits.csv").is_file()]
    assert len(stages) >= 10
    for stage in stages:
        visits = table(run / stage / "visits.csv")
        assert len(visits) == 8 * 6
        assert sum(int(visit["steps"]) for visit in visits) == 8 * 6 * 2
    settings = json.loads((run / "pooled/settings.json").read_text())
    assert settings["trainer.max_epochs"] * settings["trainer.limit_train_batches"] == 8 * 2
    assert settings["data.init_args.batch_size"] == 6 * 8
    assert rows["pooled"]["sent_mib"] == 0 < rows["local only"]["sent_mib"] < rows["FedBis"]["sent_mib"]


def test_a_language_model_reads_both_orders_of_every_pair(files, tmp_path, tiny_model, any_text):
    options = [f"{name}={file}" for name, file in files.items()]
    ran(
        *("run", "polis_real", f"--output={tmp_path / 'out'}", "--seeds", "0"),
        *options,
        *(f"model={tiny_model}", "dtype=fp32", "num_clients=6", "rounds=4", "clients_per_round=2"),
        *("local_steps=1", "lora_rank=2", "batch_size=4", "warmup_rounds=1", "regroup_every=1"),
    )
    rows = rows_of(tmp_path / "out")
    methods = recipes.load("polis_real")["stages"]["table"]["with"]["methods"]
    assert [*rows] == [*RULES, *methods]
    tested = load_rows(str(tmp_path / "out/seed0/opinions/test.jsonl"))
    for method, folders in methods.items():
        stage = tmp_path / "out/seed0" / folders["train"].rpartition("/")[2]
        own = [row for row in table(stage / "clients.csv") if row["stage"] == "own"]
        assert sum(int(row["examples"]) for row in own) == 2 * len(tested)
        both = [float(row["own_both_orders"]) for row in own]
        assert rows[method]["own"] == pytest.approx(np.mean(both))
        assert ("groups_ari" in rows[method]) == ("U = " in method)


def dry_run(files, tmp_path, *changes):
    """All that a dry run says, and its exit code."""
    options = [f"{name}={file}" for name, file in files.items()]
    outcome = fedlight("run", "polis", f"--output={tmp_path / 'out'}", *options, *changes, "--dry-run")
    assert not (tmp_path / "out").exists()
    return "".join((outcome.out + outcome.err).split("\n")), outcome.code


OTHERS = [name for name in recipes.load("polis")["stages"] if name not in ("opinions", "fedbis")]
FEW = ["over_seeds.figure.when=false", *(f"stages.{name}.when=false" for name in OTHERS)]


def both_read(tmp_path, votes, of_statements, name="changed"):
    rows = write_rows(tmp_path / f"{name}.jsonl", votes)
    return read_opinions(rows, write_rows(tmp_path / f"{name}_statements.jsonl", of_statements))


def assert_same_opinions(one, other):
    assert (one.people, one.groups, one.texts) == (other.people, other.groups, other.texts)
    assert (one.moderated_out, one.repeated) == (other.moderated_out, other.repeated)
    np.testing.assert_array_equal(one.votes, other.votes)


def test_numbers_as_text_are_the_same_opinions(tmp_path, files):
    """A CSV file has text alone: its -1 is moderated out, and its statement 3 is that of a JSON file."""
    expected = read_opinions(**files)
    votes = [row | {"statement_id": str(row["statement_id"])} for row in conversation()]
    assert_same_opinions(both_read(tmp_path, votes, statements()), expected)
    lines = [",".join(map(str, row.values())) for row in statements()]
    file = write_lines(tmp_path / "statements.csv", "statement_id,statement,moderated", *lines)
    assert_same_opinions(read_opinions(files["votes"], file), expected)
    assert expected.moderated_out == 1


def test_pairs_do_not_depend_on_the_order_of_rows(draw, tmp_path):
    """Rows of a person with and without its group are in either order, too."""
    votes = conversation()
    votes[3]["group"] = None
    order = np.random.default_rng(1).permutation(len(votes))
    made = []
    for name, rows in (("as", votes), ("back", votes[::-1]), ("mixed", [votes[i] for i in order])):
        text = write_rows(tmp_path / f"{name}_s.jsonl", statements()[:: 1 if name == "as" else -1])
        made.append(draw(votes=write_rows(tmp_path / f"{name}.jsonl", rows), statements=text))
    assert made[0] == made[1] == made[2]
    assert made[0][0]["train"] > 0


def test_statements_without_text_have_no_votes(tmp_path, files):
    without = [row | ({"statement": None} if row["statement_id"] == 4 else {}) for row in statements()]
    found, expected = both_read(tmp_path, conversation(), without), read_opinions(**files)
    kept = [n for n, text in enumerate(expected.texts) if number(text) != 4]
    assert found.texts == [expected.texts[n] for n in kept]
    np.testing.assert_array_equal(found.votes, expected.votes[:, kept])
    assert found.moderated_out == 1


@pytest.mark.parametrize(
    ("vote", "statement", "message"),
    [
        ({"statement_id": 500}, {}, r"row 1: .*has no statement_id '500': give the statements of this conv"),
        ({"participant": None}, {}, "row 1: no participant"),
        ({"vote": None}, {}, "row 1: the vote '' is none of agree"),
        ({"vote": "maybe"}, {}, "row 1: the vote 'maybe' is none of agree, disagree, pass"),
        ({"group": "7"}, {}, "a participant has two groups, '7' and '0'"),
        ({}, {"statement_id": 1}, "row 2: the statement_id '1' appears twice"),
        ({}, {"moderated": "yes"}, "row 1: moderated='yes' is none of -1, 0, 1; -1 is moderated out"),
        ({}, {"moderated": None}, "row 1: moderated='' is none of -1, 0, 1"),
    ],
)
def test_rows_of_another_or_a_damaged_conversation(tmp_path, vote, statement, message):
    votes, of_statements = conversation(), statements()
    votes[0] |= vote
    of_statements[0] |= statement
    with pytest.raises(RowsError, match=message):
        both_read(tmp_path, votes, of_statements)


def test_a_dry_run_reads_both_files_and_names_what_is_missing(files, tmp_path):
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress((tmp_path / "votes.jsonl").read_bytes())[:100])
    other = write_rows(tmp_path / "other.jsonl", [{"statement_id": 1, "text": "no such column"}])
    said, code = dry_run(files, tmp_path, "model=hashed")
    assert code == 0, said
    for change, model, message in (
        ({}, "hashed", "the run can start"),
        ({}, tmp_path / "encoder", str(tmp_path / "encoder")),
        ({"votes": str(tmp_path / "nowhere.jsonl")}, "hashed", "nowhere.jsonl"),
        ({"votes": str(cut)}, "hashed", "damaged gzip"),
        ({"statements": other}, "hashed", "moderated"),
    ):
        said, code = dry_run(files | change, tmp_path, f"model={model}", *FEW)
        assert (code != 0) == (message != "the run can start"), said
        assert message in said, change
