from __future__ import annotations

from shortfin_apps.llm.builder.kernels.interface import Interface, Regions, buffer


def test_a_named_size_is_dynamic() -> None:
    blocks = buffer("i64", "rows", "width")
    assert (blocks.type, blocks.sizes) == ("memref<?x?xi64>", ["rows", "width"])
    assert (buffer("f32", 64).type, buffer("f32", 64).sizes) == ("memref<64xf32>", [])


def test_bindings_stand_in_the_order_of_their_ordinals() -> None:
    x, y = buffer("f32", "rows", 64), buffer("bf16", "rows", 64)
    interface = Interface(constants=("rows", "layer"), reads={"x": x}, writes={"y": y})
    assert interface.types == {"x": "memref<?x64xf32>", "y": "memref<?x64xbf16>"}
    assert interface.layout == (
        "#hal.pipeline.layout<constants = 2, bindings = [#hal.pipeline.binding<storage_buffer, ReadOnly>, "
        "#hal.pipeline.binding<storage_buffer>]>"
    )


def test_regions_follow_one_another() -> None:
    regions = Regions({"config": 64, "nothing": 0, "sums": 128})
    assert regions.offsets == {"config": 0, "nothing": 64, "sums": 64}
    assert regions.bytes == 192
