"""How a launcher becomes an operator."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

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


CHAINS = {"reference": ("reference", "reference"), "triton": ("vectorized", "split_kv")}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("chain", CHAINS)
def test_compiled_attention_is_one_graph_and_copies_no_cache(chain) -> None:
    """Inductor, with the kernels as opaque operators inside, changes the caches in place."""
    write, attention = (
        importlib.import_module(f"cbtriton.kernels.{slot}.{name}")
        for slot, name in zip(("kv_write", "decode_attention"), CHAINS[chain], strict=True)
    )
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    rows, seq_lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    cu_seqlens_q, slots = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([8, 19])
    query, key, value = torch.randn(3, 2, 2, 16)

    def layer(query, key_cache, value_cache):
        write.kv_write(key, value, key_cache, value_cache, slots)
        plan = attention.plan(tables, rows, cu_seqlens_q, seq_lens, 4, 8)
        out = attention.decode_attention(
            query * 2, key_cache, value_cache, tables, rows, seq_lens, plan, 0.25, 0, 0, 0.0, None, None, 8
        )
        return out + 1

    caches = [torch.randn(37, 4, 2, 16, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    expected_caches = [cache.clone() for cache in caches]
    expected = layer(query, *expected_caches)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    got, code = run_and_get_code(compiled, query, *caches)
    torch.testing.assert_close(got, expected)
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0)
    allocated = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", "\n".join(code))
    assert not [shape for shape in allocated if shape.startswith("37,")]
    assert "clone" not in "\n".join(code)
