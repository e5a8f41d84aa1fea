import torch
from torch.nn import functional

from fedlight.devices.shape_run import ShapeRun


def test_what_others_put_in_place_of_attention_stays(monkeypatch):
    original, calls = functional.scaled_dot_product_attention, []

    def patched(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", patched)
    x = torch.randn(1, 2, 3, 4)
    with ShapeRun():
        out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert functional.scaled_dot_product_attention is patched
    assert len(calls) == 1  # what has values is computed as ever
    torch.testing.assert_close(out, original(x, x, x, is_causal=True))


def test_attention_on_meta_keeps_no_weights():
    x = torch.empty(1, 2, 300, 4, device="meta")
    with ShapeRun([x]) as counted:
        functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert counted.flops == 2 * 2 * 2 * 300 * 300 * 4
    assert counted.peak_bytes < 2 * 300 * 300 * 4  # of the weights
