"""How a launcher becomes an operator."""

from __future__ import annotations

import pytest
import torch

from cbtriton.kernels._op import kernel_op
from cbtriton.kernels.kv_write.reference import kv_write


def test_a_launcher_imported_from_outside_the_package_is_refused() -> None:
    with pytest.raises(ImportError, match=r"sys\.path"):

        @kernel_op("never_registered")
        def launcher(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    assert not hasattr(torch.ops.cbtriton, "never_registered")


def test_the_compiler_sees_one_opaque_operator() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    key = torch.randn(3, 2, 8)
    caches = [torch.zeros(2, 4, 2, 8) for _ in range(4)]
    slots = torch.tensor([5, -1, 0])
    torch.compile(kv_write, backend=backend, fullgraph=True)(key, key + 1, caches[0], caches[1], slots)
    kv_write(key, key + 1, caches[2], caches[3], slots)

    (graph,) = graphs
    assert any(node.target in (kv_write.op, kv_write.op.overloadpacket) for node in graph.graph.nodes)
    torch.testing.assert_close(caches[0], caches[2], rtol=0, atol=0)
    torch.testing.assert_close(caches[1], caches[3], rtol=0, atol=0)


def test_eager_calls_give_what_the_operator_gives() -> None:
    key = torch.randn(3, 2, 8)
    direct, dispatched = torch.zeros(2, 2, 4, 2, 8)
    slots = torch.tensor([5, -1, 0])
    kv_write(key, key, direct, direct.clone(), slots)
    kv_write.op(key, key, dispatched, dispatched.clone(), slots)
    torch.testing.assert_close(direct, dispatched, rtol=0, atol=0)
    assert direct.any()
