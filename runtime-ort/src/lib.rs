//! Runs exported MoH and MoA models in onnxruntime or tract
