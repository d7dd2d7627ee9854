from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Bounded, Emitter, Tensor


def test_a_tensor_of_a_bounded_size_is_static() -> None:
    rows = Bounded("%rows", 64)
    assert Tensor("%x", (rows, 8), "f32").sized_type == "tensor<64x8xf32>"
    assert Tensor("%x", ("%rows", 8), "f32").sized_type == "tensor<?x8xf32>{%rows}"


def test_a_dispatch_gets_the_number_itself() -> None:
    e = Emitter()
    rows = Bounded("%rows", 64)
    e.dispatch("kernel", [rows], [rows], [], [((rows, 8), "f32")])
    [cast, dispatch] = e.lines
    assert "index_cast %rows" in cast
    assert "[%rows]" in dispatch
    assert dispatch.endswith("-> (tensor<64x8xf32>)")


def test_a_bounded_matrix_is_cut_and_made_in_its_static_size() -> None:
    e = Emitter()
    rows = Bounded("%rows", 64)
    e.columns(Tensor("%x", (rows, 8), "f32"), 2, 4)
    e.empty((rows, 8), "f32")
    assert e.lines == [
        "%v1 = tensor.extract_slice %x[0, 2] [64, 4] [1, 1] : tensor<64x8xf32> to tensor<64x4xf32>",
        "%v2 = tensor.empty() : tensor<64x8xf32>",
    ]
