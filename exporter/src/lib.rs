//! Exports MoH and MoA checkpoints to ONNX
