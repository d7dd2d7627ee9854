"""The reference forward pass for compiled models: in numpy, f32 and dense."""
