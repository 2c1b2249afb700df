import copy

import pytest
import torch
from tiny import make_drafter, make_target, ragged_prompts
from torch import nn

from adaflash_hf.kernels.packed_linear import (
    HalfPackedLinear,
    PackedLinear,
    can_pack,
    can_pack_half,
    pack_linear_weights,
    packed_function,
)


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch build has no oneDNN")


@pytest.mark.parametrize("rows", [(1,), (3,), (2, 5), (17,)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_linear(rows, bias):
    layer = nn.Linear(31, 45, bias=bias)
    x = torch.randn(*rows, 31)
    expected = layer(x)
    function = packed_function(layer.weight, layer.bias)
    torch.testing.assert_close(function(x), expected, rtol=1e-5, atol=1e-5)
    assert pack_linear_weights(layer) == 1 and type(layer) is PackedLinear
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        strided = torch.randn(31, 8).t()
        torch.testing.assert_close(layer(strided), nn.functional.linear(strided, layer.weight, layer.bias))


def test_gradients_use_the_parameters():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    plain = copy.deepcopy(layer)
    pack_linear_weights(layer)
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_what_cannot_be_packed_is_left_alone():
    assert not can_pack(torch.randn(4, 4, dtype=torch.float64))
    assert not can_pack(torch.randn(4, 4, device="meta"))
    assert pack_linear_weights(nn.Linear(4, 4).double()) == 0


def test_bfloat16_is_left_alone_where_onednn_does_not_compute_in_it(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert pack_linear_weights(nn.Linear(4, 4).bfloat16()) == 0


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this processor"
)
@pytest.mark.parametrize("rows", [(1,), (2, 5), (17,)])
def test_bfloat16_is_packed_as_such(rows):
    layer, x = nn.Linear(31, 45).bfloat16(), torch.randn(*rows, 31, dtype=torch.bfloat16)
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert pack_linear_weights(layer, half=True) == 1 and type(layer) is PackedLinear
    with torch.no_grad():
        assert layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x).double(), expected, rtol=2e-2, atol=2e-2)


def test_packed_models_generate_as_packed_plain():
    target, drafter = make_target(), make_drafter(draft_vocab_size=20)
    ids, mask = ragged_prompts()
    unpacked = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    saved = {key: value.clone() for key, value in target.state_dict().items()}
    assert pack_linear_weights(target) == 4 * 7 + 1 and pack_linear_weights(drafter) > 0
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    ours = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    assert torch.equal(ours, plain) and torch.equal(plain, unpacked)
    assert all(torch.equal(value, saved[key]) for key, value in target.state_dict().items())


has_half = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch build has no FBGEMM"
)


@has_half
@pytest.mark.parametrize("bias", [True, False])
def test_half_rounds_the_weight_only(bias):
    layer, x = nn.Linear(31, 45, bias=bias), torch.randn(2, 5, 31)
    expected = nn.functional.linear(x, layer.weight.half().float(), layer.bias)
    function = packed_function(layer.weight, layer.bias, half=True)
    assert pack_linear_weights(layer, half=True) == 1 and type(layer) is HalfPackedLinear
    with torch.no_grad():
        torch.testing.assert_close(function(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert pack_linear_weights(layer) == 1 and type(layer) is PackedLinear


@pytest.mark.parametrize("half", [False, True])
def test_a_packed_model_can_be_copied(half):
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    pack_linear_weights(layer, half)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_rows_are_packed_once_and_anew_when_they_must():
    layer, x = nn.Linear(8, 20), torch.randn(3, 8)
    pack_linear_weights(layer)
    index = torch.tensor([1, 5, 19])
    with torch.no_grad():
        first = layer.rows(index)
        torch.testing.assert_close(first(x), layer(x)[:, index])
        assert layer.rows(index.clone()) is first
        other = layer.rows(torch.tensor([2, 3, 4]))
        torch.testing.assert_close(other(x), layer(x)[:, 2:5])
        layer.weight.zero_()
        pack_linear_weights(layer)
        torch.testing.assert_close(layer.rows(torch.tensor([2, 3, 4]))(x), layer.bias[2:5].expand(3, 3))


@has_half
def test_a_weight_beyond_float16_stays_float32():
    layer = nn.Linear(4, 4)
    layer.weight.data[0, 0] = 1e5
    assert not can_pack_half(layer.weight)
    assert pack_linear_weights(layer, half=True) == 1 and type(layer) is PackedLinear


@has_half
@pytest.mark.parametrize("head", [None, "survival"])
def test_a_half_packed_drafter_changes_no_output(head):
    target, drafter = make_target(), make_drafter(draft_vocab_size=20, head=head)
    ids, mask = ragged_prompts()
    pack_linear_weights(target)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    assert pack_linear_weights(drafter, half=True) > 0
    ours = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    assert torch.equal(ours, plain)
    ids = ids[mask.all(dim=1)][:1]
    theirs = target.generate(
        ids, do_sample=False, max_new_tokens=12, assistant_model=drafter, speculation_type="dflash"
    )
    assert torch.equal(theirs, target.generate(ids, do_sample=False, max_new_tokens=12))
