"""The numpy reference forward pass for compiled models: in f32, with dequantised weights."""
