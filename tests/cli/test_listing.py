"""Lists of methods and devices: they name what there is."""

from tiny_world import fedlight, refused

from fedlight.conf import path as conf_path
from fedlight.lightning_cli.class_names import CLASS_FILES


def test_methods_names_every_algorithm_augmentation_and_recipe_with_a_line_of_its_own():
    lines = fedlight("methods").out.splitlines()
    firsts = {line.split()[0] for line in lines if line.strip()}
    of_federation = {name for name, file in CLASS_FILES.items() if file.startswith("federation.algorithms")}
    assert of_federation | {"FedDCA", "LESS", "GSM8K", "MemoryExtraction", "OracleJudge"} <= firsts
    assert {file.stem for file in conf_path("recipes").glob("*.yaml")} <= firsts
    assert all(len(line.split()) > 1 for line in lines if line.split()[:1] == ["FedProx"])
    assert not {"Sampling", "Completions", "Task", "Attack"} & firsts
    assert not [line for line in lines if line.rstrip().endswith(("(eq", ": eq"))]


def test_devices_names_every_profile_and_fleet_and_lists_take_no_arguments():
    lines = fedlight("devices").out.splitlines()
    found = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert {file.stem for file in conf_path("devices").rglob("*.yaml")} <= found.keys()
    assert found["iphone_xr"][1:5] == ["3", "0.56", "56", "17"]
    assert "takes no arguments: leave out x" in refused(fedlight("methods", "x"))
    assert fedlight("devices", "--help").out.splitlines()[:2] == ["usage: fedlight devices", ""]
    assert "iphone_xr" in fedlight("devices", "-h").out


def test_the_page_of_keys_has_a_line_for_each_of_fedlights_own_before_lightnings():
    page = fedlight("fit", "--help").out.splitlines()
    heads = ("federated:", "trainer:")
    start, end = (next(i for i, line in enumerate(page) if line.startswith(head)) for head in heads)
    own = [line for line in page[start:end] if line.startswith("  --")]
    assert 40 < len(own) <= 62
    assert len(own) + 8 >= end - start  # headings and blank lines apart
    assert max(map(len, own)) <= 120
