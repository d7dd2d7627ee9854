// IREE 3.9 for GPUs: a reduction over more than 4,096 elements of a dynamic dimension is wrong.
//
// It is spread over a workgroup: the loop is padded to a multiple of 4,096 and tiled by that, and a
// comparison of `linalg.index` with the dimension drops the padding. Tiling does not add the offset of the
// tile to `linalg.index`. So from the second tile on, an index that the program asks for is too small, and
// the padding of the last tile, which is what the registers held before, is not dropped.
//
//   iree-compile partial_reduction.mlir --iree-hal-target-device=hip --iree-hip-target=gfx942 -o sums.vmfb
//   iree-run-module --device=hip --module=sums.vmfb --function=FUNCTION --input=INPUT
//
//   FUNCTION         INPUT         expected   IREE 3.9.0
//   sum              4096xi32=1        4096   4096
//   sum              5000xi32=1        5000   6632 for gfx942, 5990 for gfx1100
//   sum_of_indices   4096xi32=0     8386560   8386560
//   sum_of_indices   8192xi32=0    33550336   16773120
//
// A static dimension is not padded, as its tiles divide it, but with several tiles its indices are wrong too.
// LLVM mended this in March 2026 (https://github.com/llvm/llvm-project/pull/188261), and IREE 3.13.0 gives
// the expected numbers for gfx942 (its flag is --iree-rocm-target). All this was run on an emulated GPU.

func.func @sum(%x: tensor<?xi32>) -> tensor<i32> {
  %zero = arith.constant dense<0> : tensor<i32>
  %sum = linalg.generic {
      indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> ()>], iterator_types = ["reduction"]}
      ins(%x : tensor<?xi32>) outs(%zero : tensor<i32>) {
  ^bb0(%a: i32, %out: i32):
    %next = arith.addi %out, %a : i32
    linalg.yield %next : i32
  } -> tensor<i32>
  return %sum : tensor<i32>
}

func.func @sum_of_indices(%x: tensor<?xi32>) -> tensor<i32> {
  %zero = arith.constant dense<0> : tensor<i32>
  %sum = linalg.generic {
      indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> ()>], iterator_types = ["reduction"]}
      ins(%x : tensor<?xi32>) outs(%zero : tensor<i32>) {
  ^bb0(%a: i32, %out: i32):
    %i = linalg.index 0 : index
    %index = arith.index_cast %i : index to i32
    %term = arith.addi %a, %index : i32
    %next = arith.addi %out, %term : i32
    linalg.yield %next : i32
  } -> tensor<i32>
  return %sum : tensor<i32>
}
