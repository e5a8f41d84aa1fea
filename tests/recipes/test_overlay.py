import pytest

from fedlight.recipes import recipe as recipes
from fedlight.recipes.overlay import merge_recipes, set_in

PROX = {"class_path": "FedProx", "init_args": {"mu": 0.5}}


def told(tmp_path, *layers):
    """The config of the last of stages that are each like the one before."""
    stages = {"0": {"fit": "feddca.yaml", "with": layers[0]}}
    stages |= {str(n): {"like": str(n - 1), "with": layer} for n, layer in enumerate(layers) if n}
    return recipes.stages({"stages": stages}, tmp_path, 0)[-1].config()


@pytest.mark.parametrize("key", ["federated.algorithm", "federated.init_args.algorithm"])
@pytest.mark.parametrize("mu", ["federated.algorithm.mu", "federated.init_args.algorithm.init_args.mu"])
def test_places_mean_the_same_with_and_without_init_args(tmp_path, key, mu):
    def algorithm(*layers):
        return told(tmp_path, *layers)["federated"]["init_args"]["algorithm"]

    assert algorithm({mu: 0.5, key: "FedProx"}) == algorithm({key: "FedProx", mu: 0.5}) == PROX
    scaffold = {"class_path": "Scaffold"}
    for place, other in (("", "Scaffold"), ("", scaffold), (".class_path", "Scaffold")):
        assert algorithm({key: "FedProx", mu: 0.5}, {f"federated.algorithm{place}": other}) == scaffold
    for other in ("federated.algorithm.mu", "federated.algorithm.init_args.mu"):
        assert algorithm({key: "FedProx", mu: 0.5}, {other: 0.1})["init_args"] == {"mu": 0.1}


@pytest.mark.parametrize(
    ("below", "above", "found"),
    [
        ({"trainer.max_epochs": 3}, {"trainer": {"max_epochs": 5}}, ("trainer", "max_epochs", 5)),
        ({"trainer": {"max_epochs": 3}}, {"trainer": {"logger": None}}, ("trainer", "max_epochs", 3)),
        ({"trainer.max_epochs": 3}, {"trainer": {"logger": None}}, ("trainer", "max_epochs", 3)),
        ({"data.limit": 7}, {"data.init_args": {"limit": 5}}, ("data", "init_args", "limit", 5)),
        ({"data.limit": 7}, {"data.init_args": {"seed": 5}}, ("data", "init_args", "limit", 7)),
        ({"data.limit": 7}, {"data": {"init_args": {"limit": 5}}}, ("data", "init_args", "limit", 5)),
        (
            {"data.columns.old": "o"},
            {"data.columns": {"a": "i"}},
            ("data", "init_args", "columns", {"a": "i"}),
        ),
    ],
    ids=str,
)
def test_the_later_value_holds(tmp_path, below, above, found):
    *place, value = found
    config = told(tmp_path, below, above)
    for part in place:
        config = config[part]
    assert config == value


@pytest.mark.parametrize("value", [{"init_args": {"local_steps": 7}}, {"local_steps": 7}], ids=str)
def test_a_map_without_a_class_changes_the_class_that_is_there(tmp_path, value):
    before = told(tmp_path, {})["federated"]
    after = told(tmp_path, {"federated": value})["federated"]
    assert after == {**before, "init_args": {**before["init_args"], "local_steps": 7}}


def test_a_place_inside_of_a_list_or_a_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"stage 0: with trainer.callbacks.0.x: .* a list there: give it wh"):
        told(tmp_path, {"trainer.callbacks.0.x": 1})
    with pytest.raises(ValueError, match="the config has 30 there"):
        set_in({"trainer": {"max_epochs": 30}}, "trainer.max_epochs.x", 1)


def test_a_plus_adds_to_a_list(tmp_path):
    def callbacks(*layers):
        return told(tmp_path, *layers)["trainer"]["callbacks"]

    before = callbacks({})
    assert len(before) > 1
    assert callbacks({"trainer.callbacks+": ["A"]}) == [*before, "A"]
    a = {"class_path": "A"}
    assert callbacks({"trainer.callbacks+": a, "trainer.callbacks": ["B"]}) == ["B", a]
    assert callbacks({"trainer.callbacks+": ["A"]}, {"trainer.callbacks": ["B"]}) == ["B"]
    assert callbacks({"trainer.callbacks": ["B"]}, {"trainer.callbacks+": ["A"]}) == ["B", "A"]


def test_a_recipe_that_extends_another_drops_what_was_said_of_a_class_that_it_replaces():
    below = {"s": {"with": {"a": PROX, "a.mu": 0.7, "a.init_args.weighting": "x", "b.c": 1}}}
    changed = merge_recipes(below, {"s": {"with": {"a": {"class_path": "Scaffold"}}}})
    assert changed["s"]["with"] == {"a": {"class_path": "Scaffold"}, "b.c": 1}
    prox = {"class_path": "fedlight.FedProx", "init_args": {"mu": 0.1}}
    same = merge_recipes(below, {"s": {"with": {"a": prox}}})
    assert same["s"]["with"] == {"a": prox, "a.init_args.weighting": "x", "b.c": 1}
    reference = merge_recipes({"with": {"data": "${x}", "data.limit": 3}}, {"with": {"data": "${x}"}})
    assert reference["with"] == {"data": "${x}", "data.limit": 3}


@pytest.mark.parametrize(
    "override",
    ["augmentations.feddca.class_path=DirectRetrieval", "augmentations.feddca={class_path: DirectRetrieval}"],
)
def test_another_class_on_the_command_line_of_a_recipe_takes_nothing_along(override):
    more = "augmentations.feddca.init_args.number=7"
    found = recipes.load("feddca", [override, more])["augmentations"]["feddca"]
    assert found == {"class_path": "DirectRetrieval", "init_args": {"number": 7}}
    same = recipes.load("feddca", ["augmentations.feddca.class_path=fedlight.FedDCA", more])
    assert same["augmentations"]["feddca"]["init_args"]["alpha"] == "${alpha}"


@pytest.mark.parametrize(
    "text",
    [
        *("Question # {instruction}", "# a", "Q {instruction}\nA", "a\n\nb", " x ", " ", "{instruction}"),
        *("POST : {instruction} {input}\nCHOICE :", "it's", "é\t{x}"),
    ],
    ids=repr,
)
def test_texts_on_the_command_line_of_a_recipe_are_kept_as_written(text):
    assert recipes.load("feddca", [f"template={text}"])["template"] == text
    source = f"domains.code.source={text}"
    assert recipes.load("feddca_table2", [source])["domains"]["code"]["source"] == text


@pytest.mark.parametrize(
    ("text", "value"),
    [("'a # b'", "a # b"), ('"a\\nb"', "a\nb"), ("null", None), ("", None), ("3", 3), ("[a, b]", ["a", "b"])],
    ids=repr,
)
def test_quotes_and_other_kinds_of_values_are_yaml(text, value):
    assert recipes.load("feddca", [f"template={text}"])["template"] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("template=${", r"'template=\$\{': no viable .*; a reference is written as \$\{seed\}$"),
        ("domains.code.others[0]=x", "changes a part of a list: give the whole list"),
        ("domains.code.others.0=x", "changes a part of a list: give the whole list"),
    ],
)
def test_overrides_that_mean_nothing(override, message):
    with pytest.raises(ValueError, match=message):
        recipes.load("feddca_table2", [override])
