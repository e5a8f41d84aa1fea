import collections

import pytest
import torch

from fedlight.callbacks.loop.checkpoint import HeldState


def state():
    ordered = collections.OrderedDict(weight=torch.ones(3))
    ordered._metadata = {"version": 1}
    seen = collections.Counter(a=2)  # whose update adds
    return {"module": ordered, "steps": [1, (torch.zeros(2), "a")], "none": None, "seen": seen}


def never(tensor):
    return False


def always(tensor):
    return True


@pytest.mark.parametrize(("may_refer", "copied_mib"), [(never, 0), (always, 1)])
def test_copies_stay_as_they_were(may_refer, copied_mib):
    given = state()
    held = HeldState(given, may_refer, copied_mib)
    given["module"]["weight"] += 1
    given["module"]["new"] = torch.ones(1)
    given["steps"][1][0].fill_(7)
    given["steps"].append(2)
    value = held.value()
    assert value["module"]["weight"].tolist() == [1, 1, 1]
    assert type(value["module"]) is collections.OrderedDict
    assert value["module"]._metadata == {"version": 1}
    assert list(value["module"]) == ["weight"]
    assert value["steps"][1][0].tolist() == [0, 0]
    assert value["steps"][1][1] == "a"
    assert value["none"] is None
    assert value["seen"] == collections.Counter(a=2)
    value["steps"].clear()
    value["module"].clear()
    assert len(held.value()["steps"]) == 2
    assert len(held.value()["module"]) == 1


def test_large_tensors_are_held_by_reference_and_may_be_replaced():
    given = {"large": torch.zeros(2**18), "small": torch.zeros(1)}  # 1 MiB

    def is_large(tensor):
        return tensor.numel() > 1

    held = HeldState(given, is_large, copied_mib=0.5)
    assert held.value()["large"].data_ptr() == given["large"].data_ptr()
    assert held.value()["small"].data_ptr() != given["small"].data_ptr()
    given["large"] = torch.ones(1)
    given["small"] += 1
    assert held.value()["large"].numel() == 2**18
    assert held.value()["small"].item() == 0
    assert HeldState(given, is_large, copied_mib=1).value()["large"].data_ptr() != given["large"].data_ptr()


def test_a_change_in_place_of_what_is_held_by_reference_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(4))
    held = HeldState({"state_dict": {"teacher": parameter}}, always, copied_mib=0)
    with torch.no_grad():
        parameter.mul_(2)
    with pytest.raises(ValueError, match=r"^state_dict.teacher was changed in place inside a round"):
        held.value()
    with torch.inference_mode():
        kept = torch.ones(1)
    assert HeldState([kept], always, copied_mib=0).value()[0].item() == 1


def test_meta_tensors_are_held_without_a_copy():
    assert HeldState([torch.empty(2, device="meta")], always, copied_mib=0).value()[0].is_meta


def test_what_will_change_is_copied_in_time_and_the_rest_stays_a_reference():
    given = {"joins": torch.zeros(4), "stays": torch.zeros(4)}
    held = HeldState(given, always, copied_mib=0)
    held.copy_those(lambda tensor: tensor.data_ptr() == given["joins"].data_ptr())
    given["joins"] += 1
    assert held.value()["joins"].tolist() == [0.0] * 4
    assert held.value()["stays"].data_ptr() == given["stays"].data_ptr()
    given["stays"] += 1
    with pytest.raises(ValueError, match=r"^stays was changed in place"):
        held.value()
