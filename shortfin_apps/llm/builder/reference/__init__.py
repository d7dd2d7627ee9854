"""The forward pass in numpy, f32 and dense: what a compiled model is compared with."""
