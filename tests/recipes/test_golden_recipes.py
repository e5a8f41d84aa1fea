import json

import pytest
from golden_recipes import FILE, digests, names, new_to_the_parser, parsed, unlike

pytestmark = pytest.mark.slow  # parses the commands of every recipe

GOLDEN = json.loads(FILE.read_text())
RENEW = "if that is meant, renew: python tests/support/golden_recipes.py; to see it: ... golden_recipes.py NAME STAGE"


def test_every_recipe_has_its_golden_value():
    assert names() == list(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_what_a_recipe_says_is_what_its_commands_hear(name):
    for stage in new_to_the_parser()[name]:
        assert unlike(stage.config(), parsed(stage)) == [], f"{name}, {stage.name}"
    found = digests(name)
    changed = {stage for stage in {*found, *GOLDEN[name]} if found.get(stage) != GOLDEN[name].get(stage)}
    assert not changed, f"{name}: other settings than when these were written down; {RENEW}"
