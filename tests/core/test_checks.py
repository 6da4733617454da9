import pytest
import torch

from moe_ops.core import checks

X = torch.zeros(4, 8)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: checks.is_tensor("op", "x", [1]), TypeError, "op: x must be a torch.Tensor, got list"),
        (lambda: checks.dtype("op", "x", X, (torch.bfloat16, torch.float16)), TypeError, "op: x must be bfloat16 or float16, got float32"),
        (lambda: checks.ndim("op", "x", X, (1, 3)), ValueError, "op: x must be 1-D or 3-D, got shape (4, 8) with strides (8, 1)"),
        (lambda: checks.shape("op", "x", X, (None, 9)), ValueError, "op: x must have shape (*, 9), got shape (4, 8) with strides (8, 1)"),
        (lambda: checks.shape("op", "x", X, (4, 8, 1)), ValueError, "op: x must have shape (4, 8, 1), got shape (4, 8)"),
        (lambda: checks.last_stride_one("op", "x", X.t()), ValueError, "op: x must have last stride 1, got shape (8, 4) with strides (1, 8)"),
        (lambda: checks.contiguous("op", "x", X[:, :4]), ValueError, "op: x must be contiguous, got shape (4, 4) with strides (8, 1)"),
        (lambda: checks.same_device("op", x=X, y=X.to("meta")), ValueError, "op: y is on meta but x is on cpu; all tensors must be on one device"),
        (lambda: checks.same_device("op", x=None), ValueError, "op: no tensor given"),
        (lambda: checks.no_grad("op", x=torch.zeros(1, requires_grad=True)), ValueError, "op: x requires grad, and this op is for inference only"),
        (
            lambda: checks.one_of("op", "score", "tanh", ("softmax", "sigmoid")),
            ValueError,
            "op: score must be one of 'softmax', 'sigmoid', got 'tanh'",
        ),
        (lambda: checks.int_range("op", "top_k", 0, 1, 32), ValueError, "op: top_k must be between 1 and 32, got 0"),
        (lambda: checks.int_range("op", "top_k", True, 1, 32), TypeError, "op: top_k must be an int, got bool"),
        (lambda: checks.int_range("op", "top_k", 2.0, 1, 32), TypeError, "op: top_k must be an int, got float"),
        (lambda: checks.device_counts("op", "counts", torch.zeros(4, dtype=torch.int64)), TypeError, "op: counts must be int32, got int64"),
        (
            lambda: checks.device_counts("op", "counts", torch.zeros(4, dtype=torch.int32), 3),
            ValueError,
            "op: counts must be 1-D with 3 entries, got shape (4,)",
        ),
        (
            lambda: checks.device_counts("op", "counts", torch.zeros(8, dtype=torch.int32)[::2]),
            ValueError,
            "op: counts must be contiguous, got shape (4,) with strides (2,)",
        ),
    ],
)
def test_error_names_op_argument_what_came_and_what_is_accepted(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


def test_right_arguments_pass():
    checks.is_tensor("op", "x", X)
    checks.dtype("op", "x", X, (torch.float32,))
    checks.ndim("op", "x", X, (2,))
    checks.shape("op", "x", X, (None, 8))
    checks.last_stride_one("op", "x", X[::2])
    checks.last_stride_one("op", "x", torch.zeros(3, 8)[:, :1])  # one column: its stride says nothing
    checks.contiguous("op", "x", X)
    checks.one_of("op", "x", 1, (1, 2))
    checks.int_range("op", "x", 32, 1, 32)
    checks.device_counts("op", "x", torch.zeros(3, dtype=torch.int32), 3)
    assert checks.same_device("op", a=None, x=X, y=X).type == "cpu"
    with torch.no_grad():
        checks.no_grad("op", x=torch.zeros(1, requires_grad=True))


@pytest.mark.gpu
def test_two_devices_are_named():
    with pytest.raises(ValueError, match="op: y is on cpu but x is on cuda:0"):
        checks.same_device("op", x=X.cuda(), y=X)
