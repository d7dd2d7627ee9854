// What IREE makes kernels of: tests/emulated_gpu/test_kernels.py compares them with numpy. Sizes are no multiples
// of a workgroup's, so that the last lanes have nothing to do.

// ---- element by element
func.func @silu_f32(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?xf32>
  %empty = tensor.empty(%n) : tensor<?xf32>
  %result = linalg.generic {
    indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]
  } ins(%x, %y : tensor<?xf32>, tensor<?xf32>) outs(%empty : tensor<?xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %one = arith.constant 1.0 : f32
    %negated = arith.negf %a : f32
    %e = math.exp %negated : f32
    %sum = arith.addf %e, %one : f32
    %quotient = arith.divf %a, %sum : f32
    %product = arith.mulf %quotient, %b : f32
    linalg.yield %product : f32
  } -> tensor<?xf32>
  return %result : tensor<?xf32>
}

func.func @functions_f32(%x: tensor<301xf32>) -> (tensor<301xf32>, tensor<301xf32>, tensor<301xf32>, tensor<301xf32>) {
  %empty = tensor.empty() : tensor<301xf32>
  %results:4 = linalg.generic {
    indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>, affine_map<(i) -> (i)>, affine_map<(i) -> (i)>,
                     affine_map<(i) -> (i)>], iterator_types = ["parallel"]
  } ins(%x : tensor<301xf32>)
    outs(%empty, %empty, %empty, %empty : tensor<301xf32>, tensor<301xf32>, tensor<301xf32>, tensor<301xf32>) {
  ^bb0(%a: f32, %o0: f32, %o1: f32, %o2: f32, %o3: f32):
    %positive = math.absf %a : f32
    %rsqrt = math.rsqrt %positive : f32
    %sin = math.sin %a : f32
    %tanh = math.tanh %a : f32
    %log = math.log %positive : f32
    linalg.yield %rsqrt, %sin, %tanh, %log : f32, f32, f32, f32
  } -> (tensor<301xf32>, tensor<301xf32>, tensor<301xf32>, tensor<301xf32>)
  return %results#0, %results#1, %results#2, %results#3 : tensor<301xf32>, tensor<301xf32>, tensor<301xf32>, tensor<301xf32>
}

func.func @fma_f16(%x: tensor<517xf16>, %y: tensor<517xf16>) -> tensor<517xi16> {
  %product = arith.mulf %x, %y : tensor<517xf16>
  %sum = arith.addf %product, %x : tensor<517xf16>
  %bits = arith.bitcast %sum : tensor<517xf16> to tensor<517xi16>
  return %bits : tensor<517xi16>
}

func.func @fma_bf16(%x: tensor<517xbf16>, %y: tensor<517xbf16>) -> tensor<517xi16> {
  %product = arith.mulf %x, %y : tensor<517xbf16>
  %sum = arith.addf %product, %x : tensor<517xbf16>
  %bits = arith.bitcast %sum : tensor<517xbf16> to tensor<517xi16>
  return %bits : tensor<517xi16>
}

func.func @integers(%x: tensor<517xi32>, %y: tensor<517xi32>) -> (tensor<517xi32>, tensor<517xi32>, tensor<517xi64>) {
  %quotient = arith.divsi %x, %y : tensor<517xi32>
  %smaller = arith.minsi %x, %y : tensor<517xi32>
  %xor = arith.xori %smaller, %quotient : tensor<517xi32>
  %wide_x = arith.extsi %x : tensor<517xi32> to tensor<517xi64>
  %wide_y = arith.extsi %y : tensor<517xi32> to tensor<517xi64>
  %product = arith.muli %wide_x, %wide_y : tensor<517xi64>
  return %quotient, %xor, %product : tensor<517xi32>, tensor<517xi32>, tensor<517xi64>
}

// ---- along rows
func.func @sums_f32(%x: tensor<37x?xf32>) -> tensor<37xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<37xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%empty : tensor<37xf32>) -> tensor<37xf32>
  %sums = linalg.reduce ins(%x : tensor<37x?xf32>) outs(%filled : tensor<37xf32>) dimensions = [1]
    (%a: f32, %b: f32) { %sum = arith.addf %a, %b : f32 linalg.yield %sum : f32 }
  return %sums : tensor<37xf32>
}

func.func @maxima_f16(%x: tensor<19x515xf16>) -> tensor<19xf16> {
  %lowest = arith.constant 0xFC00 : f16
  %empty = tensor.empty() : tensor<19xf16>
  %filled = linalg.fill ins(%lowest : f16) outs(%empty : tensor<19xf16>) -> tensor<19xf16>
  %maxima = linalg.reduce ins(%x : tensor<19x515xf16>) outs(%filled : tensor<19xf16>) dimensions = [1]
    (%a: f16, %b: f16) { %max = arith.maximumf %a, %b : f16 linalg.yield %max : f16 }
  return %maxima : tensor<19xf16>
}

func.func @sums_i8(%x: tensor<23x1029xi8>) -> tensor<23xi32> {
  %zero = arith.constant 0 : i32
  %empty = tensor.empty() : tensor<23xi32>
  %filled = linalg.fill ins(%zero : i32) outs(%empty : tensor<23xi32>) -> tensor<23xi32>
  %sums = linalg.generic {
    indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]
  } ins(%x : tensor<23x1029xi8>) outs(%filled : tensor<23xi32>) {
  ^bb0(%a: i8, %b: i32):
    %wide = arith.extsi %a : i8 to i32
    %sum = arith.addi %wide, %b : i32
    linalg.yield %sum : i32
  } -> tensor<23xi32>
  return %sums : tensor<23xi32>
}

func.func @softmax_f32(%x: tensor<13x777xf32>) -> tensor<13x777xf32> {
  %empty = tensor.empty() : tensor<13x777xf32>
  %result = linalg.softmax dimension(1) ins(%x : tensor<13x777xf32>) outs(%empty : tensor<13x777xf32>) -> tensor<13x777xf32>
  return %result : tensor<13x777xf32>
}

func.func @softmax_f16(%x: tensor<5x64xf16>) -> tensor<5x64xf16> {
  %empty = tensor.empty() : tensor<5x64xf16>
  %result = linalg.softmax dimension(1) ins(%x : tensor<5x64xf16>) outs(%empty : tensor<5x64xf16>) -> tensor<5x64xf16>
  return %result : tensor<5x64xf16>
}

// ---- attention: 3 heads, 128 queries, 192 keys, 64 wide
func.func @attention_f16(
    %q: tensor<3x128x64xf16>, %k: tensor<3x192x64xf16>, %v: tensor<3x192x64xf16>) -> tensor<3x128x64xf32> {
  %scale = arith.constant 0.125 : f16
  %empty = tensor.empty() : tensor<3x128x64xf32>
  %result = iree_linalg_ext.attention {indexing_maps = [
    affine_map<(b, m, n, k1, k2) -> (b, m, k1)>, affine_map<(b, m, n, k1, k2) -> (b, k2, k1)>,
    affine_map<(b, m, n, k1, k2) -> (b, k2, n)>, affine_map<(b, m, n, k1, k2) -> ()>,
    affine_map<(b, m, n, k1, k2) -> (b, m, n)>]}
    ins(%q, %k, %v, %scale : tensor<3x128x64xf16>, tensor<3x192x64xf16>, tensor<3x192x64xf16>, f16)
    outs(%empty : tensor<3x128x64xf32>) {
  ^bb0(%score: f32):
    iree_linalg_ext.yield %score : f32
  } -> tensor<3x128x64xf32>
  return %result : tensor<3x128x64xf32>
}
