import pytest
import torch

from moe_ops.core.ops import register


def _double(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _double_fake(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _fill(out: torch.Tensor, value: float) -> None:
    out.fill_(value)


def _fill_fake(out: torch.Tensor, value: float) -> None:
    return None


double = register("test_double", cuda=_double, cpu=_double, fake=_double_fake)
fill = register("test_fill", cuda=_fill, cpu=_fill, fake=_fill_fake, mutates=("out",))


def test_schema_comes_from_the_fake():
    assert str(double._schema) == "moe_ops::test_double(Tensor x, float factor) -> Tensor"
    assert str(fill._schema) == "moe_ops::test_fill(Tensor(a0!) out, float value) -> ()"


def test_opcheck(device):
    torch.library.opcheck(double, (torch.randn(3, 4, device=device), 2.0))
    torch.library.opcheck(fill, (torch.zeros(3, device=device), 2.0))


def test_compiles_as_one_node_with_a_dynamic_size():
    seen = []

    def backend(graph, inputs):
        seen.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    compiled = torch.compile(lambda x: torch.ops.moe_ops.test_double(x, 3.0), backend=backend, fullgraph=True, dynamic=True)
    for rows in (2, 3, 5):
        assert torch.equal(compiled(torch.ones(rows, 7)), torch.full((rows, 7), 3.0))
    assert len(seen) == 1 and len(seen[0]) == 1
    torch._dynamo.reset()


@pytest.mark.multigpu
def test_op_runs_on_the_device_of_its_tensors():
    where = []

    def note(x: torch.Tensor) -> torch.Tensor:
        where.append(torch.cuda.current_device())
        return x.clone()

    op = register("test_where", cuda=note, cpu=note, fake=note)
    op(torch.zeros(1, device="cuda:1"))
    assert where == [1] and torch.cuda.current_device() == 0
