"""Naming another class drops what the old one was given: in configs, in files of parts, on the command line, at any depth.

`Ball` and `Box` both take `size`, each with a default of its own; a size of 7 was given to the one that was named before.
"""

import pytest
from jsonargparse import ArgumentParser, Namespace, _typehints
from tiny_world import fedlight, refused

from fedlight.lightning_cli.cli import OneLineParser, ReadSettings, find_config


class Thing:
    def __init__(self, size: int = 1, colour: str = "red"):
        self.size, self.colour = size, colour


class Ball(Thing):
    def __init__(self, size: int = 2, colour: str = "blue", inner: Thing | None = None):
        super().__init__(size, colour)


class Box(Thing):
    def __init__(self, size: int = 3, colour: str = "green", inner: Thing | None = None, lid: bool = False):
        super().__init__(size, colour)


class Bag(Thing):
    def __init__(self, size: int = 6, **others):
        super().__init__(size, **others)
        self.others = others


class Sack(Thing):
    def __init__(self, size: int = 8, **others):
        super().__init__(size, **others)
        self.others = others


def parser(made=OneLineParser):
    found = made(exit_on_error=False)
    found.add_argument("--config", action="config")
    found.add_subclass_arguments(Thing, "thing", required=False)  # as data, model and federated are
    found.add_argument("--things", type=list[Thing])
    found.add_argument("--named", type=dict[str, Thing])
    return found


@pytest.fixture
def parse(tmp_path):
    """Parses arguments; one that ends in .yaml is a file with the text behind it."""

    def parsed(*arguments, made=OneLineParser):
        given = []
        for number, argument in enumerate(arguments):
            option, mark, text = argument.partition("=yaml:")
            if mark:
                file = tmp_path / f"{number}.yaml"
                file.write_text(text)
                argument = f"{option}={file}"
            given.append(argument)
        return parser(made).parse_args(given)

    return parsed


