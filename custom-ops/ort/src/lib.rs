//! The ai.moh operators as a custom-operator library for onnxruntime