BALL = "--config=yaml:thing: {class_path: Ball, init_args: {size: 7, colour: black}}"
CHANGES = {
    "on the command line": ["--thing=Box"],
    "on the command line, as a class_path": ["--thing.class_path=Box"],
    "on the command line, with arguments": ['--thing={"class_path": "Box", "init_args": {"lid": false}}'],
    "by a file of this part": ["--thing=yaml:class_path: Box"],
    "by a second config": ["--config=yaml:thing: {class_path: Box}"],
    "by a second config, as a name": ["--config=yaml:thing: Box"],
    "after an argument of the old class": ["--thing.size=9", "--thing=Box"],
    "there and back": ["--thing=Ball", "--thing=Box"],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_arguments_of_the_old_class_are_dropped(parse, change):
    thing = parse(BALL, *change).thing
    assert thing.class_path.endswith(".Box")
    assert thing.init_args == Namespace(size=3, colour="green", inner=None, lid=False)


def test_nothing_is_left_of_what_a_class_had_but_what_comes_after_holds(parse):
    thing = parse(BALL, "--thing=Box", "--thing=Ball").thing
    assert thing.init_args == Namespace(size=2, colour="blue", inner=None)
    thing = parse(BALL, "--thing=Box", "--thing.size=9", "--thing.lid=true").thing
    assert thing.init_args == Namespace(size=9, colour="green", inner=None, lid=True)
    thing = parse(BALL, "--config=yaml:thing: {class_path: Box, init_args: {size: 9}}").thing
    assert thing.init_args == Namespace(size=9, colour="green", inner=None, lid=False)
    assert parse(NESTED, "--thing=Box").thing.init_args.inner is None


@pytest.mark.parametrize(
    "change",
    [
        "--thing=Ball",
        f"--thing={__name__}.Ball",
        "--thing=yaml:class_path: Ball",
        "--thing.inner=null",
        f"--config=yaml:thing: {{class_path: {__name__}.Ball}}",
    ],
)
def test_the_same_class_keeps_them(parse, change):
    assert parse(BALL, change).thing.init_args == Namespace(size=7, colour="black", inner=None)


def test_a_class_by_two_paths_keeps_them(parse):
    """As fedlight.FedDCA and fedlight.augmentation.feddca.FedDCA are."""
    config = "class_path: Bag, init_args: {size: 7}, dict_kwargs: {colour: black, edge: 1}"
    same = f"--config=yaml:thing: {{class_path: {__name__}.Bag, dict_kwargs: {{edge: 2}}}}"
    thing = parse(f"--config=yaml:thing: {{{config}}}", same).thing
    assert (thing.init_args.size, thing.init_args.colour, thing.dict_kwargs) == (7, "black", {"edge": 2})


@pytest.mark.parametrize("change", ["--thing=Sack", "--config=yaml:thing: {class_path: Sack}"])
def test_arguments_that_no_signature_names_are_dropped_as_well(parse, change):
    thing = parse("--config=yaml:thing: {class_path: Bag, dict_kwargs: {edge: 1}}", change).thing
    assert "dict_kwargs" not in thing
    assert thing.init_args.size == 8


NESTED = (
    "--config=yaml:thing: {class_path: Ball, init_args: {size: 7, inner: {class_path: Ball, init_args: {size: 7, "
    "inner: {class_path: Ball, init_args: {size: 7}}}}}}"
)


@pytest.mark.parametrize(
    "change",
    [
        "--thing.inner.inner=Box",
        "--thing.init_args.inner.init_args.inner=Box",
        "--thing=yaml:class_path: Ball\ninit_args: {inner: {class_path: Ball, init_args: {inner: Box}}}",
        "--config=yaml:thing: {class_path: Ball, init_args: {inner: {class_path: Ball, init_args: {inner: Box}}}}",
    ],
)
def test_inside_other_classes_which_keep_theirs(parse, change):
    outer = parse(NESTED, change).thing
    inner = outer.init_args.inner
    assert (outer.init_args.size, inner.init_args.size) == (7, 7)
    assert inner.init_args.inner.class_path.endswith(".Box")
    assert inner.init_args.inner.init_args.size == 3


def test_in_lists_and_maps(parse):
    ball = "{class_path: Ball, init_args: {size: 7}}"
    config = f"--config=yaml:things: [{ball}, {ball}]"
    # jsonargparse joins lists of the same length, one by one.
    assert [one.init_args.size for one in parse(config, "--config=yaml:things: [Box, Ball]").things] == [3, 7]
    assert [one.init_args.size for one in parse(config, "--things+=Box").things] == [7, 7, 3]
    assert [one.init_args.size for one in parse(config, "--things=[Box]").things] == [3]
    config = f"--config=yaml:named: {{a: {ball}}}"
    for change in ("--config=yaml:named: {a: Box}", "--named.a=Box", '--named={"a": "Box"}'):
        assert parse(config, change).named["a"].init_args.size == 3


def test_other_parsers_of_the_process_are_as_they_were(parse):
    theirs = _typehints.discard_init_args_on_class_path_change
    assert theirs.__module__ == "jsonargparse._typehints"
    parse(BALL, "--thing=Box")
    with pytest.raises(Exception, match="Bxo"):
        parse(BALL, "--thing=Bxo")
    assert _typehints.discard_init_args_on_class_path_change is theirs
    assert parse(BALL, "--thing=Box", made=ArgumentParser).thing.init_args.size == 7


# The same in the configs of fedlight.

ENCODER = ["--data.augmentation.encoder=HashedEncoder", "--data.augmentation.number=50"]


def settings(*arguments, command="fit"):
    """All settings of a command; nothing is made of them. Plans and dry runs read them in this way, too."""
    return ReadSettings([find_config(argument) for argument in (command, *arguments)]).config[command]


def test_direct_retrieval_in_place_of_feddca_has_no_alpha():
    config = settings("--config=feddca.yaml")
    assert config.data.init_args.augmentation.init_args.alpha == 0.7
    change, alpha = ["--data.augmentation=DirectRetrieval", *ENCODER], "--data.augmentation.alpha=0.9"
    for arguments, expected in ((change, None), ([alpha, *change], None), ([*change, alpha], 0.9)):
        direct = settings("--config=feddca.yaml", *arguments).data.init_args.augmentation
        assert direct.class_path.endswith(".DirectRetrieval")
        assert direct.init_args.alpha == expected
        assert (direct.init_args.number, direct.init_args.clusters) == (50, 10)
    same = settings("--config=feddca.yaml", "--data.augmentation=fedlight.FedDCA")
    assert same.data.init_args.augmentation.init_args == config.data.init_args.augmentation.init_args


REWARD = ["--config=selector.yaml", "--model=RewardModule"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config=feddca.yaml", "--data.augmentation=DirectRetrieval"],
            "data.augmentation: DirectRetrieval needs encoder and number, for example --data.augmentation.encoder ENCODER "
            "--data.augmentation.number 1; what FedDCA was given as encoder and number is not carried over to another "
            "class: give it again, after the class",
        ),
        (
            REWARD,
            "for example --model.model TEXT; what SelectorModule was given as model is not carried over",
        ),
        (
            [*REWARD, "--model.model=toy", "--federated.aggregation=PrivateMean"],
            "federated.aggregation: PrivateMean needs clip_norm, for example",
        ),
    ],
    ids=["augmentation", "model", "no class before"],
)
def test_what_the_new_class_needs_is_named(arguments, message):
    line = refused(fedlight("fit", *arguments))
    assert message in line
    assert ("carried over" in line) is ("carried over" in message)


def test_another_data_module_keeps_nothing_of_the_old_one():
    """Both take a tokenizer, max_tokens, batch_size and the sources."""
    arguments = ["--config=selector.yaml", "--data=InstructionDataModule", "--data.source=x"]
    data = settings(*arguments, command="validate").data.init_args
    assert (data.source, data.split.test_source, data.tokenizer) == ("x", None, "toy")
    assert (data.max_tokens, data.split.val_share) == (512, 0.05)  # its own; selector.yaml has 128


def test_the_algorithm_inside_an_algorithm():
    config = settings("--config=fedbiscuit.yaml", "--federated.algorithm=FedProx").federated.init_args
    # fedbiscuit.yaml: normalized
    assert config.algorithm.init_args == Namespace(mu=0.01, weighting="unbiased")
    before = settings("--config=fedbiscuit.yaml").federated.init_args
    assert config.clients_per_round == before.clients_per_round
